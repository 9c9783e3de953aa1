"""What a planner knows of a chain: for each stage, the bytes that it leaves behind, those it needs, and its work.

    its output, which is the next stage's input         its tape: what backward wants besides input and output
    the peaks of its forward, with a tape and without    the peak of its backward, gradients included
    the gradients of its parameters, which stay          the work of running it again

All of that is seen with the stage alone on a bench (`bench`), and is enough for the peak of any plan (`plan`): what
else is there at that moment is what other stages left behind. Beaumont et al. 2019, section 3, describe chains so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

Setting = tuple[tuple[str, str], ...]
"""All that decides what a chain's stages save, as far as it can be seen, by name, in words."""


def setting_of(layers: Sequence[Module], x: Tensor) -> Setting:
    """That of these layers and x, now: the input, autocast, which modules train, which parameters want gradients."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    found = {
        "the input": f"{tuple(x.shape)} of {x.dtype} on {x.device}, requires_grad={x.requires_grad}",
        "autocast": str(torch.get_autocast_dtype(kind)) if autocast else "off",
    }
    for i, layer in enumerate(layers):
        for name, module in layer.named_modules(prefix=f"layers[{i}]"):
            found[f"{name}.training"] = str(module.training)
        for name, parameter in layer.named_parameters(prefix=f"layers[{i}]"):
            found[f"{name}.requires_grad"] = str(parameter.requires_grad)
    return tuple(found.items())


@dataclass(frozen=True)
class Stage:
    """One stage alone. All bytes are of storages; peaks count neither its input nor what is always there.

    output_bytes: its output. tape_bytes: what backward wants besides input and output. saves_input, saves_output:
      whether it wants those.
    gradient_bytes: gradients of parameters that it leaves behind.
    forward_bytes, taped_bytes, again_bytes: peak of a forward that saves nothing; that saves its tape; and that ends
      with the last tensor saved. All include the output, as far as it is made.
    backward_bytes: peak of backward: tape, saved output, gradients. Up to the first look at the tape, but without it:
      waiting_bytes at the peak, arriving_bytes at that look; from there on: working_bytes. The last stage's output and
      its gradient, which the caller holds, are not in here but in result_bytes.
    own_backward_bytes, own_working_bytes: the same with its input, which nobody else holds, until that is let go.
    cost, again_cost: FLOPs of a forward, and of one that ends with the last tensor saved.
    """

    output_bytes: int
    tape_bytes: int
    saves_input: bool
    saves_output: bool
    gradient_bytes: int
    forward_bytes: int
    taped_bytes: int
    again_bytes: int
    backward_bytes: int
    waiting_bytes: int
    arriving_bytes: int
    working_bytes: int
    own_backward_bytes: int
    own_working_bytes: int
    cost: int
    again_cost: int


@dataclass(frozen=True)
class Chain:
    """Stages measured in one setting.

    resident_bytes: what is there from before the step to its end: parameters, buffers, the input, tensors that the
    stages hold. result_bytes: the loss and its gradient, which the caller holds through backward.
    """

    stages: tuple[Stage, ...]
    resident_bytes: int
    result_bytes: int
    setting: Setting

    def __len__(self) -> int:
        return len(self.stages)

    def check(self, layers: Sequence[Module], x: Tensor) -> None:
        """Raise ValueError when it was measured for other stages, another input, or in another setting.

        Neither modules nor values are compared: other weights have the same bytes. Raises TypeError for an x that is no
        tensor.
        """
        if len(layers) != len(self):
            raise ValueError(f"expected the {len(self)} stages that were measured, found {len(layers)}; measure again")
        if not isinstance(x, Tensor):
            raise TypeError(f"expected x as a tensor, found {type(x).__name__}")
        then, now = dict(self.setting), dict(setting_of(layers, x))
        for name in then | now:
            before, found = then.get(name, "nothing there"), now.get(name, "nothing there")
            if before != found:
                raise ValueError(
                    f"expected {name} as it was measured, {before}; found {found}: bytes and work differ, so "
                    "measure_chain(layers, x) again as it is to be run"
                )
