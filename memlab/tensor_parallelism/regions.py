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

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from memlab.ranks import all_gather, place_in, reduce_scatter


def copy_to_ranks(x: Tensor, group=None) -> Tensor:
    """x, which all ranks hold, on its way into computations that differ between ranks. (...) → the same."""
    return _Copy.apply(x, group)


def reduce_from_ranks(x: Tensor, group=None) -> Tensor:
    """The sum of all ranks' x. (...) → the same shape."""
    return _Reduce.apply(x, group)


def gather_from_ranks(x: Tensor, group=None) -> Tensor:
    """All ranks' x side by side. (..., width / ranks) → (..., width)."""
    return _Gather.apply(x, group)


def scatter_to_ranks(x: Tensor, group=None) -> Tensor:
    """This rank's part of x, which all ranks hold. (..., width) → (..., width / ranks)."""
    return _Scatter.apply(x, group)


def gather_sequence(x: Tensor, group=None) -> Tensor:
    """All ranks' rows. (rows / ranks, ...) → (rows, ...)."""
    return _GatherSequence.apply(x, group)


def reduce_scatter_sequence(x: Tensor, group=None) -> Tensor:
    """This rank's rows of the sum of all ranks' x. (rows, ...) → (rows / ranks, ...)."""
    return _ReduceScatterSequence.apply(x, group)


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _summed(dy, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _side_by_side(x, group)

    @staticmethod
    def backward(ctx, dy):
        return _own_part(dy, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _own_part(x, group)

    @staticmethod
    def backward(ctx, dy):
        return _side_by_side(dy, ctx.group), None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return rows_of_all(x, group)

    @staticmethod
    def backward(ctx, dy):
        return own_rows_of_sum(dy, ctx.group), None


class _ReduceScatterSequence(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_rows_of_sum(x, group)

    @staticmethod
    def backward(ctx, dy):
        return rows_of_all(dy, ctx.group), None


# ---- without autograd


def rows_of_all(x: Tensor, group=None) -> Tensor:
    """(rows / ranks, ...) → (rows, ...)."""
    _, ranks = place_in(group)
    if ranks == 1:
        return x.view_as(x)
    whole = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(whole, x.contiguous(), group)
    return whole


def own_rows_of_sum(x: Tensor, group=None) -> Tensor:
    """(rows, ...) → (rows / ranks, ...)."""
    _, ranks = place_in(group)
    if ranks == 1:
        return x.view_as(x)
    own = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    reduce_scatter(own, x.contiguous(), group)
    return own


def _summed(x: Tensor, group) -> Tensor:
    if place_in(group)[1] == 1:
        return x.view_as(x)
    total = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


def _side_by_side(x: Tensor, group) -> Tensor:
    _, ranks = place_in(group)
    if ranks == 1:
        return x.view_as(x)
    parts = x.new_empty(ranks, *x.shape)
    all_gather(parts, x.contiguous(), group)
    return parts.movedim(0, -2).flatten(-2)


def _own_part(x: Tensor, group) -> Tensor:
    rank, ranks = place_in(group)
    return x.chunk(ranks, -1)[rank].contiguous()
