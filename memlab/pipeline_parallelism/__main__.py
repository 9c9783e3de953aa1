"""A small GPT in stages: its losses, and what each rank holds at most and sends.

    python -m memlab.pipeline_parallelism --ranks 4 --schedule 1f1b --micro-batches 8
    python -m memlab.pipeline_parallelism --ranks 8 --data 2 --tensor 2
    torchrun --nproc-per-node 4 -m memlab.pipeline_parallelism
    python -m memlab.pipeline_parallelism --imagined 8

The first two launch their ranks, the third is started once for each, on several machines as `memlab.ranks.run_ranks`
says; the last is rank 0 of 8 on imagined hardware, in this process: bytes without values.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import torch
from torch import distributed

from memlab.data_parallelism import DataParallel
from memlab.memory_timeline import Meter
from memlab.pipeline_parallelism import (
    Pipeline,
    gpipe,
    gpt_layers,
    gpt_loss,
    interleaved,
    one_forward_one_backward,
    plan_pipeline,
)
from memlab.ranks import Traffic, mesh
from memlab.ranks.example import Trained, example_device, example_parser, run_example
from memlab.tensor_parallelism.cuts import share

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH = 6, 128, 8, 64, 256, 16
CHUNKS = 2
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": lambda ranks, micro_batches: interleaved(ranks, CHUNKS, micro_batches),
}


def train(
    rank: int,
    schedule: str,
    micro_batches: int,
    data: int,
    tensor: int,
    sequence_parallel: bool,
    tied: bool,
    steps: int,
) -> Trained:
    """Train on this rank: AdamW, on texts in which each number is three times the one before.

    Needs a process group. Peak bytes are of everything, the building too.
    """
    with Meter() as meter, Traffic() as traffic, torch.device(example_device()):
        axes = mesh(data=data, pipeline=-1, tensor=tensor)
        group = axes.get_group("pipeline")
        split = {"group": axes.get_group("tensor") if tensor > 1 else None}
        layers = gpt_layers(LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, sequence_parallel=sequence_parallel, **split)
        rows = BATCH // data
        plan = plan_pipeline(
            layers,
            SCHEDULES[schedule](distributed.get_world_size(group), micro_batches),
            torch.zeros(rows, CONTEXT, dtype=torch.int64),
            tied=[("0.token_embedding.weight", f"{LAYERS + 1}.head.weight")] if tied else [],
        )
        torch.manual_seed(0)
        wrap = functools.partial(DataParallel, group=axes.get_group("data")) if data > 1 else None
        loss_fn = functools.partial(gpt_loss, **split)
        pipeline = Pipeline(plan, loss_fn, group=group, wrap=wrap, device=example_device())
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        torch.manual_seed(1)
        first = axes.get_local_rank("data") * rows
        losses = torch.zeros(steps)
        for step in range(steps):
            text = [torch.randint(VOCABULARY, (BATCH, 1))]
            for _ in range(CONTEXT):
                text.append(text[-1] * 3 % VOCABULARY)
            text = torch.cat(text, 1)[first : first + rows]
            loss = pipeline.step(text[:, :-1], text[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            if loss is not None:
                losses[step] = loss.detach() / (data * tensor)
    if distributed.get_backend() == "fake":
        return Trained([], meter.timeline.peak_bytes, traffic.sent_bytes, example_device())
    distributed.all_reduce(losses)  # the last stage's ranks know them
    return Trained(losses.tolist(), meter.timeline.peak_bytes, traffic.sent_bytes, example_device())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says, and print what came of it: once, on rank 0."""
    parser = example_parser("memlab.pipeline_parallelism", __doc__.splitlines()[0])
    about = f"1f1b if none is said; interleaved: {CHUNKS} stages a rank"
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help=about)
    parser.add_argument("--micro-batches", type=int, default=8, help="8, of each data rank's share of the batch")
    parser.add_argument("--data", type=int, default=1, help="1 rank along the data axis, or more")
    parser.add_argument("--tensor", type=int, default=1, help="1 rank along the tensor axis, or more")
    parser.add_argument("--sequence-parallel", action="store_true", help="between layers, rows of its own on each rank")
    parser.add_argument(
        "--tied",
        action="store_true",
        help="one table for tokens and head; its N(0, 1) makes a head's first losses large",
    )
    return run_example(parser, train, settings, arguments)


def settings(given: argparse.Namespace, ranks: int) -> tuple[str, tuple]:
    """The title, and what `train` is told. Raises ValueError for numbers that do not go together."""
    for name in ("micro_batches", "data", "tensor"):
        if getattr(given, name) < 1:
            raise ValueError(f"expected at least 1 as --{name.replace('_', '-')}, found {getattr(given, name)}")
    if ranks % (given.data * given.tensor):
        raise ValueError(
            f"{ranks} ranks cannot be {given.data} (data) times {given.tensor} (tensor) times stages; take a "
            f"multiple of {given.data * given.tensor}"
        )
    deep = ranks // (given.data * given.tensor)
    stages = deep * CHUNKS if given.schedule == "interleaved" else deep
    if given.schedule == "interleaved" and given.micro_batches % deep:
        raise ValueError(f"expected --micro-batches that {deep} ranks divide, found {given.micro_batches}")
    if stages > LAYERS + 2:
        raise ValueError(f"expected at most {LAYERS + 2} stages, a layer each, found {stages}")
    if BATCH % (given.data * given.micro_batches):
        raise ValueError(
            f"a batch of {BATCH} cannot be shared by {given.data} data ranks in {given.micro_batches} micro-batches "
            f"each; pick numbers whose product divides {BATCH}"
        )
    share(HEADS, "heads", given.tensor)
    title = f"{given.schedule}, {given.data} x {deep} x {given.tensor} (data x pipeline x tensor)"
    return title, (given.schedule, given.micro_batches, given.data, given.tensor, given.sequence_parallel, given.tied)


if __name__ == "__main__":
    sys.exit(main())
