"""What a chain of stages costs: bytes and work of each stage, measured one by one.

A planner must know, before it decides what to forget, what each stage leaves behind and what it needs while it works.
All of that can be measured with the stage alone on the bench:

    its output, which is the next stage's input         its tape: what backward wants besides input and output
    the peaks of its forward, with a tape and without    the peak of its backward, gradients included
    the gradients of its parameters, which stay          the work of running it again

The stages are measured from the last to the first, so that each receives the very gradient that the stage after it
sends. Running a stage again is measured too, and is less than its forward: recomputation stops at the last tensor that
it saves, and a Linear saves its input before it multiplies. Beaumont et al. 2019 describe heterogeneous chains so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from memlab.memory_arithmetic.shapes import one_of
from memlab.memory_hierarchy.bandwidth import best_seconds
from memlab.memory_hierarchy.roofline import OpCounter
from memlab.memory_timeline.meter import Meter
from memlab.memory_timeline.ownership import storages_of

RESIDENT = ("parameter", "buffer", "input")


class Signature(NamedTuple):
    """What a chain was measured on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Signature:
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


def measure_chain(layers: Sequence[Callable], x: Tensor, *, cost: str = "flops") -> Chain:
    """Run each stage alone, a few times, and note what it costs.

    layers: functions of one tensor to one tensor, modules for example, in the order in which they run; the last gives
      the loss (any tensor will do: the step measured is `out.backward(torch.ones_like(out))`, the caller holding both).
    x: the chain's input, of the batch size and dtype to be trained with; its values matter as far as work depends on
      them. cost: "flops" (exact, `OpCounter`'s) or "seconds" (the best of five, on this machine, at this moment).

    Bytes are those that the Meter sees. The step meant begins with gradients that are None, and ends before the
    optimizer. Measuring holds the stages' inputs, all at once, and one stage's tape. Afterwards gradients, buffers (so
    running statistics) and the random state are as they were.

    Raises TypeError for what is no function or no tensor. Raises ValueError for no stages, for a stage that returns
    anything but one tensor, that writes into its input, or that keeps what a checkpoint cannot drop, and for a chain
    that needs no backward.   Source: Beaumont et al. 2019, section 3 (the model of a chain).
    """
    one_of("cost", cost, ("flops", "seconds"))
    layers = list(layers)
    if not layers:
        raise ValueError("expected a chain of at least one stage, found none")
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(f"expected stage {i} as a function of one tensor, found {type(layer).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"expected x as a tensor, found {type(x).__name__}")

    modules = [layer for layer in layers if isinstance(layer, Module)]
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng([x.device] if x.is_cuda else []))
        undo.callback(_restore, [(m, n, b, b.clone()) for r in modules for m in r.modules() for n, b in _buffers(m)])
        undo.enter_context(torch.enable_grad())
        with Meter(modules or None, inputs=x) as meter:
            bench = _Bench(meter, undo)
            start = meter.event_count
            inputs = _inputs(layers, x)
            gradient = [torch.ones_like(inputs.pop())]
            result_bytes = 2 * _nbytes(gradient[0])
            notes = []
            for i in reversed(range(len(layers))):
                notes.append(bench.measure(i, layers[i], inputs[i], gradient, last=i == len(layers) - 1))
            gradient.clear()
            del inputs[1:]
            end = meter.event_count
        held, resident = _levels(meter.timeline)
        stages = [note.stage(held) for note in reversed(notes)]
        if cost == "seconds":
            stages = _timed(layers, stages, inputs[0])
    return Chain(tuple(stages), resident + held[end] - held[start], result_bytes, Signature.of(x), cost)


def _inputs(layers: list[Callable], x: Tensor) -> list[Tensor]:
    """The input of each stage, and the result of the last, cut from one another."""
    inputs = [x.detach().requires_grad_(x.requires_grad)]
    for i, layer in enumerate(layers):
        given = inputs[-1].clone()
        version = given._version
        with _dropping():
            out = layer(given)
        if not isinstance(out, Tensor):
            found = f"{len(out)} values in a {type(out).__name__}" if isinstance(out, (tuple, list)) else repr(out)
            raise ValueError(f"expected stage {i} to return one tensor, found {found}; wrap it in a function that does")
        if given._version != version:
            raise ValueError(
                f"expected stages that leave their input as it is, found stage {i} writing into it, and a checkpoint "
                f"there could not run it again; make it one stage with stage {i - 1}, or not in place"
            )
        inputs.append(out.detach().requires_grad_(out.requires_grad))
    if not out.requires_grad:
        raise ValueError("expected a chain whose result requires a gradient, found one with nothing to learn")
    return inputs


class _Bench:
    """Runs one stage in all the ways of which a plan is made, and marks the meter's events in between."""

    def __init__(self, meter: Meter, undo: ExitStack):
        self.meter, self.undo = meter, undo
        self.parameters: set[Tensor] = set()

    def measure(self, i: int, layer: Callable, x: Tensor, gradient: list[Tensor], *, last: bool) -> _Notes:
        """`gradient` holds that of the stage's output, and in the end that of its input, if that wants one."""
        mark = lambda: self.meter.event_count  # noqa: E731
        source = (lambda: _Source.apply(x, gradient)) if i and x.requires_grad else (lambda: x)
        gradient_bytes = _nbytes(gradient[0]) if gradient else 0

        begin = mark()
        with _dropping():
            out = layer(source())
        ran, node, place = mark(), out.grad_fn, _place(out)
        del out
        dropped = mark()
        del node
        if mark() != dropped:
            raise ValueError(
                f"expected stage {i} to keep for backward only what autograd saves, found more; a checkpoint cannot "
                "drop it: a custom Function should use ctx.save_for_backward"
            )

        saved, looks = [], []
        tape = mark()
        with OpCounter() as whole, _saving(saved, looks, mark):
            out = layer(source())
        taped, root = mark(), out
        new = self._set_aside(out, boundary=x if i else None)
        if not last and out.requires_grad:
            root = _Sink.apply(out, gradient)
        places = set(saved)
        saves_output, view = _place(out) in places, _place(out) == _place(x)
        out = out if last else None
        backward = mark()
        if root.requires_grad:
            torch.autograd.backward(root, gradient[0] if last else torch.empty(0, device=root.device))
        done = mark()
        if last:
            gradient.pop(0)
        grads = {s._cdata: s.nbytes() for p in new if p.grad is not None for s in storages_of(p.grad)}
        for parameter in self.parameters:
            parameter.grad = None
        del root, out, place

        again, counted = mark(), OpCounter()
        with counted:
            _run_again(layer, source(), len(saved))
        stopped = mark()
        return _Notes(
            begin, ran, dropped, tape, taped, backward, looks[0] if looks else None, done, again, stopped,
            gradient_bytes, sum(grads.values()), view, _place(x) in places, saves_output, last, len(saved),
            _flops(whole), _flops(counted),
        )  # fmt: skip

    def _set_aside(self, out: Tensor, boundary: Tensor | None) -> list[Tensor]:
        """Parameters that out's gradient will reach for the first time; gradients they have come back in the end."""
        new, seen, nodes = [], set(), [out.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf is not boundary and leaf not in self.parameters:
                self.parameters.add(leaf)
                self.undo.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None
                new.append(leaf)
        return new


class _Notes(NamedTuple):
    """Of one stage: marks in the meter's record, and what was seen besides."""

    begin: int
    ran: int
    dropped: int
    tape: int
    taped: int
    backward: int
    look: int | None
    done: int
    again: int
    stopped: int
    gradient: int
    grads: int
    view: bool
    saves_input: bool
    saves_output: bool
    last: bool
    saves: int
    flops: int
    again_flops: int

    def stage(self, held: list[int]) -> Stage:
        """held: bytes after each event, less those that are always there."""

        def peak(start: int, end: int) -> int:
            return max(held[start : end + 1])

        output = held[self.ran] - held[self.dropped]
        kept = held[self.backward] - held[self.tape]  # the tape and, if it is saved or the loss, the output
        base = held[self.tape] - self.gradient
        if self.last:  # the caller holds the output and its gradient, from beginning to end
            base, kept = held[self.tape] + output, kept - output
        look = self.look if self.saves else self.done
        return Stage(
            output_bytes=output,
            view=self.view,
            tape_bytes=kept - (output if self.saves_output and not self.last else 0),
            saves_input=self.saves_input,
            saves_output=self.saves_output and not self.view,
            gradient_bytes=self.grads,
            forward_bytes=peak(self.begin, self.ran) - held[self.begin],
            taped_bytes=peak(self.tape, self.taped) - held[self.tape],
            again_bytes=peak(self.again, self.stopped) - held[self.again],
            backward_bytes=peak(self.backward, self.done) - base,
            waiting_bytes=peak(self.backward, look) - base - kept,
            arriving_bytes=held[look] - base - kept if self.saves else 0,
            working_bytes=peak(look, self.done) - base,
            cost=self.flops,
            again_cost=self.again_flops if self.saves else 0,
            saves=self.saves,
        )


def _levels(timeline) -> tuple[list[int], int]:
    """Bytes after each event without what was always there, and the bytes of that."""
    storages, events = timeline._everything  # marks count the events of all devices
    resident = {s.id: s.nbytes for s in storages if s.category in RESIDENT and s.device == timeline.device}
    mine = {s.id for s in storages if s.device == timeline.device} - resident.keys()
    deltas = (event.delta if event.storage in mine else 0 for event in events)
    return list(itertools.accumulate(deltas, initial=0)), sum(resident.values())


def _timed(layers: list[Callable], stages: list[Stage], x: Tensor) -> list[Stage]:
    """The same stages with seconds for costs."""
    found = []
    for layer, stage in zip(layers, stages, strict=True):

        def forward(layer=layer, x=x) -> Tensor:
            with _dropping():
                return layer(x)

        seconds = best_seconds(forward, x.device)
        again = best_seconds(lambda: _run_again(layer, x, stage.saves), x.device) if stage.saves else 0.0  # noqa: B023
        found.append(replace(stage, cost=seconds, again_cost=min(again, seconds)))
        out = forward()
        x = out.detach().requires_grad_(out.requires_grad)
    return found


class _Source(torch.autograd.Function):
    """The stage's input: hands over the gradient that arrives."""

    @staticmethod
    def forward(ctx, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.gradient.append(grad)
        return None, None


class _Sink(torch.autograd.Function):
    """Follows the stage's output: its backward sends the gradient, and keeps nothing of it."""

    @staticmethod
    def forward(ctx, out: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return out.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient.pop(), None


class _Done(Exception):
    """All that is to be saved has been."""


def _dropping() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: None, lambda _: None)


def _saving(saved: list[int], looks: list[int], mark: Callable[[], int]) -> saved_tensors_hooks:
    """Notes which storages are saved, and when backward looks at one."""

    def pack(tensor: Tensor) -> Tensor:
        saved.append(_place(tensor))
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        looks.append(mark())
        return tensor

    return saved_tensors_hooks(pack, unpack)


def _run_again(layer: Callable, x: Tensor, saves: int) -> None:
    """As a checkpoint does: until so many tensors are saved."""
    tape = []

    def pack(tensor: Tensor) -> None:
        tape.append(tensor.detach())
        if len(tape) == saves:
            raise _Done

    try:
        with saved_tensors_hooks(pack, lambda _: None):
            layer(x)
    except _Done:
        pass


def _place(tensor: Tensor) -> int:
    return next(iter(storages_of(tensor)))._cdata


def _nbytes(tensor: Tensor) -> int:
    return sum(storage.nbytes() for storage in storages_of(tensor))


def _flops(counter: OpCounter) -> int:
    return sum(op.flops for op in counter.ops)


def _buffers(module: Module):
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def _restore(buffers: list[tuple[Module, str, Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer.copy_(before)
