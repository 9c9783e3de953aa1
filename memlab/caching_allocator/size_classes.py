"""Managers that round: buddies, whose blocks are powers of two, and slabs, whose pages are cut into equal slots.

Rounding costs bytes inside every block, and buys that a freed block fits the next request of its kind: no search, and
little or no external fragmentation. Sources: Knowlton 1965 (buddies); Bonwick 1994 (slabs).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import torch

from memlab.caching_allocator.managers import ALIGNMENT, Manager, aligned
from memlab.units import MiB, format_bytes


class Buddy(Manager):
    """Every block is a power of two, and lies at a multiple of its size: so one bit of its address names its buddy.

        buddy(address, size) = address XOR size

    A block is halved until it just holds the request. A freed block whose buddy is free too becomes one with it, and so
    on upwards. At first 1 TiB of addresses is one free block; reserved is how far into it a block ever reached. Of the
    free blocks that are large enough a request takes the lowest, so that this mark stays low.
    """

    SMALLEST, LARGEST = 9, 40  # orders: 512 B and 1 TiB

    def __init__(self, capacity_bytes: int | str | None = None):
        super().__init__(capacity_bytes)
        self._free: dict[int, list[int]] = {order: [] for order in range(self.SMALLEST, self.LARGEST)}  # sorted
        self._free[self.LARGEST] = [0]

    def _take(self, nbytes: int) -> tuple[int, int]:
        wanted = (aligned(nbytes) - 1).bit_length()
        fitting = [(self._free[k][0], k) for k in range(wanted, self.LARGEST + 1) if self._free[k]]
        if not fitting:
            raise torch.OutOfMemoryError(f"expected requests that fit into 1 TiB, found {format_bytes(nbytes)} more")
        address, order = min(fitting)
        self._reserve(max(self.reserved_bytes, address + (1 << wanted)), nbytes)
        self._free[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._free[order], address + (1 << order))  # the upper half stays free
        return address, 1 << wanted

    def _give_back(self, address: int, size: int) -> None:
        order = size.bit_length() - 1
        while order < self.LARGEST:
            free, buddy = self._free[order], address ^ (1 << order)
            i = bisect_left(free, buddy)
            if i == len(free) or free[i] != buddy:
                break
            free.pop(i)
            address = min(address, buddy)
            order += 1
        insort(self._free[order], address)

    @property
    def largest_free_bytes(self) -> int:
        """The largest power of two that fits into a free block below the mark that was reached."""
        rests = [min(1 << k, self.reserved_bytes - free[0]) for k, free in self._free.items() if free]
        return max((1 << (rest.bit_length() - 1) for rest in rests if rest > 0), default=0)


@dataclass(eq=False, slots=True)
class _Page:
    """A page of a Slab, cut into equal slots: where it begins, how many slots, and the addresses of the free ones."""

    address: int
    slots: int
    free: list[int]


class Slab(Manager):
    """Requests of like size share a page, cut into equal slots: nothing is searched, nothing is merged.

    A class is a multiple of a quarter of the power of two below it: 512 · {4, 5, 6, 7, 8, 10, 12, 14, 16, 20 …} / 4.
    What is larger than half a page goes to the device itself, in steps of 2 MiB, and back to it when it is freed: with
    CUDA, a call that waits for the whole GPU. A page without a block in use serves any class, and is not given back
    before the capacity is reached.
    """

    PAGE = 2 * MiB

    def __init__(self, capacity_bytes: int | str | None = None):
        super().__init__(capacity_bytes)
        self._partial: dict[int, list[_Page]] = {}  # size of a slot → pages with a slot free and a slot in use
        self._empty: list[int] = []  # addresses of pages
        self._page_of: dict[int, _Page] = {}  # address of a page → how it is cut
        self._end = 0  # addresses of the device are not used twice

    @staticmethod
    def size_class(nbytes: int) -> int:
        """Bytes of the slot for a request of up to half a page: at most a fifth of it is lost, above 2 KiB."""
        size = aligned(nbytes)
        step = max(ALIGNMENT, 1 << (size - 1).bit_length() >> 3)
        return -(-size // step) * step

    def _take(self, nbytes: int) -> tuple[int, int]:
        if nbytes > self.PAGE // 2:
            size = -(-nbytes // (2 * MiB)) * 2 * MiB
            return self._from_device(size, nbytes), size
        size = self.size_class(nbytes)
        partial = self._partial.setdefault(size, [])
        if not partial:
            address = self._empty.pop() if self._empty else self._from_device(self.PAGE, nbytes)
            slots = self.PAGE // size
            page = _Page(address, slots, [address + size * i for i in reversed(range(slots))])
            self._page_of[address] = page
            partial.append(page)
        page = partial[-1]
        address = page.free.pop()
        if not page.free:
            partial.pop()
        return address, size

    def _from_device(self, size: int, nbytes: int) -> int:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            self.reserved_bytes -= self.PAGE * len(self._empty)
            self._empty.clear()
        self._reserve(self.reserved_bytes + size, nbytes)
        self._end += size
        return self._end - size

    def _give_back(self, address: int, size: int) -> None:
        if size > self.PAGE // 2:
            self.reserved_bytes -= size
            return
        page = self._page_of[address // self.PAGE * self.PAGE]  # all that comes from the device is whole pages
        page.free.append(address)
        partial = self._partial[size]
        if len(page.free) == 1:
            partial.append(page)
        if len(page.free) == page.slots:
            partial.remove(page)
            self._empty.append(page.address)

    @property
    def largest_free_bytes(self) -> int:
        """The largest free slot; of an empty page half, the largest that it can be cut into."""
        slots = [size for size, pages in self._partial.items() if pages]
        return max([*slots, self.PAGE // 2 if self._empty else 0], default=0)
