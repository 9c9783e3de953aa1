"""What machine this is, as far as the book minds: versions, cores, memory, a GPU or none, live pictures or still."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

from memlab.book.tables import Table
from memlab.units import KiB, format_bytes

NO_ANSWER = (RuntimeError, torch.cuda.DeferredCudaCallError)
"""What PyTorch raises of a broken GPU: the second, no RuntimeError, when CUDA is wanted for the first time."""


def machine() -> Table:
    """This machine in one table. Looks, and starts nothing; without a GPU it asks nothing of CUDA."""
    memory = main_memory_bytes()
    return Table(
        ["this machine", ""],
        [
            ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            ("PyTorch", f"{torch.__version__}, {_built_for()}"),
            ("CPU", f"{processor()}; PyTorch uses {torch.get_num_threads()} threads"),
            ("main memory", format_bytes(memory) if memory else "unknown"),
            ("GPU", _gpu()),
            ("pictures", _pictures()),
        ],
    )


def main_memory_bytes() -> int | None:
    """Main memory in bytes, or a container's limit where that is lower; None where the system does not tell."""
    sizes = []
    if hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file() and (limit := Path(path).read_text().strip()).isdigit():
            sizes.append(int(limit))
    return min(sizes, default=None)


def free_memory_bytes() -> int | None:
    """Main memory that a program could still take, within a container's limit; None where the system does not tell."""
    free = []
    with contextlib.suppress(OSError):
        if found := re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE):
            free.append(int(found[1]) * KiB)
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = Path("/sys/fs/cgroup")
        with contextlib.suppress(OSError, ValueError):  # "max", which is no number, is no limit
            taken = int((group / used).read_text())
            counts = dict(line.split() for line in (group / limit).with_name("memory.stat").read_text().splitlines())
            free.append(int((group / limit).read_text()) - taken + int(counts.get(cached, 0)))
    return max(0, min(free)) if free else None


def gpu_memory() -> list[tuple[str, int, int]]:
    """Each GPU's name, free and total bytes, as the driver tells; [] without a GPU. Makes a CUDA context.

    Free is -1 where a GPU does not answer, because it is full, or lent to one process only; one that is broken tells
    not even its total, which is 0 then.
    """
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        name, free, total = "a GPU that does not answer", -1, 0
        with contextlib.suppress(*NO_ANSWER):
            properties = torch.cuda.get_device_properties(index)
            name, total = properties.name, properties.total_memory
            free, total = torch.cuda.mem_get_info(index)
        found.append((name, free, total))
    return found


def device() -> tuple[str, bool]:
    """The name of the GPU at hand and True, or "CPU" and False.

    The name is asked for in a process of its own: this one lives as long as the recording, and would hold a CUDA
    context, some hundred MiB of the very card that is measured.

    Raises ValueError if the GPU does not answer.
    """
    if not torch.cuda.is_available():
        return "CPU", False
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise ValueError(f"the GPU does not tell its name ({why}); python -m memlab may say what is wrong")
    return asked.stdout.strip(), True


def version(package: str) -> str | None:
    """The version of a package that is installed, or None. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str:
    """The version of the NVIDIA driver, "" where there is none. Looks into its file first, and asks nvidia-smi last."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text()):
            return found[0]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def processor() -> str:
    """The CPU's name and the cores this process may use, such as "AMD EPYC, 2 cores"; "a CPU" where nobody tells it."""
    name = platform.processor()
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            name = found[1].strip()
    return f"{name or 'a CPU'}, {_cores()} cores"


def _cores() -> int:
    """The cores this process may use: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _built_for() -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none: every chapter runs without one"
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(index)
            found.append(f"{properties.name}, {format_bytes(properties.total_memory)}")
        except NO_ANSWER:
            found.append("a GPU that does not answer")
    return ", ".join(found)


def _pictures() -> str:
    versions = {name: version(name) for name in ("ipywidgets", "anywidget")}
    for name, found in versions.items():
        if found is None:
            return f"still: {name} is not installed (pip install -e '.[lab]' makes them live)"
    return f"live: {', '.join(f'{name} {found}' for name, found in versions.items())}"
