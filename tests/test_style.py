"""Figures are read in black and white: areas part by grey or hatching, lines by dashes, and no label hides its bar."""

import io
import re

import pytest

from memlab.book.curves import curves
from memlab.book.figures import STACKED, bars, compare
from memlab.book.style import COLOURS, HATCHES, LINE_COLOURS, Picture, canvas, draw_budget
from memlab.memory_timeline import CATEGORIES, Event, Line, Storage, Timeline
from memlab.units import GiB, KiB


def one_storage():
    line = Line("f", "x = y")
    return Timeline(
        [Storage(0, KiB, "activation", (256,), "float32", "cpu", "add", "forward", line, "", "", "saved")],
        [Event(0, KiB, "add", "forward", line), Event(0, -KiB, "add", "forward", line)],
    )


def test_categories_are_the_meters_and_each_has_a_colour_of_its_own():
    assert set(COLOURS) == set(CATEGORIES) and len(set(COLOURS.values())) == len(COLOURS)
    assert set(HATCHES) <= set(COLOURS) and len(set(HATCHES.values())) == len(HATCHES)


def test_any_two_areas_differ_in_hatching_or_by_a_tenth_of_the_way_from_black_to_white():
    looks = []
    for category, colour in STACKED.items():
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        looks.append((0.299 * red + 0.587 * green + 0.114 * blue, HATCHES.get(category)))
    for number, (one, hatch) in enumerate(looks):
        for other, other_hatch in looks[:number]:
            assert hatch != other_hatch or abs(one - other) > 25.5


@pytest.mark.parametrize(
    "draw",
    [
        lambda names: compare({name: one_storage() for name in names}),
        lambda names: curves({name: [2.0, 1.0] for name in names}),
    ],
)
def test_as_many_lines_as_there_are_colours_have_other_dashes_each(draw):
    """Read from an SVG, where a line says its dashes' lengths in points; a solid line has none."""
    file = io.StringIO()
    draw([str(number) for number in range(len(LINE_COLOURS))]).figure.savefig(file, format="svg")
    dashes = re.findall(r"stroke-dasharray: ([\d., ]+)", file.getvalue())
    assert len({tuple(round(float(length)) for length in each.split(",")) for each in dashes}) == len(LINE_COLOURS) - 1


def test_a_bars_sum_stands_beside_it_and_hides_no_end_of_it():
    picture = bars({"a": {"parameter": 3 * GiB}, "b": {"parameter": GiB, "temporary": 5 * GiB}})
    picture.png()
    axes = picture.figure.axes[0]
    ends = {}
    for bar in axes.patches:
        ends[bar.get_y()] = max(ends.get(bar.get_y(), 0), bar.get_window_extent().x1)
    sums = [text for text in axes.texts if text.get_fontweight() == "bold"]
    assert [text.get_text() for text in sums] == ["3.0", "6.0"]
    for text, end in zip(sums, ends.values(), strict=True):
        assert text.get_bbox_patch().get_window_extent().x0 > end


def test_a_budgets_name_stands_above_its_line():
    figure, axes = canvas(4, 3)
    axes.set_ylim(0, 2)
    draw_budget(axes, GiB, GiB)
    Picture(figure, "A budget line across empty axes.").png()
    name = axes.texts[0].get_bbox_patch().get_window_extent()
    assert name.y0 > axes.transData.transform((0, 1))[1] + 1
