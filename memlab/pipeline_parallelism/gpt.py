"""A GPT as a list of layers, for a pipeline: chapter 14's parts, each by itself split over the ranks of a tensor group.

Parameters have the names of a GPT's, behind their layer's number: "0.token_embedding.weight", "1.norm1.weight", and for
a GPT of 4 blocks "5.head.weight". To tie the head to the table of tokens:

    plan_pipeline(layers, schedule, x, tied=[("0.token_embedding.weight", "5.head.weight")])
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor, nn

from memlab.ranks import ALONE, place_in
from memlab.tensor_parallelism import (
    ColumnParallelLinear,
    ReplicatedLayerNorm,
    StreamDropout,
    TensorParallelBlock,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)
from memlab.tensor_parallelism.cuts import share
from memlab.tensor_parallelism.gpt import embedded


class Embeddings(nn.Module):
    """The stream's beginning. x: (batch, tokens) of int64 → (batch, tokens, width).

    With sequence_parallel → (batch, tokens / ranks, width): this rank's rows of all batch · tokens, in a shape that
    tells the next layer the batch.
    """

    def __init__(
        self,
        width: int,
        context: int,
        vocabulary: int,
        *,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        group=None,
        **options,
    ):
        super().__init__()
        _, self.ranks = place_in(group)
        for number, what in ((vocabulary, "entries of the vocabulary"), (context, "positions of the context")):
            share(number, what, self.ranks)
        self.sequence_parallel, self.group = sequence_parallel, group
        options |= {"reduce": False, "group": group}
        self.token_embedding = VocabularyParallelEmbedding(vocabulary, width, **options)
        self.position_embedding = VocabularyParallelEmbedding(context, width, **options)
        self.dropout = StreamDropout(dropout, sequence_parallel=sequence_parallel, group=group)

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            share(x.shape[1], "tokens", self.ranks)
        tables = self.token_embedding, self.position_embedding
        rows = embedded(tables, x, self.sequence_parallel, self.group)
        return self.dropout(rows.view(x.shape[0], -1, rows.shape[-1]))


class Block(TensorParallelBlock):
    """A TensorParallelBlock of a stream (batch, tokens, width), or this rank's rows of it → the same shape."""

    def forward(self, stream: Tensor) -> Tensor:
        return super().forward(stream.flatten(0, 1), stream.shape[0]).view_as(stream)


class Head(nn.Module):
    """Stream (batch, tokens, width), or this rank's rows → its logits (batch · tokens, vocabulary / ranks)."""

    def __init__(self, width: int, vocabulary: int, *, keep_gathered: bool = False, **options):
        super().__init__()
        self.norm = ReplicatedLayerNorm(width, **options)
        self.head = ColumnParallelLinear(width, vocabulary, bias=False, keep_gathered=keep_gathered, **options)

    def forward(self, stream: Tensor) -> Tensor:
        return self.head(self.norm(stream.flatten(0, 1)))


def gpt_layers(
    layers: int,
    width: int,
    heads: int,
    context: int,
    vocabulary: int,
    *,
    kv_heads: int | None = None,
    hidden: int | None = None,
    dropout: float = 0.0,
    sequence_parallel: bool = False,
    keep_gathered: bool = False,
    group=None,
    device=None,
    dtype=None,
) -> list[Callable[[], nn.Module]]:
    """Functions that make a GPT's layers: embeddings, `layers` blocks, head. Called in order under one seed, they begin
    with the weights of a plain GPT under that seed, and so of TensorParallelGPT.

    group: the tensor group, whose ranks each have a part of every layer. None: no layer is split, and no process group
      is needed to plan with them. (Elsewhere in memlab None means all ranks.)
    sequence_parallel: between layers each tensor rank holds its rows only: so it sends 1 / ranks of the stream to the
      next stage, too. It must divide the tokens of a text.
    Other options and sizes: as of TensorParallelGPT.

    With dropout, give the ranks of different stages and different data different seeds once the layers are made, and
    those of one tensor group the same.

    Made layers raise ValueError for sizes that the tensor ranks do not divide; called, for texts longer than the
    context, empty ones, and tokens that they do not divide: `plan_pipeline` says all of it before a rank begins.
    """
    group = ALONE if group is None else group
    shared = {"sequence_parallel": sequence_parallel, "group": group, "device": device, "dtype": dtype}
    of_block = {"kv_heads": kv_heads, "hidden": hidden, "dropout": dropout, "keep_gathered": keep_gathered}
    return [
        functools.partial(Embeddings, width, context, vocabulary, dropout=dropout, **shared),
        *[functools.partial(Block, width, heads, **of_block, **shared) for _ in range(layers)],
        functools.partial(Head, width, vocabulary, keep_gathered=keep_gathered, **shared),
    ]


def gpt_loss(logits: Tensor, y: Tensor, *, group=None) -> Tensor:
    """Mean cross-entropy. logits: (batch · tokens, vocabulary / ranks), whose memory becomes their gradient's;
    y: (batch, tokens) of int64. Returns a scalar, the same on all ranks of the tensor group.

    group: as `gpt_layers` was given. Raises IndexError for targets that are not in the vocabulary.
    """
    group = ALONE if group is None else group
    return vocabulary_parallel_cross_entropy(logits, y.flatten(), in_place=True, group=group)
