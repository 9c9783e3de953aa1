"""The two halves of an all-reduce on flat tensors, under one name in every supported PyTorch.

reduce_scatter: everyone brings the whole and leaves with the sum of one piece
all_gather:     everyone brings one piece and leaves with the whole
"""

from __future__ import annotations

import torch.distributed.nn.functional  # noqa: F401  imported later, by an optimizer, its defaults keep the group alive
from torch import Tensor, distributed

# PyTorch 2.13 renamed both, and warns of the older names, the only ones that 2.11 has.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


def all_gather(whole: Tensor, piece: Tensor, group=None, async_op: bool = False):
    """Fill `whole` with every rank's `piece`, rank 0's first.

    whole: (ranks · n,), piece: (n,), of one dtype; `piece` may be the rank's own place in `whole`. Returns None, or
    with async_op a Work whose `wait()` ends it.
    """
    return _gather(whole, piece, group=group, async_op=async_op)


def reduce_scatter(piece: Tensor, whole: Tensor, group=None, async_op: bool = False):
    """Fill `piece` with the sum over ranks of this rank's place in their `whole`.

    piece: (n,), whole: (ranks · n,), of one dtype; `piece` may be the rank's own place in `whole`. Returns None, or
    with async_op a Work whose `wait()` ends it.
    """
    return _scatter(piece, whole, group=group, async_op=async_op)
