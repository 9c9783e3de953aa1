"""Evaluation: the forwards of a schedule without its backwards, so the pipeline fills and drains once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memlab.pipeline_parallelism.orders import with_messages
from memlab.pipeline_parallelism.schedule import FORWARD, Schedule


def forwards_of(schedule: Schedule) -> Schedule:
    """Each rank's forwards in their order, with the messages that they take."""
    orders = [[action for action in actions if action.kind == FORWARD] for actions in schedule.actions]
    return with_messages("forwards", orders)


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules in eval mode, and no gradients; afterwards every part of them is in the mode that it was in."""
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def whole_batch(made: list[tuple[Tensor, ...]]) -> Tensor | tuple[Tensor, ...]:
    """Micro-batches' outputs, each a tuple of (rows, …), as one batch: (batch, …), or a tuple of several such."""
    whole = tuple(map(torch.cat, zip(*made, strict=True)))
    return whole[0] if len(whole) == 1 else whole
