"""An epoch over the committed length list, cut into batches in several ways: how many of their tokens are text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.utils.data import BatchSampler, RandomSampler

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
