"""The pictures of batches show every text once, and say of each way what it wastes."""

import itertools

import pytest

from memlab.book.batches import draw_batches, explore_batches
from memlab.book.epochs import BUDGETS, ROW_TOKENS, WAYS, shapes, waste
from memlab.book.workloads import lengths
from tests.tiers import some

PLACES = list(itertools.product(WAYS, BUDGETS.values()))


@some("way, budget", PLACES, keep=5)
def test_every_batch_holds_its_text_and_an_epoch_all_of_it(way, budget):
    batches = shapes(way, budget)
    assert sum(text for *_, text in batches) == sum(lengths())
    assert all(0 < text <= rows * tokens for rows, tokens, text in batches)
    if way != "packed":
        assert sum(rows for rows, *_ in batches) == len(lengths())
    if way != "fixed size":
        assert max(rows * tokens for rows, tokens, _ in batches) <= budget


def test_a_fixed_size_has_the_budget_on_average_and_exceeds_it():
    batches = shapes("fixed size", 8192)
    mean = sum(text for *_, text in batches[:-1]) / len(batches[:-1])
    assert mean == pytest.approx(8192, rel=0.05)
    assert max(rows * tokens for rows, tokens, _ in batches) > 10 * 8192


def test_packed_rows_waste_at_most_two_percent_and_sorting_helps():
    found = [waste(shapes(way, 8192)) for way in WAYS]
    assert found[-1] <= 0.02
    assert sorted(found, reverse=True) == found


def test_waste_is_the_padding_in_the_rectangles():
    assert waste([(2, 10, 15), (1, 20, 15)]) == 0.25


@some("way, budget", PLACES, keep=5)
def test_a_bar_for_each_batch_text_below_and_padding_above(way, budget):
    picture, batches = draw_batches(way, budget), shapes(way, budget)
    text, padding = picture.figure.axes[0].containers
    assert [round(bar.get_height()) for bar in text] == [tokens for *_, tokens in batches]
    tops = [round(bar.get_y() + bar.get_height()) for bar in padding]
    assert tops == [rows * tokens for rows, tokens, _ in batches]
    assert f"{len(batches)} batches" in picture.alt and f"{waste(batches):.1%} padding" in picture.alt


def test_the_explorer_starts_at_a_fixed_size_and_reaches_every_way():
    explorer = explore_batches()
    assert explorer.start == {"way": "fixed size", "budget": 8192}
    assert {tuple(values.values()) for values in explorer.grid()} == set(PLACES)
    assert all(rows * ROW_TOKENS <= 8192 for rows, *_ in shapes("packed", 8192))
