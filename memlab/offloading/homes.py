"""Where the weights of a layer are at home while they are streamed: in the host's memory, or in a file.

A layer's parameters lie one after the other in one range of bytes, at home and on the device alike, so a layer travels
in one piece. Each begins at a multiple of 64 bytes, as tensors of PyTorch's own do, so that kernels work on it in the
same steps.

Source: Zhao et al. 2023 (FSDP), section 3.2.1: a FlatParameter, here without sharding.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import torch
from torch import Tensor

from memlab.memory_timeline import main_memory
from memlab.units import format_bytes

ALIGNMENT = 64


def flat_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take one after the other, each rounded up to ALIGNMENT.

    >>> flat_bytes([torch.zeros(16, 16), torch.zeros(3)])
    1088
    """
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def views_of(flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes and dtypes in a flat range, and of the same strides where those leave no holes.

    flat: (flat_bytes(tensors),) of uint8.
    """
    views, start = [], 0
    for tensor in tensors:
        piece = flat[start : start + tensor.nbytes].view(tensor.dtype)
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        views.append(piece.as_strided(tensor.shape, tensor.stride()) if dense else piece.view(tensor.shape))
        start += flat_bytes([tensor])
    return views


class Home:
    """A layer's place in the host's memory. `flat`: (nbytes,) of uint8.

    pinned: pages that the system promises not to move, which a GPU copies from at full speed while it computes.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False):
        with main_memory():
            self.flat = pinned_bytes(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def read(self, into: Tensor) -> None:
        """Copy what is here into a range of the same size. into: (nbytes,) of uint8, on the host or a GPU."""
        into.copy_(self.flat, non_blocking=True)

    def rest(self) -> None:
        """Nothing is wanted from here for a while."""


def pinned_bytes(nbytes: int) -> Tensor:
    """(nbytes,) of uint8 in pinned memory, or in ordinary memory with a warning where no more can be pinned."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        warnings.warn(
            f"expected {format_bytes(nbytes)} of pinned memory, found none ({str(error).splitlines()[0]}); this layer "
            "is copied through ordinary memory, which is slower: stream to a folder, or raise ulimit -l",
            stacklevel=2,
        )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class FileHome(Home):
    """A layer's place in an open file.

    `flat` is mapped: whoever reads or writes it works on the file, page by page. A layer is brought with plain reads
    instead, in one go and without a page fault for every 4 KiB.
    """

    def __init__(self, homes: HomesInFiles, file: BinaryIO, offset: int, nbytes: int):
        self.homes, self.file, self.offset = homes, file, offset
        self.map = mmap.mmap(file.fileno(), max(nbytes, 1), offset=offset)
        self.flat = torch.frombuffer(self.map, dtype=torch.uint8)[:nbytes]

    def read(self, into: Tensor) -> None:
        """Copy what is here into a range of the same size. into: (nbytes,) of uint8, on the host."""
        left = memoryview((ctypes.c_char * into.numel()).from_address(into.data_ptr())).cast(
            "B"
        )  # .numpy() fixes sizes
        try:
            self.file.seek(self.offset)
            while left:
                if not (found := self.file.readinto(left)):
                    raise OSError(0, "the file ended early")
                left = left[found:]
        except OSError as error:
            raise self.homes.explained(error, f"to read {format_bytes(into.numel())}") from error

    def rest(self) -> None:
        """Give the pages that were touched back to the system, which writes them to the file when it likes."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


class HomesInMemory:
    """Makes homes in the host's memory."""

    limited = False

    def __init__(self, *, pinned: bool = False):
        self.pinned = pinned

    def make(self, sizes: list[int]) -> Iterator[Home]:
        """One home of each size, in bytes, and each when it is asked for: meanwhile another may be given up."""
        return (Home(nbytes, pinned=self.pinned) for nbytes in sizes)

    def close(self) -> None:
        """Nothing is open."""


class HomesInFiles:
    """Makes homes in unnamed temporary files in `folder`, which the system removes however the process ends.

    Room is taken on the disk at once: a mapped page for which there is no room later would kill the process (SIGBUS).
    Raises OSError that names the folder if it is missing, not writable or full.
    """

    limited = True

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.fspath(folder)
        self.files: list[BinaryIO] = []
        with self.new_file():
            pass

    def make(self, sizes: list[int]) -> Iterator[Home]:
        """One home of each size, in bytes, all in one file that has room for them."""
        grain = mmap.ALLOCATIONGRANULARITY  # where a map may begin
        starts = [0]
        for nbytes in sizes:
            starts.append(starts[-1] + -(-max(nbytes, 1) // grain) * grain)
        file = self.new_file()
        try:
            reserve(file, starts[-1])
        except OSError as error:
            file.close()
            raise self.explained(error, f"room for {format_bytes(starts[-1])}") from error
        self.files.append(file)
        return (FileHome(self, file, start, nbytes) for start, nbytes in zip(starts, sizes, strict=False))

    def new_file(self) -> BinaryIO:
        """An empty one, without a buffer."""
        try:
            return tempfile.TemporaryFile(dir=self.folder, buffering=0)
        except OSError as error:
            raise self.explained(error, "a folder to make files in") from error

    def explained(self, error: OSError, expected: str) -> OSError:
        """The same kind of error, which names the folder and says what to do."""
        found = error.strerror or error
        return type(error)(
            error.errno, f"expected {expected} in {self.folder}, found: {found}; free some, or name another folder"
        )

    def close(self) -> None:
        """Close the files. What is mapped stays until nobody holds it."""
        while self.files:
            self.files.pop().close()


def reserve(file: BinaryIO, nbytes: int) -> None:
    """Make the file so long, with room on the disk for all of it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
    else:
        zeros = bytes(1 << 20)
        for start in range(0, nbytes, len(zeros)):
            left = memoryview(zeros)[: nbytes - start]
            while left:
                left = left[file.write(left) :]
        file.flush()
