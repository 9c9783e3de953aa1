"""A whole GPT on several ranks. Its parameters have the names of a plain one's, and each rank has a part of most.

All tables and all weights of linear layers are cut; norms and the biases of row parallel layers are whole on every
rank. The two embeddings need one sum together; logits stay cut, and so does their loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from memlab.ranks import place_in
from memlab.tensor_parallelism.blocks import ReplicatedLayerNorm, TensorParallelBlock
from memlab.tensor_parallelism.cross_entropy import vocabulary_parallel_cross_entropy
from memlab.tensor_parallelism.cuts import share
from memlab.tensor_parallelism.embedding import VocabularyParallelEmbedding
from memlab.tensor_parallelism.linear import ColumnParallelLinear
from memlab.tensor_parallelism.random import StreamDropout
from memlab.tensor_parallelism.regions import reduce_from_ranks, reduce_scatter_sequence


class TensorParallelGPT(nn.Module):
    """A decoder-only transformer, split over the ranks of a group.

    layers, width, heads, context, vocabulary, kv_heads, hidden: of the whole model. heads, context, vocabulary and
      hidden (None: 4 · width) divide by the number of ranks; kv_heads (None: as many as heads) do, or divide it.
    dropout: of embeddings, attention weights, and what each half of a block adds.
    sequence_parallel: between its layers each rank holds its rows only; batch · tokens must divide by the ranks.
    keep_gathered: as of ColumnParallelLinear.

    x, y: (batch, tokens) of int64, the same on all ranks. `model(x, y)` is the mean cross-entropy, the same scalar on
    all ranks; `model(x)` this rank's part of the logits, (batch, tokens, vocabulary / ranks): gather_from_ranks makes
    them whole. To tie the head to the token embedding, say model.head.weight = model.token_embedding.weight.

    With one seed on all ranks the weights begin as those of a plain GPT under that seed. Raises ValueError for sizes
    that the ranks do not divide, saying which do.
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
        keep_gathered: bool = False,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        for number, what in ((vocabulary, "entries of the vocabulary"), (context, "positions of the context")):
            share(number, what, place_in(group)[1])
        self.sequence_parallel, self.group = sequence_parallel, group
        made = {"group": group, "device": device, "dtype": dtype}
        self.token_embedding = VocabularyParallelEmbedding(vocabulary, width, reduce=False, **made)
        self.position_embedding = VocabularyParallelEmbedding(context, width, reduce=False, **made)
        self.dropout = StreamDropout(dropout, sequence_parallel=sequence_parallel, group=group)
        made["sequence_parallel"] = sequence_parallel
        sizes = {"kv_heads": kv_heads, "hidden": hidden, "dropout": dropout, "keep_gathered": keep_gathered}
        self.blocks = nn.ModuleList(TensorParallelBlock(width, heads, **sizes, **made) for _ in range(layers))
        self.norm = ReplicatedLayerNorm(width, **made)
        self.head = ColumnParallelLinear(width, vocabulary, bias=False, keep_gathered=keep_gathered, **made)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        batch, tokens = x.shape
        if self.sequence_parallel:
            share(batch * tokens, "rows (batch · tokens)", place_in(self.group)[1])
        tables = self.token_embedding, self.position_embedding
        stream = self.dropout(embedded(tables, x, self.sequence_parallel, self.group))
        for block in self.blocks:
            stream = block(stream, batch)
        logits = self.head(self.norm(stream))
        if y is None:
            return logits.view(batch, tokens, -1)
        return vocabulary_parallel_cross_entropy(logits, y.flatten(), in_place=True, group=self.group)


def embedded(tables: Sequence[VocabularyParallelEmbedding], x: Tensor, sequence_parallel: bool, group=None) -> Tensor:
    """The stream's beginning: the sum over ranks of what both tables have there, of all rows or this rank's.

    tables: of tokens and positions, with reduce=False. x: (batch, tokens) of int64 → (batch · tokens, width), or with
    sequence_parallel (batch · tokens / ranks, width). Raises ValueError for texts longer than the context, and empty
    ones.
    """
    of_tokens, of_positions = tables
    tokens, context = x.shape[1], of_positions.num_embeddings
    if tokens > context:
        raise ValueError(f"expected at most {context} tokens (the context), found {tokens}")
    if x.numel() == 0:
        raise ValueError(f"expected at least one text of at least one token, found x of shape {tuple(x.shape)}")
    summand = of_tokens(x) + of_positions(torch.arange(tokens, device=x.device))
    if sequence_parallel:
        return reduce_scatter_sequence(summand.flatten(0, 1), group)
    return reduce_from_ranks(summand, group, inplace=True).flatten(0, 1)
