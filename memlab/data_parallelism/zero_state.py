"""Optimizer states, whole: gathered from the parts of all ranks, and cut into parts for any number of ranks.

What is gathered is what the optimizer's own `state_dict()` would be, were it not sharded: so a run may go on with
another number of ranks, or with one. Elementwise states have the shape of their parameter and are put together from
the parts; single numbers, such as step counters, are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from memlab.data_parallelism.zero_buckets import Bucket
from memlab.memory_timeline import main_memory
from memlab.ranks import all_gather

SINGLE = ("step", "mu_product", "eta", "mu")
"""States of torch.optim that are one number each, also where the parameter is one number itself."""


@torch.no_grad()
def gathered_state(inner: Optimizer, buckets: Sequence[Bucket], rank: int, group, keep: bool) -> dict:
    """A state dict with whole states, in main memory, of an optimizer that has this rank's parts.

    Every rank calls it; with keep=False a rank sends its parts and gets {}. One state of one bucket at a time is whole
    where the collectives run. Raises ValueError for states that are neither elementwise nor single numbers.
    """
    packed = inner.state_dict()
    states = packed["state"]
    whole: dict[int, dict] = {}
    for bucket in buckets:
        sharded: dict[str, list[int]] = {}  # the state's name → the slots that have it
        for slot, (number, part) in enumerate(zip(bucket.numbers, bucket.parts, strict=True)):
            for name, value in states.get(number, {}).items():
                if isinstance(value, Tensor) and value.shape == part.shape:
                    sharded.setdefault(name, []).append(slot)
                    value = None
                elif isinstance(value, Tensor) and value.dim():
                    raise ValueError(
                        f"expected states of one number an element, found {name!r} of shape {tuple(value.shape)} for a "
                        f"part of {part.numel()}: such an optimizer looks at whole parameters, and is wrong on parts"
                    )
                elif isinstance(value, Tensor):
                    value = _in_main_memory(value)
                whole.setdefault(number, {})[name] = value
        for name, slots in sharded.items():
            found = [states[bucket.numbers[slot]][name] for slot in slots]
            piece = torch.zeros_like(bucket.own, dtype=found[0].dtype)
            places = bucket.layout.part_views(piece, rank)
            for slot, value in zip(slots, found, strict=True):
                places[slot].copy_(value)
            flat = torch.empty_like(bucket.flat, dtype=piece.dtype)
            all_gather(flat, piece, group)
            views = bucket.layout.views(flat) if keep else ()
            for slot in slots if keep else ():
                whole[bucket.numbers[slot]][name] = _in_main_memory(views[slot])
    return packed | {"state": dict(sorted(whole.items()))} if keep else {}


def cut_state(state_dict: dict, buckets: Sequence[Bucket], rank: int) -> dict:
    """The state dict for this rank's parts out of a whole one, copied, so that nothing holds the whole.

    Raises ValueError for a dict without states and groups, and for one of other parameters.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"expected state and param_groups, as state_dict() gives them, found {list(state_dict)}; "
            "state_dict(to=...) gives them on one rank only: load what that rank has saved, on every rank"
        )
    found = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(found) != sum(len(bucket.params) for bucket in buckets):
        raise ValueError(
            f"expected a state dict of {sum(len(bucket.params) for bucket in buckets)} parameters, found one of "
            f"{len(found)}; load it into the model that it is from, with the same parameter groups"
        )
    states: dict[int, dict] = {}
    for bucket in buckets:
        for number, p, (begin, end) in zip(bucket.numbers, bucket.params, bucket.layout.parts(rank), strict=True):
            for name, value in state_dict["state"].get(found[number], {}).items():
                if isinstance(value, Tensor) and name not in SINGLE and value.shape == p.shape:
                    value = value.reshape(-1)[begin:end].clone()
                elif isinstance(value, Tensor) and value.dim():
                    raise ValueError(
                        f"expected {name!r} of parameter {number} in the shape {tuple(p.shape)}, found "
                        f"{tuple(value.shape)}; load the state dict into the model that it is from"
                    )
                elif isinstance(value, Tensor):
                    value = value.clone()
                states.setdefault(found[number], {})[name] = value
    return state_dict | {"state": states}


def _in_main_memory(tensor: Tensor) -> Tensor:
    with main_memory():
        return tensor.detach().to("cpu", copy=True)
