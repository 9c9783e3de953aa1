"""One step of one rank of an imagined pipeline, metered: what `metered_step` does where a model is cut by its depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from memlab.book.workloads import GPTConfig, cross_entropy, gpt_in_layers
from memlab.checking import balanced, one_of, positive
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import Meter, Timeline
from memlab.pipeline_parallelism import (
    Pipeline,
    gpipe,
    gpt_layers,
    gpt_loss,
    one_forward_one_backward,
    plan_pipeline,
)
from memlab.ranks import imagined_ranks, mesh

SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


@contextmanager
def weights_in(precision: str) -> Iterator[None]:
    """Models are made in a precision's dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if precision in ("bf16", "mixed") else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def refuse_pipeline(model: Transformer, pipeline_ranks: int, pipeline_rank: int, schedule: str, **others: bool) -> None:
    """Raise ValueError for a pipeline that `metered_stage` does not make. others: what else is asked for, by name."""
    positive("pipeline_ranks", pipeline_ranks)
    one_of("schedule", schedule, tuple(SCHEDULES))
    if not 0 <= pipeline_rank < pipeline_ranks:
        raise ValueError(f"expected 0 ≤ pipeline_rank < {pipeline_ranks} (pipeline_ranks), found {pipeline_rank}")
    if pipeline_ranks == 1:
        return
    if pipeline_ranks > model.layers:
        raise ValueError(
            f"expected at most as many pipeline_ranks as layers ({model.layers}), found {pipeline_ranks}; "
            "every stage needs a block"
        )
    if model.family != "gpt" or model.tied or model.hidden != 4 * model.width:
        raise ValueError(
            "expected sizes of the book's GPT, an untied head and hidden = 4 × width, for pipeline_ranks; found "
            f"family={model.family!r}, tied={model.tied}, hidden={model.hidden}"
        )
    for name, asked in others.items():
        if asked:
            raise ValueError(f"expected pipeline_ranks without {name}, found both; take one of them")


def imagined_pipeline(
    model: Transformer, x: Tensor, schedule: str, micro_batches: int, pipeline_ranks: int, tensor_ranks: int, **options
) -> Pipeline:
    """This rank's stage of the book's GPT of these sizes; its blocks are cut as evenly as can be.

    x: (batch, tokens) of int64, all micro-batches. options: `wrap` and `config`, as of Pipeline and GPTConfig.
    """
    sizes = {name: getattr(model, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
    axes, config = mesh(pipeline=pipeline_ranks, tensor=tensor_ranks), options.pop("config")
    if tensor_ranks > 1:
        group = axes.get_group("tensor")
        layers, loss_fn = gpt_layers(**sizes, **config, group=group), functools.partial(gpt_loss, group=group)
    else:
        layers, loss_fn = gpt_in_layers(GPTConfig(**sizes, **config)), cross_entropy
    blocks = [range(a + 1, b + 1) for a, b in balanced(model.layers, pipeline_ranks)]
    parts = [range(blocks[0].stop), *blocks[1:-1], range(blocks[-1].start, len(layers))]
    plan = plan_pipeline(layers, SCHEDULES[schedule](pipeline_ranks, micro_batches), x, parts=parts)
    return Pipeline(plan, loss_fn, group=axes.get_group("pipeline"), device=x.device, **options)


def metered_stage(
    model: Transformer,
    batch: int,
    tokens: int,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    precision: str,
    first_step: bool,
    micro_batches: int,
    pipeline_ranks: int,
    pipeline_rank: int,
    schedule: str,
    tensor_ranks: int,
    wrap: Callable[[nn.Module], nn.Module] | None,
    device: str,
    **config,
) -> Timeline:
    """As `metered_step`, which has the words, for a rank of a pipeline.

    make: an optimizer, of the stage's parameters. wrap: a function of each stage's module. config: as of GPTConfig, or
    with tensor_ranks as of `gpt_layers`.
    """
    with imagined_ranks(pipeline_ranks * tensor_ranks, pipeline_rank * tensor_ranks):
        x, y = (torch.randint(model.vocabulary, (micro_batches * batch, tokens), device=device) for _ in range(2))
        with weights_in(precision):
            pipeline = imagined_pipeline(
                model, x, schedule, micro_batches, pipeline_ranks, tensor_ranks, wrap=wrap, config=config
            )
        x, y = x if pipeline_rank == 0 else None, y if pipeline_rank == pipeline_ranks - 1 else None
        read = [tensor for tensor in (x, y) if tensor is not None]
        network = nn.ModuleList(pipeline.modules.values())
        algorithm = make(network.parameters())
        if not first_step:  # the optimizer has its states from the first step on
            for parameter in network.parameters():
                parameter.grad = torch.zeros_like(parameter)
            algorithm.step()
            algorithm.zero_grad()
        with Meter(network, algorithm, inputs=read) as meter:
            loss = pipeline.step(x, y)
            algorithm.step()
            algorithm.zero_grad()
            del loss
    return meter.timeline
