"""What the stages of a chain cost, each measured alone on the bench, under the Meter.

The stages are measured from the last to the first, so that each receives the very gradient that the stage after it
sends. Its backward is run twice: with its input held by somebody else, and by nobody else, since then the input's bytes
go before the last gradients come. Running a stage again is measured too, and is less than its forward: recomputation
stops at the last tensor that it saves, and a Linear saves its input before it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module

from memlab.checking import one_of
from memlab.gradient_checkpointing.batch_norm import statistics_stand_still
from memlab.gradient_checkpointing.chain import Chain, Signature, Stage
from memlab.gradient_checkpointing.instruments import (
    Notes,
    Sink,
    Step,
    dropping,
    flops_of,
    levels_of,
    replica,
    run_again,
    saving,
    source,
    stage_input,
    storage_bytes,
    storage_id,
)
from memlab.memory_hierarchy.bandwidth import best_seconds
from memlab.memory_hierarchy.counting import OpCounter
from memlab.memory_timeline.meter import Meter
from memlab.memory_timeline.ownership import storages_of


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
    anything but one tensor, that writes into its input, that sends no gradient to the stages before it, or that keeps
    what a checkpoint cannot drop, and for a chain that needs no backward.   Source: Beaumont et al. 2019, section 3
    (the model of a chain).
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

    signature = Signature.of(layers, x)
    modules = [layer for layer in layers if isinstance(layer, Module)]
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng([x.device] if x.is_cuda else []))
        undo.callback(_restore, [(m, n, b, b.clone()) for r in modules for m in r.modules() for n, b in _buffers(m)])
        undo.enter_context(torch.enable_grad())
        with Meter(modules or None, inputs=x) as meter:
            start = meter.event_count
            inputs = _inputs(layers, x)
            result = inputs.pop()
            callers = torch.ones_like(result)
            result_bytes = storage_bytes(result) + storage_bytes(callers)
            bench, gradient, notes = _Bench(meter, undo, storage_id(callers)), [callers], []
            del result
            for i in reversed(range(len(layers))):
                notes.append(bench.measure(i, layers[i], inputs[i], gradient, last=i == len(layers) - 1))
            del inputs[1:], gradient, callers
            end = meter.event_count
        held, resident = levels_of(meter.timeline)
        stages = [note.stage(held) for note in reversed(notes)]
        if cost == "seconds":
            stages = _timed(layers, stages, inputs[0])
    return Chain(tuple(stages), resident + held[end] - held[start], result_bytes, signature, cost)


def _inputs(layers: list[Callable], x: Tensor) -> list[Tensor]:
    """The input of each stage, and the result of the last, cut from one another."""
    inputs = [x.detach().requires_grad_(x.requires_grad)]
    for i, layer in enumerate(layers):
        given = inputs[-1].clone()
        version = given._version
        with dropping():
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
    """Runs one stage in all the ways of which a plan is made, and marks the meter's events in between.

    callers: where the caller's gradient is. A last stage may hand that on, or a view of it: then it is no new bytes.
    """

    def __init__(self, meter: Meter, undo: ExitStack, callers: int):
        self.meter, self.undo, self.callers = meter, undo, callers
        self.parameters: set[Tensor] = set()

    def mark(self) -> int:
        """A place in the meter's record: now."""
        return self.meter.event_count

    def measure(self, i: int, layer: Callable, x: Tensor, gradient: list[Tensor], *, last: bool) -> Notes:
        """Stage i alone. `gradient` holds that of its output, and afterwards that of its input, if it wants one."""
        begin = self.mark()
        with dropping():
            out = layer(source(x, []) if i else x)
        ran, node = self.mark(), out.grad_fn
        del out
        dropped = self.mark()
        del node
        if self.mark() != dropped:
            raise ValueError(
                f"expected stage {i} to keep for backward only what autograd saves, found more; a checkpoint cannot "
                "drop it: a custom Function should use ctx.save_for_backward"
            )
        own = self._step(
            i, layer, x, [g if storage_id(g) == self.callers else replica(g) for g in gradient], last=last, own=bool(i)
        )
        held = self._step(i, layer, x, gradient, last=last, own=False)
        again = self.mark()
        with OpCounter() as counter:
            run_again(layer, source(x, []) if i else x, held.saves)
        return Notes(
            begin=begin,
            ran=ran,
            dropped=dropped,
            held=held,
            own=own,
            again=again,
            stopped=self.mark(),
            again_flops=flops_of(counter),
            last=last,
        )

    def _step(self, i: int, layer: Callable, x: Tensor, gradient: list[Tensor], *, last: bool, own: bool) -> Step:
        """Forward and backward. own: on a copy of the input that nobody else holds."""
        sent, saved, looks = [], [], []
        gradient_bytes = sum(storage_bytes(g) for g in gradient if storage_id(g) != self.callers)
        begin, place = self.mark(), [storage_id(x)]
        with OpCounter() as counter, statistics_stand_still() as lasting, saving(saved, looks, self.mark, lasting):
            out = layer(stage_input(x, sent, place, own) if i else x)
        forward, out_place = self.mark(), storage_id(out)
        new, summed = self._set_aside(out)
        if not last:
            out = Sink.apply(out, gradient) if out.requires_grad else None
        backward = self.mark()
        if out is not None:
            torch.autograd.backward(out, gradient[0] if last else torch.empty(0, device=out.device))
        done = self.mark()
        if i and x.requires_grad and not sent:
            raise ValueError(
                f"expected stage {i} to send stage {i - 1} a gradient, found none (it detaches its input, or leaves it "
                f"unused); measure the chain from stage {i} on, and run what is before it under torch.no_grad()"
            )
        grads = {s._cdata: s.nbytes() for p in new if p.grad is not None for s in storages_of(p.grad)}
        for parameter in self.parameters:
            parameter.grad = None
        gradient[:] = sent
        return Step(
            begin=begin,
            forward=forward,
            backward=backward,
            look=looks[0] if looks else None,
            done=done,
            gradient_bytes=gradient_bytes,
            grads=sum(grads.values()),
            summed=summed,
            view=out_place == place[0],
            saves_input=place[0] in saved,
            saves_output=out_place in saved,
            saves=len(saved),
            flops=flops_of(counter),
        )

    def _set_aside(self, out: Tensor) -> tuple[list[Tensor], int]:
        """Parameters that out's gradient will reach for the first time, and bytes of those that a later stage reached.

        Gradients that they have come back in the end.
        """
        new, summed, seen, nodes = [], 0, set(), [out.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is None or not leaf.numel():
                continue
            if leaf in self.parameters:
                summed += leaf.nbytes
            else:
                self.parameters.add(leaf)
                self.undo.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None
                new.append(leaf)
        return new, summed


def _timed(layers: list[Callable], stages: list[Stage], x: Tensor) -> list[Stage]:
    """The same stages with seconds for costs."""
    found = []
    for layer, stage in zip(layers, stages, strict=True):

        def forward(layer=layer, x=x) -> Tensor:
            with dropping():
                return layer(x)

        seconds = best_seconds(forward, x.device)
        again = best_seconds(lambda: run_again(layer, x, stage.saves), x.device) if stage.saves else 0.0  # noqa: B023
        found.append(replace(stage, cost=seconds, again_cost=min(again, seconds)))
        out = forward()
        x = out.detach().requires_grad_(out.requires_grad)
    return found


def _buffers(module: Module):
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def _restore(buffers: list[tuple[Module, str, Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer.copy_(before)
