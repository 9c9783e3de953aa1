"""One metered training step of a model that is given by its sizes alone: what a prediction is held against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from memlab.book.pipeline_steps import metered_stage, refuse_pipeline, weights_in
from memlab.book.workloads import GPT, Block, GPTConfig, Llama, LlamaBlock, LlamaConfig
from memlab.checking import balanced, one_of, positive, true_or_false
from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard
from memlab.gradient_accumulation import accumulate
from memlab.gradient_checkpointing import checkpoint
from memlab.memory_arithmetic import Transformer
from memlab.memory_arithmetic.optimizers import chunk_limit
from memlab.memory_arithmetic.step import PRECISIONS, refuse_dropout, refuse_offload, refuse_sizes
from memlab.memory_hierarchy import OpCounter
from memlab.memory_timeline import Meter, Timeline, in_main_memory
from memlab.mixed_precision import MasterWeights
from memlab.offloading import OffloadedOptimizer
from memlab.ranks import imagined_ranks
from memlab.tensor_parallelism import TensorParallelBlock, TensorParallelGPT

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {}),
}
IMPLEMENTATIONS = {None: {}, "for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def made(
    parameters,
    optimizer: str,
    implementation: str | None,
    precision: str,
    chunk_bytes: int | str | None = "auto",
    offload: str | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of that name, on the host if it is offloaded, around master weights if the precision is "mixed"."""
    kind, options = OPTIMIZERS[optimizer]
    options = options | IMPLEMENTATIONS[implementation]
    if offload is not None:
        return OffloadedOptimizer(parameters, kind, gradients="gradients" in offload, **options)
    if precision == "mixed":
        return MasterWeights(parameters, kind, chunk_bytes=chunk_bytes, **options)
    return kind(parameters, **options)


def build(model: Transformer, **options) -> GPT | Llama:
    """The book's own model of these sizes. options: attention and dropout, for the GPT family."""
    sizes = {name: getattr(model, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
    if model.family == "llama":
        return Llama(LlamaConfig(**sizes, kv_heads=model.kv_heads, hidden=model.hidden))
    if model.tied or model.hidden != 4 * model.width:
        raise ValueError(
            "expected sizes of the book's GPT: an untied head and hidden = 4 × width; found "
            f"tied={model.tied}, hidden={model.hidden}; use dataclasses.replace(model, tied=False)"
        )
    return GPT(GPTConfig(**sizes, **options))


def build_part(model: Transformer, **options) -> TensorParallelGPT:
    """This rank's part of the book's GPT of these sizes. options: as of `TensorParallelGPT`."""
    if model.family != "gpt" or model.tied:
        raise ValueError(
            "expected sizes of family 'gpt' with an untied head; found "
            f"family={model.family!r}, tied={model.tied}; take a model of such sizes"
        )
    sizes = ("layers", "width", "heads", "context", "vocabulary", "hidden")
    return TensorParallelGPT(**{name: getattr(model, name) for name in sizes}, **options)


class Segment(nn.Module):
    """Blocks in one checkpoint. stream: (batch, tokens, width) → the same; tables: what every block is given beside."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def _run(self, stream: Tensor, *tables: Tensor | int) -> Tensor:
        for block in self.blocks:
            stream = block(stream, *tables)
        return stream

    def forward(self, stream: Tensor, *tables: Tensor | int) -> Tensor:
        return checkpoint(self._run, stream, *tables)


def checkpoint_blocks(network: GPT | Llama | TensorParallelGPT, segments: int) -> None:
    """Put so many Segments in place of the model's blocks. Its parameters and their order stay, their names change."""
    blocks = list(network.blocks)
    network.blocks = nn.ModuleList(Segment(blocks[a:b]) for a, b in balanced(len(blocks), segments))


def checkpoint_stage(stage: nn.Sequential, segments: int) -> nn.Sequential:
    """The layers of a pipeline's stage with so many Segments in place of its blocks."""
    layers = list(stage)
    inside = [isinstance(layer, (Block, TensorParallelBlock)) for layer in layers]
    first, count = inside.index(True), sum(inside)
    cut = [Segment(layers[first + a : first + b]) for a, b in balanced(count, segments)]
    return nn.Sequential(*layers[:first], *cut, *layers[first + count :])


def shared_out(
    network: nn.Module,
    stage: int,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    bucket_bytes: int | str = "25 MiB",
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A rank's share of the model and its optimizer. network: a GPT or Llama, whose blocks are the units of stage 3.

    stage: 0 (data parallel: the whole of both), 1 (a part of the states), 2 (and of the gradients), 3 (and of the
    weights). optimizer: makes it, of the parameters that it is to step. bucket_bytes: of stages 0 to 2.
    """
    if stage in (1, 2):
        return network, ZeroOptimizer(network.parameters(), optimizer, stage, bucket_bytes=bucket_bytes)
    if stage == 3:
        for block in [module for module in network.modules() if isinstance(module, (Block, LlamaBlock))]:
            fully_shard(block)
        fully_shard(network)
    else:
        network = DataParallel(network, bucket_bytes)
    return network, optimizer(network.parameters())


def metered_step(
    model: Transformer,
    batch: int,
    tokens: int,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
    implementation: str | None = None,
    first_step: bool = False,
    chunk_bytes: int | str | None = "auto",
    micro_batches: int = 1,
    segments: int | None = None,
    offload: str | None = None,
    ranks: int = 1,
    stage: int = 0,
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
    pipeline_ranks: int = 1,
    pipeline_rank: int = 0,
    schedule: str = "1F1B",
    device: str = "cpu",
    **options,
) -> Timeline:
    """Build the model, train it, and meter its second step (or its first). Inside `imagine`, on imagined hardware.

    The same words as `training_step`, which predicts it, and refused as there: ValueError for a word that is none of
    them and for a number below 1, TypeError for one of another type. Every micro-batch has x and y of its own, and all
    are held from the start.

    segments: into how many equal segments the blocks are cut, each in a `checkpoint`; None, nothing is checkpointed.
    offload: "states" or "states and gradients" of an `OffloadedOptimizer`, on a GPU or an imagined card.
    ranks: this is rank 0 of so many, all imagined, and each has a batch of its own. stage: ZeRO's, as in `shared_out`.
    tensor_ranks: this is rank 0 of so many, all imagined, each with its part of a `TensorParallelGPT`, and they share
    one batch. sequence_parallel and options, such as keep_gathered: of it. ValueError for both kinds of ranks.
    pipeline_ranks: this is rank pipeline_rank of so many, all imagined, each with a stage: its blocks, the first with
    the embeddings, the last with the head. segments are then of a stage's blocks. schedule: "GPipe" or "1F1B" of the
    micro-batches. With tensor_ranks each stage is split. ValueError with ranks, sequence_parallel, offload or autocast.
    """
    refuse_sizes(model, batch, tokens)
    one_of("precision", precision, PRECISIONS)
    one_of("optimizer", optimizer, tuple(OPTIMIZERS))
    one_of("implementation", implementation, tuple(IMPLEMENTATIONS))
    true_or_false("first_step", first_step)
    refuse_dropout(options.get("dropout", 0.0))
    chunk_limit(chunk_bytes, "cpu")
    for name, value in {"micro_batches": micro_batches, "ranks": ranks, "tensor_ranks": tensor_ranks}.items():
        positive(name, value)
    one_of("stage", stage, (0, 1, 2, 3))
    if ranks > 1 and tensor_ranks > 1:
        raise ValueError(f"expected ranks or tensor_ranks, found both: {ranks} and {tensor_ranks}")
    if sequence_parallel and tensor_ranks == 1:
        raise ValueError("expected tensor_ranks above 1 for sequence_parallel, found 1; one rank has all rows anyway")
    others = {"ranks": ranks > 1, "sequence_parallel": sequence_parallel, "offload": offload is not None}
    refuse_pipeline(model, pipeline_ranks, pipeline_rank, schedule, **others, autocast=precision == "autocast")
    make = functools.partial(
        made,
        optimizer=optimizer,
        implementation=implementation,
        precision=precision,
        chunk_bytes=chunk_bytes,
        offload=offload,
    )
    if pipeline_ranks > 1:
        words = {"precision": precision, "first_step": first_step, "micro_batches": micro_batches, "schedule": schedule}
        place = {"pipeline_ranks": pipeline_ranks, "pipeline_rank": pipeline_rank, "tensor_ranks": tensor_ranks}
        wrap = None if segments is None else functools.partial(checkpoint_stage, segments=segments)
        return metered_stage(model, batch, tokens, make, wrap=wrap, device=device, **words, **place, **options)
    with imagined_ranks(max(ranks, tensor_ranks)) if max(ranks, tensor_ranks) > 1 else nullcontext():
        with weights_in(precision):
            if tensor_ranks > 1:
                network = build_part(model, sequence_parallel=sequence_parallel, device=device, **options)
            else:
                network = build(model, **options).to(device)
            if segments is not None:
                checkpoint_blocks(network, segments)
        refuse_offload(offload, precision, "cpu" if in_main_memory(next(network.parameters())) else "gpu")
        if ranks > 1:
            network, algorithm = shared_out(network, stage, make)
        else:
            algorithm = make(network.parameters())
        group = [
            tuple(torch.randint(model.vocabulary, (batch, tokens), device=device) for _ in range(2))
            for _ in range(micro_batches)
        ]

        def loss_of(micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=precision == "autocast"):
                return network(*micro_batch)

        for part in [group] if first_step else [group[:1], group]:  # the first makes the optimizer's states
            with Meter(network, algorithm, inputs=part) as meter:
                if len(part) == 1:
                    loss = loss_of(part[0])
                    loss.backward()
                else:
                    loss = accumulate(loss_of, part, reduction="mean")
                algorithm.step()
                algorithm.zero_grad()
                del loss
    return meter.timeline


def peaks_and_flops(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Of `model(*batch).backward()`: its peaks when it makes the gradients and when it finds them there, and its FLOPs.

    Bytes of storages. The model is left with gradients.
    """
    model.zero_grad()
    peaks = []
    for _ in ("makes them", "finds them"):
        with Meter(model, inputs=batch) as meter:
            loss = model(*batch)
            loss.backward()
        peaks.append(meter.timeline.peak_bytes)
    with OpCounter() as counter:
        model(*batch).backward()
    return peaks, sum(op.flops for op in counter.ops)
