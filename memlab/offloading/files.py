"""The file that swapped bytes spill to, and the thread that writes and reads it.

One thread does all reading and writing, in the order it is asked to. So a region may be given to somebody else while
its last bytes are still being written: what is written later lies on top.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from memlab.offloading.slab import Gaps
from memlab.offloading.unnamed import UnnamedFile
from memlab.units import TiB


class Region(NamedTuple):
    """A piece of the file."""

    start: int
    nbytes: int


class SpillFile:
    """An unnamed file in `folder`, and a thread for it. Both begin with the first write, and end with `close`.

    `write` and `read` return at once, with a Future. All methods but those are for one thread at a time.

    Raises (from `write`, or the Future's result) OSError which names the folder, the bytes and what to do.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = folder
        self._gaps = Gaps(1024 * TiB)
        self._file: UnnamedFile | None = None
        self._worker: ThreadPoolExecutor | None = None

    @property
    def taken_bytes(self) -> int:
        """What the file holds at present."""
        return self._gaps.taken_bytes

    def write(self, source: Tensor, ready: Callable[[], None] | None = None) -> tuple[Region, Future]:
        """Begin to write source, (nbytes,) of uint8 on the host, which must stay as it is until the Future is done."""
        if self._file is None:
            self._open()
        region = Region(self._gaps.take(source.numel()), source.numel())
        return region, self._submit(self._file.write, region.start, source, ready)

    def read(self, region: Region, target: Tensor, ready: Callable[[], None] | None = None) -> Future:
        """Begin to read a region into target, (nbytes,) of uint8 on the host. ready: as in `write`."""
        return self._submit(self._file.read, region.start, target, ready)

    def give(self, region: Region) -> None:
        """Give a region back, whose bytes are wanted no longer."""
        self._gaps.give(*region)

    def close(self) -> None:
        """End the thread and give the file's blocks back; the next write begins with an empty file."""
        if self._file is None:
            return
        worker, file, self._worker, self._file = self._worker, self._file, None, None
        inside = threading.current_thread() in worker._threads  # the garbage collector runs in any thread
        worker.shutdown(wait=not inside, cancel_futures=True)
        file.close()

    def _submit(self, move: Callable[[int, Tensor], None], start: int, memory: Tensor, ready) -> Future:
        def when_ready() -> None:
            if ready is not None:
                ready()
            move(start, memory)

        return self._worker.submit(when_ready)

    def _open(self) -> None:
        self._file = UnnamedFile(self.folder)
        self._gaps = Gaps(1024 * TiB)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="memlab-swap")
