"""A state dict with masters, loaded in FP32, or refused.

torch.optim casts every state that it loads to the dtype of its parameter, which here has 16 bits. So an optimizer loads
them as those of masters, and they are handed on by parameter.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer

from memlab.mixed_precision.fitting import HALVES


def with_states(state_dict: dict, groups: list[dict], name: str, *, has_masters: bool) -> list[Tensor]:
    """The parameters of these groups that a state dict has states for, in order.

    name: of the class that asks. has_masters: whether that keeps a master of each 16-bit parameter; a parameter that
    has come to be FP32 still has the one from before.

    Raises ValueError for what is no state dict, and for one of other parameters, or with other masters than expected.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"expected state and param_groups, as state_dict() gives them; found {list(state_dict)}")
    numbers, params = ([p for group in its for p in group["params"]] for its in (state_dict["param_groups"], groups))
    found = []
    for number, p in zip(numbers, params, strict=False):  # other groups are refused when states are loaded
        if not (state := state_dict["state"].get(number)):  # {}: somebody has looked for it
            continue
        shape = getattr(state.get("master"), "shape", None)
        expected = p.shape if has_masters and (p.dtype in HALVES or shape is not None) else None
        if shape != expected:
            raise ValueError(
                f"expected a state dict of {name} for these parameters, found one with "
                f"{', '.join(map(repr, state))} for parameter {number} of {p.dtype}, and a master of "
                f"shape {shape} where {expected} was expected; load it into the class and model that wrote it"
            )
        found.append(p)
    return found


def states_in_fp32(
    optimizer: Optimizer, groups: list[dict], state_dict: dict, masters: dict[Tensor, Tensor]
) -> dict[Tensor, dict]:
    """What an optimizer makes of a state dict, by parameter; it keeps none of it.

    groups: the parameters'. masters: parameter → its master, in FP32, where it has one; states are then as the master.

    Raises ValueError for a state dict of other groups.
    """
    try:
        optimizer.param_groups = [group | {"params": [masters.get(p, p) for p in group["params"]]} for group in groups]
        optimizer.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        states = optimizer.state
    finally:
        optimizer.state, optimizer.param_groups = defaultdict(dict), groups
    for p, m in masters.items():
        states[p] = {name: _in_order_of(m, state) for name, state in states.pop(m).items()}
    return states


def _in_order_of(m: Tensor, state: object) -> object:
    """A state of a master's shape, in its order of dimensions too: fused kernels read both in one."""
    dense = isinstance(state, Tensor) and state.layout is torch.strided
    if dense and state.shape == m.shape and state.stride() != m.stride():
        return torch.empty_like(m, dtype=state.dtype).copy_(state)
    return state
