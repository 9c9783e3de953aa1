"""Whether a loss or a gradient is inf or nan, asked on the device where it is: nothing here waits for a GPU.

Of gradients PyTorch has a kernel that reads and multiplies many tensors in one launch, and writes 1. into a number on
the device where it met inf or nan: found_inf. That number begins as what the losses said.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from contextlib import nullcontext

import torch
from torch import Tensor

SPREAD = "device_mesh", "placements"  # what a DTensor says of the ranks that have its parts


def note_losses(bad_loss: Tensor, losses: Tensor) -> None:
    """Make `bad_loss` 1., in place, if one of the losses is inf or nan; else it stays what it was, 1. or 0.

    bad_loss: 0-dim, FP32. losses: of any shape, dtype and device; inside vmap and grad of torch.func what they wrap.
    In place, because a CUDA graph that has captured this does it again at each replay.
    """
    losses, block = losses.detach(), nullcontext()
    if torch._C._functorch.maybe_current_level() is not None:  # asked first: torch.compile can't trace the rest
        losses, block = torch.func.debug_unwrap(losses), torch._C._DisableFuncTorch()
    with block:
        bad = losses.isfinite().all().logical_not()
        bad = bad.full_tensor() if hasattr(bad, "full_tensor") else bad  # of a DTensor, what all its ranks have
        bad_loss.logical_or_(bad.to(bad_loss.device))


def gradients_in_memory(optimizer) -> list[Tensor]:
    """The gradients of its parameters, of each sparse one the values that it has. An FP16 one is added up before."""
    found = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if (gradient := parameter.grad) is None:
            continue
        if gradient.is_sparse:
            if gradient.dtype is torch.float16:  # adds up what is there twice, which may overflow
                parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        found.append(gradient)
    return found


@torch.no_grad()
def multiply_and_check(gradients: list[Tensor], factor: Tensor, bad_loss: Tensor) -> Tensor:
    """Multiply gradients in place. Returns found_inf: 1. if one of them was inf or nan, or if `bad_loss` is, else 0.

    gradients: of any shapes, dtypes and devices. factor, bad_loss and found_inf: 0-dim, FP32, on one device.
    Of DTensors the parts that this rank has are multiplied, and found_inf is that of all ranks that have parts.
    """
    alike = defaultdict(list)  # one kernel reads and multiplies all that are
    for gradient in gradients:
        spread = () if type(gradient) is Tensor else (getattr(gradient, name, None) for name in SPREAD)
        alike[(gradient.device, gradient.dtype, *spread)].append(gradient)
    found = []
    for (device, *_), some in alike.items():
        found.append(bad_loss.to(device, copy=True))
        torch._amp_foreach_non_finite_check_and_unscale_(some, found[-1], factor.to(device))
    return functools.reduce(torch.maximum, [here.to(factor.device) for here in found] or [bad_loss.clone()])
