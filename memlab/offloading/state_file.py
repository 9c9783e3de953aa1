"""States in a file: an optimizer's states lie on a disk, and visit main memory chunk by chunk, once a step.

While one chunk is stepped, a thread writes the one before back and reads the next one ahead. It does both with plain
reads and writes, through two buffers that live as long as the step. A memory-mapped window would need no buffer, but it
takes a page fault for every 4 KiB, to and fro, and nobody faults ahead; and its pages count as the process's own.

The file has no name, so the system removes it however the process ends.   Source: Rajbhandari et al. 2021
(ZeRO-Infinity).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.units import format_bytes

ALIGNMENT = 64  # bytes, of every tensor in the file: a multiple of any element's size


class Piece(NamedTuple):
    """One tensor in a region: where it begins, and what its bytes are."""

    start: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Region(NamedTuple):
    """A stretch of the file with some tensors, by name."""

    offset: int
    nbytes: int
    pieces: dict[str, Piece]

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """The region's tensors over `memory`: (nbytes,) of uint8, which holds its bytes."""
        return {name: carved(memory, *piece) for name, piece in self.pieces.items()}


def carved(memory: Tensor, start: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A dense tensor over the bytes of `memory` from `start` on. memory: (bytes,) of uint8."""
    stop = start + shape.numel() * dtype.itemsize
    return memory[start:stop].view(dtype).as_strided(shape, stride)


def padded(nbytes: int) -> int:
    """The bytes that a tensor of so many takes in the file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def laid_out(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Piece], int]:
    """Tensors one after the other, aligned: their pieces, and how many bytes they take together."""
    pieces, end = {}, 0
    for name, tensor in tensors.items():
        dense = torch.empty_like(tensor, device="meta")  # has the same strides, if they leave no holes
        pieces[name] = Piece(end, tensor.dtype, tensor.shape, dense.stride())
        end += padded(tensor.nbytes)
    return pieces, end


def bytes_of(tensor: Tensor) -> memoryview:
    """A dense tensor's bytes, in the order in which they lie."""
    return memoryview(tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())


class StateFile:
    """An unnamed temporary file that dense tensors are put in, and come back from.

    Raises OSError if no file can be made in `folder`, and from every method for what the system reports: all name the
    folder.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.fspath(folder)
        self.torn = False  # whether a write has ended halfway
        self._end = self._reserved = 0
        with self._explained("a folder that files can be made in"):
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        self._finalizer = weakref.finalize(self, self._file.close)

    def reserve(self, nbytes: int) -> None:
        """Make sure that so many bytes more will find room, on systems that can promise it (not macOS, Windows)."""
        if (end := self._end + nbytes) > self._reserved:
            with self._explained(f"room for {format_bytes(end)}"):
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file.fileno(), self._reserved, end - self._reserved)
                else:
                    self._file.truncate(end)  # which makes it longer
            self._reserved = end

    def region(self, tensors: Mapping[str, Tensor], within: Region | None = None) -> Region:
        """A place for these tensors: `within`, if it is theirs, or one at the end of the file."""
        pieces, nbytes = laid_out(tensors)
        if within is not None and within.pieces == pieces:
            return within
        self.reserve(nbytes)
        self._end += nbytes
        return Region(self._end - nbytes, nbytes, pieces)

    def write(self, region: Region, tensors: Mapping[str, Tensor]) -> None:
        """Put these tensors at their places in the region."""
        with self._explained(f"to write {format_bytes(region.nbytes)}"):
            self.torn, before = True, self.torn
            for name, piece in region.pieces.items():
                tensor = tensors[name]
                if tensor.stride() != piece.stride:
                    tensor = torch.empty_strided(piece.shape, piece.stride, dtype=piece.dtype).copy_(tensor)
                self._file.seek(region.offset + piece.start)
                left = bytes_of(tensor)
                while left:
                    left = left[self._file.write(left) :]
            self.torn = before

    def read(self, region: Region, memory: Tensor) -> None:
        """Read the region's bytes. memory: (region.nbytes,) of uint8."""
        with self._explained(f"to read {format_bytes(region.nbytes)}"):
            self._file.seek(region.offset)
            left = bytes_of(memory)
            while left:
                left = left[self._file.readinto(left) :]

    def mapped(self) -> Tensor:
        """The whole file as a tensor, (bytes,) of uint8, read where it is looked at; what you write to it is yours."""
        if not self._reserved:
            return torch.empty(0, dtype=torch.uint8)
        with self._explained(f"to map {format_bytes(self._reserved)}"):
            window = mmap.mmap(self._file.fileno(), self._reserved, access=mmap.ACCESS_COPY)
        return torch.frombuffer(window, dtype=torch.uint8)

    def close(self) -> None:
        """Give the file's room back."""
        self._finalizer()

    @contextmanager
    def _explained(self, expected: str):
        """An OSError says what was wanted, and of which folder."""
        try:
            yield
        except OSError as error:
            found = os.strerror(error.errno) if error.errno else str(error)
            raise OSError(
                error.errno,
                f"expected {expected} in {self.folder!r}, found: {found}; free space there, or pick another",
            ) from error


class Passage:
    """The way of regions to memory and back, while a step lasts: a context manager with one thread and two buffers.

    Call `ahead` for the next regions before you work on those that `arrived`, and `back` after.
    """

    def __init__(self, file: StateFile, nbytes: int):
        self._file = file
        self._buffers = deque(torch.empty(nbytes, dtype=torch.uint8) for _ in range(2))
        self._reading: deque[tuple[Future, list[dict[str, Tensor]]]] = deque()
        self._writing: deque[Future] = deque()

    def __enter__(self) -> Passage:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memlab-states")
        return self

    def __exit__(self, kind, *_) -> None:
        self._thread.shutdown()
        self._buffers.clear()
        if kind is None:
            self._settle(0)

    def ahead(self, regions: Iterable[Region | None]) -> None:
        """Begin to read these regions, into the buffer whose bytes were sent back before."""
        memory, found, jobs = self._buffers[0], [], []
        self._buffers.rotate()
        for region in regions:
            here, memory = (
                (memory[:0], memory) if region is None else (memory[: region.nbytes], memory[region.nbytes :])
            )
            found.append({} if region is None else region.tensors(here))
            if region is not None:
                jobs.append((region, here))
        self._reading.append((self._thread.submit(self._all, self._file.read, jobs), found))

    def arrived(self) -> list[dict[str, Tensor]]:
        """The tensors of the regions that were asked for first, when they are here; {} for None."""
        reading, found = self._reading.popleft()
        reading.result()
        return found

    def back(self, jobs: list[tuple[Region, dict[str, Tensor]]]) -> None:
        """Begin to write. The one thread does it before it reads anything else into their buffer."""
        self._settle(1)
        self._writing.append(self._thread.submit(self._all, self._file.write, jobs))

    def _settle(self, left: int) -> None:
        """Wait until no more than so many are being written, and raise what they raised."""
        while len(self._writing) > left:
            self._writing.popleft().result()

    @staticmethod
    def _all(do, jobs) -> None:
        for job in jobs:
            do(*job)
