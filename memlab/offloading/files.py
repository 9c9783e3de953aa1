"""The file that swapped bytes spill to, and the thread that writes and reads it.

The file has no name. The system gives its blocks back when the last handle is closed, and closes all handles when a
process ends, however it ends: nothing can be left over, not even by `kill -9`. (Where a system has no unnamed files,
the file has a name and is marked to be deleted when closed.)

One thread does all reading and writing, in the order it is asked to. So a region may be given to somebody else while
its last bytes are still being written: what is written later lies on top.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from memlab.offloading.slab import Gaps
from memlab.units import MiB, TiB, format_bytes

SLICE_BYTES = 16 * MiB  # asked of the system in one call


class Region(NamedTuple):
    """A piece of the file."""

    start: int
    nbytes: int


class SpillFile:
    """An unnamed file in `folder`, and a thread for it. Both begin with the first write, and end with `close`.

    `write` and `read` return at once, with a Future of the seconds they took. All methods but those are for one thread
    at a time.

    Raises (from `write`, or the Future's result) OSError which names the folder, the bytes and what to do.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._gaps = Gaps(1024 * TiB)
        self._file, self._worker = None, None
        self._close_file: Callable[[], None] | None = None

    @property
    def taken_bytes(self) -> int:
        """What the file holds at present."""
        return self._gaps.taken_bytes

    def write(self, source: Tensor, ready: Callable[[], None] | None = None) -> tuple[Region, Future]:
        """Begin to write source, (nbytes,) of uint8 on the host, which must stay as it is until the Future is done."""
        if self._file is None:
            self._open()
        region = Region(self._gaps.take(source.numel()), source.numel())
        return region, self._worker.submit(self._move, self._file.write, "write", region, source, ready)

    def read(self, region: Region, target: Tensor, ready: Callable[[], None] | None = None) -> Future:
        """Begin to read a region into target, (nbytes,) of uint8 on the host. ready: as in `write`."""
        return self._worker.submit(self._move, self._file.readinto, "read", region, target, ready)

    def give(self, region: Region) -> None:
        """Give a region back, whose bytes are wanted no longer."""
        self._gaps.give(*region)

    def close(self) -> None:
        """End the thread and give the file's blocks back; the next write begins with an empty file."""
        if self._file is None:
            return
        worker, self._worker, self._file = self._worker, None, None
        inside = threading.current_thread() in worker._threads  # the garbage collector runs in any thread
        worker.shutdown(wait=not inside, cancel_futures=True)
        self._close_file()

    def _open(self) -> None:
        file = open_unnamed(self.folder)
        self._gaps = Gaps(1024 * TiB)
        self._close_file = weakref.finalize(self, file.close)
        self._file, self._worker = file, ThreadPoolExecutor(1, thread_name_prefix="memlab-swap")

    def _move(self, call, verb: str, region: Region, memory: Tensor, ready: Callable[[], None] | None) -> float:
        """In the worker: seek, and write or read slice by slice. Returns the seconds it took."""
        if ready is not None:
            ready()
        begin, done, view = time.perf_counter(), 0, memoryview(memory.numpy())
        try:
            call.__self__.seek(region.start)
            while done < region.nbytes:
                moved = call(view[done : done + SLICE_BYTES])
                if not moved:
                    raise OSError(0, "the file ended early")
                done += moved
        except OSError as error:
            raise explained(error, f"{verb} {format_bytes(region.nbytes)}", self.folder) from error
        return time.perf_counter() - begin


class NoFile:
    """The file of imagined hardware: bytes that are not there need no place. It has the methods of SpillFile."""

    def __init__(self):
        self.taken_bytes = 0

    def write(self, source: Tensor, ready: Callable[[], None] | None = None) -> tuple[Region, Future]:
        """Nothing is written, and that at once."""
        self.taken_bytes += source.numel()
        return Region(0, source.numel()), at_once()

    def read(self, region: Region, target: Tensor, ready: Callable[[], None] | None = None) -> Future:
        """Nothing is read."""
        return at_once()

    def give(self, region: Region) -> None:
        """The bytes are wanted no longer."""
        self.taken_bytes -= region.nbytes

    def close(self) -> None:
        """There is nothing to close."""


def at_once() -> Future:
    """A Future that is done, and took no time."""
    future: Future = Future()
    future.set_result(0.0)
    return future


def open_unnamed(folder: Path):
    """A file in `folder` that nobody else can see, without a buffer. Raises OSError that names the folder."""
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise explained(error, "make a file", folder) from error


def explained(error: OSError, wanted: str, folder: Path) -> OSError:
    """The same kind of error, which says what was wanted, where, and what to do."""
    return type(error)(
        error.errno,
        f"expected to {wanted} in folder '{folder}', found: {error.strerror or error}; free some space there, or swap "
        "to another folder that exists, is writable and has room for what is moved (swap.moved_bytes)",
    )
