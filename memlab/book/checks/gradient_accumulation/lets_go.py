"""Exercise 3 of chapter 07: the gradients of the whole batch, at the memory of one micro-batch."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, hooks_on, plain
from memlab.memory_timeline import Meter, Timeline

_IGNORED = -100
_NO_LABELS = (
    "One micro-batch has no labels at all: the *mean* of its losses is 0 / 0, and no factor makes NaN go away. What is "
    "their sum?"
)
_SPARE = 256  # bytes: a loss may live a little longer


class _Reader(nn.Module):
    """x: (rows, tokens) → logits (rows, tokens, vocabulary), each token by itself, so padding changes none of them."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(x)).relu())


@dataclass(frozen=True)
class _Task:
    """Sizes of a model, and rows and tokens of the micro-batches."""

    vocabulary: int
    width: int
    shapes: tuple[tuple[int, int], ...]
    without_labels: int | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return _Reader(self.vocabulary, self.width).double()

    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Texts of different lengths, padded to the longest of each micro-batch; padding has no label."""
        draw = torch.Generator().manual_seed(0)
        made = []
        for number, (rows, tokens) in enumerate(self.shapes):
            x, y = (torch.randint(self.vocabulary, (rows, tokens), generator=draw) for _ in "xy")
            lengths = torch.randint(1, tokens + 1, (rows, 1), generator=draw)
            y[torch.arange(tokens) >= lengths * (number != self.without_labels)] = _IGNORED
            made.append((x, y))
        return made

    def metered(self, run: Callable, with_gradients: bool = False) -> tuple[object, nn.Module, list, Timeline]:
        """What run(model, micro_batches) returns, the two, and the timeline."""
        model, batches = self.model(), self.micro_batches()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if with_gradients else None
        with Meter(model, inputs=batches) as meter:
            returned = run(model, batches)
        return returned, model, batches, meter.timeline

    @functools.cache  # noqa: B019 (there are two)
    def alone(self) -> Timeline:
        """The micro-batch that needs most, run by itself when gradients are already there."""

        def one(model: nn.Module, batches: list, number: int) -> None:
            x, y = batches[number]
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

        timelines = [self.metered(functools.partial(one, number=n), True)[-1] for n in range(len(self.shapes))]
        return max(timelines, key=lambda timeline: timeline.peak_bytes)


# At the peak of the one, logits are alive; at that of the other, gradients.
_WIDE_HEAD = _Task(vocabulary=64, width=16, shapes=((4, 9), (9, 8), (2, 5), (7, 10)), without_labels=2)
_WIDE_LAYER = _Task(vocabulary=8, width=48, shapes=((1, 4), (2, 3)))


@functools.cache
def _full_batch() -> tuple[float, list[Tensor], int]:
    """The mean loss of all micro-batches as one padded batch, its gradients, and the number of labels."""
    model, longest = _WIDE_HEAD.model(), max(tokens for _, tokens in _WIDE_HEAD.shapes)
    xs, ys = zip(*_WIDE_HEAD.micro_batches(), strict=True)
    x = torch.cat([F.pad(part, (0, longest - part.shape[1])) for part in xs])
    y = torch.cat([F.pad(part, (0, longest - part.shape[1]), value=_IGNORED) for part in ys])
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()], int((y != _IGNORED).sum())


@exercise
def accumulated_gradients(answer: object) -> str:
    """Exercise 3: (model, micro_batches) → the mean loss over all labels, as a float; its gradient is in .grad."""
    function = a_function(answer, "accumulated_gradients(model, micro_batches)")
    loss, model, batches, timeline = _WIDE_HEAD.metered(function)
    if isinstance(loss, Tensor):
        raise Wrong("expected the mean loss as a float, found a tensor: it keeps its storage, and may keep its graph.")
    loss = plain(loss)
    if type(loss) is not float:
        raise Wrong(f"expected the mean loss as a float, found {type(loss).__name__} {str(loss)[:40]}.")
    _same_gradients(model)
    _same_loss(loss)
    _as_it_was(model, batches)
    _lets_go(timeline, _WIDE_HEAD, "a model with many logits")
    _lets_go(_WIDE_LAYER.metered(function)[-1], _WIDE_LAYER, "a model whose gradients outweigh its logits")
    most = _WIDE_HEAD.alone().peak_bytes
    return (
        f"{len(_WIDE_HEAD.shapes)} micro-batches, one of them without labels, at the peak of the largest: {most:,} B."
    )


def _lets_go(found: Timeline, task: _Task, name: str) -> None:
    """Raise Wrong if more than gradients are left, or if the peak is above that of one micro-batch."""
    right = task.alone()
    gradients = sum(s.nbytes for s in right.alive(0) if s.category == "gradient")
    if (grown := found.totals[-1] - found.totals[0] - gradients) > 0:
        raise Wrong(f"the values are right, and {grown:,} B beside the gradients are alive when your loop has ended.")
    if (more := found.peak_bytes - right.peak_bytes) > _SPARE:
        raise Wrong(
            f"the values are right. With {name} the peak is {found.peak_bytes:,} B, {more:,} B above that of the "
            f"micro-batch that needs most, run by itself with gradients there. {beyond(found, right)}"
        )


def _same_gradients(model: nn.Module) -> None:
    _, right, labels = _full_batch()
    for (name, p), expected in zip(model.named_parameters(), right, strict=True):
        if p.grad is None:
            raise Wrong(f"{name} has no gradient when your function has ended.")
        if not p.grad.isfinite().all():
            raise Wrong(f"the gradient of {name} is not finite. {_NO_LABELS}")
        ratio = ((p.grad * expected).sum() / expected.square().sum()).item()
        apart = ((p.grad - expected).norm() / expected.norm()).item()
        if apart <= 1e-12:
            continue
        look = ""
        if (p.grad - ratio * expected).norm() <= 1e-9 * abs(ratio) * expected.norm():
            slips = {
                labels: f"they were never divided by the {labels} labels",
                1 / len(_WIDE_HEAD.shapes): "they were divided by the number of micro-batches as well",
                labels / len(_WIDE_HEAD.shapes): "divided by the number of micro-batches, not of labels",
                labels / _positions(): "divided by the number of positions; those with −100 are not labels",
            }
            reason = next((why for slip, why in slips.items() if math.isclose(ratio, slip, rel_tol=1e-9)), "")
            look = f" All are {ratio:.6g} times what they should be{': ' if reason else ''}{reason}."
        elif apart > 1e-6:
            look = " Does each micro-batch count by its labels, and is each of them added up?"
        else:
            look = " The model is in FP64; is everything you do with it?"
        raise Wrong(
            f"the gradient of {name} is {apart:.2g}, relative to its norm, away from that of the whole batch.{look}"
        )


def _positions() -> int:
    return sum(rows * tokens for rows, tokens in _WIDE_HEAD.shapes)


def _same_loss(loss: float) -> None:
    right, _, labels = _full_batch()
    if not math.isclose(loss, right, rel_tol=1e-6):  # what adds up losses may do so in FP32
        look = " That is the sum." if math.isclose(loss, right * labels, rel_tol=1e-9) else ""
        look = f" {_NO_LABELS}" if math.isnan(loss) else look
        raise Wrong(
            f"the gradients are right; expected the mean loss over all {labels} labels, {right:.9g}, found "
            f"{loss:.9g}.{look}"
        )


def _as_it_was(model: nn.Module, batches: list) -> None:
    if not model.training or not all(p.requires_grad for p in model.parameters()):
        raise Wrong(
            "the values are right, and the model is left in eval mode or frozen: whoever trains on would wonder."
        )
    if any(not torch.equal(p, q) for p, q in zip(model.parameters(), _WIDE_HEAD.model().parameters(), strict=True)):
        raise Wrong("the values are right, and the weights were changed; a step is not asked for.")
    given = _WIDE_HEAD.micro_batches()
    if len(batches) != len(given) or any(
        not torch.equal(a, b)
        for one, other in zip(batches, given, strict=True)
        for a, b in zip(one, other, strict=True)
    ):
        raise Wrong("the values are right, and the micro-batches were changed; they are not yours.")
    if hooks_on(model):
        raise Wrong("the values are right, and a hook was left on the model.")


def beyond(found: Timeline, right: Timeline) -> str:
    """What is alive at one timeline's peak and not at the other's: the largest, in words."""
    kind: Callable = lambda s: (s.shape, s.dtype, s.reason)  # noqa: E731
    there = Counter(map(kind, right.alive(right.peak_event)))
    for storage in found.alive(found.peak_event):
        if storage.phase == "before":
            continue
        if there[kind(storage)]:
            there[kind(storage)] -= 1
            continue
        shape = "×".join(map(str, storage.shape)) or "a scalar"
        return f"Alive there, and needless: {shape}, {storage.reason}, made by\n    {storage.line}"
    return ""
