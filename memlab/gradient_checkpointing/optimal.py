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

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

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
    fronts = _Fronts(chain)
    n = len(chain)
    return tuple(Plan(chain, fronts.steps(0, n, True, k)) for k in range(len(fronts.front(0, n, True).peak)))


ROOM = 2**50  # more bytes than there are


class _Front(NamedTuple):
    """The best plans of a run of stages, that of least peak first, each with less work than the one before.

    peak: (plans,) of int64, bytes. work: (plans,) of float64. choice: (plans, 3) of int64: where the checkpoint with
    which the plan begins ends (0: it keeps its first stage), and which plans of their fronts go inside and after it.
    """

    peak: Tensor
    work: Tensor
    choice: Tensor


class _Fronts:
    """Fronts of runs of stages, each worked out once. held, again: see `Model`."""

    def __init__(self, chain: Chain):
        self.model, self.known = Model(chain), {}

    def front(self, i: int, j: int, held: bool) -> _Front:
        if (i, j, held) not in self.known:
            self.known[i, j, held] = self.merged(i, j, held)
        return self.known[i, j, held]

    def merged(self, i: int, j: int, held: bool) -> _Front:
        model, again = self.model, j < self.model.n
        own, remembered, next_held = model.keep(i, j, held, again)
        if i == j - 1:
            return _Front(_int64([own]), torch.zeros(1, dtype=torch.float64, device="cpu"), _int64([[0, 0, 0]]))
        after = self.front(i + 1, j, next_held)
        zeros = torch.zeros_like(after.peak)
        keeping = (after.peak + remembered).clamp(min=own), after.work, torch.stack((zeros, zeros, _numbers(zeros)), 1)
        ends = range(i + 1, j)
        owns, sizes = zip(*(model.forget(i, s, j, held, again) for s in ends), strict=True)
        inner = _row([self.front(i, s, True) for s in ends], owns, sizes[0])
        after = _row([self.front(s, j, False) for s in ends], owns, sizes[0])
        # For each peak that the inside or what follows may have, the best of both; each in the room of its end.
        peak = torch.cat((inner.peak, after.peak))
        a, b = (torch.searchsorted(row.peak, peak, right=True) - 1 for row in (inner, after))
        room = peak // ROOM
        both = (inner.peak[a] // ROOM == room) & (after.peak[b] // ROOM == room) & (a >= 0) & (b >= 0)
        peak, room, a, b = peak[both], room[both], a[both], b[both]
        reruns = torch.tensor([model.rerun(i, s) for s in ends], dtype=torch.float64, device="cpu")
        choice = torch.stack((_int64(ends)[room], inner.choice[a], after.choice[b]), 1)
        forgetting = peak % ROOM, inner.work[a] + after.work[b] + reruns[room], choice
        return _best(*map(torch.cat, zip(keeping, forgetting, strict=True)))

    def steps(self, i: int, j: int, held: bool, number: int) -> Steps:
        """Plan number `number` of a front."""
        again, steps = j < self.model.n, ()
        while i < j - 1:
            s, inner, number = self.front(i, j, held).choice[number].tolist()
            if s:
                steps += (self.steps(i, s, True, inner),)
                i, held = s, False
            else:
                steps += (i,)
                i, held = i + 1, self.model.keep(i, j, held, again)[2]
        return (*steps, *range(i, j))


def _row(fronts: list[_Front], owns: tuple[int, ...], remembered: int) -> _Front:
    """Fronts in a row, each in a room of its own: no peak is below the checkpoint's own. choice: numbers of plans."""
    room = torch.repeat_interleave(_int64([len(front.peak) for front in fronts]))
    peak = torch.maximum(torch.cat([front.peak for front in fronts]) + remembered, _int64(owns)[room])
    first = torch.searchsorted(room, room)
    return _Front(room * ROOM + peak, torch.cat([front.work for front in fronts]), _numbers(room) - first)


def _best(peak: Tensor, work: Tensor, choice: Tensor) -> _Front:
    """Without plans to which another is better in one thing and as good in the other; at most `FRONT`."""
    order = torch.argsort(work, stable=True)
    order = order[torch.argsort(peak[order], stable=True)]
    least = torch.cummin(work[order], 0).values
    better = torch.ones_like(order, dtype=torch.bool)
    better[1:] = least[1:] < least[:-1]
    order = order[better]
    if len(order) > FRONT:
        order = order[torch.linspace(0, len(order) - 1, FRONT, dtype=torch.float64, device="cpu").long()]
    return _Front(peak[order], work[order], choice[order])


def _int64(values: Sequence) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _numbers(column: Tensor) -> Tensor:
    return torch.arange(len(column), device="cpu")
