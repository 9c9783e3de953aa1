"""Forecasts: closed forms, what is refused, and how made-up leaks and clean runs are told apart.

Is the detector any good? Runs whose end is known are played to it: how early does it call, how often does it cry wolf?
The two pull against each other, and `PATIENCE` sets where they meet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import pytest

from memlab.memory_monitoring import Forecast, Forecaster, Growth, StepHistory, forecast, growth
from memlab.memory_monitoring.forecasts import LINE, PATIENCE
from memlab.memory_monitoring.leaks import STRETCHES
from memlab.memory_monitoring.steps import BLOCKS
from tests.harness import refusals, refused
from tests.leaky_histories import BUDGET, CLEANS, LEAKS, NOISES, clean, leak

MIB = 2**20


def history_of(ends, above: int = 0) -> StepHistory:
    """A history of these ends, with peaks so much above."""
    history = StepHistory()
    for end in ends:
        history.append(end, end + above)
    return history


def first_call(steps: Iterable[tuple[int, int]], budget_bytes: int) -> tuple[Forecast | None, int]:
    """The forecast with which a run of (end, peak) is called, None if it never is; and after how many steps it ends."""
    history = StepHistory()
    forecaster, call = Forecaster(history, budget_bytes), None
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
) -> Judgement:
    """How the detector does on runs with a leak, all of which fill the budget, and on clean ones."""
    called = in_time = covered = 0
    leads = []
    for steps in leaks:
        call, length = first_call(steps, budget_bytes)
        assert max(steps[length - 1]) >= budget_bytes
        leads.append((length - call.step) / length if call else 0.0)
        if call:
            called += 1
            in_time += all(end < LINE * budget_bytes for end, _ in steps[: call.step])
            covered += call.earliest - 1 <= length - call.step <= call.latest + 1
    false_alarms = sum(first_call(steps, budget_bytes)[0] is not None for steps in cleans)
    return Judgement(called, in_time, median(leads), covered, false_alarms)


@pytest.mark.parametrize("rate", [1, 3 * MIB])
@pytest.mark.parametrize("steps", [16, 700, 5000])
def test_of_an_even_leak_the_step_at_which_the_budget_is_full_is_foretold_exactly(rate, steps):
    base, above, left = 100 * MIB, 10 * MIB, 123
    history = history_of([base + rate * step for step in range(1, steps + 1)], above)
    said = forecast(history, base + above + rate * (steps + left))
    assert said.growth.grows and said.growth.bytes_per_step == rate
    assert said.earliest == pytest.approx(left, abs=1e-6) and said.latest == pytest.approx(left, abs=1e-6)
    assert said.steps_left == pytest.approx(left, abs=1e-6)


@pytest.mark.parametrize("every", [2, 5, 24])
def test_a_leak_every_so_many_steps_fills_the_budget_within_the_interval(every):
    base, jump = 1000, 50
    history, budget = StepHistory(), base + 40 * jump
    forecaster = Forecaster(history, budget)
    for step in range(1, 40 * every):
        history.append(base + step // every * jump, base + step // every * jump)
        said = forecaster()
        if said.runs_out:
            assert said.earliest - 1 <= 40 * every - step <= said.latest + 1


def test_a_cache_that_fills_evenly_is_called_beyond_three_quarters_of_the_way_and_not_before():
    base, budget = 200_000, 1_000_000
    way = LINE * budget - base
    for share in (0.5, 0.7, 0.74, 0.78, 0.9):
        steps = 1000
        ends = [int(base + share * way * min(1, step / steps)) for step in range(2 * steps)]
        call, _ = first_call([(end, end) for end in ends], budget)
        assert (call is not None) == (share > 0.75), share


def test_a_run_that_begins_near_its_budget_is_called_by_the_half_of_what_was_left():
    base, budget, history = 700, 1000, StepHistory()
    for step in range(200):
        history.append(base + step, base + step)
        if forecast(history, budget).runs_out:
            break
    way = PATIENCE / (1 + PATIENCE) * (budget - base) / 2
    assert way <= step <= way * STRETCHES / (STRETCHES - 1)  # floors have risen by all but a stretch


@pytest.mark.parametrize("power", [0.5, 0.7, 0.9])
def test_bytes_that_grow_as_a_power_of_steps_are_full_by_the_latest_step(power):
    ends = [int(1e6 * step**power) for step in range(1, 20_000)]
    full_at = next(step for step, end in enumerate(ends, start=1) if end >= 40e6)
    call, _ = first_call([(end, end) for end in ends], int(40e6))
    assert call.earliest - 1 <= full_at - call.step <= call.latest + 1


def test_peaks_that_rise_faster_than_ends_bring_the_earliest_step_nearer():
    history = StepHistory()
    for step in range(1, 201):
        history.append(1000 + 10 * step, 2000 + 20 * step)
    said = forecast(history, 2000 + 20 * 300)
    assert said.growth.grows and said.earliest == pytest.approx(100) and said.latest > 200


def growing_noise(seed: int) -> tuple[list[tuple[int, int]], int]:
    """A hook more every so many steps, each with a copy as long as the batch; and a budget in which 40 have room."""
    rng = random.Random(f"growing noise {seed}")
    every, copy, base = rng.randint(2, 6), 1_000_000, 20_000_000
    lengths = rng.choice(((0.25, 0.5, 0.75, 1.0), tuple(n / 100 for n in range(30, 101))))
    ends = [int(base + step // every * copy * rng.choice(lengths)) for step in range(90 * every)]
    return [(end, end + 2_000_000) for end in ends], base + 40 * copy


def test_a_leak_whose_noise_grows_with_it_is_called_in_time_and_is_full_within_the_interval():
    in_time = covered = 0
    for seed in range(12):
        steps, budget = growing_noise(seed)
        call, length = first_call(steps, budget)
        if call is not None:
            in_time += max(peak for _, peak in steps[: call.step]) < LINE * budget
            covered += call.earliest <= length - call.step <= call.latest
    assert in_time >= 11 and covered >= 10


def test_noise_that_grows_and_shrinks_again_with_what_is_kept_is_no_leak():
    for seed in range(6):
        rng = random.Random(f"tide {seed}")
        kept = [20 - abs(step % 40 - 20) for step in range(600)]
        ends = [10**6 + int(10**4 * k * rng.uniform(0.3, 1)) for k in kept]
        history = history_of(ends[:80])
        for end in ends[80:]:
            history.append(end, end)
            assert not growth(history).grows


def test_a_budget_that_is_reached_leaves_0_steps():
    said = forecast(history_of([100] * 50), 100)
    assert (said.steps_left, said.earliest, said.latest) == (0, 0, 0) and not said.runs_out
    assert "full" in str(said)


def test_steps_of_which_nothing_is_known_are_at_rest_or_on_a_line_and_are_counted():
    resting, rising = StepHistory(), StepHistory()
    for history, evenly in ((resting, False), (rising, True)):
        history.skip(evenly=evenly)
        history.append(10, 12)
        for _ in range(3):
            history.skip(evenly=evenly)
        assert history.steps == 2
        history.append(50, 92)
        assert history.steps == 6
    assert (list(resting.ends), list(resting.peaks)) == ([10, 10, 10, 10, 10, 50], [12, 12, 12, 12, 12, 92])
    assert (list(rising.ends), list(rising.peaks)) == ([10, 10, 20, 30, 40, 50], [12, 12, 32, 52, 72, 92])


def test_the_forecaster_and_the_function_agree_whenever_it_looks():
    run = leak(3)
    history = StepHistory()
    forecaster = Forecaster(history, BUDGET)
    for step, (end, peak) in enumerate(run.steps[:-1], start=1):
        history.append(end, peak)
        said = forecaster()
        assert said.step == step and said.earliest <= said.steps_left <= said.latest
        if step <= 32:
            assert said == forecast(history, BUDGET)


def test_a_leak_that_begins_after_a_long_run_and_is_fast_is_called():
    rng = random.Random(1)
    start, steps, base, budget = 40 * BLOCKS, 200, 4 * 10**9, 10**10
    ends = [
        base + int(max(0, step - start) * (budget - base) / steps + rng.random() * 2e8) for step in range(start + steps)
    ]
    call, length = first_call([(end, end) for end in ends], budget)
    assert call is not None and ends[call.step - 1] < LINE * budget
    assert call.earliest - 1 <= length - call.step <= call.latest + 1


def test_less_patience_calls_earlier_and_more_often_wrongly(monkeypatch):
    """Clean runs that fill all of the way to the line: what figures alone cannot tell from a leak."""
    leaks = [leak(seed).steps for seed in range(16)]
    cleans = [clean(seed, most=1.0).steps for seed in range(16)]
    found = []
    for patience in (1.0, 9.0):
        monkeypatch.setattr("memlab.memory_monitoring.forecasts.PATIENCE", patience)
        found.append(judge(leaks, cleans, BUDGET))
    early, late = found
    assert early.lead > late.lead and early.false_alarms > late.false_alarms


def test_a_growth_that_slows_down_may_never_end_and_a_run_without_steps_does_not_grow():
    rng = random.Random(0)
    history = history_of([10**6 + int(10**5 * math.log(step) + rng.random() * 10**4) for step in range(1, 400)])
    said = forecast(history, 10**7)
    assert not said.runs_out and (not said.growth.grows or said.growth.power < 0.6)
    said = forecast(StepHistory(), 100)
    assert not growth(StepHistory()).grows and not said.runs_out and said.steps_left == math.inf
    assert str(said) == "step 0: no growth that lasts"
    said = Forecast(9, 4 * MIB, 2 * MIB, Growth(True, MIB, 0.0, 2.0 * MIB, 0, 9, 100), 2.0, 1.0, math.inf)
    assert str(said) == "step 9: grows by 1.0 MiB a step; 4.0 MiB are full in 2 steps (1 or more, or never)"


REFUSALS = {
    "a budget of nothing": (lambda: forecast(StepHistory(), 0), ValueError, "budget_bytes"),
    "a budget in words": (lambda: forecast(StepHistory(), "16 GiB"), TypeError, "budget_bytes"),
    "a peak of nothing": (lambda: StepHistory().append(1, None), TypeError, "expected bytes"),
    "an end below 0": (lambda: StepHistory().append(-1, 2), ValueError, "expected bytes"),
}


@refusals(REFUSALS)
def test_what_makes_no_sense_is_refused(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize("count", [56, pytest.param(208, marks=pytest.mark.thorough)])
def test_of_made_up_leaks_95_in_100_are_called_in_time_and_of_clean_runs_none(count):
    leaks, cleans = [leak(seed) for seed in range(count)], [clean(seed) for seed in range(count)]
    assert {run.kind for run in leaks} == {kind.__name__ for kind in LEAKS}
    assert {run.kind for run in cleans} == {kind.__name__ for kind in CLEANS}
    assert {run.noise for run in leaks} == {run.noise for run in cleans} == {noise.__name__ for noise in NOISES}
    judged = judge([run.steps for run in leaks], [run.steps for run in cleans], BUDGET)
    assert judged.in_time >= 0.95 * count and judged.false_alarms == 0
    assert judged.lead >= 0.4  # half of them are called when no more than three fifths of their steps are over
    assert judged.covered >= 0.9 * judged.called  # within the interval is the step at which the budget is full
