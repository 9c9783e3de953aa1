"""What the terminal shows: a table of what is watched, one line a look, and what a Monitor's log tells (`summary`).

    seconds                    resident      highest     a minute   of the budget, 16.0 GiB
          0  process 7          1.2 GiB      1.3 GiB                  7.5%

*a minute* is what the figure grew by in the last minute, or since the start, each minute. With a budget the history of
looks is judged as a Monitor judges steps, a look being a step, and the line ends with the seconds until it is full.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from memlab.memory_monitoring.forecasts import forecast
from memlab.memory_monitoring.log import read_log
from memlab.memory_monitoring.sources import Gone, Source
from memlab.memory_monitoring.steps import StepHistory
from memlab.units import format_bytes

NAMES = {"driver": "used", "driver_process": "its share"}


class Row(NamedTuple):
    """One look at one source: seconds since the start, its figures, the highest known, and growth in bytes a minute."""

    seconds: float
    source: str
    figures: dict[str, int]
    peak_bytes: int
    bytes_per_minute: float | None
    full_in_seconds: tuple[float, float, float] | None  # likely, earliest, latest


class Watch:
    """Looks at one source, again and again, and keeps what the table says of it.

    level: the figure that is held against the budget. whole_bytes: what the bar is a part of, where no budget is given.
    """

    def __init__(self, source: Source, level: str, whole_bytes: int | None, budget_bytes: int | None = None):
        self.source, self.level, self.budget_bytes = source, level, budget_bytes
        self.whole_bytes = budget_bytes or whole_bytes
        self.peak_bytes = 0
        self._history = StepHistory()
        self._late: deque[tuple[float, int]] = deque()

    def look(self, seconds: float) -> Row | None:
        """One look; None where the source does not answer this time. Raises Gone when it is gone."""
        figures = self.source.read()
        if self.level not in figures:
            return None
        now = figures[self.level]
        self.peak_bytes = max(self.peak_bytes, now)
        self._history.append(now, now)
        self._late.append((seconds, now))
        while len(self._late) > 2 and seconds - self._late[1][0] >= 60:
            self._late.popleft()
        began, then = self._late[0]
        rate = (now - then) * 60 / (seconds - began) if seconds > began else None
        return Row(seconds, self.source.name, figures, self.peak_bytes, rate, self._full_in(seconds))

    def _full_in(self, seconds: float) -> tuple[float, float, float] | None:
        if self.budget_bytes is None or self._history.steps < 2:
            return None
        found = forecast(self._history, self.budget_bytes)
        if not found.growth.grows or found.steps_left == math.inf:
            return None
        each = seconds / (self._history.steps - 1)
        return found.steps_left * each, found.earliest * each, found.latest * each


def table(
    watches: list[Watch],
    every: float,
    count: int | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[str]:
    """The table's lines as time goes by, until nothing is left to watch or `count` looks are done.

    every: seconds from look to look, kept by the clock. What is gone ends with a sentence, and the others go on.
    """
    watches, shown = list(watches), None
    start, looks = clock(), 0
    while watches and (count is None or looks < count):
        if looks:
            sleep(max(0.0, start + looks * every - clock()))
        for watch in list(watches):
            try:
                row = watch.look(clock() - start)
            except Gone as gone:
                watches.remove(watch)
                yield f"{gone}; watched for {clock() - start:.0f} s, at most {format_bytes(watch.peak_bytes)} seen"
                continue
            if row is None:
                yield f"{clock() - start:9.0f}  {watch.source.name} does not answer this time"
                continue
            columns = *row.figures, watch.whole_bytes is not None
            if columns != shown:
                shown = columns
                yield _header(row, watch)
            yield _line(row, watch, digits=int(every < 1))
        looks += 1


def _header(row: Row, watch: Watch) -> str:
    cells = [f"{'seconds':>9}  {'':14}"]
    cells += [f"{NAMES.get(name, name):>13}" for name in (*row.figures, "highest", "a minute")]
    if watch.whole_bytes is not None:
        cells.append(f"   of {'the budget, ' * (watch.budget_bytes is not None)}{format_bytes(watch.whole_bytes)}")
    return "".join(cells).rstrip()


def _line(row: Row, watch: Watch, digits: int) -> str:
    cells = [f"{row.seconds:9.{digits}f}  {row.source:14}"]
    cells += [f"{format_bytes(value):>13}" for value in row.figures.values()]
    cells.append(f"{format_bytes(row.peak_bytes):>13}")
    rate = "" if row.bytes_per_minute is None else format_bytes(round(row.bytes_per_minute))
    cells.append(f"{rate if rate.startswith('-') or not rate else '+' + rate:>13}")
    if watch.whole_bytes:
        cells.append(f"{row.figures[watch.level] / watch.whole_bytes:9.1%}")
    if row.full_in_seconds is not None:
        likely, early, late = map(_duration, row.full_in_seconds)
        cells.append(f"   full in {likely} ({early} to {late})")
    return "".join(cells).rstrip()


def _duration(seconds: float) -> str:
    """Seconds in words: "45 s", "12 min", "3.5 h", or "never"."""
    if seconds == math.inf:
        return "never"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
