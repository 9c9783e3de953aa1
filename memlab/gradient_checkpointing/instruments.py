"""The instruments of the bench: a source and a sink around a stage, and hooks that watch it.

    source → stage → sink      the source keeps the gradient that the stage sends; the sink sends the stage one, of
                               which, as in a whole chain, the engine is then the only owner

A mark is a place in the Meter's record: how many events there were by then. The record says how many bytes were there
at each mark, and at the most between two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlab.gradient_checkpointing.batch_norm import statistics_stand_still
from memlab.gradient_checkpointing.hooks import StopRecomputation
from memlab.memory_hierarchy.counting import OpCounter
from memlab.memory_timeline.ownership import storages_of
from memlab.memory_timeline.timeline import Timeline

RESIDENT = ("parameter", "buffer", "input")


class Source(torch.autograd.Function):
    """The stage's input: hands over the gradient that arrives. Autograd would hold a leaf, so it is not one."""

    @staticmethod
    def forward(ctx, anchor: Tensor, x: Tensor, sent: list[Tensor]) -> Tensor:
        ctx.sent = sent
        return x.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Keeps it."""
        ctx.sent.append(grad)
        return None, None, None


def source(x: Tensor, sent: list[Tensor]) -> Tensor:
    """x as a stage finds it: a result of the stage before, if that wants a gradient."""
    return Source.apply(torch.empty(0, requires_grad=True), x.detach(), sent) if x.requires_grad else x


def replica(tensor: Tensor) -> Tensor:
    """Other bytes in the same layout."""
    whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return whole.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Sink(torch.autograd.Function):
    """Follows the stage's output: its backward sends the gradient, of which the engine is then the only owner."""

    @staticmethod
    def forward(ctx, out: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return out.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        """Sends it, and lets go of it."""
        return ctx.gradient.pop(), None


def dropping() -> saved_tensors_hooks:
    """Lets nothing be saved."""
    return saved_tensors_hooks(lambda tensor: None, lambda _: None)


def saving(saved: list[int], looks: list[int], mark: Callable[[], int], lasting: Callable) -> saved_tensors_hooks:
    """Notes which storages are saved, and when backward looks at one. lasting: of `statistics_stand_still`."""

    def pack(tensor: Tensor) -> Tensor:
        saved.append(storage_id(tensor))
        return lasting(tensor).detach()

    def unpack(tensor: Tensor) -> Tensor:
        looks.append(mark())
        return tensor

    return saved_tensors_hooks(pack, unpack)


def run_again(layer: Callable, x: Tensor, saves: int) -> None:
    """As a checkpoint does: until so many tensors are saved."""
    tape = []

    def pack(tensor: Tensor) -> None:
        tape.append(lasting(tensor).detach())
        if len(tape) == saves:
            raise StopRecomputation

    with suppress(StopRecomputation), statistics_stand_still() as lasting, saved_tensors_hooks(pack, lambda _: None):
        layer(x)


def storage_id(tensor: Tensor) -> int:
    """Where its bytes are: the same for views of one another, while they live."""
    return next(iter(storages_of(tensor)))._cdata


def storage_bytes(tensor: Tensor) -> int:
    """Of its storages."""
    return sum(storage.nbytes() for storage in storages_of(tensor))


def flops_of(counter: OpCounter) -> int:
    """Of all that was counted."""
    return sum(op.flops for op in counter.ops)


class Step(NamedTuple):
    """One forward and backward: marks in the meter's record, and what was seen besides."""

    begin: int
    forward: int
    backward: int
    look: int
    done: int
    gradient_bytes: int
    grads: int
    saves_input: bool
    saves_output: bool
    saves: int
    flops: int


def levels_of(timeline: Timeline) -> tuple[list[int], int]:
    """Bytes after each event without what was always there, and the bytes of that."""
    storages, events = timeline.of_all_devices  # marks count the events of all devices
    resident = {s.id: s.nbytes for s in storages if s.category in RESIDENT and s.device == timeline.device}
    mine = {s.id for s in storages if s.device == timeline.device} - resident.keys()
    deltas = (event.delta if event.storage in mine else 0 for event in events)
    return list(itertools.accumulate(deltas, initial=0)), sum(resident.values())
