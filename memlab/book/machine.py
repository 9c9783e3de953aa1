"""What machine this is, as far as the book minds: versions, cores, memory, a GPU or none, live pictures or still."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from memlab.book.tables import Table
from memlab.units import format_bytes


def machine() -> Table:
    """This machine in one table. Looks, and starts nothing; without a GPU it asks nothing of CUDA."""
    memory = main_memory_bytes()
    return Table(
        ["this machine", ""],
        [
            ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            ("PyTorch", f"{torch.__version__}, {_built_for()}"),
            ("CPU", f"{_cores()} cores; PyTorch uses {torch.get_num_threads()} threads"),
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


def _cores() -> int:
    """The cores this process may use: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _built_for() -> str:
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none: every chapter runs without one"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name}, {format_bytes(device.total_memory)}" for device in devices)


def _pictures() -> str:
    try:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("ipywidgets", "anywidget")]
    except importlib.metadata.PackageNotFoundError as missing:
        return f"still: {missing.name} is not installed (pip install -e '.[lab]' makes them live)"
    return f"live: {', '.join(versions)}"
