"""Exercise 3 of chapter 03: two parts of an online softmax, merged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.memory_timeline import Meter

_HEADS, _ROWS, _WIDTH = 2, 12, 32
_SIZES = (5, 64, 1, 17, 2, 40)
_SPARE = 6  # triples alive beside the two given

_Part = tuple[Tensor, Tensor]  # scores (heads, rows, keys), values (heads, keys, width)
_Sums = tuple[Tensor, Tensor, Tensor]


@functools.cache
def _data() -> dict[str, tuple[list[_Part], float]]:
    """Scores and values in pieces, and how near the sums must come, relative to those of the weights."""
    draw = torch.Generator().manual_seed(0)
    parts = [
        tuple(torch.randn(_HEADS, *shape, generator=draw, dtype=torch.float64) for shape in ((_ROWS, n), (n, _WIDTH)))
        for n in _SIZES
    ]

    def scores(change: Callable) -> list[_Part]:
        return [(change(number, s), v) for number, (s, v) in enumerate(parts)]

    def seen(number: int, s: Tensor) -> Tensor:
        """Row i sees the keys of piece i and of its neighbours; the last rows see none."""
        i = torch.arange(_ROWS)[:, None]
        return s.masked_fill((i - number).abs() > 1, -math.inf)

    return {
        "two halves": ([parts[1], parts[5]], 1e-12),
        "pieces of different sizes": (parts, 1e-12),
        "scores that grow from piece to piece": (scores(lambda number, s: s + 40 * number), 1e-12),
        "scores in the thousands": (scores(lambda number, s: 3000 * s), 1e-12),
        "scores far below 0": (scores(lambda number, s: s - 5000 - 3 * number), 1e-12),
        "rows that see no key of a piece": (scores(seen), 1e-12),
        "FP32": ([(s.float(), v.float()) for s, v in parts], 1e-5),
    }


def _of(part: _Part) -> _Sums:
    """(m, z, a) of some keys; where a row sees none of them, −∞ and zeros."""
    scores, values = part
    m = scores.amax(-1, keepdim=True)
    weights = (scores - m.clamp(min=torch.finfo(m.dtype).min)).exp()
    return m, weights.sum(-1, keepdim=True), weights @ values


def _together(parts: list[_Part]) -> _Part:
    return torch.cat([s for s, _ in parts], -1), torch.cat([v for _, v in parts], -2)


@exercise
def merge(answer: object) -> str:
    """Exercise 3: two (m, z, a) → that of all their keys, in whatever order and grouping."""
    function = a_function(answer, "merge(one, other)")
    for name, (parts, tolerance) in _data().items():
        whole = _together(parts)
        sums = _of(parts[0])
        for number, part in enumerate(parts[1:], 2):
            sums = _merged(function, sums, _of(part), name)
            _near(sums, _together(parts[:number]), tolerance, f"{name}, the first {number} of them")
        backwards = _of(parts[-1])
        for part in parts[-2::-1]:
            backwards = _merged(function, _of(part), backwards, name)
        _near(backwards, whole, tolerance, f"{name}, from the last to the first")
        if len(parts) > 2:
            two = (functools.reduce(function, map(_of, side)) for side in (parts[3:], parts[:3]))
            _near(_merged(function, *two, name), whole, tolerance, f"{name}, in two halves")
    return _held(function)


def _merged(function: Callable, one: _Sums, other: _Sums, name: str) -> _Sums:
    before = [tensor.clone() for tensor in (*one, *other)]
    found = function(one, other)
    if not isinstance(found, tuple) or len(found) != 3:
        raise Wrong(f"{name}: expected (m, z, a), found {type(found).__name__}.")
    for what, tensor, like in zip("mza", found, one, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape != like.shape or tensor.dtype != like.dtype:
            kind = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise Wrong(f"{name}: expected {what} of {like.dtype} {tuple(like.shape)}, found {kind}.")
    if not all(map(torch.equal, before, (*one, *other))):
        raise Wrong(f"{name}: merge has written to what it was given; others may still need it.")
    if torch.allclose(found[1], one[1] + other[1]) and not torch.allclose(one[0], other[0]):
        raise Wrong(
            f"{name}: z is the sum of the two that were given. But these are sums of exp(s − m), each with an m of "
            "its own: bring both to the larger one first."
        )
    return found


def _near(found: _Sums, whole: _Part, tolerance: float, where: str) -> None:
    """Raise Wrong unless m is the maximum, and z and a are the sums of weights about it."""
    m, z, a = (tensor.double() for tensor in found)
    right_m, right_z, right_a = _of(tuple(tensor.double() for tensor in whole))
    if any(tensor.isnan().any() for tensor in (m, z, a)):
        none = (whole[0] == -math.inf).any()
        look = "where neither has seen a key, m is −∞ in both, and −∞ − (−∞) is no number." if none else "why?"
        raise Wrong(f"{where}: there are NaNs in what you return: {look}")
    if not torch.equal(m, right_m):
        look = " That is their sum." if torch.allclose(m, right_m * 2) else ""
        if not m.isfinite().all() or not right_m.isfinite().all():
            look = " Who has seen no key has seen no score: −∞."
        raise Wrong(f"{where}: m is not the largest score; it is off by up to {_off(m, right_m):.2g}.{look}")
    result, lse = right_a / right_z, right_m + right_z.log()
    if torch.allclose(a, result.nan_to_num(), atol=1e-9) and not torch.allclose(right_z, torch.ones_like(right_z)):
        raise Wrong(
            f"{where}: a is the result, already divided by z. Then it can't be merged again; divide at the end."
        )
    for what, tensor, right in (("z", z, right_z), ("a", a, right_a)):
        off = ((tensor - right).abs() / right_z.clamp(min=1)).max().item()
        if off <= tolerance:
            continue
        look = ""
        if what == "z" and torch.allclose(tensor, lse, atol=1e-9):
            look = " That is the log-sum-exp; z is asked for, the sum of exp(s − m)."
        elif not tensor.isfinite().all():
            look = " It overflows: an exponent must never be above 0."
        elif off < 1e-6:
            look = " Is everything in the dtype that came in?"
        elif what == "a":
            look = " It needs the same correction as z."
        else:
            look = " Each z was summed about an m of its own; exp(that m − the larger) brings it to the larger one."
        raise Wrong(f"{where}: {what} is off by up to {off:.2g} of z.{look}")


def _off(found: Tensor, right: Tensor) -> float:
    return (found - right).abs().nan_to_num().max().item()


def _held(function: Callable) -> str:
    """Raise Wrong for what merging many parts leaves behind or needs at once."""
    parts = [_of(part) for part in _data()["pieces of different sizes"][0]] * 4
    with Meter(inputs=parts) as meter:
        merged = functools.reduce(function, parts)
    timeline, triple = meter.timeline, sum(tensor.nbytes for tensor in parts[0])
    if (held := timeline.totals[-1] - timeline.totals[0]) > triple:
        raise Wrong(
            f"the values are right, and after merging {len(parts)} parts {held:,} B are alive; one m, z and a are "
            f"{triple:,} B."
        )
    if (most := (timeline.peak_bytes - timeline.totals[0]) / triple) > _SPARE:
        raise Wrong(
            f"the values are right, and merging two parts takes {most:.1f} times their bytes at once, not a few."
        )
    del merged
    return f"{len(parts)} parts, in any order and grouping; what would go between GPUs is {triple:,} B, not the keys."
