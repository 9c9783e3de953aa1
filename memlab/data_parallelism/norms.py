"""The norm of a vector that is cut over ranks, and clipping by it: each rank knows its parts, one number is summed.

‖g‖ₚ = (Σ over ranks of Σ over parts of ‖part‖ₚᵖ)^(1/p),  and the largest |element| for p = ∞
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, distributed


@torch.no_grad()
def clip_parts_(
    gradients: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    device: torch.device,
    group=None,
) -> Tensor:
    """Scale gradients of which every rank has other parts, so that the norm of all is at most max_norm.

    gradients: this rank's parts, of any shapes, maybe none or empty ones; changed in place. Every rank calls it.
    device: where collectives run. Returns the norm before, () of FP64, the same on every rank.

    Raises ValueError for a norm_type that is not above 0; RuntimeError for a norm of inf or nan, if told to.
    """
    parts = [gradient for gradient in gradients if gradient.numel()]
    total = norm_of_parts(parts, norm_type, error_if_nonfinite, device=device, group=group)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in parts:
        part.mul_(factor.to(part.device))
    return total


@torch.no_grad()
def norm_of_parts(
    parts: Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    device: torch.device,
    group=None,
) -> Tensor:
    """The norm of all ranks' parts together, () of FP64, the same on every rank. Arguments as of `clip_parts_`.

    Raises ValueError for a norm_type that is not above 0; RuntimeError with `error_if_nonfinite`, on every rank.
    """
    norm_type = float(norm_type)  # "inf", too, as torch has it
    if not norm_type > 0:
        raise ValueError(f"expected a norm_type above 0, or inf, found {norm_type}")
    parts = [part for part in parts if part.numel()]
    largest = norm_type == math.inf
    total = torch.zeros((), dtype=torch.float64, device=device)
    norms = []
    for kind in ([p for p in parts if not p.is_complex()], [p for p in parts if p.is_complex()]):
        if kind:  # a complex number counts by its absolute value
            wide = functools.reduce(torch.promote_types, {part.dtype for part in kind}, torch.float32)
            norms += torch._foreach_norm(kind, norm_type, dtype=wide)
    if norms:
        norms = torch.stack(norms).to(device, torch.float64)
        total = norms.amax() if largest else norms.pow(norm_type).sum()
    distributed.all_reduce(total, distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM, group)
    if not largest:
        total = total.pow(1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"expected a finite norm of the gradients, found {total.item()}; skip the step")
    return total
