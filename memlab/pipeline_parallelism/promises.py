"""What the plan has promised to other ranks, compared with what comes: on the rank that breaks it, before it sends.

Who receives makes room before anything arrives, for what was planned. A tensor of another size would end that rank,
somewhere inside its network library, and it would be the wrong one to blame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memlab.pipeline_parallelism.plan import PipelinePlan, split_batch
from memlab.pipeline_parallelism.rehearsal import Wire


def planned_micro_batches(plan: PipelinePlan, name: str, batch: Tensor | None) -> Sequence[Tensor]:
    """A mini-batch, in micro-batches. name: "x", which is as planned, or "y", which has as many rows.

    batch: (batch, …).   Raises ValueError for None, where it is not as planned, and for an x that wants a gradient.
    """
    if batch is None:
        raise ValueError(
            f"expected {name} on the rank of the {'first' if name == 'x' else 'last'} stage, found None; pass it there"
        )
    parts = split_batch(batch, plan.schedule.micro_batches)
    if name == "x" and torch.is_grad_enabled() and batch.requires_grad:
        raise ValueError(
            "expected x that needs no gradient, for none is sent back to it, found one that does; let what makes x be "
            "layer 0, or detach it"
        )
    found = Wire(tuple(batch.shape), batch.dtype, False)
    if found != plan.batch if name == "x" else len(batch) != plan.batch.shape[0]:
        wanted = plan.batch if name == "x" else f"{plan.batch.shape[0]} rows"
        raise ValueError(
            f"expected {name} of {wanted}, as planned, found {found}; give step what plan_pipeline was given, or plan "
            "again"
        )
    return parts


def check_output(outputs: Sequence, planned: Sequence[Wire], stage: int, micro_batch: int) -> None:
    """Raise, naming stage and micro-batch, where a stage's output is not what it is to send.

    TypeError for what is no tensor; ValueError for another shape, dtype, or need of a gradient.
    """
    if not all(isinstance(t, Tensor) for t in outputs):
        found = ", ".join(type(t).__name__ for t in outputs)
        raise TypeError(
            f"expected stage {stage} to return a tensor or a tuple of tensors, found {found}; let its last layer do so"
        )
    trains = torch.is_grad_enabled()
    if len(outputs) == len(planned) and all(
        t.shape == wire.shape and t.dtype == wire.dtype and (not trains or t.requires_grad == wire.gradient)
        for t, wire in zip(outputs, planned, strict=True)
    ):
        return
    found = [Wire(tuple(t.shape), t.dtype, t.requires_grad) for t in outputs]
    raise ValueError(
        f"expected stage {stage} to return {_described(planned)} for every micro-batch, as planned, found "
        f"{_described(found)} for micro-batch {micro_batch}; plan with a batch of the shape that comes, under the same "
        "autocast, with the same layers frozen"
    )


def refuse_after_failure(failed: bool) -> None:
    """Raise RuntimeError after a step that raised: others wait in it, and would take the next one's messages."""
    if failed:
        raise RuntimeError(
            "expected steps that end, found that one has raised, in which the other ranks wait for this one; let the "
            "launch end, and go on from a saved state"
        )


def scalar_loss(loss: Tensor) -> Tensor:
    """What loss_fn has returned, 0-dim. TypeError for no scalar, ValueError for one that trains nothing."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"expected loss_fn to return a scalar, found {found}; take its mean, or its sum")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "expected a loss that depends on a parameter to train, found none; leave one that is not frozen"
        )
    return loss.reshape(())


def _described(wires: Sequence[Wire]) -> str:
    return ", ".join(str(wire) + " with a gradient" * wire.gradient for wire in wires)
