"""CUDA's caching allocator, as a model to be read: which bytes a request gets, and when the GPU is asked for more.

cudaMalloc is slow, and cudaFree waits for the GPU. So PyTorch asks the GPU for large *segments*, cuts *blocks* from
them, and keeps a freed block for the next request instead of giving it back. The rules:

    round       a request takes max(512, the next multiple of 512) bytes
    pool        up to 1 MiB from the small pool, more from the large one; no block ever changes its pool
    best fit    the smallest free block of the pool that is large enough; of equal ones the one at the lowest address
    segment     if there is none, a new segment: 2 MiB in the small pool; 20 MiB for a request of less than 10 MiB;
                else the next multiple of 2 MiB
    split       the request takes the low end; the rest is a free block, if it is at least 512 B in the small pool, more
                than 1 MiB in the large one. A smaller rest stays part of the request's block, unused
    free        the block joins the free blocks right before and after it, and waits in its pool
    full        the GPU has no segment to give: give every segment back that is one free block, and ask once more

*allocated* are the blocks in use, each counted whole; *reserved* are the segments. One stream is modelled: a real pool
keeps blocks of different streams apart, and has a block wait that another stream still uses.

Source: c10/cuda/CUDACachingAllocator.cpp in PyTorch's repository, where the same things have the same names.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import torch

from memlab.caching_allocator.blocks import FREE, IN_USE, Block, Pool, chain, cut, described
from memlab.caching_allocator.device import Device, whole_pages
from memlab.caching_allocator.trace import Replay, Trace, replay
from memlab.memory_timeline import Timeline
from memlab.units import MiB, format_bytes, parse_bytes

BLOCK_BYTES = 512  # every block is a multiple of it
SMALL_BYTES = 1 * MiB  # the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MiB
LARGE_SEGMENT_BYTES = 20 * MiB
OWN_SEGMENT_BYTES = 10 * MiB  # from here on a request has a segment of its own size, in whole pages of 2 MiB


class OutOfMemory(torch.OutOfMemoryError):
    """The modelled GPU is full. The message has the words of CUDA's own."""


class Decision(NamedTuple):
    """What the allocator did at the GPU: "segment_alloc", "segment_free", "segment_map" or "segment_unmap".

    event: how many mallocs and frees came before it, so in a replay the position in the trace.
    """

    event: int
    action: str
    address: int
    size: int


class CachingAllocator:
    """`block = a.malloc(nbytes)`, `a.free(block)`, `a.empty_cache()`, on a GPU of `capacity_bytes` (None: no limit).

    Its state is what it holds, in bytes: `requested_bytes` <= `allocated_bytes` <= `reserved_bytes` <= capacity_bytes.
    Then how often it had to empty its cache by itself (`num_alloc_retries`) and failed all the same (`num_ooms`), and
    `decisions`, every segment that it took or gave back, in order. The names are those of `torch.cuda.memory_stats`.

    device: what gives segments, in place of a Device of that capacity; `take(nbytes)` returns an address or None,
    `give_back(address, nbytes)` takes it back.

    Raises TypeError or ValueError for a capacity that is neither bytes nor text such as "16 GiB".
    """

    def __init__(self, capacity_bytes: int | str | None = None, *, device: Device | None = None):
        self.capacity_bytes = None if capacity_bytes is None else parse_bytes(capacity_bytes)
        self.device = Device(self.capacity_bytes) if device is None else device
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.num_alloc_retries = self.num_ooms = 0
        self.decisions: list[Decision] = []
        self._events = 0
        self._pools = self._large, self._small = Pool("large"), Pool("small")
        self._segments: dict[int, Block] = {}  # address → the segment's first block

    # ---- the rules

    def malloc(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, in use from here on; None for 0 bytes, as CUDA gives a null pointer.

        Raises OutOfMemory, and is as usable as before, its cache emptied; TypeError for what is no int, ValueError for
        fewer than 0 bytes.
        """
        if type(nbytes) is not int or nbytes <= 0:
            return self._no_request(nbytes)
        size = (nbytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, size) or self._new(pool, size)
        rest = block.size - size
        if rest and self._splits(pool, size, rest):
            pool.add(cut(block, size))
        block.state, block.requested = IN_USE, nbytes
        self.requested_bytes += nbytes
        self.allocated_bytes += block.size
        self._events += 1
        return block

    def free(self, block: Block | None) -> None:
        """Take a block back into its pool, joined with its free neighbours. None, for 0 bytes, is fine.

        Raises ValueError for a block that is free already or of another allocator, TypeError for what is no block.
        """
        if type(block) is not Block or block.state is not IN_USE or block.pool not in self._pools:
            return self._no_block(block)
        self.requested_bytes -= block.requested
        self.allocated_bytes -= block.size
        self._events += 1
        block.state, block.requested = FREE, 0
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Give back every segment that is one free block. What is in use stays, and so does all that lies beside it."""
        for pool in self._pools:
            for _, _, block in pool.free.copy():
                if block.prev is None and block.next is None:
                    self._give_back(block)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        i = bisect_left(pool.free, (size,))
        return pool.free.pop(i)[2] if i < len(pool.free) else None

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        return rest >= BLOCK_BYTES if pool is self._small else rest > SMALL_BYTES

    def _new(self, pool: Pool, size: int) -> Block:
        block = self._from_device(pool, size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._from_device(pool, size)
        if block is None:
            self.num_ooms += 1
            raise OutOfMemory(self._explain(pool, size))
        return block

    def _from_device(self, pool: Pool, size: int) -> Block | None:
        nbytes = segment_bytes(size)
        address = self.device.take(nbytes)
        if address is None:
            return None
        self._note("segment_alloc", address, nbytes)
        block = self._segments[address] = Block.at(address, nbytes, pool)
        return block

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        del self._segments[block.address]
        self.device.give_back(block.address, block.size)
        self._note("segment_free", block.address, block.size)

    def _note(self, action: str, address: int, size: int) -> None:
        self.reserved_bytes += size if action in ("segment_alloc", "segment_map") else -size
        self.decisions.append(Decision(self._events, action, address, size))

    # ---- what it holds

    @property
    def largest_free_bytes(self) -> int:
        """The largest free block."""
        small, large = self._small.free, self._large.free
        of_small, of_large = small[-1][0] if small else 0, large[-1][0] if large else 0
        return of_small if of_small > of_large else of_large

    @property
    def inactive_split_bytes(self) -> int:
        """Free blocks in segments that are partly in use: no `empty_cache` gives them back."""
        free = self._small.free + self._large.free
        return sum(size for size, _, block in free if block.prev is not None or block.next is not None)

    def segments(self) -> list[dict]:
        """Every segment with its blocks, by address: plain data, in the form of `torch.cuda.memory_snapshot()`."""
        return [described(chain(first)) for _, first in sorted(self._segments.items())]

    def replay(self, trace: Trace | Timeline) -> Replay:
        """Put every request of a trace, or of a Timeline, to this allocator; see `memlab.caching_allocator.trace`."""
        return replay(self, trace)

    def __repr__(self) -> str:
        held = f"{format_bytes(self.allocated_bytes)} allocated, {format_bytes(self.reserved_bytes)} reserved"
        return f"{type(self).__name__}({held})"

    # ---- what it says when it cannot

    _cure = "which expandable segments may avoid"

    def _explain(self, pool: Pool, size: int) -> str:
        unallocated = self.reserved_bytes - self.allocated_bytes
        capacity = self.reserved_bytes if self.capacity_bytes is None else self.capacity_bytes
        free, left = sum(size for size, _, _ in pool.free), capacity - self.reserved_bytes
        if unallocated < size <= left:
            advice = f"too little; the {exact(left)} that the card has left would do, but are no segment: free tensors."
        elif unallocated and unallocated + left >= size:
            advice = f"in pieces of at most {exact(self.largest_free_bytes)}: fragmentation, {self._cure}."
        else:
            advice = "too little, with all that is free: free tensors, or ask for less at a time."
        return (
            # CUDA's own words first, by which people and tools know the error.
            f"CUDA out of memory. Tried to allocate {exact(segment_bytes(size))}. GPU 0 has a total capacity of "
            f"{exact(capacity)} of which {exact(left)} is free. Of the allocated memory "
            f"{exact(self.allocated_bytes)} is allocated by PyTorch, and {exact(unallocated)} is reserved by PyTorch "
            f"but unallocated. The request was for {exact(size)}, from the {pool.name} pool, which has {exact(free)} "
            f"of the unallocated bytes, {advice}"
        )

    def _no_request(self, nbytes: int) -> None:
        if type(nbytes) is not int:
            raise TypeError(f"expected a request in whole bytes, as an int; found {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"expected a request of 0 bytes or more, found {nbytes}")
        self._events += 1

    def _no_block(self, block: object) -> None:
        if block is None:
            self._events += 1
        elif not isinstance(block, Block):
            raise TypeError(f"expected a block that malloc returned, found {block!r}")
        elif block.pool not in self._pools:
            raise ValueError(f"expected a block of this allocator, found one of another: {block!r}")
        else:
            raise ValueError(f"expected a block in use, found {block!r}: it has been freed already; free it once")


def segment_bytes(size: int) -> int:
    """What the GPU is asked for when no free block will do for a request of `size` bytes, rounded.

    >>> [segment_bytes(size) // MiB for size in (512, 1 * MiB, 1 * MiB + 512, 10 * MiB - 512, 11 * MiB)]
    [2, 2, 20, 20, 12]
    """
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if size < OWN_SEGMENT_BYTES else whole_pages(size)


def exact(nbytes: int) -> str:
    """Two decimals, as in CUDA's own message."""
    return format_bytes(nbytes, digits=2)
