"""The rows of a memory snapshot: what an allocator was asked and did, the blocks it held, and what each holds to."""

from __future__ import annotations

from typing import NamedTuple

ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map")
ACTIONS += ("segment_unmap", "oom", "snapshot")
STATES = ("active_allocated", "active_pending_free", "inactive")
POOLS = ("small", "large")
MOST_STREAMS = 1000  # and pools: each has a model of its own
MOST_BYTES = 2**48  # of any size in a snapshot; addresses have 64 bits


class Event(NamedTuple):
    """One line of the allocator's history. `size` is what was requested, of a segment what was taken or given back.

    stream: 0 is CUDA's default, others are numbered as they come. pool: 0 is the usual one, others are private (CUDA
    graphs, MemPool). address: of an oom, instead, the bytes that the GPU had free.
    """

    action: str
    address: int
    size: int
    stream: int = 0
    pool: int = 0


class Block(NamedTuple):
    """A block of a segment: its bytes, how many of them were requested, and "inactive" when it is free."""

    size: int
    requested: int
    state: str


class Segment(NamedTuple):
    """A segment at the snapshot's end, with its blocks by address; kind is "small" or "large"."""

    address: int
    size: int
    stream: int
    pool: int
    kind: str
    expandable: bool
    blocks: tuple[Block, ...]


class DeviceRecord(NamedTuple):
    """What one GPU's allocator did (`events`), held at the end (`segments`), and held `before`, where that is known."""

    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    before: tuple[Segment, ...] | None = None


def check_record(record: DeviceRecord) -> None:
    """Raise ValueError or TypeError for a record that no allocator can have."""
    for event in record.events:
        if event.action not in ACTIONS:
            raise ValueError(f"an unknown action {str(event.action)[:60]!r}")
        natural(event.address, 2**64)
        natural(event.size, MOST_BYTES)
        natural(event.stream, MOST_STREAMS), natural(event.pool, MOST_STREAMS)
    for segments in (record.segments, record.before or ()):
        _check_segments(segments)


def _check_segments(segments: tuple[Segment, ...]) -> None:
    end = 0
    for segment in segments:
        natural(segment.address, 2**64), natural(segment.stream), natural(segment.pool)
        expect(bool, segment.expandable, "is_expandable")
        if segment.kind not in POOLS or any(block.state not in STATES for block in segment.blocks):
            raise ValueError(f"segment {segment.address:#x} or its blocks of an unknown kind or state")
        for block in segment.blocks:
            natural(block.size, MOST_BYTES), natural(block.requested, MOST_BYTES)
        if segment.address < end or segment.size != sum(block.size for block in segment.blocks):
            raise ValueError(f"segment {segment.address:#x} in another one, or with blocks of another total")
        end = segment.address + segment.size


def expect(kind: type, value: object, what: str):
    """The value, if it is of exactly this kind. Raises TypeError, which says of what."""
    if type(value) is not kind:
        raise TypeError(f"{what} as {type(value).__name__}, expected {kind.__name__}")
    return value


def natural(number: int, most: int = 2**31) -> int:
    """The number, if it is an int from 0 to below `most`. Raises ValueError."""
    if type(number) is not int or not 0 <= number < most:
        raise ValueError(f"expected a whole number from 0 to below {most}, found {str(number)[:60]}")
    return number
