"""The picture of which axis comes first: its bars, columns and order are what the formulas of the axes say."""

import itertools

import pytest

from memlab.book.axes_pictures import (
    CARDS,
    LAYERS,
    MOST_ROWS,
    NODES,
    RANKS,
    TEXTS,
    TOKENS,
    WIDTHS,
    all_ways,
    axes_table,
    draw_axes,
    explore_axes,
    of_sizes,
    sorted_ways,
)
from memlab.book.mesh_pictures import ORDERS
from memlab.book.style import is_sentence
from memlab.pipeline_parallelism import axis_seconds
from memlab.units import GiB, format_bytes, parse_bytes

PNG = b"\x89PNG"
ORDER = ("data", "pipeline", "tensor")


def test_those_that_fit_come_first_and_the_fastest_of_them_at_the_top():
    found = sorted_ways(ranks=16, card="16 GiB")
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    assert any(fits)
    assert not all(fits)
    for one in found:
        assert one.fits == (one.way.nbytes <= parse_bytes("16 GiB"))
    for group in (True, False):
        seconds = [one.step_seconds for one in found if one.fits == group]
        assert seconds == sorted(seconds)


def test_two_tensor_ranks_win_by_time_and_waiting_for_gradients_rules_out_data_parallelism():
    """What chapter 15 says of the sliders' start."""
    axes = lambda one: (one.way.data, one.way.pipeline, one.way.tensor)  # noqa: E731
    found = sorted_ways()
    assert any(one.fits and one.way.tensor == 1 for one in found)
    assert axes(found[0]) == (1, 8, 2)
    by_axes = {axes(one): one for one in found}
    assert by_axes[1, 16, 1].way.bubble == pytest.approx(2 * by_axes[1, 8, 2].way.bubble, rel=0.05)
    fitting = [one for one in found if one.fits]
    assert axes(min(fitting, key=lambda one: one.step_seconds - one.axis_seconds["data"])) == (8, 1, 2)
    assert all(way > 1 for way in axes(sorted_ways(8192, ranks=64, card="16 GiB")[0]))
    outermost = [order for order in ORDERS.values() if order[0] == "tensor"]
    assert outermost and all(sorted_ways(order=order)[0].way.tensor == 1 for order in outermost)


def test_without_a_bubble_and_without_messages_a_step_is_its_flops():
    (alone,) = sorted_ways(1024, 16, 32, ranks=1)
    assert alone.step_seconds == pytest.approx(6 * of_sizes(1024, 16).parameters * 32 * TOKENS / 400e12)


def test_the_tensor_axis_is_fastest_as_the_innermost():
    for way in all_ways(4096, 32, 64, 16):
        if way.tensor > 1 and way.tensor <= 8:
            inside = axis_seconds(way, ("data", "pipeline", "tensor"), 8)["tensor"]
            assert all(axis_seconds(way, order, 8)["tensor"] >= inside for order in ORDERS.values())


def test_the_bars_are_the_fullest_ranks_bytes_and_the_alt_text_names_the_best_way():
    picture = draw_axes(2048, 24, 64, 8, 4, ORDER, "16 GiB")
    found = sorted_ways(2048, 24, 64, 8, 4, ORDER, "16 GiB")
    axes = picture.figure.axes[0]
    assert sum(bar.get_width() for bar in axes.patches) * GiB == pytest.approx(
        sum(one.way.nbytes for one in found[:MOST_ROWS])
    )
    names = [label.get_text() for label in axes.get_yticklabels()]
    shown = found[:MOST_ROWS]
    assert names == [f"{one.way.data} · {one.way.pipeline} · {one.way.tensor}" for one in shown]
    best = found[0].way
    assert (
        f"the fastest of them is data {best.data}, tensor {best.tensor}, pipeline {best.pipeline}: "
        f"{format_bytes(best.nbytes)} held" in picture.alt
    )
    texts = [text.get_text() for text in axes.texts]
    assert sum("too large" in text for text in texts) == sum(not one.fits for one in shown) == 1
    assert texts.count("◄ best") == 1
    assert picture.png().startswith(PNG)


def test_where_nothing_fits_no_way_is_called_the_best():
    picture = draw_axes(8192, 48, 32, 2, card="16 GiB")
    assert "None fits 16.0 GiB; the least is" in picture.alt
    assert "◄ best" not in [text.get_text() for text in picture.figure.axes[0].texts]
    assert picture.png().startswith(PNG)


def test_every_slider_of_the_axes_can_be_moved():
    one = explore_axes()
    assert one.start == {
        "width": 4096,
        "layers": 32,
        "texts": 64,
        "ranks": 16,
        "node": 8,
        "order": ORDER,
        "card": "80 GiB",
    }
    for name, labels in one.choices.items():
        ends = list(labels.values())[:: max(1, len(labels) - 1)]
        for value in ends if name != "order" else labels.values():
            assert is_sentence(one.at(**one.start | {name: value}).alt)


def test_every_model_batch_and_number_of_ranks_has_a_way_to_be_divided():
    for width, layers, texts, ranks in itertools.product(WIDTHS[::3], LAYERS[::3], TEXTS[::3], RANKS):
        found = sorted_ways(width, layers, texts, ranks, NODES[0], ("tensor", "data", "pipeline"), CARDS[0])
        assert {one.way.data * one.way.tensor * one.way.pipeline for one in found} == {ranks}


def test_the_table_has_all_ways_in_their_order():
    rows = axes_table(ranks=16, card="16 GiB").rows
    found = sorted_ways(ranks=16, card="16 GiB")
    sizes = [(one.way.data, one.way.pipeline, one.way.tensor, one.way.micro_batches) for one in found]
    assert [tuple(row[:4]) for row in rows] == sizes
    assert [row[5] == "" for row in rows] == [one.fits for one in found]
    with pytest.raises(ValueError, match="node"):
        axes_table(node=0)
