"""The picture of memory against recomputation: what a budget chooses, and what is said of it."""

import pytest

from memlab.book.tradeoff import MOST_BUDGETS, Way, draw_tradeoff, explore_tradeoff

MiB = 2**20
CURVE = [Way(10 * MiB, 0.0, (1, 1, 1)), Way(6 * MiB, 0.4, (2, 1, 1)), Way(3 * MiB, 1.5, (3, 2, 1))]


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (10 * MiB, "allows 10.0 MiB with 0.0%; its stages' forwards run 1, 1, 1 times"),
        (10 * MiB - 1, "allows 6.0 MiB with 40.0%; its stages' forwards run 2, 1, 1 times"),
        (6 * MiB, "allows 6.0 MiB with 40.0%"),
        (3 * MiB, "allows 3.0 MiB with 150.0%"),
    ],
)
def test_a_budget_chooses_the_least_recomputation_below_it(budget, says):
    assert says in draw_tradeoff({"optimal": CURVE}, budget=budget).alt


def test_a_budget_below_every_way_and_a_curve_without_one_are_refused():
    with pytest.raises(ValueError, match=r"at least 3,145,728 bytes, the lowest peak there is; found 5"):
        draw_tradeoff({"optimal": CURVE}, budget=5)
    for nothing in ({}, {"optimal": []}):
        with pytest.raises(ValueError, match="at least one way in each curve"):
            draw_tradeoff(nothing)


def test_of_equal_recomputation_the_lower_peak_is_chosen_and_peaks_that_read_alike_are_one_budget():
    two = [Way(5 * MiB, 0.4), Way(4 * MiB, 0.4)]
    assert "allows 4.0 MiB" in draw_tradeoff({"optimal": two}, budget=8 * MiB).alt
    alike = explore_tradeoff({"optimal": [Way(100 * MiB + n, 1 / (1 + n)) for n in range(3)]})
    assert list(alike.choices["budget"].values()) == [100 * MiB]


def test_only_the_first_curve_answers_to_the_budget_and_marks_are_named():
    other = [Way(1 * MiB, 0.0)]
    alt = draw_tradeoff({"optimal": CURVE, "other": other}, {"every block": Way(5 * MiB, 1.0)}, budget=3 * MiB).alt
    assert "allows 3.0 MiB with 150.0%" in alt
    assert "every block: 5.0 MiB with 100.0%" in alt


def test_without_a_budget_there_is_no_strip_and_nothing_is_chosen():
    assert "allows" not in draw_tradeoff({"optimal": CURVE}).alt
    assert len(draw_tradeoff({"optimal": CURVE}).figure.axes) == 1
    assert len(draw_tradeoff({"optimal": CURVE}, budget=3 * MiB).figure.axes) == 2


def test_the_slider_has_every_peak_once_and_not_too_many_and_begins_where_it_is_told():
    one = explore_tradeoff({"optimal": CURVE}, start=7 * MiB)
    assert list(one.choices["budget"].values()) == [3 * MiB, 6 * MiB, 10 * MiB]
    assert one.start == {"budget": 6 * MiB}
    assert explore_tradeoff({"optimal": CURVE}, start=1).start == {"budget": 3 * MiB}
    many = explore_tradeoff({"optimal": [Way(n * MiB, 1 / n) for n in range(1, 500)]})
    budgets = list(many.choices["budget"].values())
    assert len(budgets) <= MOST_BUDGETS and budgets[0] == MiB and budgets[-1] == 499 * MiB
    for values in one.grid():
        assert one.at(**values).png().startswith(b"\x89PNG")
