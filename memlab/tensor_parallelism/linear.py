"""The two ways to split a matmul, as layers: by columns (each rank some outputs) and by rows (each some inputs).

    y = x Aᵀ    A = [A₀; A₁]       column parallel: y = [x A₀ᵀ, x A₁ᵀ], each rank has a part of y and needs all of x
    z = y Bᵀ    B = [B₀, B₁]       row parallel: z = y₀ B₀ᵀ + y₁ B₁ᵀ, each rank needs a part of y and has a summand

One after the other they need one sum, at the end of the pair, and one in backward, at its beginning. (Textbooks write
y = x A, where A is (in, out): there a column parallel layer does cut columns. PyTorch stores (out, in).)

Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import cut_evenly
from memlab.tensor_parallelism.overlap import Sending, column_linear
from memlab.tensor_parallelism.parameters import SplitLayer, draw_part_
from memlab.tensor_parallelism.regions import neighbours, reduce_from_ranks, reduce_scatter_sequence


class SplitLinear(SplitLayer):
    """What the two have in common: what they begin with."""

    def reset_parameters(self) -> None:
        """What nn.Linear begins with, a part of it on each rank.

        Uniform within 1 / √in_features, for the weight with nn.Linear's own rounding error.
        """
        gain, root = nn.init.calculate_gain("leaky_relu", math.sqrt(5)), math.sqrt(self.in_features)
        for name, bound in (("weight", math.sqrt(3) * (gain / root)), ("bias", 1 / root)):
            if (p := getattr(self, name)) is not None:
                draw_part_(p, self.cuts.get(name), lambda numbers, bound=bound: numbers.uniform_(-bound, bound))

    def extra_repr(self) -> str:
        """The full layer's sizes, and what of them is here."""
        here = self.weight.shape[self.cuts["weight"].dim]
        return f"in_features={self.in_features}, out_features={self.out_features}, here={here}"


class ColumnParallelLinear(SplitLinear):
    """A linear layer of which each rank computes some of the outputs.

    in_features, out_features: of the full layer, as nn.Linear's. This rank's weight is (out_features / ranks,
      in_features), its bias (out_features / ranks,).
    sections: sizes of several outputs stacked on each other, as (width, width, width) of queries, keys and values: each
      rank has its piece of every one. A pair (size, pieces) makes fewer pieces than there are ranks; neighbours hold
      the same one, and the sum of its gradient, over them: an all-reduce of the bytes of that piece in every backward.
    sequence_parallel: x is this rank's rows (rows / ranks, ..., in_features), and they are gathered here. Only the own
      rows are kept for backward and gathered once more there, while dx is computed. keep_gathered: all rows are kept,
      for the traffic of a layer without; also the choice inside a checkpoint, which has just gathered them again.

    x: (..., in_features), the same on all ranks → (..., out_features / ranks): `gather_from_ranks` makes it whole.
    Backward sums dx over ranks while it computes the weight's gradient. It cannot be differentiated again.
    Raises ValueError for sizes that the ranks do not divide, and for an x that is already split.

    >>> from memlab.ranks import imagined_ranks
    >>> with imagined_ranks(4):
    ...     ColumnParallelLinear(8, 12)
    ColumnParallelLinear(in_features=8, out_features=12, here=3)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sections: Sequence[int | tuple[int, int]] | None = None,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        rank, ranks = place_in(group)
        self.in_features, self.out_features, self.ranks, self.group = in_features, out_features, ranks, group
        self.sequence_parallel = sequence_parallel
        what = "number of outputs"
        cut = cut_evenly((out_features, in_features), 0, rank, ranks, sections, what)
        self.make_part("weight", cut, device, dtype)
        if bias:
            self.make_part("bias", cut_evenly((out_features,), 0, rank, ranks, sections, what), device, dtype)
        else:
            self.register_parameter("bias", None)
        self.sending = Sending(group, sequence_parallel, keep_gathered, tuple(cut.shared()))
        for _, _, copies in self.sending.shared:
            neighbours(copies, group)  # made here, where all ranks are
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        _expect(x, self, whole=True)
        if self.ranks == 1:
            return F.linear(x, self.weight, self.bias)
        return column_linear(x, self.weight, self.bias, self.sending)


class RowParallelLinear(SplitLinear):
    """A linear layer of which each rank reads some of the inputs; their products are summed.

    in_features, out_features: of the full layer. This rank's weight is (out_features, in_features / ranks); the bias is
      (out_features,) on every rank, with the same gradient, and is added once: to rank 0's summand.
    sequence_parallel: y is this rank's rows of the sum, (rows / ranks, ..., out_features).

    x: (..., in_features / ranks), this rank's part, as `scatter_to_ranks` takes it of a whole one →
    (..., out_features), the same on all ranks.
    Raises ValueError for sizes that the ranks do not divide, and for an x that is whole.

    >>> from memlab.ranks import imagined_ranks
    >>> with imagined_ranks(4):
    ...     RowParallelLinear(8, 12).weight.shape
    torch.Size([12, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        rank, ranks = place_in(group)
        self.in_features, self.out_features, self.ranks, self.group = in_features, out_features, ranks, group
        self.sequence_parallel = sequence_parallel
        cut = cut_evenly((out_features, in_features), 1, rank, ranks, what="number of inputs")
        self.make_part("weight", cut, device, dtype)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        _expect(x, self, whole=False)
        bias = None if self.bias is None else _OnRank0.apply(self.bias, place_in(self.group)[0])
        summand = F.linear(x, self.weight, bias)
        if self.sequence_parallel:
            return reduce_scatter_sequence(summand, self.group)
        return reduce_from_ranks(summand, self.group, inplace=True)


class _OnRank0(Function):
    """A bias for rank 0's summand, nothing for the others'; its gradient is that of the sum, which all ranks have."""

    @staticmethod
    def forward(ctx, bias, rank):
        return bias.view_as(bias) if rank == 0 else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx, db):
        return db, None


def _expect(x: Tensor, layer: SplitLinear, whole: bool) -> None:
    """Raise ValueError if x is not of the shape that a layer reads."""
    part = layer.in_features // layer.ranks
    expected = layer.in_features if whole else part
    if layer.sequence_parallel and x.dim() == 1:
        raise ValueError(f"expected rows, (rows, ..., features), for sequence_parallel; found x of {tuple(x.shape)}")
    if not x.dim() or x.shape[-1] != expected:
        raise ValueError(
            f"expected {'a whole x' if whole else 'a part of x'}, (..., {expected}), found {tuple(x.shape)}; the layer "
            f"reads {layer.in_features} features, {part} on each of {layer.ranks} ranks, and "
            f"{'gather_from_ranks makes parts whole' if whole else 'scatter_to_ranks takes the part of a whole x'}"
        )
