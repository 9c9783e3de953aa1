"""What a sharded model has only as a whole: the norm of its gradients, its state dict, its optimizer's states.

The whole passes through a rank one unit at a time, and is put together in main memory on rank 0. A state that was
gathered this way knows nothing of ranks: it loads into a plain model, or into one that is sharded over any number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from memlab.data_parallelism.sharding import UNIT, units_of
from memlab.data_parallelism.unit import FlatShard
from memlab.memory_timeline import main_memory
from memlab.ranks import all_gather


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
    Raises ValueError for a parameter that is in no unit: torch's own clip_grad_norm_ is for those. RuntimeError, on
    every rank, for a norm that is not finite, if that is asked for: it takes a wait for the GPU.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    shards = {shard for p in parameters for _, shard, _ in [_holder(p)]}
    if not shards:
        return torch.tensor(0.0)
    some = next(iter(shards))
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    wide = functools.reduce(torch.promote_types, {shard.piece.dtype for shard in shards}, torch.float32)
    norms = torch._foreach_norm(gradients, norm_type, dtype=wide) if gradients else []
    total = torch.zeros((), dtype=wide, device=some.piece.device)
    if norms:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if math.isinf(norm_type):
        distributed.all_reduce(total, distributed.ReduceOp.MAX, group=some.group)
    else:
        total.pow_(norm_type)
        distributed.all_reduce(total, group=some.group)
        total.pow_(1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"expected a finite norm of the gradients, found {total.item()}; skip this step")
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0).to(gradients[0].dtype))
    return total


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's state dict, in main memory on rank 0; {} on the others. All ranks must call it.

    Keys, shapes, dtypes are the plain model's, and parameters that are tied share memory.
    """
    whole: dict[Tensor, Tensor] = {}
    shards = _shards(model)
    for shard in shards:
        whole.update(zip(shard.parts, _gathered(shard, shard.piece), strict=False))
    if _rank(shards) != 0:
        return {}
    return {key: whole[p] if p in whole else _at_home(p) for key, p in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a whole model's state dict, of `full_state_dict` or a plain model, into this rank's parts.

    state: rank 0's counts, and the others may give {}. All ranks must call it.
    Raises KeyError or ValueError, on every rank, if keys or shapes are not the model's; nothing is loaded then.
    """
    shards = _shards(model)
    rank, group = _rank(shards), shards[0].group
    slots = model.state_dict(keep_vars=True)
    shapes = {p: shape for shard in shards for p, shape in zip(shard.parts, shard.layout.shapes, strict=True)}
    _agree(_misfit(slots, shapes, state) if rank == 0 else None, group)
    names = {p: key for key, p in slots.items()}
    for shard in shards:
        whole = [state[names[p]] for p in shard.parts] if rank == 0 else None
        for p, part in zip(shard.parts, _scattered(shard, whole, shard.piece.dtype), strict=True):
            p.copy_(part)
    for key, value in slots.items():
        if value not in shapes:
            if rank == 0:
                value.copy_(state[key])
            distributed.broadcast(value.data, group=group, group_src=0)


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict as that of the plain model's optimizer, in main memory on rank 0; {} on the others.

    optimizer: over the parameters of a sharded model, with states for each element (momenta, masters) or scalars, such
      as a count of steps. All ranks must call it.
    Raises ValueError for a state that is neither, such as a factored one.
    """
    shards, packed = _shards(model), optimizer.state_dict()
    numbers = _numbers(optimizer)
    for shard in shards:
        states = [packed["state"].get(numbers.get(p), {}) for p in shard.parts]
        for name in dict.fromkeys(name for state in states for name, value in state.items() if _sharded(value)):
            values = [state.get(name) for state in states]
            dtype = next(value.dtype for value in values if value is not None)
            piece = torch.zeros(shard.layout.piece, dtype=dtype, device=shard.piece.device)
            for p, value, part in zip(shard.parts, values, shard.layout.part_views(piece, shard.rank), strict=True):
                if value is not None:
                    if value.shape != p.shape:
                        raise ValueError(
                            f"expected states with a value for each element, or scalars, found {name} of shape "
                            f"{tuple(value.shape)} for a part of {p.numel()}; gather this optimizer's by hand"
                        )
                    part.copy_(value)
            wholes = _gathered(shard, piece)
            for p, value, whole in zip(shard.parts, values, wholes, strict=False):
                if value is not None:
                    packed["state"][numbers[p]] = packed["state"][numbers[p]] | {name: whole}
    if _rank(shards) != 0:
        return {}
    states = {
        i: {name: _at_home(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        for i, state in packed["state"].items()
    }
    return packed | {"state": states}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of `full_optimizer_state`, or of a plain model's optimizer, into one over this rank's parts.

    state: rank 0's counts, and the others may give {}. All ranks must call it. Training goes on as it would have.
    Raises ValueError, on every rank, if the state is of other parameter groups or shapes; nothing is loaded then.
    """
    shards = _shards(model)
    rank, group = _rank(shards), shards[0].group
    numbers = _numbers(optimizer)
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
        for name in dict.fromkeys(n for i in of for n, value in states.get(i, {}).items() if _sharded(value)):
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


def _shards(model: nn.Module) -> list[FlatShard]:
    """All shards of a model, unit by unit. What is gathered is freed."""
    units = units_of(model)
    for unit in units:
        unit.gathering.free(unit.gathering.units)
    return [shard for unit in units for shard in unit.shards]


def _rank(shards: list[FlatShard]) -> int:
    return shards[0].rank


def _at_home(value: Tensor) -> Tensor:
    """A copy in main memory."""
    with main_memory():
        return value.detach().to("cpu", copy=True)


def _gathered(shard: FlatShard, piece: Tensor) -> list[Tensor]:
    """The whole tensors of a shard whose piece this is, in main memory on rank 0; nothing on the others."""
    layout = shard.layout
    whole = torch.empty(layout.padded, dtype=piece.dtype, device=piece.device)
    if layout.padded:
        all_gather(whole, piece, shard.group)
    return [_at_home(view) for view in layout.views(whole)] if shard.rank == 0 else []


def _scattered(shard: FlatShard, tensors: list[Tensor | None] | None, dtype: torch.dtype) -> list[Tensor]:
    """This rank's parts of rank 0's whole tensors. tensors: None on the other ranks; None for one that is missing."""
    layout = shard.layout
    whole = torch.zeros(layout.padded, dtype=dtype, device=shard.piece.device)
    for view, tensor in zip(layout.views(whole), tensors or [], strict=False):
        if tensor is not None:
            view.copy_(tensor)
    if layout.padded:
        distributed.broadcast(whole, group=shard.group, group_src=0)
    return layout.part_views(layout.own(whole, shard.rank), shard.rank)


def _sharded(value: Any) -> bool:
    """Whether a state is cut over the ranks; a scalar is the same on all."""
    return isinstance(value, Tensor) and value.dim() > 0


def _numbers(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    """The numbers by which a state dict calls an optimizer's parameters."""
    return {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}


def _agree(problem: Exception | None, group) -> None:
    """Raise on every rank what rank 0 found."""
    found = [problem]
    distributed.broadcast_object_list(found, group=group, group_src=0)
    if found[0] is not None:
        raise found[0]


def _misfit(slots: dict[str, Tensor], shapes: dict[Tensor, torch.Size], state: dict[str, Tensor]) -> Exception | None:
    if missing := [key for key in slots if key not in state]:
        return KeyError(f"expected the keys of the model, found no {', '.join(missing[:3])} ({len(missing)} missing)")
    if extra := [key for key in state if key not in slots]:
        return KeyError(f"expected the keys of the model, found also {', '.join(extra[:3])} ({len(extra)} too many)")
    for key, value in slots.items():
        if (expected := tuple(shapes.get(value, value.shape))) != (found := tuple(state[key].shape)):
            return ValueError(f"expected {key} of shape {expected}, found {found}; the state is of another model")
    return None


def _outline(state: dict[str, Any], shapes: dict[int, torch.Size], optimizer: torch.optim.Optimizer) -> tuple | str:
    """A state dict with empty tensors in place of those that are cut, for the other ranks; or what is wrong with it."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    if (found := [len(group["params"]) for group in state["param_groups"]]) != own:
        return f"expected parameter groups of {own} parameters, found {found}; make the optimizer as the other was made"
    states: dict[int, dict] = {}
    for i, values in state["state"].items():
        for name, value in values.items():
            if _sharded(value):
                if tuple(value.shape) != tuple(shapes[i]):
                    return f"expected {name} of parameter {i} of shape {tuple(shapes[i])}, found {tuple(value.shape)}"
                value = torch.empty(0, dtype=value.dtype)
            states.setdefault(i, {})[name] = value
    return states, state["param_groups"]
