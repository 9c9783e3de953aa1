"""Pictures of a mesh, of layers on stages and of which axis comes first: what they draw is what the library says."""

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
    axes_table,
    draw_axes,
    explore_axes,
    of_sizes,
    sorted_ways,
)
from memlab.book.mesh_pictures import (
    MOST_RANKS,
    ORDERS,
    between_nodes,
    draw_balance,
    draw_mesh,
    mesh_links,
    stage_costs,
)
from memlab.book.style import is_sentence
from memlab.pipeline_parallelism import StageCost
from memlab.units import GiB, format_bytes, parse_bytes
from tests.harness import refusals, refused

PNG = b"\x89PNG"
CUBE = {"data": 2, "pipeline": 2, "tensor": 2}
ORDER = ("data", "pipeline", "tensor")
REFUSED = {
    f"expected a mesh of 2 to {MOST_RANKS} ranks to draw, found 64": lambda: draw_mesh({"data": 64}),
    "expected node of at least 1": lambda: draw_mesh(CUBE, 0),
    "cuts of the same layers": lambda: draw_balance({"one": [range(2)], "other": [range(3)]}, [1] * 3, [1] * 3),
    "expected cuts of the same layers": lambda: draw_balance({}, [], []),
    "node of at least 1": lambda: axes_table(node=0),
}


@refusals({words: (call, ValueError, words) for words, call in REFUSED.items()})
def test_what_cannot_be_drawn_is_refused(call, error, words):
    refused(call, error, words)


def test_data_and_tensor_talk_in_rings_a_pipeline_in_a_row_and_the_order_decides_which_leaves_the_node():
    assert mesh_links({"data": 4}, "data") == [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert mesh_links({"pipeline": 4}, "pipeline") == [(0, 1), (1, 2), (2, 3)]
    assert mesh_links({"tensor": 2}, "tensor") == [(0, 1)]
    for order in ORDERS.values():
        axes = dict.fromkeys(order, 2)
        assert [between_nodes(mesh_links(axes, name), 4) for name in order] == [4, 0, 0]  # only the outermost does


COSTS = [StageCost(0.001, 0.002, saved_bytes=2 * 2**20, static_bytes=(4 + 9 * (i == 0)) * 2**20) for i in range(6)]
SECONDS = [cost.forward_seconds + cost.backward_seconds for cost in COSTS[:-1]] + [0.008]
CUTS = {"by bytes": [range(1), range(1, 3), range(3, 6)], "by time": [range(3), range(3, 5), range(5, 6)]}


def nbytes(layer, stage):
    return COSTS[layer].static_bytes + (3 - stage) * COSTS[layer].saved_bytes


def test_the_bars_are_the_costs_and_the_words_name_the_dearest_stages():
    found = stage_costs(nbytes, CUTS["by time"])
    assert list(map(len, found)) == [3, 2, 1] and found[0][0] == 19 * 2**20
    assert stage_costs(SECONDS, CUTS["by time"]) == [SECONDS[:3], SECONDS[3:5], SECONDS[5:]]
    picture = draw_balance(CUTS, nbytes, SECONDS)
    for axes, costs, scale in zip(picture.figure.axes, (nbytes, SECONDS), (1 / 2**20, 1e3), strict=True):
        totals = [sum(stage) for cut in CUTS.values() for stage in stage_costs(costs, cut)]
        frames = [bar.get_height() for bar in axes.patches if not bar.get_fill()]
        assert frames == pytest.approx([scale * total for total in totals])
        assert sum(bar.get_height() for bar in axes.patches if bar.get_fill()) == pytest.approx(sum(frames))
        assert sum(not bar.get_fill() and bar.get_linewidth() == 2 for bar in axes.patches) == len(CUTS)
    for name, cut in CUTS.items():
        most = format_bytes(max(map(sum, stage_costs(nbytes, cut))))
        assert f"{name}, stage 0 with {most}" in picture.alt
    assert "by time, stage 0 with 9 ms" in picture.alt and "by bytes, stage 2 with 14 ms" in picture.alt
    assert picture.png().startswith(PNG)


def test_those_that_fit_come_first_and_the_fastest_of_them_at_the_top_of_the_table():
    found = sorted_ways(ranks=16, card="16 GiB")
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True) and any(fits) and not all(fits)
    assert fits == [one.way.nbytes <= parse_bytes("16 GiB") for one in found]
    for group in (True, False):
        seconds = [one.step_seconds for one in found if one.fits == group]
        assert seconds == sorted(seconds)
    rows = axes_table(ranks=16, card="16 GiB").rows
    sizes = [(one.way.data, one.way.pipeline, one.way.tensor, one.way.micro_batches) for one in found]
    assert [tuple(row[:4]) for row in rows] == sizes
    assert [row[5] == "" for row in rows] == fits
    (alone,) = sorted_ways(1024, 16, 32, ranks=1)  # without a bubble and messages a step is its FLOPs
    assert alone.step_seconds == pytest.approx(6 * of_sizes(1024, 16).parameters * 32 * TOKENS / 400e12)


def test_the_bars_are_the_fullest_ranks_bytes_and_the_alt_text_names_the_best_way_if_one_fits():
    picture = draw_axes(2048, 24, 64, 8, 4, ORDER, "16 GiB")
    found = sorted_ways(2048, 24, 64, 8, 4, ORDER, "16 GiB")
    axes, shown, best = picture.figure.axes[0], found[:MOST_ROWS], found[0].way
    held = sum(one.way.nbytes for one in shown)
    assert sum(bar.get_width() for bar in axes.patches) * GiB == pytest.approx(held)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"{one.way.data} · {one.way.pipeline} · {one.way.tensor}" for one in shown]
    said = f"the fastest of them is data {best.data}, tensor {best.tensor}, pipeline {best.pipeline}: "
    assert f"{said}{format_bytes(best.nbytes)} held" in picture.alt
    texts = [text.get_text() for text in axes.texts]
    assert sum("too large" in text for text in texts) == sum(not one.fits for one in shown) == 1
    assert texts.count("◄ best") == 1 and picture.png().startswith(PNG)
    picture = draw_axes(8192, 48, 32, 2, card="16 GiB")
    assert "None fits 16.0 GiB; the least is" in picture.alt
    assert "◄ best" not in [text.get_text() for text in picture.figure.axes[0].texts]


def test_every_slider_of_the_axes_can_be_moved_and_every_size_can_be_divided():
    one = explore_axes()
    assert list(one.start.values()) == [4096, 32, 64, 16, 8, ORDER, "80 GiB"]
    for name, labels in one.choices.items():
        for value in list(labels.values())[:: max(1, len(labels) - 1)]:
            assert is_sentence(one.at(**one.start | {name: value}).alt)
    for width, layers, texts, ranks in itertools.product(WIDTHS[::3], LAYERS[::3], TEXTS[::3], RANKS[::2]):
        found = sorted_ways(width, layers, texts, ranks, NODES[0], ("tensor", "data", "pipeline"), CARDS[0])
        assert {one.way.data * one.way.tensor * one.way.pipeline for one in found} == {ranks}
