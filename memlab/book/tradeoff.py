"""Memory against recomputation: each way to run a step as a point, and a budget that picks the best plan below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from memlab.book.interactive import Interactive
from memlab.book.style import (
    COLOURS,
    LINE_COLOURS,
    LINE_STYLES,
    SMALL_SIZE,
    Picture,
    byte_unit,
    draw_budget,
    finish,
)
from memlab.units import format_bytes

MARKERS = "osD^vP*X"
SHADES = ("#FFFFFF", COLOURS["input"], COLOURS["activation"], COLOURS["gradient"])  # of 1, 2, 3 forwards and more
MOST_BUDGETS = 60


class Way(NamedTuple):
    """One way to run a step: bytes at its peak, and the forward's FLOPs that backward computes again, as a part of one
    forward (1.0: all once). forwards: how often each stage's forward runs, where that is known."""

    peak_bytes: int
    recomputed: float
    forwards: tuple[int, ...] = ()


def draw_tradeoff(
    curves: Mapping[str, Sequence[Way]],
    marks: Mapping[str, Way] | None = None,
    budget: int | None = None,
    title: str = "",
) -> Picture:
    """Ways as lines of points and as single marks, over the bytes of their peaks; lower and further left is better.

    budget: bytes; the first curve's cheapest way within it is chosen, named, and its stages are drawn below: how often
    the forward of each one runs. Raises ValueError for curves without a point, and for a budget below all of the first.
    """
    marks = dict(marks or {})
    if not curves or not all(curves.values()):
        raise ValueError("expected at least one way in each curve, as {'optimal': [Way(...)]}; found none")
    chosen = None if budget is None else _within(next(iter(curves.values())), budget)
    strip = chosen is not None and bool(chosen.forwards)
    ways = [way for curve in curves.values() for way in curve] + list(marks.values())
    unit, scale = byte_unit(max(way.peak_bytes for way in ways))
    figure = Figure(figsize=(8, 4.6 if strip else 3.9), dpi=90)
    axes, below = figure.subplots(2, height_ratios=(6, 1)) if strip else (figure.subplots(), None)
    figure.subplots_adjust(0.09, 0.06 if strip else 0.13, 0.98, 0.86, hspace=0.45)
    for number, (name, curve) in enumerate(curves.items()):
        points = sorted(curve)
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        xs, ys = [way.peak_bytes / scale for way in points], [100 * way.recomputed for way in points]
        look = {"color": colour, "marker": ".", "markersize": 4, "linewidth": 1.2, "label": name}
        style = LINE_STYLES[number % len(LINE_STYLES)]
        if number:
            axes.plot(xs, ys, linestyle=style, **look)
        else:  # between two of them the cheaper one does not fit: a staircase
            axes.step(xs, ys, where="post", linestyle=style, **look)
    for number, (name, way) in enumerate(marks.items()):
        at = way.peak_bytes / scale, 100 * way.recomputed
        look = {"markersize": 7, "markerfacecolor": "white", "markeredgecolor": "black"}
        axes.plot(*at, MARKERS[number % len(MARKERS)], linestyle="", label=name, **look)
    highest = max(way.recomputed for way in ways) * 100
    axes.set_ylim(-0.04 * highest, highest * 1.12 or 1)
    axes.set_xlim(0, max(way.peak_bytes for way in ways) / scale * 1.08)
    draw_budget(axes, budget, scale, vertical=True)
    if chosen:
        axes.plot(chosen.peak_bytes / scale, 100 * chosen.recomputed, "o", color="black", markersize=8)
    finish(axes, f"peak of the step, storages ({unit})", "forward FLOPs again (%)", "")
    axes.xaxis.set_label_coords(0.5, -0.11)
    axes.legend(loc="upper right", frameon=False, fontsize=SMALL_SIZE)
    words = title
    if chosen:
        found = f"{format_bytes(chosen.peak_bytes)}, {chosen.recomputed:.1%} of a forward again"
        words = f"{title}: {found}" if title else found
    figure.suptitle(words, x=0.02, ha="left", fontsize=10)
    if strip:
        _draw_stages(below, chosen.forwards)
    return Picture(figure, _alt(curves, marks, budget, chosen))


def explore_tradeoff(
    curves: Mapping[str, Sequence[Way]],
    marks: Mapping[str, Way] | None = None,
    title: str = "",
    start: int | None = None,
) -> Interactive:
    """The same with a slider for the budget, over the peaks of the first curve. start: bytes to begin at, or
    the next peak below; None: in the middle."""
    peaks = sorted({way.peak_bytes for way in next(iter(curves.values()))})
    if len(peaks) > MOST_BUDGETS:
        peaks = [peaks[i * (len(peaks) - 1) // (MOST_BUDGETS - 1)] for i in range(MOST_BUDGETS)]
    labels: dict[str, int] = {}
    for peak in peaks:
        labels.setdefault(format_bytes(peak), peak)
    middle = peaks[len(peaks) // 2] if start is None else start
    first = min(labels.values(), key=lambda peak: (peak > middle, abs(peak - middle)))

    def draw(budget: int = first) -> Picture:
        return draw_tradeoff(curves, marks, budget, title)

    return Interactive(draw, budget=labels)


def _within(curve: Sequence[Way], budget: int) -> Way:
    fitting = [way for way in curve if way.peak_bytes <= budget]
    if not fitting:
        least = min(way.peak_bytes for way in curve)
        raise ValueError(f"expected a budget of at least {least:,} bytes, the lowest peak there is; found {budget:,}")
    return min(fitting, key=lambda way: (way.recomputed, way.peak_bytes))


def _draw_stages(axes, forwards: Sequence[int]) -> None:
    """A bar for each stage, in order, as high as its forward runs often: few texts, which take long to draw."""
    highest = max(forwards)
    for number, shade in enumerate(SHADES, 1):
        boxes = [
            [(at, 0), (at + 0.92, 0), (at + 0.92, runs), (at, runs)]
            for at, runs in enumerate(forwards)
            if runs == number or (number == len(SHADES) and runs > number)
        ]
        axes.add_collection(PolyCollection(boxes, facecolor=shade, edgecolor="black", linewidth=0.6))
    for number in range(1, highest + 1):
        axes.text(-0.15, number, f"{number}×", ha="right", va="top", fontsize=SMALL_SIZE)
    axes.set_xlim(0, len(forwards))
    axes.set_ylim(0, highest)
    axes.set_axis_off()
    words = "how often the forward of each stage runs, from the first to the last"
    axes.text(0, highest * 1.12, words, fontsize=SMALL_SIZE)


def _alt(curves: Mapping[str, Sequence[Way]], marks: Mapping[str, Way], budget: int | None, chosen: Way | None) -> str:
    words = [
        f"{name}: {len(curve)} ways from {_say(min(curve))} to {_say(max(curve))}" for name, curve in curves.items()
    ]
    words += [f"{name}: {_say(way)}" for name, way in marks.items()]
    text = f"Peaks against forward FLOPs computed again. {'; '.join(words)}."
    if chosen is not None:
        text += f" A budget of {format_bytes(budget)} allows {_say(chosen)}"
        runs = ", ".join(map(str, chosen.forwards))
        text += f"; its stages' forwards run {runs} times." if runs else "."
    return text


def _say(way: Way) -> str:
    return f"{format_bytes(way.peak_bytes)} with {way.recomputed:.1%}"
