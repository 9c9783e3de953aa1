"""Exercise 5 of chapter 09: which tensors to send under a byte budget, and when to call them back."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

from memlab.book.checks.answers import Wrong, a_function, exercise, plain
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.units import MiB

Tensor = tuple[int, float, float]  # nbytes, saved_ms, wanted_ms


def _chain(layers: int, nbytes: int) -> list[Tensor]:
    """A step of equal layers: forward takes a millisecond for each, backward two; backward begins at 0."""
    return [(nbytes, float(i - layers), 2.0 * (layers - 1 - i)) for i in range(layers)]


def _random(seed: int) -> list[Tensor]:
    draw = random.Random(seed)
    return [(draw.randint(1, 60) * 512, float(-draw.randint(1, 40)), float(draw.randint(0, 80))) for _ in range(10)]


_TENSORS = {
    "six equal layers": _chain(6, 4 * MiB),
    "a long one and two that are better together": [
        (60, -10.0, 10.0),
        (50, -9.0, 8.0),
        (50, -8.0, 9.0),
        (5, -7.0, 1.0),
    ],
    "a large one that sleeps little": [(100, -1.0, 1.0), (40, -6.0, 6.0), (40, -5.0, 5.0), (30, -4.0, 3.0)],
    "a small one that sleeps longest": [(10, -50.0, 50.0), (95, -9.0, 9.0), (15, -8.0, 8.0)],
    "two that are alike": [(100, -3.0, 2.0), (100, -3.0, 2.0), (40, -2.0, 1.0)],
    "one tensor": [(100, -1.0, 5.0)],
    "no tensor": [],
} | {f"ten random tensors (seed {seed})": _random(seed) for seed in range(6)}


# ---- whom to send


def _spared(tensors: Sequence[Tensor], chosen: Sequence[int]) -> float:
    return sum(tensors[i][0] * (tensors[i][2] - tensors[i][1]) for i in chosen)


def _best(tensors: Sequence[Tensor], budget: int) -> list[int]:
    """The best choice, by trying all."""
    chosen, most = [], 0.0
    for mask in itertools.product((False, True), repeat=len(tensors)):
        if sum(tensor[0] for tensor in itertools.compress(tensors, mask)) <= budget:
            these = list(itertools.compress(range(len(tensors)), mask))
            if (spared := _spared(tensors, these)) > most:
                chosen, most = these, spared
    return chosen


@functools.cache
def _choices() -> dict[tuple[str, int], list[int]]:
    asked = {}
    for name, tensors in _TENSORS.items():
        total = sum(nbytes for nbytes, *_ in tensors)
        least = min((nbytes for nbytes, *_ in tensors), default=0)
        for budget in sorted({0, least, total // 4, total // 3, total // 2, 100, max(0, total - 1), total}):
            asked[name, budget] = _best(tensors, budget)
    return asked


@exercise
def whom_to_send(answer: object) -> str:
    """Exercise 5, first part: (tensors, budget_bytes) → indices of those whose bytes × idle time are the most."""
    function = a_function(answer, "whom_to_send(tensors, budget_bytes)")
    ranked = 0
    for (name, budget), right in _choices().items():
        tensors, where = _TENSORS[name], f"{name}, budget_bytes = {budget:,}"
        found = _asked(function, tensors, budget, where)
        if not isinstance(found, (list, tuple, set, frozenset)) or any(type(i) is not int for i in found):
            raise Wrong(f"{where}: expected a list of indices (int) into tensors, found {str(found)[:60]}.")
        if len(set(found)) < len(found) or not set(found) <= set(range(len(tensors))):
            raise Wrong(
                f"{where}: expected each index at most once, from 0 to {len(tensors) - 1}; found {sorted(found)}."
            )
        if (nbytes := sum(tensors[i][0] for i in found)) > budget:
            raise Wrong(f"{where}: {sorted(found)} have {nbytes:,} B together, {nbytes - budget:,} too many.")
        most, mine = _spared(tensors, right), _spared(tensors, found)
        ranked += _ranked(tensors, budget, lambda t: -t[0] * (t[2] - t[1])) < most
        if mine < most:
            raise Wrong(
                f"{where}: {sorted(found)} spare {mine:,.0f} byte-ms, {right} spare {most:,.0f}, with "
                f"{sum(tensors[i][0] for i in right):,} B.{_look(tensors, budget, mine)}"
            )
    return f"Taking the largest area first, in one pass, is as good in all but {ranked} of {len(_choices())} tasks."


def _asked(function, tensors: Sequence[Tensor], limit: float, where: str) -> object:
    given = list(tensors)
    with NoTensors():
        found = function(given, limit)
    if given != list(tensors):
        raise Wrong(f"{where}: your function has changed the list of tensors that it was given.")
    return found


def _ranked(tensors: Sequence[Tensor], budget: int, key) -> float:
    """What one tensor after the other spares, in an order, each that still fits."""
    chosen = []
    for i in sorted(range(len(tensors)), key=lambda i: key(tensors[i])):
        if tensors[i][0] <= budget:
            chosen.append(i)
            budget -= tensors[i][0]
    return _spared(tensors, chosen)


def _look(tensors: Sequence[Tensor], budget: int, mine: float) -> str:
    """How a choice that is not the best may have come about."""
    for key, what in (
        (lambda t: -t[0] * (t[2] - t[1]), "the largest area, bytes × time, first"),
        (lambda t: t[1] - t[2], "the longest away first"),
        (lambda t: -t[0], "the largest first"),
        (lambda t: t[1], "whoever is saved first, first"),
        (lambda t: t[0], "the smallest first"),
    ):
        if mine == _ranked(tensors, budget, key):
            return f" Yours are what you get if you take {what}; what is taken first can keep others out."
    return " Are there choices that you have not tried?"


# ---- when to call back


def _latest(tensors: Sequence[Tensor], bytes_per_ms: float) -> list[float]:
    begins, free_until = [0.0] * len(tensors), float("inf")
    for i in sorted(range(len(tensors)), key=lambda i: (-tensors[i][2], -i)):
        free_until = begins[i] = min(tensors[i][2], free_until) - tensors[i][0] / bytes_per_ms
    return begins


_ORDERS = _TENSORS | {
    "two at once, then a large one": [(30, -1.0, 4.0), (20, -2.0, 4.0), (500, -3.0, 9.0)],
    "pauses between them": [(10, -3.0, 100.0), (10, -2.0, 50.0), (10, -1.0, 2.0)],
    "a large one behind a small one": [(1000, -4.0, 11.0), (10, -3.0, 10.0)],
}


@exercise
def when_to_call(answer: object) -> str:
    """Exercise 5, second part: (tensors, bytes_per_ms) → the latest moment at which each may begin its way back."""
    function = a_function(answer, "when_to_call(tensors, bytes_per_ms)")
    for name, tensors in _ORDERS.items():
        least = min((nbytes for nbytes, *_ in tensors), default=1)
        for rate in (least / 4, float(least), 7.0, 3.0 * least):
            where = f"{name}, bytes_per_ms = {rate:,}"
            found = _asked(function, tensors, rate, where)
            found = list(map(plain, found)) if isinstance(found, (list, tuple)) else found
            if not isinstance(found, list) or any(type(begin) not in (int, float) for begin in found):
                raise Wrong(f"{where}: expected a list of moments (float), found {str(found)[:60]}.")
            if len(found) != len(tensors):
                raise Wrong(f"{where}: expected {len(tensors)} moments, one for each tensor, found {len(found)}.")
            _in_time(tensors, rate, found, where)
    tensors = _TENSORS["six equal layers"]
    early = [_held_early(tensors, begins) for begins in ([0.0] * 6, _at_a_layers_pace(tensors))]
    return f"Six layers, called at once: {early[0]:,.0f} MiB-ms on the device before need; called so, {early[1]:,.0f}."


def _at_a_layers_pace(tensors: Sequence[Tensor]) -> list[float]:
    """The latest moments behind a link that brings one of them in as long as a layer's backward takes."""
    return _latest(tensors, tensors[0][0] / 2)


def _held_early(tensors: Sequence[Tensor], begins: Sequence[float]) -> float:
    return (
        sum(nbytes * max(0.0, wanted - begin) for (nbytes, _, wanted), begin in zip(tensors, begins, strict=True)) / MiB
    )


def _in_time(tensors: Sequence[Tensor], rate: float, found: list[float], where: str) -> None:
    right = _latest(tensors, rate)
    spare = 1e-6 * (1 + max((abs(begin) for begin in right), default=0))
    if all(abs(mine - due) <= spare for mine, due in zip(found, right, strict=True)):
        return
    last = max(range(len(tensors)), key=lambda i: (tensors[i][2], i))
    ends = [begin + nbytes / rate for (nbytes, *_), begin in zip(tensors, found, strict=True)]
    if all(abs(mine - tensors[i][0] / rate - right[i]) <= spare for i, mine in enumerate(found)):
        raise Wrong(f"{where}: these are the moments of arrival; when does each begin?")
    if sorted(found) == sorted(right):
        raise Wrong(f"{where}: the moments are right, and not in the order of the list.")
    for i, (_, _, wanted) in enumerate(tensors):
        if ends[i] > wanted + spare:
            raise Wrong(
                f"{where}: tensor {i} begins at {found[i]:g} ms and is there at {ends[i]:g}; wanted at {wanted:g}."
            )
    busy = sorted(range(len(tensors)), key=lambda i: found[i])
    for one, other in itertools.pairwise(busy):
        if ends[one] > found[other] + spare:
            raise Wrong(
                f"{where}: the link has tensor {one} until {ends[one]:g} ms, and tensor {other} begins at "
                f"{found[other]:g}. One at a time: whoever is wanted earlier must come earlier still."
            )
    i = next((i for i in range(len(tensors)) if found[i] < right[i] - spare), last)
    raise Wrong(
        f"{where}: each is there in time, and not as late as can be: tensor {i} begins at {found[i]:g} ms and could at "
        f"{right[i]:g}; meanwhile its {tensors[i][0]:,} B lie on the device for nothing."
    )
