"""How good the library is, in figures: `python -m memlab.benchmark`.

Every time here is a ratio, or comes with one: the runs that are compared take turns in one process, and min, median and
max of the rounds are printed. Bytes are exact. `--quick` runs one round, to see that everything works.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch

from memlab.book.measures import MEASURES
from memlab.book.tables import Table

ROUNDS, QUICK = 25, 1


def measured(
    device: str, rounds: int, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[tuple[str, str, str]]:
    """Every measure on a device, "cpu" or "cuda", in one thread: its name, its figure, and what it must reach.

    `progress` is told how many of how many parts have ended.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's notes of itself
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for done, measure in enumerate(MEASURES):
            progress(done, len(MEASURES))
            rows += measure(device, rounds)
    finally:
        torch.set_num_threads(threads)
    return rows


def main() -> None:
    """Print every measure with its figure and what it must reach."""
    parser = argparse.ArgumentParser(prog="python -m memlab.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round: to see that it works, not to quote")
    rounds = QUICK if parser.parse_args().quick else ROUNDS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print(f"torch {torch.__version__}, {name}, {rounds} rounds; min – median – max\n")
    print(Table(["measure", "figure", "must reach"], measured(device, rounds)))


if __name__ == "__main__":
    main()
