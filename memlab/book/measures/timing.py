"""What all measures share: runs that take turns in one process, and the spread of their times."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch


def seconds(run: Callable[[], object]) -> float:
    """How long one call takes, in seconds; on CUDA until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, all of them once a round, so that they share the machine's good and bad moments.

    In another order each round, since a run finds the caches as the one before it left them; in all processes the same.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for name in order:
        runs[name]()
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(seconds(runs[name]))
    return times


def printed_by(code: str) -> str:
    """What some code prints in a process of its own. Raises RuntimeError with that process's last line if it fails."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise RuntimeError(f"a process of its own ended with status {run.returncode}: {last}")
    return run.stdout


def spread(values: list[float], form: str = "{:.2f}") -> str:
    """min – median – max."""
    return " – ".join(form.format(value) for value in (min(values), statistics.median(values), max(values)))


def compared(times: dict[str, list[float]], ours: str, theirs: str) -> str:
    """How long ours took as a multiple of theirs, round by round, and the fastest of each."""
    ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    return f"{spread(ratios)}× (fastest / fastest {min(times[ours]) / min(times[theirs]):.2f}×)"


def trainer(model, batch, **options):
    """A model with AdamW and a function that does one training step."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step():
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
