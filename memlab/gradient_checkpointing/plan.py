"""A plan: which stages of a chain keep their tape, and which are forgotten and run again by a plan of their own.

A plan goes through the stages in order. It *keeps* the tape of a stage, or puts a *checkpoint* around several,
remembers only their input, and when backward comes to them, runs them again by a plan for these. So it is a list with
lists in it,

    [0 1] [[2] 3 4] 5 6        brackets are checkpoints: stage 2 is run three times, 0, 1, 3 and 4 twice

and to run one is a loop of two lines over nested `checkpoint`s. Its bytes add up the same way. Write peak(i, j) for
stages i … j − 1, their tapes, gradients and all, above what is remembered outside of them. Then a plan that begins

    by keeping i                  has the peak  max( of i's forward and backward,  tape of i  + peak(i + 1, j) )
    with a checkpoint i … s − 1   has the peak  max( of forwards without a tape,   input of i + peak(s, j),
                                                                                   input of i + peak(i, s) )
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from memlab.gradient_checkpointing.chain import Chain
from memlab.gradient_checkpointing.hooks import checkpoint

Steps = tuple["int | Steps", ...]
"""A stage's number: keep its tape. A tuple of steps: a checkpoint around them."""


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
        stages = list(flat(self.steps))
        if stages != list(range(len(self.chain))):
            raise ValueError(f"expected steps through stages 0 to {len(self.chain) - 1} in order, found {stages}")

    def run(self, layers: Sequence[Callable], x: Tensor) -> Tensor:
        """The result of the last layer; its backward gives the same gradients, bit for bit, as without a plan.

        Raises ValueError for what is not as it was measured: the number of layers; the shape, dtype, device or
        requires_grad of x; autocast; whether a module trains, or a parameter requires a gradient (`Chain.check`).
        """
        self.chain.check(layers, x)
        return run_plan(self.steps, layers, x)

    @cached_property
    def peak_bytes(self) -> int:
        """Of forward and backward, as the Meter counts: storages, with parameters, input and gradients.

        Never too little where backward runs after autocast, as it should: inside, the copies of weights that autocast
        caches stay on top. A checkpoint inside another, around a stage that does not save its input, lets go of that
        input earlier than is counted here; so does a saved input before the gradient of the bias next to it.
        """
        return self.chain.resident_bytes + Model(self.chain).peak(
            self.steps, 0, len(self.chain), held=True, again=False
        )

    @cached_property
    def recomputed(self) -> int:
        """Work done again in backward, in FLOPs."""
        return Model(self.chain).recomputed(self.steps)

    @property
    def runs(self) -> list[int]:
        """How often each stage's forward is run; a last run may stop half-way, at the last tensor that is saved."""
        return Model(self.chain).runs(self.steps)

    def __str__(self) -> str:
        return _drawn(self.steps)[1:-1]


class Model:
    """The bytes and the work of the two kinds of step, from those of the stages.

    held: the first stage's input is remembered outside, by a checkpoint around or by the stage before, and counted
    there. again: this is a checkpoint being run again, in backward.
    """

    def __init__(self, chain: Chain):
        self.stages, self.n = chain.stages, len(chain)
        self.inputs = [0, *(stage.output_bytes for stage in self.stages)]
        # What is there when backward is done with stages from each on: the loss, and the parameters' gradients.
        later = itertools.accumulate((s.gradient_bytes for s in reversed(self.stages)), initial=chain.result_bytes)
        self.later = list(later)[::-1]
        # The peak of stages i … s − 1 in a forward that saves nothing, above the first one's input.
        self.dropping = [
            list(itertools.accumulate((self.above(i, k) for k in range(i, self.n)), max)) for i in range(self.n)
        ]
        self.costs = list(itertools.accumulate((s.cost for s in self.stages), initial=0))

    def above(self, i: int, k: int) -> int:
        """Stage k's forward without a tape, and its input if that is not i's too."""
        return self.stages[k].forward_bytes + (0 if k == i else self.inputs[k])

    def in_flight(self, j: int, again: bool) -> int:
        """What else is there while stages before j are run: the gradients, when backward looks at the last tape."""
        return self.later[j] + self.stages[j - 1].arriving_bytes if again else 0

    def keep(self, i: int, j: int, held: bool, again: bool) -> tuple[int, int, bool]:
        """Stage i's own peak; bytes remembered through what follows; and whether stage i + 1 finds its input held."""
        stage, size = self.stages[i], 0 if held else self.inputs[i]
        forward, backward = stage.taped_bytes, stage.backward_bytes if held else stage.own_backward_bytes
        if again and i == j - 1:
            forward, backward = stage.again_bytes, stage.working_bytes if held else stage.own_working_bytes
            if i == self.n - 1 and stage.saves_output:  # a second one: the caller holds the first
                backward += stage.output_bytes
        mine = size if stage.saves_input else 0
        peak = max(self.in_flight(j, again) + size + forward, self.later[i + 1] + backward)
        remembered = mine + stage.tape_bytes + (stage.output_bytes if stage.saves_output else 0)
        return peak, remembered, stage.saves_output

    def forget(self, i: int, s: int, j: int, held: bool, again: bool) -> tuple[int, int]:
        """As `keep`, for a checkpoint around i … s − 1, until it is run again. Nobody holds its output."""
        size, own = 0 if held else self.inputs[i], self.in_flight(j, again)
        if not (again and s == j):  # else its input was the last tensor to be saved
            own += self.dropping[i][s - 1 - i]
        return size + max(own, self.later[s] + self.stages[s - 1].waiting_bytes), size

    def rerun(self, i: int, s: int) -> int:
        """The work of stages i … s − 1, up to the last tensor that is saved."""
        return self.costs[s - 1] - self.costs[i] + self.stages[s - 1].again_cost

    def spans(self, steps: Steps, i: int) -> list[tuple[int, int, Steps | None]]:
        """Each step as (first stage, the one after its last, inner steps), from stage i on."""
        spans = []
        for step in steps:
            s = i + (1 if isinstance(step, int) else sum(1 for _ in flat(step)))
            spans.append((i, s, None if isinstance(step, int) else step))
            i = s
        return spans

    def peak(self, steps: Steps, i: int, j: int, held: bool, again: bool) -> int:
        """Of any steps for stages i … j − 1."""
        peak = outside = 0
        for first, s, inner in self.spans(steps, i):
            if inner is None:
                own, remembered, held = self.keep(first, j, held, again)
            else:
                own, remembered = self.forget(first, s, j, held, again)
                held, own = False, max(own, remembered + self.peak(inner, first, s, True, True))
            peak, outside = max(peak, outside + own), outside + remembered
        return peak

    def recomputed(self, steps: Steps, i: int = 0) -> int:
        """The work of running again, of checkpoints inside of these steps."""
        return sum(self.rerun_by(inner, i) + self.recomputed(inner, i) for i, s, inner in self.spans(steps, i) if inner)

    def rerun_by(self, steps: Steps, i: int) -> int:
        """As `rerun`, for steps that may also end with a checkpoint: then its input is the last tensor to be saved."""
        first, s, inner = self.spans(steps, i)[-1]
        return self.costs[first] - self.costs[i] if inner else self.rerun(i, s)

    def runs(self, steps: Steps, i: int = 0, again: bool = False) -> list[int]:
        """How often each stage is run."""
        runs, spans = [], self.spans(steps, i)
        for span in spans:
            i, s, inner = span
            once = [0 if again and inner and span is spans[-1] else 1] * (s - i)
            runs += [a + b for a, b in zip(once, self.runs(inner, i, True), strict=True)] if inner else once
        return runs


def flat(steps: Steps) -> Iterator[int]:
    """The stages' numbers."""
    for step in steps:
        if isinstance(step, int):
            yield step
        else:
            yield from flat(step)


def _drawn(steps: Steps) -> str:
    return f"[{' '.join(str(step) if isinstance(step, int) else _drawn(step) for step in steps)}]"
