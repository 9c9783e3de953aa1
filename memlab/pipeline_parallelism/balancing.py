"""Which layers each stage gets: in order, so that the dearest stage is as cheap as can be.

    by time     cost of a stage = Σ seconds of its layers, forward and backward: all wait for the slowest
    by bytes    cost of a stage = Σ (static + in flight · saved): the fullest must fit

Time does not care where a layer stands; bytes do, since the first stage has most micro-batches in flight. So a cost
is a number for each layer, or a function of layer and stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Costs = Sequence[float] | Callable[[int, int], float]


def balance(costs: Costs, stages: int, layers: int | None = None) -> list[range]:
    """Cut layers 0 … L − 1 into consecutive stages whose dearest is as cheap as possible, exactly.

    costs: of each layer, bytes or seconds; or a function (layer, stage) → cost, with layers= how many there are.
    Among cuts with the same dearest stage the most even one is taken (least sum of squares: of costs, then of numbers
    of layers), and of these the one that gives later stages more: they have fewer micro-batches in flight.

    Raises ValueError for more stages than layers, and for costs that are negative or not finite.

    >>> balance([1, 1, 1, 3], 2)
    [range(0, 3), range(3, 4)]
    >>> balance([1] * 5, 2)
    [range(0, 2), range(2, 5)]

    Four layers that keep 1 each of every micro-batch, three of which are in flight on stage 0 and one on stage 1:

    >>> balance(lambda layer, stage: (3, 1)[stage], 2, layers=4)
    [range(0, 1), range(1, 4)]
    """
    if callable(costs):
        if layers is None:
            raise ValueError("expected layers=, how many there are, beside a function of costs; found None")
        table = [[costs(layer, stage) for layer in range(layers)] for stage in range(stages)]
    else:
        costs = list(costs)
        if layers not in (None, len(costs)):
            raise ValueError(f"expected a cost for each of {layers} layers, found {len(costs)}")
        layers, table = len(costs), [costs] * stages
    _refuse_stages(layers, stages)
    sums = [_running(row) for row in table]
    dearest = _best(sums, lambda so_far, cost, _: max(so_far, cost), Fraction(0))[0]
    nothing = (Fraction(0), 0)
    _, cut = _best(
        sums,
        lambda so_far, cost, size: None if cost > dearest else (so_far[0] + cost * cost, so_far[1] + size * size),
        nothing,
    )
    return cut


def even_parts(layers: int, stages: int) -> list[range]:
    """As `balance` cuts layers of equal costs: equally many for each stage, and what is left over to the last ones.

    Raises ValueError for more stages than layers.

    >>> even_parts(5, 3)
    [range(0, 1), range(1, 3), range(3, 5)]
    """
    _refuse_stages(layers, stages)
    least, more = divmod(layers, stages)
    ends = [stage * least + max(0, stage - (stages - more)) for stage in range(stages + 1)]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def parts_of_stages(parts: Sequence[Sequence[int]] | None, layers: int, stages: int) -> tuple[range, ...]:
    """These parts, as ranges; or for None equally many layers for each stage.

    Raises ValueError unless each stage has a part, none is empty, and together they are all layers in order.

    >>> parts_of_stages([[0, 1, 2], [3]], 4, 2)
    (range(0, 3), range(3, 4))
    """
    parts = tuple(even_parts(layers, stages) if parts is None else parts)
    if len(parts) != stages:
        raise ValueError(f"expected {stages} parts, one for each stage, found {len(parts)}")
    numbers = [list(part) for part in parts]
    if not all(numbers):
        raise ValueError(f"expected a layer on every stage, found none on stage {numbers.index([])}: {list(parts)}")
    if [number for part in numbers for number in part] != list(range(layers)):
        raise ValueError(
            f"expected parts that are layers 0 to {layers - 1} in order, each once, found {list(parts)}; "
            "balance(costs, stages) makes such"
        )
    return tuple(range(part[0], part[-1] + 1) for part in numbers)


def _refuse_stages(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise ValueError(
            f"expected 1 to {layers} stages for {layers} layers, found {stages}; every stage needs a layer"
        )


def _best(sums: list[list[Fraction]], add: Callable, nothing) -> tuple:
    """The least value of all cuts, and the cut. add: (value so far, a stage's cost, its layers) → value, or None."""
    layers, stages = len(sums[0]) - 1, len(sums)
    best = {0: (nothing, [])}
    for stage, total in enumerate(sums):
        reached = {}
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            options = []
            for begin, (value, cut) in best.items():
                if begin < end and (added := add(value, total[end] - total[begin], end - begin)) is not None:
                    options.append((added, begin, cut))
            if options:
                value, begin, cut = min(options, key=lambda option: option[:2])
                reached[end] = (value, [*cut, range(begin, end)])
        best = reached
    return best[layers]


def _running(row: Sequence[float]) -> list[Fraction]:
    """Sums of the first 0, 1, 2 … costs. Fractions: so that equal costs are equal, whatever they are added to."""
    total = [Fraction(0)]
    for number, cost in enumerate(row):
        if not math.isfinite(cost) or cost < 0:
            raise ValueError(f"expected costs of at least 0, found {cost} for layer {number}")
        total.append(total[-1] + Fraction(cost))
    return total
