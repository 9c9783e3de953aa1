"""What is kept of a run, and growth that is told from warm-up, noise and jumps."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from memlab.memory_monitoring import StepHistory, growth
from memlab.memory_monitoring.leaks import T_90, _power, gap_of, slope_of, swing_of
from memlab.memory_monitoring.steps import BLOCKS, RECENT


def history_of(ends, above: int = 0) -> StepHistory:
    """A history of these ends, with peaks so much above."""
    history = StepHistory()
    for end in ends:
        history.append(end, end + above)
    return history


@pytest.mark.parametrize("steps", [1, 7, BLOCKS, BLOCKS + 1, 3 * BLOCKS, 10_000])
def test_a_block_keeps_the_least_end_and_the_highest_peak_of_its_steps(steps):
    ends = [(step * 7919) % 1009 for step in range(steps)]
    history = StepHistory()
    for end in ends:
        history.append(end, 2 * end)
    size = history.steps_in_block
    assert history.steps == steps and len(history.ends) == len(history.peaks) == math.ceil(steps / size) <= BLOCKS
    assert list(history.ends) == [min(ends[at : at + size]) for at in range(0, steps, size)]
    assert list(history.peaks) == [2 * max(ends[at : at + size]) for at in range(0, steps, size)]


def test_what_happened_of_late_is_kept_step_by_step():
    for steps in (1, RECENT, 2 * RECENT, 2 * RECENT + 1, 5000):
        ends = [(step * 7919) % 1009 for step in range(steps)]
        history = history_of(ends, above=3)
        kept = len(history.recent_ends)
        assert min(steps, RECENT) <= kept <= 2 * RECENT
        assert list(history.recent_ends) == ends[-kept:]
        assert list(history.recent_peaks) == [end + 3 for end in ends[-kept:]]


def test_a_swing_is_the_most_by_which_floors_rose_and_then_fell():
    rng = random.Random(0)
    for _ in range(200):
        floors = [rng.randrange(20) for _ in range(rng.randint(1, 12))]
        every = itertools.combinations_with_replacement(floors, 3)
        assert swing_of(floors) == max(min(top - before, top - after) for before, top, after in every)


def test_a_gap_is_the_greatest_jump_that_stays_one():
    rng = random.Random(0)
    for _ in range(200):
        values = [rng.randrange(20) for _ in range(rng.randint(2, 12))]
        assert gap_of(values) == max(min(values[i:]) - max(values[:i]) for i in range(1, len(values)))


def test_a_slope_is_the_middle_of_those_between_any_two_and_one_tall_value_hardly_bends_it():
    rng = random.Random(0)
    for _ in range(50):
        values = [rng.randrange(100) for _ in range(8)]
        slopes = sorted((values[j] - values[i]) / (j - i) for i in range(8) for j in range(i + 1, 8))
        assert slope_of(values) == (slopes[13] + slopes[14]) / 2
    assert slope_of([10, 20, 30, 40, 5000, 60, 70, 80]) == 10


@pytest.mark.parametrize(
    ("first", "second", "spread"),
    [(10, 10, 0), (10, 4, 0), (10, 6, 2), (1, 9, 6), (0, 5, 0), (0, 5, 4), (3, 4, 5), (0, 0, 0), (10, 1, 2)],
)
def test_growth_slows_down_no_more_than_the_error_of_both_halves_allows(first, second, spread):
    """Fieller's bound: the ratio r at which second - r * first is as large as its error, spread * sqrt(1 + r²)."""
    power = _power(first, second, spread)
    if (first, second, spread) in ((3, 4, 5), (0, 0, 0), (10, 1, 2)):  # within their error: it may be ending
        assert power == 0
    else:
        ratio = 2**power - 1
        assert ratio == pytest.approx(1) or second - ratio * first == pytest.approx(spread * math.hypot(1, ratio))


FILLING = [320, 330, 340, 360, 380, 390, 410, 410, *[420] * 10, 430, *[440] * 9]


@pytest.mark.parametrize(
    "ends",
    [
        [1000] * 300,
        [1000] + [3000] * 300,  # states that are made in the first step
        *([1000 + 500 * (step // (400 // (jumps + 1))) for step in range(400)] for jumps in (1, 2, 3)),
        [*FILLING, *[540] * 60],  # a jump that falls into a stretch is no slope of means
    ],
    ids=["flat", "states", "one jump", "two jumps", "three jumps", "a jump within a stretch"],
)
def test_what_stays_or_jumps_does_not_grow(ends):
    history = StepHistory()
    for end in ends:
        history.append(end, end - 2)
        assert not growth(history).grows
    assert max(history.peaks) == max(ends)  # a peak below its end is raised to it


def test_the_quantile_is_students():
    """Two-sided 90 % for 6 degrees of freedom."""
    assert pytest.approx(1.943, abs=1e-3) == T_90


def test_the_interval_is_that_of_the_mean_of_the_rises():
    rises = [30, 10, 20, 25, 15, 20, 20]
    floors = [1000, *(1000 + total for total in itertools.accumulate(rises))]
    found = growth(history_of([floor for floor in floors for _ in range(4)]))
    half_width = T_90 * statistics.stdev(rises) / math.sqrt(7)
    assert found.grows and found.rise_bytes == sum(rises)
    assert found.bytes_per_step == pytest.approx(20 / 4)
    assert found.low == pytest.approx((20 - half_width) / 4) and found.high == pytest.approx((20 + half_width) / 4)
    assert (found.since_step, found.until_step) == (0, 32)


def test_a_sawtooth_does_not_grow_from_its_third_tooth_on():
    history = StepHistory()
    for step in range(3000):
        history.append(1000 + 10 * (step % 150), 5000)
        if step >= 300 and step % 9 == 0:
            assert not growth(history).grows


def test_a_leak_under_a_sawtooth_grows_by_its_own_rate():
    found = growth(history_of([1000 + 100 * (step % 50) + 10 * step for step in range(3000)]))
    assert found.grows and found.bytes_per_step == pytest.approx(10, rel=0.02)


def test_a_leak_far_below_the_noise_of_a_step_is_found():
    rng = random.Random(0)
    found = growth(history_of([10**6 + rng.randrange(10**6) + 100 * step for step in range(5000)]))
    assert found.grows and found.low <= 100 <= found.high


def test_bytes_that_were_freed_once_after_loading_do_not_hide_a_leak():
    ends = [10**6] * 5 + [1000 + 100 * step for step in range(300)]
    assert growth(history_of(ends)).grows


def test_work_that_grows_longer_is_no_leak_though_a_part_of_it_is_held_at_the_end():
    history = StepHistory()
    for step in range(500):
        history.append(1000 + 10 * step, 5000 + 100 * step)
        if step % 5 == 0:
            assert not growth(history).grows


@pytest.mark.parametrize("kept, called", [(0.65, False), (0.75, True)])
def test_a_warm_up_whose_second_half_rises_less_than_a_quarter_of_the_first_is_no_growth(kept, called):
    rises = 10**6 * kept**4  # the second half's, beside 10**6 of the first
    assert (rises >= 10**6 / 4) == called
    found = growth(history_of([round(10**6 * (1 - kept ** (step // 2))) for step in range(16)]))
    assert found.grows == called


def test_of_late_nothing_grows_that_rose_less_than_what_came_down_again_long_ago():
    teeth = [1000 + 10 * (step % 150) for step in range(1200)]
    rest, late = [1000] * 520, [1000 + 5 * step for step in range(60)]
    history = history_of(teeth + rest + late)
    assert history.steps_in_block >= 4 and len(history.recent_ends) < len(rest + late)
    assert not growth(history).grows
    assert growth(history_of([1000] * 1200 + rest + late)).grows


def test_a_leak_is_told_when_it_began():
    start = 700
    found = growth(history_of([1000 + 10 * max(0, step - start) for step in range(1000)]))
    assert (
        found.grows and start - 150 <= found.since_step <= 1000 and found.bytes_per_step == pytest.approx(10, rel=0.4)
    )


def test_a_jump_is_no_part_of_the_growth_after_it():
    found = growth(history_of([1000 + step + 500 * (step >= 50) for step in range(100)]))
    assert found.grows and found.bytes_per_step == 1 and found.since_step >= 50
