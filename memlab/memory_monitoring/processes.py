"""What the system tells about another process, and about all that it has started.

Linux has a folder for each in /proc: `status` with the resident pages (RSS), their high-water mark and what is swapped
out, readable by all; `smaps_rollup` with PSS, in which a page that n processes share counts a nth for each, readable by
the same user. RSS counts such a page in each, so the sum over DataLoader workers, forked from one parent, is more than
they take; the sum of PSS is what they take. macOS tells the RSS of `ps`, and nothing else. Source: proc(5).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from memlab.memory_monitoring.gpu import GPUMemory
from memlab.memory_monitoring.sources import Gone
from memlab.units import KiB

FIELDS = {"VmRSS": "resident", "VmHWM": "peak", "VmSwap": "swap"}
PROC = Path("/proc")
KERNEL_THREAD = 0x0020_0000  # PF_KTHREAD among the flags in `stat`


class OtherProcess:
    """A process by its id: `read()` gives `resident`, on Linux also `peak` (the most ever resident) and `swap`; bytes.

    children: the process and all its descendants together; then `peak` is left out, since theirs were not at one time,
    and where the system allows, `proportional` (PSS) is there too.

    Raises Gone for a process that is not there, PermissionError where the system hides it, and RuntimeError on a system
    that tells nothing of other processes, or for a kernel's thread, which has no memory of its own.
    """

    def __init__(self, pid: int, children: bool = False):
        self.pid, self.children, self.name = pid, children, f"process {pid}"
        if sys.platform == "win32":
            raise RuntimeError(
                "Windows tells of other processes by an interface that memlab does not have; see Task Manager"
            )
        self._linux = PROC.joinpath("self/stat").exists()
        self._born = self._stat(pid)[1] if self._linux else None
        self.read()

    def read(self) -> dict[str, int]:
        """Bytes now. Raises Gone when the process has ended, also where another has its id by now."""
        if not self._linux:
            return self._by_ps()
        if self._stat(self.pid)[1] != self._born:
            raise Gone(f"process {self.pid} has ended; another has its number")
        figures = self._status(self.pid)
        if self.children:
            self._add_descendants(figures)
        return figures

    def descendants(self) -> list[int]:
        """The ids of all processes below this one, as far as the system shows them. Linux only."""
        parents = {}
        for folder in PROC.iterdir():
            if folder.name.isdigit():
                try:
                    parents[int(folder.name)] = self._stat(int(folder.name))[0]
                except (Gone, PermissionError):
                    continue
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid and child not in found]
        return found[1:]

    def _add_descendants(self, figures: dict[str, int]) -> None:
        pids = [self.pid]
        figures.pop("peak", None)
        for pid in self.descendants():
            try:
                theirs = self._status(pid)
            except (Gone, PermissionError, RuntimeError):
                continue
            pids.append(pid)
            for name in figures:
                figures[name] += theirs.get(name, 0)
        shares = [_pss(pid) for pid in pids]
        if shares[0] is not None:
            figures["proportional"] = sum(share or 0 for share in shares)
        figures["processes"] = len(pids)

    def _stat(self, pid: int) -> tuple[int, int]:
        """A process's parent, and when it was born, in the system's ticks."""
        fields = self._fields(pid)
        if fields[0] in "ZX":
            raise Gone(f"process {pid} has ended")
        return int(fields[1]), int(fields[19])

    def _kernels_own(self, pid: int) -> bool:
        return bool(int(self._fields(pid)[6]) & KERNEL_THREAD)

    def _fields(self, pid: int) -> list[str]:
        """What `stat` has after the process's name, which may have blanks and brackets in it."""
        text = self._text(pid, "stat")
        return text[text.rindex(")") + 2 :].split()

    def _status(self, pid: int) -> dict[str, int]:
        figures = {}
        for line in self._text(pid, "status").splitlines():
            name, _, rest = line.partition(":")
            if name in FIELDS:
                figures[FIELDS[name]] = int(rest.split()[0]) * KiB
        if "resident" not in figures:
            if self._kernels_own(pid):
                raise RuntimeError(f"process {pid} is one of the kernel's, which have no memory of their own")
            raise Gone(f"process {pid} has ended")  # it has given its memory back, and is about to go
        return {name: figures[name] for name in FIELDS.values() if name in figures}

    def _text(self, pid: int, name: str) -> str:
        try:
            return (PROC / str(pid) / name).read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            raise Gone(f"process {pid} has ended") from None

    def _by_ps(self) -> dict[str, int]:
        done = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,rss="], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        rows = {int(row[0]): row for row in map(str.split, done.stdout.splitlines()) if len(row) == 3}
        if self.pid not in rows:
            raise Gone(f"process {self.pid} has ended")
        pids = [self.pid]
        for pid in pids if self.children else ():
            pids += [child for child, row in rows.items() if int(row[1]) == pid and child not in pids]
        figures = {"resident": sum(int(rows[pid][2]) for pid in pids) * KiB}
        return figures | ({"processes": len(pids)} if self.children else {})


class ProcessAndGPUs:
    """A process, and beside its figures its bytes on each GPU ("on gpu 0"), where the driver tells them."""

    def __init__(self, process: OtherProcess, gpus: Sequence[GPUMemory]):
        self.name, self._process, self._gpus = process.name, process, list(gpus)

    def read(self) -> dict[str, int]:
        """Bytes now. Raises Gone when the process has ended; a GPU that is gone is left out from there on."""
        figures = self._process.read()
        for gpu in list(self._gpus):
            try:
                share = gpu.read().get("driver_process")
            except Gone:
                self._gpus.remove(gpu)
                continue
            if share is not None:
                figures[f"on {gpu.name}"] = share
        return figures


def _pss(pid: int) -> int | None:
    """A process's proportional share, in bytes; None where it is not told."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * KiB for line in text.splitlines() if line.startswith("Pss:")), None)
