"""Numbers as pictures: one value in the bits of every format, and what a format leaves of many gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from torch import Tensor

from memlab.book.interactive import Interactive
from memlab.book.style import LABEL_SIZE, LINE_COLOURS, SMALL_SIZE, TITLE_SIZE, Picture, canvas, finish
from memlab.book.tables import Table
from memlab.mixed_precision import FORMATS, Bits, Format, bits, fates
from memlab.mixed_precision.formats import FATES, number_format

# ---- the formats side by side


def formats_table() -> Table:
    """Each format's bits and bytes, its largest and smallest numbers, and the distance from 1 to the next number."""
    columns = ["format", "bits", "bytes", "largest", "smallest normal", "smallest subnormal", "epsilon"]
    rows = [
        (
            format.name,
            f"{format.bits} = 1 + {format.exponent_bits} + {format.mantissa_bits}",
            format.nbytes,
            f"{format.max:,.0f}" if format.max < 1e6 else f"{format.max:.3e}",
            *(_power(number) for number in (format.smallest_normal, format.smallest_subnormal, format.epsilon)),
        )
        for format in FORMATS.values()
    ]
    return Table(columns, rows)


def _power(number: float) -> str:
    """A power of two as such, and in decimals."""
    return f"2^{math.frexp(number)[1] - 1} = {number:.3g}"


# ---- one value in every format


VALUES = {
    "1e-45": 1e-45,
    "3e-39": 3e-39,
    "1e-10": 1e-10,
    "2.9e-8": 2.9e-8,
    "3e-8": 3e-8,
    "1e-10 × 1024": 1e-10 * 1024,
    "1e-5": 1e-5,
    "0.001": 0.001,
    "0.1": 0.1,
    "1/3": 1 / 3,
    "1": 1.0,
    "1.001": 1.001,
    "-2.5": -2.5,
    "3.14159": 3.14159,
    "448": 448.0,
    "500": 500.0,
    "65,504": 65_504.0,
    "65,520": 65_520.0,
    "100,000": 1e5,
    "1e38": 1e38,
    "3.4e38": 3.4e38,
}
"""What the slider of `explore_number` goes through: values near the edges of the formats, and everyday ones."""
FIELDS = {"sign": "#F0E442", "exponent": "#56B4E9", "mantissa": "#E69F00"}
BOX, ROW = 0.135, 0.29  # inches: the width of a bit, and from one format's row to the next
EDGE = 2.6  # ulps: where the ruler ends


def explore_number(value: str = "1e-10 × 1024", format: str = "FP16") -> Interactive:
    """A slider over VALUES and buttons for the formats: `number_picture` at each. value, format: where they start.

    Raises ValueError for a value or a format that is not on its control.
    """
    if value not in VALUES:
        raise ValueError(f"expected a value among {'; '.join(VALUES)}; found {value!r}")

    def draw(value=VALUES[value], format=format) -> Picture:
        return number_picture(value, format, next(label for label, known in VALUES.items() if known == value))

    return Interactive(draw, value=VALUES, format=list(FORMATS))


def number_picture(value: float, format: str, label: str = "") -> Picture:
    """A value in the bits of every format, and where it falls between its neighbours in one of them.

    label: what to call the value. Raises ValueError for an unknown format, or a value that is not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"expected a finite value, which lies between neighbours; found {value!r}")
    label = label or f"{value:.6g}"
    every = {name: bits(value, name) for name in FORMATS}
    chosen = bits(value, format)
    height = 4.27
    figure, axes = canvas(8, height, left=0.1, right=0.1, top=0.6, bottom=height - 0.6 - ROW * len(every))
    axes.set_title(f"{label} in the bits of every format", fontsize=TITLE_SIZE, loc="left", pad=20, y=1.0)
    _draw_bits(axes, every, format)
    figure.text(0.1 / 8, 1.62 / height, f"{format}: {formula(chosen)}", fontsize=TITLE_SIZE)
    figure.text(0.1 / 8, 1.39 / height, f"In {format} it {became(chosen)}.", fontsize=LABEL_SIZE)
    _draw_ruler(figure.add_axes((0.2 / 8, 0.62 / height, 7.6 / 8, 0.62 / height)), chosen, label)
    words = f"Ticks: the numbers of {format}. Dot: the one that is kept. Shaded: all values that become it."
    figure.text(0.5, 0.08 / height, words, fontsize=SMALL_SIZE, ha="center", style="italic")
    rows = "; ".join(f"{name} {n.sign} {n.exponent} {n.mantissa} = {_in_short(n)}" for name, n in every.items())
    return Picture(figure, f"The sign, exponent and mantissa of {label}: {rows}. In {format} it {became(chosen)}.")


def formula(number: Bits) -> str:
    """What a number's bits denote, written out: sign, power of two, mantissa in binary."""
    if number.kind in ("infinity", "nan"):
        return f"every exponent bit is 1, and the mantissa is {'0' if number.kind == 'infinity' else 'not 0'}"
    field = int(number.exponent, 2)
    sign, lead = "−" if number.sign == "1" else "+", "1" if field else "0"
    return f"{sign} 2^({max(field, 1)} − {number.format.bias}) × {lead}.{number.mantissa}₂ = {_digits(number)}"


def became(number: Bits) -> str:
    """What a finite value did when it was rounded; "it" goes before."""
    format, kept = number.format, _digits(number)
    if number.kind == "infinity":
        end = format.max + format.largest_ulp / 2
        return f"overflows: the largest number is {_long(format.max)}, and from {_long(end)} on all becomes infinity"
    if number.kind == "zero" and number.asked:
        half = format.smallest_subnormal / 2
        return f"is lost: all up to {half:.3g}, half the smallest subnormal number, becomes 0"
    if _clipped(number):
        return f"is clipped to {kept}, the largest number, {_off(number)}: there is no infinity"
    kind = "the number 0" if number.kind == "zero" else f"a {number.kind} number"
    return f"becomes {kept}, {kind}, {_off(number)}; an ulp is {number.ulp:.3g} here"


def _in_short(number: Bits) -> str:
    if number.kind == "infinity":
        return "infinity: overflow"
    if number.kind == "zero" and number.asked:
        return "0: lost"
    kind = "clipped, " if _clipped(number) else "subnormal, " if number.kind == "subnormal" else ""
    return f"{_digits(number)}: {kind}{_off(number)}"


def _clipped(number: Bits) -> bool:
    return abs(number.error) > number.format.largest_ulp / 2


def _off(number: Bits) -> str:
    percent = abs(100 * number.relative_error)
    if not percent:
        return "exact"
    return f"{percent:.0f} % off" if percent >= 10 else f"{percent:.{2 if percent >= 0.001 else 1}g} % off"


def _digits(number: Bits) -> str:
    """A number with as many digits as tell it from its neighbours."""
    return f"{number.value:.{9 if number.format.mantissa_bits > 10 else 6}g}"


def _long(number: float) -> str:
    return f"{number:,.0f}" if number < 1e6 else f"{number:.6g}"


def _draw_bits(axes: Axes, every: Mapping[str, Bits], chosen: str) -> None:
    """A row of boxes for each format; all have their exponent left of one line and their mantissa right of it."""
    axes.set_xlim(-2.25 / BOX, (7.8 - 2.25) / BOX)
    axes.set_ylim(len(every), 0)
    axes.set_axis_off()
    boxes: dict[str, list] = {field: [] for field in FIELDS}
    digits: dict[str, list] = {"0": [], "1": []}
    for row, (name, number) in enumerate(every.items()):
        y = row + 0.5
        starts = {"sign": -len(number.exponent) - 1.4, "exponent": -len(number.exponent), "mantissa": 0.4}
        for field, start in starts.items():
            for x, digit in enumerate(getattr(number, field), 1):
                left, right = start + x - 1, start + x
                boxes[field].append([(left, y - 0.36), (right, y - 0.36), (right, y + 0.36), (left, y + 0.36)])
                digits[digit].append((left + 0.5, y))
        if name == chosen:
            axes.axhspan(row + 0.02, row + 0.98, facecolor="#EEEEEE", zorder=0)
        weight = "bold" if name == chosen else "normal"
        axes.text(-2.2 / BOX, y, name, va="center_baseline", fontsize=LABEL_SIZE, fontweight=weight)
        axes.text(24.2, y, _in_short(number), va="center_baseline", fontsize=SMALL_SIZE)
    for field, colour in FIELDS.items():
        axes.add_collection(PolyCollection(boxes[field], facecolor=colour, edgecolor="black", linewidth=0.5))
    for digit, places in digits.items():
        if places:  # one marker drawn a hundred times, in place of a hundred texts
            x, y = zip(*places, strict=True)
            axes.plot(x, y, linestyle="", marker=f"${digit}$", markersize=5.5, color="black", markeredgewidth=0.2)
    for field, x in (("sign", -8.9), ("exponent", -4), ("mantissa", 11.9)):
        axes.text(x, -0.25, field, ha="center", fontsize=SMALL_SIZE, style="italic")


def _draw_ruler(axes: Axes, number: Bits, label: str) -> None:
    """A format's numbers around a value, in ulps, and the stretch of values that all become the same one."""
    format, middle = number.format, number
    if number.kind == "infinity":
        middle = bits(math.copysign(format.max, number.asked), format)
    place = lambda value: (value - middle.value) / middle.ulp  # noqa: E731
    below, above = bits(middle.below, format), bits(middle.above, format)
    near = (below, bits(below.below, format), middle, above, bits(above.above, format))
    ticks = {place(one.value): _digits(one) for one in near if math.isfinite(one.value) and abs(place(one.value)) <= 2}
    ticks |= {side: "infinity" for side, one in ((-1, below), (1, above)) if one.kind == "infinity"}
    beyond = 0.5 if format.infinities else EDGE  # past its last number, E4M3 has nothing else
    left = place(below.value) / 2 if math.isfinite(below.value) else -beyond
    right = place(above.value) / 2 if math.isfinite(above.value) else beyond
    home = 0
    if number.kind == "infinity":
        home = math.copysign(1, number.asked)
        left, right = sorted((home / 2, home * EDGE))
    axes.set_xlim(-EDGE, EDGE)
    axes.set_ylim(0, 2)
    axes.axvspan(left, right, ymax=0.35, facecolor=FIELDS["exponent"], alpha=0.6, linewidth=0)
    axes.plot([home], [0], "o", color=LINE_COLOURS[0], markersize=8, clip_on=False, zorder=5)
    asked = place(number.asked)
    seen = min(max(asked, 0.1 - EDGE), EDGE - 0.1)
    marker, side = ("v", "center") if seen == asked else (">", "right") if asked > 0 else ("<", "left")
    axes.plot([seen], [0.75], marker, color=LINE_COLOURS[1], markersize=9)
    words = label if seen == asked else f"{label} lies beyond"
    axes.text(seen, 1.3, words, ha=side, fontsize=LABEL_SIZE, color=LINE_COLOURS[1], fontweight="bold")
    # Below a power of two the numbers lie half as far apart, too close for their texts to stand on one line.
    axes.set_xticks(list(ticks), [words if at % 1 == 0 else f"\n{words}" for at, words in ticks.items()])
    axes.set_yticks([])
    axes.tick_params(labelsize=SMALL_SIZE, length=8, direction="inout", width=1.2)
    axes.spines[["left", "right", "top"]].set_visible(False)


# ---- what a format leaves of gradients


SCALE_POWERS = range(0, 25, 2)
HISTOGRAM_FORMATS = ("FP16", "BF16", "FP8 E4M3", "FP8 E5M2")
BANDS = {
    "lost to zero": ("#999999", "///"),
    "subnormal": ("#E69F00", "..."),
    "normal": ("#FFFFFF", None),
    "overflow": ("#D55E00", "xxx"),
}
LOWEST_POWER = -64


class Magnitudes:
    """How large a tensor's values are, or several tensors' together: sorted and counted once, to be drawn often.

    Raises ValueError where there are no values.
    """

    def __init__(self, values: Tensor | Iterable[Tensor | None]):
        tensors = [values] if isinstance(values, Tensor) else [one for one in values if one is not None]
        if not sum(one.numel() for one in tensors):
            raise ValueError("expected a tensor of gradients, or several; found none: call backward() first")
        every = torch.cat([one.detach().to_dense().flatten().cpu().double().abs() for one in tensors]).sort().values
        self.total, self.nonzero = len(every), every[every != 0]
        # frexp's mantissa lies in [½, 1). What is smaller than LOWEST_POWER stands in the first bar.
        powers = torch.frexp(self.nonzero[self.nonzero.isfinite()]).exponent - 1
        powers = powers.clamp(min=LOWEST_POWER)
        self.lowest = int(powers[0]) if len(powers) else 0
        self.counts = torch.bincount(powers - self.lowest).tolist()  # of sizes in [2^lowest, 2^(lowest + 1)), and on

    def fates(self, format: Format, scale: float) -> dict[str, int]:
        """What becomes of the values in a format: see `memlab.mixed_precision.fates`."""
        return fates(self.nonzero, format, scale)


def gradient_histogram(
    gradients: Tensor | Iterable[Tensor | None] | Mapping[str, Tensor | Iterable[Tensor | None]],
    format: str = "FP16",
    scale_power: int = 0,
) -> Interactive:
    """Gradients by power of two, and the parts of them that a format loses, under a slider for the loss scale.

    gradients: a tensor, or several such as `[p.grad for p in model.parameters()]`; or a dict of name → either, whose
    names become buttons. format, scale_power: where the controls start; the scale is 2^scale_power.

    Raises ValueError for no gradients, and for a format or a power without a place on the controls.
    """
    groups = gradients if isinstance(gradients, Mapping) else {"": gradients}
    if not groups:
        raise ValueError("expected gradients by name, as {'head': head.weight.grad}; found an empty dict")
    groups = {name: Magnitudes(values) for name, values in groups.items()}
    first_bar = min(group.lowest for group in groups.values())
    last_bar = max(group.lowest + len(group.counts) for group in groups.values())
    span = (first_bar - 2, last_bar + SCALE_POWERS[-1] + 2)

    first = next(iter(groups))

    def draw(gradients_of=first, format=format, scale_power=scale_power) -> Picture:
        return histogram_picture(groups[gradients_of], format, scale_power, span, gradients_of)

    choice = {"gradients_of": list(groups)} if len(groups) > 1 else {}
    return Interactive(draw, **choice, format=HISTOGRAM_FORMATS, scale_power={f"2^{n}": n for n in SCALE_POWERS})


def histogram_picture(
    magnitudes: Magnitudes, format: str, scale_power: int, span: tuple[int, int], name: str = ""
) -> Picture:
    """One picture of `gradient_histogram`. span: the powers of two at the ends of its axis. name: gradients of what."""
    found, count = number_format(format), len(magnitudes.nonzero)
    fates = magnitudes.fates(found, 2.0**scale_power)
    figure, axes = canvas(8, 3.8, top=0.95)
    edges = (found.smallest_subnormal / 2, found.smallest_normal, found.max + found.largest_ulp / 2)
    edges = [min(max(math.log2(edge), span[0]), span[1]) for edge in edges]
    for fate, left, right in zip(FATES, [span[0], *edges], [*edges, span[1]], strict=True):
        if left < right:
            colour, hatch = BANDS[fate]
            axes.axvspan(left, right, facecolor=colour, hatch=hatch, edgecolor="black", alpha=0.3, linewidth=0)
            axes.axvline(left, color="black", linewidth=0.8)
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            x = (left + right) / 2
            if right == span[1] and right - left < 0.1 * (span[1] - span[0]):  # centred it would leave the figure
                x, place["ha"] = right, "right"
            axes.text(x, 1.02, f"{fate}\n{share(fates[fate], count, '<', '>')}", fontsize=SMALL_SIZE, **place)
    heights = [100 * number / max(count, 1) for number in magnitudes.counts]
    if heights:
        edges = [magnitudes.lowest + scale_power + place for place in range(len(heights) + 1)]
        axes.stairs(heights, edges, fill=True, color=LINE_COLOURS[0])
    axes.set_xlim(*span)
    axes.set_ylim(0, max(heights, default=1) * 1.08)
    ticks = [power for power in range(span[0], span[1]) if power % 8 == 0]  # at the very end a label has no room
    axes.set_xticks(ticks, [f"2^{power}" for power in ticks])
    zeros = share(magnitudes.total - count, magnitudes.total)
    whose = f"gradients of {name}" if name else "gradients"
    finish(axes, f"size of a gradient × 2^{scale_power}", "share of those not 0 (%)")
    title = f"{whose.capitalize()}, × 2^{scale_power}, in {format}; {zeros} are exactly 0"
    axes.set_title(title, fontsize=TITLE_SIZE, loc="left", pad=36, y=1.0)
    parts = ", ".join(f"{share(number, count)} {fate}" for fate, number in fates.items())
    alt = f"Bars of {whose} by power of two, times 2^{scale_power}, over the ranges of {format}: {parts}"
    return Picture(figure, f"{alt}. Beside them, {zeros} of the {magnitudes.total:,} are exactly zero.")


def share(part: int, whole: int, less: str = "less than", more: str = "more than") -> str:
    """A part as whole percent, with words where rounding would hide that there are some, or that some are missing."""
    if part in (0, whole):
        return "all" if part else "none"
    percent = round(100 * part / whole)
    return f"{less} 1 %" if percent == 0 else f"{more} 99 %" if percent == 100 else f"{percent} %"
