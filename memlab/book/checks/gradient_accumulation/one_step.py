"""Exercise 4 of chapter 07, third part: one step of a group, clipped once, with nothing left behind."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, two_floats
from memlab.book.checks.gradient_accumulation.group_shares import examples, small_model
from memlab.book.checks.gradient_accumulation.lets_go import beyond
from memlab.memory_timeline import Meter, Timeline

_STEPS = ((8, 8, 8, 8), (8, 8, 3), (16, 16, 16, 16, 16), (5,))
_MAX_NORMS = (0.32, 0.4, 0.32, 0.7)  # the gradients of all steps but the third are longer


def _share(model: nn.Module, micro_batch: tuple[Tensor, Tensor], group: list) -> Tensor:
    """A right share, so that the third part does not depend on the second."""
    inputs, classes = micro_batch
    return F.cross_entropy(model(inputs), classes).mul(len(classes) / sum(len(labels) for _, labels in group))


@dataclass
class _Run:
    """What steps did to a model, one by one; and the timeline of the first."""

    returned: list = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    left: int = 0
    timeline: Timeline | None = None
    asked: list[list[int]] = field(default_factory=list)


def _run(step: Callable, right: _Run | None = None) -> _Run:
    """Some steps; where there is a right run, each is held against it."""
    run, model = _Run(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    for number, (sizes, max_norm) in enumerate(zip(_STEPS, _MAX_NORMS, strict=True)):
        group, asked = examples(*sizes), []

        def share(model, micro_batch, group, *, asked=asked, whole=group):
            asked.extend(i for i, one in enumerate(whole) if one[0] is micro_batch[0])
            return _share(model, micro_batch, group)

        if number == 0:
            with Meter(model, optimizer, inputs=group) as meter:
                returned = step(model, optimizer, group, max_norm, share)
            run.timeline = meter.timeline
        else:
            returned = step(model, optimizer, group, max_norm, share)
        run.returned.append(two_floats(returned, "step"))
        run.asked.append(asked)
        run.weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        if right is not None:
            _compare(run, right, number, f"step {number}, of micro-batches of {list(sizes)} examples")
        run.left = max(run.left, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
    return run


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer, group: list, max_norm: float, share: Callable):
    """The same step with the group as one batch: torch's own mean, clipped once."""
    x, y = (torch.cat(part) for part in zip(*group, strict=True))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def _one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer, group: list, max_norm: float, share: Callable):
    """What the third part asks for, for its peak."""
    loss = 0.0
    for number in range(len(group)):
        part = share(model, group[number], group)
        part.backward()
        loss += part.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


@functools.cache
def _reference() -> tuple[_Run, Timeline]:
    return _run(_whole), _run(_one_by_one).timeline


@functools.cache
def _norms() -> dict[str, float]:
    """The norms that a first step's gradients have, by the bug that makes them so."""
    model, group, alone, clipped = small_model(), examples(*_STEPS[0]), [], []
    norm = lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()  # noqa: E731
    for micro_batch in group:
        model.zero_grad()
        _share(model, micro_batch, group).backward()
        alone.append(norm())
    model.zero_grad()
    for micro_batch in group:
        _share(model, micro_batch, group).backward()
        clipped.append(nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORMS[0]).item())
    right = _reference()[0].returned[0][1]
    return {
        "That is the norm of the last micro-batch's gradient alone. Who has cleared the others?": alone[-1],
        "These gradients were clipped after each micro-batch. Clip their sum, once.": clipped[-1],
        "That is the norm after clipping, or was there more than one?": _MAX_NORMS[0],
        "The shares are parts of the mean already; there is nothing to divide.": right / len(group),
        "That is the norm of a sum of means.": right * len(group),
    }


@exercise
def step(answer: object) -> str:
    """Exercise 4, third part: (model, optimizer, group, max_norm, share) → (loss, norm); one step, nothing left."""
    function = a_function(answer, "step(model, optimizer, group, max_norm, share)")
    right, timeline = _reference()
    found = _run(function, right)
    if found.left:
        raise Wrong(
            f"after a step {found.left:,} B of gradients are still there, if only as zeros. Whoever evaluates now has "
            "no use for them; the next backward makes them anew."
        )
    if (grown := found.timeline.totals[-1] - timeline.totals[-1]) > 0:
        raise Wrong(f"the values are right, and {grown:,} B more than necessary are alive when your step has ended.")
    if (more := found.timeline.peak_bytes - timeline.peak_bytes) > 256:  # one or the other scalar may live longer
        raise Wrong(
            f"the values are right, and the peak is {more:,} B higher than it need be. "
            f"{beyond(found.timeline, timeline)}"
        )
    return f"{len(_STEPS)} steps, and after each the weights that the whole group as one batch would have given."


def _compare(found: _Run, right: _Run, i: int, where: str) -> None:
    """Raise Wrong unless step i went as it should, with what it looks like that it did instead."""
    (loss, norm), (right_loss, right_norm) = found.returned[i], right.returned[i]
    if found.asked[i] != list(range(len(_STEPS[i]))):
        raise Wrong(f"{where}: expected share to be called for each, in order, found it called for {found.asked[i]}.")
    if not math.isclose(norm, right_norm, rel_tol=1e-6):
        look = ""
        if i == 0:
            bugs = (f" {what}" for what, bug in _norms().items() if math.isclose(norm, bug, rel_tol=1e-5))
            look = next(bugs, "")
        elif not math.isclose(loss, right_loss, rel_tol=1e-6) or norm > right_norm:
            look = " Are gradients of the step before still there?"
        raise Wrong(f"{where}: expected the norm {right_norm:.6g} before clipping, found {norm:.6g}.{look}")
    if not math.isclose(loss, right_loss, rel_tol=1e-6):
        look = " The shares add up to the mean loss." if loss < right_loss else " The shares are parts of it already."
        raise Wrong(f"{where}: expected the mean loss {right_loss:.6g}, found {loss:.6g}.{look}")
    now, due = found.weights[i], right.weights[i]
    apart = float((now - due).norm() / due.norm())
    if apart > 1e-6:  # torch divides by norm + 1e-6 to clip
        look = f"Were the gradients clipped to {_MAX_NORMS[i]:g}, before the step, and was it made once?"
        if i == 0 and torch.equal(now, nn.utils.parameters_to_vector(small_model().parameters())):
            look = "They have not moved. What did the optimizer find in .grad?"
        raise Wrong(
            f"{where}: loss and norm are right, and the weights after it are {apart:.2g} away, relative to their "
            f"norm. {look}"
        )
