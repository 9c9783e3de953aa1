"""The least recomputation under a budget of bytes: a dynamic programme over a chain of unequal stages.

What a plan does inside stages i … j − 1 depends on nothing outside but the bytes left for it (see `plan`):

    keep i              peak = max( of stage i,              tape of i  + peak(i + 1, j) )
    checkpoint i … s    peak = max( of forwards i … s − 1,   input of i + peak(s, j),   input of i + peak(i, s) )
                        work = work(s, j) + work(i, s) + running i … s − 1 once more

So the best plans of (i, j) are made of best plans of (i + 1, j), of (s, j) and of (i, s); and "best" is a *front*: for
every peak the least work. Fronts are merged from short runs of stages to the whole chain, whose front is the answer to
every budget at once. With a smaller budget one can only walk back along it, to plans of smaller peak.

Equal stages, of which only one can be taped at a time, have a closed form: with c inputs remembered at once, n of them
need r·n − C(c + r, r − 1) extra forwards, where C(c + r − 1, c) < n ≤ C(c + r, c).

Sources: Griewank and Walther 2000 (equal steps, "Revolve"), Beaumont et al. 2019 (unequal ones, tapes).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from memlab.gradient_checkpointing.chain import Chain
from memlab.gradient_checkpointing.plan import Model, Plan, Steps
from memlab.units import parse_bytes

FRONT = 1000
"""A front with more plans is thinned to so many. Those left are as good as they say, but a better one may be gone."""


def plan_segments(chain: Chain, budget_bytes: int | str) -> Plan:
    """The plan that recomputes least, of all whose predicted peak is within the budget.

    chain: of `measure_chain`. budget_bytes: an int, or text such as "16 MiB", for all that the Meter counts, so also
      parameters, buffers, input and gradients. Held to it is the prediction, `Plan.peak_bytes`, which is never below
      what the Meter sees, unless backward runs inside autocast.

    A smaller budget never gives a plan with a higher predicted peak. A front of more than `FRONT` plans is thinned:
    then the plan is the one that recomputes least of those left.

    Raises ValueError when no plan is within the budget, and says the least that is.   Source: see the page's head.
    """
    budget = parse_bytes(budget_bytes)
    plans = tradeoff(chain)
    fitting = [plan for plan in plans if plan.peak_bytes <= budget]
    if not fitting:
        raise ValueError(
            f"expected a budget of at least {plans[0].peak_bytes:,} bytes, which the plan {plans[0]} needs; found "
            f"{budget:,}; raise the budget, make the batch smaller, or cut the largest stages into several"
        )
    return fitting[-1]


def tradeoff(chain: Chain) -> list[Plan]:
    """All plans worth having, `FRONT` at most: from the least peak, with the most work, to no recomputation at all."""
    return list(_curve(chain))


@lru_cache(maxsize=8)
def _curve(chain: Chain) -> tuple[Plan, ...]:
    return tuple(Plan(chain, best.steps) for best in _Fronts(chain).front(0, len(chain), True))


class Best(NamedTuple):
    """A plan for some stages, to which no other is better in peak or work and as good in the other."""

    peak: int
    work: int
    steps: Steps


class _Fronts:
    """Fronts of runs of stages, each worked out once: the plan of least peak first, each with less work than the one
    before. held: as of `Model`.
    """

    def __init__(self, chain: Chain):
        self.model = Model(chain)
        self.known: dict[tuple[int, int, bool], list[Best]] = {}

    def front(self, i: int, j: int, held: bool) -> list[Best]:
        """The front of stages i … j − 1."""
        if (i, j, held) not in self.known:
            self.known[i, j, held] = self.merged(i, j, held)
        return self.known[i, j, held]

    def merged(self, i: int, j: int, held: bool) -> list[Best]:
        model, again = self.model, j < self.model.n
        own, remembered, next_held = model.keep(i, j, held, again)
        if i == j - 1:
            return [Best(own, 0, (i,))]
        found = [  # peak, work, the plan of a checkpoint that comes first (None: stage i is kept), the plan after
            (max(own, remembered + after.peak), after.work, None, after) for after in self.front(i + 1, j, next_held)
        ]
        for s in range(i + 1, j):
            own, remembered = model.forget(i, s, j, held, again)
            rerun = model.rerun(i, s)
            for inner, after in pairs(self.front(i, s, True), self.front(s, j, False)):
                peak = max(own, remembered + max(inner.peak, after.peak))
                found.append((peak, inner.work + after.work + rerun, inner, after))
        front: list[Best] = []
        for peak, work, inner, after in sorted(found, key=lambda plan: plan[:2]):
            if not front or work < front[-1].work:
                front.append(Best(peak, work, (i if inner is None else inner.steps, *after.steps)))
        if len(front) > FRONT:
            front = [front[round(k * (len(front) - 1) / (FRONT - 1))] for k in range(FRONT)]
        return front


def pairs(one: list[Best], other: list[Best]) -> Iterator[tuple[Best, Best]]:
    """For each peak that a plan of either front has, the best of both within it."""
    a = b = 0
    peak = max(one[0].peak, other[0].peak)
    while True:
        while a + 1 < len(one) and one[a + 1].peak <= peak:
            a += 1
        while b + 1 < len(other) and other[b + 1].peak <= peak:
            b += 1
        yield one[a], other[b]
        following = [front[k + 1].peak for front, k in ((one, a), (other, b)) if k + 1 < len(front)]
        if not following:
            return
        peak = min(following)
