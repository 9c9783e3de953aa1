"""Other memory managers on the same requests: what all of them share, and the two that fit exactly and leave holes.

A manager hands out addresses of bytes that it took from the device (*reserved*), and nothing that it has handed out
ever moves. So it pays in one of two coins:

    internal fragmentation: blocks larger than what was asked for    (buddies and slabs, see size_classes.py)
    external fragmentation: free bytes in pieces too small to serve  (first fit and best fit)

Source: Knuth, The Art of Computer Programming 1, section 2.5.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from memlab.units import format_bytes, parse_bytes

ALIGNMENT = 512  # CUDA's allocator's, so that no manager gains by being less careful


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole 512 B.

    >>> aligned(1), aligned(512), aligned(513)
    (512, 512, 1024)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False, slots=True)
class Block:
    """What `malloc` returns: `size` bytes from `address` on, of which `requested` were asked for."""

    address: int
    size: int
    requested: int


class Manager:
    """What every manager has in common: it counts, and it refuses. A kind of manager says how to take and give back.

    capacity_bytes: the most that may be reserved, as an int or text such as "16 GiB"; None for no limit.
    """

    largest_free_bytes = 0

    def __init__(self, capacity_bytes: int | str | None = None):
        self.capacity_bytes = None if capacity_bytes is None else parse_bytes(capacity_bytes)
        self.allocated_bytes = self.reserved_bytes = 0
        self._live: set[Block] = set()

    def malloc(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`, at a multiple of 512 B; None for 0 bytes.

        Raises torch.OutOfMemoryError, with nothing handed out, when the capacity does not suffice; TypeError for what
        is no int, ValueError for fewer than 0 bytes.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise TypeError(f"expected a request in whole bytes, as an int; found {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"expected a request of 0 bytes or more, found {nbytes}")
        if nbytes == 0:
            return None
        block = Block(*self._take(nbytes), nbytes)
        self._live.add(block)
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block | None) -> None:
        """Take a block back. None, for 0 bytes, is fine.

        Raises ValueError for one that this manager never gave out, or has got back already.
        """
        if block is None:
            return
        if block not in self._live:
            raise ValueError(f"expected a block in use, of this {type(self).__name__}; found {block!r}: free it once")
        self._live.remove(block)
        self.allocated_bytes -= block.size
        self._give_back(block.address, block.size)

    def _take(self, nbytes: int) -> tuple[int, int]:
        """Where `nbytes` > 0 are put, as (address, size)."""
        raise NotImplementedError

    def _give_back(self, address: int, size: int) -> None:
        raise NotImplementedError

    def _reserve(self, total: int, nbytes: int) -> None:
        """Hold `total` bytes of the device from here on, for a request of `nbytes`."""
        if self.capacity_bytes is not None and total > self.capacity_bytes:
            raise torch.OutOfMemoryError(
                f"{type(self).__name__} out of memory. Expected at most {format_bytes(self.capacity_bytes)} reserved "
                f"(capacity_bytes), found a request of {format_bytes(nbytes)} beside "
                f"{format_bytes(self.allocated_bytes)} allocated and {format_bytes(self.reserved_bytes)} reserved, the "
                f"largest free piece {format_bytes(self.largest_free_bytes)}; free some first, or raise capacity_bytes"
            )
        self.reserved_bytes = total


class Ranges:
    """A set of addresses, as sorted ranges (start, stop) of which no two touch."""

    def __init__(self):
        self.ranges: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Add the addresses from `start` to before `stop`: one range with those that it touches."""
        ranges = self.ranges
        i = bisect_left(ranges, (start,))
        if i and ranges[i - 1][1] >= start:
            i -= 1
            start = ranges[i][0]
        j = i
        while j < len(ranges) and ranges[j][0] <= stop:
            stop = max(stop, ranges[j][1])
            j += 1
        ranges[i:j] = [(start, stop)]

    def remove(self, start: int, stop: int) -> None:
        """Remove the addresses from `start` to before `stop`, which all lie in one range."""
        i = bisect_left(self.ranges, (start + 1,)) - 1
        first, last = self.ranges[i]
        self.ranges[i : i + 1] = [piece for piece in ((first, start), (stop, last)) if piece[0] < piece[1]]

    @property
    def largest(self) -> int:
        """Bytes of the longest range; 0 when there is none."""
        return max((stop - start for start, stop in self.ranges), default=0)


class FirstFit(Manager):
    """One arena that grows at its end. A request takes the start of the first hole, by address, that is large enough.

    Holes that touch are one hole. `reserved_bytes` is how far the arena ever reached.
    """

    def __init__(self, capacity_bytes: int | str | None = None):
        super().__init__(capacity_bytes)
        self._holes = Ranges()

    def _choose(self, size: int) -> int | None:
        """The address of the hole to use; None when none is large enough."""
        return next((start for start, stop in self._holes.ranges if stop - start >= size), None)

    def _take(self, nbytes: int) -> tuple[int, int]:
        size, end = aligned(nbytes), self.reserved_bytes
        address = self._choose(size)
        if address is None:
            last = self._holes.ranges[-1] if self._holes.ranges else (end, end)
            address = last[0] if last[1] == end else end  # a hole at the end needs only the rest
            self._reserve(address + size, nbytes)
            self._holes.add(end, address + size)
        self._holes.remove(address, address + size)
        return address, size

    def _give_back(self, address: int, size: int) -> None:
        self._holes.add(address, address + size)

    @property
    def largest_free_bytes(self) -> int:
        """The largest hole below the end of the heap."""
        return self._holes.largest


class BestFit(FirstFit):
    """As first fit, but of all the holes that are large enough a request takes the smallest, the lowest of equals."""

    def _choose(self, size: int) -> int | None:
        fitting = ((stop - start, start) for start, stop in self._holes.ranges if stop - start >= size)
        return min(fitting, default=(0, None))[1]
