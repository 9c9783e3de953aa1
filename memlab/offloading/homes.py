"""Where the weights of a layer are at home while they are streamed: in the host's memory, or in a file.

A layer's parameters are laid out in one range of bytes, at home and on the device alike, so a layer travels in one
piece.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from memlab.memory_timeline import main_memory
from memlab.offloading.slab import pinned_bytes
from memlab.offloading.unnamed import UnnamedFile


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


class FileHome(Home):
    """A layer's place in an open file, `window` on the whole of which is shared: each map would take a descriptor.

    `flat` is mapped: whoever reads or writes it works on the file, page by page. A layer is brought with plain reads
    instead, in one go and without a page fault for every 4 KiB.
    """

    def __init__(self, file: UnnamedFile, window: mmap.mmap, start: int, nbytes: int):
        self.file, self.start = file, start
        self.flat = torch.frombuffer(window, dtype=torch.uint8, count=max(nbytes, 1), offset=start)[:nbytes]

    def read(self, into: Tensor) -> None:
        """Copy what is here into a range of the same size. into: (nbytes,) of uint8, on the host."""
        self.file.read(self.start, into)


class HomesInMemory:
    """Makes homes in the host's memory."""

    def __init__(self, *, pinned: bool = False):
        self.pinned = pinned

    def make(self, sizes: list[int]) -> Iterator[Home]:
        """One home of each size, in bytes, and each when it is asked for: meanwhile another may be given up."""
        return (Home(nbytes, pinned=self.pinned) for nbytes in sizes)

    def close(self) -> None:
        """Nothing is open."""


class HomesInFiles:
    """Makes homes in unnamed temporary files in `folder`, which the system removes however the process ends.

    Room is taken on the disk at once, since the files are mapped.
    Raises OSError that names the folder if it is missing, not writable or full.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = folder
        self.files: list[UnnamedFile] = []
        UnnamedFile(folder).close()

    def make(self, sizes: list[int]) -> Iterator[Home]:
        """One home of each size, in bytes, all in one file that has room for them."""
        if not sizes:
            return iter(())
        grain = mmap.ALLOCATIONGRANULARITY  # where a map may begin
        starts = [0]
        for nbytes in sizes:
            starts.append(starts[-1] + -(-max(nbytes, 1) // grain) * grain)
        file = UnnamedFile(self.folder)
        self.files.append(file)
        file.reserve(starts[-1])
        window = file.mapped(0, starts[-1])
        return (FileHome(file, window, start, nbytes) for start, nbytes in zip(starts, sizes, strict=False))

    def close(self) -> None:
        """Close the files. What is mapped stays until nobody holds it."""
        while self.files:
            self.files.pop().close()
