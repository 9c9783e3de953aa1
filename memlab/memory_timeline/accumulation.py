"""The observer's own footprint, and how the meter takes it back.

Where two gradients meet, autograd's engine adds them: in place when nobody else holds the first one, out of place
otherwise. Under *any* TorchDispatchMode it always adds out of place, because it cannot know what the mode would do
with a tensor that changes. So merely watching a backward pass would raise its peak (6 % on a Mamba). The meter
therefore does the engine's in-place addition in the engine's stead, under the engine's own conditions
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).

One condition is a reference count, which reads higher from Python by a constant that depends on the version of torch.
It is not assumed but measured, once, on a gradient known to have one owner. Python's own count is asked as well: a
tensor that a hook keeps in a list is one more reference to the Python object, and none to the tensor behind it.

Three footprints stay. torch computes a gradient that it scatters into zeros (of indexing, gather, max) by a formula
that holds the zeros twice while any mode is on. A sparse gradient (of an embedding with sparse=True) it copies then,
where it would give it to the parameter as it is: tests say how large both are. And a few gradients (of prod, cumprod,
masked_fill with a tensor, max of all elements) it computes by another formula then, so that their last bits may differ
from those of an unwatched run; they are what they are under a mode that does nothing.
"""

from __future__ import annotations

import functools
import operator
import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.memory_timeline.history import History

ADD = torch.ops.aten.add.Tensor
ADD_ = torch.ops.aten.add_.Tensor


def counts(args: tuple[Tensor, ...]) -> tuple[int, int, int, int]:
    """How many references the first of an op's arguments and its storage have: in C++, and in Python.

    The arguments come as the tuple that a dispatch mode is given, since any other name for the tensor is one more.
    """
    return (
        args[0]._use_count(),
        torch._C._storage_Use_Count(args[0].untyped_storage()._cdata),
        sys.getrefcount(args[0]),
        sys.getrefcount(args[0].untyped_storage()),
    )


class _Watch(TorchDispatchMode):
    seen: tuple[int, int, int, int] = (0, 0, 0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ADD:
            self.seen = counts(args)
        return func(*args, **(kwargs or {}))


@functools.cache
def sole_owner_counts(imagined: bool = False) -> tuple[int, int, int, int]:
    """The counts of a gradient that only the engine holds, at the moment the engine adds another to it.

    imagined: of fake tensors, which the caller's block makes.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x.view(2)
        loss = (y.sin() + y.cos()).sum()
        with _Watch() as watch:
            loss.backward()
    return watch.seen


def would_add_in_place(args: tuple[Tensor, Tensor], sole_owner: tuple[int, int, int, int]) -> bool:
    """Whether the engine, unwatched, would have added the second gradient into the first rather than made a third."""
    if any(
        type(each) not in (Tensor, FakeTensor) or each.layout is not torch.strided or each._is_zerotensor()
        for each in args
    ):
        return False
    found = counts(args)
    old, var = args
    return (
        all(map(operator.le, found, sole_owner))
        and old.dtype == var.dtype
        and old.shape == var.shape
        and old.device == var.device
        and torch.ops.aten.is_non_overlapping_and_dense(old)
    )


class GradientSums:
    """Tells the engine's own sums of gradients from the additions of formulas.

    live: a storage's address → its number in the history. imagined: of fake tensors, which the caller's block makes.
    """

    def __init__(self, history: History, live: dict[int, int], *, imagined: bool):
        self._history, self._live, self._sole_owner = history, live, sole_owner_counts(imagined)

    def is_one(self, args: tuple, kwargs: dict | None, evaluated, node: int) -> bool:
        """Whether this addition is the engine joining two gradients, which it would do in place if it were not watched.

        A node's own formula may add too, and may read the first operand again: so the first operand must be a
        gradient that another node made and that the present one has not read, or one of two that it made for the
        same input. evaluated, node: the present one, and its number.
        """
        if kwargs or len(args) != 2 or evaluated is None or torch.is_grad_enabled():
            return False
        if forward_ad._current_level >= 0:  # done in place, the sum would bring the first one's tangent along
            return False
        if not would_add_in_place(args, self._sole_owner):
            return False
        number = self._live.get(args[0].untyped_storage()._cdata)
        if number is None:
            return False
        ops, birth, last_read = self._history.ops, self._history.births[number].op, self._history.last_read[number]
        born_here = birth >= 0 and ops[birth].node == node
        if born_here:
            targets = [target for target in evaluated.next_functions if target[0] is not None]
            return len(set(targets)) < len(targets)
        return last_read < 0 or ops[last_read].node != node
