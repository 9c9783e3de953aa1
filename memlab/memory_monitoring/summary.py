"""What a log tells: of each Monitor's run its steps, peak, growth and alarms, and when its leak could be called."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from memlab.memory_monitoring.forecasts import Forecast, forecast
from memlab.memory_monitoring.leaks import growth
from memlab.memory_monitoring.log import read_log
from memlab.memory_monitoring.steps import StepHistory
from memlab.units import format_bytes

JUDGEMENTS = 500


def summary(path: str | Path, budget_bytes: int | None = None) -> Iterator[str]:
    """Lines about every run in the log at `path`, a Monitor's or a terminal's. budget_bytes: in place of the run's own.

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
    """What one run has left in a log. unit: what its figures are from, a "step" or a "look"."""

    def __init__(self, title: str, unit: str, budget_bytes: int | None = None):
        self.title, self.unit, self.budget_bytes = title, unit, budget_bytes
        self.steps: list[tuple[int, int | None, int]] = []  # its number; bytes at its end, None: unknown; at its peak
        self.changed: set[int] = set()  # steps after which the run was another one
        self.alarms: list[str] = []
        self.seconds, self.lost = 0.0, 0
        self.ended: str | None = None


def _runs(path: str | Path) -> list[_Run]:
    """The runs in a log in the order of their starts. Lines that are not as a Monitor writes them are left out."""
    runs: list[_Run] = []
    owners: dict[object, _Run] = {}
    for line in read_log(path):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if line["kind"] == "look":
                _look(line, runs, owners)
            elif line["kind"] == "start":
                title = f"process {line['pid']}" + (f", {line['watch']}" if "watch" in line else "")
                budget = None if line["budget"] is None else max(1, _whole(line["budget"]))
                owners[line.get("run")] = _Run(title, "step", budget)
                runs.append(owners[line.get("run")])
            elif line.get("run") in owners:
                _note(owners[line.get("run")], line)
    return runs


def _whole(found: object) -> int:
    if type(found) is not int or not 0 <= found < 2**63:
        raise ValueError(f"expected a whole number, found {found!r}")
    return found


def _look(line: dict, runs: list[_Run], owners: dict[object, _Run]) -> None:
    key, nbytes, seconds = (line.get("run"), line["source"]), _whole(line[line["level"]]), float(line["seconds"])
    if key not in owners:
        owners[key] = _Run(f"{line['source']}, {line['level']}", "look")
        runs.append(owners[key])
    owners[key].seconds = seconds
    owners[key].steps.append((len(owners[key].steps) + 1, nbytes, nbytes))


def _note(run: _Run, line: dict) -> None:
    kind = line["kind"]
    if kind == "step":
        known = line["end"] is not None and line["peak"] is not None  # a metered step has no peak
        bytes_then = (_whole(line["end"]), _whole(line["peak"])) if known else (None, 0)
        run.steps.append((_whole(line["step"]), *bytes_then))
    elif kind == "alarm":
        run.alarms.append(f"step {line['step']}, {line['about']}: {line['message']}")
    elif kind == "changed":
        run.changed.add(len(run.steps))
    elif kind == "gap":
        run.lost += _whole(line["lost"])
    elif kind == "end":
        run.ended = "ended" if line["error"] is None else f"ended by {line['error']}"


def _about(run: _Run, budget_bytes: int | None) -> Iterator[str]:
    budget = budget_bytes or run.budget_bytes
    about = f"{run.title}: {len(run.steps):,} {run.unit}{'s' * (len(run.steps) != 1)}"
    if run.unit == "step":
        about += f", {run.ended or 'and no end in the log: it still runs, or was killed'}"
    else:
        about += f" in {run.seconds:.0f} s"
    yield about
    yield from (f"  alarm at {alarm}" for alarm in run.alarms)
    if run.lost:
        yield f"  lost     {run.lost:,} lines, when the log could not be written"
    known = [step for step in run.steps if step[1] is not None]
    if not known:
        return
    number, _, highest = max(known, key=lambda step: step[2])
    of = f" of {format_bytes(budget)}" if budget else ""
    yield f"  highest  {format_bytes(highest)}{of}, at {run.unit} {number:,}"
    first, last = (format_bytes(known[i][1]) for i in (0, -1))
    yield f"  held     {first} after the first {run.unit}, {last} after the last"
    yield from _judged(run, budget)


def _judged(run: _Run, budget: int | None) -> Iterator[str]:
    """Growth, and when it was called: the steps are put to the forecast again, as a Monitor would have."""
    history, began, calls, quiet = StepHistory(), 0, [], True
    stride = max(1, len(run.steps) // JUDGEMENTS)
    for step, (number, end, peak) in enumerate(run.steps):
        if step in run.changed:
            history, began, quiet = StepHistory(), step, True
        if end is None:
            history.skip(evenly=not quiet)
            continue
        history.append(end, peak)
        if budget and quiet and (step % stride == 0 or step + 1 == len(run.steps)):
            said = forecast(history, budget)
            if said.runs_out:
                quiet = False
                calls.append(f"at {run.unit} {number:,}: {_in_words(said, run.unit)}")
    found = growth(history)
    since = run.steps[min(began + found.since_step, len(run.steps) - 1)][0]
    rate = f"{format_bytes(round(found.bytes_per_step))} a {run.unit}, since {run.unit} {since:,}"
    yield f"  growth   {rate if found.grows else 'none that lasts'}"
    if not budget:
        yield '  called   no budget is known; give one: --budget "16 GiB"'
        return
    yield from (f"  called   {call}" for call in calls)
    if not calls:
        yield "  called   never"
    elif found.grows:
        yield f"  now      {_in_words(forecast(history, budget), run.unit)}"


def _in_words(said: Forecast, unit: str) -> str:
    likely, early, late = (
        "never" if steps == math.inf else f"{steps:,.0f}" for steps in (said.steps_left, said.earliest, said.latest)
    )
    return f"{format_bytes(said.budget_bytes)} would be full after {likely} more {unit}s ({early} to {late})"
