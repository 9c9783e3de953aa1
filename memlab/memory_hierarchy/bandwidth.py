"""Bandwidth: how many bytes a second memory gives, by the size of what is worked on.

A program that goes over the same few bytes again and again is answered by the level nearest to the arithmetic that
holds them all. Let the *working set* grow, and the answer comes from one level further down each time a capacity is
passed: plotted, a staircase. Drepper 2007, section 3.3, measures caches so; McCalpin 1995 (STREAM) main memory.

What is counted are the bytes that the program asks for:

- "read" sums the working set, again and again in one call: each byte of it is read once a pass. The sum itself takes
  time: a level that gives more than the adders take, such as L1, shows as fast as the adders. (A GPU runs the passes of
  one call side by side, and a byte that comes from its memory once would serve several. So there a working set larger
  than any L2 takes a call a pass.)
- "copy" copies one half of the working set onto the other. A copy of n bytes moves 2n, as it reads n and writes n, and
  so each byte of the working set is moved once a pass. Small copies show the time that a call takes, about 1 µs on a
  CPU and 5 µs on a GPU, and not the memory's. (Many CPUs read a line before they write it, which is not counted.)

The best of many passes counts: whatever else the machine does only ever takes time away.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import torch

from memlab.checking import one_of
from memlab.units import GiB, KiB, MiB, format_bytes, parse_bytes

SMALLEST, LARGEST = 4 * KiB, {"cpu": 256 * MiB, "cuda": GiB}
PASS_BYTES = {"cpu": 16 * MiB, "cuda": GiB}  # in one measurement, so that it is long beside the clock's own time
CHUNK = 4 * MiB
BEYOND_L2 = 64 * MiB  # on CUDA: from here on a call a pass


def measure_bandwidth(
    sizes: Sequence[int | str] | None = None,
    device: str | torch.device = "cpu",
    *,
    kind: str = "read",
    threads: int = 1,
    seconds: float = 6.0,
) -> list[tuple[int, float]]:
    """Bytes a second for each size of the working set: (nbytes, bytes_per_second), in the order of `sizes`.

    sizes: bytes, or text such as "4 KiB"; rounded down to a multiple of 8. None: powers of two from 4 KiB to 256 MiB
      (to 1 GiB on CUDA). kind: "read" or "copy". threads: PyTorch's, on a CPU; what they were is restored.
    seconds: passes over all sizes are repeated for about so long, each size once a pass so that a disturbance does
      not hit one size only; the first pass is always finished.

    Raises ValueError for another kind or device, and for sizes below 64 bytes; TypeError for one size without a list;
    RuntimeError for CUDA without a GPU.
    """
    device = torch.device(device)
    one_of("kind", kind, ("read", "copy"))
    one_of("device", device.type, ("cpu", "cuda"))
    if sizes is None:
        sizes = [2**i for i in range(SMALLEST.bit_length() - 1, LARGEST[device.type].bit_length())]
    sizes = _in_bytes(sizes)
    if min(sizes, default=0) < 64:
        raise ValueError(f"expected sizes of at least 64 bytes, found {min(sizes, default='none')}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("expected a GPU to measure, found none; device='cpu' measures this machine's main memory")
    sizes = [size // 8 * 8 for size in sizes]
    store, best = torch.ones(max(sizes) // 4, device=device), dict.fromkeys(sizes, 0.0)
    with _threads(threads):
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or not all(best.values()):
            for size in sizes:
                run, moved = _passes(kind, store, size, PASS_BYTES[device.type])
                best[size] = max(best[size], moved / best_seconds(run, device, repeats=1))
    return [(size, best[size]) for size in sizes]


def _in_bytes(sizes: Sequence[int | str]) -> list[int]:
    if isinstance(sizes, (int, str)):
        raise TypeError(f"expected sizes in a list, found {sizes!r}; [{sizes!r}] is a list of one")
    return [parse_bytes(size) for size in sizes]


def _passes(kind: str, store: torch.Tensor, size: int, pass_bytes: int) -> tuple[Callable, int]:
    """What goes over `size` bytes so often that about `pass_bytes` are moved, and how many those are."""
    times, working_set = max(1, pass_bytes // size), store[: size // 4]
    if kind == "read" and store.is_cuda and size >= BEYOND_L2:

        def sums() -> None:
            for _ in range(times):
                working_set.sum()

        return sums, times * size
    if kind == "read":  # an expanded tensor has the same bytes in every row
        rows = working_set.expand(times, -1)
        return lambda: rows.sum(-1), times * size
    source, target = working_set.chunk(2)

    def copies() -> None:
        for _ in range(times):
            target.copy_(source)

    return copies, times * size


def best_seconds(run: Callable[[], object], device: str | torch.device = "cpu", *, repeats: int = 5) -> float:
    """The least seconds of `repeats` runs after a first that does not count: by events on CUDA, else by the clock."""
    device, found = torch.device(device), []
    run()
    for _ in range(repeats):
        if device.type == "cuda":
            with torch.cuda.device(device):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                end.synchronize()
            found.append(start.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    return max(min(found), 1e-9)


def transfer_bandwidth(
    sizes: Sequence[int | str] | None = None, device: str | torch.device = "cuda"
) -> dict[str, list[tuple[int, float]]]:
    """Bytes a second between main memory and a GPU, by size: for each way a curve as of `measure_bandwidth`.

    The ways are "to the GPU, pinned", "to the GPU, pageable", "from the GPU, pinned", "from the GPU, pageable". Each
    byte counts once. Pageable memory is copied by the driver through a pinned buffer of its own, and so takes longer.
    sizes: None is powers of four from 64 KiB to 256 MiB. Raises RuntimeError without CUDA, TypeError for one size
    without a list.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise RuntimeError("expected a GPU to copy to, found none; measure_bandwidth() measures this machine's memory")
    sizes = _in_bytes(sizes or [64 * KiB * 4**i for i in range(7)])
    there = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    curves: dict[str, list[tuple[int, float]]] = {}
    for pinned in (True, False):
        here = torch.ones(max(sizes), dtype=torch.uint8, pin_memory=pinned)
        for way, target, source in (("to", there, here), ("from", here, there)):
            curve = curves[f"{way} the GPU, {'pinned' if pinned else 'pageable'}"] = []
            for size in sizes:
                copy = lambda size=size, a=target, b=source: a[:size].copy_(b[:size], non_blocking=True)  # noqa: E731
                curve.append((size, size / best_seconds(copy, device)))
    return curves


class DiskBandwidth(NamedTuple):
    """Bytes a second of one file. `again` reads it a second time, when the system may still have it in main memory.

    from_disk: the share of the first reading that the disk itself answered, by the system's own count. Near 0 the page
    cache answered, and `read` is main memory's speed. None where the system does not tell (it does on Linux).
    """

    write: float
    read: float
    again: float
    from_disk: float | None


def disk_bandwidth(folder: str | Path | None = None, nbytes: int | str = 64 * MiB) -> DiskBandwidth:
    """Write a file of `nbytes` in `folder` (None: the system's for temporary files), read it twice, and remove it.

    Written is what does not compress, until the disk says that it has it (fsync). Before it is read, the system is
    asked to forget it, where one can ask (posix_fadvise); it need not obey.

    Raises NotADirectoryError without the folder; ValueError for a size below 1 byte or with less than that free.
    """
    folder, nbytes = Path(folder or tempfile.gettempdir()), parse_bytes(nbytes)
    if not folder.is_dir():
        raise NotADirectoryError(f"expected a folder to write a file in, found {str(folder)!r}")
    free = disk_usage(folder).free
    if not 1 <= nbytes <= free:
        raise ValueError(f"expected a size from 1 byte to the {format_bytes(free)} that are free, found {nbytes:,} B")
    chunk, place = os.urandom(min(CHUNK, nbytes)), bytearray(CHUNK)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def write() -> None:
            for start in range(0, nbytes, CHUNK):
                file.write(chunk[: nbytes - start])
            os.fsync(file.fileno())

        def read() -> None:
            file.seek(0)
            while file.readinto(place):
                pass

        write_seconds = _seconds(write)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = _bytes_from_disk()
        read_seconds = _seconds(read)
        share = None if before is None else min(1.0, (_bytes_from_disk() - before) / nbytes)
        return DiskBandwidth(nbytes / write_seconds, nbytes / read_seconds, nbytes / _seconds(read), share)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return max(time.perf_counter() - start, 1e-9)


def _bytes_from_disk() -> int | None:
    """Bytes that disks have fetched for this process so far; None where the system does not tell."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["read_bytes"])
    return None


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
