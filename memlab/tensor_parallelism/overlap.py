"""A column parallel layer's matmul, whose backward sends while it computes.

y = x Aᵀ + b needs nobody. Its backward makes three gradients, and only dx = dy A is a summand, to be summed over ranks:

                                     dx = dy A            dw = dyᵀ x, db
    all rows on every rank                                all-reduce of dx
    sequence parallel                all-gather of x      reduce-scatter of dx

What is sent stands under what is computed meanwhile. Left to autograd, the three gradients would be one step, and the
sum would begin after it.

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from memlab.tensor_parallelism.regions import (
    neighbours,
    own_rows_of_sum,
    rows_of_all,
    sum_over_ranks,
    under_own_handle,
)


class Sending(NamedTuple):
    """What a column parallel layer sends, and to whom.

    group: the ranks that the layer is split over.
    sequence_parallel: x is this rank's rows. keep_gathered: all rows stay until backward, and are gathered once.
    shared: (start, stop, copies): outputs that `copies` neighbours have alike; their gradients are summed over these.
    """

    group: object = None
    sequence_parallel: bool = False
    keep_gathered: bool = False
    shared: tuple[tuple[int, int, int], ...] = ()


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sending: Sending) -> Tensor:
    """F.linear of all rows with this rank's outputs; casts as F.linear does under autocast.

    x: (..., width), whole, or (rows / ranks, ..., width), this rank's rows.  weight: (outputs / ranks, width).
    bias: (outputs / ranks,).  Returns (..., outputs / ranks), of all rows.

    Kept for backward: x as it is given (or with keep_gathered as it is gathered) if the weight is trained, and the
    weight if x needs a gradient; what no gradient needs is neither kept nor sent. Backward holds beside dy and the
    gradients, with sequence parallelism, all rows of x and of dx for a while: what is on its way cannot be freed.
    Raises RuntimeError in a backward with create_graph.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):  # which does not look inside a Function
        x, weight, bias = (_cast(t, torch.get_autocast_dtype(device)) for t in (x, weight, bias))
    return _ColumnLinear.apply(x, weight, bias, sending)


class _ColumnLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, sending):
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.sending, ctx.gathers_again = sending, sending.sequence_parallel and not sending.keep_gathered
        rows = rows_of_all(x, sending.group)[0] if sending.sequence_parallel else x
        ctx.save_for_backward((x if ctx.gathers_again else rows) if needs_dw else None, weight if needs_dx else None)
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "expected backward without create_graph, since ColumnParallelLinear sends while it computes, which "
                "cannot be differentiated again; F.linear(copy_to_ranks(x), layer.weight, layer.bias) can"
            )
        rows, weight = ctx.saved_tensors
        group, gathering, works = ctx.sending.group, None, []
        dx = dw = db = None
        if rows is not None and ctx.gathers_again:
            rows, gathering = rows_of_all(rows, group, async_op=True)
        if weight is not None:
            dx = dy @ weight.conj()  # of real numbers: itself
            if ctx.sending.sequence_parallel:
                dx, summing = own_rows_of_sum(dx, group, async_op=True)
            else:
                summing = sum_over_ranks(dx, group, async_op=True)
            works.append(summing)
        dy = torch.atleast_2d(dy).flatten(0, -2)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0)
        if gathering is not None:
            gathering.wait()
        if rows is not None:
            dw = dy.t() @ torch.atleast_2d(rows).flatten(0, -2).conj()
        for start, stop, copies in ctx.sending.shared:
            alike = [d[start:stop] for d in (dw, db) if d is not None]
            works += [sum_over_ranks(d, neighbours(copies, group), async_op=True) for d in alike]
        for work in works:
            work.wait()
        return None if dx is None else under_own_handle(dx), dw, db, None


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype is torch.float64 else tensor.to(dtype)
