"""A GPT's layer on several ranks: attention split by heads, feed-forward by its hidden width, a sum at each one's end.

Where the layer's input and output are whole on every rank, everything between two layers is computed and held by every
rank alike: norms, dropout, the stream. Sequence parallelism cuts that, too, by rows: token by token is all that it
computes. The sum at the end of each half is then a reduce-scatter, and before the next half stands an all-gather;
together they move what an all-reduce moves.

Rows are tokens of all texts, one after the other: (batch · tokens, width).

Sources: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from memlab.checking import divisors, positive
from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import share
from memlab.tensor_parallelism.linear import ColumnParallelLinear, RowParallelLinear
from memlab.tensor_parallelism.random import StreamDropout, different_on_ranks
from memlab.tensor_parallelism.regions import copy_to_ranks


class TensorParallelAttention(nn.Module):
    """Causal self-attention of which each rank has some heads.

    width, heads: of the whole layer, width divisible by heads, heads by ranks.
    kv_heads: keys and values that the heads share (None: as many as heads). Their number divides by the ranks; or the
      ranks by it: then neighbours hold the same one, each for heads of its own.
    keep_gathered, sequence_parallel, group, device, dtype: as of ColumnParallelLinear.

    x: (rows, width), rows = batch · tokens of `batch` texts, or with sequence_parallel this rank's rows
    (rows / ranks, width). Returns the same shape.

    Raises ValueError for sizes that do not divide, in forward also for rows that are not of `batch` texts.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        group=None,
        keep_gathered: bool = False,
        **options,
    ):
        super().__init__()
        _, ranks = place_in(group)
        kv_heads = heads if kv_heads is None else kv_heads
        for name, value in (("width", width), ("heads", heads), ("kv_heads", kv_heads)):
            positive(name, value)
        if width % heads:
            raise ValueError(
                f"{heads} heads cannot share a width of {width}; pick heads that divide it ({divisors(width)})"
            )
        if heads % kv_heads:
            raise ValueError(
                f"{kv_heads} key-value heads cannot serve {heads} heads; pick kv_heads that divide them "
                f"({divisors(heads)})"
            )
        self.heads, self.head_size = share(heads, "heads", ranks), width // heads
        copied = ranks % kv_heads == 0  # each rank has one of the keys and values, and ranks / kv_heads have the same
        self.kv_heads = 1 if copied else share(kv_heads, "key-value heads", ranks)
        self.dropout, self.group = dropout, group
        options["group"] = group
        keys, pieces = kv_heads * self.head_size, kv_heads if copied else ranks
        sections = ((width, ranks), (keys, pieces), (keys, pieces))
        self.qkv = ColumnParallelLinear(
            width, width + 2 * keys, sections=sections, keep_gathered=keep_gathered, **options
        )
        self.out = RowParallelLinear(width, width, **options)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        qkv = self.qkv(x)
        if qkv.shape[0] % batch:
            raise ValueError(f"expected rows of {batch} texts of one length, found {qkv.shape[0]} rows")
        qkv = qkv.view(batch, -1, self.heads + 2 * self.kv_heads, self.head_size).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)  # each (batch, its heads, tokens, head size)
        dropout = self.dropout if self.training else 0.0
        with different_on_ranks(self.group, enabled=dropout > 0):
            mixed = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        return self.out(mixed.transpose(1, 2).reshape(qkv.shape[0] * qkv.shape[2], -1))


class TensorParallelFeedForward(nn.Module):
    """Width → hidden → width, of which each rank has its part of the middle. x: (rows, width) → the same.

    hidden: of the whole layer; None is 4 · width. options: as of TensorParallelAttention.
    """

    def __init__(self, width: int, hidden: int | None = None, *, group=None, keep_gathered: bool = False, **options):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        share(hidden, "hidden features", place_in(group)[1])
        options["group"] = group
        self.up = ColumnParallelLinear(width, hidden, keep_gathered=keep_gathered, **options)
        self.down = RowParallelLinear(hidden, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = F.gelu(hidden)
        return self.down(hidden)


class ReplicatedLayerNorm(nn.LayerNorm):
    """A norm that every rank holds. sequence_parallel: of this rank's rows; its gradients are summed over ranks."""

    def __init__(self, width: int, *, sequence_parallel: bool = False, group=None, device=None, dtype=None):
        super().__init__(width, device=device, dtype=dtype)
        self.sequence_parallel, self.group = sequence_parallel, group

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.sequence_parallel:
            weight, bias = copy_to_ranks(weight, self.group), copy_to_ranks(bias, self.group)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class TensorParallelBlock(nn.Module):
    """One layer of a GPT: attention, then feed-forward, each on a normalised copy and added to the stream.

    dropout: of attention weights and of what each half adds. Other options: as of the two halves.

    x: (rows, width), whole on every rank; with sequence_parallel this rank's (rows / ranks, width). batch: how many
    texts the rows are of. Returns the same shape.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        group=None,
        keep_gathered: bool = False,
        **options,
    ):
        super().__init__()
        options |= {"sequence_parallel": sequence_parallel, "group": group}
        halves = {"keep_gathered": keep_gathered, **options}
        self.norm1 = ReplicatedLayerNorm(width, **options)
        self.attention = TensorParallelAttention(width, heads, kv_heads=kv_heads, dropout=dropout, **halves)
        self.norm2 = ReplicatedLayerNorm(width, **options)
        self.feed_forward = TensorParallelFeedForward(width, hidden, **halves)
        self.dropout = StreamDropout(dropout, sequence_parallel=sequence_parallel, group=group)

    def forward(self, x: Tensor, batch: int) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), batch))
        x = x + self.dropout(self.feed_forward(self.norm2(x)))
        return x
