"""When will it be full? Steps until the peak reaches the budget, with an interval, from growth and peaks.

    steps left = (budget − peak of late) / growth a step

The interval (90 %) takes the highest peak and the fastest growth for its early end, the lowest peak and the slowest
growth for its late end, as a whole step; later still, if growth may be slowing down: what rose as steps ** p fills the
room after steps · ((1 + room / rise) ** (1 / p) − 1) more. What grows in jumps may be full some jumps sooner or later.
Growth that speeds up, as of a list of ever longer lists, is full sooner than the interval says: each call is nearer.

Whether to *call* a run is a question of patience. A cache or a replay buffer that is still filling grows as a leak
does; no figures tell them apart until it stops, only time. So a run is called late enough to be sure and early enough
to act: when the floor, or the highest peaks, have risen by at least `PATIENCE` times what is left to `LINE` of the
budget, that is, after three quarters of the way. A cache that ends before that is never called; one that ends beyond
it is, and falsely. More patience means fewer false alarms and less warning.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from memlab.checking import positive
from memlab.memory_monitoring.leaks import STRETCHES, Growth, growth
from memlab.memory_monitoring.steps import StepHistory
from memlab.units import format_bytes

LINE = 0.8
PATIENCE = 3.0
LOOK_AGAIN = 32
ROUNDING = 1e-6  # of a step
NEVER = 1e9  # steps: what is as far away is not told as a number


class Forecast(NamedTuple):
    """Steps until a budget is full: between `earliest` and `latest` steps from `step` on (90 %); math.inf for never.

    peak_bytes: the highest of late. urgent: whether the growth has come far enough to call the run.
    """

    step: int
    budget_bytes: int
    peak_bytes: int
    growth: Growth
    steps_left: float
    earliest: float
    latest: float
    urgent: bool = True

    @property
    def runs_out(self) -> bool:
        """Whether the run is called: it grows, and will reach the budget before long."""
        return self.growth.grows and self.urgent and self.steps_left < math.inf

    def __str__(self) -> str:
        budget = format_bytes(self.budget_bytes)
        if self.steps_left == 0:
            return f"step {self.step}: {budget} are full"
        if not self.growth.grows:
            return f"step {self.step}: no growth that lasts"
        nbytes = self.growth.bytes_per_step
        rate = format_bytes(round(nbytes)) if nbytes >= 1 else "less than a byte"
        left = f"{self.steps_left:.0f}"
        steps = "1 step" if left == "1" else f"{left} steps" if self.steps_left >= 0.5 else "less than a step"
        latest = f"to {self.latest:.0f}" if self.latest < NEVER else "or more, or never"
        return (
            f"step {self.step}: grows by {rate} a step; {format_bytes(self.budget_bytes)} are full in {steps} "
            f"({self.earliest:.0f} {latest})"
        )


class Forecaster:
    """Forecasts of one history after every step, cheaply: growth is sought again only every so many steps.

    That is after each 32nd part of the steps, and after LOOK_AGAIN at most: at step `due_at`.

    history: being appended to elsewhere. Raises TypeError for a budget that is no int, ValueError for one below 1.
    """

    def __init__(self, history: StepHistory, budget_bytes: int):
        positive("budget_bytes", budget_bytes)
        self.history, self.budget_bytes = history, budget_bytes
        self._growth, self.due_at = growth(history), history.steps + 1

    def __call__(self) -> Forecast:
        """The forecast as of the last step."""
        steps = self.history.steps
        if steps >= self.due_at:
            self._growth, self.due_at = growth(self.history), steps + max(1, min(steps // 32, LOOK_AGAIN))
        return _forecast(self.history, self.budget_bytes, self._growth)


def forecast(history: StepHistory, budget_bytes: int) -> Forecast:
    """When a run that goes on as it did fills its budget; after every step, a `Forecaster` is cheaper. Raises as it."""
    return Forecaster(history, budget_bytes)()


def _forecast(history: StepHistory, budget: int, found: Growth) -> Forecast:
    peak = max(history.peaks[-max(1, len(history.peaks) // STRETCHES) :], default=0)
    if peak >= budget:
        return Forecast(history.steps, budget, peak, found, 0.0, 0.0, 0.0)
    if not found.grows:
        return Forecast(history.steps, budget, peak, found, math.inf, math.inf, math.inf, False)
    lowest, middle, highest = found.peaks
    gone = history.steps - found.until_step

    def steps(to_peak: int, rate: float) -> float:
        return (budget - to_peak) / rate - gone if rate > 0 else math.inf

    middle_steps = steps(middle, found.bytes_per_step)
    pause = found.pause_steps * (1 + max(0.0, middle_steps) / _steps_seen(found))
    earliest = max(0.0, steps(highest, found.high) - pause)
    latest = max(0.0, steps(lowest, found.low), _steps_slowing(budget - lowest, found) - gone) + pause
    latest = latest if latest == math.inf else math.ceil(latest - ROUNDING)  # a peak is reached in a whole step
    left = min(max(earliest, middle_steps), latest)
    far = min(highest, peak)
    way = max(found.rise_bytes, found.peaks_rise_bytes)
    line = max(LINE * budget, (budget + far - way) / 2)
    urgent = way >= PATIENCE * (line - far)
    return Forecast(history.steps, budget, peak, found, left, earliest, latest, urgent)


def _steps_seen(found: Growth) -> float:
    """The steps in which the floor rose as far as it did."""
    return found.rise_bytes / found.bytes_per_step


def _steps_slowing(room: int, found: Growth) -> float:
    """Steps to fill the room if growth slows down as much as it may."""
    try:
        return _steps_seen(found) * ((1 + max(0, room) / found.rise_bytes) ** (1 / found.power) - 1)
    except (OverflowError, ZeroDivisionError):
        return math.inf


class Outlook:
    """Where a run is heading: its history, its forecast as of each step, and whether that is to be told.

    A growth is told first, and again by each forecast that leaves at most half of the steps that the last one left.
    first_step: the step of the run after which this history begins.
    """

    def __init__(self, budget_bytes: int | None, first_step: int = 0):
        self.history, self._budget_bytes, self._first_step = StepHistory(), budget_bytes, first_step
        self._forecaster = None if budget_bytes is None else Forecaster(self.history, budget_bytes)
        self._steps_left: float | None = None  # when it was told last

    def forecast(self) -> Forecast:
        """When the budget will be full, in steps of the run. Raises ValueError where there is no budget."""
        if self._budget_bytes is None:
            raise ValueError("expected a Monitor with a budget, found none: Monitor(budget='16 GiB')")
        return self._of_the_run(forecast(self.history, self._budget_bytes))

    def skip(self) -> None:
        """A step is over of which nothing is known: a growth that was told went on, and else nothing happened."""
        self.history.skip(evenly=self._steps_left is not None)

    def call(self) -> Forecast | None:
        """The forecast, if it is to be told; to be asked after each step, and on most of them nothing is done."""
        if self._forecaster is None or self.history.steps < self._forecaster.due_at:
            return None
        said, last = self._forecaster(), self._steps_left
        if not said.runs_out or (last is not None and (last < 2 or said.steps_left > last / 2)):
            return None
        self._steps_left = said.steps_left
        return self._of_the_run(said)

    def _of_the_run(self, said: Forecast) -> Forecast:
        found, first = said.growth, self._first_step
        found = found._replace(since_step=found.since_step + first, until_step=found.until_step + first)
        return said._replace(step=said.step + first, growth=found)
