"""What an allocator held when a recording began, worked out from what it held at the end.

A snapshot shows the segments and blocks at its end, and the events that led there. Walked backwards, each event is
undone: what was taken is given back, what was freed is in use again. Segments and blocks in use at the start come out
of this exactly, and so do the free blocks, because freed neighbours always join: free is whatever lies between.

One thing the history does not say, the size of a block that was freed before the end: it has the bytes *requested*,
and in the large pool a rest of up to 1 MiB stays with its block. Free blocks of that pool are larger than 1 MiB, so a
smaller gap behind a block is part of it; behind a larger one, the first request that is served right there shows where
the block ends. If none is, the bytes requested stand for it, rounded: then the free block behind it may be up to 1 MiB
too large here, and best fit may choose differently. A snapshot that knows what was there before needs none of this.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import accumulate

from memlab.caching_allocator.allocator import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
)
from memlab.caching_allocator.blocks import IN_USE, UNMAPPED, Block, Pool, cut
from memlab.caching_allocator.device import whole_pages
from memlab.caching_allocator.expandable_segments import UNLIMITED_BYTES, ExpandableAllocator
from memlab.caching_allocator.records import Block as BlockRecord
from memlab.caching_allocator.records import DeviceRecord, Event, Segment


def segments_at_start(record: DeviceRecord, oversize_bytes: int | None = None) -> list[Segment]:
    """The segments, with their blocks, before the first event of a record; `oversize_bytes`: its max_split_size.

    What the record itself has is taken, if it leads to the end.

    Raises ValueError for a record whose events do not lead to its segments.
    """
    mapped = [list(segment[:6]) for segment in record.segments]
    live = {}  # address → (size of the block, or None where only the request is known, and the request)
    for segment in record.segments:
        address = segment.address
        for block in segment.blocks:
            if block.state != "inactive":
                live[address] = block.size, block.requested
            address += block.size
    for position in range(len(record.events) - 1, -1, -1):
        event = record.events[position]
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action == "free_completed":
            live[event.address] = None, event.size
        elif event.action in ("segment_alloc", "segment_map"):
            mapped = _joined(mapped) if event.action == "segment_map" else mapped
            _take_out(mapped, event.address, event.size, position)
        elif event.action in ("segment_free", "segment_unmap"):
            expandable = event.action == "segment_unmap"
            kind = _kind_of(record, mapped, event.address, event.size, expandable)
            mapped.append([event.address, event.size, event.stream, event.pool, kind, expandable])
    addresses, ends = sorted(live), _ends_shown(record, live)
    segments = []
    for row in _joined(mapped):
        inside = addresses[bisect_left(addresses, row[0]) : bisect_left(addresses, row[0] + row[1])]
        segments.append(_with_blocks(row, {address: live[address] for address in inside}, ends, oversize_bytes))
    if sum(block.state != "inactive" for segment in segments for block in segment.blocks) != len(live):
        raise ValueError("expected every block in a segment before the recording, found one outside")
    if record.before is not None and _outline(record.before) == _outline(segments):
        return list(record.before)
    return segments


def _outline(segments: Iterable[Segment]) -> list[tuple]:
    """Where segments are, and in each the blocks in use."""
    found = []
    for segment in segments:
        starts = accumulate((block.size for block in segment.blocks), initial=segment.address)
        live = [start for start, block in zip(starts, segment.blocks, strict=False) if block.state != "inactive"]
        found.append((*segment[:6], live))
    return found


def _take_out(mapped: list[list], address: int, size: int, position: int) -> None:
    """Take a range, which was taken from the GPU at `position`, out of the one that it is in."""
    for i, (start, nbytes, *more) in enumerate(mapped):
        if start <= address and address + size <= start + nbytes:
            ends = (start, address), (address + size, start + nbytes)
            mapped[i : i + 1] = [[low, high - low, *more] for low, high in ends if low < high]
            return
    raise ValueError(f"event {position}: expected a segment that is still there at the end or was given back")


def _kind_of(record: DeviceRecord, mapped: list[list], address: int, size: int, expandable: bool) -> str:
    """The pool of a segment that was given back; of unmapped pages, that of the pages or requests there."""
    if not expandable:
        return "small" if size == SMALL_SEGMENT_BYTES else "large"
    for start, nbytes, _, _, kind, _ in mapped:
        if address in (start - size, start + nbytes):
            return kind
    for event in record.events:
        if event.action in ("alloc", "free_completed") and address <= event.address < address + size:
            return "small" if event.size <= SMALL_BYTES else "large"
    return kind_of_pages(size)


def kind_of_pages(nbytes: int) -> str:
    """The pool for which so many bytes were mapped, "small" or "large": each maps whole pages of its own size."""
    return "small" if nbytes % LARGE_SEGMENT_BYTES else "large"


def _joined(mapped: list[list]) -> list[list]:
    """The ranges by address, neighbours of one expandable segment as one."""
    joined: list[list] = []
    for row in sorted(mapped):
        if joined and row[5] and row[0] == joined[-1][0] + joined[-1][1] and row[2:] == joined[-1][2:]:
            joined[-1][1] += row[1]
        else:
            joined.append(row)
    return joined


def _ends_shown(record: DeviceRecord, live: dict[int, tuple]) -> dict[int, int]:
    """Of blocks of unknown size: where the first request behind them, within 1 MiB, was served while they lived."""
    unknown = {address: rounded(request) for address, (size, request) in live.items() if size is None}
    starts, ends = sorted(unknown), {}
    for event in record.events:
        if event.action == "free_completed":
            unknown.pop(event.address, None)
        elif event.action == "alloc":
            i = bisect_right(starts, event.address) - 1
            before = starts[i] if i >= 0 else None
            if before in unknown and before not in ends:
                behind = event.address - before - unknown[before]
                if 0 <= behind <= SMALL_BYTES:
                    ends[before] = event.address
    return ends


def _with_blocks(row: list, live: dict[int, tuple], ends: dict[int, int], oversize_bytes: int | None) -> Segment:
    start, nbytes, _, _, kind, expandable = row
    blocks, at = [], start
    for address, following in zip(live, [*list(live)[1:], start + nbytes], strict=False):
        size, request = live[address]
        if size is None:
            size = rounded(request)
            if oversize_bytes and not expandable and size >= oversize_bytes:
                size = nbytes
            elif kind == "large" and not expandable:
                gap = following - address - size
                size = following - address if gap <= SMALL_BYTES else ends.get(address, address + size) - address
        if address > at:
            blocks.append(BlockRecord(address - at, 0, "inactive"))
        blocks.append(BlockRecord(size, request, "active_allocated"))
        at = address + size
    if at < start + nbytes:
        blocks.append(BlockRecord(start + nbytes - at, 0, "inactive"))
    if sum(block.size for block in blocks) != nbytes:
        raise ValueError(f"segment {start:#x}: expected blocks side by side before the recording, found two in one")
    return Segment(*row, tuple(blocks))


def resume(allocator: CachingAllocator, segments: list[Segment], later: Iterable[Event] = ()) -> dict[int, Block]:
    """Have an allocator that holds nothing hold these segments, with their blocks; those in use, by address.

    Expandable ones begin at their lowest mapped page, or at a lower one, unmapped before, that is mapped again while
    they last: `later` are the `segment_map` and `segment_unmap` events of the same stream and pool.

    Raises ValueError for expandable segments where the allocator has none.
    """
    if any(segment.expandable for segment in segments) and not isinstance(allocator, ExpandableAllocator):
        raise ValueError(
            f"expected a model with expandable segments, as were recorded, found {type(allocator).__name__}; "
            "pass none, or ExpandableAllocator"
        )
    live: dict[int, Block] = {}
    runs: dict[str, list[Segment]] = {"small": [], "large": []}
    for segment in segments:
        if segment.expandable:
            runs[segment.kind].append(segment)
        else:
            live |= _lay(allocator, segment.address, segment.size, segment.kind, list(segment.blocks))
    first = [run[0].address for run in runs.values() if run]
    addresses = max(first, default=0) - min(first, default=0) or UNLIMITED_BYTES
    if allocator.capacity_bytes is not None:
        addresses = allocator.capacity_bytes * 9 // 8
    for kind, run in runs.items():
        if not run:
            continue
        start = at = _lowest(run, kind, addresses, later)
        pieces: list[tuple] = []
        for segment in run:
            pieces += [(segment.address - at, 0, UNMAPPED)] * (segment.address > at)
            pieces += segment.blocks
            at = segment.address + segment.size
        nbytes = at - start
        total = max(whole_pages(addresses, LARGE_SEGMENT_BYTES), nbytes)
        pieces += [(total - nbytes, 0, UNMAPPED)] * (total > nbytes)
        live |= _lay(allocator, start, total, kind, pieces)
    return live


def _lowest(run: list[Segment], kind: str, addresses: int, events: Iterable[Event]) -> int:
    """Where an expandable segment of so many addresses begins, as far as its pages show while any is mapped."""
    low = first = run[0].address
    high = run[-1].address + run[-1].size
    held = sum(segment.size for segment in run)
    for event in events:
        if event.action == "segment_unmap":
            held -= event.size if low <= event.address < high else 0
        elif kind_of_pages(event.size) == kind and first - addresses < event.address < first + addresses:
            low, high = min(low, event.address), max(high, event.address + event.size)
            held += event.size
        if held <= 0:
            break
    return low


def _lay(allocator: CachingAllocator, address: int, nbytes: int, kind: str, pieces: list[tuple]) -> dict[int, Block]:
    """Make a segment of these pieces: (size, requested, state)."""
    pool: Pool = allocator._small if kind == "small" else allocator._large
    block = allocator._segments[address] = Block.at(address, nbytes, pool)
    live = {}
    for size, requested, state in pieces:
        rest = cut(block, size) if size < block.size else None
        if state == UNMAPPED:
            block.state = UNMAPPED
            insort(allocator._unmapped[pool], (block.address, block))
        else:
            allocator.reserved_bytes += size
        if state == "inactive":
            pool.add(block)
        elif state != UNMAPPED:
            block.state, block.requested = IN_USE, requested
            allocator.requested_bytes += requested
            allocator.allocated_bytes += size
            live[block.address] = block
        block = rest
    return live


def rounded(nbytes: int) -> int:
    """The size of the block that serves a request, before it takes a rest that is not split off."""
    return max(-(-nbytes // BLOCK_BYTES), 1) * BLOCK_BYTES
