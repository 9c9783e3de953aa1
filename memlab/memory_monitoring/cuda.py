"""PyTorch's allocator on a GPU, and its peak counters, which the program may go on to use.

`torch.cuda.max_memory_allocated` and its like end in one function that reads the counters and one that sets them back.
While a monitor reads them, both go through here: what the program reads is the most since the program itself set them
back, and when it does so, the monitors are told before. (A `Meter` on CUDA sets them back too; it is the program, as
everybody is who does not join the mark.) With the last monitor the functions are PyTorch's own again; from then on the
program's peak is counted from where that monitor set it back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from memlab.memory_monitoring.high_water import HighWater, Reader, join_mark

LEVELS = ("allocated", "reserved")
FUNCTIONS = (
    ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats"),  # torch.cuda's
    ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),  # torch.accelerator's, of the same counters
)


class CUDAMemory:
    """PyTorch's allocator on one GPU: *allocated* and *reserved*, and their peaks, which it keeps itself.

    device: None for the device that is current in the thread in which this is made, or, where the program does not use
    CUDA yet, in the one that asked for peaks last. It is never the first to use CUDA: until the program has, all
    figures are 0; what it did first is then in the peaks.
    """

    def __init__(self, device: int | str | torch.device | None = None):
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        self.name = str(self.device)
        self._thread, self._waited = threading.get_ident(), False
        self._mark: CUDAHighWater | None = None
        self._reader: Reader | None = None

    def read(self) -> dict[str, int]:
        """`allocated` and `reserved`, in bytes."""
        return self._mark.read() if self._join() else dict.fromkeys(LEVELS, 0)

    def peaks(self) -> dict[str, int]:
        """The same at their highest since it was asked last, whoever set PyTorch's counters back."""
        self._thread = threading.get_ident()
        return self._mark.take(self._reader) if self._join() else dict.fromkeys(LEVELS, 0)

    def close(self) -> None:
        """Give PyTorch's counters back to the program."""
        if self._mark is not None:
            self._leave()
            self._mark = self._reader = None

    def _join(self) -> bool:
        if self._mark is not None:
            return True
        if not torch.cuda.is_initialized():
            self._waited = True
            return False
        if self.device.index is None:
            if threading.get_ident() != self._thread:  # each thread has a current device of its own
                return False
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.name = str(self.device)
        index = self.device.index
        mark, self._reader, self._leave = join_mark(self.name, lambda: CUDAHighWater(index), self)
        if self._waited:
            mark.alone(lambda: self._reader.heard.update(mark.for_newcomers()))
        self._mark = mark
        return True


class CUDAHighWater(HighWater):
    """One GPU's peak counters, of which the program is a reader too."""

    def __init__(self, index: int):
        super().__init__(self._peaks, self._begin_again)
        self.index = index
        self.program: dict[tuple[str, str], int] = {}  # peaks since the program set them back, by statistic and pool
        self._seen: dict = {}

    def read(self) -> dict[str, int]:
        """The present figures, in bytes."""
        return _figures(_redirect.statistics(self.index), "current")

    def join(self, reader: Reader) -> None:
        """A reader more; with the first of all GPUs, PyTorch's functions go through here."""
        _redirect.add(self)
        super().join(reader)

    def leave(self, reader: Reader) -> bool:
        """One reader less; with the last of all GPUs, PyTorch's functions are its own again."""
        last = super().leave(reader)
        if last:
            _redirect.remove(self)
        return last

    def _peaks(self) -> dict[str, int]:
        self._seen = _redirect.statistics(self.index)
        return _figures(self._seen, "peak")

    def _begin_again(self) -> None:
        for key, entry in _entries(self._seen):
            self.program[key] = max(entry["peak"], self.program.get(key, 0))
        _redirect.set_back(self.index)

    def for_newcomers(self) -> dict[str, int]:
        """The peaks since the program began, for one who has waited for its first use of CUDA."""
        return {level: self.program.get((f"{level}_bytes", "all"), 0) for level in LEVELS}

    def for_the_program(self, statistics: dict) -> dict:
        """PyTorch's statistics, with the peaks since the program set them back."""
        for key, entry in _entries(statistics):
            entry["peak"] = max(entry["peak"], self.program.get(key, 0))
        return statistics


class _Redirect:
    """PyTorch's own functions, and ours in their place while there are marks. One, since PyTorch's are."""

    def __init__(self):
        self.marks: dict[int, CUDAHighWater] = {}
        self._patched: list[tuple] = []

    def statistics(self, index: int) -> dict:
        return self._patched[0][2](index)

    def set_back(self, index: int) -> None:
        self._patched[1][2](index)

    def add(self, mark: CUDAHighWater) -> None:
        self.marks[mark.index] = mark
        if not self._patched:
            for read, set_back in FUNCTIONS:
                if hasattr(torch._C, read):
                    self._patch(read, set_back)

    def remove(self, mark: CUDAHighWater) -> None:
        self.marks.pop(mark.index, None)
        while self._patched and not self.marks:
            name, ours, theirs = self._patched.pop()
            if getattr(torch._C, name) is ours:
                setattr(torch._C, name, theirs)

    def _patch(self, read: str, set_back: str) -> None:
        their_read, their_set_back = getattr(torch._C, read), getattr(torch._C, set_back)

        def statistics(index):
            mark = self.marks.get(index)
            return their_read(index) if mark is None else mark.alone(lambda: mark.for_the_program(their_read(index)))

        def begin_again(index):
            mark = self.marks.get(index)
            if mark is None:
                return their_set_back(index)

            def tell_first():
                mark.tell()
                mark.program.clear()
                their_set_back(index)

            return mark.alone(tell_first)

        for name, ours, theirs in ((read, statistics, their_read), (set_back, begin_again, their_set_back)):
            self._patched.append((name, ours, theirs))
            setattr(torch._C, name, ours)


_redirect = _Redirect()


def _figures(statistics: dict, which: str) -> dict[str, int]:
    return {level: statistics[f"{level}_bytes"]["all"][which] for level in LEVELS}


def _entries(statistics: dict) -> Iterator[tuple[tuple[str, str], dict]]:
    """((statistic, pool), its figures) for all that have a peak."""
    for statistic, pools in statistics.items():
        if isinstance(pools, dict):
            for pool, entry in pools.items():
                if isinstance(entry, dict) and "peak" in entry:
                    yield (statistic, pool), entry
