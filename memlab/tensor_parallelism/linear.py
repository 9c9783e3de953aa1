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
from torch.nn import functional as F

from memlab.ranks import place_in
from memlab.tensor_parallelism.cuts import Cut, cut_evenly, cut_of
from memlab.tensor_parallelism.parameters import draw_part_, make_part
from memlab.tensor_parallelism.regions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    reduce_scatter_sequence,
    scatter_to_ranks,
)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs.

    in_features, out_features: of the full layer, as nn.Linear's. This rank's weight is (out_features / ranks,
      in_features), its bias (out_features / ranks,).
    sections: sizes of several outputs stacked on each other, as (width, width, width) of queries, keys and values: each
      rank has its piece of every one. Together they are out_features.
    gather_output: False, y is this rank's part; True, the whole on every rank.
    sequence_parallel: x is this rank's rows (rows / ranks, ..., in_features), and they are gathered here.

    x: (..., in_features), the same on all ranks → (..., out_features / ranks), or (..., out_features).
    Raises ValueError for sizes that the ranks do not divide, and for an x that is already split.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sections: Sequence[int] | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_parallel, self.group = gather_output, sequence_parallel, group
        place = place_in(group)
        options = {"device": device, "dtype": dtype}
        cut = cut_evenly((out_features, in_features), 0, *place, sections, "number of outputs")
        self.weight = make_part(cut, **options)
        self.bias = make_part(cut_evenly((out_features,), 0, *place, sections), **options) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options) -> ColumnParallelLinear:
        """This rank's part of a layer that exists whole. options: as of the class. One on "meta" gives no values."""
        return _from_linear(cls, linear, options)

    def reset_parameters(self) -> None:
        """What nn.Linear begins with, a part of it on each rank."""
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = gather_sequence(x, self.group) if self.sequence_parallel else copy_to_ranks(x, self.group)
        y = F.linear(x, self.weight, self.bias)
        return gather_from_ranks(y, self.group) if self.gather_output else y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, here={self.weight.shape[0]}"


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank reads some of the inputs; their products are summed.

    in_features, out_features: of the full layer. This rank's weight is (out_features, in_features / ranks); the bias is
      (out_features,) on every rank, and is added once, after the sum.
    input_is_parallel: True, x is this rank's part; False, x is whole, and its part is taken here.
    sequence_parallel: y is this rank's rows of the sum, (rows / ranks, ..., out_features).

    x: (..., in_features / ranks), or (..., in_features) → (..., out_features), the same on all ranks.
    Raises ValueError for sizes that the ranks do not divide, and for an x that is split and should not be, or should.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.sequence_parallel, self.group = input_is_parallel, sequence_parallel, group
        options = {"device": device, "dtype": dtype}
        self.weight = make_part(cut_evenly((out_features, in_features), 1, *place_in(group), what="width"), **options)
        self.bias = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options) -> RowParallelLinear:
        """This rank's part of a layer that exists whole. options: as of the class. One on "meta" gives no values."""
        return _from_linear(cls, linear, options)

    def reset_parameters(self) -> None:
        """What nn.Linear begins with, a part of it on each rank."""
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_ranks(x, self.group)
        y = F.linear(x, self.weight)
        bias = self.bias
        if self.sequence_parallel:
            y = reduce_scatter_sequence(y, self.group)
            bias = None if bias is None else copy_to_ranks(bias, self.group)  # each rank adds it to its rows only
        else:
            y = reduce_from_ranks(y, self.group)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, here={self.weight.shape[1]}"


def _from_linear(cls, linear: nn.Linear, options: dict):
    if not linear.weight.is_meta:
        options = {"device": linear.weight.device, **options}
    layer = cls(
        linear.in_features, linear.out_features, linear.bias is not None, **{"dtype": linear.weight.dtype, **options}
    )
    if not linear.weight.is_meta:
        with torch.no_grad():
            for name, part in layer.named_parameters():
                full, cut = getattr(linear, name), cut_of(part)
                part.copy_(full if cut is None else cut.part_of(full))
    return layer


def _initialise(layer) -> None:
    """nn.Linear's uniform distribution, bounded by 1 / √in_features."""
    bound = 1 / math.sqrt(layer.in_features)
    draw = lambda numbers: numbers.uniform_(-bound, bound)  # noqa: E731
    for p in layer.parameters():
        draw_part_(p, cut_of(p) or Cut(tuple(p.shape), 0, 0, 1, ((p.shape[0], 1),)), draw)
