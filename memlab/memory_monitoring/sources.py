"""Where figures come from: the process's own memory, PyTorch's allocator on a GPU, the driver, a meter.

A source is looked at from outside; it makes nothing and changes nothing but a high-water mark. Its figures are named by
their level: *storages* (what tensors hold), *heap* and *allocated* (blocks in use, of malloc and of PyTorch's
allocator), *reserved* (segments), *resident* and *driver* (pages and bytes that the system has handed out).

Looking must cost next to nothing. So files are opened once, stay open, and are read where they are. The heap's figure
takes longer the more free chunks malloc has to walk: under a microsecond for none, half a millisecond for thousands.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
import weakref
from typing import Protocol

from memlab.memory_monitoring.high_water import HighWater, Reader, join_mark
from memlab.memory_monitoring.sampler import Pace
from memlab.memory_timeline import Meter
from memlab.units import KiB, MiB


class Gone(Exception):
    """What was watched is no longer there: a process that ended, a GPU that fell off the bus."""


class Source(Protocol):
    """What `Monitor` asks of a source. `name` tells two sources apart ("process", "cuda:0", "gpu 0").

    A source belongs to one monitor at a time. Where it has a `close` method, that is called in the end.
    """

    name: str

    def read(self) -> dict[str, int]:
        """Bytes now, by level. Raises Gone when there is nothing left to look at. Called in any thread."""

    def peaks(self) -> dict[str, int]:
        """The most bytes since it was asked last, by level, for those levels that something else keeps track of.

        Called at the start, and by `step()` in the training's thread.
        """


class ProcessMemory:
    """A process's main memory: *resident* pages (RSS), and *heap*, what malloc has handed out, where glibc tells.

    What a program has the system map is in no heap: shared memory, as data loaders' workers send it, mapped files, and
    the arenas in which Python keeps objects of up to 512 bytes. `resident` has all of them.

    pid: the process; None for this one. The heap's figure and peaks are for this process only. On Linux the system
    keeps a high-water mark of the resident pages (VmHWM), which a process may set back for itself through
    /proc/self/clear_refs; `resource.getrusage`'s ru_maxrss falls with it. Where that file cannot be written, as in some
    containers, and on macOS, there are no peaks. paced: where the heap's figure takes long to find, it is kept for 1000
    times as long.

    Raises Gone for a process that is not there.
    """

    def __init__(self, pid: int | None = None, *, paced: bool = False):
        self._pace = Pace() if paced else None
        self._heap_bytes, self._heap_again = 0, 0.0
        self.pid = os.getpid() if pid is None else pid
        self.name = "process" if pid is None else f"process {pid}"
        self._heap = _heap() if pid is None else None
        self._files: dict[str, int] = {}
        self._reader: Reader | None = None
        self._mark: HighWater | None = None
        weakref.finalize(self, _close_all, self._files).atexit = False
        self.read()

    def read(self) -> dict[str, int]:
        """`resident` and, for this process under glibc, `heap`. Raises Gone when the process has ended."""
        figures = {}
        if HAS_PROC:
            pages = int(self._text("statm").split()[1])
            if not pages:  # what is left of a process until its parent asks how it ended
                raise Gone(f"process {self.pid} has ended")
            figures["resident"] = pages * PAGE_BYTES
        elif (ask := _proc_pid_rusage()) is not None:
            found = (ctypes.c_uint64 * 32)()
            if ask(self.pid, 0, found):
                raise Gone(f"process {self.pid} has ended, or was never there")
            figures["resident"] = found[8]  # ri_resident_size, after 16 bytes of ri_uuid and six counters
        if self._heap is not None:
            figures["heap"] = self._heap_now()
        return figures

    def _heap_now(self) -> int:
        if (began := time.perf_counter()) >= self._heap_again:
            self._heap_bytes = self._heap()
            if self._pace is not None:
                now = time.perf_counter()
                self._heap_again = now + self._pace.rest(now - began)
        return self._heap_bytes

    def peaks(self) -> dict[str, int]:
        """`resident`: the most since it was asked last; {} where the system does not tell."""
        if self._mark is None and not self._join():
            return {}
        return self._mark.take(self._reader)

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        if self._mark is not None:
            self._leave()
            self._mark = self._reader = None
        _close_all(self._files)

    def _join(self) -> bool:
        if self.pid != os.getpid() or not HAS_PROC:
            return False
        try:
            self._mark, self._reader, self._leave = join_mark("VmHWM", _resident_mark, self)
        except OSError:
            return False
        return True

    def _text(self, name: str) -> bytes:
        try:
            if name not in self._files:
                self._files[name] = os.open(f"/proc/{self.pid}/{name}", os.O_RDONLY)
            return os.pread(self._files[name], 256, 0)
        except (FileNotFoundError, ProcessLookupError):
            raise Gone(f"process {self.pid} has ended{'' if self._files else ', or was never there'}") from None


HAS_PROC = os.path.exists("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if HAS_PROC else 0


@functools.cache
def _proc_pid_rusage():
    """macOS's function that tells of a process (libproc.h), or None elsewhere."""
    try:
        ask = ctypes.CDLL(None).proc_pid_rusage
    except (AttributeError, OSError, TypeError):
        return None
    ask.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    return ask


def _close_all(files: dict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _resident_mark() -> HighWater:
    files: dict[str, int] = {}
    mark = HighWater(lambda: _resident_peak(files["status"]), lambda: os.pwrite(files["clear_refs"], b"5", 0))
    weakref.finalize(mark, _close_all, files)
    files["status"] = os.open("/proc/self/status", os.O_RDONLY)
    files["clear_refs"] = os.open("/proc/self/clear_refs", os.O_WRONLY)
    return mark


def _resident_peak(status: int) -> dict[str, int]:
    _, found, rest = os.pread(status, 4096, 0).partition(b"VmHWM:")
    return {"resident": int(rest.split(None, 1)[0]) * KiB} if found else {}


PROBE_BYTES = 64 * MiB  # asked for and not written to; far more than other threads free meanwhile


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


@functools.cache
def _heap():
    """A function that returns the bytes malloc has handed out (mallinfo2(3)), or None where nobody tells.

    With another malloc in its place (jemalloc, preloaded) glibc's is still there to be asked, and knows of nothing.
    """
    try:
        libc = ctypes.PyDLL(None)  # it keeps the lock of the interpreter: giving it away may take longer
        malloc, free, mallinfo2 = libc.malloc, libc.free, libc.mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    malloc.restype, free.argtypes, mallinfo2.restype = ctypes.c_void_p, (ctypes.c_void_p,), _MallInfo2
    malloc.argtypes = (ctypes.c_size_t,)

    def heap_bytes() -> int:
        info = mallinfo2()
        return info.uordblks + info.hblkhd

    before, block = heap_bytes(), malloc(PROBE_BYTES)
    after = heap_bytes()
    free(block)
    return heap_bytes if block is None or after - before > PROBE_BYTES // 2 else None


class MeteredMemory:
    """What a running `Meter` counts: *storages*, exact at every event, on any hardware, an imagined card too."""

    def __init__(self, meter: Meter):
        self.name, self._meter, self._mark = "meter", meter, 0

    def read(self) -> dict[str, int]:
        """`storages`: bytes that tensors hold."""
        return {"storages": self._meter.held_bytes}

    def peaks(self) -> dict[str, int]:
        """The most since it was asked last."""
        mark, self._mark = self._mark, self._meter.event_count
        return {"storages": self._meter.highest_since(mark)}
