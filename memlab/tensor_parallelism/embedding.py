"""A table of vectors of which each rank holds some rows: what a rank lacks is zero there, and the ranks' sum is whole.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import cut_evenly
from memlab.tensor_parallelism.parameters import SplitLayer, draw_part_
from memlab.tensor_parallelism.regions import reduce_from_ranks


class VocabularyParallelEmbedding(SplitLayer):
    """An embedding of which each rank holds num_embeddings / ranks rows, one after the other.

    num_embeddings, embedding_dim: of the full table, as nn.Embedding's. A vocabulary that the ranks do not divide is
      padded: with more rows, such as the error names, that no token asks for. (As weight of the head those rows make
      logits, too: `vocabulary_parallel_cross_entropy(..., vocabulary=)` leaves them out.)
    padding_idx: a token whose vector is zero to begin with and gets no gradient, as nn.Embedding's.
    reduce: True, all ranks return the whole; False, this rank's summand, zero where it has no row. Summands of several
      tables may be added before one sum.

    tokens: (...,) of int64 or int32, the same on all ranks → (..., embedding_dim). Sends, with reduce=True, one
    all-reduce of the result, and nothing in backward. Saved for backward: the tokens' places in this rank's table, and
    one byte a token that says which are elsewhere.

    Raises ValueError for a vocabulary that the ranks do not divide; IndexError, on all ranks, for tokens that are not
    in the full table. A GPU notices those by itself, as nn.Embedding's: a device-side assert, later.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        reduce: bool = True,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"expected padding_idx in the vocabulary of {num_embeddings}, found {padding_idx}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.reduce, self.group = reduce, group
        cut = cut_evenly((num_embeddings, embedding_dim), 0, *place_in(group), what="vocabulary")
        self.make_part("weight", cut, device, dtype)
        self.reset_parameters()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, **options) -> VocabularyParallelEmbedding:
        """This rank's part of a table that exists whole. options: as of the class. One on "meta" has no values yet.

        Raises ValueError for an embedding with max_norm, scale_grad_by_freq or sparse, which this one has not.
        """
        unknown = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(embedding, name)]
        if unknown:
            raise ValueError(f"expected an embedding without {unknown[0]}, found it set; a split one does not have it")
        sizes = embedding.num_embeddings, embedding.embedding_dim
        return cls._from_whole(embedding, *sizes, **{"padding_idx": embedding.padding_idx, **options})

    @property
    def _own_padding(self) -> int | None:
        """The padding's place in this rank's table."""
        ((start, stop),) = self.cuts["weight"].ranges()
        here = self.padding_idx is not None and start <= self.padding_idx < stop
        return self.padding_idx - start if here else None

    def reset_parameters(self) -> None:
        """What nn.Embedding begins with, a part of it on each rank."""
        draw_part_(self.weight, self.cuts["weight"], lambda numbers: numbers.normal_())
        if (padding := self._own_padding) is not None:
            with torch.no_grad():
                self.weight[padding].zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        ((start, stop),) = self.cuts["weight"].ranges()
        if stop - start == self.num_embeddings:
            rows = self._look_up(tokens, tokens)
            return reduce_from_ranks(rows, self.group) if self.reduce else rows
        # A token of no rank is sent to no other: F.embedding finds it out of range, without waiting for a GPU.
        before = (tokens < start) & (tokens >= 0)
        elsewhere = before.logical_or_((tokens >= stop) & (tokens < self.num_embeddings))
        rows = self._look_up((tokens - start).masked_fill_(elsewhere, 0), tokens)
        rows = rows.masked_fill_(elsewhere[..., None], 0)
        return reduce_from_ranks(rows, self.group) if self.reduce else rows

    def _look_up(self, places: Tensor, tokens: Tensor) -> Tensor:
        try:
            return F.embedding(places, self.weight, self._own_padding)
        except IndexError as error:
            raise IndexError(
                f"expected tokens from 0 to {self.num_embeddings - 1}, found some from {tokens.min()} to "
                f"{tokens.max()}; this table has {self.num_embeddings} rows on all ranks together"
            ) from error

    def extra_repr(self) -> str:
        """The full table's sizes, and how many rows are here."""
        return f"{self.num_embeddings}, {self.embedding_dim}, here={self.weight.shape[0]}"
