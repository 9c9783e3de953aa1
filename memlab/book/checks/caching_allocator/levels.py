"""Exercises 1 and 2 of chapter 04: what equal tensors reserve, and where a card's unrequested bytes are."""

from __future__ import annotations

import functools

import torch

from memlab.book.checks.answers import a_function, exercise, same_bytes, whole_bytes
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.book.workloads import MLP
from memlab.caching_allocator import CachingAllocator, replay, requests
from memlab.memory_timeline import Meter, Timeline, imagine
from memlab.units import MiB

# ---- 1

_SIZES = (4, 512, 513, 100_000, 700_000, MiB, MiB + 1, 3_000_000, 5 * MiB, 6 * MiB, 7 * MiB, 10 * MiB - 100)
_OWN_SIZES = (10 * MiB, 11 * MiB, 11 * MiB + 1, 100 * MiB + 1)


def _in_one_segment(nbytes: int) -> tuple[int, int, int]:
    """(block, segment, how many such blocks the segment holds), as the allocator has it."""
    card = CachingAllocator()
    card.malloc(nbytes)
    segment, held = card.reserved_bytes, 0
    while card.reserved_bytes == segment:
        held += 1
        card.malloc(nbytes)
    return -(-nbytes // 512) * 512, segment, held


@exercise
def reserved_bytes(answer: object) -> str:
    """Exercise 1: (nbytes, count) → the bytes reserved for `count` tensors of `nbytes` each on an empty card."""
    function = a_function(answer, "reserved_bytes(nbytes, count)")
    for nbytes in _SIZES + _OWN_SIZES:
        block, segment, held = _in_one_segment(nbytes)
        for count in sorted({0, 1, 2, 3, held - 1, held, held + 1, 2 * held + 1, 7 * held, 10**9}):
            name = f"reserved_bytes({nbytes:,}, {count:,})"
            with NoTensors():
                found = whole_bytes(function(nbytes, count), name)
            known = {  # the last of equals counts
                count // held * segment: "The last segment is reserved as well, however few of its blocks are in use.",
                -(-count * nbytes // segment) * segment: f"Each request is rounded up first: a block of {block:,} B.",
                -(-count * block // segment) * segment: f"A segment holds {held:,} whole blocks of {block:,} B: no "
                "block lies across two segments.",
                count * segment: "That is a segment for each tensor. Several share one, if they fit.",
                count * block: "Those are the blocks, *allocated*. Reserved are whole segments.",
                count * nbytes: "That is *requested*. Reserved are whole segments, in which there are whole blocks.",
            }
            pool = (
                f"is from the {'small' if block <= MiB else 'large'} pool" if held > 1 else "has a segment of its own"
            )
            look = known.get(found, f"A block of {block:,} B {pool}.") if count else "Without a tensor, no segment."
            same_bytes(found, -(-count // held) * segment, name, look)
    return "Whole blocks in whole segments: seven tensors of 7 MiB hold 49 MiB and reserve 80."


# ---- 2


def training(features: int, width: int, layers: int, batches: tuple[int, ...]) -> Timeline:
    """An MLP's forward and backward on an imagined card, batch after batch."""
    with imagine("H100-80GB"), Meter() as meter:
        model = MLP(features=features, width=width, layers=layers)
        for rows in batches:
            model(torch.empty(rows, features), torch.zeros(rows, dtype=torch.int64)).backward()
            model.zero_grad()
    return meter.timeline


@functools.cache
def _blocks() -> tuple[list[tuple[int, int, bool]], int]:
    """(size, requested, in use) of each block of exercise 2's card, and the bytes of segments that are all free."""
    timeline = training(777, 1999, 5, (1500, 1700, 1999))
    trace = requests(timeline)
    card = CachingAllocator()
    replay(card, trace[: replay(CachingAllocator(), trace).requested.index(timeline.peak_bytes)])
    whole = sum(segment["total_size"] for segment in card.segments() if not segment["active_size"])
    blocks = [block for segment in card.segments() for block in segment["blocks"]]
    return [(b["size"], b["requested_size"], b["state"] != "inactive") for b in blocks], whole


@exercise
def unexplained(rounding: object, rests: object, cached: object) -> str:
    """Exercise 2: what is reserved and not requested, in three parts, in bytes."""
    blocks, whole = _blocks()
    used = [(size, requested, -(-requested // 512) * 512) for size, requested, in_use in blocks if in_use]
    rounded_up = sum(rounded - requested for _, requested, rounded in used)
    not_split_off = sum(size - rounded for size, _, rounded in used)
    free = sum(size for size, _, in_use in blocks if not in_use)
    asked = (
        (rounding, "rounding", rounded_up, "For each block in use: from requested_size to the next multiple of 512."),
        (rests, "rest", not_split_off, "For each block in use: its size, less what was requested, *rounded up*."),
        (cached, "cached", free, "The blocks whose state is inactive, whole, in whatever segment they are."),
    )
    known = {
        rounded_up + not_split_off: "That is all of allocated − requested: two parts in one.",
        not_split_off + free: "That is rests and free blocks together.",
        rounded_up + not_split_off + free: "That is all of reserved − requested: three parts in one.",
        whole: "Those are the segments that are free as a whole. Others have free blocks, too.",
        free - whole: "Those are free blocks beside blocks in use. Segments that are free as a whole are cached, too.",
        rounded_up: "That is what is lost to rounding.",
        not_split_off: "Those are the rests.",
        free: "Those are the free blocks.",
    }
    for found, name, right, hint in asked:
        look = known.get(found, hint) if type(found) is int and found not in (0, right) else hint
        same_bytes(found, right, f"{name}_bytes", look, secret=True)
    return "Of what is reserved and not requested, more than nine tenths is cached: for the next who asks for so much."
