"""The batches of an epoch, drawn: how much of each is text, and how much padding."""

from __future__ import annotations

from memlab.book.epochs import BUDGETS, WAYS, shapes, waste
from memlab.book.interactive import Interactive
from memlab.book.style import COLOURS, HATCHES, LABEL_SIZE, SMALL_SIZE, Picture, canvas, finish


def draw_batches(way: str = "fixed size", budget: int = 8192) -> Picture:
    """Each batch of an epoch as a bar: its text, its padding above, and the budget as a line."""
    batches = shapes(way, budget)
    figure, axes = canvas(8, 3.4, bottom=0.8)
    padded = [rows * tokens for rows, tokens, _ in batches]
    text = [tokens for *_, tokens in batches]
    places, width = range(1, len(batches) + 1), 0.85 if len(batches) < 100 else 1.0
    look = {"edgecolor": "black", "linewidth": 0.3, "width": width}
    axes.bar(places, text, color=COLOURS["activation"], label="text", **look)
    padding = [all_of_it - some for all_of_it, some in zip(padded, text, strict=True)]
    axes.bar(places, padding, bottom=text, color="white", hatch=HATCHES["gradient"], label="padding", **look)
    axes.axhline(budget, color="black", linestyle="--", linewidth=1.4, label=f"{budget:,} tokens")
    axes.set_xlim(0, len(batches) + 1)
    axes.set_ylim(0, max(*padded, budget) * 1.1)
    axes.yaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}")
    rows = sorted(rows for rows, *_ in batches)
    found = (
        f"{len(batches)} batches of {rows[0]} to {rows[-1]} rows; {waste(batches):.1%} padding; "
        f"the largest has {max(padded):,} tokens"
    )
    finish(axes, "batch", "tokens of a batch, in thousands", f"{way}: {found}")
    beside = {"bbox_to_anchor": (0.5, -0.22), "frameon": False, "fontsize": LABEL_SIZE}
    axes.legend(loc="upper center", ncols=3, **beside)
    axes.tick_params(labelsize=SMALL_SIZE)
    return Picture(figure, f"Bars of the tokens of each batch, {way}, against a line at {budget:,}: {found}.")


def explore_batches() -> Interactive:
    """Buttons for the way to make batches, and a slider for how many tokens one is to have."""
    return Interactive(draw_batches, way=WAYS, budget=BUDGETS)
