"""What a stage costs, measured: one micro-batch forward and backward on each stage, in one process, under the meter.

A schedule only repeats this in another order. So one micro-batch is enough to know what every schedule holds and how
long it takes (`simulate`), and one measurement of each layer, to know where to cut (`balance`).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from memlab.memory_timeline import Meter, Timeline
from memlab.pipeline_parallelism.imagined_layers import Layer, make_layer
from memlab.pipeline_parallelism.line import StageCost
from memlab.pipeline_parallelism.orders import gpipe
from memlab.pipeline_parallelism.plan import PipelinePlan, plan_pipeline, split_batch
from memlab.pipeline_parallelism.schedule import Schedule
from memlab.pipeline_parallelism.stage import StageRun
from memlab.pipeline_parallelism.tied import put_in_place

FLOPS_PER_SECOND = 400e12
"""What an H100 commonly reaches in 16 bits, of 989 TFLOP/s: the clock of imagined tensors, which take no time."""

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def measure_stages(
    plan: PipelinePlan,
    x: Tensor,
    y: Tensor,
    loss_fn: Callable[..., Tensor],
    *,
    optimizer: Optimizer | None = None,
    checkpointed: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    repeats: int = 3,
    flops_per_second: float = FLOPS_PER_SECOND,
) -> list[StageCost]:
    """Run the first micro-batch through all stages, one stage after the other, and return what each costs.

    x, y: a mini-batch as of `Pipeline.step`. Its bytes are the caller's and count nowhere. loss_fn, checkpointed,
      wrap: as of `Pipeline`; layers given as modules are copied, and PyTorch's random state is not used up.
    optimizer: a function that makes one, such as torch.optim.AdamW; its states then count as static, after one step.
    repeats: how often a stage is timed, beside the one run that is metered; the medians count. Imagined tensors take
      no time: there it is the FLOPs over flops_per_second, without what only moves bytes.

    The line is that of the second step and all later ones: gradients are there, and are added to. Under autocast
    the casts of weights, which it keeps, are static as well. If layers talk in a group, all its ranks call this.

    Each stage is measured by itself. What is tied to another stage counts here and there, also if one rank has both and
    holds it once; and the sum of its gradients at the end of a step, with its room for the others', is in no cost.
    """
    stream = (split_batch(x, plan.schedule.micro_batches)[0],)
    target = split_batch(y, plan.schedule.micro_batches)[0]
    shares = plan.schedule.micro_batches
    costs = []
    for stage in range(len(plan.parts)):
        with torch.random.fork_rng(devices=[stream[0].device] if stream[0].is_cuda else []):
            module = _stage_module(plan, stage).to(stream[0].device)
            module = wrap(module) if wrap else module
            last = stage == len(plan.parts) - 1
            loss = (lambda out: loss_fn(out, target).reshape(()) / shares) if last else None
            bench = _Bench(StageRun(module, checkpointed, stage=stage), plan, stage, stream, loss)
            line = bench.line(optimizer, (x, y, stream))
            seconds = bench.seconds(repeats, flops_per_second)
        costs.append(StageCost(**line, **seconds))
        stream = bench.outputs
    return costs


def measure_layers(
    layers: Sequence[Layer], x: Tensor, y: Tensor, loss_fn: Callable[..., Tensor], **options
) -> list[StageCost]:
    """What each single layer costs, as a stage of its own: what `balance` asks for.

    x, y: one micro-batch. options: as of `measure_stages`. saved_bytes of a stage are the sum of its layers', but for
    outputs that are saved by the layer that made them and by the next one, too: they count twice here.
    """
    return measure_stages(plan_pipeline(layers, gpipe(len(layers), 1), x), x, y, loss_fn, **options)


def bytes_on_stages(layers: Sequence[StageCost], schedule: Schedule) -> Callable[[int, int], int]:
    """Costs by bytes, for `balance`: a layer's static bytes, and what it saves, for each micro-batch in flight there.

    balance(bytes_on_stages(measure_layers(...), schedule), schedule.stages, len(layers))
    """
    most = [schedule.most_in_flight([stage]) for stage in range(schedule.stages)]
    return lambda layer, stage: layers[layer].static_bytes + most[stage] * layers[layer].saved_bytes


class _Bench:
    """One stage and one micro-batch, again and again, with references held and dropped as `Pipeline` does."""

    def __init__(self, run: StageRun, plan: PipelinePlan, stage: int, stream: tuple[Tensor, ...], loss):
        self.run, self.stream, self.loss = run, stream, loss
        self.arriving = plan.wires[stage - 1] if stage else ()
        self.leaving = [wire for wire in plan.wires[stage] if wire.gradient] if stage < len(plan.wires) else None
        self.quiet = getattr(run.module, "no_sync", nullcontext)
        self.outputs: tuple[Tensor, ...] = ()

    def receive(self) -> tuple[Tensor, ...]:
        """The stage's input: of the first stage the caller's own, else a tensor that has just arrived."""
        if not self.arriving:
            return self.stream
        return tuple(torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t) for t in self.stream)

    def forward(self, received: list) -> tuple[Tensor, ...]:
        inputs = received.pop()
        for tensor, wire in zip(inputs, self.arriving, strict=False):
            tensor.requires_grad_(wire.gradient)
        return self.run.forward(0, inputs, self.loss)

    def gradients(self) -> list[Tensor | None]:
        """Of the outputs, as they arrive."""
        if self.leaving is None:
            return [None]
        return [torch.ones(wire.shape, dtype=wire.dtype, device=self.stream[0].device) for wire in self.leaving]

    def backward(self, received: list) -> tuple[Tensor, ...]:
        gradients = received.pop()
        with self.quiet(), torch.autocast(self.stream[0].device.type, enabled=False):
            return self.run.backward(0, gradients)

    def line(self, optimizer: Optimizer | None, theirs) -> dict[str, int]:
        """The bytes of a StageCost."""
        marks: list[int] = []
        with Meter(self.run.module, inputs=theirs) as meter:
            self.outputs = self.forward([self.receive()])
            self.backward([self.gradients()])
            trained = [p for p in self.run.module.parameters() if p.requires_grad]
            stepping = optimizer(trained) if optimizer is not None and trained else None
            if stepping is not None:
                stepping.step()
            self.once(lambda: marks.append(meter.event_count))
        card = _on_card(meter)
        marks, totals = [card.event_of(mark) for mark in marks], card.totals
        start, arrived, made, saved, told, through, end = (totals[event] for event in marks)
        peak = lambda begin, stop: max(totals[marks[begin] : marks[stop] + 1]) - totals[marks[begin]]  # noqa: E731
        return {
            "static_bytes": start - _bytes_of(theirs, self.outputs),
            "input_bytes": arrived - start,
            "saved_bytes": saved - start,
            "output_bytes": made - saved,
            "gradient_bytes": through - end,
            "received_gradient_bytes": sum(wire.nbytes for wire in self.arriving if wire.gradient),
            "forward_extra_bytes": peak(1, 2),
            "backward_extra_bytes": peak(4, 5),
        }

    def once(self, mark: Callable[[], None]) -> None:
        """One micro-batch, with a mark wherever the line is read."""
        mark()
        received = [self.receive()]
        mark()
        made = self.forward(received)
        mark()
        del made
        mark()
        received = [self.gradients()]
        mark()
        made = self.backward(received)
        mark()
        del made
        mark()

    def seconds(self, repeats: int, flops_per_second: float) -> dict[str, float]:
        """The seconds of a StageCost."""
        if isinstance(self.stream[0], FakeTensor):
            with FlopCounterMode(display=False) as counter:
                self.forward([self.receive()])
                forward = counter.get_total_flops()
                self.backward([self.gradients()])
            whole = counter.get_total_flops()
            return {
                "forward_seconds": forward / flops_per_second,
                "backward_seconds": (whole - forward) / flops_per_second,
            }
        times: list[tuple[float, float]] = []
        for _ in range(repeats):
            received = [self.receive()]
            begun = self.now()
            made = self.forward(received)
            through = self.now()
            del made
            received = [self.gradients()]
            again = self.now()
            self.backward(received)
            times.append((through - begun, self.now() - again))
        forward, backward = (statistics.median(each) for each in zip(*times, strict=True))
        return {"forward_seconds": forward, "backward_seconds": backward}

    def now(self) -> float:
        if self.stream[0].is_cuda:
            torch.cuda.synchronize(self.stream[0].device)
        return time.perf_counter()


def _stage_module(plan: PipelinePlan, stage: int) -> nn.Module:
    """A stage's layers, made or copied, with what is tied among them."""
    module = nn.Sequential()
    for number in plan.parts[stage]:
        layer = plan.layers[number]
        module.add_module(str(number), copy.deepcopy(layer) if isinstance(layer, nn.Module) else make_layer(layer))
    module.zero_grad()
    for names in plan.tied:
        first, *others = [name for name in names if plan.stage_of(name) == stage] or [None]
        for name in others:
            put_in_place(module.get_parameter(name), module.get_parameter(first), module)
    return module


def _on_card(meter: Meter) -> Timeline:
    """The timeline of the GPU, real or imagined, if there is one; what lies in main memory beside it is left out."""
    timeline = meter.timeline
    return timeline.on(next((device for device in timeline.devices if device != "cpu"), "cpu"))


def _bytes_of(*tensors) -> int:
    """Of all storages together."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in torch.utils._pytree.tree_leaves(tensors)
    }
    return sum(storages.values())
