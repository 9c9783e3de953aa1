"""What a program asks of its allocator, and what that comes to: the same trace put to any allocator.

A trace is a list of `(id, nbytes)`: the program asks for `nbytes` and calls what it gets `id`; `(id, FREE)` gives it
back. An id may be used again once it has been freed. `requests(timeline)` reads a trace off a Timeline, so a training
step metered anywhere, also on an imagined card, can be put to every allocator in this chapter:

    replay(CachingAllocator(), requests(meter.timeline)).peak_reserved_bytes
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from memlab.memory_timeline import Timeline

FREE = -1
"""In the place of a size: a free."""
Trace = list[tuple[int, int]]
"""Mallocs and frees in order: (number of the request, its bytes), or FREE in place of the bytes."""


class Allocator(Protocol):
    """What `replay` asks of an allocator. `malloc` returns a block: whatever `free` wants back."""

    allocated_bytes: int  # in blocks that are in use, each counted whole
    reserved_bytes: int  # taken from the device
    largest_free_bytes: int  # the largest piece that is reserved and not in use

    def malloc(self, nbytes: int) -> object:
        """A block of at least `nbytes`."""

    def free(self, block: object) -> None:
        """Take a block back."""


def requests(timeline: Timeline) -> Trace:
    """The mallocs and frees behind a Timeline's events, in order; what existed before comes first.

    A storage that grows or shrinks is a new one and a free of the old one, in the order in which PyTorch does it.
    """
    trace: Trace = []
    held: dict[int, tuple[int, int]] = {}  # storage → the id its bytes go by, and how many they are
    names = 0
    for event in timeline.everything():
        name, nbytes = held.pop(event.storage, (None, 0))
        if nbytes + event.delta:
            trace.append((names, nbytes + event.delta))
            held[event.storage] = names, nbytes + event.delta
            names += 1
        if name is not None:
            trace.append((name, FREE))
    return trace


@dataclass
class Replay:
    """What an allocator held after each event of a trace, in bytes; position 0 is before the first.

    *Requested* is what the program asked for, *allocated* what the blocks in use hold, *reserved* what was taken from
    the device: requested ≤ allocated ≤ reserved. The gap between the first two is internal fragmentation (rounding,
    and rests too small to split off). The gap between the last two is free and cached. It is external fragmentation as
    far as no request can use it.
    """

    requested: list[int] = field(default_factory=lambda: [0])
    allocated: list[int] = field(default_factory=lambda: [0])
    reserved: list[int] = field(default_factory=lambda: [0])
    largest_free: list[int] = field(default_factory=lambda: [0])

    @property
    def peak_requested_bytes(self) -> int:
        """The lower bound: no allocator that moves nothing can reserve fewer bytes."""
        return max(self.requested)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes in blocks in use at once."""
        return max(self.allocated)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes taken from the device at once: what the card must have."""
        return max(self.reserved)

    @property
    def peak_event(self) -> int:
        """The first event after which the most bytes were reserved."""
        return self.reserved.index(self.peak_reserved_bytes)

    @property
    def overhead(self) -> float:
        """Peak reserved over peak requested: 1 is perfect."""
        return self.peak_reserved_bytes / self.peak_requested_bytes if self.peak_requested_bytes else 1.0


def replay(allocator: Allocator, trace: Trace | Timeline | Iterable[tuple[int, int]]) -> Replay:
    """Put every request of a trace (or of a Timeline) to an allocator, and note what it holds after each.

    Raises ValueError, with the position, for a trace that frees what it never got or has freed already, asks twice
    under one id, or asks for fewer than 0 bytes, and TypeError for bytes that are no int. What the allocator raises
    when it is full passes through; in use is then what was before that event.
    """
    if isinstance(trace, Timeline):
        trace = requests(trace)
    done, live = Replay(), {}
    asked = 0
    malloc, free = allocator.malloc, allocator.free
    note = (done.requested.append, done.allocated.append, done.reserved.append, done.largest_free.append)
    note_requested, note_allocated, note_reserved, note_largest = note
    for position, (name, nbytes) in enumerate(trace):
        if nbytes != FREE:
            if type(nbytes) is not int or nbytes < 0:
                error = ValueError if type(nbytes) is int else TypeError
                raise error(
                    f"event {position}: expected a request of 0 bytes or more as an int, or FREE (-1); found {nbytes!r}"
                )
            if name in live:
                raise ValueError(f"event {position}: expected a new id, found {name!r}, which has not been freed")
            live[name] = malloc(nbytes), nbytes
            asked += nbytes
        else:
            if name not in live:
                raise ValueError(
                    f"event {position}: expected the id of something held, found {name!r}, which was never asked for "
                    "or is freed already; a free must follow its malloc, once"
                )
            block, nbytes = live.pop(name)
            free(block)
            asked -= nbytes
        note_requested(asked)
        note_allocated(allocator.allocated_bytes)
        note_reserved(allocator.reserved_bytes)
        note_largest(allocator.largest_free_bytes)
    return done
