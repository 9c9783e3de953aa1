"""The observer's own footprint, and how the meter takes it back.

Where two gradients meet, autograd's engine adds them: in place when nobody else holds the first one, out of place
otherwise. Under *any* TorchDispatchMode it always adds out of place, because it cannot know what the mode would do
with a tensor that changes. So merely watching a backward pass would raise its peak (6 % on a Mamba). The meter
therefore does the engine's in-place addition in the engine's stead, under the engine's own conditions
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).

One condition is a reference count, which reads higher from Python by a constant that depends on the version of torch.
It is not assumed but measured, once, on a gradient known to have one owner.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ADD = torch.ops.aten.add.Tensor
ADD_ = torch.ops.aten.add_.Tensor


def counts(tensor: Tensor) -> tuple[int, int]:
    """How many references the tensor and its storage have, as seen from inside a dispatch mode."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    seen: tuple[int, int] = (0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ADD:
            self.seen = counts(args[0])
        return func(*args, **(kwargs or {}))


@functools.cache
def sole_owner_counts() -> tuple[int, int]:
    """The counts of a gradient that only the engine holds, at the moment the engine adds another to it."""
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x.view(2)
        loss = (y.sin() + y.cos()).sum()
    with _Watch() as watch:
        loss.backward()
    return watch.seen


def would_add_in_place(old: Tensor, var: Tensor) -> bool:
    """Whether the engine, unwatched, would have added `var` into `old` rather than made a third tensor."""
    if (
        type(old) is not Tensor
        or type(var) is not Tensor
        or old.layout is not torch.strided
        or var.layout is not torch.strided
    ):
        return False
    tensor_count, storage_count = counts(old)
    sole_tensor, sole_storage = sole_owner_counts()
    return (
        tensor_count <= sole_tensor
        and storage_count <= sole_storage
        and old.dtype == var.dtype
        and old.shape == var.shape
        and old.device == var.device
        and not old._is_zerotensor()
        and torch.ops.aten.is_non_overlapping_and_dense(old)
    )
