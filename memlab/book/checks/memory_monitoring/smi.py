"""Exercise 2 of chapter 05: what nvidia-smi shows beside tensors, and how long it does not show a leak."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable

from memlab.book.checks.answers import Wrong, a_function, exercise, same_bytes
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.caching_allocator import CachingAllocator
from memlab.units import KiB, MiB

NVIDIA_SMI_BYTES = 1_476 * MiB
_WEIGHT, _BIAS, _ROW = 4 * 3000 * 1000, 4 * 1000, 4 * 3000


def _trained() -> CachingAllocator:
    """The notebook's card: weights, and what an evaluation and a smaller step have left in the cache."""
    card = CachingAllocator("80 GB")
    for _ in range(12):
        card.malloc(_WEIGHT)
        card.malloc(_BIAS)
    for rows in (6000, 1700):
        made = [card.malloc(rows * _ROW) for _ in range(12)]
        made += [card.malloc(rows * 4) for _ in range(200)]
        for block in made:
            card.free(block)
    return card


# ---- first part


@exercise
def unexplained(rounding: object, cached: object, context: object) -> str:
    """Exercise 2, first part: what nvidia-smi shows and no tensor holds, in three parts, in bytes."""
    card = _trained()
    rounded = card.allocated_bytes - card.requested_bytes
    free = card.reserved_bytes - card.allocated_bytes
    rest = NVIDIA_SMI_BYTES - card.reserved_bytes
    looks = {
        card.inactive_split_bytes: "Those are free blocks beside blocks in use; whole free segments are cached, too.",
        free - card.inactive_split_bytes: "Those are the whole free segments; other segments have free blocks, too.",
        rounded + free: "That is all of reserved − requested: two parts in one.",
        free + rest: "That is all that is not allocated: two parts in one.",
        rounded + free + rest: "That is all three in one.",
        card.reserved_bytes: "That is reserved.",
        card.allocated_bytes: "That is allocated.",
        card.requested_bytes: "That is what tensors hold.",
        rounded: "That is what lies between tensors and their blocks.",
        free: "That is what is reserved and not allocated.",
        rest: "That is what the allocator knows nothing of.",
    }
    asked = (
        (rounding, "rounding_bytes", rounded, "Blocks in use: their sizes, less what was requested."),
        (cached, "cached_bytes", free, "Blocks that are not in use, in whatever segment."),
        (context, "context_bytes", rest, "What nvidia-smi shows, less all segments."),
    )
    for found, name, right, hint in asked:
        look = looks.get(found, hint) if type(found) is int and found not in (0, right) else hint
        same_bytes(found, right, name, look, secret=True)
    return f"Of {NVIDIA_SMI_BYTES // MiB:,} MiB that nvidia-smi shows, tensors hold {card.requested_bytes // MiB}."


# ---- second part


def _mixed(seed: int) -> CachingAllocator:
    """A card in whose segments, of both pools, every other block is free or not."""
    draw, card = random.Random(seed), CachingAllocator("80 GB")
    sizes = [draw.choice((700, 30_000, 400 * KiB, 900 * KiB, MiB + 7, 3 * MiB, 7 * MiB, 12 * MiB)) for _ in range(60)]
    for block in [card.malloc(size + draw.randrange(512)) for size in sizes]:
        if draw.random() < 0.6:
            card.free(block)
    return card


_CARDS = {
    "an empty card": lambda: CachingAllocator("80 GB"),
    "the card above": _trained,
    "a card with holes": lambda: _mixed(1),
    "another with holes": lambda: _mixed(2),
}
_LEAKS = (4, 513, 100_000, 600_000, 1 * MiB, 1 * MiB + 1, 1_500_000, 3 * MiB, 12 * MiB, 70 * MiB)


@functools.cache
def _hidden(make: Callable[[], CachingAllocator], nbytes: int) -> int:
    """How many tensors a card takes before it reserves more, by trying."""
    card, held = make(), 0
    reserved = card.reserved_bytes
    while True:
        card.malloc(nbytes)
        if card.reserved_bytes > reserved:
            return held
        held += 1


@exercise
def silent_steps(answer: object) -> str:
    """Exercise 2, second part: (segments, nbytes) → how many tensors are kept before nvidia-smi shows more."""
    function = a_function(answer, "silent_steps(segments, nbytes)")
    for name, make in _CARDS.items():
        segments = make().segments()
        for nbytes in _LEAKS:
            where, given = f"{name}, {nbytes:,} B a step", copy.deepcopy(segments)
            with NoTensors():
                found = function(given, nbytes)
            if type(found) is not int:
                raise Wrong(f"{where}: expected a number of steps (int), found {type(found).__name__}.")
            if given != segments:
                raise Wrong(f"{where}: your function has changed the snapshot.")
            if found != (right := _hidden(make, nbytes)):
                raise Wrong(f"{where}: {found:,} steps, but it is {right:,}. {_look(found, segments, nbytes, right)}")
    small, large = (_hidden(_trained, nbytes) for nbytes in (MiB, MiB + 1))
    return (
        f"On the card above a leak of 1 MiB a step shows after {small} steps, one of 1 MiB and a byte after {large}: "
        "it takes from another pool, in which more is cached."
    )


def _look(found: int, segments: list[dict], nbytes: int, right: int) -> str:
    block = -(-nbytes // 512) * 512
    pool = "small" if block <= MiB else "large"
    both = [b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive"]
    mine = [b["size"] for s in segments for b in s["blocks"] if b["state"] == "inactive" and s["segment_type"] == pool]
    whole = [s["total_size"] for s in segments if not s["active_size"] and s["segment_type"] == pool]
    looks = {  # the last of equals counts
        right + 1: "That is the step that shows it; how many come before?",
        max(mine, default=0) // block: "That is how many the largest free block takes. The others take some as well.",
        sum(size // block for size in whole): "Segments that are partly in use have free blocks, too.",
        sum(size // nbytes for size in mine): f"A tensor of {nbytes:,} B takes a block of {block:,} B.",
        sum(mine) // block: "A tensor lies in one free block; the ends of two make no third.",
        sum(both) // block: "Free blocks are not joined, and each pool has its own.",
        sum(size // block for size in both): f"A block of {block:,} B comes from the {pool} pool only.",
        sum(s["total_size"] for s in segments) // block: "Most of that is in use.",
    }
    return looks.get(found, f"How many blocks of {block:,} B fit into each free block of the {pool} pool?")
