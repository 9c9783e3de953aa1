"""Which axis first: all ways to divide ranks by data, tensor and pipeline, drawn by bytes, by what is sent and by time.

The time is a sketch: 6 FLOPs a parameter and token, and every byte that is sent waited for.

    step = (computing + sent along tensor and pipeline) / (1 − bubble) + sent along data
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.book.interactive import Interactive
from memlab.book.mesh_pictures import ORDERS
from memlab.book.style import COLOURS, HATCHES, LABEL_SIZE, SMALL_SIZE, Picture, draw_budget
from memlab.book.tables import Table
from memlab.memory_arithmetic import Transformer
from memlab.offloading.links import RANK_LINKS
from memlab.pipeline_parallelism import StageShare, Way, axis_seconds, stage_shares, ways
from memlab.pipeline_parallelism.axes import AXES
from memlab.units import GiB, format_bytes, parse_bytes

TOKENS, VOCABULARY, HEAD_WIDTH = 1024, 256, 128
INSIDE, BETWEEN = RANK_LINKS["NVLink 4"], RANK_LINKS["InfiniBand 400 Gb/s"]
FLOPS_PER_SECOND = 400e12
MOST_ROWS = 10
WIDTHS = (1024, 2048, 4096, 8192)
LAYERS = (16, 24, 32, 48)
TEXTS = (32, 64, 128, 256)
RANKS = (2, 4, 8, 16, 32, 64)
NODES = (2, 4, 8)
SIZES = ("data", "tensor", "pipeline", "micro_batches")
CARDS = ("16 GiB", "24 GiB", "80 GiB")
PARTS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer_states",
    "activation": "saved",
}
"""Category → what a `StageShare` calls it."""


class Divided(NamedTuple):
    """A way to divide. axis_seconds: what is sent along each axis."""

    way: Way
    fits: bool
    axis_seconds: dict[str, float]
    step_seconds: float


def of_sizes(width: int, layers: int) -> Transformer:
    """A GPT over bytes with heads of 128."""
    return Transformer(layers, width, width // HEAD_WIDTH, vocabulary=VOCABULARY, context=TOKENS)


@functools.lru_cache(maxsize=256)
def all_ways(width: int, layers: int, texts: int, ranks: int) -> list[Way]:
    """As `ways`: mixed precision, AdamW, 1F1B, micro-batches of one text of 1,024 tokens, no checkpoints."""
    return ways(ranks, of_sizes(width, layers), texts, TOKENS)


def fullest(model: Transformer, texts: int, way: Way) -> StageShare:
    """The stage whose ranks hold the most."""
    return max(
        stage_shares(model, texts, TOKENS, **dict(zip(SIZES, way, strict=False))), key=lambda share: share.nbytes
    )


def sorted_ways(
    width: int = 4096,
    layers: int = 32,
    texts: int = 64,
    ranks: int = 16,
    node: int = 8,
    order: tuple[str, ...] = AXES,
    card: str = "80 GiB",
) -> list[Divided]:
    """All ways, first those that fit the card, and of these the fastest first."""
    model, limit = of_sizes(width, layers), parse_bytes(card)
    computing = 6 * model.parameters * texts * TOKENS / (ranks * FLOPS_PER_SECOND)
    found = []
    for way in all_ways(width, layers, texts, ranks):
        sent = axis_seconds(way, order, node)
        step = (computing + sent["tensor"] + sent["pipeline"]) / (1 - way.bubble) + sent["data"]
        found.append(Divided(way, way.nbytes <= limit, sent, step))
    return sorted(found, key=lambda one: (not one.fits, one.step_seconds))


def draw_axes(
    width: int = 4096,
    layers: int = 32,
    texts: int = 64,
    ranks: int = 16,
    node: int = 8,
    order: tuple[str, ...] = AXES,
    card: str = "80 GiB",
) -> Picture:
    """Bars of what the fullest rank holds, a row for each way to divide, beside what it sends, its bubble and its time.

    The ten best ways, as of `sorted_ways`; those that the card cannot hold come last and are named. texts: of all ranks
    in a step, 1,024 tokens each. node: ranks that the fast links connect. order: the mesh's axes, outermost first.
    """
    found = sorted_ways(width, layers, texts, ranks, node, order, card)
    shown, limit = found[:MOST_ROWS], parse_bytes(card)
    figure = Figure(figsize=(8, 4.9), dpi=80)
    axes = figure.subplots()
    figure.subplots_adjust(0.15, 0.1, 0.52, 0.83)
    model, left = of_sizes(width, layers), [0.0] * len(shown)
    shares = [fullest(model, texts, one.way) for one in shown]
    for category, name in PARTS.items():
        sizes = [getattr(share, name) / GiB for share in shares]
        look = {"color": COLOURS[category], "hatch": HATCHES.get(category, ""), "edgecolor": "black", "linewidth": 0.4}
        axes.barh(range(len(shown)), sizes, 0.7, left, label=category.replace("_", " "), **look)
        left = [so_far + size for so_far, size in zip(left, sizes, strict=True)]
    top = min(1.5 * limit / GiB, max(1.2 * limit / GiB, 1.25 * max(left)))
    for place, (total, one) in enumerate(zip(left, shown, strict=True)):
        words = f"{total:.1f}" if one.fits else f"{total:.1f}: too large"
        if total < top * (0.88 if one.fits else 0.6):
            axes.text(total, place, f" {words}", va="center", fontsize=SMALL_SIZE)
        else:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.text(0.99 * min(total, top), place, words, va="center", ha="right", fontsize=SMALL_SIZE, bbox=box)
    axes.set_xlim(0, top)
    axes.set_ylim(MOST_ROWS - 0.4, -0.6)
    names = [" · ".join(str(getattr(one.way, axis)) for axis in order) for one in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=SMALL_SIZE)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=SMALL_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bytes of the fullest rank (GiB)", fontsize=LABEL_SIZE)
    draw_budget(axes, limit, GiB, vertical=True)
    _columns(axes, shown, order)
    figure.legend(loc="lower right", frameon=False, fontsize=SMALL_SIZE, ncols=2)
    said = f"{model.parameters / 1e9:.3g} billion parameters, {texts} texts; {ranks} ranks in nodes of {node}"
    first = f"outermost first: {' · '.join(order)}"
    figure.suptitle(f"{said}; {first}", x=0.02, y=0.985, ha="left", va="top", fontsize=LABEL_SIZE)
    return Picture(
        figure,
        f"Bars of what the fullest rank holds, for {len(shown)} of {len(found)} ways to divide. {said}, {first}. "
        f"{_best_words(found, limit)}",
    )


def _columns(axes: Axes, shown: list[Divided], order: tuple[str, ...]) -> None:
    """To the right of each bar: GiB sent along each axis, the bubble, and the step's seconds; the best has a frame."""
    heads = [*(f"{axis}\n(GiB)" for axis in order), "bubble", "step\n(s)"]
    places = (1.13, 1.33, 1.52, 1.71, 1.9)
    letters = " · ".join(axis[0] for axis in order)
    axes.text(-0.025, 1.02, letters, transform=axes.transAxes, ha="right", va="bottom", fontsize=SMALL_SIZE)
    axes.text(places[1], 1.115, "sent along", transform=axes.transAxes, ha="center", fontsize=SMALL_SIZE)
    for x, head in zip(places, heads, strict=True):
        axes.text(x, 1.02, head, transform=axes.transAxes, ha="center", va="bottom", fontsize=SMALL_SIZE)
    for place, one in enumerate(shown):
        cells = [f"{one.way.sent[axis] / GiB:.3g}" for axis in order]
        cells += [f"{100 * one.way.bubble:.0f}%", f"{one.step_seconds:.3g}"]
        best = place == 0 and one.fits
        look = {"transform": axes.get_yaxis_transform(), "ha": "center", "va": "center", "fontsize": SMALL_SIZE}
        look |= {"fontweight": "bold"} if best else {"color": "black" if one.fits else "#777777"}
        for x, cell in zip(places, cells, strict=True):
            axes.text(x, place, cell, **look)
        if best:
            frame = {"xy": (1.99, place), "xytext": (2.01, place), "xycoords": axes.get_yaxis_transform()}
            axes.annotate("◄ best", va="center", fontsize=SMALL_SIZE, fontweight="bold", annotation_clip=False, **frame)


def _best_words(found: list[Divided], limit: int) -> str:
    fit = sum(one.fits for one in found)
    if not fit:
        least = min(found, key=lambda one: one.way.nbytes)
        return (
            f"None fits {format_bytes(limit)}; the least is {_named(least.way)} with {format_bytes(least.way.nbytes)}."
        )
    best = found[0]
    sent = ", ".join(f"{format_bytes(nbytes)} along {axis}" for axis, nbytes in best.way.sent.items())
    return (
        f"{fit} fit {format_bytes(limit)}; the fastest of them is {_named(best.way)}: "
        f"{format_bytes(best.way.nbytes)} held, {sent} sent, "
        f"a bubble of {100 * best.way.bubble:.0f}%, {best.step_seconds:.3g} s a step."
    )


def _named(way: Way) -> str:
    return f"data {way.data}, tensor {way.tensor}, pipeline {way.pipeline}"


def explore_axes() -> Interactive:
    """Sliders for the model's and the batch's sizes, ranks, nodes and the axes' order, and buttons for the card."""
    return Interactive(
        draw_axes, width=WIDTHS, layers=LAYERS, texts=TEXTS, ranks=RANKS, node=NODES, order=ORDERS, card=list(CARDS)
    )


def axes_table(**sizes) -> Table:
    """The same as text, all ways: sizes and card as of `sorted_ways`."""
    rows = []
    for one in sorted_ways(**sizes):
        way = one.way
        sent = (format_bytes(way.sent[axis]) for axis in AXES)
        divided = (way.data, way.pipeline, way.tensor, way.micro_batches)
        fits = "" if one.fits else "too large"
        step = f"{one.step_seconds:.3g}"
        rows.append((*divided, format_bytes(way.nbytes), fits, *sent, f"{100 * way.bubble:.0f}%", step))
    columns = [*AXES, "micro-batches", "fullest rank", "card"]
    return Table([*columns, *(f"sent along {axis}" for axis in AXES), "bubble", "step (s)"], rows)
