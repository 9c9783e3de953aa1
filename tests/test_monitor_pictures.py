"""Pictures of monitored runs say what the runs were: their lines, fans, stairs and dots, and the words beside them."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from memlab.book import monitor_sliders
from memlab.book.monitor_pictures import (
    called,
    changes,
    draw_judged,
    draw_levels,
    draw_run,
    fan_end,
    full_words,
    judged_words,
    points,
)
from memlab.book.monitor_sliders import (
    BUDGET_BYTES,
    LAST_DRAWN,
    STEP_BYTES,
    draw_floor,
    explore_floor,
    floors,
    made_up,
)
from memlab.book.style import is_sentence
from memlab.memory_monitoring import Alarm, Monitor, StepHistory, forecast
from memlab.units import MiB
from tests.harness import refusals, refused

PNG = b"\x89PNG"


def history_of(ends, room=10 * MiB):
    history = StepHistory()
    for end in ends:
        history.append(end, end + room)
    return history


def said(step=100, earliest=50.0, latest=150.0, left=75.0):
    """The forecast of a growing run, with these steps in place of its own."""
    found = forecast(history_of([(100 + i) * MiB for i in range(step)]), 400 * MiB)
    return found._replace(peak_bytes=300 * MiB, steps_left=left, earliest=earliest, latest=latest)


def line(picture, label):
    return next(one for one in picture.figure.axes[0].lines if one.get_label() == label)


def fan(picture):
    (patch,) = picture.figure.axes[0].patches
    return patch.get_xy()[:-1].tolist()


def test_the_lines_are_the_ends_and_peaks_of_the_history():
    history = history_of([(100 + i) * MiB for i in range(50)])
    picture = draw_run(history, "400 MiB")
    ends, peaks = line(picture, "end of each step"), line(picture, "peak of each step")
    assert ends.get_xdata().tolist() == peaks.get_xdata().tolist() == list(range(1, 51))
    assert ends.get_ydata().tolist() == [100 + i for i in range(50)]
    assert peaks.get_ydata().tolist() == [110 + i for i in range(50)]
    assert picture.png().startswith(PNG)


@pytest.mark.parametrize("steps", [1, 512, 513, 1500])
def test_a_block_stands_at_its_last_step_and_a_half_step_is_left_out(steps):
    history = history_of([MiB] * steps)
    at, ends, peaks = points(history)
    assert at[-1] == steps and len(at) == len(ends) == len(peaks) == len(history.ends)
    assert set(np.diff(at[:-1])) <= {history.steps_in_block}
    history.ends.append(MiB)  # it is just being written to
    assert [len(column) for column in points(history)] == [len(at)] * 3


def test_the_fan_goes_from_the_peak_at_the_call_to_the_budget():
    picture = draw_run(history_of([280 * MiB] * 120), "400 MiB", said())
    assert fan(picture) == [[100, 300], [150, 400], [250, 400]]
    assert "called at step 100: a fan shows the budget full between step 150 and step 250." in picture.alt
    assert "called at step 100" in [text.get_text() for text in picture.figure.axes[0].texts]


def test_a_fan_whose_slow_end_never_fills_the_budget_goes_to_the_edge_and_no_step_beyond_it_is_named():
    picture = draw_run(history_of([280 * MiB] * 120), "400 MiB", said(latest=math.inf))
    assert fan(picture) == [[100, 300], [150, 400], [480, 400], [480, 300]]
    assert "between step 150 and never" in picture.alt
    assert picture.figure.axes[0].get_xlim() == (0, 480)
    assert fan_end(said(latest=1e9), 120) == 480 and fan_end(said(latest=20), 500) == 500
    picture = draw_run(StepHistory(), "1 GiB")
    assert picture.alt.startswith("Nothing is drawn yet") and is_sentence(picture.alt)
    assert full_words(said(earliest=50, latest=150), 480) == "between step 150 and step 250"
    assert full_words(said(latest=1_587_067), 480) == "between step 150 and a step beyond 480"


def test_a_monitor_brings_its_budget_and_the_forecast_of_its_first_call():
    monitor = Monitor("400 MiB", sources=[])
    first = said()
    monitor.alarms[:] = [Alarm("threshold", 3, "near"), Alarm("growth", 100, "grows", first)]
    monitor.alarms.append(Alarm("growth", 110, "grows", said(step=110)))
    for _ in range(120):
        monitor.history.append(280 * MiB, 290 * MiB)
    monitor.steps = 120
    assert called(monitor.alarms) is first and called([]) is None
    picture = draw_run(monitor)
    assert fan(picture)[0] == [100, 300] and "budget of 400.0 MiB" in picture.alt


def test_stairs_are_the_levels_and_rings_are_what_was_polled():
    levels = {"allocated": [MiB, 2 * MiB, 3 * MiB], "driver": [8 * MiB, 8 * MiB, 10 * MiB]}
    picture = draw_levels(levels, [(1.5, 8 * MiB), (3, 10 * MiB)])
    for name, series in levels.items():
        drawn = line(picture, name)
        assert drawn.get_xdata().tolist() == [1, 2, 3] and drawn.get_ydata().tolist() == [n / MiB for n in series]
        assert drawn.get_drawstyle() == "steps-post"
    rings = line(picture, "nvidia-smi --loop=1")
    assert rings.get_xydata().tolist() == [[1.5, 8], [3, 10]]
    assert "allocated from 1.0 MiB to 3.0 MiB, 2 changes; driver from 8.0 MiB to 10.0 MiB, 1 changes" in picture.alt
    assert len({line(picture, name).get_linestyle() for name in levels}) == 2
    assert [changes(series) for series in ([], [1], [1, 1], [1, 2, 2, 1])] == [0, 0, 0, 2]
    assert picture.png().startswith(PNG)


def judged(**shares):
    return [
        SimpleNamespace(watched=SimpleNamespace(kind=kind), called_at=None if share is None else 5, share=share)
        for kind, found in shares.items()
        for share in found
    ]


def test_each_judged_program_is_a_dot_at_its_share_or_is_counted_as_never_called():
    picture = draw_judged(judged(kept=[0.5, 0.25], clean=[None] * 20, cache=[0.75, None]))
    axes = picture.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cache", "kept", "clean"]
    dots = {round(float(y)): [] for drawn in axes.lines[:3] for y in drawn.get_ydata()}
    for drawn in axes.lines[:3]:
        for x, y in drawn.get_xydata():
            dots[round(float(y))].append(x)
    assert dots == {0: [0.75], 1: [0.25, 0.5]}
    never = {text.get_position()[1]: text.get_text() for text in axes.texts if text.get_text().isdigit()}
    assert never == {0: "1", 2: "20"}
    assert picture.png().startswith(PNG)


def test_words_count_what_was_called_and_what_too_late():
    words = judged_words(judged(kept=[0.5, 0.9, None], clean=[None, 0.4]))
    assert words == (
        "kept: 2 of 3 called, the latest at 90% of the budget, 1 of them too late; "
        "clean: 1 of 2 called, the latest at 40% of the budget."
    )


def test_a_made_up_run_ends_where_a_peak_passes_the_budget_and_what_leaks_is_called_in_time():
    for values in explore_floor().grid():
        run = made_up(*values.values())
        over = [end + STEP_BYTES > BUDGET_BYTES for end in run.ends]
        assert not any(over[:-1]) and over[-1] == (run.full_at is not None)
        assert run.full_at in (None, len(run.ends))
        if values["leak_per_step"] == 0:
            assert run.call is None and run.full_at is None, values
        elif run.full_at is not None:
            assert run.call is not None and run.call.step < run.full_at, values
            assert run.call.peak_bytes <= BUDGET_BYTES
            told = re.findall(r"\d+", full_words(run.call, LAST_DRAWN))
            assert all(int(step) <= LAST_DRAWN for step in told)
    run = made_up(MiB, 8 * MiB, 0)  # the call is what the library says of the same steps
    history = history_of(run.ends[: run.call.step], STEP_BYTES)
    assert forecast(history, BUDGET_BYTES) == run.call


REFUSALS = {
    "a budget of nothing": (lambda: draw_run(StepHistory(), 0), ValueError, "more than 0 bytes"),
    "no level": (lambda: draw_levels({}), ValueError, "at least one level"),
    "no judgement": (lambda: draw_judged([]), ValueError, "at least one judgement"),
}


@refusals(REFUSALS)
def test_what_cannot_be_drawn_is_refused(call, error, words):
    refused(call, error, words)


def test_a_leak_lifts_the_floor_by_its_bytes_whatever_the_noise():
    for noise in monitor_sliders.NOISES.values():
        for every in (0, 25):
            floor = floors(made_up(MiB // 2, noise, every).ends)
            rises = np.diff(floor[1:-1])  # warm-up at the start, fewer steps at the end
            per_step = rises.mean() / monitor_sliders.STRETCH
            assert per_step == pytest.approx(MiB / 2, abs=noise / 10 / monitor_sliders.STRETCH + 1)


def test_every_slider_can_be_moved_and_says_what_it_shows():
    one = explore_floor()
    for name, labels in one.choices.items():
        for value in labels.values():
            picture = one.at(**one.start | {name: value})
            assert is_sentence(picture.alt) and picture.png().startswith(PNG)
    still = draw_floor(0, 0, 0)
    assert "no leak, no noise and no evaluation" in still.alt and "never called" in still.alt
    call = re.search(r"called at step (\d+)", one.picture.alt)
    assert int(call[1]) == made_up().call.step
