"""The largest batch under a byte budget: predicted first, then proved.

A training step of n + 1 examples runs the same ops as one of n, and each tensor it holds has a fixed size or one that
grows with n. So what is held at a given moment of the step, just after its i-th event, is a straight line in n:

    held_i(n) = fixed_i + slope_i · n      peak(n) = max over i      size = ⌊min over i of (budget - fixed_i) / slope_i⌋

Two small steps give every one of these lines, and a third checks them. The line through two *peaks* would not do: for
large n the fullest moment may be another, the loss instead of the optimizer's step. A maximum of straight lines is
convex, so outside of two of its points it lies on or above the line through them, which promises too much, never too
little. Then the proof: the size predicted is run, and fits; one more is run, and does not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memlab.checking import positive
from memlab.memory_timeline import Meter, Timeline
from memlab.memory_timeline.ownership import modules_of
from memlab.units import format_bytes, parse_bytes

MESSAGES = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class BatchSize:
    """What `find_batch_size` found.

    size: the largest that fits. predicted: the one foretold. peak_bytes: of `size`.
    next_bytes: of size + 1; None where that ran out of memory, or where `size` is `most` and nothing larger was run.
    level: of these figures, "storages" or "allocated". tried: the sizes that ran, in order, and the peak of each (None:
    out of memory).
    """

    size: int
    predicted: int
    peak_bytes: int
    next_bytes: int | None
    budget_bytes: int
    most: int
    level: str
    tried: dict[int, int | None]

    def __str__(self) -> str:
        one_more = "runs out of memory" if self.next_bytes is None else f"takes {format_bytes(self.next_bytes)}"
        beyond = f"{self.size + 1} {one_more}" if self.size < self.most else "that is the most to be tried"
        return (
            f"{self.size} (predicted: {self.predicted}) takes {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)} ({self.level}); {beyond}; run: {', '.join(map(str, self.tried))}"
        )


def find_batch_size(
    step: Callable[[int], object],
    budget_bytes: int | str,
    *,
    model: nn.Module | list[nn.Module] | None = None,
    optimizer: Optimizer | None = None,
    most: int = 65536,
) -> BatchSize:
    """The largest batch size from 1 to `most` whose training step stays within a budget, proved by running it.

        found = find_batch_size(step, "16 GiB", model=model, optimizer=optimizer)

    step: runs one whole training step (forward, backward, optimizer, gradients cleared) of so many examples. To find a
      micro-batch, let it accumulate over two of that size: more of them take no more memory.
    model, optimizer: what `step` trains, where that outlives it. A `step` that builds its own needs neither.

    Figures are of storages: what tensors hold, without what kernels take for themselves. With a `model` on CUDA they
    are bytes allocated on its device, whoever asked for them, and the lines are shifted by what those have beyond.

    Steps train: weights, running statistics and random numbers move. So search before training; or, at no cost of
    memory, in `with imagine("H100-80GB"):`. A step that runs out of memory does not fit. Nothing of it stays: no
    exception, no tensor, none of the gradients it made for `model`.

    Raises ValueError if not even one example fits, or if an optimizer outlives `step` that was not named; TypeError or
    ValueError for arguments of another kind. All else that `step` raises passes through.
    """
    budget_bytes = parse_bytes(budget_bytes)
    if not callable(step):
        raise TypeError(f"expected step as a function of the batch size, found {type(step).__name__}")
    positive("most", most)

    trials = Trials(step, model, optimizer, budget_bytes)
    fits, fails = 0, most + 1
    # 1 twice: the first step makes the optimizer's states, so it holds less than all later ones.
    for size in [1, *range(1, min(3, most) + 1)]:
        if not trials.fits(size):
            fails = size
            break
        fits = size
    if fails == 1:
        peak = trials.tried[1]
        raise ValueError(
            f"expected a step of batch size 1 to fit {format_bytes(budget_bytes)}, found that it "
            f"{'runs out of memory' if peak is None else f'takes {format_bytes(peak)}'}; raise the budget, shorten the "
            "examples, or shrink the model and its optimizer's states"
        )
    # Ops may pad a size, or treat 1 in another way: until three steps lie on the same lines, go at most twice as far.
    while not trials.straight and 2 * fits < min(trials.aim(most), fails):
        fits, fails = (2 * fits, fails) if trials.fits(2 * fits) else (fits, 2 * fits)

    guess = predicted = min(trials.aim(most), fails - 1)
    stride = 1
    while fails - fits > 1:
        size = min(max(guess, fits + 1), fails - 1)
        fitted = trials.fits(size)
        fits, fails = (size, fails) if fitted else (fits, size)
        aim, middle = trials.aim(most), (fits + fails) // 2
        if fitted and fits < aim < fails:  # lines through larger sizes than before
            guess, stride = aim, 1
        else:  # its neighbour: where the prediction was right, the proof; else ever further away, and then by halves
            guess = min(fits + stride, middle) if fitted else max(fails - stride, middle)
            stride *= 2
    tried = trials.tried
    return BatchSize(fits, predicted, tried[fits], tried.get(fails), budget_bytes, most, trials.level, tried)


class Trials:
    """Runs steps under a meter, notes what each takes, and keeps the timelines of the three largest that fitted."""

    def __init__(self, step, model, optimizer: Optimizer | None, budget_bytes: int):
        self._step, self._model, self._optimizer, self._budget_bytes = step, model, optimizer, budget_bytes
        self._parameters = [p for module in modules_of(model) for p in module.parameters()]
        self._fitted: dict[int, Timeline] = {}
        self.tried: dict[int, int | None] = {}
        self.level = "storages"

    def fits(self, size: int) -> bool:
        """Run one step of that size. Whether it stayed within the budget."""
        timeline = self._run(size)
        self.tried[size] = peak = None if timeline is None else peak_of(timeline)
        if peak is None or peak > self._budget_bytes:
            return False
        self.level = "allocated" if timeline.levels else "storages"
        self._fitted = dict(sorted({**self._fitted, size: timeline}.items())[-3:])
        return True

    def _run(self, size: int) -> Timeline | None:
        """The timeline of one step, or None if it ran out of memory; then nothing of it is left."""
        stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        without_gradient = [p for p in self._parameters if p.grad is None]
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.add(optimizer))
        timeline = None
        try:
            with Meter(self._model, self._optimizer) as meter:
                self._step(size)
            timeline = meter.timeline
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        finally:
            hook.remove()
        # Below the except clause the error is gone, and with it its traceback, whose frames held the step's tensors.
        for p in without_gradient if timeline is None else ():
            p.grad = None
        gc.collect()  # modules, graphs and exceptions may be parts of cycles
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        refuse_unnamed(stepped, self._optimizer, self._parameters)
        return timeline

    def aim(self, most: int) -> int:
        """The largest size up to `most` that fits, by the straight lines through the two largest that fitted."""
        if len(self._fitted) < 2:
            return max(self._fitted)
        (a, first), (b, second) = list(self._fitted.items())[-2:]
        alike = events_of(first) == events_of(second)
        lines = zip(held(first), held(second), strict=True) if alike else [(first.peak_bytes, second.peak_bytes)]
        budget = self._budget_bytes - (peak_of(second) - second.peak_bytes)  # what an allocator had beyond storages
        return min([most, *(a + (budget - low) * (b - a) // (high - low) for low, high in lines if high > low)])

    @property
    def straight(self) -> bool:
        """Whether the three largest that fitted lie on straight lines, moment by moment, and not all of them flat."""
        if len(self._fitted) < 3:
            return False
        (a, first), (b, second), (c, third) = self._fitted.items()
        alike = events_of(first) == events_of(second) == events_of(third) and first.totals != third.totals
        moments = zip(*map(held, (first, second, third)), strict=True) if alike else ()
        return alike and all((y - x) * (c - b) == (z - y) * (b - a) for x, y, z in moments)


def held(timeline: Timeline) -> list[int]:
    """What is held after each allocation: where the peak lies. (What one op lets go, it frees in any order.)"""
    after = zip(timeline.totals[1:], timeline.events, strict=True)
    return [timeline.totals[0], *(total for total, event in after if event.delta > 0)]


def events_of(timeline: Timeline) -> list[tuple[str, str, bool]]:
    """What happened, without the sizes: steps for which this is equal can be compared moment by moment."""
    return [(event.op, event.phase, event.delta > 0) for event in timeline.events]


def peak_of(timeline: Timeline) -> int:
    """The step's peak: bytes allocated where an allocator counted them, else bytes of storages."""
    return timeline.levels["allocated"]["peak"] if timeline.levels else timeline.peak_bytes


def is_out_of_memory(error: Exception) -> bool:
    """Whether a step ended for want of memory: CUDA's, an imagined card's, Python's, or the CPU allocator's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in MESSAGES)


def refuse_unnamed(stepped: Iterable[Optimizer], optimizer: Optimizer | None, parameters: list[nn.Parameter]) -> None:
    """Raise ValueError for an optimizer that lives on after the step, and was not named or steps what was not."""
    known = set(map(id, parameters))
    for found in stepped:
        strangers = [p for group in found.param_groups for p in group["params"] if id(p) not in known]
        if found is not optimizer or strangers:
            raise ValueError(
                "expected model= and optimizer= to name what outlives step(size), found "
                f"{type(found).__name__}{' of other parameters' if found is optimizer else ' beside them'}, whose "
                "gradients or states would not be counted; name both, or build both inside `step`"
            )
