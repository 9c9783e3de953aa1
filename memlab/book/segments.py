"""The curve behind √L: what backward holds of a chain's activations, by the number of equal segments it is cut into."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from matplotlib.ticker import NullLocator

from memlab.book.interactive import Interactive
from memlab.book.style import LABEL_SIZE, LINE_COLOURS, SMALL_SIZE, Picture, byte_unit, canvas, finish
from memlab.gradient_checkpointing import best_segments, segment_bounds, segmented_bytes
from memlab.units import format_bytes

DEPTHS = (4, 8, 16, 32, 64, 128)


def draw_segments(
    saved_bytes: int, input_bytes: int, layers: int = 16, metered: Mapping[tuple[int, int], int] | None = None
) -> Picture:
    """Bytes over the number of segments for a chain of so many layers: the formula as a line, with its least and √L.

    saved_bytes, input_bytes: as of `segmented_bytes`. metered: {(layers, segments): bytes} measured; those of this
    depth are drawn as crosses.
    """
    numbers = range(1, layers + 1)
    held = [segmented_bytes(layers, k, saved_bytes, input_bytes) for k in numbers]
    crosses = {k: nbytes for (depth, k), nbytes in (metered or {}).items() if depth == layers}
    plain, best = layers * saved_bytes, best_segments(layers, saved_bytes, input_bytes)
    root = len(segment_bounds(layers, "sqrt"))
    unit, scale = byte_unit(plain)
    figure, axes = canvas(8, 3.6, bottom=0.8)
    axes.plot(numbers, [n / scale for n in held], color=LINE_COLOURS[0], linewidth=1.4, label="formula")
    if crosses:
        look = {"color": LINE_COLOURS[1], "markersize": 7, "linestyle": ""}
        axes.plot(list(crosses), [n / scale for n in crosses.values()], "x", label="metered", **look)
    marks = {f"least: {best} segments": (best, "o"), f"√L: {root} segments": (root, "s")}
    for name, (k, marker) in marks.items():
        look = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": "black", "linestyle": ""}
        axes.plot(k, held[k - 1] / scale, marker, label=f"{name}, {format_bytes(held[k - 1])}", **look)
    axes.axhline(plain / scale, color="black", linestyle=":", linewidth=1.2)
    axes.text(layers, plain / scale, "nothing checkpointed ", ha="right", va="bottom", fontsize=SMALL_SIZE)
    axes.set_xlim(0, layers + 1)
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(held) / scale / 1.3, plain / scale * 1.5)
    axes.yaxis.set_major_formatter(lambda nbytes, _: f"{nbytes:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    where = math.sqrt(layers * saved_bytes / input_bytes)
    found = f"{layers} layers, each saves {saved_bytes / input_bytes:.3g} inputs: √(L · s / c) = {where:.3g}"
    finish(axes, "segments", f"activations in backward ({unit})", found)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=LABEL_SIZE, ncols=4)
    seen = f" Crosses mark {len(crosses)} metered ones." if crosses else ""
    return Picture(
        figure,
        f"A line of bytes over the number of segments, {found}. It falls from {format_bytes(held[0])} with one segment "
        f"to {format_bytes(min(held))} with {best}; √L, {root} segments, hold {format_bytes(held[root - 1])}; without "
        f"checkpointing it is {format_bytes(plain)}.{seen}",
    )


def explore_segments(
    saved_bytes: int,
    input_bytes: int,
    metered: Mapping[tuple[int, int], int] | None = None,
    depths: Sequence[int] = DEPTHS,
) -> Interactive:
    """The curve with a slider for the number of layers. depths: what it offers, 16 among them."""
    return Interactive(functools.partial(draw_segments, saved_bytes, input_bytes, metered=metered), layers=depths)
