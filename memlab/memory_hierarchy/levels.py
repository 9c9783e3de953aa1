"""The levels: what memory this machine says it has, which of them a measured curve shows, and vendors' figures.

From the arithmetic outwards every level is larger and slower: registers, shared memory and L1, L2, (L3,) the memory of
the device, main memory, the disk. Hennessy and Patterson, chapter 2.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import torch

from memlab.units import KiB, MiB, format_bytes

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Level(NamedTuple):
    """One level of the memory hierarchy.

    nbytes: of one copy; copies: how many there are, such as one a multiprocessor (SM) of a GPU.
    """

    name: str
    nbytes: int
    copies: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {f'{self.copies} × ' if self.copies > 1 else ''}{format_bytes(self.nbytes)}"


class Plateau(NamedTuple):
    """A step of the staircase: a level, and the bytes a second of the working sets that it holds; None if none was."""

    name: str
    nbytes: int
    bytes_per_second: float | None


def levels(device: str | torch.device = "cpu", folder: str | Path | None = None) -> list[Level]:
    """The levels that this machine tells of, nearest first. What it does not tell is left out.

    On a CPU: the caches as one core sees them, main memory, and what is free on the disk of `folder` (None: where
    temporary files go). On CUDA, before main memory: registers and shared memory of each multiprocessor, L2, and the
    device's memory.
    """
    device = torch.device(device)
    near = _gpu(device) if device.type == "cuda" else [Level(f"L{i}", nbytes) for i, nbytes in sorted(_caches())]
    if (memory := _main_memory()) is not None:
        near.append(Level("main memory", memory))
    with contextlib.suppress(OSError):
        near.append(Level("disk", disk_usage(folder or tempfile.gettempdir()).free))
    return near


def fit_levels(curve: Iterable[tuple[int, float]], levels: Iterable[Level]) -> list[Plateau]:
    """For each level the median bandwidth of the working sets that fit it, and not the level before.

    curve: of `measure_bandwidth`; levels: nearest first. What a level holds is one copy of it: one core goes over its
    own cache, and all multiprocessors of a GPU over the same bytes. Near a capacity the answer comes from two levels:
    of the sizes that fit, those count that lie twice away from both ends, if there are any. Registers have no
    addresses to go over, and so no plateau.

    >>> curve = [(2**i, 80.0 if i < 16 else 20.0) for i in range(10, 20)]
    >>> for plateau in fit_levels(curve, [Level("L1", 2**15), Level("main memory", 2**30)]):
    ...     print(plateau.name, plateau.bytes_per_second)
    L1 80.0
    main memory 20.0
    """
    curve, found, below = list(curve), [], 0
    for level in levels:
        fitting = [(n, speed) for n, speed in curve if below < n <= level.nbytes and level.name != "registers"]
        inside = [(n, speed) for n, speed in fitting if 2 * below <= n <= level.nbytes / 2] or fitting
        speed = statistics.median(speed for _, speed in inside) if inside else None
        found.append(Plateau(level.name, level.nbytes, speed))
        below = max(below, level.nbytes) if level.name != "registers" else below
    return found


def _caches() -> list[tuple[int, int]]:
    """Level and bytes of each data cache that a core can reach; [] where the system does not tell."""
    if platform.system() == "Darwin":
        names = {1: "hw.l1dcachesize", 2: "hw.l2cachesize", 3: "hw.l3cachesize"}
        return [(level, nbytes) for level, name in names.items() if (nbytes := _sysctl(name))]
    found = []
    for index in sorted(CACHES.glob("index*")):
        with contextlib.suppress(OSError, ValueError):
            if (index / "type").read_text().strip() != "Instruction":
                size = (index / "size").read_text().strip()
                nbytes = int(size[:-1]) * {"K": KiB, "M": MiB}[size[-1]]
                found.append((int((index / "level").read_text()), nbytes))
    return found


def _sysctl(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return int(subprocess.run(["sysctl", "-n", name], capture_output=True, timeout=10, check=True).stdout)
    return None


def _main_memory() -> int | None:
    if hasattr(os, "sysconf") and {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= os.sysconf_names.keys():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _gpu(device: torch.device) -> list[Level]:
    told = torch.cuda.get_device_properties(device)
    registers = 4 * getattr(told, "regs_per_multiprocessor", 0)  # of 32 bits
    shared = getattr(told, "shared_memory_per_multiprocessor", 0)
    found = [
        Level("registers", registers, told.multi_processor_count),
        Level("shared memory and L1", shared, told.multi_processor_count),
        Level("L2", getattr(told, "L2_cache_size", 0)),
        Level("device memory", told.total_memory),
    ]
    return [level for level in found if level.nbytes]


class Published(NamedTuple):
    """What a vendor prints about a GPU: bytes, bytes a second (both directions together for links), FLOPs a second.

    flops_per_second: of FP32 without matrix units; half_flops_per_second: of 16-bit products summed in FP32, on matrix
    units, dense. nvlink is 0 without. Memory is in GB (10⁹) as printed; caches, in powers of 1024.
    """

    multiprocessors: int
    registers: int  # bytes a multiprocessor
    shared_memory: int  # bytes a multiprocessor, at most
    l2: int
    memory: int
    memory_bandwidth: float
    pcie: float
    nvlink: float
    flops_per_second: float
    half_flops_per_second: float
    source: str


PUBLISHED = {
    "T4-16GB": Published(
        *(40, 256 * KiB, 64 * KiB, 4 * MiB, 16 * 10**9, 320e9, 32e9, 0, 8.1e12, 65e12),
        "NVIDIA T4 data sheet and Turing architecture white paper",
    ),
    "V100-16GB": Published(
        *(80, 256 * KiB, 96 * KiB, 6 * MiB, 16 * 10**9, 900e9, 32e9, 300e9, 15.7e12, 125e12),
        "NVIDIA V100 (SXM2) data sheet and Volta architecture white paper",
    ),
    "RTX4090-24GB": Published(
        *(128, 256 * KiB, 100 * KiB, 72 * MiB, 24 * 10**9, 1008e9, 64e9, 0, 82.6e12, 165.2e12),
        "NVIDIA Ada GPU architecture white paper",
    ),
    "A100-40GB": Published(
        *(108, 256 * KiB, 164 * KiB, 40 * MiB, 40 * 10**9, 1555e9, 64e9, 600e9, 19.5e12, 312e12),
        "NVIDIA A100 (SXM) data sheet and Ampere architecture white paper",
    ),
    "A100-80GB": Published(
        *(108, 256 * KiB, 164 * KiB, 40 * MiB, 80 * 10**9, 2039e9, 64e9, 600e9, 19.5e12, 312e12),
        "NVIDIA A100 (SXM) data sheet and Ampere architecture white paper",
    ),
    "H100-80GB": Published(
        *(132, 256 * KiB, 228 * KiB, 50 * MiB, 80 * 10**9, 3350e9, 128e9, 900e9, 67e12, 989e12),
        "NVIDIA H100 (SXM) data sheet and Hopper architecture white paper",
    ),
    "H200-141GB": Published(
        *(132, 256 * KiB, 228 * KiB, 60 * MiB, 141 * 10**9, 4800e9, 128e9, 900e9, 67e12, 989e12),
        "NVIDIA H200 (SXM) data sheet and Hopper architecture white paper; L2 as CUDA reports it",
    ),
}
"""Published, not measured: the names are those of `memlab.memory_timeline.CARDS`."""
