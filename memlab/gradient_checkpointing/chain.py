"""What a planner knows of a chain: for each stage, the bytes that it leaves behind, those it needs, and its work.

    its output, which is the next stage's input         its tape: what backward wants besides input and output
    the peaks of its forward, with a tape and without    the peak of its backward, gradients included
    the gradients of its parameters, which stay          the work of running it again

All of that is seen with the stage alone on a bench (`bench`), and is enough for the peak of any plan (`plan`): what
else is there at that moment is what other stages left behind. Beaumont et al. 2019, section 3, describe chains so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module


class Signature(NamedTuple):
    """What a chain was measured on, and how: all that decides what its stages save, as far as it can be seen.

    autocast: its dtype for the input's type of device, None where it is off.
    flags: of the layers that are modules, in words: which train, and which parameters want gradients.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    autocast: torch.dtype | None = None
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, layers: Iterable[Callable], x: Tensor) -> Signature:
        """That of these layers and x, now."""
        kind = x.device.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        autocast = torch.get_autocast_dtype(kind) if on else None
        return cls(tuple(x.shape), x.dtype, x.device, x.requires_grad, autocast, tuple(_flags(layers)))

    @property
    def input(self) -> str:
        """The input in words."""
        return f"{self.shape} of {_name(self.dtype)} on {self.device}, requires_grad={self.requires_grad}"


def _flags(layers: Iterable[Callable]) -> Iterator[str]:
    for i, layer in enumerate(layers):
        if isinstance(layer, Module):
            for name, module in layer.named_modules(prefix=f"layers[{i}]"):
                yield f"{name}.training = {module.training}"
            for name, parameter in layer.named_parameters(prefix=f"layers[{i}]"):
                yield f"{name}.requires_grad = {parameter.requires_grad}"


def _name(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Stage:
    """One stage alone. All bytes are of storages; peaks count neither its input nor what is always there.

    output_bytes: its output, 0 if that is always there, as a parameter is. view: the output shares the input's storage.
    tape_bytes: what backward wants besides input and output. saves_input, saves_output: whether it wants those.
    gradient_bytes: gradients of parameters that it leaves behind.
    forward_bytes, taped_bytes, again_bytes: peak of a forward that saves nothing; that saves its tape; and that ends
      with the last tensor saved. All include the output, as far as it is made.
    backward_bytes: peak of backward: tape, saved output, gradients. Up to the first look at the tape, but without it:
      waiting_bytes at the peak, arriving_bytes at that look (0 if there is no tape); from there on: working_bytes.
      The last stage's output and its gradient, which the caller holds, are not in here but in result_bytes. Where a
      stage after it uses a parameter too, these have room for the sum of both gradients, besides the two.
    own_backward_bytes, own_working_bytes: the same with its input, which nobody else holds, until that is let go.
    cost, again_cost: of a forward, and of one that ends with the last tensor saved: FLOPs or seconds.
    """

    output_bytes: int
    view: bool
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
    cost: float
    again_cost: float
    saves: int = 1
    """How many tensors are saved; 0: there is no tape, and so nothing to forget."""


@dataclass(frozen=True)
class Chain:
    """Stages measured for one signature.

    resident_bytes: what is there from before the step to its end: parameters, buffers, the input, tensors that the
    stages hold. result_bytes: the loss and its gradient, which the caller holds through backward.
    """

    stages: tuple[Stage, ...]
    resident_bytes: int
    result_bytes: int
    signature: Signature
    unit: str = "flops"

    def __len__(self) -> int:
        return len(self.stages)

    def check(self, layers: Sequence[Callable], x: Tensor) -> None:
        """Raise ValueError when it was measured for other stages, another input, or in another setting.

        Compared are the number of stages and the `Signature`. Of a stage that is a function no flags can be seen: what
        it calls must be as it was. Nor are modules or values compared: other weights have the same bytes.
        Raises TypeError for an x that is no tensor.
        """
        if len(layers) != len(self):
            raise ValueError(f"expected the {len(self)} stages that were measured, found {len(layers)}; measure again")
        if not isinstance(x, Tensor):
            raise TypeError(f"expected x as a tensor, found {type(x).__name__}")
        then, now = self.signature, Signature.of(layers, x)
        if now == then:
            return
        if now[:4] != then[:4]:
            what, before, found = "an input", then.input, now.input
        elif now.autocast != then.autocast:
            what, before, found = "autocast", _name(then.autocast), _name(now.autocast)
        else:
            pairs = itertools.zip_longest(then.flags, now.flags, fillvalue="nothing there")
            what, (before, found) = "a layer", next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"expected {what} as it was measured, {before}; found {found}: bytes and work differ, so "
            "measure_chain(layers, x) again as it is to be run"
        )
