"""A split layer, drawn: what it keeps for backward on a rank, all that a rank holds, and how long it waits."""

from __future__ import annotations

import functools
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memlab.book.interactive import Interactive
from memlab.book.style import (
    COLOURS,
    HATCHES,
    LABEL_SIZE,
    LINE_COLOURS,
    LINE_STYLES,
    SMALL_SIZE,
    Picture,
    byte_unit,
    finish,
)
from memlab.book.tables import Table
from memlab.checking import one_of
from memlab.memory_arithmetic import Transformer
from memlab.offloading.links import RANK_LINKS
from memlab.tensor_parallelism import block_activations, block_seconds, rank_states, sent_bytes, step_traffic
from memlab.units import GiB, format_bytes

# ---- what a block keeps

LAYERS, VOCABULARY, TOKENS, TEXTS = 24, 256, 1024, 8
WAYS = {
    "tensor parallel": {},
    "sequence parallel, gathered inputs kept": {"sequence_parallel": True, "keep_gathered": True},
    "sequence parallel": {"sequence_parallel": True},
}
"""How a block is split: what it is called → options of `block_activations`."""
DIVIDED, WHOLE = COLOURS["activation"], COLOURS["gradient"]


def of_width(width: int, heads: int) -> Transformer:
    """A GPT of 24 such layers over bytes, 1,024 tokens of context; width 2,048 with 16 heads is the story's."""
    return Transformer(LAYERS, width, heads, vocabulary=VOCABULARY, context=TOKENS)


def kept_by_a_rank(model: Transformer, ranks: int, way: str, batch: int = TEXTS) -> tuple[int, int]:
    """Bytes of one block's activations on a rank: those that are divided among ranks, and those that each holds whole.

    On one rank the same tensors, of which none is divided yet, are told apart alike. Raises ValueError for a way that
    there is not.
    """
    one_of("way", way, tuple(WAYS))
    kept = lambda ranks: block_activations(model, batch, TOKENS, ranks, **WAYS[way])  # noqa: E731
    divided = {term.name for term in kept(2) if "/ t" in term.formula}
    found = kept(ranks)
    part = sum(term.nbytes for term in found if term.name in divided)
    return part, found.nbytes - part


def draw_kept(width: int = 2048, heads: int = 16, most_ranks: int = 8) -> Picture:
    """Bars of what a block's forward keeps on a rank, divided and whole, by the number of ranks and the way to split.

    BF16, fused attention, no dropout, 8 texts of 1,024 tokens. Raises ValueError for heads that ranks do not divide.
    """
    model = of_width(width, heads)
    powers = [2**power for power in range(most_ranks.bit_length()) if 2**power <= most_ranks]
    rows = [(1, "tensor parallel")] + [(ranks, way) for ranks in powers[1:] for way in WAYS]
    held = [kept_by_a_rank(model, ranks, way) for ranks, way in rows]
    unit, scale = byte_unit(sum(held[0]))
    height = 1.2 + 0.3 * len(rows)
    figure = Figure(figsize=(8, height), dpi=90)
    axes = figure.subplots()
    figure.subplots_adjust(0.36, 0.55 / height, 0.95, 1 - 0.45 / height)
    places = [place + 0.6 * powers.index(ranks) for place, (ranks, _) in enumerate(rows)]
    for name, look, which in (
        ("divided among the ranks", {"color": DIVIDED}, 0),
        ("whole on every rank", {"color": WHOLE, "hatch": "///"}, 1),
    ):
        left = [parts[0] / scale if which else 0 for parts in held]
        widths = [parts[which] / scale for parts in held]
        axes.barh(places, widths, left=left, edgecolor="black", linewidth=0.5, label=name, **look)
    for place, parts in zip(places, held, strict=True):
        axes.text(sum(parts) / scale, place, f"  {sum(parts) / scale:.1f}", va="center", fontsize=SMALL_SIZE)
    names = [_ranks(ranks) + (f": {way}" if ranks > 1 else "") for ranks, way in rows]
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, sum(held[0]) / scale * 1.1)
    axes.legend(loc="lower right", frameon=False, fontsize=SMALL_SIZE)
    finish(axes, f"one block's activations on a rank ({unit})", "")
    head = f"A block of width {width:,} with {heads} heads, {TEXTS} texts of {TOKENS:,} tokens, BF16"
    figure.suptitle(head, x=0.02, ha="left", fontsize=LABEL_SIZE)
    said = "; ".join(
        f"{name} {format_bytes(sum(parts))}" + (f", {format_bytes(parts[1])} of it whole" if place else "")
        for place, (name, parts) in enumerate(zip(names, held, strict=True))
    )
    return Picture(figure, f"Bars of what a block keeps for backward on one rank. {head}: {said}.")


# ---- what a rank holds, and how long it waits

WIDTHS = (1024, 2048, 4096, 8192, 16384)
HEADS = (8, 16, 32, 64, 128)
RANKS = (1, 2, 4, 8, 16, 32, 64)
SPLITS = ("tensor parallel", "sequence parallel")
PARTS = ("parameter", "gradient", "optimizer_state", "activation")


@functools.lru_cache(maxsize=1024)
def held_by_a_rank(width: int, heads: int, ranks: int, way: str) -> dict[str, int]:
    """Bytes that a rank holds when backward begins and gradients are there: mixed precision, AdamW, all blocks' kept.

    Embeddings, head and what lives for a few ops are small beside it, and left out of the activations.
    """
    model = of_width(width, heads)
    kept = block_activations(model, TEXTS, TOKENS, ranks, **WAYS[way])
    return rank_states(model, ranks).by_category() | {"activation": LAYERS * kept.nbytes}


def draw_tensor_ranks(
    width: int = 2048, heads: int = 16, ranks: int = 8, link: str = "NVLink 4", *, teraflops: float = 400
) -> Picture:
    """What a rank holds of a GPT of 24 layers, split or not; and the share of a block's time that it waits, by width.

    8 texts of 1,024 tokens. link: one of RANK_LINKS. teraflops: reached by each rank, 10¹² a second. Nothing is hidden
    beside anything else. For sizes that cannot be split the picture says why.
    """
    one_of("link", link, tuple(RANK_LINKS))
    figure = Figure(figsize=(8, 5.4), dpi=90)
    bars, lines = figure.subplots(2, height_ratios=(3, 4))
    figure.subplots_adjust(0.17, 0.1, 0.97, 0.86, hspace=0.55)
    over = f"{_ranks(ranks)} over {link}, {RANK_LINKS[link] / 1e9:g} GB/s"
    head = f"width {width:,}, {heads} heads; {over}; {teraflops:g} TFLOP/s"
    figure.suptitle(head, x=0.02, ha="left", fontsize=LABEL_SIZE)
    said = _draw_held(bars, width, heads, ranks)
    waited = _draw_waiting(lines, width, ranks, link, teraflops)
    return Picture(
        figure,
        f"Bars of what a rank holds, by category, above lines of the share of a block's time in which it waits for "
        f"what is sent, by width. {head}: {said}. {waited}.",
    )


def _draw_held(axes: Axes, width: int, heads: int, ranks: int) -> str:
    """A bar for one rank, and one for each way to split; or the words that say why there is none."""
    rows: dict[str, dict[str, int]] = {}
    try:
        rows["1 rank"] = held_by_a_rank(width, heads, 1, "tensor parallel")
        if ranks > 1:
            rows |= {way: held_by_a_rank(width, heads, ranks, way) for way in SPLITS}
    except ValueError as refused:
        words = textwrap.fill(str(refused), 90)
        if not rows:
            axes.axis("off")
            axes.text(0, 0.5, words, transform=axes.transAxes, fontsize=LABEL_SIZE)
            return " ".join(words.split())
    else:
        words = ""
    left = dict.fromkeys(rows, 0.0)
    for category in PARTS:
        widths = [rows[name][category] / GiB for name in rows]
        look = {"color": COLOURS[category], "hatch": HATCHES.get(category, ""), "edgecolor": "black", "linewidth": 0.4}
        axes.barh(range(len(rows)), widths, left=list(left.values()), label=category.replace("_", " "), **look)
        left = {name: left[name] + size for name, size in zip(rows, widths, strict=True)}
    for place, total in enumerate(left.values()):
        axes.text(total, place, f"  {total:.1f}", va="center", fontsize=SMALL_SIZE, fontweight="bold")
    if words:
        axes.text(0, 1.5, f"  {words}".replace("\n", "\n  "), va="center", fontsize=LABEL_SIZE)
    axes.set_xlim(0, max(left.values()) * 1.12)
    axes.set_ylim(2.6, -0.6)
    axes.set_yticks(range(len(rows)), list(rows))
    finish(axes, "a rank's bytes when backward begins, gradients there (GiB)", "")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=SMALL_SIZE, ncols=4)
    return "; ".join(
        [f"{name} {total:.1f} GiB" for name, total in left.items()] + ([" ".join(words.split())] if words else [])
    )


def _draw_waiting(axes: Axes, width: int, ranks: int, link: str, teraflops: float) -> str:
    """Lines by width for every link, with the chosen one marked."""
    took = lambda width, speed: block_seconds(TEXTS, TOKENS, width, ranks, teraflops * 1e12, speed)  # noqa: E731
    for number, (name, speed) in enumerate(RANK_LINKS.items()):
        look = {"color": LINE_COLOURS[number], "linestyle": LINE_STYLES[number], "linewidth": 1.4}
        axes.plot(
            WIDTHS, [100 * took(each, speed).waiting_share for each in WIDTHS], label=name, marker="osD"[number], **look
        )
    own = took(width, RANK_LINKS[link])
    axes.plot(
        width, 100 * own.waiting_share, "o", color="black", markersize=11, markerfacecolor="none", markeredgewidth=2
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(WIDTHS, [f"{each:,}" for each in WIDTHS])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, fontsize=SMALL_SIZE, ncols=3)
    finish(axes, "width", "waiting (% of a block's time)")
    return (
        f"A block computes {1e3 * own.computing:.3g} ms and waits {1e3 * own.sending:.3g} ms, "
        f"{own.waiting_share:.0%} of its time"
    )


def _ranks(number: int) -> str:
    return f"{number} ranks" if number > 1 else "1 rank"


def explore_tensor_ranks() -> Interactive:
    """Sliders for width, heads and ranks, and buttons for the link."""
    return Interactive(draw_tensor_ranks, width=WIDTHS, heads=HEADS, ranks=RANKS, link=list(RANK_LINKS))


def tensor_ranks_table(width: int = 2048, heads: int = 16, link: str = "NVLink 4", teraflops: float = 400) -> Table:
    """The same as text: for every number of ranks that divides the heads, what one holds, sends and waits."""
    model, rows = of_width(width, heads), []
    for ranks in (number for number in RANKS if heads % number == 0):
        states = rank_states(model, ranks).nbytes
        kept = [held_by_a_rank(width, heads, ranks, way)["activation"] for way in SPLITS]
        seconds = block_seconds(TEXTS, TOKENS, width, ranks, teraflops * 1e12, RANK_LINKS[link])
        sent = sent_bytes(step_traffic(model, TEXTS, TOKENS, ranks))
        rows.append((ranks, *map(format_bytes, (states, *kept, sent)), f"{seconds.waiting_share:.0%}"))
    columns = ["ranks", "weights, gradients, states", "activations", "with sequence parallelism", "sent in a step"]
    return Table([*columns, "of a block's time waiting"], rows)
