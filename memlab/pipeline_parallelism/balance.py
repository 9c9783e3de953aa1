"""Which layers each stage gets: in order, so that the most expensive stage is as cheap as can be."""

from __future__ import annotations

from collections.abc import Sequence


def balance(costs: Sequence[float], stages: int, weights: Sequence[float] | None = None) -> list[range]:
    """Cut layers 0 … L − 1 into consecutive stages whose dearest is as cheap as possible, exactly.

    costs: of each layer, bytes or seconds. weights: by which a stage's costs are multiplied, such as the micro-batches
    it has in flight; None: 1. Raises ValueError for more stages than layers.

    >>> balance([1, 1, 1, 3], 2)
    [range(0, 3), range(3, 4)]
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"expected 1 to {layers} stages for {layers} layers, found {stages}; every stage needs a layer"
        )
    weights = [1] * stages if weights is None else list(weights)
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = {0: (0, [])}
    for stage in range(stages):
        reached = {}
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            options = [
                (max(dearest, weights[stage] * (total[end] - total[begin])), [*cuts, range(begin, end)])
                for begin, (dearest, cuts) in best.items()
                if begin < end
            ]
            reached[end] = min(options, key=lambda option: option[0])
        best = reached
    return best[layers][1]
