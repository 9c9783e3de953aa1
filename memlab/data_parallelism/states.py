"""Optimizer states, whole: gathered from the parts of all ranks, and cut into parts for any number of ranks.

What is gathered is what the optimizer's own `state_dict()` would be, were it not sharded: so a run may go on with
another number of ranks, or with one. Elementwise states have the shape of their parameter and are put together from
the parts; single numbers, such as step counters, are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memlab.data_parallelism.agreement import told_by_all
from memlab.data_parallelism.flat import FlatLayout, on_the_wire
from memlab.data_parallelism.zero_buckets import WeightBucket
from memlab.memory_timeline import main_memory
from memlab.ranks import all_gather

SINGLE = ("step", "mu_product", "eta", "mu")
"""States of torch.optim that are one number each, also where the parameter is one number itself."""


class HeldParts(NamedTuple):
    """Parameters in one layout, of which an optimizer has this rank's parts: the numbers by which it calls them."""

    layout: FlatLayout
    parts: Sequence[Tensor]
    numbers: Sequence[int | None]  # None for one that it does not have
    rank: int
    group: Any


@torch.no_grad()
def gathered_states(states: dict[int, dict], held: Sequence[HeldParts], keep: bool) -> dict[int, dict]:
    """Whole states, in main memory, of an optimizer that has these of this rank's parts, by the parameters' numbers.

    Every rank calls it; with keep=False a rank sends its parts and gets {}. One state of one layout at a time is whole
    where the collectives run. What a parameter has is told by the ranks that have some of it: for an empty part there
    may be no state, or an old one. Raises ValueError, on every rank, for states that are neither elementwise nor single
    numbers.
    """
    numels = {n: part.numel() for one in held for n, part in zip(one.numbers, one.parts, strict=True)}
    mine: dict[int, tuple[bool, dict]] = {n: (numels[n] > 0, {}) for n in sorted(numels.keys() & states.keys())}
    problem = None
    for number, (_, told) in mine.items():
        for name, value in states[number].items():
            if is_cut(value) and value.shape != (numels[number],):
                problem = ValueError(
                    f"expected states of one number an element, found {name!r} of shape {tuple(value.shape)} for a "
                    f"part of {numels[number]}: such an optimizer looks at whole parameters, and is wrong on parts"
                )
            told[name] = value.dtype if is_cut(value) else kept(value)
    whole = {n: {name: kept(value) for name, value in states[n].items()} for n in states if n not in numels}
    every = told_by_all(problem or mine, held[0].group) if held else []
    for theirs in every:
        if isinstance(theirs, ValueError):
            raise theirs
    told_in_turn = (item for theirs in every for item in theirs.items())
    for number, (_, state) in sorted(told_in_turn, key=lambda told: not told[1][0]):  # first those that have some of it
        whole[number] = state | whole.get(number, {})
    for one in held:
        of_all = [whole.get(n, {}) for n in one.numbers]
        dtypes = {name: v for state in of_all for name, v in state.items() if isinstance(v, torch.dtype)}
        for name, dtype in dtypes.items():
            piece = torch.zeros(one.layout.piece, dtype=dtype, device=one.parts[0].device)
            for number, place in zip(one.numbers, one.layout.part_views(piece, one.rank), strict=True):
                if name in states.get(number, {}):
                    place.copy_(states[number][name])
            tensors = gathered(one.layout, piece, one.group, keep)
            for state, tensor in zip(of_all, tensors, strict=False):
                if name in state:
                    state[name] = tensor
    return dict(sorted(whole.items())) if keep else {}


def gathered(layout: FlatLayout, piece: Tensor, group, keep: bool) -> list[Tensor]:
    """The whole tensors of a layout of which this is a rank's piece, in main memory; with keep=False, none.

    piece: (piece,). Every rank calls it.
    """
    whole = torch.empty(layout.padded, dtype=piece.dtype, device=piece.device)
    if layout.padded:
        all_gather(on_the_wire(whole), on_the_wire(piece), group)
    return [copied_to_main_memory(view) for view in layout.views(whole)] if keep else []


def is_cut(value: Any) -> bool:
    """Whether a state is cut over the ranks; a single number is the same on all."""
    return isinstance(value, Tensor) and value.dim() > 0


def copied_to_main_memory(tensor: Tensor) -> Tensor:
    """A copy in main memory."""
    with main_memory():
        return tensor.detach().to("cpu", copy=True)


def cut_state(state_dict: dict, buckets: Sequence[WeightBucket], rank: int) -> dict:
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


def kept(value: Any) -> Any:
    """A tensor's copy in main memory; anything else itself."""
    return copied_to_main_memory(value) if isinstance(value, Tensor) else value
