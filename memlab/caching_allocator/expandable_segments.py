"""Expandable segments: one segment per pool that grows at its end, page by page, instead of many that never meet.

Free blocks of different segments cannot join, however many there are. With
`PYTORCH_ALLOC_CONF=expandable_segments:True` a pool reserves *addresses* for more than the whole card, which costs
nothing, and has bytes mapped behind them as it needs them. All its blocks are neighbours then:

    segment     9/8 of the card in addresses, in pages of 2 MiB (small pool) or 20 MiB (large pool)
    best fit    a free block counts with the unmapped one that follows it, into which it can grow: of two neighbours in
                the order of size, the smaller after growing. So the segment's open end is kept for those who need it
    new         the lowest place where free and unmapped blocks together are large enough; as many whole pages are
                mapped as are missing there
    split       if the rest is at least 512 B, in both pools
    give back   the whole pages inside any free block are unmapped: no block in use beside it can prevent that

Mapped and unmapped blocks never join. *reserved* is what is mapped. Source: the note "Expandable Segments" in PyTorch's
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import groupby

from memlab.caching_allocator.allocator import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
)
from memlab.caching_allocator.blocks import FREE, UNMAPPED, Block, Pool, chain, cut, described, join
from memlab.caching_allocator.device import Device, whole_pages
from memlab.units import TiB

UNLIMITED_BYTES = 16 * TiB  # the addresses of a segment on a GPU without a limit


class ExpandableAllocator(CachingAllocator):
    """A CachingAllocator whose segments grow and shrink.

    A `device` of your own has, besides, `reserve(nbytes)` and `release(address, nbytes)` for addresses, `map(nbytes)`
    and `unmap(nbytes)` for bytes, as Device has.
    """

    _cure = "in pages that are partly in use"

    def __init__(self, capacity_bytes: int | str | None = None, *, device: Device | None = None):
        super().__init__(capacity_bytes, device=device)
        self._unmapped: dict[Pool, list[tuple[int, Block]]] = {pool: [] for pool in self._pools}  # sorted by address

    def empty_cache(self) -> None:
        """Give back every whole page inside a free block."""
        for pool in self._pools:
            for _, _, block in pool.free.copy():
                self._unmap(block)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        i = bisect_left(pool.free, (size,))
        if i == len(pool.free):
            return None
        while i + 1 < len(pool.free) and grown(pool.free[i + 1][2]) < grown(pool.free[i][2]):
            i += 1
        return pool.free.pop(i)[2]

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        return rest >= BLOCK_BYTES

    def _from_device(self, pool: Pool, size: int) -> Block | None:
        block = self._place(pool, size)
        if block.state is UNMAPPED:
            block = self._map(block, min(size, block.size))
        while block is not None and block.size < size:
            unmapped = block.next
            block = self._map(unmapped, min(size - block.size, unmapped.size))
        if block is not None:
            pool.remove(block)
        return block

    def _place(self, pool: Pool, size: int) -> Block:
        """The first block of the lowest run of free and unmapped ones in which there is room, or of a new segment."""
        for _, block in self._unmapped[pool]:
            if block.prev is not None and block.prev.state is FREE:
                block = block.prev
            if has_room(block, size):
                return block
        addresses = UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes * 9 // 8
        nbytes = whole_pages(max(addresses, size), page_bytes(pool))
        address = self.device.reserve(nbytes)
        block = self._segments[address] = Block.at(address, nbytes, pool)
        return self._set_unmapped(block)

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Map the first `nbytes` of an unmapped block, in whole pages; the free block that comes of it, or None."""
        nbytes = whole_pages(nbytes, page_bytes(block.pool))
        if not self.device.map(nbytes):
            return None
        self._unmapped[block.pool].remove((block.address, block))
        block.state = FREE
        if nbytes < block.size:
            self._set_unmapped(cut(block, nbytes))
        self._note("segment_map", block.address, nbytes)
        return block.pool.put(block)

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block; what is left at its ends stays free."""
        page = page_bytes(block.pool)
        segment = max(address for address in self._segments if address <= block.address)
        start = segment + whole_pages(block.address - segment, page)
        stop = segment + (block.address + block.size - segment) // page * page
        if start >= stop:
            return
        block.pool.remove(block)
        if block.address < start:
            low, block = block, cut(block, start - block.address)
            block.pool.add(low)
        if stop < block.address + block.size:
            block.pool.add(cut(block, stop - start))
        self.device.unmap(stop - start)
        self._note("segment_unmap", start, stop - start)
        block = self._set_unmapped(block)
        if block.prev is None and block.next is None:
            self._unmapped[block.pool].remove((block.address, block))
            del self._segments[block.address]
            self.device.release(block.address, block.size)

    def _set_unmapped(self, block: Block) -> Block:
        unmapped, before, after = self._unmapped[block.pool], block.prev, block.next
        if before is not None and before.state is UNMAPPED:
            unmapped.remove((before.address, before))
            block = join(before, block)
        if after is not None and after.state is UNMAPPED:
            unmapped.remove((after.address, after))
            join(block, after)
        block.state = UNMAPPED
        insort(unmapped, (block.address, block))
        return block

    @property
    def inactive_split_bytes(self) -> int:
        """0, as PyTorch has it: a free block beside one in use can be given back, but for its last pages."""
        return 0

    def segments(self) -> list[dict]:
        """Every run of mapped blocks as a segment, as PyTorch's snapshots show it; see CachingAllocator.segments."""
        runs = []
        for _, first in sorted(self._segments.items()):
            for mapped, blocks in groupby(chain(first), key=lambda block: block.state is not UNMAPPED):
                if mapped:
                    runs.append(described(list(blocks), expandable=True))
        return runs


def page_bytes(pool: Pool) -> int:
    """How much a pool maps at a time: as much as its segments would have without expandable ones."""
    return SMALL_SEGMENT_BYTES if pool.name == "small" else LARGE_SEGMENT_BYTES


def grown(block: Block) -> int:
    """The size of a free block with the unmapped one that follows it, if one does."""
    following = block.next
    return block.size + (following.size if following is not None and following.state is UNMAPPED else 0)


def has_room(block: Block | None, size: int) -> bool:
    """Whether a block and those after it, up to the first in use, have `size` bytes together."""
    room = 0
    while room < size and block is not None and not block.in_use:
        room += block.size
        block = block.next
    return room >= size
