"""Exercise 6 of chapter 14: cross-entropy of logits that are cut along the vocabulary, by sums of a few numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.tensor_parallelism.played import Wire, play
from memlab.memory_timeline import Meter
from memlab.ranks import ring_bytes

_TOKENS, _PART = 12, 200
_SPARE = 64 * _TOKENS + 256  # bytes: a few numbers a token


class _Case(NamedTuple):
    """Logits (tokens, vocabulary), targets (tokens,), and the loss and its gradient, of one process in FP64."""

    name: str
    logits: Tensor
    targets: Tensor
    losses: Tensor
    gradient: Tensor


@functools.cache
def _cases(ranks: int) -> list[_Case]:
    draw = torch.Generator().manual_seed(ranks)
    vocabulary = ranks * _PART
    borders = [0, vocabulary - 1] + [edge for r in range(1, ranks) for edge in (r * _PART - 1, r * _PART)]
    targets = torch.randint(vocabulary, (_TOKENS,), generator=draw)
    targets[: len(borders)] = torch.tensor(borders)[:_TOKENS]
    plain = 3 * torch.randn(_TOKENS, vocabulary, generator=draw)
    masked = plain.clone()
    for token, target in enumerate(targets.tolist()):
        if ranks > 1:
            elsewhere = (target // _PART + 1 + token % (ranks - 1)) % ranks  # a rank that has not the target
            masked[token, elsewhere * _PART : (elsewhere + 1) * _PART] = -torch.inf
    made = {
        "logits around 0": plain,
        "logits around 1,000": plain + 1000,
        "logits far larger for one token than for another": plain + 100 * torch.arange(-_TOKENS, 0)[:, None],
        "logits that are far larger on one rank": plain + 500 * (torch.arange(vocabulary) // _PART == ranks - 1),
        "logits that are −∞ on one rank": masked,
    }
    found = []
    for name, logits in made.items():
        exact = logits.double().requires_grad_()
        losses = F.cross_entropy(exact, targets, reduction="none")
        losses.sum().backward()
        found.append(_Case(name, logits, targets, losses.detach(), exact.grad))
    return found


@exercise
def vocabulary_loss(answer: object) -> str:
    """Exercise 6: (logits, targets, start, all_reduce) → each token's loss, and the gradient of this rank's logits."""
    function = a_function(answer, "vocabulary_loss(logits, targets, start, all_reduce)")
    for ranks in (4, 1, 3, 2):
        for case in _cases(ranks):
            sent = play(lambda wire, case=case: _run(function, case, wire), ranks)
    each = ring_bytes("all_gather", 4 * 2 * _PART * _TOKENS, 2) // _TOKENS
    return f"{max(sent) // _TOKENS} B a token are sent on each of 2 ranks; to gather the logits would take {each:,}."


def _run(function: Callable, case: _Case, wire: Wire) -> int:
    where = f"{case.name}, rank {wire.rank} of {wire.ranks}"
    start = wire.rank * _PART
    own = slice(start, start + _PART)
    logits, targets = case.logits[:, own].clone(), case.targets.clone()
    with Meter(inputs=[logits, targets, wire.results]) as meter:
        before = meter.timeline.totals[-1]
        found = function(logits, targets, start, wire.all_reduce)
        extra = meter.timeline.peak_bytes - before
    if not isinstance(found, (tuple, list)) or len(found) != 2 or not all(isinstance(x, Tensor) for x in found):
        raise Wrong(f"{where}: expected a pair of tensors (losses, gradient), found {type(found).__name__}.")
    losses, gradient = found
    for name, tensor, shape in (("losses", losses, (_TOKENS,)), ("gradient", gradient, (_TOKENS, _PART))):
        if tensor.shape != shape:
            raise Wrong(f"{where}: expected {name} of shape {shape}, found {tuple(tensor.shape)}.")
        if tensor.dtype != torch.float32:
            raise Wrong(f"{where}: expected {name} of float32, as the logits, found {tensor.dtype}.")
        if not tensor.isfinite().all():
            raise Wrong(
                f"{where}: some of the {name} are NaN or infinite. exp overflows beyond 88 and is 0 below −104: "
                "subtract each token's largest logit first, that of all ranks."
            )
    _same_loss(losses, case, own, where, wire.ranks)
    right = case.gradient[:, own]
    if not torch.allclose(gradient.double(), right, rtol=1e-3, atol=1e-4):
        raise Wrong(f"{where}: the losses are right, and the gradient is not.{_look(gradient.double(), right, wire)}")
    if not torch.equal(logits, case.logits[:, own]) or not torch.equal(targets, case.targets):
        raise Wrong(f"{where}: the values are right, and the logits or the targets have changed. They are not yours.")
    due = ring_bytes("all_reduce", 3 * 4 * _TOKENS, wire.ranks)
    if wire.sent_bytes > due:
        raise Wrong(
            f"{where}: the values are right, and {wire.sent_bytes:,} B are sent. Three numbers a token in FP32, all "
            f"reduced, are {due:,}."
        )
    if extra > logits.nbytes + _SPARE:
        raise Wrong(
            f"{where}: the values are right, and {extra:,} B are held beside the logits, whose own are "
            f"{logits.nbytes:,}. One tensor of their size is enough, if it becomes the gradient in place."
        )
    return wire.sent_bytes


def _same_loss(losses: Tensor, case: _Case, own: slice, where: str, ranks: int) -> None:
    if torch.allclose(losses.double(), case.losses, rtol=1e-4, atol=1e-3):
        return
    look = ""
    alone = case.logits[:, own].double().logsumexp(-1) - case.logits.double().gather(1, case.targets[:, None])[:, 0]
    if ranks > 1 and torch.allclose(losses.double(), alone, rtol=1e-4, atol=1e-3):
        look = " The sum of exp is that of this rank's logits; it is to be that of all ranks'."
    elif torch.allclose(losses.double(), -case.losses, rtol=1e-4, atol=1e-3):
        look = " The sign is the other way round."
    elif torch.allclose(losses.double() / ranks, case.losses, rtol=1e-4, atol=1e-3):
        look = f" They are {ranks} times too large: what all ranks have already is not to be summed."
    elif (gap := (losses.double() - case.losses).abs() > 1e-2).any():
        look = (
            f" {int(gap.sum())} of {_TOKENS} are wrong. Do all ranks subtract the same largest logit? A target's is on "
            "one rank; what do the others add?"
        )
    raise Wrong(f"{where}: the losses are not those of the whole logits.{look}")


def _look(gradient: Tensor, right: Tensor, wire: Wire) -> str:
    softmax = right.clamp(min=0)
    if torch.allclose(gradient.clamp(min=0), softmax, rtol=1e-3, atol=1e-4):
        return " The softmax is; at a token's target, and on the rank that has it only, 1 is subtracted."
    if torch.allclose(gradient / _TOKENS, right, rtol=1e-3, atol=1e-4) or torch.allclose(
        gradient * _TOKENS, right, rtol=1e-3, atol=1e-4
    ):
        return " It is that of the mean; the losses' sum was asked for."
    return " It is the softmax over all ranks' logits, less 1 at the target."
