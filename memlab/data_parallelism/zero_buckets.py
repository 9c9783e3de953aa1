"""Buckets for ZeRO: the model's parameters become views of flat buffers, and a rank's parts of them, too.

A bucket is a `FlatLayout` filled with weights. The model's parameters are views of it, each in its own shape; the parts
that this rank's optimizer steps are 1-dimensional views of the rank's own piece of the *same* bytes. So a step on the
parts is a step on the model, and what the other ranks stepped arrives by an all-gather in place: nothing is copied.

    bytes of parameters on each rank = Σ over buckets of (elements, padded to a multiple of ranks) · itemsize
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from memlab.data_parallelism.agreement import refuse_unfit
from memlab.data_parallelism.flat import FlatLayout, sharing
from memlab.ranks import all_gather
from memlab.units import format_bytes


class WeightBucket:
    """Some parameters side by side in one buffer, and this rank's part of each.

    params: of one dtype and device. Moving them takes the bytes of one bucket while it lasts: each parameter lets go of
    its own memory as soon as it is copied. `flat` is (padded,), `parts` holds one 1-dimensional Parameter for each
    parameter, empty where none of its elements lie in the rank's piece. `numbers` are the parameters' places among all.
    """

    def __init__(self, params: Sequence[Tensor], numbers: Sequence[int], rank: int, ranks: int):
        self.params, self.numbers = list(params), list(numbers)
        self.layout = layout = FlatLayout([p.shape for p in params], ranks)
        self.flat = torch.empty(layout.padded, dtype=params[0].dtype, device=params[0].device)
        self.flat[layout.numel :].zero_()
        for p, view in zip(params, layout.views(self.flat), strict=True):
            view.copy_(p.detach())
            p.data = view
        self.own = layout.own(self.flat, rank)
        self.parts = [
            Parameter(part, requires_grad=p.requires_grad)
            for p, part in zip(params, layout.part_views(self.own, rank), strict=True)
        ]
        self._versions = [p._version for p in params]

    @property
    def trained(self) -> bool:
        """Whether any of it may have a gradient. Of a bucket that is frozen nothing is ever sent."""
        return self.layout.numel > 0 and any(p.requires_grad for p in self.params)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a parameter is no view of the bucket, as after `model.to(...)`, or was frozen, thawed.

        Also for one that was frozen from the beginning and has a gradient, which would be dropped.
        """
        storage = self.flat.untyped_storage()._cdata
        for number, p, part, at in zip(self.numbers, self.params, self.parts, self.layout.starts, strict=True):
            if p.requires_grad != part.requires_grad or p.grad is not None and not p.requires_grad:
                found = "trained" if p.requires_grad else "frozen" if part.requires_grad else "a gradient of it"
                raise RuntimeError(
                    f"expected parameter {number} {'trained' if part.requires_grad else 'frozen'}, as when "
                    f"ZeroOptimizer was made, found {found}; make another ZeroOptimizer after freezing or thawing"
                )
            if p.untyped_storage()._cdata != storage or p.storage_offset() != at:
                raise RuntimeError(
                    f"expected parameter {number} where ZeroOptimizer laid it, in a bucket of "
                    f"{format_bytes(self.flat.nbytes)} on {self.flat.device}; found it in other memory on {p.device}, "
                    "which no step would reach: call model.to(...), .half() and the like before ZeroOptimizer is made"
                )

    def notice_writes(self) -> None:
        """Where somebody wrote to a parameter, such as `model.load_state_dict`, count it as a write to its part."""
        for p, part, version in zip(self.params, self.parts, self._versions, strict=True):
            if p._version != version:
                increment_version(part)

    def gather(self, group) -> distributed.Work:
        """Begin to fill the bucket with what every rank stepped."""
        return all_gather(self.flat, self.own, group, async_op=True)

    def written(self) -> None:
        """Count a write to each parameter, so that a graph from before the step is refused by backward as ever."""
        for p in self.params:
            increment_version(p)
        self._versions = [p._version for p in self.params]


class Filling:
    """The full gradients of one bucket while they come: `whole` is (padded,), `missing` those that have not."""

    def __init__(self, bucket: WeightBucket):
        layout = bucket.layout
        self.whole = torch.empty_like(bucket.flat)
        self.whole[layout.numel :].zero_()
        self.views = layout.views(self.whole)
        self.missing = set(range(len(bucket.params)))

    def full(self, bucket: WeightBucket) -> bool:
        """Whether every gradient is there that can come."""
        return not any(bucket.params[slot].requires_grad for slot in self.missing)


def as_groups(params) -> list[dict]:
    """Parameter groups, as torch.optim takes them. Raises TypeError for a tensor or a set, ValueError for none."""
    if isinstance(params, Tensor):
        raise TypeError("expected parameters or groups of them, found a tensor; write [tensor]")
    groups = params if isinstance(params, (set, frozenset)) else list(params)
    if not groups:
        raise ValueError("expected parameters, found none; were they all filtered out?")
    if not isinstance(groups, list) or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    if any(isinstance(group["params"], (set, frozenset)) for group in groups):
        raise TypeError("expected parameters in order, found a set, whose order differs from rank to rank; pass a list")
    return [
        group | {"params": [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])}
        for group in groups
    ]


def check_params(params: list[Tensor]) -> None:
    """Raise TypeError or ValueError for parameters that cannot be laid side by side."""
    for number, p in enumerate(params):
        if not isinstance(p, Tensor) or p.layout is not torch.strided or not p.is_leaf:
            found = f"a tensor of {p.layout}, leaf: {p.is_leaf}" if isinstance(p, Tensor) else type(p).__name__
            raise TypeError(f"expected parameters, dense leaf tensors, found {found} as number {number}")
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ValueError(
            f"expected all parameters on one device, found {', '.join(devices)}; a collective runs on one: make a "
            "ZeroOptimizer for the parameters of each"
        )
    refuse_unfit((f"number {number}", p) for number, p in enumerate(params))
    for other, number in sharing(params):
        what = "given twice" if params[other] is params[number] else "in the same memory"
        raise ValueError(
            f"expected every parameter once, found numbers {other} and {number} {what}; tied weights are one "
            "parameter, as model.parameters() gives it"
        )
