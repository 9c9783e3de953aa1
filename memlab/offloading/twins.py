"""The twins: a streamed layer's parameters at home, which an optimizer steps.

Writes to them are counted, so that what is on the device is brought again. PyTorch counts those to a tensor, but not
those to its `.data`. So a twin notes that somebody asked for its `.data`, who may write there at once.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.offloading.homes import Home
from memlab.offloading.layout import Shape, laid_out


class Twin(nn.Parameter):
    """A parameter at home. Inside the block it has a `layer`, after it none; `own` leads to the model's parameter."""

    layer: Any = None
    own: weakref.ref[nn.Parameter] | None = None

    def _get_data(self) -> Tensor:
        if self.layer is not None:
            self.layer.stale = True
        return super().data

    def _set_data(self, value: Tensor) -> None:
        """Inside the block the values are copied: the memory is the layer's home, and stays."""
        if self.layer is None:
            nn.Parameter.data.__set__(self, value)
            return
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"expected data of {tuple(self.shape)} in {self.dtype} for a streamed parameter, found "
                f"{tuple(value.shape)} in {value.dtype}; change it before the block"
            )
        self.data.copy_(value)

    def _get_grad(self) -> Tensor | None:
        """Raises RuntimeError after the block, if the gradient is the model's own: a step would do nothing."""
        gradient, own = super().grad, self.own and self.own()
        if gradient is None and self.layer is None and own is not None and own.grad is not None:
            raise RuntimeError(
                "expected an optimizer over streamed.parameters() to be used inside the block, where their gradients "
                "are; found one after it, when the model's own parameters have them: make one over model.parameters()"
            )
        return gradient

    data = property(_get_data, _set_data)
    grad = property(_get_grad, nn.Parameter.grad.__set__, nn.Parameter.grad.__delete__)

    def __reduce_ex__(self, protocol):
        """Saved as a plain Parameter, without the layer."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def sent_to(
    home: Home, parameters: list[nn.Parameter], twins: dict[nn.Parameter, Twin]
) -> tuple[list[Twin], list[Twin]]:
    """Twins at home with the values of these parameters, and those of them that together count all writes.

    twins: those there are already, each of which goes on with its own count; others are added.
    """
    shapes, _ = laid_out(parameters)
    several = len({p.dtype for p in parameters}) > 1
    shared = not several and twins.keys().isdisjoint(parameters)  # views of one tensor have one count
    for p, shape in zip(parameters, shapes, strict=True):
        place = apart(shape, home.flat) if several else shape.of(home.flat)
        place.copy_(p.data)
        if p in twins:
            twins[p].data = place
            twins[p].requires_grad_(p.requires_grad)
        else:
            twins[p] = Twin(place, p.requires_grad)
            twins[p].own = weakref.ref(p)
    home.rest()
    its = [twins[p] for p in parameters]
    return its, its[:1] if shared else its


def apart(shape: Shape, memory: Tensor) -> Tensor:
    """As `shape.of(memory)`, with a storage of its own: torch.save takes none for tensors of two dtypes."""
    count = math.prod(shape.size)
    if isinstance(memory, FakeTensor):
        return shape.of(memory)
    if count == 0:
        return torch.empty(shape.size, dtype=shape.dtype, device="cpu")
    own = torch.frombuffer(memory.numpy(), dtype=shape.dtype, count=count, offset=shape.offset_bytes)
    return own.as_strided(shape.size, shape.stride)
