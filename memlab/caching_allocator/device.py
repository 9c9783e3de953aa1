"""The GPU as an allocator sees it: so many bytes, and addresses for them.

A segment needs both. Bytes are limited by the card; any free page serves, wherever it lies. Addresses are plenty, but a
segment needs a range of them without a gap: the lowest that is free, so an address that was given back comes again.
cudaMalloc takes both at once (`take`), expandable segments first the range (`reserve`), then bytes for parts (`map`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from memlab.units import MiB

PAGE_BYTES = 2 * MiB  # what a GPU maps at least, so every address it gives is a multiple
FIRST_ADDRESS = 0x7F00_0000_0000  # about where CUDA's addresses begin; an address of 0 would be the null pointer


class Device:
    """A GPU of `capacity_bytes`, all of them the allocator's; None: no limit."""

    def __init__(self, capacity_bytes: int | None = None):
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self._gaps: list[tuple[int, float]] = [(FIRST_ADDRESS, math.inf)]  # free ranges (start, stop), by address

    def take(self, nbytes: int) -> int | None:
        """The address of a new segment, as cudaMalloc gives it, or None when the GPU is full."""
        return self.reserve(nbytes) if self.map(nbytes) else None

    def give_back(self, address: int, nbytes: int) -> None:
        """Take a segment back, as cudaFree does."""
        self.unmap(nbytes)
        self.release(address, nbytes)

    def map(self, nbytes: int) -> bool:
        """Put bytes behind addresses that are reserved; False, and nothing done, when the GPU is full."""
        if self.capacity_bytes is not None and self.used_bytes + nbytes > self.capacity_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def unmap(self, nbytes: int) -> None:
        """Take the bytes from behind addresses, which stay reserved."""
        self.used_bytes -= nbytes

    def reserve(self, nbytes: int) -> int:
        """The lowest free range of addresses, without bytes behind it."""
        room = whole_pages(nbytes)
        i = next(i for i, (start, stop) in enumerate(self._gaps) if stop - start >= room)
        start, stop = self._gaps.pop(i)
        if stop - start > room:
            self._gaps.insert(i, (start + room, stop))
        return start

    def release(self, address: int, nbytes: int) -> None:
        """Make a range of addresses free again, one gap with those beside it."""
        start, stop = address, address + whole_pages(nbytes)
        i = bisect_left(self._gaps, (start,))
        if self._gaps[i][0] == stop:
            stop = self._gaps.pop(i)[1]
        if i and self._gaps[i - 1][1] == start:
            start = self._gaps.pop(i - 1)[0]
        insort(self._gaps, (start, stop))


def whole_pages(nbytes: int, page: int = PAGE_BYTES) -> int:
    """`nbytes` rounded up to a multiple of `page`.

    >>> whole_pages(1), whole_pages(4 * MiB)
    (2097152, 4194304)
    """
    return -(-nbytes // page) * page
