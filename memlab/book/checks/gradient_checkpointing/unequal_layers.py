"""Exercise 5 of chapter 08: where to cut a chain of unequal layers, so that the worst moment is the least."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.gradient_checkpointing.witness import forgetful
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.memory_timeline import Meter

Chain = tuple[tuple[int, ...], tuple[int, ...]]  # saved_bytes, input_bytes


def _random(layers: int, seed: int) -> Chain:
    draw = random.Random(seed)
    inputs = tuple(draw.choice([8, 64, 512, 4096]) * draw.randint(1, 9) for _ in range(layers))
    return tuple(c + 4 * draw.randint(0, 2000) for c in inputs), inputs


_CHAINS: dict[str, Chain] = {  # all sizes are multiples of 4, so that tensors have them
    "one layer": ((900,), (100,)),
    "two layers": ((4000, 300), (400, 200)),
    "six equal layers": ((400,) * 6, (40,) * 6),
    "nine layers that save their input alone": ((400,) * 9, (400,) * 9),
    "one wide layer in the middle": ((40, 40, 2000, 40, 40, 40), (40, 40, 40, 32, 32, 32)),
    "a narrow place off the middle": ((240,) * 6, (240, 240, 200, 200, 20, 240)),
    "images that shrink": (tuple(3 * 2 ** (18 - i) for i in range(10)), tuple(2 ** (18 - i) for i in range(10))),
    "inputs that grow": (tuple(100 * (i + 2) for i in range(9)), tuple(100 * (i + 1) for i in range(9))),
} | {f"ten random layers (seed {seed})": _random(10, seed) for seed in range(8)}
_LONG = {f"{n} random layers (seed {n})": _random(n, n) for n in (23, 30)}


def peak_bytes(cuts: Sequence[int], saved: Sequence[int], inputs: Sequence[int]) -> int:
    """The most bytes that backward finds: a segment's layers, computed again, and the inputs of those before it."""
    starts, waiting, peak = [0, *cuts, len(saved)], 0, 0
    for start, stop in itertools.pairwise(starts):
        peak = max(peak, waiting + sum(saved[start:stop]))
        waiting += inputs[start]
    return peak


def _all_cuts(layers: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(range(1, layers), n) for n in range(layers))


@functools.cache
def _least(saved: tuple[int, ...], inputs: tuple[int, ...]) -> int:
    """The lowest peak: of all plans where they can be tried, else by what waits at least, for growing budgets."""
    if len(saved) <= 10:
        return min(peak_bytes(cuts, saved, inputs) for cuts in _all_cuts(len(saved)))
    sums = [0, *itertools.accumulate(saved)]
    peaks: list[set[tuple[int, int]]] = [{(0, 0)}]  # for each stop: (bytes waiting, peak so far), none worse in both
    for stop in range(1, len(sums)):
        reached = {
            (waiting + inputs[start], max(peak, waiting + sums[stop] - sums[start]))
            for start in range(stop)
            for waiting, peak in peaks[start]
        }
        best, kept = float("inf"), set()
        for waiting, peak in sorted(reached):
            if peak < best:
                best = peak
                kept.add((waiting, peak))
        peaks.append(kept)
    return min(peak for _, peak in peaks[-1])


@exercise
def cuts(answer: object) -> str:
    """Exercise 5: (saved_bytes, input_bytes) → the first layer of each segment but the first; the lowest peak."""
    function = a_function(answer, "cuts(saved_bytes, input_bytes)")
    for name, (saved, inputs) in (_CHAINS | _LONG).items():
        shown = f"cuts({list(saved)}, {list(inputs)})" if len(saved) <= 6 else "cuts(saved_bytes, input_bytes)"
        where, given = f"{name}: {shown}", (list(saved), list(inputs))
        with NoTensors():
            found = function(*given)
        if given != (list(saved), list(inputs)):
            raise Wrong(f"{where}: your function has changed the lists that it was given.")
        if not isinstance(found, (list, tuple)) or any(type(cut) is not int for cut in found):
            raise Wrong(f"{where}: expected a list of layers (int), found {type(found).__name__} {str(found)[:40]}.")
        if any(a >= b for a, b in itertools.pairwise([0, *found, len(saved)])):
            raise Wrong(
                f"{where}: expected cuts that rise, from 1 to {len(saved) - 1}, found {list(found)[:12]}. A cut is the "
                "first layer of a segment; that of the first segment goes without saying."
            )
        measure = metered_bytes if name in _CHAINS else peak_bytes
        mine, least = measure(found, saved, inputs), _least(saved, inputs)
        if mine > least:
            raise Wrong(
                f"{where}: cut at {list(found)} the worst moment holds {mine:,} B; {least:,} B are enough. "
                f"{_look(list(found), saved, inputs)}"
            )
    return "The least there is, by the meter as by the formula; on up to ten layers every other plan was tried."


def _look(found: list[int], saved: tuple[int, ...], inputs: tuple[int, ...]) -> str:
    """What a plan that is not the best looks like."""
    layers = len(saved)
    if not found and layers > 1:
        return "One segment forgets everything, and then all of it is there at once."
    if layers > 2 and found == list(range(1, layers)):
        return "Each layer is a segment, so every input waits."
    sizes = [b - a for a, b in itertools.pairwise([0, *found, layers])]
    if max(sizes) - min(sizes) <= 1 and len(set(saved)) > 1:
        return "Segments of as many layers each suit layers that are alike."
    least = _least(saved, (0,) * layers)
    if peak_bytes(found, saved, (0,) * layers) == least:
        return "No segment could be smaller; but what waits for them? A cut at a narrow place costs less."
    return "Where is the worst moment of your plan: with many inputs waiting, or a large segment?"


class _Layer(torch.autograd.Function):
    """x: (n,) → (m,). Saves x, and `more` elements beside it. `found` gets the meter's bytes when backward has both."""

    @staticmethod
    def forward(ctx, x: Tensor, m: int, more: int, meter: Meter, found: list[int]) -> Tensor:
        ctx.save_for_backward(x, x.new_zeros(more))
        ctx.meter, ctx.found = meter, found
        return x.new_zeros(m)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, more = ctx.saved_tensors
        ctx.found.append(ctx.meter.timeline.totals[-1] - grad.untyped_storage().nbytes())
        return torch.zeros_like(x), None, None, None, None


def metered_bytes(cuts: Sequence[int], saved: Sequence[int], inputs: Sequence[int]) -> int:
    """What the meter finds beside the gradient, at most, when layers of such sizes (multiples of 4) run backward."""
    found: list[int] = []
    sizes = [(n // 4, m // 4, (s - n) // 4) for (n, m), s in zip(itertools.pairwise([*inputs, 0]), saved, strict=True)]

    def segment(x: Tensor, start: int, stop: int) -> Tensor:
        for _, m, more in sizes[start:stop]:
            x = _Layer.apply(x, m, more, meter, found)
        return x

    with Meter() as meter:
        x = torch.zeros(sizes[0][0], requires_grad=True)
        for start, stop in itertools.pairwise([0, *cuts, len(saved)]):
            x = forgetful(segment, x, start, stop)
        torch.autograd.backward(x, torch.zeros(0))
    return max(found)
