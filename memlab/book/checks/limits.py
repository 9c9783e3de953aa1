"""Limits of time and memory for code that nobody has read yet: a check's own, and a whole kernel's.

A limit of memory is one of *data* (Linux's RLIMIT_DATA: heap and private mappings, all threads together), because what
a process merely reserves, as CUDA does by the hundred GiB, is no harm. macOS and Windows do not enforce it, and
Windows knows no alarm either: there, code is checked without these limits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from memlab.units import GiB

try:
    import resource
except ImportError:  # Windows
    resource = None

CHECK_SECONDS = 10
CHECK_BYTES = 1 * GiB
KERNEL_BYTES = 4 * GiB
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
}
"""How torch is to start where it grades: on the CPU, also where there is a GPU, with one thread, and silent."""
_STATUS = Path("/proc/self/status")


class TooLong(BaseException):
    """Code was still running when its time was over. Not an Exception, so that `except Exception` does not stop it."""


@contextlib.contextmanager
def limited(seconds: float, nbytes: int) -> Iterator[None]:
    """Stop the block with TooLong after `seconds`, and let it take `nbytes` more than the process holds now.

    The request that goes beyond raises MemoryError (in torch, RuntimeError). What stood before is put back afterwards.
    """
    with _memory(nbytes), _time(seconds):
        yield


def guard(nbytes: int = KERNEL_BYTES) -> None:
    """Limit this whole process, for good, to `nbytes` beyond what it holds now; and let no code in a cell end it.

    nbgrader's configuration has every kernel call this before it runs a submission. `os._exit`, `os.abort` and
    IPython's own `exit` and `quit` raise SystemExit in the main thread instead, so that the cells after them are still
    graded. Torch, if not imported yet, will start as SETTINGS say: small tensors gain nothing by more threads, and
    where cores are shared, threads wait for each other. What it tells of itself on stderr would cost points.
    """
    os.environ.update(SETTINGS)
    if (held := _held()) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, held + nbytes))
    for name in ("_exit", "abort"):
        setattr(os, name, _raises_in_a_cell(getattr(os, name), f"os.{name}"))
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        shell.ask_exit = _raises_in_a_cell(shell.ask_exit, "exit")


def _raises_in_a_cell(ends, name: str):
    def instead(*status):
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(f"{name}() would have ended the kernel, and the grading with it")
        ends(*status)

    return instead


def _held() -> int | None:
    """Bytes of data this process holds now; None where the system has no such limit."""
    if resource is None or not _STATUS.is_file():
        return None
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def _memory(nbytes: int) -> Iterator[None]:
    if (held := _held()) is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lowest = min(limit for limit in (held + nbytes, soft, hard, sys.maxsize) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def _time(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        raise TooLong(f"still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)  # and again, should the first one be caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
