"""Learning curves show every run's losses, and where one breaks."""

import math

import pytest

from memlab.book.curves import curves, first_nonfinite_step, smoothed
from tests.harness import refusals, refused


def lines(picture):
    return {line.get_label(): line for line in picture.figure.axes[0].lines}


def test_a_curve_is_the_mean_of_its_last_steps():
    picture = curves({"one": [4.0, 2.0, 0.0, 0.0]}, window=2)
    line = lines(picture)["one: ends at 0.00"]
    assert [*line.get_xdata()] == [1, 2, 3, 4] and [*line.get_ydata()] == [4.0, 3.0, 1.0, 0.0]
    assert smoothed([1.0] * 7, 3) == [1.0] * 7
    assert picture.alt == "The loss of 1 runs over their steps: one ends at 0.00."


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_breaks_ends_in_a_cross_at_that_step(bad):
    picture = curves({"fine": [2.0, 1.0, 1.0], "broken": [2.0, 1.0, bad]}, window=1)
    cross = next(line for line in picture.figure.axes[0].lines if line.get_marker() == "X")
    assert ([*cross.get_xdata()], [*cross.get_ydata()]) == ([3], [1.0])
    assert [*lines(picture)["broken: breaks in step 3"].get_ydata()] == [2.0, 1.0]
    assert "broken breaks in step 3" in picture.alt
    assert first_nonfinite_step([1.0, 2.0]) is None
    assert "breaks in step 1" in curves({"nothing": [bad] * 3}).alt


REFUSALS = {
    "no run": (lambda: curves({}), ValueError, "expected at least one run with losses"),
    "no losses": (lambda: curves({"empty": []}), ValueError, "expected at least one run with losses"),
    "no step": (lambda: curves({"one": [1.0]}, window=0), ValueError, "expected a window of at least 1 step, found 0"),
}


@refusals(REFUSALS)
def test_what_is_no_curve_is_refused(call, error, words):
    refused(call, error, words)
