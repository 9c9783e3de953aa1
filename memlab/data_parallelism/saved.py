"""What ops save for backward while a unit runs: of a weight, that it is one, so that it is gathered when asked for.

A saved weight is a view of the unit's buffer, whose bytes are gone in between. So who unpacks it has its unit gathered;
and that nobody wrote to it since is seen by the version of this rank's part, for a gather writes to the buffer, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlab.data_parallelism.unit import Unit
from memlab.mixed_precision.writes import written_to

_outer_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def saved_weights(unit: Unit) -> saved_tensors_hooks:
    """Hooks for what ops save: for weights our own, for all else those that are in force around."""
    holders = {
        shard.flat.untyped_storage()._cdata: (each, shard)
        for each in unit.gathering.units
        for shard in each.shards
        if each.shown
    }
    return saved_tensors_hooks(functools.partial(_pack, holders, _outer_hooks()), _unpack)


def _pack(holders: dict, outer: tuple[Callable, Callable] | None, tensor: Tensor) -> tuple:
    """An op saves a tensor. If it is a weight, note whose, and how often it had been written to."""
    holder = holders.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
    if holder is not None:
        return tensor, holder[1].version_of(tensor), None, holder
    # detached: an op's own result, saved by it, would hold the graph that holds it, and neither could ever be freed
    return (tensor.detach() if outer is None else outer[0](tensor)), tensor._version, outer, None


def _unpack(saved: tuple) -> Tensor:
    """Backward wants the tensor: if it is a weight, its unit is needed."""
    tensor, version, outer, holder = saved
    if outer is not None:
        return outer[1](tensor)
    if version != (tensor._version if holder is None else holder[1].version_of(tensor)):
        raise written_to(tensor, f"expected {'a weight' if holder else 'a tensor'} as it was in the forward")
    if holder is not None:
        unit, shard = holder
        if shard.gathered is not True or unit.expected:
            unit.gathering.need(unit)
        if torch.is_grad_enabled():  # create_graph: what this backward saves of it must outlive the gathered buffer
            return tensor.detach().clone()
    return tensor
