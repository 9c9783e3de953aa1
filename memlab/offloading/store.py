"""The store of one device: bytes that left it, in the host's memory first, then in a file.

    leave (forward):     device → slab → file      the oldest go on to the file, as backward wants them last
    return (backward):   file → device             on a CPU, read by the worker into the tensor's own memory
                         file → slab → device      on a GPU, which can copy ahead only from the slab

Everything passes the slab, so its size is the host memory that swapping takes. A quarter of it is kept free ahead of
need by writing, so that what leaves seldom waits for the disk.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from memlab.memory_timeline import on_imagined_card
from memlab.offloading.files import SpillFile
from memlab.offloading.link import CudaLink, ImaginedLink, Link
from memlab.offloading.slab import Room, Slab, rounded


class Parcel:
    """Some bytes that left: where they are now."""

    __slots__ = ("memory", "nbytes", "reading", "region", "returned", "room", "spoilt", "taken_at", "writing")

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.room: Room | None = None  # in the slab
        self.region = self.writing = None  # in the file, once the Future is done; till then in the slab, too
        self.reading = None  # on the way from the file, to `memory` or to `room`
        self.memory: Tensor | None = None  # on the device again; `returned` marks the end of the copy there
        self.returned: Any = None
        self.taken_at: int | None = None  # the memory's version when it was first taken
        self.spoilt = False  # written to while it was copied


def store_for(tensor: Tensor, folder: Path | None, ram_bytes: int, *, synchronous: bool) -> Store:
    """A store for what is on the tensor's device. folder: None for the host's memory alone, as much as it takes."""
    link = CudaLink(tensor.device) if tensor.is_cuda else ImaginedLink() if on_imagined_card(tensor) else Link()
    file = None if folder is None or isinstance(tensor, FakeTensor) else SpillFile(folder)
    slab = Slab(None if file is None else ram_bytes, pinned=tensor.is_cuda)
    return Store(tensor.device, link, slab, file, synchronous)


class Store:
    """Takes bytes from a device and gives them back. One thread at a time may call it.

    file: None, then a slab that grows takes all. synchronous: wait for each write and read, as a baseline.
    """

    def __init__(self, device: torch.device, link: Link, slab: Slab, file: SpillFile | None, synchronous: bool):
        self.device, self.link, self.slab, self.file, self.synchronous = device, link, slab, file, synchronous
        self._in_slab: dict[Parcel, None] = {}  # a set in order, the oldest first
        self._writing: deque[Parcel] = deque()

    # ---- leave

    def put(self, source: Tensor, nbytes: int) -> Parcel:
        """Take the elements of source: of any shape and dtype, nbytes in all, on the device.

        Raises OSError if the file failed, now or in a write begun earlier; what left earlier is still there then.
        """
        self._finish_writes()
        parcel = Parcel(nbytes)
        parcel.room = self._room(nbytes)
        if parcel.room is None:
            return self._put_past(source, parcel)
        target = parcel.room.bytes.view(source.dtype).view(source.shape)
        with _set_fwd_grad_enabled(False):  # autograd keeps a tangent itself; copied, it would be the whole slab's
            self.link.down(source, target, lambda: setattr(parcel, "spoilt", True))
        if self.synchronous:
            self.link.settle()
        if self.file is not None:
            self._in_slab[parcel] = None
            self._write_ahead()
        return parcel

    def _room(self, nbytes: int) -> Room | None:
        """A piece of the slab, for which older parcels make room. None if there cannot be one."""
        while (room := self.slab.take(nbytes)) is None:
            if rounded(nbytes) > self.slab.nbytes or not (self._writing or self._in_slab):
                return None
            if not self._writing:
                self._write_oldest()
            self._finish_write()
        return room

    def _put_past(self, source: Tensor, parcel: Parcel) -> Parcel:
        """A parcel larger than the slab goes to the file at once, and that is waited for."""
        on_host = source.contiguous().cpu().view(-1).view(torch.uint8)
        parcel.region, writing = self.file.write(on_host)
        try:
            writing.result()
        except OSError:
            self.file.give(parcel.region)
            raise
        return parcel

    def _write_ahead(self) -> None:
        """Begin to write the oldest until a quarter of the slab is free or about to be."""
        if self.synchronous:
            return
        soon = self.slab.nbytes - self.slab.taken_bytes + sum(rounded(parcel.nbytes) for parcel in self._writing)
        while self._in_slab and soon < self.slab.nbytes // 4:
            soon += rounded(self._write_oldest().nbytes)

    def _write_oldest(self) -> Parcel:
        parcel = next(iter(self._in_slab))
        parcel.region, parcel.writing = self.file.write(parcel.room.bytes, self._copies_are_over())
        del self._in_slab[parcel]
        self._writing.append(parcel)
        return parcel

    def _copies_are_over(self) -> Callable[[], None]:
        """For the worker, which sees no stream: waits until the copies asked for so far are over."""
        return functools.partial(self.link.synchronize, self.link.last)

    def _finish_writes(self) -> None:
        while self._writing and self._writing[0].writing.done():
            self._finish_write()

    def _finish_write(self) -> None:
        """Wait for the first write to end: the parcel's piece of the slab is free, or it stays there if that failed."""
        parcel = self._writing.popleft()
        writing, parcel.writing = parcel.writing, None
        try:
            writing.result()
        except OSError:
            self.file.give(parcel.region)
            parcel.region, self._in_slab = None, {parcel: None, **self._in_slab}
            raise
        if parcel.reading is None:
            self.slab.give(parcel.room)
            parcel.room = None

    def settle(self) -> None:
        """Wait for all that has begun. Raises OSError if it failed."""
        self.link.settle()
        while self._writing:
            self._finish_write()

    # ---- return

    def bring(self, parcel: Parcel) -> None:
        """Begin to bring a parcel nearer to the device, and wait for nothing."""
        if parcel.memory is not None or (parcel.reading is not None and not parcel.reading.done()):
            return
        if parcel.room is not None:
            if self.link.pinned:
                self._up(parcel)
        elif not self.link.pinned:
            parcel.memory = self._memory(parcel)
            parcel.reading = self.file.read(parcel.region, parcel.memory[: parcel.nbytes])
        elif (room := self.slab.take(parcel.nbytes)) is not None:
            parcel.room, parcel.reading = room, self.file.read(parcel.region, room.bytes, self._copies_are_over())

    def take(self, parcel: Parcel) -> Tensor:
        """The parcel's bytes on the device, nbytes of uint8 or a few more; waits. Raises OSError if reading fails."""
        self.link.settle()
        if parcel.memory is None and parcel.room is None:
            self.bring(parcel)
        if parcel.reading is not None:
            self._finish_reading(parcel)
        if parcel.memory is None and parcel.room is None:  # no piece of the slab was free
            on_host = torch.empty(parcel.nbytes, dtype=torch.uint8, device="cpu")
            self.file.read(parcel.region, on_host).result()
            parcel.memory = self._memory(parcel)
            parcel.memory[: parcel.nbytes].copy_(on_host)
        if parcel.memory is None:
            self._up(parcel)
        if parcel.returned is not None:  # each time: another stream may take it next
            self.link.wait(parcel.returned)
        self.link.uses(parcel.memory)
        if parcel.taken_at is None:
            parcel.taken_at = parcel.memory._version
        return parcel.memory

    def _finish_reading(self, parcel: Parcel) -> None:
        reading, parcel.reading = parcel.reading, None
        try:
            reading.result()
        except BaseException:
            self.forget(parcel)
            if parcel.room is not None:
                self.slab.give(parcel.room)
                parcel.room = None
            raise

    def _up(self, parcel: Parcel) -> None:
        parcel.memory = self._memory(parcel)
        parcel.returned = self.link.up(parcel.room.bytes, parcel.memory[: parcel.nbytes])

    def _memory(self, parcel: Parcel) -> Tensor:
        return torch.empty(-(-parcel.nbytes // 16) * 16, dtype=torch.uint8, device=self.device)

    def forget(self, parcel: Parcel) -> None:
        """Let go of the parcel's memory on the device; it can be brought again."""
        if parcel.returned is not None:  # or what is allocated there next would be written to
            self.link.release(parcel.returned)
            parcel.returned = None
        if parcel.memory is not None:
            parcel.memory = parcel.reading = parcel.taken_at = None

    def drop(self, parcel: Parcel) -> None:
        """The parcel is wanted no longer: what it takes of slab and file is free."""
        self.forget(parcel)
        if parcel.reading is not None and not parcel.reading.cancel():
            wait([parcel.reading])  # it fills a piece of the slab
        self._in_slab.pop(parcel, None)
        if parcel.writing is not None:
            self._writing.remove(parcel)
        if parcel.region is not None:
            self.file.give(parcel.region)
        if parcel.room is not None:
            self.slab.give(parcel.room)

    def close(self) -> None:
        """Close the file, if all is dropped. The slab is kept for the next step."""
        if self.file is not None:
            self.file.close()
