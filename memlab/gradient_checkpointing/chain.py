"""What a planner knows of a chain: for each stage, the bytes that it leaves behind, those it needs, and its work.

    its output, which is the next stage's input         its tape: what backward wants besides input and output
    the peaks of its forward, with a tape and without    the peak of its backward, gradients included
    the gradients of its parameters, which stay          the work of running it again

All of that is seen with the stage alone on a bench (`bench`), and is enough for the peak of any plan (`plan`): what
else is there at that moment is what other stages left behind. Beaumont et al. 2019, section 3, describe chains so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Signature(NamedTuple):
    """What a chain was measured on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Signature:
        """That of x."""
        return cls(tuple(x.shape), x.dtype, x.device)

    def __str__(self) -> str:
        return f"{self.shape} of {str(self.dtype).removeprefix('torch.')} on {self.device}"


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
      The last stage's output and its gradient, which the caller holds, are not in here but in result_bytes.
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
    """Stages measured for inputs of one signature.

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
        """Raises ValueError when it was measured for another number of stages, or another input."""
        if len(layers) != len(self):
            raise ValueError(f"expected the {len(self)} stages that were measured, found {len(layers)}; measure again")
        if not isinstance(x, Tensor):
            raise TypeError(f"expected x as a tensor, found {type(x).__name__}")
        if Signature.of(x) != self.signature:
            raise ValueError(
                f"expected an input as it was measured, {self.signature}; found {Signature.of(x)}: bytes and work "
                "differ, so measure_chain(layers, x) again with such an input"
            )
