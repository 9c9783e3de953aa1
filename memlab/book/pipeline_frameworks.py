"""PyTorch's pipeline parallelism beside this book's: the same GPT in layers, run by torch.distributed.pipelining.

    def compare(rank):
        return {name: train_piped(name, build, batches, micro_batches=4) for name in ways_to_pipe()}

    results = run_ranks(compare, 2)

A `PipelineStage` is a rank's layers, with their number and how many stages there are; a schedule is a class that runs
it. It learns shapes by itself: in the first step each stage runs one micro-batch more, there and back, and tells its
neighbours what came out. Then it makes room for everything that it will ever receive, and keeps it. It does not divide
the losses by the number of micro-batches, but the gradients, when all are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from memlab.book.parallel_frameworks import Batch, Running, Trained, torch_way
from memlab.book.tensor_frameworks import train_split
from memlab.book.workloads import GPT, cross_entropy, gpt_in_layers, name_in_layers
from memlab.pipeline_parallelism import (
    Pipeline,
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    plan_pipeline,
)
from memlab.pipeline_parallelism.balancing import even_parts
from memlab.ranks import place_in

CHUNKS = 2
"""Stages on each rank of the interleaved schedules."""


class Piped(NamedTuple):
    """What training a model in stages came to, on one rank."""

    trained: Trained
    weights: dict[str, Tensor]
    """The whole model's, by the plain model's names."""
    losses: list[Tensor | None]
    """Of each step, on the last stage's rank; None on the others."""
    sent: dict[str, int]
    """Bytes that this rank sent in the last step, by kind."""
    messages: dict[str, int]
    """How many of each there were in it."""


def ways_to_pipe() -> list[str]:
    """The names that `train_piped` knows, memlab's first."""
    return list(MAKERS)


def train_piped(
    how: str | Callable,
    build: Callable[[], GPT],
    batches: Sequence[Batch],
    *,
    micro_batches: int = 4,
    lr: float = 1e-3,
) -> Piped:
    """Train a GPT in stages, metered. Call it on each rank of a process group, in the same order.

    how: one of `ways_to_pipe()`, or how(model, x, micro_batches), which makes what has a `step(x, y)` and `modules`, as
      `Pipeline` has; x: (batch, tokens), such as all batches will be.
    build: makes the whole model, the same on every rank.
    batches: x and y for each step, the same on every rank.

    Raises KeyError for a way that there is not, RuntimeError where there is no process group.
    """
    make, losses = how if callable(how) else MAKERS[how], []

    @contextmanager
    def noted(model: GPT, lr: float) -> Iterator[Running]:
        pipeline, names = make(model, batches[0][0], micro_batches), list(model.state_dict())
        layers, stages = model.config.layers, nn.ModuleList(pipeline.modules.values())
        del model

        def loss_of(batch: Batch) -> None:
            losses.append(pipeline.step(*batch))  # which has run backward, too

        def weights() -> list[Tensor]:
            mine = {name: weight.cpu() for stage in stages for name, weight in stage.state_dict().items()}
            everyones = [None] * place_in(None)[1]
            distributed.all_gather_object(everyones, mine)
            whole = {name: weight for one in everyones for name, weight in one.items()}
            return [whole[name_in_layers(name, layers)] for name in names]

        with torch_way(stages, stages, torch.optim.AdamW(stages.parameters(), lr=lr)) as running:
            yield running._replace(loss_of=loss_of, backward=lambda _: None, weights=weights)

    split = train_split(noted, build, batches, lr)
    sent = {name: nbytes for name, nbytes in split.sent.items() if nbytes}
    return Piped(split.trained, split.weights, losses, sent, split.collectives)


# ---- ways


class TorchPipeline:
    """This rank's stages of a GPT, run by a schedule of PyTorch's, with the face of memlab's `Pipeline`.

    schedule: the class's name. chunks: stages on each rank. scale_grads: whether it divides gradients by the
    micro-batches.
    """

    def __init__(self, model: GPT, x: Tensor, micro_batches: int, schedule: str, chunks: int = 1, **options):
        from torch.distributed import pipelining  # makes a folder on import

        rank, ranks = place_in(None)
        device, count = model.head.weight.device, ranks * chunks
        parts = even_parts(model.config.layers + 2, count)
        self.modules = {number: own_layers(model, parts[number]) for number in range(rank, count, ranks)}
        stages = [pipelining.PipelineStage(module, number, count, device) for number, module in self.modules.items()]
        self.is_first, self.is_last = stages[0].is_first, stages[-1].is_last
        kind = getattr(pipelining, schedule)
        self.schedule = kind(stages if chunks > 1 else stages[0], micro_batches, loss_fn=cross_entropy, **options)

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Forward and backward of a mini-batch. Returns the mean loss on the last stage's rank, else None."""
        losses = [] if self.is_last else None
        self.schedule.step(
            *([x] if self.is_first else []), target=y if self.is_last else None, losses=losses, return_outputs=False
        )
        return torch.stack(losses).mean().detach() if losses else None


def memlab_pipeline(model: GPT, x: Tensor, micro_batches: int, make: Callable[[int, int], Schedule]) -> Pipeline:
    """This book's own, with a GPT's weights. make: a schedule of so many ranks and micro-batches."""
    config, weight = model.config, model.head.weight
    schedule = make(place_in(None)[1], micro_batches)
    parts = even_parts(config.layers + 2, schedule.stages)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)
    try:
        plan = plan_pipeline(gpt_in_layers(config), schedule, x, parts=parts)
        pipeline = Pipeline(plan, cross_entropy, device=weight.device)
    finally:
        torch.set_default_dtype(usual)
    for stage, module in pipeline.modules.items():
        module.load_state_dict(own_layers(model, parts[stage]).state_dict())
    return pipeline


def own_layers(model: GPT, part: range) -> nn.Sequential:
    """Some of a GPT's layers, with its weights, under their numbers in the list of all."""
    config, state = model.config, model.state_dict()
    weight = state["head.weight"]
    layers, makers = nn.Sequential(), gpt_in_layers(config)
    for number in part:
        layers.add_module(str(number), makers[number]().to(weight.device, weight.dtype))
    renamed = {name_in_layers(name, config.layers): tensor for name, tensor in state.items()}
    layers.load_state_dict({name: tensor for name, tensor in renamed.items() if int(name.split(".")[0]) in part})
    return layers


MEMLAB = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "interleaved": lambda ranks, micro_batches: interleaved(ranks, CHUNKS, micro_batches),
}
TORCH = {"GPipe": ("ScheduleGPipe", 1), "1F1B": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", CHUNKS)}
MAKERS = {
    **{f"memlab, {name}": partial(memlab_pipeline, make=make) for name, make in MEMLAB.items()},
    **{
        f"torch, {name}": partial(TorchPipeline, schedule=schedule, chunks=chunks)
        for name, (schedule, chunks) in TORCH.items()
    },
}
