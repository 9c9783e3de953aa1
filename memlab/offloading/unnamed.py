"""A file without a name: bytes on a disk that nobody else can see, and that no process can leave behind.

The system gives a file's blocks back when it has no name and its last handle is closed, and it closes all handles when
a process ends, however it ends: nothing can be left over, not even by `kill -9`. (Where a system has no unnamed files,
the file has a name and is marked to be deleted when closed.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from memlab.units import MiB, format_bytes


class UnnamedFile:
    """An unnamed file in `folder`, without a buffer. One thread at a time may read and write.

    Raises OSError, here and from every method, for what the system reports: it names the folder and says what to do.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = os.fspath(folder)
        self.reserved_bytes = 0
        with self._explained("make a file"):
            self.raw = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        self._finalizer = weakref.finalize(self, self.raw.close)

    def reserve(self, nbytes: int) -> None:
        """Make the file at least so long, with room on the disk for all of it.

        Where the system cannot promise room (macOS, Windows), it is taken by writing zeros. Only to set the length
        would take none, and a mapped page for which there is no room later kills the process (SIGBUS).
        """
        if nbytes <= self.reserved_bytes:
            return
        with self._explained(f"find room for {format_bytes(nbytes)}"):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.raw.fileno(), self.reserved_bytes, nbytes - self.reserved_bytes)
            else:
                zeros = memoryview(bytes(MiB))
                for start in range(self.reserved_bytes, nbytes, MiB):
                    self._move(self.raw.write, start, zeros[: nbytes - start])
        self.reserved_bytes = nbytes

    def write(self, start: int, source: Tensor) -> None:
        """Write a tensor's bytes to the file, from byte `start` on. source: on the host, dense, of any shape."""
        with self._explained(f"write {format_bytes(source.nbytes)}"):
            self._move(self.raw.write, start, bytes_of(source))

    def read(self, start: int, target: Tensor) -> None:
        """Fill a tensor with what the file has from byte `start` on. target: on the host, dense, of any shape."""
        with self._explained(f"read {format_bytes(target.nbytes)}"):
            self._move(self.raw.readinto, start, bytes_of(target))

    def mapped(self, start: int, nbytes: int, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
        """A window on the file, which outlives it. start: a multiple of mmap.ALLOCATIONGRANULARITY."""
        with self._explained(f"map {format_bytes(nbytes)}"):
            return mmap.mmap(self.raw.fileno(), nbytes, access=access, offset=start)

    def close(self) -> None:
        """Give the file's blocks back."""
        self._finalizer()

    def _move(self, call: Callable[[memoryview], int], start: int, left: memoryview) -> None:
        """Write or read until nothing is left: the system may stop earlier."""
        self.raw.seek(start)
        while left:
            if not (moved := call(left)):
                raise OSError(0, "the file ended early")
            left = left[moved:]

    @contextmanager
    def _explained(self, wanted: str) -> Iterator[None]:
        """An error of the system says what was wanted, in which folder, and what to do."""
        try:
            yield
        except OSError as error:
            advice = "free some space there, or name another folder that exists, is writable and has room"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "close some files, or raise the limit of open ones (ulimit -n)"
            raise OSError(
                error.errno,
                f"expected to {wanted} in folder '{self.folder}', found: {error.strerror or error}; {advice}",
            ) from error


def bytes_of(tensor: Tensor) -> memoryview:
    """A dense tensor's bytes, in the order in which they lie: to be used only while the tensor lives.

    `tensor.numpy()` would keep it alive, and would forbid its storage to change its size ever again.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
