"""`fully_shard`: ZeRO's stage 3. Every rank holds a piece of the weights, and the whole of one unit while it is used.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())      # of this rank's parts, so of 1/N of the states

Two moments gather a unit: its forward, and its backward, which announces itself with the gradient of an output (or, if
that was hidden from the hook, with a saved weight that is asked for). One moment reduces its gradients: when those of
its inputs are complete, every node of its own has run.

    bytes of weights = Ψ/N + 2 · unit, instead of Ψ        gradients = Ψ/N + unit, instead of Ψ
    traffic of a step = (gather + gather + reduce-scatter) · Ψ·(N−1)/N = 1.5 · all-reduce's 2Ψ·(N−1)/N

Sources: Rajbhandari et al. 2020 (ZeRO), sections 5.3 and 7.2.2; Zhao et al. 2023 (FSDP), sections 3 and 4.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memlab.backward import backward_number
from memlab.data_parallelism.agreement import fill_from_rank_0, refuse_other_parts, refuse_unfit
from memlab.data_parallelism.gathering import Call, Gathering
from memlab.data_parallelism.saved import saved_weights
from memlab.data_parallelism.shard import FlatShard
from memlab.data_parallelism.unit import HOOKS, UNIT, Unit, refuse_shared_memory
from memlab.ranks import place_in


def fully_shard(
    module: nn.Module,
    *,
    reshard_after_forward: bool | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: distributed.ProcessGroup | None = None,
) -> nn.Module:
    """Keep only this rank's piece of a module's weights, and gather the whole while it is used. Returns the module.

    Call it on the parts of a model, such as each block, and then on the model: each call makes a unit of the parameters
    that are in no other. Everybody starts with rank 0's values. Afterwards `module.parameters()` are the same Parameter
    objects under the same names, each with the 1-dimensional part of it that is this rank's, maybe empty; so is `.grad`
    after backward, averaged over ranks and added to what is there. Whatever works element by element works on them:
    AdamW, weight decay by name, MasterWeights. `state_dict()` gives parts too: `full_state_dict` the whole.

    reshard_after_forward: whether its weights are freed between forward and backward, and gathered twice. None: yes,
      but not the root's, whose backward comes next, as in FSDP2. A unit that is kept saves a third of its traffic.
    param_dtype: gather, compute and receive gradients in this dtype, such as torch.bfloat16, while the parts stay as
      they are; floating inputs of the module are cast to it. reduce_dtype: of the sum over ranks; None: of gradients.
    group: the ranks that share the weights; None: all.

    The memory into which a unit is gathered is its module's buffer `gathered` (`gathered_2` and so on where dtypes or
    frozen parameters make several, or it has such a name itself), so a Meter names it. A tensor without elements stands
    for it, in no state dict.

    Tied weights belong to one unit: leave the modules that share them to the root. A parameter without a gradient on
    any rank keeps `.grad` None. `with model.no_sync():` adds up whole gradients without reducing them, which takes the
    bytes of a whole model's; `model.zero_grad()` drops them, and an optimizer's, which knows the parts only, does not.
    A forward that is followed by no backward leaves the root's buffer until the next. Checkpoints around units and
    inside them, several forwards before a backward, retain_graph, no_grad work; so does create_graph, for a copy of
    each weight as long as its graph lives. Every rank must run the same units in the same order. Not for
    torch.compile, nor inside torch.func's transforms.

    Raises RuntimeError without a process group; ValueError for a group that this rank is not of, and for a module that
    is in a unit already, shares a parameter with another unit, of which ranks hold other parts, or that has gradients,
    parameters on several devices, without memory or that share it, with gradients of another dtype, or with
    register_hook, which autograd would never call: those of register_post_accumulate_grad_hook are called with the part
    and its mean gradient. Later, RuntimeError for such a hook, if a parameter was replaced or put in, or if backward
    wants a weight that was written to after the forward.
    """
    place_in(group)
    slots = _unsharded(module)
    refuse_other_parts((p for _, _, p in slots), group)
    unit = Unit(module, [], reshard_after_forward)
    alike: dict[tuple, list[nn.Parameter]] = {}
    for p in dict.fromkeys(p for _, _, p in slots):
        alike.setdefault((p.dtype, p.requires_grad), []).append(p)
    buffers = _own_buffers(module)
    free = (name for n in itertools.count(1) if not hasattr(module, name := "gathered" if n == 1 else f"gathered_{n}"))
    for parameters, name in zip(alike.values(), free, strict=False):
        unit.shards.append(shard := FlatShard(parameters, group, param_dtype, reduce_dtype))
        module.register_buffer(name, shard.marker, persistent=False)
    for shard in unit.shards:
        for p, full in zip(shard.parts, shard.full, strict=True):
            setattr(p, UNIT, (unit, shard, full))
    for owner, name, p in slots:
        unit.slots.append((owner, name, p, getattr(p, UNIT)[2]))
    inner = [getattr(each, UNIT) for each in module.modules() if hasattr(each, UNIT)]
    gathering = Gathering(unit, [unit, *inner])
    for each in gathering.units:
        each.gathering = gathering
    fill_from_rank_0(buffers, group)
    _install(unit, param_dtype)
    return module


def units_of(model: nn.Module) -> list[Unit]:
    """The units in a model, in the order of `model.modules()`; then those around it that have parameters of it.

    Raises ValueError if there is none.
    """
    units = [getattr(module, UNIT) for module in model.modules() if hasattr(module, UNIT)]
    units += [getattr(p, UNIT)[0] for p in model.parameters() if hasattr(p, UNIT)]
    if not (units := list(dict.fromkeys(units))):
        raise ValueError(f"expected a model that fully_shard was called on, found a plain {type(model).__name__}")
    return units


def _unsharded(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Where a module holds parameters that are to be in its unit: (module, name, parameter)."""
    name = type(module).__name__
    if hasattr(module, UNIT):
        raise ValueError(f"expected a module once, found a {name} that fully_shard was called on before")
    slots = []
    for owner in _outside_units(module):
        for key, p in owner._parameters.items():
            if p is not None:
                slots.append((owner, key, p))
    for owner, key, p in slots:
        holder = getattr(p, UNIT, (None,))[0]
        if holder is not None and any(owner is each and key == other for each, other, *_ in holder.slots):
            raise ValueError(
                f"expected fully_shard on the inner modules first, found {name} inside a "
                f"{type(holder.module).__name__} that it was called on; go from the blocks to the root"
            )
        if holder is not None:
            raise ValueError(
                f"expected parameters of one unit each, found {key} of {name} tied to one in a "
                f"{type(holder.module).__name__} that fully_shard was called on; let the root have both"
            )
        if p.grad is not None:
            raise ValueError(f"expected parameters without gradients, found one at {key}; shard before backward")
        if p._backward_hooks:
            raise ValueError(f"expected parameters without register_hook, found one at {key}; {HOOKS}")
    new = [(key, p) for _, key, p in slots]
    refuse_unfit(new)
    devices = {str(p.device) for _, _, p in slots}
    if len(devices) > 1:
        raise ValueError(f"expected parameters on one device, found {', '.join(sorted(devices))}")
    refuse_shared_memory(new)
    return slots


def _outside_units(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those inside it, but for those that are units of their own."""
    inside = {each for unit in module.modules() if hasattr(unit, UNIT) for each in unit.modules()}
    return (each for each in module.modules() if each not in inside)


def _own_buffers(module: nn.Module) -> list[Tensor]:
    return [b for each in _outside_units(module) for b in each._buffers.values() if b is not None]


# ---- the moments


def _install(unit: Unit, param_dtype: torch.dtype | None) -> None:
    """Catch a unit's forward and what follows from it."""
    module = unit.module
    object.__setattr__(module, UNIT, unit)
    module.register_forward_pre_hook(lambda *_: unit.gathering.need(unit), prepend=True)
    replaced = {
        "forward": functools.partial(_forward, unit, module.forward, param_dtype),
        "no_sync": functools.partial(no_sync, module),
        "zero_grad": functools.partial(_zero_grad, module, module.zero_grad),
        "_apply": _refuse,
        "__deepcopy__": _refuse,
        "__reduce_ex__": _refuse_pickle,
    }
    for name, instead in replaced.items():
        object.__setattr__(module, name, instead)


def _forward(unit: Unit, forward: Callable, param_dtype: torch.dtype | None, *args, **kwargs) -> Any:
    """The module's own forward, while its weights are there."""
    gathering, failed, trains, passed_on = unit.gathering, True, False, set()
    call = gathering.enter(unit)
    try:
        if param_dtype is not None:
            args, kwargs = tree_map_only(Tensor, functools.partial(_cast, param_dtype), (args, kwargs))
        if torch.is_grad_enabled():
            _watch_gradients(unit)
            passed_on = _watch_inputs(call, tree_leaves((args, kwargs)))
        with saved_weights(unit) if torch.is_grad_enabled() else nullcontext():
            output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    trains = True
                    # on the node: its hooks run after the tensor's, by which the next unit's backward is through
                    if tensor.grad_fn not in passed_on:
                        tensor.grad_fn.register_prehook(functools.partial(_needed, gathering, call))
        failed = False
        return output
    finally:
        gathering.leave(unit, trains, failed)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _needed(gathering: Gathering, call: Call, gradients: tuple) -> None:
    gathering.output_needed(call)


def _watch_gradients(unit: Unit) -> None:
    """Catch the gradients of those parameters that are trained, also of one that is unfrozen later."""
    for shard in unit.shards:
        for number, p in enumerate(shard.full):
            if p.requires_grad and number not in shard.watched:
                p.register_post_accumulate_grad_hook(functools.partial(_gradient_came, weakref.ref(unit)))
                shard.watched.add(number)


def _gradient_came(unit: weakref.ref[Unit], _: Tensor) -> None:
    """The hook knows its unit weakly: one that held it would keep the model alive, unseen by the garbage collector."""
    if (living := unit()) is not None:
        living.gathering.gradient_came()


def _watch_inputs(call: Call, inputs: list) -> set:
    """Catch when the gradients of all inputs have come, by which a unit's backward is through. Returns their nodes.

    A leaf's gradient does not say so, and of a unit whose inputs have none it is known when all of backward ends.
    """
    tensors = {id(t): t for t in inputs if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None}
    number = len(tensors)
    came = [-1, 0]  # in which backward, and how many

    def complete(gradient: Tensor) -> None:  # it must not hold the tensors, whose nodes hold it
        task = backward_number()
        came[:] = task, came[1] + 1 if came[0] == task else 1
        if came[1] == number:
            call.unit.gathering.passed(call)

    nodes = {tensor.grad_fn for tensor in tensors.values()}
    for tensor in tensors.values():
        tensor.register_hook(complete)
    return nodes


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """In this block gradients add up on each rank, whole; they are reduced with those of the next backward outside."""
    gatherings = {unit.gathering: unit.gathering.syncing for unit in units_of(module)}
    try:
        for gathering in gatherings:
            gathering.syncing = False
        yield
    finally:
        for gathering, before in gatherings.items():
            gathering.syncing = before


def _zero_grad(module: nn.Module, parts_zero_grad: Callable, set_to_none: bool = True) -> None:
    """In place of a module's `zero_grad`: also what no_sync added up, which is in no part's gradient yet."""
    for each in module.modules():
        if hasattr(each, UNIT):
            getattr(each, UNIT).forget_gradients()
    parts_zero_grad(set_to_none)


def _refuse(*_, **__) -> None:
    """In place of a module's `to`, `half` and the like, and of a copy of it: its pieces would be left behind."""
    raise RuntimeError(
        "expected a module that stays as it is once it is sharded; convert, move or copy it before fully_shard"
    )


def _refuse_pickle(*_) -> None:
    """In place of pickling a module, as torch.save(module) does: of its weights a rank has a piece, and hooks."""
    raise TypeError(
        "expected a state dict to save or send, found a sharded module itself; full_state_dict(model) is whole, on "
        "rank 0, and model.state_dict() this rank's parts"
    )
