"""A whole GPT on several ranks. Its parameters have the names of a plain one's, and each rank has a part of most.

All tables and all weights of linear layers are cut; norms and the biases of row parallel layers are whole on every
rank. The two embeddings need one sum together; logits stay cut, and so does their loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.tensor_parallelism.blocks import ReplicatedLayerNorm, TensorParallelBlock
from memlab.tensor_parallelism.cross_entropy import vocabulary_parallel_cross_entropy
from memlab.tensor_parallelism.embedding import VocabularyParallelEmbedding
from memlab.tensor_parallelism.linear import ColumnParallelLinear
from memlab.tensor_parallelism.regions import reduce_from_ranks, reduce_scatter_sequence


class TensorParallelGPT(nn.Module):
    """A decoder-only transformer, split over the ranks of a group.

    Sizes are the whole model's. x, y: (batch, tokens) of int64, the same on all ranks. `model(x, y)` is the mean
    cross-entropy, the same scalar on all ranks; `model(x)` this rank's part of the logits, (batch, tokens,
    vocabulary / ranks).
    """

    def __init__(
        self,
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
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.context, self.sequence_parallel, self.group = context, sequence_parallel, group
        made = {"group": group, "device": device, "dtype": dtype}
        self.token_embedding = VocabularyParallelEmbedding(vocabulary, width, reduce=False, **made)
        self.position_embedding = VocabularyParallelEmbedding(context, width, reduce=False, **made)
        self.dropout = dropout
        made["sequence_parallel"] = sequence_parallel
        sizes = {"kv_heads": kv_heads, "hidden": hidden, "dropout": dropout}
        self.blocks = nn.ModuleList(TensorParallelBlock(width, heads, **sizes, **made) for _ in range(layers))
        self.norm = ReplicatedLayerNorm(width, **made)
        self.head = ColumnParallelLinear(width, vocabulary, bias=False, **made)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        batch, tokens = x.shape
        if tokens > self.context:
            raise ValueError(f"expected at most {self.context} tokens (the context), found {tokens}")
        positions = torch.arange(tokens, device=x.device)
        summand = (self.token_embedding(x) + self.position_embedding(positions)).flatten(0, 1)
        whole = reduce_scatter_sequence if self.sequence_parallel else reduce_from_ranks
        stream = whole(summand, self.group)
        for block in self.blocks:
            stream = block(stream, batch)
        logits = self.head(self.norm(stream))
        if y is None:
            return logits.view(batch, tokens, -1)
        return vocabulary_parallel_cross_entropy(logits, y.flatten(), group=self.group)
