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
from memlab.data_parallelism.unit import UNIT
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
    Raises ValueError for a norm_type that is not above 0, for parts that were cut for another number of ranks, and for
    parts that fully_shard has cut again. RuntimeError, on every rank, for a norm that is not finite, if that is asked
    for: it takes a wait for the GPU.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    trained = [p for p in parameters if p.grad is not None]
    if not parameters:
        return torch.tensor(0.0)
    counted, device = counted_parts(trained, group), parameters[0].device
    norm = norm_of_parts(counted, norm_type, error_if_nonfinite, device=device, group=group)
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return norm.to(functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32))


def counted_parts(trained: Iterable[Tensor], group=None) -> list[Tensor]:
    """Of the gradients of these parameters, what this rank is the first of the group to have, and so counts.

    Raises ValueError for parts that were cut for another number of ranks, or that fully_shard has cut again.
    """
    rank, ranks = place_in(group)
    counted = []
    for p in trained:
        refuse_other_group(p, f"a part of {tuple(p.shape)}", ranks)
        if hasattr(p, UNIT):
            raise ValueError(
                f"expected parameters that no data ranks have cut, found one of {p.numel()} numbers that fully_shard "
                "has left of one; share the data ranks' work with DataParallel, or clip without tensor ranks"
            )
        if (cut := cut_of(p)) is None:
            counted += [p.grad] if rank == 0 else []
        else:
            counted += [piece for piece, first in zip(cut.pieces_in(p.grad), cut.firsts(), strict=True) if first]
    return counted
