"""A table of vectors of which each rank holds some rows: what a rank lacks is zero there, and the ranks' sum is whole.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import cut_evenly
from memlab.tensor_parallelism.parameters import SplitLayer, draw_part_
from memlab.tensor_parallelism.regions import reduce_from_ranks


class VocabularyParallelEmbedding(SplitLayer):
    """An embedding of which each rank holds num_embeddings / ranks rows, one after the other.

    num_embeddings, embedding_dim: of the full table, as nn.Embedding's. The ranks divide it.
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
        *,
        reduce: bool = True,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce, self.group = reduce, group
        cut = cut_evenly((num_embeddings, embedding_dim), 0, *place_in(group), what="vocabulary")
        self.make_part("weight", cut, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """What nn.Embedding begins with, a part of it on each rank."""
        draw_part_(self.weight, self.cuts["weight"], lambda numbers: numbers.normal_())

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
            return F.embedding(places, self.weight)
        except IndexError as error:
            raise IndexError(
                f"expected tokens from 0 to {self.num_embeddings - 1}, found some from {tokens.min()} to "
                f"{tokens.max()}; this table has {self.num_embeddings} rows on all ranks together"
            ) from error

    def extra_repr(self) -> str:
        """The full table's sizes, and how many rows are here."""
        return f"{self.num_embeddings}, {self.embedding_dim}, here={self.weight.shape[0]}"
