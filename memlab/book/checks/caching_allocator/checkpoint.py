"""Exercise 5 of chapter 04: a checkpoint loaded onto a card that has room for its weights and one shard."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.caching_allocator import CachingAllocator, OutOfMemory, replay, requests
from memlab.memory_timeline import Meter, Timeline, imagine
from memlab.units import MiB, format_bytes

Shapes = list[tuple[int, ...]]
_SPARE = 20 * MiB  # for what segments round up


def _checkpoints() -> dict[str, Shapes]:
    """Shapes on an imagined card, whose shards are 4 to 188 MiB."""
    draw = random.Random(0)
    blocks = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)]
    wider = [(1000 + 900 * i, 1000) for i in range(14)]
    return {
        "the checkpoint above": wider,
        "larger matrices, each wider than the one before": [(1024 * k, 1024) for k in range(8, 48, 3)],
        "matrices in no order": [(1024 * draw.randrange(4, 40), 1024) for _ in range(16)],
        "a GPT with large embeddings": [(2**14, 1024), *blocks * 6, (2**14, 1024)],
    }


@exercise
def load(answer: object) -> str:
    """Exercise 5: (shapes, read) → the weights in FP16, read shard by shard, on a card that is just large enough."""
    function = a_function(answer, "load(shapes, read)")
    _values(function, [(3, 5), (7,), (2, 3, 4), (1, 9), (6, 6)])
    _values(function, [(4, 4)])
    most = 0.0
    for name, shapes in _checkpoints().items():
        with imagine("H100-80GB"):
            reads: list[int] = []
            with Meter() as meter:
                weights = function(list(shapes), _reader(shapes, reads, torch.zeros))
                _each_read_once(reads, shapes, name)
                del weights
        used = _fits(meter.timeline, shapes, name)
        most = max(most, used)
    return f"Weights and one shard: reserved at most {most:.2f} times what they hold."


def _reader(shapes: Shapes, reads: list[int], make: Callable[[tuple[int, ...]], Tensor]) -> Callable[[int], Tensor]:
    def read(n: int) -> Tensor:
        reads.append(n)
        return make(shapes[n])

    return read


def _each_read_once(reads: list[int], shapes: Shapes, where: str) -> None:
    if sorted(reads) != list(range(len(shapes))):
        raise Wrong(f"{where}: expected each of {len(shapes)} shards to be read once; read were {reads[:20]}.")


def _values(function: Callable, shapes: Shapes) -> None:
    """Raise Wrong unless small real weights are right, and alone when all is done."""
    draw = torch.Generator().manual_seed(len(shapes))
    shards = [torch.randn(shape, generator=draw) for shape in shapes]
    where = f"{len(shapes)} small shards"
    reads: list[int] = []

    def read(n: int) -> Tensor:
        reads.append(n)
        return shards[n].clone()

    with Meter(inputs=shards) as meter:
        weights = function(list(shapes), read)
        held = meter.timeline.totals[-1] - meter.timeline.totals[0]
    if not isinstance(weights, list) or not all(isinstance(weight, Tensor) for weight in weights):
        raise Wrong(f"{where}: expected a list of tensors, found {type(weights).__name__}.")
    _each_read_once(reads, shapes, where)
    if len(weights) != len(shapes):
        raise Wrong(f"{where}: expected {len(shapes)} weights, found {len(weights)}.")
    for n, (weight, shard) in enumerate(zip(weights, shards, strict=True)):
        if weight.dtype != torch.float16:
            raise Wrong(f"{where}: expected weight {n} in FP16 (torch.float16), found {weight.dtype}.")
        if weight.shape != shard.shape:
            raise Wrong(f"{where}: expected weight {n} of shape {tuple(shard.shape)}, found {tuple(weight.shape)}.")
        if not torch.equal(weight, shard.half()):
            other = [
                m for m, each in enumerate(shards) if each.shape == shard.shape and torch.equal(weight, each.half())
            ]
            raise Wrong(f"{where}: weight {n} has the values of {f'shard {other[0]}' if other else 'no shard'}.")
    right = sum(2 * shard.numel() for shard in shards)
    if held != right:
        raise Wrong(
            f"{where}: the values are right, and when you return, {held:,} B are alive; the weights are {right:,} B. "
            "Who still holds a shard, or a storage larger than its weight?"
        )


def _fits(timeline: Timeline, shapes: Shapes, where: str) -> float:
    """Reserved over held on the card that the exercise allows; Wrong if it is not large enough for this program."""
    sizes = [math.prod(shape) for shape in shapes]
    weights, shard = 2 * sum(sizes), 4 * max(sizes)
    capacity = (weights + shard) // (2 * MiB) * 2 * MiB + _SPARE
    held = timeline.peak_bytes
    room = (
        f"{where}: the weights are {format_bytes(weights)}, the largest shard is {format_bytes(shard)}, the card has "
        f"{format_bytes(capacity)}"
    )
    if held > capacity:
        alive = timeline.alive(timeline.peak_event)
        shards = sum(s.dtype == "float32" for s in alive)
        halves = sum(s.nbytes for s in alive if s.dtype == "float16")
        look = f"{shards} tensors are in FP32 then: let go of one shard before you read the next."
        if shards < 2:
            look = f"in FP16 there are {format_bytes(halves)} then, more than the weights: write into them in place."
        raise Wrong(f"{room}. Your program holds up to {format_bytes(held)}; {look}")
    card = CachingAllocator(capacity)
    try:
        done = replay(card, requests(timeline))
    except OutOfMemory:
        free = card.reserved_bytes - card.allocated_bytes
        raise Wrong(
            f"{room}. Your tensors would fit, they hold at most {format_bytes(held)}; but {format_bytes(free)} lie "
            f"free in pieces, the largest of {format_bytes(card.largest_free_bytes)}, and a request is larger. Which "
            "of your tensors stay, and where were they put?"
        ) from None
    return done.peak_reserved_bytes / held
