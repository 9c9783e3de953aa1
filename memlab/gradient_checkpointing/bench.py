"""What the stages of a chain cost, each measured alone on the bench, under the Meter.

The stages are measured from the last to the first, so that each receives the very gradient that the stage after it
sends. Its backward is run twice: with its input held by somebody else, and by nobody else, since then the input's bytes
go before the last gradients come. Running a stage again is measured too, and is less than its forward: recomputation
stops at the last tensor that it saves, and a Linear saves its input before it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Module

from memlab.gradient_checkpointing.batch_norm import statistics_stand_still
from memlab.gradient_checkpointing.chain import Chain, Stage, setting_of
from memlab.gradient_checkpointing.instruments import (
    Sink,
    Step,
    dropping,
    flops_of,
    levels_of,
    replica,
    run_again,
    saving,
    source,
    storage_bytes,
    storage_id,
)
from memlab.memory_hierarchy.counting import OpCounter
from memlab.memory_timeline.meter import Meter
from memlab.memory_timeline.ownership import storages_of


def measure_chain(layers: Sequence[Module], x: Tensor) -> Chain:
    """Run each stage alone, a few times, and note what it costs.

    layers: modules of one tensor to one tensor, in the order in which they run; the last gives the loss (any tensor
      will do: the step measured is `out.backward(torch.ones_like(out))`, the caller holding both).
    x: the chain's input, of the batch size and dtype to be trained with; its values matter as far as work depends on
      them.

    Bytes are those that the Meter sees, work is FLOPs, as `OpCounter` counts them. The step meant begins with gradients
    that are None, and ends before the optimizer. Measuring holds the stages' inputs, all at once, and one stage's tape.
    Afterwards gradients, buffers (so running statistics) and the random state are as they were.

    Not here: stages that are no modules, that share parameters, that return a view of their input or save nothing for
    backward, which are refused; tensors that want gradients and are no parameters, whose gradients are not counted.

    Raises TypeError for what is no module or no tensor. Raises ValueError for no stages, for those above, for a stage
    that returns anything but one tensor, that writes into its input, that sends no gradient to the stages before it, or
    that keeps what a checkpoint cannot drop, and for a chain that needs no backward.   Source: Beaumont et al. 2019,
    section 3 (the model of a chain).
    """
    layers = list(layers)
    _refuse(layers, x)
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng([x.device] if x.is_cuda else []))
        undo.callback(_restore, [(m, n, b, b.clone()) for r in layers for m in r.modules() for n, b in _buffers(m)])
        undo.enter_context(torch.enable_grad())
        for parameter in (p for layer in layers for p in layer.parameters()):
            undo.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        with Meter(layers, inputs=x) as meter:
            start = meter.event_count
            inputs = _inputs(layers, x)
            result = inputs.pop()
            callers = torch.ones_like(result)
            result_bytes = storage_bytes(result) + storage_bytes(callers)
            bench, gradient, stages = _Bench(meter), [callers], []
            del result
            for i in reversed(range(len(layers))):
                stages.append(bench.measure(i, layers[i], inputs[i], gradient, last=i == len(layers) - 1))
            del inputs[1:], gradient, callers
            end = meter.event_count
    held, resident = levels_of(meter.timeline)
    return Chain(tuple(stages[::-1]), resident + held[end] - held[start], result_bytes, setting_of(layers, x))


def _refuse(layers: list[Module], x: Tensor) -> None:
    if not layers:
        raise ValueError("expected a chain of at least one stage, found none")
    if not isinstance(x, Tensor):
        raise TypeError(f"expected x as a tensor, found {type(x).__name__}")
    users: dict[Tensor, int] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer, Module):
            raise TypeError(f"expected stage {i} as an nn.Module, found {type(layer).__name__}; wrap it in one")
        for parameter in layer.parameters():
            if users.setdefault(parameter, i) != i:
                raise ValueError(
                    f"expected stages that share no parameter, found one of shape {tuple(parameter.shape)} in stages "
                    f"{users[parameter]} and {i}; give each stage a copy of its own, or plan the stages between them"
                )


def _inputs(layers: list[Module], x: Tensor) -> list[Tensor]:
    """The input of each stage, and the result of the last, cut from one another."""
    inputs = [x.detach().requires_grad_(x.requires_grad)]
    for i, layer in enumerate(layers):
        given = inputs[-1].clone()
        version = given._version
        with dropping():
            out = layer(given)
        if not isinstance(out, Tensor):
            found = f"{len(out)} values in a {type(out).__name__}" if isinstance(out, (tuple, list)) else repr(out)
            raise ValueError(f"expected stage {i} to return one tensor, found {found}; wrap it in a module that does")
        if given._version != version:
            raise ValueError(
                f"expected stages that leave their input as it is, found stage {i} writing into it, and a checkpoint "
                f"there could not run it again; make it one stage with stage {i - 1}, or not in place"
            )
        if storage_id(out) == storage_id(given):
            raise ValueError(
                f"expected stages that make a tensor of their own, found that stage {i} returns its input or a view of "
                f"it; make it one stage with stage {i - 1 if i else i + 1}"
            )
        inputs.append(out.detach().requires_grad_(out.requires_grad))
    if not out.requires_grad:
        raise ValueError("expected a chain whose result requires a gradient, found one with nothing to learn")
    return inputs


class _Bench:
    """Runs one stage in all the ways of which a plan is made, and marks the meter's events in between."""

    def __init__(self, meter: Meter):
        self.meter = meter

    def mark(self) -> int:
        """A place in the meter's record: now."""
        return self.meter.event_count

    def measure(self, i: int, layer: Module, x: Tensor, gradient: list[Tensor], *, last: bool) -> Stage:
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
        copies = gradient if last else [replica(g) for g in gradient]  # the last one's is the caller's, and held
        own = self._step(i, layer, x, list(copies), last=last, own=bool(i))
        held = self._step(i, layer, x, gradient, last=last, own=False)
        again = self.mark()
        with OpCounter() as counter:
            run_again(layer, source(x, []) if i else x, held.saves)
        levels = levels_of(self.meter.timeline)[0]

        def peak(start: int, end: int) -> int:
            return max(levels[start : end + 1])

        output = levels[ran] - levels[dropped]
        # The caller holds the last output and its gradient from beginning to end; the others die on the way.
        base, own_base = (levels[step.begin] + (output if last else -step.gradient_bytes) for step in (held, own))
        kept = levels[held.backward] - levels[held.begin] - (output if last else 0)
        return Stage(
            output_bytes=output,
            tape_bytes=kept - (output if held.saves_output and not last else 0),
            saves_input=held.saves_input,
            saves_output=held.saves_output,
            gradient_bytes=held.grads,
            forward_bytes=peak(begin, ran) - levels[begin],
            taped_bytes=peak(held.begin, held.forward) - levels[held.begin],
            again_bytes=peak(again, len(levels)) - levels[again],
            backward_bytes=peak(held.backward, held.done) - base,
            waiting_bytes=peak(held.backward, held.look) - base - kept,
            arriving_bytes=levels[held.look] - base - kept,
            working_bytes=peak(held.look, held.done) - base,
            own_backward_bytes=peak(own.backward, own.done) - own_base,
            own_working_bytes=peak(own.look, own.done) - own_base,
            cost=held.flops,
            again_cost=flops_of(counter),
        )

    def _step(self, i: int, layer: Module, x: Tensor, gradient: list[Tensor], *, last: bool, own: bool) -> Step:
        """Forward and backward. own: on a copy of the input that nobody else holds."""
        sent, saved, looks = [], [], []
        gradient_bytes = 0 if last else sum(map(storage_bytes, gradient))
        begin = self.mark()
        given = [source(replica(x).requires_grad_(x.requires_grad) if own else x, sent) if i else x]
        place = storage_id(given[0])
        with OpCounter() as counter, statistics_stand_still() as lasting, saving(saved, looks, self.mark, lasting):
            out = layer(given.pop())
        forward, out_place = self.mark(), storage_id(out)
        if not saved:
            raise ValueError(
                f"expected each stage to save something for backward, found that stage {i} saves nothing; make it one "
                "stage with a neighbour, or leave it out of the chain if nothing before it learns"
            )
        if not last:
            out = Sink.apply(out, gradient)
        backward = self.mark()
        torch.autograd.backward(out, gradient[0] if last else torch.empty(0, device=out.device))
        done = self.mark()
        if i and x.requires_grad and not sent:
            raise ValueError(
                f"expected stage {i} to send stage {i - 1} a gradient, found none (it detaches its input, or leaves it "
                f"unused); measure the chain from stage {i} on, and run what is before it under torch.no_grad()"
            )
        leaves = [*layer.parameters(), *([] if i else [x])]
        grads = {s._cdata: s.nbytes() for leaf in leaves if leaf.grad is not None for s in storages_of(leaf.grad)}
        for leaf in leaves:
            leaf.grad = None
        gradient[:] = sent
        return Step(
            begin=begin,
            forward=forward,
            backward=backward,
            look=looks[0],
            done=done,
            gradient_bytes=gradient_bytes,
            grads=sum(grads.values()),
            saves_input=place in saved,
            saves_output=out_place in saved,
            saves=len(saved),
            flops=flops_of(counter),
        )


def _buffers(module: Module):
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def _restore(buffers: list[tuple[Module, str, Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer.copy_(before)
