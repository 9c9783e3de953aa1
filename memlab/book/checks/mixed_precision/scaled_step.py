"""Exercise 3 of chapter 06: a training step in FP16 that clips, skips, and schedules as it should."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, two_floats
from memlab.book.workloads import MLP
from memlab.memory_timeline import Meter, Timeline
from memlab.mixed_precision import LossScaler, MasterWeights
from memlab.units import KiB, format_bytes

MAX_NORM = 0.5
_SCALE, _ITERATIONS, _PLANTED = 2.0**19, 16, (7, 8, 13)


@dataclass
class _Run:
    """What a training step did to a model, iteration by iteration; and the timeline of one more."""

    returned: list = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    timeline: Timeline | None = None
    left: int = 0


def _batches() -> list[tuple[Tensor, Tensor]]:
    """Some of them with inputs so large that FP16 overflows already in forward; and norms on both sides of MAX_NORM."""
    made = [(torch.randn(8, 16).half(), torch.randint(16, (8,))) for _ in range(_ITERATIONS + 1)]
    for planted in _PLANTED:
        made[planted][0].fill_(6e4)
    for small in (4, 5, 9):
        made[small][0].mul_(0.01)
    return made


def _run(step: Callable, iterations: int = _ITERATIONS) -> _Run:
    torch.manual_seed(0)
    model = MLP(16, 48, layers=3).half()
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9, foreach=False)
    scaler = LossScaler(_SCALE, growth_interval=3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1 / (1 + steps))
    run, batches = _Run(), _batches()
    for batch in batches[:iterations]:
        run.returned.append(two_floats(step(model, batch, optimizer, scaler, scheduler, MAX_NORM), "train_step"))
        run.scales.append(scaler.get_scale())
        run.scheduled.append(scheduler.last_epoch)
        run.weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        run.left = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    if iterations == _ITERATIONS:
        with Meter(model, optimizer, inputs=batches[-1]) as meter:
            step(model, batches[-1], optimizer, scaler, scheduler, MAX_NORM)
        run.timeline = meter.timeline
    return run


def _right(model, batch, optimizer, scaler, scheduler, max_norm):
    """What exercise 3 asks for."""
    x, y = batch
    loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    scaler.step_scheduler(scheduler)
    optimizer.zero_grad()
    return loss.item(), norm.item()


@functools.cache
def _reference() -> _Run:
    return _run(_right)


@exercise
def train_step(answer: object) -> str:
    """Exercise 3: (model, batch, optimizer, scaler, scheduler, max_norm) → (loss, norm), in FP16, nothing kept."""
    step, right = a_function(answer, "train_step(model, batch, optimizer, scaler, scheduler, max_norm)"), _reference()
    first = _run(step, 1)  # so that what is wrong at once is told, and not what breaks because of it
    _compare(first, right, 0)
    found = _run(step)
    for iteration in range(_ITERATIONS):
        _compare(found, right, iteration)
    if found.left:
        raise Wrong(
            f"after a step {format_bytes(found.left)} of gradients are still there, if only as zeros; they were "
            "widened to FP32 for clipping. One that nobody needs can be None, and the next backward makes it in FP16."
        )
    grown = found.timeline.totals[-1] - right.timeline.totals[-1]
    if grown > 0:
        raise Wrong(f"the values are right, and {grown:,} B more than necessary are alive when your step has ended.")
    more = found.timeline.peak_bytes - right.timeline.peak_bytes
    if more > 1 * KiB:  # one or the other small tensor may live a little longer
        alive = found.timeline.alive(found.timeline.peak_event)
        widest = max((s for s in alive if s.phase != "before"), key=lambda storage: storage.nbytes)
        raise Wrong(
            f"the values are right, and the peak is {format_bytes(more)} higher than it need be. Alive there, among "
            f"others: {'×'.join(map(str, widest.shape))}, {widest.reason}, made by\n    {widest.line}"
        )
    skips = _ITERATIONS - right.scheduled[-1]
    return (
        f"{_ITERATIONS} iterations, of which {skips} had to be skipped, and a peak that is no higher than it must be."
    )


def _compare(found: _Run, right: _Run, i: int) -> None:
    """Raise Wrong unless iteration i went as it should, with what it looks like that it did instead."""
    (loss, norm), (right_loss, right_norm) = found.returned[i], right.returned[i]
    before = right.scales[i - 1] if i else _SCALE
    skipped = right.scheduled[i] == (right.scheduled[i - 1] if i else 0)
    what = "a gradient or the loss overflows, the step must be skipped" if skipped else "nothing overflows"
    where = f"iteration {i} ({what})"
    if not skipped and not math.isclose(loss, right_loss, rel_tol=1e-2 if i else 1e-6):
        look = ""
        if math.isclose(loss, right_loss * before, rel_tol=1e-2):
            look = " That is the scaled loss."
        elif math.isclose(loss, right_loss, rel_tol=1e-2):
            look = " Is it computed in FP32, from logits in FP32?"
        raise Wrong(f"{where}: expected the loss {right_loss:.6g}, found {loss:.6g}.{look}")
    if found.scales[i] != right.scales[i]:
        look = "it grows after 3 steps in a row that were not skipped, and backs off after one that was"
        if found.scales[i] == before:
            look = "nothing moved it; whether the step was skipped or not, something must end the iteration"
        elif not skipped and found.scales[i] < before:
            look = "something overflows that need not: a loss in FP16, or gradients that an overflow has left behind"
        raise Wrong(
            f"{where}: expected the scale to go from {before:g} to {right.scales[i]:g}, found {found.scales[i]:g}: "
            f"{look}."
        )
    if found.scheduled[i] != right.scheduled[i]:
        raise Wrong(
            f"{where}: expected the scheduler's count at {right.scheduled[i]}, found {found.scheduled[i]}. It is to "
            "count the steps that the optimizer made."
        )
    if not skipped and not math.isclose(norm, right_norm, rel_tol=2e-2):
        look = ""
        if not norm < 2 * right_norm:
            look = " That looks like the norm of the scaled gradients: unscale before you clip."
        elif math.isclose(norm * before, right_norm, rel_tol=2e-2):
            look = " Those gradients were divided by the scale twice."
        elif math.isclose(norm, min(right_norm, MAX_NORM), rel_tol=2e-2):
            look = " That is the norm after clipping."
        raise Wrong(f"{where}: expected the norm {right_norm:.4g}, found {norm:.4g}.{look}")
    if not torch.allclose(found.weights[i].float(), right.weights[i].float(), rtol=1e-2, atol=2e-3):
        moved = float((found.weights[i].float() - right.weights[i].float()).abs().max())
        raise Wrong(
            f"{where}: loss, scale and norm are right, and the weights after it differ by up to {moved:.2g}. Were the "
            f"gradients clipped to {MAX_NORM}, unscaled, once? Did gradients of an earlier iteration stay?"
        )
