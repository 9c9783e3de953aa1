"""When will it be full? Steps until the budget is reached, with an interval, from the growth and the peaks.

    steps left = (budget − the highest peak of late) / growth a step

The interval comes from the growth's: the fast end of it gives the early end of this one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from memlab.memory_monitoring.leaks import Growth, growth
from memlab.memory_monitoring.steps import StepHistory
from memlab.units import format_bytes


class Forecast(NamedTuple):
    """Steps until a budget is full: between `earliest` and `latest` steps from `step` on; math.inf for never."""

    step: int
    budget_bytes: int
    peak_bytes: int
    growth: Growth
    steps_left: float
    earliest: float
    latest: float

    @property
    def runs_out(self) -> bool:
        """Whether the run is called: it grows, and will reach the budget."""
        return self.growth.grows and self.steps_left < math.inf

    def __str__(self) -> str:
        if not self.runs_out:
            return f"step {self.step}: no growth that lasts"
        rate = format_bytes(round(self.growth.bytes_per_step))
        return (
            f"step {self.step}: grows by {rate} a step; {format_bytes(self.budget_bytes)} are full in "
            f"{self.steps_left:.0f} steps ({self.earliest:.0f} to {self.latest:.0f})"
        )


def forecast(history: StepHistory, budget_bytes: int) -> Forecast:
    """When a run that goes on as it did fills its budget."""
    found = growth(history)
    peak = max(history.peaks[-max(1, len(history.peaks) // 4) :], default=0)
    room = max(0, budget_bytes - peak)

    def steps(rate: float) -> float:
        return room / rate if rate > 0 else math.inf

    return Forecast(
        history.steps, budget_bytes, peak, found, steps(found.bytes_per_step), steps(found.high), steps(found.low)
    )
