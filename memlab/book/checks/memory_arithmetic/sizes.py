"""Exercises 1 to 4 of chapter 02: bytes from sizes alone, held against steps that are metered, or imagined."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.book.checks.answers import Wrong, a_function, exercise, plain, same_bytes, unchanged, whole_bytes
from memlab.book.workloads import GPT, Block, GPTConfig, text_batch
from memlab.memory_arithmetic import Transformer, preset, training_step
from memlab.memory_timeline import Meter, Storage, Timeline, imagine
from memlab.units import GiB


class NoTensors(TorchDispatchMode):
    """An answer that is arithmetic needs no op of torch's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise Wrong(
            f"your function makes tensors ({func}). It is to find the bytes by arithmetic, from the sizes alone; "
            "measure in a cell of your own as much as you like."
        )


def _at_turn(timeline: Timeline) -> int:
    """The event at which forward has ended and backward has not begun."""
    return next(span.stop for span in timeline.phases if span.phase == "forward")


def saved(timeline: Timeline) -> list[Storage]:
    """What forward has kept for backward: without weights, and without what merely a variable holds."""
    return [storage for storage in timeline.alive(_at_turn(timeline)) if storage.reason.startswith("saved by")]


# ---- 1


@functools.cache
def _adam_states(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Bytes of a real AdamW's states after its first step. The parameters are imagined: they may be of any size."""
    with imagine("cpu"):
        parameters = [nn.Parameter(torch.empty(shape)) for shape in shapes]
        optimizer = torch.optim.AdamW(parameters, foreach=False)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        return sum(state.nbytes for states in optimizer.state.values() for state in states.values())


_MODELS = {
    "a Linear layer": [(24, 40), (24,)],
    "a convolution with its norm": [(32, 3, 5, 5), (32,), (32,)],
    "a matrix and a scalar": [(7, 11), ()],
    "two of Llama-3 70B's matrices": [(128_256, 8192), (28_672, 8192)],
}


@exercise
def adam_bytes(answer: object) -> str:
    """Exercise 1: (shapes of the parameter tensors) → bytes of AdamW's states in FP32."""
    function = a_function(answer, "adam_bytes(shapes)")
    for name, shapes in _MODELS.items():
        shapes = [torch.Size(shape) for shape in shapes]
        expected = _adam_states(tuple(shapes))
        given = list(shapes)
        found = whole_bytes(function(given), f"adam_bytes(shapes) of {name}")
        unchanged(given, shapes, name)
        counters = 4 * len(shapes)
        averages = expected - counters
        hint = ""
        if () in shapes and found in (expected - 8, averages - 8):
            hint = "A shape of () is a scalar: one element, not none."
        elif found in (averages, averages + 4):
            hint = "Two averages are not all that Adam remembers: it counts its steps as well, for every tensor apart."
        elif 2 * (found - counters) == averages:
            hint = "How many running averages does Adam keep, and how many bytes has a number in FP32?"
        elif found - expected in (averages // 2, averages):
            hint = "Weights and gradients are not among the optimizer's states."
        same_bytes(found, expected, f"{name}, {list(map(tuple, shapes))}: what AdamW keeps", hint)
    return "The states of any model, also of one that fits no machine."


# ---- 2


@functools.cache
def imagined_block(b: int, s: int, h: int, a: int, by_hand: bool, dropout: bool) -> list[Storage]:
    """What one GPT block keeps for backward in BF16 on an imagined H100, storage by storage."""
    attention = "by hand" if by_hand else "fused"
    config = GPTConfig(layers=1, width=h, heads=a, context=s, dropout=0.1 if dropout else 0.0, attention=attention)
    with imagine("H100-80GB"):
        block = Block(config).to(torch.bfloat16)
        source = torch.empty(b, s, h, dtype=torch.bfloat16, requires_grad=True)
        with Meter(block, inputs=source) as meter:
            block(source * 1).sum().backward()
    return saved(meter.timeline)


def predicted_block(b: int, s: int, h: int, a: int, by_hand: bool, dropout: bool) -> int:
    """The same in bytes, in no time: what a second layer adds to the library's own arithmetic."""
    options = {"precision": "bf16", "attention": "by hand" if by_hand else "fused", "dropout": 0.1 if dropout else 0.0}
    one, two = (Transformer(layers, width=h, heads=a, vocabulary=256, context=s) for layers in (1, 2))
    kept = [training_step(model, b, s, **options).activations.nbytes for model in (one, two)]
    return kept[1] - kept[0]


_LONG, _WIDE = (3, 160, 96, 12), (5, 24, 256, 2)
_IMAGINED = ((False, False, _LONG), (False, True, _WIDE), (True, False, _LONG), (True, True, _WIDE))
_PREDICTED = ((2, 1024, 768, 12), (7, 56, 320, 4))


@exercise
def block_keeps(answer: object) -> str:
    """Exercise 2: (b, s, h, a, by_hand, dropout) → bytes that a GPT block keeps for backward in BF16 on a GPU."""
    function = a_function(answer, "block_keeps(b, s, h, a, by_hand, dropout)")
    for by_hand, dropout, sizes in _IMAGINED:
        kept = imagined_block(*sizes, by_hand, dropout)
        _same_block(function, sizes, by_hand, dropout, sum(storage.nbytes for storage in kept), kept)
    for sizes in _PREDICTED:
        for by_hand, dropout in itertools.product((False, True), repeat=2):
            _same_block(function, sizes, by_hand, dropout, predicted_block(*sizes, by_hand, dropout))
    return "Four kinds of block, to the byte."


def _same_block(
    function: Callable, sizes: tuple, by_hand: bool, dropout: bool, expected: int, kept: Sequence[Storage] = ()
) -> None:
    b, s, h, a = sizes
    name = f"block_keeps({b=}, {s=}, {h=}, {a=}, {by_hand=}, {dropout=})"
    with NoTensors():
        found = function(b, s, h, a, by_hand, dropout)
    found = whole_bytes(found, name)
    same_bytes(found, expected, name, _which(found, expected, kept, 2 * b * s * h))


def _which(found: int, expected: int, kept: Sequence[Storage], stream: int) -> str:
    """The kept tensors that are just as large as an answer is wrong, if there are any; else how to find them."""
    off = abs(found - expected)
    if off == stream:
        return "That is one tensor of b·s·h numbers at 2 bytes each, or two at one byte. Which of them?"
    alike = Counter((f"{'×'.join(map(str, s.shape)) or 'scalar'} {s.dtype}, {s.reason}", s.nbytes) for s in kept)
    fitting = []
    for (what, nbytes), count in alike.items():
        fitting += [f"{n} tensor{'s'[: n - 1]} of {what}" for n in range(1, count + 1) if n * nbytes == off]
    for (one, first), (other, second) in itertools.combinations(alike, 2):
        if first * alike[one, first] + second * alike[other, second] == off and not fitting:
            fitting.append(f"{one}, and {other}")
    if fitting:
        return f"Just as many bytes are kept in: {'; or in: '.join(fitting)}."
    return "In a new cell, show_kept(...) with these sizes lists every tensor that is kept. Which are in your sum?"


# ---- 3


@functools.cache
def head_step(shared: bool) -> Timeline:
    """Exercise 3's step: a GPT's second, fused AdamW; its head has a matrix of its own, or the embedding's."""
    torch.manual_seed(0)
    model = GPT(layers=1, width=24, context=8, vocabulary=600)
    if shared:
        model.head.weight = model.token_embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = text_batch(batch=1, tokens=8)
    for _ in range(2):
        with Meter(model, optimizer, inputs=batch) as meter:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.timeline


@exercise
def unexplained(apart: object, together: object, passing: object) -> str:
    """Exercise 3: gradients of the matrices at both peaks, and what only one peak still holds, in bytes."""
    matrix = (600, 24)
    held = {}
    for name, timeline in (("apart", head_step(False)), ("together", head_step(True))):
        alive = timeline.alive(timeline.peak_event)
        held[name] = sum(s.nbytes for s in alive if s.shape == matrix and s.category in ("gradient", "temporary"))
        on_the_way = sum(
            s.nbytes for s in alive if s.category == "temporary" and len(s.shape) > 1 and s.shape != matrix
        )
        held["passing"] = held.get("passing", 0) + (on_the_way if name == "apart" else -on_the_way)
    same_bytes(
        apart,
        held["apart"],
        "apart_bytes",
        "The embedding and the head have a matrix each. Is the gradient of both there by then? And a number in FP32 "
        "has how many bytes?",
        secret=True,
    )
    same_bytes(
        together,
        held["together"],
        "together_bytes",
        "One matrix, used twice. What autograd makes for each use is a tensor of its own, and at the fullest moment "
        "they are being added up. Count also those that storages(together) calls a gradient passing through.",
        secret=True,
    )
    same_bytes(
        passing,
        held["passing"],
        "passing_bytes",
        "Look for the one of storages(apart, category='temporary') that storages(together, category='temporary') has "
        "not. It has a row for each token.",
        secret=True,
    )
    return "Sharing saves the weight and Adam's averages. At the peak it costs a gradient more, instead of one less."


# ---- 4

MOST_CALLS = 50
_STORY = Transformer(layers=24, width=2048, heads=16, vocabulary=256, context=1024)


@functools.cache
def _peak(case: str, batch: int) -> int:
    """The peak of a training step with `batch` texts."""
    if case == "a toy: 1,000 B, and 10 B a text":
        return 1000 + 10 * batch
    if case == "a toy that rises late":
        return max(5000, 3 * batch)
    model, tokens, options = {
        "the story's model, 1,024 tokens": (_STORY, 1024, {}),
        "GPT-2 small, 128 tokens": (preset("GPT-2 small"), 128, {}),
        "Llama-2 7B in BF16, 512 tokens": (preset("Llama-2 7B"), 512, {"precision": "bf16", "implementation": "fused"}),
    }[case]
    return training_step(model, batch, tokens, **options).peak_bytes


_TOY, _LATE = "a toy: 1,000 B, and 10 B a text", "a toy that rises late"
_SEARCHES = (
    (_TOY, 1055),
    (_TOY, 1050),
    (_TOY, 1010),
    (_TOY, 1009),
    (_TOY, 0),
    (_TOY, 10**7),
    (_LATE, 6000),
    (_LATE, 4999),
    ("the story's model, 1,024 tokens", 80 * GiB),
    ("the story's model, 1,024 tokens", 16 * GiB),
    ("GPT-2 small, 128 tokens", 24 * GiB),
    ("Llama-2 7B in BF16, 512 tokens", 80 * GiB),
)


@exercise
def largest_batch(answer: object) -> str:
    """Exercise 4: (peak, capacity_bytes) → the largest batch whose peak fits, 0 for none, in a few calls of peak."""
    function = a_function(answer, "largest_batch(peak, capacity_bytes)")
    for case, capacity in _SEARCHES:
        calls = []

        def peak(batch, case=case, capacity=capacity, calls=calls):
            batch = plain(batch)
            if type(batch) is not int:
                raise Wrong(f"peak({batch!r}): a batch is a whole number (int) of texts; divide with //.")
            if batch < 1:
                raise Wrong(f"peak({batch}): a batch has at least one text.")
            calls.append(batch)
            if len(calls) > MOST_CALLS:
                raise Wrong(
                    f"{case}, {capacity:,} B: peak was called more than {MOST_CALLS} times, last with {calls[-4:-1]}. "
                    "Does each call halve what is left to search?"
                )
            return _peak(case, batch)

        found = plain(function(peak, capacity))
        if type(found) is not int:
            raise Wrong(
                f"{case}, {capacity:,} B: expected a whole number of texts (int), found {type(found).__name__}."
            )
        where = f"{case}, {capacity:,} B: you said {found:,} texts"
        if found < 0:
            raise Wrong(f"{where}; where not even one fits, the answer is 0.")
        if len(calls) > MOST_CALLS:
            raise Wrong(f"{where}, after {len(calls)} calls of peak; {MOST_CALLS} must do.")
        if found and _peak(case, found) > capacity:
            raise Wrong(f"{where}, which take {_peak(case, found):,} B: too many.")
        if _peak(case, found + 1) <= capacity:
            exactly = " A peak of just the capacity fits." if _peak(case, found + 1) == capacity else ""
            raise Wrong(f"{where}; {found + 1:,} fit too, in {_peak(case, found + 1):,} B.{exactly}")
    return "To the byte, and the peak may move from moment to moment meanwhile."
