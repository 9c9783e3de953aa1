"""What a step on master weights needs beyond its idea: whom it refuses, a scaler's scale, and states that stay FP32."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from memlab.mixed_precision.writes import Writes

HALVES = (torch.float16, torch.bfloat16)

# ---- who can be stepped


def refuse_class(optimizer_class: object) -> None:
    """Raise TypeError or ValueError for what is no optimizer's class, or one that MasterWeights cannot step."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        found = f"an {type(optimizer_class).__name__}" if isinstance(optimizer_class, Optimizer) else optimizer_class
        raise TypeError(
            f"expected an optimizer's class, found {found}; write MasterWeights(model.parameters(), torch.optim.AdamW, "
            "lr=3e-4), with the class first and what it is made with after it"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            "expected an optimizer that updates each parameter from its own gradient, found "
            f"{optimizer_class.__name__}, whose step calls a closure several times; use it on FP32 weights"
        )


def refuse_wide(optimizer: AroundOptimizer) -> None:
    """Raise ValueError for parameters of which none needs a master, where the optimizer refuses those."""
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if optimizer._refuses_wide and dtypes.isdisjoint(HALVES):
        raise ValueError(
            f"expected parameters in FP16 or BF16, found only {', '.join(sorted(map(str, dtypes)))}, which are their "
            f"own masters (autocast leaves weights in FP32 too); use {type(optimizer._inner).__name__} itself"
        )


def refuse_groups(groups: Sequence[dict]) -> None:
    """Raise ValueError for a differentiable last group, and for two 16-bit parameters in the same memory.

    Each of these two would have a master, and one master would win.
    """
    if groups[-1].get("differentiable"):
        raise ValueError(
            "expected an optimizer without differentiable=True, since no gradient comes back through the rounding of a "
            "master to its weight; use it on FP32 weights"
        )
    found: dict[tuple[int, int], Tensor] = {}
    for p in (p for group in groups for p in group["params"]):
        if p.dtype in HALVES and p.layout is torch.strided and p.numel():
            other = found.setdefault((p.untyped_storage()._cdata, p.storage_offset()), p)
            if other is not p:
                raise ValueError(
                    f"expected a parameter for each memory, found two of {tuple(other.shape)} and {tuple(p.shape)} in "
                    "the same; tie weights by giving both modules one Parameter"
                )


# ---- the step


def own_states(optimizer: AroundOptimizer, group: dict, p: Tensor, m: Tensor) -> dict:
    """The inner optimizer's states of a parameter. Most begin with none, but Adagrad makes some in its __init__."""
    own = {name: value for name, value in optimizer.state[p].items() if name != "master"}
    return own if own or optimizer._writes.knows(p) else optimizer._make([group | {"params": [m]}]).state[m]


def step_without_hooks(inner: Optimizer, *, alone: bool) -> None:
    """The optimizer's own step of one chunk. Its hooks are for the whole step, and run there.

    alone: whether that chunk is the whole step. Raises ValueError for states that belong to no parameter; and for an
    optimizer that counts beyond parameters' states, unless its chunk is alone: it would count once a chunk.
    """
    before = _counts(inner)
    type(inner).step.__wrapped__(inner)
    if strange := [key for key in inner.state if not isinstance(key, Tensor)]:
        raise ValueError(
            f"expected {type(inner).__name__} to keep its states by parameter, found one under {strange[0]!r}, which "
            "would be lost; let it keep that in its groups"
        )
    changed = [name for (place, name), now in _counts(inner).items() if before.get((place, name)) != now]
    if changed and not alone:
        raise ValueError(
            f"expected {type(inner).__name__} to keep its counts in parameters' states, found {changed[0]!r} changed "
            "once a chunk; use chunk_bytes=None"
        )


def _counts(inner: Optimizer) -> dict[tuple[int, str], object]:
    """An optimizer's numbers that are no parameter's: attributes and options; of a tensor, how often it was written."""
    places = [vars(inner), *inner.param_groups]
    found = {(i, name): value for i, place in enumerate(places) for name, value in place.items()}
    numbers = {key: value for key, value in found.items() if type(value) in (int, float)}
    return numbers | {key: (id(t), t._version) for key, t in found.items() if isinstance(t, Tensor)}


def widened(gradient: Tensor, m: Tensor, factor: Tensor | None) -> Tensor:
    """A gradient in its master's type and order of dimensions, times a factor, (). The gradient is not written to."""
    if gradient.is_sparse:
        wide = gradient.to(m.device, m.dtype)
    elif gradient is m.grad or (gradient.dtype is m.dtype and gradient.stride() == m.stride()):
        wide = gradient
    else:
        wide = torch.empty_like(m).copy_(gradient)
    if factor is None:
        return wide
    return wide * factor.to(m.device) if wide is gradient else wide.mul_(factor.to(m.device))


def unscaling(optimizer: AroundOptimizer) -> Tensor | None:
    """1 / the scale that a loss scaler left to the optimizer to divide by; None if it left none."""
    if (scale := getattr(optimizer, "grad_scale", None)) is None:
        return None
    precise = torch.float32 if scale.device.type == "mps" else torch.float64
    return scale.to(precise).reciprocal().float()


# ---- what an optimizer is besides its step


class AroundOptimizer(Optimizer):
    """What MasterWeights has beyond its step: groups that are added, gradients that are widened, states that load."""

    _inner: Optimizer
    _writes: Writes

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters, as to any optimizer. Raises ValueError as the class does."""
        super().add_param_group(param_group)
        try:
            refuse_groups(self.param_groups)
        except ValueError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def widen_gradients(self) -> None:
        """Turn 16-bit gradients into FP32 ones of the same parameters, one after the other: 2 bytes more a parameter.

        Then a scaler's `unscale_` and `clip_grad_norm_(model.parameters(), ...)` lose nothing. Divided by the scale in
        FP16, a small gradient would underflow again. Once gradients are cleared to None, backward makes 16-bit ones.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dtype in HALVES:
                    wide = p.grad.float()
                    p.grad, p.grad_dtype = None, None  # None: of any type
                    p.grad = wide

    def load_state_dict(self, state_dict: dict) -> None:
        """Resume from what `state_dict()` gave, masters and states in FP32. The weights themselves are the model's.

        A weight that is not its master rounded is taken over: from BF16 to FP16, first copy the masters to the weights.
        Raises ValueError for the dict of another class, which has no masters, and for one of other parameter groups or
        shapes; all is then as it was.
        """
        hook = self.register_load_state_dict_pre_hook(states_in_fp32)  # the last: it gets what others return
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict:
        return super().__getstate__() | {name: getattr(self, name) for name in ("chunk_bytes", "_make", "_inner")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)  # torch's load_state_dict comes by here, too
        self._writes = Writes()  # none is known: weights that are not their masters rounded are taken over
        # The optimizer fills in the options that it has now, and had not when they were saved.
        self._inner.__setstate__({"state": self._inner.state, "param_groups": self.param_groups})


def states_in_fp32(optimizer: AroundOptimizer, state_dict: dict) -> dict:
    """A state dict with its states by parameter, in FP32: torch casts states that come by number to 16 bits.

    Raises ValueError for what is no state dict, and one of other groups or with other masters than the optimizer keeps.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"expected state and param_groups, as state_dict() gives them; found {list(state_dict)}")
    inner, groups = optimizer._inner, optimizer.param_groups
    numbers, params = ([p for group in its for p in group["params"]] for its in (state_dict["param_groups"], groups))
    wide = {}
    for number, p in zip(numbers, params, strict=False):  # other groups are refused when states are loaded
        if state := state_dict["state"].get(number):  # {}: somebody has looked for it
            wide[p] = optimizer._wide(p) if optimizer._needs_master(p) else p
            expected = p.shape if p.dtype in HALVES and optimizer._keeps_masters else None
            found = getattr(state.get("master"), "shape", None)
            if found != expected:
                raise ValueError(
                    f"expected a state dict of {type(optimizer).__name__} for these parameters, found one with "
                    f"{', '.join(map(repr, state))} for parameter {number} of {p.dtype}, and a master of shape {found} "
                    f"where {expected} was expected; load it into the class and model that wrote it"
                )
    try:
        inner.param_groups = [group | {"params": [wide.get(p, p) for p in group["params"]]} for group in groups]
        inner.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        states = {p: {name: _like(m, value) for name, value in inner.state[m].items()} for p, m in wide.items()}
    finally:
        inner.state, inner.param_groups = defaultdict(dict), groups
    return state_dict | {"state": states}


def _like(m: Tensor, state: object) -> object:
    """A state in memory of its own, and in its master's order of dimensions, as fused kernels read it."""
    if not isinstance(state, Tensor):
        return state
    dense = state.layout is torch.strided and state.shape == m.shape
    if dense and state.stride() != m.stride():
        return torch.empty_like(m, dtype=state.dtype).copy_(state)
    return state.clone()
