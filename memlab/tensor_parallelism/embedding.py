"""A table of vectors of which each rank holds some rows: what a rank lacks is zero there, and the ranks' sum is whole.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import cut_evenly
from memlab.tensor_parallelism.parameters import draw_part_, make_part
from memlab.tensor_parallelism.regions import reduce_from_ranks


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which each rank holds num_embeddings / ranks rows, one after the other.

    num_embeddings, embedding_dim: of the full table, as nn.Embedding's.
    reduce: True, all ranks return the whole; False, this rank's summand, zero where it has no row. Summands of several
      tables may be added before one sum.

    tokens: (...,) of int64, the same on all ranks → (..., embedding_dim).
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, reduce: bool = True, group=None, device=None, dtype=None
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.reduce, self.group = num_embeddings, embedding_dim, reduce, group
        cut = cut_evenly((num_embeddings, embedding_dim), 0, *place_in(group), what="vocabulary")
        self.weight = make_part(cut, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """What nn.Embedding begins with, a part of it on each rank."""
        draw_part_(self.weight, self.weight._cut, lambda numbers: numbers.normal_())

    def forward(self, tokens: Tensor) -> Tensor:
        ((start, stop),) = self.weight._cut.ranges()
        elsewhere = (tokens < start) | (tokens >= stop)
        rows = F.embedding((tokens - start).masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere[..., None], 0)
        return reduce_from_ranks(rows, self.group) if self.reduce else rows
