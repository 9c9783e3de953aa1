"""The norm of gradients of which some are cut over ranks and some are on all: every number counts once.

‖g‖² = Σ over ranks of Σ over its pieces of ‖piece‖² + Σ over whole ones of ‖g‖². Of what several ranks hold, the first
counts it. One number is summed; then each rank scales what it has.

Left to itself, each rank would clip by the norm of its own parts, and what all hold would differ from then on. The same
goes for a number that is not finite: only the rank whose part it is in sees it, so ask all whether to skip a step, as
chapter 06's LossScaler does with `agree` (torch.amp.GradScaler does not).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from memlab.data_parallelism.norms import norm_of_parts
from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import cut_of, refuse_other_group


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group=None,
) -> Tensor:
    """Scale the gradients of parameters, split ones and whole ones, so that the full model's norm is at most max_norm.

    parameters: of a split model, or the model; the same on all ranks of the group, which all must call.
    Returns the norm before, a scalar, in FP32 at least: the same on all ranks.
    Raises ValueError for a norm_type that is not above 0, and for parts that were cut for another number of ranks.
    RuntimeError, on every rank, for a norm that is not finite, if that is asked for: it takes a wait for the GPU.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    trained = [p for p in parameters if p.grad is not None]
    if not parameters:
        return torch.tensor(0.0)
    norm = norm_of_parts(
        counted_parts(trained, group), norm_type, error_if_nonfinite, device=parameters[0].device, group=group
    )
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return norm.to(functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32))


def counted_parts(trained: Iterable[Tensor], group=None) -> list[Tensor]:
    """Of the gradients of these parameters, what this rank of the group is the first to have, and so counts.

    Raises ValueError for parts that were cut for another number of ranks.
    """
    rank, ranks = place_in(group)
    counted = []
    for p in trained:
        refuse_other_group(p, f"a part of {tuple(p.shape)}", ranks)
        if (cut := cut_of(p)) is None:
            counted += [p.grad] if rank == 0 else []
        elif all(cut.firsts()):
            counted.append(p.grad)
        else:
            counted += [piece for piece, first in zip(cut.pieces_in(p.grad), cut.firsts(), strict=True) if first]
    return counted
