"""The loss of logits that nobody holds whole: ranks tell each other three numbers a token, and not the vocabulary.

    loss = log Σ exp(z) − z[target]

Each rank takes of its part of a token's logits z the largest, m, and s = Σ exp(z − m); and the one at the target, t, if
it has that one. From all ranks' m, s and t each computes the whole: M = max m, S = Σ s · exp(m − M), and loss = log S +
M − Σ t. The gradient is softmax, less 1 at the target. exp(z − m) is there already, and a number a row makes softmax of
it: so the gradient is finished before backward asks for it, and this one matrix is all that stays.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Milakov and Gimelshein 2018 (a sum that is corrected later).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from memlab.ranks import all_gather, place_in

SCRATCH_BYTES = 2**22
"""Where no matrix is kept in FP32 or FP64, rows pass through as much scratch, or through that of one row."""

_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    in_place: bool = False,
    group=None,
) -> Tensor:
    """Mean cross-entropy as F.cross_entropy's, of logits that are cut along the vocabulary.

    logits: (..., vocabulary / ranks), this rank's part, on rank 0 the first.  targets: (...,) of int64.
    All parts are of one width, and targets the same on all ranks: nobody asks the others.
    in_place: the logits' memory becomes the gradient's. Only for logits that nobody reads afterwards.
    Returns the mean over the targets that are not ignored, the same scalar on all ranks: of the logits' dtype, FP32 for
    FP16 and BF16.

    With n targets, v = vocabulary / ranks and e bytes a logit:
        saved for backward    n · v · e; and 8, the divisor of the mean
        held at the peak      n · v · e beside the logits, or nothing in place; for FP16 and BF16, and where there is
                              no backward, scratch of 4 MiB; and some 10 + 5 · ranks numbers a target
        backward              nothing: what is saved becomes the gradient; with retain_graph n · v · e
        sent                  one all-gather of 3 · n numbers, FP32 or FP64, from each rank; in backward nothing
    Sums are of FP32 at least. The gradient of FP16 and BF16 logits is rounded to their dtype here, and once more when
    it is multiplied by the loss's. Not here: sums, and a vocabulary that was padded.

    Raises ValueError for shapes that do not go together, TypeError for other dtypes; IndexError, on all ranks, for
    targets that are not in the vocabulary. A GPU notices those by itself, as F.cross_entropy's: a device-side assert,
    later.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"expected a target for each row of logits, {tuple(logits.shape[:-1])}, found {tuple(targets.shape)}; "
            "logits are (..., vocabulary / ranks)"
        )
    if targets.dtype != torch.int64 or not logits.is_floating_point():
        raise TypeError(f"expected floating logits and targets of int64, found {logits.dtype} and {targets.dtype}")
    return _CrossEntropy.apply(logits, targets, ignore_index, in_place, group)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index, in_place, group):
        ctx.shape, width = logits.shape, logits.shape[-1]
        rank, ranks = place_in(group)
        z, targets = logits.detach().reshape(-1, width), targets.reshape(-1)
        ignored = targets == ignore_index
        here, place = _find(targets, ignored, rank * width, width, ranks * width)

        # m, s and t of this rank
        keep = ctx.needs_input_grad[0]
        wide = torch.promote_types(z.dtype, torch.float32)
        own = torch.empty(3, len(z), dtype=wide, device=z.device)
        own[0] = z.amax(-1)
        own[2] = _at_target(z, place, targets, ranks * width).masked_fill_(~here, 0)
        weights = (z if in_place else torch.empty_like(z)) if keep else None
        whole = keep and z.dtype == wide  # exp(z − m) is written where the gradient will lie
        finite = own[0].masked_fill(own[0] == -torch.inf, 0)  # −inf − −inf would be nan
        places = list(_rows(z, wide, weights if whole else None))
        for rows, into in places:
            torch.sub(z[rows], finite[rows, None], out=into)
            torch.sum(into.exp_(), -1, out=own[1, rows])

        # M, S and the loss, of all
        every = own[None]
        if ranks > 1:
            every = own.new_empty(ranks * 3, len(z))
            all_gather(every, own, group)
            every = every.view(ranks, 3, len(z))
        largest = every[:, 0].amax(0)
        total = (every[:, 1] * torch.exp(every[:, 0] - largest)).sum(0)
        losses = total.log() + (largest - every[:, 2].sum(0))
        count = (~ignored).sum()

        if keep:
            for rows, into in places:
                if whole:
                    scale = torch.exp(own[0, rows] - largest[rows]) / total[rows]
                else:
                    torch.sub(z[rows], largest[rows, None], out=into).exp_()
                    scale = 1 / total[rows]
                into.mul_(scale.masked_fill_(ignored[rows], 0)[:, None])
                if not whole:
                    weights[rows] = into
            softmax = weights.gather(-1, place[:, None])[:, 0]
            weights.scatter_(-1, place[:, None], torch.where(here, torch.expm1(-losses).to(z.dtype), softmax)[:, None])
            ctx.save_for_backward(weights, count.clamp(min=1))
        return losses.masked_fill_(ignored, 0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        gradient, count = ctx.saved_tensors
        if _graph_is_kept():
            gradient = gradient.clone()
        return gradient.mul_(d_loss / count).view(ctx.shape), None, None, None, None


def _find(targets: Tensor, ignored: Tensor, start: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Which targets' logits are here, and where: 0 for one that is elsewhere, `width` for one that is nowhere."""
    nowhere = ((targets < 0) | (targets >= vocabulary)).logical_and_(~ignored)
    place = targets - start
    here = ((place >= 0) & (place < width)).logical_and_(~ignored)
    return here, place.masked_fill_(~here, 0).masked_fill_(nowhere, width)


def _at_target(z: Tensor, place: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """The logits there, (n,). Looking up one that is nowhere fails by itself, without waiting for a GPU."""
    try:
        return z.gather(-1, place[:, None])[:, 0]
    except (IndexError, RuntimeError) as error:
        nowhere = targets[place == z.shape[-1]] if targets.is_cpu else targets[:0]
        if not len(nowhere):
            raise
        raise IndexError(
            f"expected targets from 0 to {vocabulary - 1}, or ignore_index, found {int(nowhere[0])}; the vocabulary of "
            f"all ranks together has {vocabulary} entries"
        ) from error


def _rows(z: Tensor, wide: torch.dtype, weights: Tensor | None):
    """Rows in groups, and where to compute each: in `weights` all at once; without, in scratch, some at a time."""
    count, columns = z.shape
    if weights is not None:
        yield slice(None), weights
        return
    step = max(1, SCRATCH_BYTES // (wide.itemsize * max(1, columns)))
    scratch = torch.empty(min(step, count), columns, dtype=wide, device=z.device)
    for begin in range(0, count, step):
        yield slice(begin, begin + step), scratch[: min(step, count - begin)]
