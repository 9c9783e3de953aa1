"""Is a detector any good? Runs whose end is known are played to it, and it is asked how early it calls, and how often
it cries wolf.

The two pull against each other, and `patience` (page `forecasts`) sets where they meet: who calls earlier calls more
caches that are only filling. Neither figure means anything without the other, nor on runs with which the detector was
tuned.
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
    """The forecast with which a run is called, None if it never is; and after how many steps the run ends.

    steps: bytes at the end and at the peak of each. A run ends, uncalled from there on, where its peak reaches the
    budget. Raises as `forecast` does.
    """
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
    """How a detector did at one patience.

    called, in_time: how many leaks it called at all, and while their bytes at the end of a step were below `LINE` of
    the budget; of `leaks`.
    lead: the middle of the shares of their steps that were left when it called, 0 for a leak that it did not call.
    covered: of the leaks called, how many were full within the interval that was foretold, to a step.
    false_alarms: how many of `cleans` it called.
    """

    patience: float
    leaks: int
    called: int
    in_time: int
    lead: float
    covered: int
    cleans: int
    false_alarms: int


def judge(
    leaks: Sequence[Sequence[tuple[int, int]]],
    cleans: Sequence[Sequence[tuple[int, int]]],
    budget_bytes: int,
    patience: float = PATIENCE,
) -> Judgement:
    """How a detector with this patience does on runs with a leak, all of which fill the budget, and on clean ones.

    Each run: bytes at the end and at the peak of each step. Raises ValueError for a leak that does not fill the budget.
    """
    called = in_time = covered = 0
    leads = []
    for steps in leaks:
        call, length = first_call(steps, budget_bytes, patience)
        if not length or max(steps[length - 1]) < budget_bytes:
            raise ValueError(
                f"expected leaks that reach the budget of {budget_bytes} bytes, found a run of {length} steps that "
                f"does not; let it go on, or take a smaller budget"
            )
        leads.append((length - call.step) / length if call else 0.0)
        if call:
            called += 1
            in_time += all(end < LINE * budget_bytes for end, _ in steps[: call.step])
            covered += call.earliest - 1 <= length - call.step <= call.latest + 1
    false_alarms = sum(first_call(steps, budget_bytes, patience)[0] is not None for steps in cleans)
    lead = median(leads) if leads else 0.0
    return Judgement(patience, len(leaks), called, in_time, lead, covered, len(cleans), false_alarms)
