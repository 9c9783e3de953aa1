"""A full checkpoint of a model that ranks hold in parts, put together and taken apart one tensor at a time.

What is gathered is the plain model's, with its keys and shapes, and knows nothing of ranks: it loads into a plain model
or into one on any number of ranks. It is put together in main memory on rank 0; no GPU holds more than one part besides
its own. Where not even main memory holds a model, `files` has the way over a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from memlab.data_parallelism.agreement import raise_on_all, refuse_extra_state, told_by_all
from memlab.data_parallelism.unit import UNIT
from memlab.data_parallelism.zero_optimizer import ZeroOptimizer
from memlab.memory_timeline import main_memory
from memlab.ranks import place_in, receive, send
from memlab.tensor_parallelism.cuts import Cut, cut_of, refuse_other_group
from memlab.tensor_parallelism.parameters import SplitLayer


@torch.no_grad()
def full_state_dict(model: nn.Module, group=None) -> dict[str, Tensor]:
    """The full model's state dict, in main memory on rank 0; {} on the others. All ranks must call it.

    group: the one that the model was made with. Keys, shapes, dtypes are the plain model's, and parameters that are
    tied share memory. Raises ValueError for a model that was cut for another number of ranks, for one that fully_shard
    was called on, for modules with extra state, and where a hook puts other tensors into its state dict.
    """
    slots = slots_of(model, group)
    full = {key: _gathered(p, cut_of(p), group) for key, p in {id(p): p for p in slots.values()}.items()}
    return {name: full[id(p)] for name, p in slots.items()} if place_in(group)[0] == 0 else {}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor], group=None) -> None:
    """Load a full model's state dict, of `full_state_dict`, a plain model or a file, into this rank's parts.

    state: on every rank, best from a mapped file (`load_full`): each copies its own pieces. Or on rank 0 alone, {} on
      the others: it sends them theirs. All ranks must call it. Values are converted to the model's dtypes.
    group: the one that the model was made with.
    Raises KeyError for keys and ValueError for shapes that are not the model's, and for a model on "meta", on every
    rank; and ValueError where hooks put other tensors into its state dict. Nothing is loaded then.
    """
    slots = slots_of(model, group)
    rank, _ = place_in(group)
    state, sent = _given(state, group, lambda: {name: t.to("meta") for name, t in state.items()})
    raise_on_all(_misfit(slots, state), group)
    for name, p in slots.items():
        _deliver(state[name], p, cut_of(p), sent, group)


@torch.no_grad()
def full_optimizer_state(optimizer: torch.optim.Optimizer, group=None) -> dict[str, Any]:
    """An optimizer's state dict as that of the plain model's optimizer, in main memory on rank 0; {} on the others.

    optimizer: over a split model's parameters, with states of their shapes or single numbers, such as a count of steps.
    All ranks must call it. Raises ValueError for a state that is neither, such as a factored one, and for what data
    ranks have cut again: a ZeroOptimizer, or over a model that fully_shard was called on.
    """
    if isinstance(optimizer, ZeroOptimizer):
        raise ValueError(
            "expected an optimizer over the parts of a split model, found a ZeroOptimizer, whose parts know no cut; "
            "its own state_dict() has the states of this tensor rank's parts, whole: save one for each tensor rank"
        )
    packed, parameters = optimizer.state_dict(), _parameters(optimizer)
    states: dict[int, dict] = {}
    for number, values in sorted(packed["state"].items()):
        p = parameters[number]
        _refuse_cut_again(p, "a parameter")
        for name, value in values.items():
            if isinstance(value, Tensor):
                cut = cut_of(p) if value.dim() else None
                if cut is not None and value.shape != p.shape:
                    raise ValueError(
                        f"expected states of their parameter's shape, or single numbers, found {name!r} of "
                        f"{tuple(value.shape)} for a part of {tuple(p.shape)}: such an optimizer looks at whole "
                        "parameters, and is wrong on parts"
                    )
                value = _gathered(value, cut, group)
            states.setdefault(number, {})[name] = value
    return packed | {"state": states} if place_in(group)[0] == 0 else {}


@torch.no_grad()
def load_full_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], group=None) -> None:
    """Load the state of `full_optimizer_state`, or of a plain model's optimizer, into one over this rank's parts.

    state: on every rank, or on rank 0 alone and {} on the others. All ranks must call it. Training goes on as it would
    have. Raises ValueError, on every rank, if it is of other parameter groups or shapes; nothing is loaded then.
    """
    parameters = _parameters(optimizer)
    state, sent = _given(state, group, lambda: _outline(state, parameters))
    raise_on_all(_misfit_of_optimizer(optimizer, parameters, state), group)
    states: dict[int, dict] = {}
    for number, values in sorted(state["state"].items()):
        for name, value in values.items():
            cut = cut_of(parameters[number])
            if cut is not None and isinstance(value, Tensor) and value.dim():
                part = torch.empty(cut.part_shape, dtype=value.dtype, device=parameters[number].device)
                _deliver(value, part, cut, sent, group)
                value = part
            elif isinstance(value, Tensor):
                value = value.clone()  # torch would go on with the given one
            states.setdefault(number, {})[name] = value
    optimizer.load_state_dict({"state": states, "param_groups": state["param_groups"]})


# ---- the steps of all of these


def slots_of(model: nn.Module, group) -> dict[str, Tensor]:
    """The model's parameters and buffers by their names, each knowing its cut.

    Raises ValueError for a group of another size than the model was cut for, and for a tensor that is not the model's:
    nobody knows its cut, and what is loaded into it is lost.
    """
    ranks = place_in(group)[1]
    slots = model.state_dict(keep_vars=True)
    refuse_extra_state(slots)
    _refuse_parametrized(model)
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    for name, p in slots.items():
        if id(p) not in own:
            raise ValueError(
                f"expected the model's own parameters and buffers in its state dict, found another tensor as {name}: a "
                "state-dict hook replaced it; remove the hook, or leave the block that set it"
            )
        refuse_other_group(p, name, ranks)
        _refuse_cut_again(p, name)
    return slots


def _refuse_cut_again(p: Any, name: str) -> None:
    """Raise ValueError for a part of which fully_shard has left this rank a piece: others may have other sizes."""
    if isinstance(p, Tensor) and hasattr(p, UNIT):
        raise ValueError(
            f"expected parts as they were split, found {name} as a piece, by fully_shard, of {p.numel()} numbers; "
            "memlab.data_parallelism has full_state_dict and the like, whose state of each tensor rank's parts loads "
            "into a split model that is not sharded"
        )


def _refuse_parametrized(model: nn.Module) -> None:
    """Raise ValueError for tensors that weight_norm, pruning and the like put in a part's place, without its cut."""
    for path, layer in model.named_modules():
        if isinstance(layer, SplitLayer) and layer.cuts.keys() - layer._parameters.keys():
            for name, t in (*layer.named_parameters(), *layer.named_buffers()):
                if cut_of(t) is None and name != "bias":  # a row parallel layer's is whole
                    raise ValueError(
                        f"expected parts that know their cut, found {f'{path}.{name}'.lstrip('.')} in a part's place; "
                        "remove the parametrization"
                    )


def _gathered(part: Tensor, cut: Cut | None, group) -> Tensor | None:
    """The full tensor in main memory on rank 0, of which this rank has a part; the others give theirs, and get None."""
    rank, ranks = place_in(group)
    if rank:
        if cut is not None:
            send(part.detach(), 0, group)
        return None
    with main_memory():
        if cut is None:
            return part.detach().to("cpu", copy=True)
        full = torch.empty(cut.shape, dtype=part.dtype, device="cpu")
    for other in range(ranks):
        theirs = dataclasses.replace(cut, rank=other)
        arrived = receive(part.new_empty(theirs.part_shape), other, group) if other else part.detach()
        theirs.write(arrived, full)
    return full


def _deliver(full: Tensor, part: Tensor, cut: Cut | None, sent: bool, group) -> None:
    """Fill this rank's part from a full tensor that every rank has; with `sent`, only rank 0."""
    rank, ranks = place_in(group)
    if not sent or rank == 0:
        if cut is None:
            part.copy_(full)
        else:
            for piece, given in zip(cut.pieces_in(part), cut.pieces_of(full), strict=True):
                piece.copy_(given)
    if sent and cut is None:
        dense = part.detach().contiguous()  # a collective fills memory from end to end, and gloo's knows no float8
        distributed.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)
        if not part.is_contiguous():
            part.copy_(dense)
    elif sent and rank:
        part.copy_(receive(torch.empty_like(part, memory_format=torch.contiguous_format), 0, group))
    elif sent:
        for other in range(1, ranks):
            send(dataclasses.replace(cut, rank=other).part_of(full).to(part), other, group)


def _given(state: Mapping, group, outline) -> tuple[Mapping, bool]:
    """The state to load, and whether rank 0 sends it: then what the others get here has shapes and no values."""
    rank, ranks = place_in(group)
    if ranks == 1 or distributed.get_backend(group) == "fake":
        return state, False
    having = told_by_all(bool(state), group)
    if all(having) or not having[0]:
        return state, False
    told = [outline() if rank == 0 else None]
    distributed.broadcast_object_list(told, group=group, group_src=0)
    return (state if rank == 0 else told[0]), True


def _misfit(slots: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Exception | None:
    if missing := [name for name in slots if name not in state]:
        return KeyError(f"expected the keys of the model, found no {', '.join(missing[:3])} ({len(missing)} missing)")
    if extra := [name for name in state if name not in slots]:
        return KeyError(f"expected the keys of the model, found also {', '.join(extra[:3])} ({len(extra)} too many)")
    for name, p in slots.items():
        cut = cut_of(p)
        expected, found = tuple(p.shape) if cut is None else cut.shape, tuple(state[name].shape)
        if expected != found:
            return ValueError(
                f"expected {name} of shape {expected}, found {found}; the state is of another model"
                + (", or of one rank's part of this one" if found == tuple(p.shape) else "")
            )
        if p.is_meta:
            return ValueError(
                f"expected {name} in memory, found it on meta, which keeps no values; call model.to_empty(device=…) "
                "first"
            )
    return None


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters by the numbers that a state dict calls them by."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _outline(state: Mapping[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """An optimizer's state without the values of those tensors that are cut."""
    states: dict[int, dict] = {}
    for number, values in state["state"].items():
        split = number < len(parameters) and cut_of(parameters[number]) is not None
        for name, value in values.items():
            bare = split and isinstance(value, Tensor) and value.dim()
            states.setdefault(number, {})[name] = value.to("meta") if bare else value
    return {"state": states, "param_groups": state["param_groups"]}


def _misfit_of_optimizer(optimizer, parameters: list[Tensor], state: Mapping[str, Any]) -> Exception | None:
    if not {"state", "param_groups"} <= state.keys():
        return ValueError(f"expected state and param_groups, as state_dict() gives them, found {list(state)}")
    expected, found = ([len(g["params"]) for g in groups] for groups in (optimizer.param_groups, state["param_groups"]))
    if expected != found:
        return ValueError(
            f"expected parameter groups of {expected} parameters, found {found}; make this optimizer as that was made"
        )
    for number, values in state["state"].items():
        p = parameters[number]
        shape = p.shape if cut_of(p) is None else cut_of(p).shape
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != tuple(shape):
                return ValueError(
                    f"expected {name} of parameter {number} of shape {tuple(shape)}, found {tuple(value.shape)}"
                )
    return None
