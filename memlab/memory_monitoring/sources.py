"""Where figures come from: the process's own memory, PyTorch's allocator on a GPU, the driver, a meter.

A source is looked at from outside; it makes nothing and changes nothing but, if asked, a high-water mark. Its figures
are named by their level: *storages* (what tensors hold), *heap* and *allocated* (blocks in use, of malloc and of
PyTorch's allocator), *reserved* (segments), *resident* and *driver* (pages and bytes that the system has handed out).
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Protocol

import torch

from memlab.memory_timeline import Meter
from memlab.units import KiB


class Gone(Exception):
    """What was watched is no longer there: a process that ended, a GPU that fell off the bus."""


class Source(Protocol):
    """What `Monitor` asks of a source. `name` tells two sources apart ("process", "cuda:0", "gpu 0")."""

    name: str

    def read(self) -> dict[str, int]:
        """Bytes now, by level. Raises Gone when there is nothing left to look at."""

    def peaks(self) -> dict[str, int]:
        """The most bytes since the last `reset`, by level, for those levels that something else keeps track of."""

    def reset(self) -> None:
        """Let the peaks begin again at the present figures."""


class ProcessMemory:
    """A process's main memory: *resident* pages (RSS), and *heap*, what malloc has handed out, where glibc tells.

    pid: the process; None for this one. The heap's figure is this process's only. On Linux the system keeps a
    high-water mark of the resident pages, which a process may set back for itself: so each step has a peak that no
    sampling misses.
    """

    def __init__(self, pid: int | None = None):
        self.pid = os.getpid() if pid is None else pid
        self.name = "process" if pid is None else f"process {pid}"
        self._heap = _heap() if pid is None else None
        self.read()

    def read(self) -> dict[str, int]:
        """`resident` and, for this process under glibc, `heap`. Raises Gone when the process has ended."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            raise Gone(f"process {self.pid} has ended") from None
        figures = {"resident": pages * os.sysconf("SC_PAGE_SIZE")}
        if self._heap is not None:
            figures["heap"] = self._heap()
        return figures

    def peaks(self) -> dict[str, int]:
        """`resident`: the system's high-water mark (VmHWM)."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            raise Gone(f"process {self.pid} has ended") from None
        _, found, rest = status.partition(b"VmHWM:")
        return {"resident": int(rest.split()[0]) * KiB} if found else {}

    def reset(self) -> None:
        """Set this process's high-water mark back (proc(5), /proc/pid/clear_refs)."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


@functools.cache
def _heap():
    """A function that returns the bytes malloc has handed out (mallinfo2(3)), or None where there is none."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo2.restype = _MallInfo2

    def heap_bytes() -> int:
        info = mallinfo2()
        return info.uordblks + info.hblkhd

    return heap_bytes


class CUDAMemory:
    """PyTorch's allocator on one GPU: *allocated* and *reserved*, and their peaks, which it keeps itself."""

    LEVELS = ("allocated", "reserved")

    def __init__(self, device: int | str | torch.device | None = None):
        self.device = torch.device("cuda" if device is None else device)
        self.name = str(self.device)

    def read(self) -> dict[str, int]:
        """`allocated` and `reserved`, in bytes."""
        return self._figures("current")

    def peaks(self) -> dict[str, int]:
        """The same since the last reset, whoever set them back."""
        return self._figures("peak")

    def reset(self) -> None:
        """Set CUDA's peak counters back."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def _figures(self, which: str) -> dict[str, int]:
        statistics = torch.cuda.memory_stats_as_nested_dict(self.device)
        return {level: statistics[f"{level}_bytes"]["all"][which] for level in self.LEVELS}


class MeteredMemory:
    """What a running `Meter` counts: *storages*, exact at every event, on any hardware, an imagined card too."""

    def __init__(self, meter: Meter):
        self.name, self._meter, self._mark = "meter", meter, 0

    def read(self) -> dict[str, int]:
        """`storages`: bytes that tensors hold."""
        return {"storages": self._meter.held_bytes}

    def peaks(self) -> dict[str, int]:
        """The most since the last reset."""
        return {"storages": self._meter.highest_since(self._mark)}

    def reset(self) -> None:
        """Peaks begin again here."""
        self._mark = self._meter.event_count
