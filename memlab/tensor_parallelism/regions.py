"""Between what all ranks hold and what each has a part of: collectives that autograd knows, in conjugate pairs.

A linear function's backward is its transpose. Copying one x to N ranks has the sum as its transpose: each rank sends
back a gradient, and they add up. The sum of N ranks' parts, which all then hold, has the copy. So one is the other's
backward, and so it is with gathering and scattering:

    forward                                       backward
    copy_to_ranks           nothing               all-reduce         "f" in the Megatron paper
    reduce_from_ranks       all-reduce            nothing            "g"
    gather_from_ranks       all-gather            own part           along the last dimension
    scatter_to_ranks        own part              all-gather         along the last dimension
    gather_sequence         all-gather            reduce-scatter     along the first dimension
    reduce_scatter_sequence reduce-scatter        all-gather         along the first dimension

What must hold is on both sides of the table: a tensor that all ranks hold has a gradient that all ranks hold whole.
In a group of one each of them returns its argument, and nothing is sent. All ranks must call them in the same order,
with tensors of the same shape and dtype; any dtype that the group's backend sums. What has no dimension has no parts:
the last four raise ValueError for it.

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from memlab.ranks import all_gather, place_in, reduce_scatter
from memlab.tensor_parallelism.cuts import share


def copy_to_ranks(x: Tensor, group=None) -> Tensor:
    """x, which all ranks hold, on its way into computations that differ between ranks. (...) → the same."""
    return x if place_in(group)[1] == 1 else _Copy.apply(x, group)


def reduce_from_ranks(x: Tensor, group=None, *, inplace: bool = False) -> Tensor:
    """The sum of all ranks' x. (...) → the same shape.

    inplace: x is not needed any more, so the sum may take its place instead of a second tensor of that size. It does,
      if x is contiguous and no view of another tensor.
    """
    return x if place_in(group)[1] == 1 else _Reduce.apply(x, group, inplace)


def gather_from_ranks(x: Tensor, group=None) -> Tensor:
    """All ranks' x side by side. (..., width / ranks) → (..., width).

    A collective lays the ranks' parts one after the other, so a second tensor of this size is needed for a moment.
    """
    return x if place_in(group)[1] == 1 else _Gather.apply(_cuttable(x), group)


def scatter_to_ranks(x: Tensor, group=None) -> Tensor:
    """This rank's part of x, which all ranks hold. (..., width) → (..., width / ranks).

    Raises ValueError for a width that the ranks do not divide.
    """
    return x if place_in(group)[1] == 1 else _Scatter.apply(_cuttable(x), group)


def gather_sequence(x: Tensor, group=None) -> Tensor:
    """All ranks' rows. (rows / ranks, ...) → (rows, ...)."""
    return x if place_in(group)[1] == 1 else _GatherSequence.apply(_cuttable(x), group)


def reduce_scatter_sequence(x: Tensor, group=None) -> Tensor:
    """This rank's rows of the sum of all ranks' x. (rows, ...) → (rows / ranks, ...).

    Raises ValueError for rows that the ranks do not divide.
    """
    return x if place_in(group)[1] == 1 else _ReduceScatterSequence.apply(_cuttable(x), group)


def _cuttable(x: Tensor) -> Tensor:
    if x.dim() == 0:
        raise ValueError(
            "expected x of at least one dimension, of which ranks have parts, found a single number; give x.reshape(1)"
        )
    return x


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return under_own_handle(reduce_from_ranks(dy, ctx.group)), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, group, inplace):
        ctx.group = group
        if inplace and x.is_contiguous() and not x._is_view():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        sum_over_ranks(x, group)
        return x

    @staticmethod
    def backward(ctx, dy):
        return copy_to_ranks(dy, ctx.group), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        one_after_another, _ = rows_of_all(x, group)
        return one_after_another.view(place_in(group)[1], *x.shape).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, dy):
        return scatter_to_ranks(dy, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        rank, ranks = place_in(group)
        part = share(x.shape[-1], "features", ranks)
        return x.narrow(-1, rank * part, part).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, dy):
        return gather_from_ranks(dy, ctx.group), None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return rows_of_all(x, group)[0]

    @staticmethod
    def backward(ctx, dy):
        return reduce_scatter_sequence(dy, ctx.group), None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_rows_of_sum(x, group)[0]

    @staticmethod
    def backward(ctx, dy):
        return gather_sequence(dy, ctx.group), None


# ---- without autograd; with async_op there is a Work to wait for, otherwise None


def sum_over_ranks(x: Tensor, group=None, async_op: bool = False):
    """Replace x, dense, by its sum over ranks. (...) → Work or None."""
    return distributed.all_reduce(x, group=group, async_op=async_op)


def under_own_handle(gradient: Tensor) -> Tensor:
    """A gradient that was sent, for autograd to keep: the same memory as another tensor object.

    gloo's thread may hold the one that it sent for a moment after `wait`, and where others hold a parameter's gradient,
    autograd keeps a copy instead.
    """
    return gradient.view_as(gradient)


def rows_of_all(x: Tensor, group=None, async_op: bool = False):
    """(rows / ranks, ...) → (rows, ...), and Work or None."""
    whole = x.new_empty(place_in(group)[1] * x.shape[0], *x.shape[1:])
    return whole, all_gather(whole, _in_memory(x), group, async_op)


def own_rows_of_sum(x: Tensor, group=None, async_op: bool = False):
    """(rows, ...) → (rows / ranks, ...), and Work or None. Raises ValueError for rows that the ranks do not divide."""
    own = x.new_empty(share(x.shape[0], "rows", place_in(group)[1]), *x.shape[1:])
    return own, reduce_scatter(own, _in_memory(x), group, async_op)


def _in_memory(x: Tensor) -> Tensor:
    """x, contiguous, with signs that only PyTorch knows of (`conj`, and what `.imag` makes of it) written out."""
    return x.contiguous().resolve_conj().resolve_neg()


_NEIGHBOURS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # process group → {copies: the smaller group}


def neighbours(copies: int, group=None):
    """The process group of those `copies` ranks, standing beside each other, that hold what this rank holds.

    Made on the first call, for which its members wait for each other, and then remembered as long as `group` lives: of
    layers that share keys and values there are many.
    """
    group = distributed.group.WORLD if group is None else group
    known = _NEIGHBOURS.setdefault(group, {})
    if copies not in known:
        first = place_in(group)[0] // copies * copies
        members = distributed.get_process_group_ranks(group)[first : first + copies]
        known[copies] = distributed.new_group(members, use_local_synchronization=True)
    return known[copies]
