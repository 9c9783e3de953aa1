"""A GPT as a list of layers, each by itself split over the ranks of a tensor group: chapter 14's parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memlab.tensor_parallelism import (
    ColumnParallelLinear,
    ReplicatedLayerNorm,
    TensorParallelBlock,
    VocabularyParallelEmbedding,
    reduce_from_ranks,
    vocabulary_parallel_cross_entropy,
)


class Embeddings(nn.Module):
    """Tokens (batch, tokens) of int64 → stream (batch, tokens, width)."""

    def __init__(self, width: int, context: int, vocabulary: int, group=None):
        super().__init__()
        self.group = group
        self.token_embedding = VocabularyParallelEmbedding(vocabulary, width, reduce=False, group=group)
        self.position_embedding = VocabularyParallelEmbedding(context, width, reduce=False, group=group)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        summand = self.token_embedding(x) + self.position_embedding(positions)
        return reduce_from_ranks(summand, self.group)


class Block(TensorParallelBlock):
    """Stream (batch, tokens, width) → the same shape."""

    def forward(self, stream: Tensor) -> Tensor:
        return super().forward(stream.flatten(0, 1), stream.shape[0]).view_as(stream)


class Head(nn.Module):
    """Stream (batch, tokens, width) → this tensor rank's logits (batch · tokens, vocabulary / tensor ranks)."""

    def __init__(self, width: int, vocabulary: int, group=None):
        super().__init__()
        self.norm = ReplicatedLayerNorm(width, group=group)
        self.head = ColumnParallelLinear(width, vocabulary, bias=False, group=group)

    def forward(self, stream: Tensor) -> Tensor:
        return self.head(self.norm(stream.flatten(0, 1)))


def gpt_layers(
    layers: int, width: int, heads: int, context: int, vocabulary: int, *, group=None
) -> list[Callable[[], nn.Module]]:
    """Functions that make a GPT's layers: embeddings, blocks, head. group: the tensor group, of one or more ranks."""
    return [
        functools.partial(Embeddings, width, context, vocabulary, group),
        *[functools.partial(Block, width, heads, group=group) for _ in range(layers)],
        functools.partial(Head, width, vocabulary, group),
    ]


def gpt_loss(logits: Tensor, y: Tensor, *, group=None) -> Tensor:
    """Mean cross-entropy of (batch · tokens, part of the vocabulary) against y (batch, tokens)."""
    return vocabulary_parallel_cross_entropy(logits, y.flatten(), in_place=True, group=group)
