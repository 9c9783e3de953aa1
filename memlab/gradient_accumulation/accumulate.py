"""Gradient accumulation: the gradients of a large batch from micro-batches that fit, one after another.

A batch's loss is a mean over N examples or labels, so its gradient is a sum of N parts, each divided by N:

    ∇ (1/N · Σ loss) = Σ over micro-batches of ∇ (1/N · Σ loss in the micro-batch)

and backward() adds to .grad what it finds. All there is to get right is N. It is the *whole group's*, so it is counted
before the first backward; and what is counted is what the loss is a mean of: where micro-batches are ragged, a mean of
their means is another loss, in which a label weighs more the fewer there are beside it. (Ott et al. 2018 train so;
the pull requests transformers#34191 and torchtune#1875 tell of the mean of means.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memlab.checking import one_of, positive
from memlab.gradient_accumulation.reductions import refuse

Count = int | float | Tensor  # how many examples or labels there are
REDUCTIONS = ("sum", "mean")


def groups(micro_batches: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` micro-batches, in order, for one step each; the last has what is left over.

    >>> list(groups(range(5), 2))
    [[0, 1], [2, 3], [4]]

    Raises TypeError or ValueError for a size that is no whole number above 0.
    """
    positive("size", size)
    waiting = iter(micro_batches)
    return iter(lambda: list(itertools.islice(waiting, size)), [])


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a batch: of one tensor, or of lists, tuples and dicts of them."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)


def examples(micro_batch: Any) -> int:
    """How many examples a micro-batch has: rows of its first tensor. Raises ValueError where there is none.

    Where that tensor is not (examples, …), as in a list of images, count yourself: `lambda batch: len(batch[0])`.
    """
    for tensor in tensors_in(micro_batch):
        if tensor.dim():
            return len(tensor)
    raise ValueError(f"expected a micro-batch with a tensor of (examples, …), found {type(micro_batch).__name__}")


def labels(micro_batch: Any, ignore_index: int = -100) -> Tensor:
    """How many labels a micro-batch has, as a 0-dim int64: entries of y, ignored ones left out.

    micro_batch: (x, y), or a dict with "labels". y: class numbers of any shape; the loss skips `ignore_index`, as
    cross_entropy does. A model that shifts its labels itself, as Transformers' do, never reads the first of each text:
    count `batch["labels"][:, 1:]`. A cross_entropy with class weights is a mean over weights: count `weight[y].sum()`.

    Raises TypeError for another micro-batch, such as a tensor of tokens alone, and for a y of no whole numbers.
    """
    if isinstance(micro_batch, Mapping):
        y = micro_batch.get("labels")
    else:
        y = micro_batch[1] if isinstance(micro_batch, (tuple, list)) and len(micro_batch) > 1 else None
    if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        kind = type(micro_batch).__name__
        found = y.dtype if isinstance(y, Tensor) else f"a {kind} without" if y is None else f"{type(y).__name__} there"
        raise TypeError(
            f"expected class numbers as the second of (x, y), or as 'labels' of a dict; found {found}; count what your "
            "loss is a mean of: count=lambda batch: batch[:, 1:].numel()"
        )
    return (y != ignore_index).sum()


def accumulate(
    loss: Callable[[Any], Tensor],
    micro_batches: Iterable,
    *,
    count: Callable[[Any], Count] = examples,
    reduction: str = "sum",
    scaler=None,
    model=None,
    agree: Callable[[Count], Count] | None = None,
) -> Tensor:
    """Add to .grad the gradient of the mean loss over all micro-batches; at most one of them is alive at a time.

        for group in groups(loader, 8):
            mean = accumulate(summed_loss, group, count=labels)
            clip_grad_norm_(model.parameters(), 1.0)  # once, when the gradient is whole
            optimizer.step()
            optimizer.zero_grad()

    loss: a function of a micro-batch that gives a scalar, summed over what `count` counts; with reduction="mean", its
      mean. Move the micro-batch to the GPU in there, and only one is on it. Autocast belongs in there too: around all
      of this its 16-bit weights stay until the end. A 16-bit loss needs `.float()` before a scaler's large numbers.
    micro_batches: tensors, or lists, tuples or dicts of them, of any sizes. They are listed before the first backward.
    count: how many examples or labels a micro-batch has: `examples`, `labels`, or a function of yours.
    scaler: a LossScaler or torch's GradScaler. Afterwards: unscale_, clip, step, update, once.
    model: what averages gradients over ranks, in the last backward only: anything with `no_sync`, as DDP has.
    agree: for ranks that average their gradients: a function of N that gives the mean of all ranks' N. Every rank has
      to come so far: a rank without a micro-batch raises, and so does one without labels if it is asked for means.

    Returns the mean loss, 0-dim, FP32 at least, detached: Σ loss / N (with `agree`, this rank's part of it: the mean of
    all ranks' is the mean loss). Nothing waits for a GPU; so labels counted there are not checked. Where a whole group
    has none, its sums have gradient 0; the mean of a micro-batch without labels is nan.

    A mean where a sum was asked for, or the reverse, is refused where autograd's graph shows it: the losses of
    torch.nn.functional, mean() and sum(). It does not show in compiled losses, in your own autograd.Functions, in
    mean * n and in sum / n; so not in kl_div(reduction="batchmean"), in mse_loss and l1_loss with a weight, and in a
    Transformers loss that was given num_items_in_batch. Leave that last one out, and ask for means.

    Raises ValueError for no micro-batch, counts that make no sense, nothing to learn from, and the other reduction;
    TypeError for a loss that is no scalar with a gradient and a model without no_sync. What was added to .grad before
    an error stays there, as after any backward: zero_grad before you retry.
    """
    one_of("reduction", reduction, REDUCTIONS)
    group = listed(micro_batches)
    counts = [plain(count(micro_batch)) for micro_batch in group]
    whole = total_of(counts, agree)
    no_sync = no_sync_of(model)
    mean = None
    for number, (micro_batch, part) in enumerate(zip(group, counts, strict=True), 1):
        with nullcontext() if number == len(group) else no_sync():
            asked = loss, micro_batch, part, whole, reduction, scaler
            mean = backward(*asked) if mean is None else mean.add_(backward(*asked))
    return mean


def backward(loss: Callable, micro_batch: Any, part: Count, whole: Count, reduction: str, scaler=None) -> Tensor:
    """One micro-batch, forward and backward; its share of the mean loss, detached.

    It is a function so that nothing else of it, logits or graph, is still held while the next one runs.
    """
    share = loss(micro_batch)
    refuse(share, part, reduction)
    precise = torch.promote_types(share.dtype, torch.float32)
    part, whole = (n.to(share.device, precise) if isinstance(n, Tensor) else n for n in (part, whole))
    share = share if share.dim() == 0 else share.reshape(())
    share = share / whole if reduction == "sum" else share * (part / whole)
    (share if scaler is None else scaler.scale(share)).backward()
    return share.detach() if share.dtype == precise else share.detach().to(precise)


def plain(count: Count) -> Count:
    """A count as a Python number, unless its device would have to be waited for, or is imagined and has no numbers.

    Raises TypeError for what is no number or a bool, ValueError for one below 0 or not finite, and for several.
    """
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(
                f"expected a micro-batch's count to be one number, found a tensor of shape {tuple(count.shape)}; "
                "add it up with .sum()"
            )
        count = count.detach().reshape(())  # gradients go through the losses alone
        if count.device.type != "cpu" or isinstance(count, FakeTensor):
            return count
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, Real):
        raise TypeError(f"expected a micro-batch's count as a number, found {type(count).__name__}")
    if not 0 <= count < math.inf:
        raise ValueError(f"expected a micro-batch's count to be at least 0 and finite, found {count}")
    return count if isinstance(count, int) else float(count)


def no_sync_of(model) -> Callable:
    """What keeps gradients from travelling. Raises TypeError for a model that has no such thing."""
    if model is None:
        return nullcontext
    if not hasattr(model, "no_sync"):
        raise TypeError(
            f"expected model to have no_sync(), as DistributedDataParallel has; found {type(model).__name__}; leave it "
            "out for a model on one device (and for FSDP2, which has set_requires_gradient_sync)"
        )
    return model.no_sync


# ---- what can be wrong


def listed(micro_batches: Iterable) -> list:
    """The micro-batches as a list. Raises TypeError for a single one, ValueError if there are none."""
    if isinstance(micro_batches, (Tensor, Mapping, str)):
        kind = type(micro_batches).__name__
        raise TypeError(f"expected micro-batches, in a list; found one {kind}; x.split(rows) makes micro-batches of x")
    group = list(micro_batches)
    if not group:
        raise ValueError("expected at least one micro-batch, found none: there is no gradient to step with")
    return group


def total_of(counts: list[Count], agree: Callable | None) -> Count:
    """N: the group's, or what the ranks agree on. Raises ValueError for none, where that can be seen at once."""
    whole = sum(counts)
    whole = whole if agree is None else plain(agree(whole))
    if isinstance(whole, Tensor):
        return whole.where(whole > 0, 1)  # to see its value is to wait for its device
    if not whole > 0:
        raise ValueError(
            f"expected something to learn from, found {len(counts)} micro-batches with {whole:g} examples or labels; "
            "leave such groups out (ranks: on all of them)"
        )
    return whole
