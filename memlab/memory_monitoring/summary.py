"""What a log tells: of each Monitor's run its steps, peak, growth and alarms, and when its budget would be full."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from memlab.memory_monitoring.forecasts import forecast
from memlab.memory_monitoring.log import read_log
from memlab.memory_monitoring.steps import StepHistory
from memlab.units import format_bytes


def summary(path: str | Path, budget_bytes: int | None = None) -> Iterator[str]:
    """Lines about every run in the log at `path`, in order. budget_bytes: in place of the run's own.

    Raises ValueError for a file in which nothing was logged, OSError for one that cannot be read.
    """
    runs = _runs(path)
    if not runs:
        raise ValueError(f"expected a log of a Monitor, found none of its lines in {path}")
    for number, run in enumerate(runs):
        if number:
            yield ""
        yield from _about(run, budget_bytes)


class _Run:
    """What one run has left in a log."""

    def __init__(self, title: str, budget_bytes: int | None):
        self.title, self.budget_bytes = title, budget_bytes
        self.steps = 0
        self.history = StepHistory()  # since the run began, or was changed
        self.first: int | None = None  # bytes at the first and the last known end
        self.last = 0
        self.highest = 0, 0  # bytes, and the step's number
        self.alarms: list[str] = []
        self.lost = 0
        self.ended: str | None = None


def _runs(path: str | Path) -> list[_Run]:
    """The runs in a log in the order of their starts. Lines that are not as a Monitor writes them are left out."""
    runs: list[_Run] = []
    owners: dict[object, _Run] = {}
    for line in read_log(path):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if line["kind"] == "start":
                title = f"process {line['pid']}" + (f", {line['watch']}" if "watch" in line else "")
                budget = None if line["budget"] is None else max(1, _whole(line["budget"]))
                owners[line.get("run")] = _Run(title, budget)
                runs.append(owners[line.get("run")])
            elif line.get("run") in owners:
                _note(owners[line.get("run")], line)
    return runs


def _whole(found: object) -> int:
    if type(found) is not int or not 0 <= found < 2**63:
        raise ValueError(f"expected a whole number, found {found!r}")
    return found


def _note(run: _Run, line: dict) -> None:
    kind = line["kind"]
    if kind == "step":
        number, end, peak = _whole(line["step"]), line["end"], line["peak"]
        if end is None or peak is None:  # a metered step has no peak
            run.history.skip()
        else:
            run.history.append(_whole(end), _whole(peak))
            run.first, run.last = end if run.first is None else run.first, end
            run.highest = max(run.highest, (peak, number), key=lambda one: one[0])
        run.steps += 1
    elif kind == "alarm":
        run.alarms.append(f"step {line['step']}, {line['about']}: {line['message']}")
    elif kind == "changed":
        run.history = StepHistory()
    elif kind == "end":
        run.lost = _whole(line["lost"])
        run.ended = "ended" if line["error"] is None else f"ended by {line['error']}"


def _about(run: _Run, budget_bytes: int | None) -> Iterator[str]:
    budget = budget_bytes or run.budget_bytes
    ended = run.ended or "and no end in the log: it still runs, or was killed"
    yield f"{run.title}: {run.steps:,} step{'s' * (run.steps != 1)}, {ended}"
    yield from (f"  alarm at {alarm}" for alarm in run.alarms)
    if run.lost:
        yield f"  lost     {run.lost:,} lines, when the log could not be written"
    if run.first is None:
        return
    nbytes, number = run.highest
    of = f" of {format_bytes(budget)}" if budget else ""
    yield f"  highest  {format_bytes(nbytes)}{of}, at step {number:,}"
    yield f"  held     {format_bytes(run.first)} after the first step, {format_bytes(run.last)} after the last"
    said = forecast(run.history, budget or 2**63)
    rate = f"{format_bytes(round(said.growth.bytes_per_step))} a step"
    yield f"  growth   {rate if said.growth.grows else 'none that lasts'}"
    if not budget:
        yield '  full     no budget is known; give one: --budget "16 GiB"'
    else:
        likely, early, late = (
            "never" if steps == math.inf else f"{steps:,.0f}" for steps in (said.steps_left, said.earliest, said.latest)
        )
        yield f"  full     after {likely} more steps ({early} to {late})" if likely != "never" else "  full     never"
