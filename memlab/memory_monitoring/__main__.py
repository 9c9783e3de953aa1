"""Watch a process or the GPUs from a terminal, or read what a Monitor has logged.

    python -m memlab.memory_monitoring 12345 --budget "16 GiB"
    python -m memlab.memory_monitoring gpu --every 0.5
    python -m memlab.memory_monitoring run.jsonl

It prints a line a look until what it watches has ended, or Ctrl-C. It changes nothing in what it watches.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from memlab.memory_monitoring.driver import GPUMemory, list_gpus
from memlab.memory_monitoring.sources import Gone, ProcessMemory
from memlab.memory_monitoring.terminal import Watch, summary, table
from memlab.units import parse_bytes

WAYS = ("nvml", "nvidia-smi")
LONGEST_SECONDS = 86_400 * 365  # systems refuse to sleep for much longer


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch as the command line says. Returns the exit status: 0 at the end of what was watched, 2 for a wrong wish."""
    parser = argparse.ArgumentParser(
        prog="python -m memlab.memory_monitoring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", help="a process's id, gpu for all GPUs, or a Monitor's log to sum up")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="from look to look; 1")
    parser.add_argument("--count", type=int, metavar="N", help="end after so many looks")
    parser.add_argument("--budget", metavar="SIZE", help='what must not be reached, "16 GiB": when will it be?')
    given = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot write a letter of some line gets its number
            stream.reconfigure(errors="backslashreplace")
    try:
        for line in _lines(given):
            print(line, flush=True)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # who read this has had enough; Python would say so again when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Gone, RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _lines(given: argparse.Namespace):
    """The lines to print. Raises ValueError for a wish that cannot be granted, before anything is watched."""
    if not 0 < given.every <= LONGEST_SECONDS:
        raise ValueError(
            f"expected more than 0 seconds as --every, and at most {LONGEST_SECONDS:,}; found {given.every:g}"
        )
    if given.count is not None and given.count < 1:
        raise ValueError(f"expected at least one look as --count, found {given.count}")
    budget = None if given.budget is None else parse_bytes(given.budget)
    if budget == 0:
        raise ValueError("expected a budget above 0 bytes, found 0")
    if given.what == "gpu":
        gpus = [GPUMemory(gpu.uuid, ways=WAYS, name=f"gpu {gpu.index}") for gpu in list_gpus()]
        watches = [Watch(gpu, "driver", gpu.total_bytes, budget) for gpu in gpus]
    elif given.what.isdecimal():
        watches = [_process(int(given.what), budget)]
    elif Path(given.what).is_file():
        yield from summary(given.what, budget)
        return
    else:
        raise ValueError(f"expected a process's id (a number), gpu, or the file of a log; found {given.what!r}")
    yield from table(watches, given.every, given.count)


def _process(pid: int, budget: int | None) -> Watch:
    try:
        source = ProcessMemory(pid)
        told = source.read()
    except Gone:
        raise ValueError(f"expected a process that is running, found none with the id {pid}") from None
    except PermissionError:
        raise ValueError(f"process {pid} is not shown to you; ask as its user, or as root") from None
    if not told:
        raise ValueError("expected a system that tells of other processes (Linux, macOS), found one that does not")
    return Watch(source, "resident", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), budget)


if __name__ == "__main__":
    sys.exit(main())
