"""When to tell. An alarm that comes every step is soon ignored.

So one is told once, and again only when there is something to tell again: a threshold after use has stayed clearly
below it, a growth when only half of the steps that were left are left.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from numbers import Real

from memlab.memory_monitoring.forecasts import Forecast, Forecaster, forecast
from memlab.memory_monitoring.steps import StepHistory

CLEARLY_BELOW = 0.05  # of the budget
QUIET_LOOKS = 16


class Thresholds:
    """Parts of a budget, each of which is told once when use reaches it.

    It is told again only after use has stayed below it, by 5 % of the budget or the half of a lower part, for 16 looks
    in a row; the next time for 32, and so on: so use that goes up and down all the time is not told all the time.

    budget_bytes: math.inf for none. warn_at: a number in (0, 1], or several. Raises ValueError for others.

    >>> thresholds = Thresholds(100, (0.5, 0.9))
    >>> [thresholds.see(nbytes) for nbytes in (40, 50, 60, 95, 40, 95)]
    [None, 0.5, None, 0.9, None, None]
    """

    def __init__(self, budget_bytes: float, warn_at: float | Iterable[float]):
        self.budget_bytes = budget_bytes
        parts = list(warn_at) if isinstance(warn_at, Iterable) and not isinstance(warn_at, str) else [warn_at]
        for part in parts:
            if not isinstance(part, Real) or not 0 < part <= 1:
                raise ValueError(f"expected warn_at in (0, 1], parts of the budget, found {part!r}; 0.9 warns at 90 %")
        self.parts = sorted(set(parts))
        self._lowest = min(self.parts, default=math.inf) * budget_bytes
        self._needed = dict.fromkeys(self.parts, QUIET_LOOKS)  # looks below it, until it may be told again
        self._lock = threading.RLock()
        self.arm()

    def arm(self) -> None:
        """Tell each again when use reaches it."""
        self._below: dict[float, int | None] = dict.fromkeys(self.parts)  # looks in a row; None: it may be told
        self.quiet_below = self._lowest  # all of them may be told, and at fewer bytes none is reached

    def see(self, nbytes: int) -> float | None:
        """So much is in use. Returns the highest part that use has reached and that is to be told, or None."""
        found = None
        if nbytes < self.quiet_below:
            return None
        with self._lock:
            self.quiet_below = 0
            for part in self.parts:
                below = self._below[part]
                if nbytes >= part * self.budget_bytes:
                    found = part if below is None else found
                    self._below[part] = 0
                elif below is not None:
                    below = below + 1 if nbytes < (part - min(CLEARLY_BELOW, part / 2)) * self.budget_bytes else 0
                    if below == self._needed[part]:
                        self._needed[part] *= 2
                        below = None
                    self._below[part] = below
        return found


class Calls:
    """Calls of a growth: the first, and each that leaves at most half of the steps that the last one left."""

    def __init__(self):
        self._steps_left: float | None = None

    @property
    def called(self) -> bool:
        """Whether a growth was called."""
        return self._steps_left is not None

    def see(self, said: Forecast) -> bool:
        """Whether this forecast is to be told."""
        last = self._steps_left
        if not said.runs_out or (last is not None and (last < 2 or said.steps_left > last / 2)):
            return False
        self._steps_left = said.steps_left
        return True


class Outlook:
    """Where a run is heading: its history, its forecast as of each step, and whether that is to be told.

    first_step: the step of the run after which this history begins.
    """

    def __init__(self, budget_bytes: int | None, first_step: int = 0):
        self.history, self._budget_bytes, self._first_step = StepHistory(), budget_bytes, first_step
        self._forecaster = None if budget_bytes is None else Forecaster(self.history, budget_bytes)
        self._calls = Calls()

    def forecast(self) -> Forecast:
        """When the budget will be full, in steps of the run. Raises ValueError where there is no budget."""
        if self._budget_bytes is None:
            raise ValueError("expected a Monitor with a budget, found none: Monitor(budget='16 GiB')")
        return self._of_the_run(forecast(self.history, self._budget_bytes))

    def skip(self) -> None:
        """A step is over of which nothing is known: a growth that was called went on, and else nothing happened."""
        self.history.skip(evenly=self._calls.called)

    def call(self) -> Forecast | None:
        """The forecast, if it is to be told; to be asked after each step, and on most of them nothing is done."""
        if self._forecaster is None or self.history.steps < self._forecaster.due_at:
            return None
        said = self._forecaster()
        return self._of_the_run(said) if self._calls.see(said) else None

    def _of_the_run(self, said: Forecast) -> Forecast:
        found, first = said.growth, self._first_step
        found = found._replace(since_step=found.since_step + first, until_step=found.until_step + first)
        return said._replace(step=said.step + first, growth=found)
