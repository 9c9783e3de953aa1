"""What a sharded model has only as a whole: the norm of its gradients, its state dict, its optimizer's states.

The whole passes through a rank one unit at a time, and is put together in main memory on rank 0. A state that was
gathered this way knows nothing of ranks: it loads into a plain model, or into one that is sharded over any number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from memlab.data_parallelism.agreement import fill_from_rank_0, part_of, raise_on_all, refuse_extra_state
from memlab.data_parallelism.flat import on_the_wire
from memlab.data_parallelism.norms import clip_parts_
from memlab.data_parallelism.shard import FlatShard
from memlab.data_parallelism.sharding import UNIT, units_of
from memlab.data_parallelism.states import SINGLE, HeldParts, gathered, gathered_states, is_cut, kept


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of sharded parameters so that their norm over all ranks is `max_norm` at most.

    parameters: of a model that fully_shard was called on, or the model; the same on all ranks, which all must call.
    Returns the norm before, a scalar, in FP32 at least; the same on all ranks.
    Raises ValueError for a parameter that is in no unit: torch's own clip_grad_norm_ is for those; for one that is a
    part of a split layer, of whose norm this rank knows a part; for units that are cut over several groups; and for a
    norm_type that is not above 0. RuntimeError, on every rank, for a norm that is not finite, if that is asked for: it
    takes a wait for the GPU.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shards = _of_one_group(list(dict.fromkeys(_holder(p)[1] for p in parameters)))
    if any(part_of(p) is not None for p in parameters):
        raise ValueError(
            "expected parameters that no tensor ranks have split, found a part, whose norm is not the model's; share "
            "the data ranks' work with DataParallel, and call memlab.tensor_parallelism.clip_grad_norm_"
        )
    if not shards:
        return torch.tensor(0.0)
    some = shards[0]
    gradients = [p.grad for p in parameters if p.grad is not None]
    wide = functools.reduce(torch.promote_types, {shard.piece.dtype.to_real() for shard in shards}, torch.float32)
    norm = clip_parts_(gradients, max_norm, norm_type, error_if_nonfinite, device=some.piece.device, group=some.group)
    return norm.to(wide)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's state dict, in main memory on rank 0; {} on the others. All ranks must call it.

    model: one that fully_shard was called on, or a part of it, also of a unit: its parameters are whole, too.
    Keys, shapes, dtypes are the plain model's, and parameters that are tied share memory. (Of a model that was split
    before, over tensor ranks, it is this tensor rank's parts: keep each one's.) Raises ValueError for a plain model,
    for one whose units are cut over several groups of ranks, and where a hook puts another tensor in a parameter's
    place in its state dict.
    """
    whole: dict[Tensor, Tensor] = {}
    shards, state = _shards(model), _own_state(model)
    for shard in shards:
        whole.update(zip(shard.parts, gathered(shard.layout, shard.piece, shard.group, shard.rank == 0), strict=False))
    if _rank(shards) != 0:
        return {}
    return {key: whole[p] if p in whole else kept(p) for key, p in state.items()}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a whole model's state dict, of `full_state_dict` or a plain model, into this rank's parts.

    state: rank 0's counts, and the others may give {}. All ranks must call it.
    Raises KeyError or ValueError, on every rank, if keys or shapes are not the model's, or a value is no dense tensor;
    ValueError where a hook puts another tensor in a parameter's place in the model's state dict. Nothing is loaded.
    """
    shards, slots = _shards(model), _own_state(model)
    rank, group = _rank(shards), shards[0].group
    shapes = {p: shape for shard in shards for p, shape in zip(shard.parts, shard.layout.shapes, strict=True)}
    raise_on_all(_misfit(slots, shapes, state) if rank == 0 else None, group)
    names = {p: key for key, p in slots.items()}
    for shard in shards:
        whole = [state[names[p]] if p in names else None for p in shard.parts] if rank == 0 else None
        for p, part in zip(shard.parts, _scattered(shard, whole, shard.piece.dtype), strict=True):
            if p in names:  # and not of a unit around the model
                p.copy_(part)
    for key, value in slots.items():
        if value not in shapes:
            if rank == 0:
                value.copy_(state[key])
            fill_from_rank_0([value], group)


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict as that of the plain model's optimizer, in main memory on rank 0; {} on the others.

    optimizer: over the parameters of a sharded model, with states for each element (momenta, masters) or scalars, such
      as a count of steps. All ranks must call it.
    Raises ValueError, on every rank, for a state that is neither, such as a factored one.
    """
    numbers = _numbers(optimizer)
    shards, packed = _shards(model, numbers), optimizer.state_dict()
    held = [HeldParts(s.layout, s.parts, [numbers.get(p) for p in s.parts], s.rank, s.group) for s in shards]
    keep = _rank(shards) == 0
    states = gathered_states(packed["state"], held, keep)
    return packed | {"state": states} if keep else {}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of `full_optimizer_state`, or of a plain model's optimizer, into one over this rank's parts.

    state: rank 0's counts, and the others may give {}. All ranks must call it. Training goes on as it would have.
    Raises ValueError, on every rank, if the state is of other parameter groups or shapes, or of arrays that are no
    tensors; nothing is loaded then.
    """
    numbers = _numbers(optimizer)
    shards = _shards(model, numbers)
    rank, group = _rank(shards), shards[0].group
    shapes = {
        numbers[p]: s for shard in shards for p, s in zip(shard.parts, shard.layout.shapes, strict=True) if p in numbers
    }
    outline: list = [None]
    if rank == 0:
        outline = [_outline(state, shapes, optimizer)]
    distributed.broadcast_object_list(outline, group=group, group_src=0)
    if isinstance(outline[0], str):
        raise ValueError(outline[0])
    states, groups = outline[0]
    for shard in shards:
        of = [numbers.get(p) for p in shard.parts]
        for name in dict.fromkeys(n for i in of for n, value in states.get(i, {}).items() if is_cut(value)):
            having = [name in states.get(i, {}) for i in of]
            dtype = next(states[i][name].dtype for i, has in zip(of, having, strict=True) if has)
            whole = None
            if rank == 0:
                whole = [state["state"][i][name] if has else None for i, has in zip(of, having, strict=True)]
            for i, has, part in zip(of, having, _scattered(shard, whole, dtype), strict=True):
                if has:
                    states[i][name] = part.clone()
    optimizer.load_state_dict({"state": states, "param_groups": groups})


# ---- the steps of all of these


def _holder(p: Tensor) -> tuple:
    holder = getattr(p, UNIT, None)
    if holder is None:
        raise ValueError(
            f"expected parameters of a model that fully_shard was called on, found one of shape {tuple(p.shape)} that "
            "is in no unit; call fully_shard on the root, too"
        )
    return holder


def _shards(model: nn.Module, others: Iterable[Tensor] = ()) -> list[FlatShard]:
    """All shards of a model, unit by unit, and of other parameters, such as an optimizer's. What is gathered is freed.

    Raises ValueError for a model without units, and for shards of several groups.
    """
    units = dict.fromkeys([*units_of(model), *(getattr(p, UNIT)[0] for p in others if hasattr(p, UNIT))])
    for unit in units:
        unit.gathering.free(unit.gathering.units)
    return _of_one_group([shard for unit in units for shard in unit.shards])


def _own_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict, with the parts themselves: of what a hook puts in their place nobody knows the whole."""
    state = model.state_dict(keep_vars=True)
    refuse_extra_state(state)
    for name, p in model.named_parameters(remove_duplicate=False):
        if state.get(name, p) is not p:
            raise ValueError(
                f"expected the model's own parameters in its state dict, found another tensor as {name}: a state-dict "
                "hook replaced it; remove the hook, and convert what full_state_dict returns"
            )
    return state


def _of_one_group(shards: list[FlatShard]) -> list[FlatShard]:
    groups = {tuple(distributed.get_process_group_ranks(shard.group)) for shard in shards}
    if len(groups) > 1:
        raise ValueError(
            f"expected units that are cut over one group of ranks, found {len(groups)} groups, each with a rank 0 and "
            "norms of its own; call it for the units of one group at a time"
        )
    return shards


def _rank(shards: list[FlatShard]) -> int:
    return shards[0].rank


def _scattered(shard: FlatShard, tensors: list[Tensor | None] | None, dtype: torch.dtype) -> list[Tensor]:
    """This rank's parts of rank 0's whole tensors. tensors: None on the other ranks; None for one that is missing."""
    layout = shard.layout
    whole = torch.zeros(layout.padded, dtype=dtype, device=shard.piece.device)
    for view, tensor in zip(layout.views(whole), tensors or [], strict=False):
        if tensor is not None:
            view.copy_(tensor)
    if layout.padded:
        distributed.broadcast(on_the_wire(whole), group=shard.group, group_src=0)
    return layout.part_views(layout.own(whole, shard.rank), shard.rank)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    """The numbers by which a state dict calls an optimizer's parameters."""
    return {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}


def _misfit(slots: dict[str, Tensor], shapes: dict[Tensor, torch.Size], state: dict[str, Tensor]) -> Exception | None:
    if missing := [key for key in slots if key not in state]:
        return KeyError(f"expected the keys of the model, found no {', '.join(missing[:3])} ({len(missing)} missing)")
    if extra := [key for key in state if key not in slots]:
        return KeyError(f"expected the keys of the model, found also {', '.join(extra[:3])} ({len(extra)} too many)")
    for key, value in slots.items():
        if not isinstance(tensor := state[key], Tensor):
            return ValueError(f"expected {key} as a tensor, found {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_meta:
            return ValueError(f"expected {key} dense and with memory, found {tensor.layout} on {tensor.device}")
        if (expected := tuple(shapes.get(value, value.shape))) != (found := tuple(tensor.shape)):
            return ValueError(f"expected {key} of shape {expected}, found {found}; the state is of another model")
    return None


def _outline(state: dict[str, Any], shapes: dict[int, torch.Size], optimizer: torch.optim.Optimizer) -> tuple | str:
    """A state dict with empty tensors in place of those that are cut, for the other ranks; or what is wrong with it.

    Single numbers are copies: the optimizer counts on in them, here and nowhere else.
    """
    if not {"state", "param_groups"} <= state.keys():
        return f"expected state and param_groups, as full_optimizer_state gives them on rank 0, found {list(state)}"
    own = [len(group["params"]) for group in optimizer.param_groups]
    if (found := [len(group["params"]) for group in state["param_groups"]]) != own:
        return f"expected parameter groups of {own} parameters, found {found}; make the optimizer as the other was made"
    states: dict[int, dict] = {}
    for i, values in state["state"].items():
        for name, value in values.items():
            shape = shapes.get(i)
            if not isinstance(value, Tensor) and getattr(value, "shape", ()):
                return f"expected tensors and numbers as states, found {name} of number {i} as {type(value).__name__}"
            if is_cut(value) or isinstance(value, Tensor) and name not in SINGLE and shape == ():
                if shape is None:
                    return f"expected states of parameters that are in a unit, found {name} of number {i}, which is not"
                if value.shape != shape:
                    return f"expected {name} of parameter {i} of shape {tuple(shape)}, found {tuple(value.shape)}"
                value = torch.empty(0, dtype=value.dtype)
            elif isinstance(value, Tensor):
                value = value.clone()
            states.setdefault(i, {})[name] = value
    return states, state["param_groups"]
