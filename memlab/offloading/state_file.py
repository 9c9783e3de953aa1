"""States in a file: an optimizer's states lie on a disk, and visit main memory chunk by chunk, once a step.

While one chunk is stepped, a thread writes the one before back and reads the next one ahead. It does both with plain
reads and writes, through two buffers that live as long as the step. A memory-mapped window would need no buffer, but it
takes a page fault for every 4 KiB, to and fro, and nobody faults ahead; and its pages count as the process's own.

The file has no name, so the system removes it however the process ends.   Source: Rajbhandari et al. 2021
(ZeRO-Infinity).
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.offloading.layout import Shape, laid_out
from memlab.offloading.unnamed import UnnamedFile


class StateRegion(NamedTuple):
    """A stretch of the file with some tensors, by name."""

    start: int
    nbytes: int
    shapes: dict[str, Shape]

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """The region's tensors over `memory`: (nbytes,) of uint8, which holds its bytes."""
        return {name: shape.of(memory) for name, shape in self.shapes.items()}

    def mapped(self, window: mmap.mmap) -> dict[str, Tensor]:
        """The region's tensors over a window on the whole file.

        Each has a storage of its own, as torch.save writes whole storages and takes none for two dtypes.
        """
        return {
            name: torch.frombuffer(
                window, dtype=shape.dtype, count=math.prod(shape.size), offset=self.start + shape.offset_bytes
            ).as_strided(shape.size, shape.stride)
            for name, shape in self.shapes.items()
        }


class StateFile:
    """An unnamed temporary file that dense tensors are put in, and come back from.

    Raises OSError, which names the folder, if no file can be made there, and from every method if the system fails.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.fspath(folder)
        self.torn = False  # whether a write has ended halfway
        self._file, self._end = UnnamedFile(folder), 0

    def reserve(self, nbytes: int) -> None:
        """Make sure that so many bytes more will find room."""
        self._file.reserve(self._end + nbytes)

    def region(self, tensors: Mapping[str, Tensor], within: StateRegion | None = None) -> StateRegion:
        """A place for these tensors, in whatever order: `within`, if it is theirs, or one at the end of the file."""
        tensors = dict(sorted(tensors.items()))
        laid, nbytes = laid_out(tensors.values())
        shapes = dict(zip(tensors, laid, strict=True))
        if within is not None and within.shapes == shapes:
            return within
        self.reserve(nbytes)
        self._end += nbytes
        return StateRegion(self._end - nbytes, nbytes, shapes)

    def write(self, region: StateRegion, tensors: Mapping[str, Tensor]) -> None:
        """Put these tensors at their places in the region."""
        self.torn, before = True, self.torn
        for name, shape in region.shapes.items():
            tensor = tensors[name].detach()
            if tensor.stride() != shape.stride:
                tensor = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device="cpu").copy_(tensor)
            self._file.write(region.start + shape.offset_bytes, tensor)
        self.torn = before

    def read(self, region: StateRegion, memory: Tensor) -> None:
        """Read the region's bytes. memory: (region.nbytes,) of uint8."""
        self._file.read(region.start, memory)

    def mapped(self) -> mmap.mmap | None:
        """A window on the whole file, read where it is looked at; what you write to it is yours. None: it is empty."""
        return self._file.mapped(0, self._file.reserved_bytes, mmap.ACCESS_COPY) if self._file.reserved_bytes else None

    def close(self) -> None:
        """Give the file's room back."""
        self._file.close()


class Passage:
    """The way of regions to memory and back, while a step lasts: a context manager with one thread and two buffers.

    Call `ahead` for the next regions before you work on those that `arrived`, and `back` after.
    """

    def __init__(self, file: StateFile, nbytes: int):
        self._file = file
        self._buffers = deque(torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
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

    def ahead(self, regions: Iterable[StateRegion | None]) -> None:
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

    def back(self, jobs: list[tuple[StateRegion, dict[str, Tensor]]]) -> None:
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
