"""Alarms: when something is told, how, and to whom.

An alarm that comes every step is soon ignored. So a threshold is told when use reaches it, and again only after the
peaks of 16 steps in a row have stayed below it.

Telling is a warning (`MemoryWarning`), a line of the log, and an entry in the list. Where warnings are errors, an error
in the monitor's thread or in `step()` would end what the monitor is there to protect; there the message goes to stderr,
and if that is closed, nowhere.

Alarms about memory also wait for `call`, which hands them to the training's own function, in the training's thread.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import deque
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

from memlab.memory_monitoring.forecasts import Forecast
from memlab.memory_monitoring.log import Log

ABOUT_MEMORY = ("threshold", "growth")
QUIET_STEPS = 16


class Alarm(NamedTuple):
    """Something to be told. About memory: `kind` is "threshold", "growth" or "lines". About the watching itself:
    "gone", "source", "log", "callback", "listener" or "monitor"."""

    kind: str
    step: int
    message: str
    forecast: Forecast | None = None


class MemoryWarning(UserWarning):
    """What a Monitor warns with. (Python hides ResourceWarnings unless it is asked to show them.)"""


def warn(message: str) -> None:
    """Warn, on the line that called this package; never raises, even where warnings are errors."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        level, frame = level + 1, frame.f_back
    try:
        warnings.warn(message, MemoryWarning, stacklevel=level)
    except Exception:  # an error by the user's choice, or a stderr that is closed
        with contextlib.suppress(Exception):
            print(f"MemoryWarning: {message}", file=sys.stderr)


class Alarms:
    """The alarms of one monitor: `told`, and those that wait for `call`. log: where they are written to, or None."""

    def __init__(self):
        self.told: list[Alarm] = []
        self.log: Log | None = None
        self._waiting: deque[Alarm] = deque()
        self._once: set[str] = set()

    def tell(self, alarm: Alarm, *, once: str | None = None) -> None:
        """Tell it. once: of alarms with the same words here, only the first is told."""
        if once is not None:
            if once in self._once:
                return
            self._once.add(once)
        self.told.append(alarm)
        if alarm.kind in ABOUT_MEMORY:
            self._waiting.append(alarm)
        if self.log is not None:
            self.log.write("alarm", about=alarm.kind, step=alarm.step, message=alarm.message)
        warn(alarm.message)

    def call(self, function: Callable[[Alarm], object] | None) -> bool:
        """Hand the waiting alarms to a function, which returns True if it changed the run: the rest is out of date.

        Returns whether it did. What the function raises becomes an alarm.
        """
        while self._waiting:
            alarm = self._waiting.popleft()
            if function is None:
                continue
            try:
                if function(alarm) is True:
                    self._waiting.clear()
                    return True
            except Exception as error:
                self.tell(Alarm("callback", alarm.step, f"on_alarm raised {error!r}; the run goes on"))
        return False


class Threshold:
    """A part of a budget that is told when use reaches it, and again after QUIET_STEPS steps in a row below it.

    budget_bytes: math.inf for none. warn_at: a number in (0, 1]. Raises ValueError for others.

    >>> threshold = Threshold(100, 0.9)
    >>> [threshold.see(nbytes) for nbytes in (50, 95, 50, 95)]
    [False, True, False, False]
    """

    def __init__(self, budget_bytes: float, warn_at: float):
        if not isinstance(warn_at, Real) or not 0 < warn_at <= 1:
            raise ValueError(f"expected warn_at in (0, 1], a part of the budget, found {warn_at!r}; 0.9 warns at 90 %")
        self.nbytes = warn_at * budget_bytes
        self.arm()

    def arm(self) -> None:
        """Tell it when use reaches it."""
        self._below = QUIET_STEPS  # steps in a row

    def see(self, nbytes: int) -> bool:
        """So much is in use. Returns whether that is to be told."""
        if nbytes < self.nbytes:
            return False
        told, self._below = self._below >= QUIET_STEPS, 0
        return told

    def step(self, peak_bytes: int) -> bool:
        """A step is over, in which so much was in use; else as `see`."""
        self._below += peak_bytes < self.nbytes
        return self.see(peak_bytes)
