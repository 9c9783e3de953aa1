"""Exercise 2 of chapter 03: the cross-entropy of logits that come in pieces, none of which is kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, plain
from memlab.memory_timeline import Meter

_ROWS = 64
_MOST = 4.5  # pieces at once: the last and the next one, what was computed of them, and rows


@dataclass(frozen=True)
class _Task:
    """logits: (rows, vocabulary), cut after each of the widths; labels: (rows,)."""

    logits: Tensor
    labels: Tensor
    widths: tuple[int, ...]
    tolerance: float = 1e-12

    def pieces(self, asked: list[int]) -> Iterator[Tensor]:
        """Each is made when it is asked for, and belongs to whoever asked."""
        for part in self.logits.split(self.widths, 1):
            asked.append(part.shape[1])
            yield part.clone()

    def loss(self) -> float:
        return F.cross_entropy(self.logits.double(), self.labels).item()


@functools.cache
def _tasks() -> dict[str, _Task]:
    draw = torch.Generator().manual_seed(0)

    def task(widths: tuple[int, ...], change: Callable[[Tensor], Tensor] = lambda logits: logits, **more) -> _Task:
        logits = change(3 * torch.randn(_ROWS, sum(widths), generator=draw, dtype=torch.float64))
        labels = logits.isfinite().double().multinomial(1, generator=draw)[:, 0]
        return _Task(logits, labels, widths, **more)

    def forbid(logits: Tensor) -> Tensor:
        logits[:, :20] = logits[:, 45:53] = -math.inf  # a whole piece, the first, and parts of others
        logits[::2, 20:40] = -math.inf
        return logits

    return {
        "four pieces of one size": task((16,) * 4),
        "pieces of different sizes": task((7, 30, 1, 12)),
        "one piece": task((50,)),
        "a piece for each token": task((1,) * 20),
        "logits that grow from piece to piece": task((16,) * 6, lambda logits: logits + torch.arange(96)),
        "logits in the thousands": task((16,) * 6, lambda logits: 1000 * logits),
        "logits far below 0": task((16,) * 6, lambda logits: logits - 5000),
        "some logits −∞": task((20, 20, 20), forbid),
        "logits of FP32": task((16,) * 4, Tensor.float, tolerance=1e-5),
    }


@functools.cache
def _large() -> _Task:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(_ROWS, 24 * 64, generator=draw, dtype=torch.float64)
    return _Task(logits, torch.randint(24 * 64, (_ROWS,), generator=draw), (64,) * 24)


@exercise
def loss_in_pieces(answer: object) -> str:
    """Exercise 2: (pieces of logits, labels) → the mean cross-entropy as a float, with a few pieces held at most."""
    function = a_function(answer, "loss_in_pieces(pieces, labels)")
    for name, task in _tasks().items():
        asked, labels = [], task.labels.clone()
        found = plain(function(task.pieces(asked), labels))
        if isinstance(found, Tensor):
            raise Wrong(f"{name}: expected the loss as a float, found a tensor: return a number, by .item().")
        if type(found) is not float:
            raise Wrong(f"{name}: expected the loss as a float, found {type(found).__name__} {str(found)[:40]}.")
        if not torch.equal(labels, task.labels):
            raise Wrong(f"{name}: your function has changed the labels; they are not yours.")
        _same_loss(found, task, name)
        if len(asked) != len(task.widths):
            raise Wrong(f"{name}: the loss is right, but {len(asked)} of {len(task.widths)} pieces were asked for.")
    return _held(function)


def _held(function: Callable) -> str:
    """Raise Wrong for pieces that are held longer than they are needed, or for good."""
    task = _large()
    with Meter(inputs=(task.logits, task.labels)) as meter:
        found = function(task.pieces([]), task.labels)
    _same_loss(found, task, "24 pieces")
    timeline, piece = meter.timeline, task.logits.nbytes // len(task.widths)
    most = (timeline.peak_bytes - timeline.totals[0]) / piece
    if (left := timeline.totals[-1] - timeline.totals[0]) > 0:
        raise Wrong(f"the loss is right, and {left:,} B are still alive when your function has returned.")
    if most > _MOST:
        largest = max((s for s in timeline.alive(timeline.peak_event) if s.phase != "before"), key=lambda s: s.nbytes)
        raise Wrong(
            f"the loss is right, and at the peak {most:.1f} of 24 pieces' bytes are held, 4 at most are needed. The "
            f"largest there: {'×'.join(map(str, largest.shape))}, made by\n    {largest.line}"
        )
    return f"24 pieces, and never more than {most:.1f} of them at once: {timeline.peak_bytes - timeline.totals[0]:,} B."


def _same_loss(found: float, task: _Task, name: str) -> None:
    right = task.loss()
    if math.isclose(found, right, rel_tol=task.tolerance):
        return
    look = next((f" That is {what}." for what, slip in _slips(task).items() if math.isclose(found, slip)), "")
    if math.isnan(found):
        look = " Infinity minus infinity, or over it, is no number: where is an exponent above 700, or a maximum −∞?"
        if (task.logits == -math.inf).any():
            look = " Where all logits of a row are −∞ so far, so is the maximum, and −∞ − (−∞) is no number."
    elif math.isinf(found):
        look = " e¹⁰⁰⁰ is too large for a float, and e⁻⁵⁰⁰⁰ is 0, the logarithm of which is −∞: subtract the maximum."
    elif math.isclose(found, right, rel_tol=1e-6):
        look = " Near, but not within rounding: FP64 comes in, is everything you do with it?"
    elif not look:
        lse = task.logits.double().logsumexp(1).mean().item()
        look = (
            f" The rows' mean log-sum-exp is {lse:.6g}, and the mean of their labels' logits {lse - right:.6g}: "
            "which of the two is another one with you?"
        )
    raise Wrong(f"{name}: expected the mean loss {right:.9g}, found {found:.9g}.{look}")


def _slips(task: _Task) -> dict[str, float]:
    """Well-known wrong losses, by what they are."""
    logits, labels = task.logits.double(), task.labels
    label = logits.gather(1, labels[:, None])[:, 0]
    parts = logits.split(task.widths, 1)
    lse, most = logits.logsumexp(1), logits.amax(1)
    each = torch.stack([part.logsumexp(1) for part in parts])
    running = torch.stack([part.amax(1) for part in parts]).cummax(0).values
    uncorrected = sum((part - m[:, None]).exp().sum(1) for part, m in zip(parts, running, strict=True)).log() + most
    rows = {
        "the sum over the rows": len(labels) * (lse - label),
        "twice as much as it should be": 2 * (lse - label),
        "the mean log-sum-exp; the logit of the label is still to be taken off": lse,
        "less by the maximum, which must be added to the logarithm again": lse - most - label,
        "the loss with the last piece's log-sum-exp alone": each[-1] - label,
        "the loss with the pieces' log-sum-exps added up; it is the exponentials that add up": each.sum(0) - label,
        "the loss with the mean of the pieces' log-sum-exps": each.mean(0) - label,
        "the loss with the largest of the pieces' log-sum-exps": each.amax(0) - label,
        "the loss with sums that were taken about different maxima, and not corrected": uncorrected - label,
        "in units of ln 2": (lse - label) / math.log(2),
        "the same with the wrong sign": label - lse,
    }
    return {what: each_row.mean().item() for what, each_row in rows.items()}
