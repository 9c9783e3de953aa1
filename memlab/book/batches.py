"""Batches of the committed length list, drawn: how many of the tokens that a model computes are text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.utils.data import BatchSampler, RandomSampler

from memlab.book.interactive import Interactive
from memlab.book.style import COLOURS, HATCHES, LABEL_SIZE, SMALL_SIZE, Picture, canvas, finish
from memlab.book.workloads import lengths
from memlab.gradient_accumulation import pack, token_batches

ROW_TOKENS = 4096
BUDGETS = {"4,096": 4096, "8,192": 8192, "16,384": 16384}  # tokens
WAYS = ("fixed size", "by tokens", "sorted in windows", "sorted", "packed")


@functools.lru_cache(maxsize=64)
def shapes(way: str, budget: int, seed: int = 0) -> tuple[tuple[int, int, int], ...]:
    """The batches of one epoch over `lengths()`: rows, tokens a row, and how many of all these tokens are text.

    way: "fixed size", as many examples as have `budget` tokens on average, by PyTorch's samplers; "by tokens", as many
      as come, in shuffled order; "sorted in windows" of 128, or "sorted": `token_batches` within the budget; "packed":
      as many rows of 4,096 tokens as the budget has.
    """
    known = lengths()
    if way == "packed":
        rows = pack(known, ROW_TOKENS, seed=seed)
        batches = [rows[start : start + budget // ROW_TOKENS] for start in range(0, len(rows), budget // ROW_TOKENS)]
        return tuple((len(batch), ROW_TOKENS, sum(known[i] for row in batch for i in row)) for batch in batches)
    if way == "fixed size":
        order = RandomSampler(known, generator=torch.Generator().manual_seed(seed))
        batches = BatchSampler(order, round(budget * len(known) / sum(known)), drop_last=False)
    else:
        window = {"by tokens": 1, "sorted in windows": 128, "sorted": None}[way]
        batches = token_batches(known, budget, window=window, seed=seed)
    return tuple((len(batch), max(known[i] for i in batch), sum(known[i] for i in batch)) for batch in batches)


def waste(batches: Sequence[tuple[int, int, int]]) -> float:
    """The share of padding in batches as `shapes` gives them."""
    return 1 - sum(text for *_, text in batches) / sum(rows * tokens for rows, tokens, _ in batches)


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
