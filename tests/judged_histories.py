"""Is a detector any good? Runs whose end is known are played to it: how early does it call, how often does it cry wolf?

The two pull against each other, and `patience` (page `forecasts`) sets where they meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from memlab.memory_monitoring.forecasts import LINE, PATIENCE, Forecast, Forecaster
from memlab.memory_monitoring.steps import StepHistory


def first_call(
    steps: Iterable[tuple[int, int]], budget_bytes: int, patience: float = PATIENCE
) -> tuple[Forecast | None, int]:
    """The forecast with which a run of (end, peak) is called, None if it never is; and after how many steps it ends."""
    history = StepHistory()
    forecaster, call = Forecaster(history, budget_bytes, patience), None
    for end_bytes, peak_bytes in steps:
        history.append(end_bytes, peak_bytes)
        if max(end_bytes, peak_bytes) >= budget_bytes:
            break
        if call is None and (said := forecaster()).runs_out:
            call = said
    return call, history.steps


class Judgement(NamedTuple):
    """How many leaks were called, how many below `LINE` of the budget, and within the interval that was foretold.

    lead: the middle of the shares of their steps that were left at the call. false_alarms: clean runs that were called.
    """

    called: int
    in_time: int
    lead: float
    covered: int
    false_alarms: int


def judge(
    leaks: Sequence[Sequence[tuple[int, int]]],
    cleans: Sequence[Sequence[tuple[int, int]]],
    budget_bytes: int,
    patience: float = PATIENCE,
) -> Judgement:
    """How a detector with this patience does on runs with a leak, all of which fill the budget, and on clean ones."""
    called = in_time = covered = 0
    leads = []
    for steps in leaks:
        call, length = first_call(steps, budget_bytes, patience)
        assert max(steps[length - 1]) >= budget_bytes
        leads.append((length - call.step) / length if call else 0.0)
        if call:
            called += 1
            in_time += all(end < LINE * budget_bytes for end, _ in steps[: call.step])
            covered += call.earliest - 1 <= length - call.step <= call.latest + 1
    false_alarms = sum(first_call(steps, budget_bytes, patience)[0] is not None for steps in cleans)
    return Judgement(called, in_time, median(leads), covered, false_alarms)
