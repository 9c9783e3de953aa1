"""Numbers as pictures: the bits, neighbours and shares that are drawn are those that torch's own casts give."""

import itertools
import math
import re

import pytest
import torch
from matplotlib.transforms import Bbox

from memlab.book.numbers import (
    HISTOGRAM_FORMATS,
    SCALE_POWERS,
    VALUES,
    Magnitudes,
    explore_number,
    formats_table,
    formula,
    gradient_histogram,
    histogram_picture,
    number_picture,
    share,
)
from memlab.book.workloads import GPT, text_batch
from memlab.mixed_precision import FORMATS, bits
from memlab.mixed_precision.formats import FATES
from tests.harness import refusals, refused
from tests.memory_timeline_helpers import one_thread  # noqa: F401
from tests.tiers import some

pytest.importorskip("ipywidgets")

CASTS = {name: format for name, format in FORMATS.items() if format.dtype is not None}
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module")
def gradients():
    """Of a GPT that has learned from real text for a few steps: name → gradient."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        optimizer.step()
        optimizer.zero_grad()
        model(*text_batch(8, 64, seed=step)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def cast(value, format):
    """A value in torch's dtype for a format; what E4M3 has no number for is its max."""
    single = torch.tensor(value, dtype=torch.float32)
    return (single if format.infinities else single.clamp(-448, 448)).to(format.dtype)


def texts(figure):
    """Every text in a figure with its place in pixels."""
    artists = [*figure.texts, *itertools.chain(*(axes.texts for axes in figure.axes))]
    for axes in figure.axes:
        artists += [axes._left_title, axes.xaxis.label, axes.yaxis.label]
        if axes.axison:
            artists += [*axes.get_xticklabels(), *axes.get_yticklabels()]
    found = [(artist.get_text(), artist.get_window_extent()) for artist in artists if artist.get_text()]
    # A text that begins with an empty line stands on the second of two.
    return [(text, Bbox([box.min, [box.x1, box.y0 + box.height / (1 + (text[0] == "\n"))]])) for text, box in found]


def assert_every_text_can_be_read(figure):
    found = texts(figure)
    for (text, box), (other, another) in itertools.combinations(found, 2):
        assert not box.overlaps(another), (text, other)
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in found:
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text


def test_the_table_has_every_formats_sizes_and_ends():
    rows = {row[0]: row[1:] for row in formats_table().rows}
    assert list(rows) == list(FORMATS)
    for name, format in CASTS.items():
        info = torch.finfo(format.dtype)
        size, nbytes, largest, *powers = rows[name]
        total, sign, exponent, mantissa = map(int, re.findall(r"\d+", size))
        assert (total, nbytes) == (info.bits, info.bits // 8) and total == sign + exponent + mantissa
        assert float(largest.replace(",", "")) == pytest.approx(info.max, rel=1e-3)
        for text, truth in zip(powers, (info.smallest_normal, format.smallest_subnormal, info.eps), strict=True):
            power, decimal = re.fullmatch(r"2\^(-\d+) = (.*)", text).groups()
            assert 2.0 ** int(power) == truth and float(decimal) == pytest.approx(truth, rel=5e-3)
    assert rows["TF32"][:2] == ["19 = 1 + 8 + 10", 4]


@some("part", range(7), keep=1)
def test_wherever_the_controls_stand_the_bits_are_those_of_torchs_cast(part):
    sliders = explore_number()
    labels = {value: label for label, value in VALUES.items()}
    assert len(list(sliders.grid())) == len(VALUES) * len(FORMATS) <= 150
    for asked in list(sliders.grid())[part::7]:
        picture = sliders.at(**asked)
        assert picture.png().startswith(b"\x89PNG")
        assert_every_text_can_be_read(picture.figure)
        assert picture.figure.get_size_inches()[0] <= 8
        assert f"of {labels[asked['value']]}: " in picture.alt and f". In {asked['format']} it " in picture.alt
        for name, format in CASTS.items():
            number = int(cast(asked["value"], format).view(VIEWS[format.nbytes])) % 2**format.bits
            written = f"{number:0{format.bits}b}"
            fields = written[0], written[1 : 1 + format.exponent_bits], written[1 + format.exponent_bits :]
            assert f"{name} {' '.join(fields)} = " in picture.alt


def test_a_digit_is_drawn_for_every_bit():
    axes = number_picture(0.1, "FP16").figure.axes[0]
    drawn = {line.get_marker(): len(line.get_xdata()) for line in axes.lines}
    written = "".join(n.sign + n.exponent + n.mantissa for n in (bits(0.1, name) for name in FORMATS))
    assert drawn == {"$0$": written.count("0"), "$1$": written.count("1")}


def ruler(value, format):
    """The ruler's ticks as place → text, and where its blue stretch, its dot and the value's mark are."""
    axes = number_picture(value, format).figure.axes[1]
    labels = [tick.get_text().strip() for tick in axes.get_xticklabels()]
    ticks = dict(zip(axes.get_xticks().tolist(), labels, strict=True))
    (stretch,), (dot, mark) = axes.patches, axes.lines
    stretch = stretch.get_x(), stretch.get_x() + stretch.get_width()
    return ticks, stretch, dot.get_xdata()[0], (mark.get_xdata()[0], mark.get_marker())


def test_the_ruler_has_the_neighbours_and_the_value_between_them_in_ulps():
    for value in (0.1, 1 / 3, 3.14159, -2.5, 2e-7):
        ticks, stretch, dot, (mark, _) = ruler(value, "FP16")
        number = torch.tensor(value).half()
        up, down = (torch.nextafter(number, torch.tensor(end).half()).item() for end in (math.inf, -math.inf))
        ulp = up - number.item()
        assert {0: f"{number.item():.6g}", 1: f"{up:.6g}", -1: f"{down:.6g}"}.items() <= ticks.items()
        assert (*stretch, dot) == (-0.5, 0.5, 0) and mark == pytest.approx((value - number.item()) / ulp)


def test_below_a_power_of_two_the_numbers_lie_twice_as_close():
    ticks, stretch, *_ = ruler(1.0, "BF16")
    assert sorted(ticks) == [-1, -0.5, 0, 1, 2] and stretch == (-0.25, 0.5)
    for name in ("FP32", "BF16", "FP8 E4M3"):
        figure = number_picture(2.0**-5, name).figure
        figure.draw_without_rendering()
        assert_every_text_can_be_read(figure)


def test_past_the_last_number_lies_infinity_and_in_e4m3_nothing_at_all():
    ticks, stretch, dot, mark = ruler(65_520.0, "FP16")
    assert ticks == {-2.0: "65440", -1.0: "65472", 0.0: "65504", 1: "infinity"}
    assert stretch[0] == 0.5 and dot == 1 and mark == (0.5, "v")
    assert ruler(-1e6, "FP16")[2:] == (-1, (-2.5, "<")) and ruler(1e6, "FP16")[2:] == (1, (2.5, ">"))
    ticks, stretch, dot, mark = ruler(464.5, "FP8 E4M3")
    assert list(ticks) == [-1, -2, 0] and stretch == (-0.5, 2.6) and dot == 0 and mark[0] == pytest.approx(16.5 / 32)
    assert ruler(448.0, "FP8 E4M3")[1] == (-0.5, 2.6) and ruler(65_504.0, "FP16")[1] == (-0.5, 0.5)


@pytest.mark.parametrize(
    ("value", "format", "words"),
    [
        (1e-10 * 1024, "FP16", "becomes 1.19209e-07, a subnormal number, 16 % off; an ulp is 5.96e-08 here"),
        (1e-10, "FP16", "is lost: all up to 2.98e-08, half the smallest subnormal number, becomes 0"),
        (65_520, "FP16", "overflows: the largest number is 65,504, and from 65,520 on all becomes infinity"),
        (500, "FP8 E4M3", "is clipped to 448, the largest number, 10 % off: there is no infinity"),
        (464, "FP8 E4M3", "becomes 448, a normal number, 3.4 % off; an ulp is 32 here"),
        (0.0, "BF16", "becomes 0, the number 0, exact; an ulp is 9.18e-41 here"),
        (1.0, "TF32", "becomes 1, a normal number, exact; an ulp is 0.000977 here"),
    ],
)
def test_the_sentence_says_what_became_of_the_value(value, format, words):
    assert number_picture(value, format).alt.endswith(f"In {format} it {words}.")


@pytest.mark.parametrize("name", FORMATS)
def test_the_formula_comes_out_at_the_value(name):
    for value in (0.1, -2.5, 448.0, FORMATS[name].smallest_subnormal * 3, 0.0):
        number = bits(value, name)
        sign, field, bias, mantissa = re.match(r"([+−]) 2\^\((\d+) − (\d+)\) × ([01.]+)₂ = ", formula(number)).groups()
        size = int(mantissa.replace(".", ""), 2) * 2.0 ** (int(field) - int(bias) - len(mantissa) + 2)
        assert (-size if sign == "−" else size) == number.value
    assert formula(bits(1e39, "FP16")) == "every exponent bit is 1, and the mantissa is 0"
    assert formula(bits(math.nan, "FP16")) == "every exponent bit is 1, and the mantissa is not 0"


@some("part", range(7), keep=1)
def test_the_shares_under_the_sliders_are_what_casting_the_gradients_shows(gradients, part):
    sliders = gradient_histogram(gradients.values())
    every = torch.cat([gradient.flatten() for gradient in gradients.values()])
    nonzero = every[every != 0]
    assert len(list(sliders.grid())) == len(HISTOGRAM_FORMATS) * len(SCALE_POWERS) <= 60
    for asked in list(sliders.grid())[part::7]:
        picture = sliders.at(**asked)
        assert picture.png().startswith(b"\x89PNG")
        assert_every_text_can_be_read(picture.figure)
        format, scaled = FORMATS[asked["format"]], nonzero * 2.0 ** asked["scale_power"]
        left = scaled.clamp(-format.max, format.max) if not format.infinities else scaled
        left = left.to(format.dtype).float().abs()
        over = left.isinf() if format.infinities else scaled.abs() > 464
        zero, normal = left == 0, left >= format.smallest_normal
        counts = [int(kind.sum()) for kind in (zero, ~zero & ~normal, normal & ~over, over)]
        parts = ", ".join(f"{share(n, len(nonzero))} {fate}" for fate, n in zip(FATES, counts, strict=True))
        assert f"times 2^{asked['scale_power']}, over the ranges of {asked['format']}: {parts}. " in picture.alt
        zeros = share(len(every) - len(nonzero), len(every))
        assert picture.alt.endswith(f"Beside them, {zeros} of the {len(every):,} are exactly zero.")


def test_the_bars_are_powers_of_two_and_move_by_one_for_each_power_of_the_scale():
    values = torch.tensor([1.0, 1.5, 1.9999, 2.0, -0.25, 0.0, 2.0**-20, -(2.0**-20)])
    bars = {}
    for power in (0, 2):
        axes = histogram_picture(Magnitudes(values), "FP16", power, (-40, 30)).figure.axes[0]
        (steps,) = (patch for patch in axes.patches if hasattr(patch, "get_data"))
        heights, edges, _ = steps.get_data()
        bars[power] = {edge: height for height, edge in zip(heights, edges, strict=False) if height}
    assert bars[0] == pytest.approx({-20: 200 / 7, -2: 100 / 7, 0: 300 / 7, 1: 100 / 7})
    assert bars[2] == pytest.approx({power + 2: height for power, height in bars[0].items()})


def test_no_scale_moves_a_bar_off_the_axis_or_a_label_out_of_the_figure():
    sliders = gradient_histogram({"small": torch.tensor([2.0**-40]), "large": torch.tensor([2.0**9])})
    for name, power in itertools.product(("small", "large"), (SCALE_POWERS[0], SCALE_POWERS[-1])):
        axes = sliders.at(gradients_of=name, format="FP16", scale_power=power).figure.axes[0]
        (steps,) = (patch for patch in axes.patches if hasattr(patch, "get_data"))
        edges, (left, right) = steps.get_data().edges, axes.get_xlim()
        assert left < edges[0] and edges[-1] < right
    for power, format in itertools.product((-18, -11, -10), HISTOGRAM_FORMATS):  # a band that is hardly there
        sliders = gradient_histogram(torch.tensor([2.0**-40, 2.0**power]))
        assert_every_text_can_be_read(sliders.at(format=format, scale_power=0).figure)


def test_the_bands_meet_where_a_formats_ranges_do():
    axes = histogram_picture(Magnitudes(torch.ones(1)), "FP16", 0, (-40, 30)).figure.axes[0]
    edges = [line.get_xdata()[0] for line in axes.lines]
    assert edges == [-40, -25, -14, math.log2(65_520)]
    words = ["lost to zero\nnone", "subnormal\nnone", "normal\nall", "overflow\nnone"]
    assert [text.get_text() for text in axes.texts] == words
    values = torch.tensor([2.0**-15] + [1.0] * 999)
    axes = histogram_picture(Magnitudes(values), "FP16", 0, (-40, 30)).figure.axes[0]
    assert [text.get_text() for text in axes.texts[1:3]] == ["subnormal\n< 1 %", "normal\n> 99 %"]


def test_several_kinds_of_gradients_get_a_button_each_and_share_one_axis():
    kinds = {
        "weights": torch.full((3,), 2.0**-10),
        "logits": [torch.full((2,), 2.0**-20).to_sparse(), None, torch.zeros(2)],
    }
    sliders = gradient_histogram(kinds, format="BF16", scale_power=10)
    assert list(sliders.choices) == ["gradients_of", "format", "scale_power"]
    assert sliders.start == {"gradients_of": "weights", "format": "BF16", "scale_power": 10}
    first, second = (sliders.at(gradients_of=name, format="FP16", scale_power=0) for name in kinds)
    assert first.figure.axes[0].get_xlim() == second.figure.axes[0].get_xlim()
    assert "gradients of weights" in first.alt and "all normal" in first.alt
    assert "gradients of logits" in second.alt and "all subnormal" in second.alt and "50 % of the 4 " in second.alt


def test_only_zeros_only_nans_and_gradients_that_are_no_more_are_drawn_too():
    for values, words in [
        (torch.zeros(3), "all of the 3 are exactly zero"),
        (torch.tensor([math.nan, math.inf]), "all overflow"),
        (torch.tensor([1e-45, 1e-300], dtype=torch.float64), "all lost to zero"),
    ]:
        picture = gradient_histogram(values).picture
        assert words in picture.alt and picture.png().startswith(b"\x89PNG")
        bars = [patch for patch in picture.figure.axes[0].patches if hasattr(patch, "get_data")]
        assert len(bars) == ("lost to zero" in words)


def test_a_share_never_rounds_to_nothing_or_to_all():
    expected = {0: "none", 5: "less than 1 %", 6: "1 %", 500: "50 %", 994: "99 %", 999: "more than 99 %", 1000: "all"}
    assert {n: share(n, 1000) for n in expected} == expected
    assert share(0, 0) == "none" and share(1, 1000, "<") == "< 1 %"


NO_GRADIENTS = "expected a tensor of gradients, or several; found none: call backward("
REFUSALS = {
    "infinity": (lambda: number_picture(math.inf, "FP16"), ValueError, "expected a finite value, which lies between"),
    "FP4": (lambda: number_picture(1.0, "FP4"), ValueError, "expected a format among FP32, TF32"),
    "another value": (lambda: explore_number("7"), ValueError, "expected a value among 1e-45; 3e-39; …found '7'"),
    "a start at FP4": (lambda: explore_number(format="FP4"), ValueError, "expected format to start at one of"),
    "no gradient": (lambda: gradient_histogram({"weights": [None]}), ValueError, NO_GRADIENTS),
    "no number": (lambda: gradient_histogram(torch.empty(0)), ValueError, NO_GRADIENTS),
    "no name": (lambda: gradient_histogram({}), ValueError, "expected gradients by name, …found an empty dict"),
}


@refusals(REFUSALS)
def test_what_cannot_be_drawn_is_refused(call, error, words):
    refused(call, error, words)
