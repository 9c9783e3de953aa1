"""The loss of logits that nobody holds whole: three numbers a token are summed over ranks, and not the vocabulary.

loss = log Σ exp(z) − z[target] needs of all logits z of a token their maximum (so that exp does not overflow), the sum
of exp, and the one at the target, which a single rank has.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from memlab.ranks import place_in


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean", group=None
) -> Tensor:
    """Cross-entropy as F.cross_entropy's, of logits that are cut along the vocabulary.

    logits: (tokens, vocabulary / ranks), this rank's part.  targets: (tokens,) of int64, the same on all ranks.
    Returns the same scalar on all ranks, or with reduction="none" (tokens,).
    """
    losses = _CrossEntropy.apply(logits, targets, ignore_index, group)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index, group):
        rank, ranks = place_in(group)
        start = rank * logits.shape[-1]
        largest = logits.amax(-1, keepdim=True)
        if ranks > 1:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
        weights = logits - largest
        here = (targets >= start) & (targets < start + logits.shape[-1])
        local = (targets - start).masked_fill(~here, 0)
        at_target = weights.gather(-1, local[:, None])[:, 0].masked_fill(~here, 0)
        weights.exp_()
        both = torch.stack([weights.sum(-1), at_target])
        if ranks > 1:
            distributed.all_reduce(both, group=group)
        ignored = targets == ignore_index
        losses = (both[0].log() - both[1]).masked_fill(ignored, 0)
        ctx.save_for_backward(weights.div_(both[0][:, None]), local, here, ignored)
        return losses

    @staticmethod
    def backward(ctx, d_losses):
        softmax, local, here, ignored = ctx.saved_tensors
        d = d_losses.masked_fill(ignored, 0)
        d_logits = softmax * d[:, None]
        d_logits.scatter_add_(-1, local[:, None], -(d * here)[:, None])
        return d_logits, None, None, None
