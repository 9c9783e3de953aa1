"""The least recomputation under a budget of bytes: a dynamic programme over a chain of unequal stages.

A plan says of a run of stages i … j, from the first on: *keep* the tape of stage i; or put a *checkpoint* around stages
i … s − 1, remember only their input, and when backward comes to them, run them again by a plan of their own. So a plan
is a list with lists in it,

    [0 1] [[2] 3 4] 5 6        brackets are checkpoints: stage 2 is run three times, 0, 1, 3 and 4 twice

and to run one is a loop of four lines over nested `checkpoint`s. Its bytes add up the same way. Write peak(i, j) for
stages i … j − 1, tapes, gradients and all, above what is remembered outside of them:

    keep i              max( forward of i,       tape of i  + peak(i + 1, j),  backward of i )
    checkpoint i … s    max( forwards i … s − 1, input of i + peak(s, j),      input of i + peak(i, s) )

What a run of stages does inside depends on nothing outside but the bytes left for it. So the best plans of (i, j) are
made of best plans of (i + 1, j), of (s, j) and of (i, s); and "best" is a front: for every peak the least work. Fronts
are merged from short runs of stages to the whole chain, and hold the answer for every budget at once.

Sources: Griewank and Walther 2000 (equal steps: binomial schedules), Beaumont et al. 2019 (unequal ones, tapes).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from torch import Tensor

from memlab.gradient_checkpointing.chain import Chain
from memlab.gradient_checkpointing.hooks import checkpoint
from memlab.units import parse_bytes

Steps = tuple["int | Steps", ...]
"""A stage's number: keep its tape. A tuple of steps: a checkpoint around them."""

FRONT = 500
"""A front with more plans is thinned to so many: those left are as good as they say, but a better one may be gone."""


def run_plan(steps: Steps, layers: Sequence[Callable], x: Tensor) -> Tensor:
    """layers[-1](… layers[0](x)), remembering what `steps` say."""
    for step in steps:
        x = layers[step](x) if isinstance(step, int) else checkpoint(partial(run_plan, step, layers), x)
    return x


@dataclass(frozen=True)
class Plan:
    """What to remember of a chain. `str(plan)` draws it; `plan.run(layers, x)` does it.

    Raises ValueError when the steps are not the chain's stages in order.
    """

    chain: Chain
    steps: Steps

    def __post_init__(self):
        stages = list(_flat(self.steps))
        if stages != list(range(len(self.chain))):
            raise ValueError(f"expected steps through stages 0 to {len(self.chain) - 1} in order, found {stages}")
        object.__setattr__(self, "steps", _useful(self.chain, self.steps))

    def run(self, layers: Sequence[Callable], x: Tensor) -> Tensor:
        """The result of the last layer; its backward gives the same gradients, bit for bit, as without a plan.

        Raises ValueError for other than the measured number of layers, or an x of another shape, dtype or device.
        """
        self.chain.check(layers, x)
        return run_plan(self.steps, layers, x)

    @cached_property
    def peak_bytes(self) -> int:
        """Of forward and backward, as the Meter counts: storages, with parameters, input and gradients."""
        return self.chain.resident_bytes + _Model(self.chain).peak(
            self.steps, 0, len(self.chain), held=True, again=False
        )

    @cached_property
    def recomputed(self) -> float:
        """Work done again in backward: FLOPs, or seconds if the chain was measured in them."""
        return _Model(self.chain).recomputed(self.steps)

    @property
    def runs(self) -> list[int]:
        """How often each stage's forward is run; a last run may stop half-way, at the last tensor that is saved."""
        return _Model(self.chain).runs(self.steps)

    def __str__(self) -> str:
        return _drawn(self.steps)[1:-1]


def plan_segments(chain: Chain, budget_bytes: int | str) -> Plan:
    """The plan that recomputes least, of all whose peak is within the budget: the total as the Meter counts it.

    chain: of `measure_chain`. budget_bytes: an int, or text such as "16 MiB".
    A smaller budget never gives a plan with a higher peak.

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


@lru_cache(maxsize=8)
def _curve(chain: Chain) -> tuple[Plan, ...]:
    front = _Programme(chain).front(0, len(chain), True)
    return tuple(Plan(chain, _listed(steps)) for _, _, steps in front)


def tradeoff(chain: Chain) -> list[Plan]:
    """All plans worth having: from the least peak, with the most work, to no recomputation at all."""
    return list(_curve(chain))


class _Model:
    """The bytes and the work of the two kinds of step, from those of the stages.

    held: the first stage's input is remembered outside, by a checkpoint around or by the stage before, and counted
    there. again: this is a checkpoint being run again, in backward.
    """

    def __init__(self, chain: Chain):
        self.stages, self.n = chain.stages, len(chain)
        self.inputs, self.origin = [0], [0]  # of each stage: bytes of its input's storage, and after which it was made
        self.taped = [-1]  # the last stage before each that has a tape
        for i, stage in enumerate(self.stages):
            self.inputs.append(self.inputs[-1] if stage.view else stage.output_bytes)
            self.origin.append(self.origin[-1] if stage.view else i + 1)
            self.taped.append(i if stage.saves else self.taped[-1])
        # What is there when backward is done with stages from each on: the loss, and the parameters' gradients.
        later = itertools.accumulate((s.gradient_bytes for s in reversed(self.stages)), initial=chain.result_bytes)
        self.later = list(later)[::-1]
        self.costs = list(itertools.accumulate((s.cost for s in self.stages), initial=0))

    def last(self, j: int, again: bool) -> int:
        """Where a run of stages before j ends: run again, it ends with the last that has a tape."""
        return self.taped[j] if again else j - 1

    def in_flight(self, j: int, again: bool) -> int:
        """What else is there while stages before j are run: the gradients, when backward looks at the last tape."""
        last = self.taped[j]
        return self.later[last + 1] + self.stages[last].arriving_bytes if again else 0

    def keep(self, i: int, j: int, held: bool, again: bool) -> tuple[int, int, bool]:
        """Stage i's own peak; bytes remembered through what follows; and whether stage i + 1 finds its input held."""
        stage, size = self.stages[i], 0 if held else self.inputs[i]
        forward, backward = stage.taped_bytes, stage.backward_bytes if held else stage.own_backward_bytes
        if again and i == self.last(j, again):
            forward, backward = stage.again_bytes, stage.working_bytes if held else stage.own_working_bytes
            if i == self.n - 1 and stage.saves_output:  # a second one: the caller holds the first
                backward += stage.output_bytes
        mine = size if stage.saves_input else 0
        peak = max(self.in_flight(j, again) + size + forward, self.later[i + 1] + backward)
        remembered = mine + stage.tape_bytes + (stage.output_bytes if stage.saves_output else 0)
        return peak, remembered, stage.saves_output or (stage.view and (held or stage.saves_input))

    def forget(self, i: int, s: int, j: int, held: bool, again: bool) -> tuple[int, int, bool]:
        """As `keep`, for a checkpoint around i … s − 1, up to the moment when it is run again."""
        size, last = 0 if held else self.inputs[i], self.taped[s]
        own = self.in_flight(j, again)
        if not (again and last == self.last(j, again)):  # else its input was the last tensor to be saved
            own += self.dropping(i, s)
        backward = [self.later[k + 1] + self.stages[k].backward_bytes for k in range(last + 1, s)]
        backward.append(self.later[last + 1] + self.stages[last].waiting_bytes)
        return size + max(own, *backward), size, self.origin[s] == self.origin[i]

    def dropping(self, i: int, s: int) -> int:
        """The peak of stages i … s − 1 in a forward that saves nothing, above the first one's input."""
        return max(
            self.stages[k].forward_bytes + (0 if self.origin[k] == self.origin[i] else self.inputs[k])
            for k in range(i, s)
        )

    def rerun(self, i: int, s: int) -> float:
        """The work of stages i … s − 1, up to the last tensor that is saved."""
        last = self.taped[s]
        return self.costs[last] - self.costs[i] + self.stages[last].again_cost

    def spans(self, steps: Steps, i: int) -> list[tuple[int, int, Steps | None]]:
        """Each step as (first stage, the one after its last, inner steps), from stage i on."""
        spans = []
        for step in steps:
            s = i + (1 if isinstance(step, int) else sum(1 for _ in _flat(step)))
            spans.append((i, s, None if isinstance(step, int) else step))
            i = s
        return spans

    def peak(self, steps: Steps, i: int, j: int, held: bool, again: bool) -> int:
        """Of any steps for stages i … j − 1."""
        peak = outside = 0
        for i, s, inner in self.spans(steps, i):
            if i > self.last(j, again):
                break
            if inner is None:
                own, remembered, held = self.keep(i, j, held, again)
            else:
                own, remembered, held = self.forget(i, s, j, held, again)
                own = max(own, remembered + self.peak(inner, i, s, True, True))
            peak, outside = max(peak, outside + own), outside + remembered
        return peak

    def recomputed(self, steps: Steps, i: int = 0, again: bool = False) -> float:
        """The work of running again, of checkpoints inside of these steps."""
        return sum(self.rerun_by(inner, i) + self.recomputed(inner, i) for i, s, inner in self.spans(steps, i) if inner)

    def rerun_by(self, steps: Steps, i: int) -> float:
        """As `rerun`, for steps that may also end with a checkpoint: then its input is the last tensor to be saved."""
        spans = self.spans(steps, i)
        first, s, inner = [span for span in spans if self.taped[span[1]] >= span[0]][-1]
        return self.costs[first] - self.costs[i] if inner else self.rerun(i, s)

    def runs(self, steps: Steps, i: int = 0, again: bool = False) -> list[int]:
        """How often each stage is run."""
        runs, spans = [], self.spans(steps, i)
        last = self.taped[spans[-1][1]] if again else self.n
        for i, s, inner in spans:
            once = [int(i <= last and not (again and inner and last < s))] * (s - i)
            runs += [a + b for a, b in zip(once, self.runs(inner, i, True), strict=True)] if inner else once
        return runs


Point = tuple[int, float, tuple]
"""One plan on a front: its peak, its work, its steps as (first, (second, (…, ())))."""


class _Programme:
    """Fronts of runs of stages, each worked out once."""

    def __init__(self, chain: Chain):
        self.model, self.fronts = _Model(chain), {}

    def front(self, i: int, j: int, held: bool) -> list[Point]:
        """The best plans of stages i … j − 1, those of least peak first, each with less work than the one before."""
        if (i, j, held) not in self.fronts:
            self.fronts[i, j, held] = _front(self.points(i, j, held))
        return self.fronts[i, j, held]

    def points(self, i: int, j: int, held: bool) -> list[Point]:
        model, again = self.model, j < self.model.n
        last = model.last(j, again)
        own, remembered, next_held = model.keep(i, j, held, again)
        if i == last:
            after = ()
            for k in reversed(range(i + 1, j)):
                after = (k, after)
            return [(own, 0, (i, after))]
        points = [
            (max(own, remembered + peak), cost, (i, steps)) for peak, cost, steps in self.front(i + 1, j, next_held)
        ]
        for s in range(i + 1, last + 1):
            if model.taped[s] >= i:
                own, remembered, next_held = model.forget(i, s, j, held, again)
                rest = self.front(s, j, next_held)
                points += _both(own, remembered, model.rerun(i, s), self.front(i, s, True), rest)
        return points


def _both(own: int, remembered: int, work: float, inner: list[Point], rest: list[Point]) -> list[Point]:
    """A checkpoint and what follows it: for each peak that either may have, the best of both."""
    points, a, b = [], 0, 0
    while True:
        peak = max(inner[a][0], rest[b][0])
        while a + 1 < len(inner) and inner[a + 1][0] <= peak:
            a += 1
        while b + 1 < len(rest) and rest[b + 1][0] <= peak:
            b += 1
        points.append((max(own, remembered + peak), work + inner[a][1] + rest[b][1], (inner[a][2], rest[b][2])))
        following = [front[k + 1][0] for front, k in ((inner, a), (rest, b)) if k + 1 < len(front)]
        if not following:
            return points
        a, b = (
            a + (a + 1 < len(inner) and inner[a + 1][0] == min(following)),
            b + (b + 1 < len(rest) and rest[b + 1][0] == min(following)),
        )


def _front(points: list[Point]) -> list[Point]:
    """Those to which no other is better in one thing and as good in the other, thinned to `FRONT`."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: point[:2]):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    if len(front) > FRONT:
        front = [front[k * (len(front) - 1) // (FRONT - 1)] for k in range(FRONT)]
    return front


def _listed(steps: tuple) -> Steps:
    listed = []
    while steps:
        step, steps = steps
        listed.append(step if isinstance(step, int) else _listed(step))
    return tuple(listed)


def _flat(steps: Steps):
    for step in steps:
        if isinstance(step, int):
            yield step
        else:
            yield from _flat(step)


def _useful(chain: Chain, steps: Steps) -> Steps:
    """Without checkpoints around stages that save nothing: there is nothing to forget."""
    useful = ()
    for step in steps:
        if isinstance(step, int):
            useful += (step,)
        else:
            inner = _useful(chain, step)
            useful += (inner,) if any(chain.stages[k].saves for k in _flat(step)) else inner
    return useful


def _drawn(steps: Steps) -> str:
    return f"[{' '.join(str(step) if isinstance(step, int) else _drawn(step) for step in steps)}]"
