"""Packing: several documents in one row, so that hardly any token is padding.

A row of `row_tokens` tokens is a bin, and a document fills as many of them as it is long. *Best fit, decreasing*:
each document, the longest first, goes into the fullest row that still has room for it. The short ones come last and
fill what is left. It needs at most 11/9 of the fewest rows possible, and 4 more. Johnson et al. 1974.

What shares a row must not meet. Three things keep each document's loss and gradients what they would be alone:

    labels      the last token of a document has none, since the next token is another document's
    positions   start at 0 in each document
    mask        a token looks at its own document only, up to itself: causal and block-diagonal

Without them the model is *contaminated*: it runs, and learns from neighbours by chance. Krell et al. 2021.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.checking import positive
from memlab.gradient_accumulation.token_batches import refuse_seed, within


def pack(lengths: Iterable[int], row_tokens: int, *, seed: int = 0) -> list[list[int]]:
    """Rows of indices into `lengths`, every index once, the lengths in a row adding up to at most `row_tokens`.

    seed: shuffles the rows, and among equal lengths decides which goes where.

    Takes O(n log n) comparisons. Raises TypeError and ValueError as `token_batches` does.

    >>> sorted(map(sorted, pack([30, 5, 28, 6, 7], row_tokens=40)))
    [[0, 4], [1, 2, 3]]
    """
    positive("row_tokens", row_tokens)
    refuse_seed(seed)
    lengths = within(lengths, "row_tokens", row_tokens)
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    rows, room = [], []  # room: (tokens left, row) of every row that is not full, the fullest row first
    for i in sorted(order, key=lengths.__getitem__, reverse=True):
        fits = bisect_left(room, (lengths[i], 0))
        if fits < len(room):
            left, row = room.pop(fits)
        else:
            left, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(i)
        if left > lengths[i]:
            insort(room, (left - lengths[i], row))
    rng.shuffle(rows)
    return rows


class Packed(NamedTuple):
    """Rows of documents, each field (rows, row_tokens) of int64. `model(*packed)` is the loss of a `PackedGPT`.

    x: tokens. y: the next token of the same document, or `ignore_index`. documents: which document of its row a token
    is of, from 0; −1 is padding. positions: how far in its document it stands, from 0; padding has 0.
    """

    x: Tensor
    y: Tensor
    documents: Tensor
    positions: Tensor


def pack_rows(
    examples: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    row_tokens: int,
    *,
    padding: int = 0,
    ignore_index: int = -100,
) -> Packed:
    """The tensors of packed rows, on the examples' device.

    examples: each (tokens,) of int64. rows: lists of indices into them, as `pack` gives; a few of its rows are a batch.
    A document of one token has no label, and no part in the loss.

    Raises TypeError for an example of another dtype and a row_tokens that is no int; ValueError for an example of
    another shape or without a token, for no examples, and for a row that is too long; IndexError for an index of none.
    """
    if not len(examples):
        raise ValueError("expected at least one example, found none")
    positive("row_tokens", row_tokens)
    shape, device = (len(rows), row_tokens), getattr(examples[0], "device", None)
    full = lambda value: torch.full(shape, value, dtype=torch.int64, device=device)  # noqa: E731
    packed = Packed(x=full(padding), y=full(ignore_index), documents=full(-1), positions=full(0))
    for r, row in enumerate(rows):
        start = 0
        for document, i in enumerate(row):
            if not 0 <= i < len(examples):
                raise IndexError(f"expected indices from 0 to {len(examples) - 1} in rows, found {i} in row {r}")
            tokens = examples[i]
            if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
                found = tokens.dtype if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}, no tensor,"
                raise TypeError(f"expected examples of torch.int64, found {found} in example {i}; make it .long()")
            if tokens.dim() != 1 or not len(tokens):
                raise ValueError(f"expected examples of shape (tokens,), found {tuple(tokens.shape)} in example {i}")
            stop = start + len(tokens)
            if stop > row_tokens:
                total = sum(len(examples[i]) for i in row)
                raise ValueError(
                    f"expected rows of at most {row_tokens:,} tokens (row_tokens), found {total:,} in row {r}; "
                    "make rows of these examples' lengths with pack()"
                )
            packed.x[r, start:stop] = tokens
            packed.y[r, start : stop - 1] = tokens[1:]
            packed.documents[r, start:stop] = document
            packed.positions[r, start:stop] = torch.arange(stop - start, device=device)
            start = stop
    return packed


def pad_rows(examples: Sequence[Tensor], *, padding: int = 0, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """x and y of the padded batch: one example a row, each as long as the longest; both (examples, longest) of int64.

    Padding stands on the right, where no token of a causal model looks, so it needs no mask. A `collate_fn` for torch's
    DataLoader.
    """
    alone = [[i] for i in range(len(examples))]
    longest = max(map(len, examples), default=0) or 1
    packed = pack_rows(examples, alone, longest, padding=padding, ignore_index=ignore_index)
    return packed.x, packed.y


def document_mask(documents: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
    """Who may look at whom: [row, 0, i, j] is True if token i may look at token j, of the same document and j <= i.

    documents: (rows, tokens), as in `Packed` → (rows, 1, tokens, tokens). Padding is a document like any other: its
    tokens look at each other, so that no softmax is over nothing, and no other token looks at them.
    dtype: a floating-point one makes what is added to the scores: 0 for True, −inf for False. Fused attention turns a
      mask of bool into that in every layer, and keeps each copy for backward; made once, it is shared.

    It takes rows × tokens² × itemsize bytes, whatever the heads, and all tokens² scores are computed before most are
    thrown away: in long rows that costs more time than padding did. It is made to be read; production never makes it.
    FlexAttention's BlockMask has one entry for 128 × 128 tokens, and skips those where no two share a document
    (`torch.nn.attention.flex_attention`); varlen attention takes the documents' bounds instead
    (`torch.nn.attention.varlen.varlen_attn`). Both train on a GPU only, with torch 2.11 and 2.13.
    """
    seen = (documents[:, :, None] == documents[:, None, :]).tril_()[:, None]
    if dtype is torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
