"""A small GPT in stages: its losses, and what each rank holds at most and sends.

    python -m memlab.pipeline_parallelism --ranks 4 --schedule 1f1b --micro-batches 8
    torchrun --nproc-per-node 4 -m memlab.pipeline_parallelism
    python -m memlab.pipeline_parallelism --imagined 8

The first launches its ranks, the second is started once for each, on several machines as `memlab.ranks.run_ranks` says;
the last is rank 0 of 8 on imagined hardware, in this process: bytes without values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import distributed

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
from memlab.ranks import Traffic
from memlab.ranks.example import Trained, example_device, example_parser, run_example

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH = 6, 128, 8, 64, 256, 16
CHUNKS = 2
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": lambda ranks, micro_batches: interleaved(ranks, CHUNKS, micro_batches),
}


def train(rank: int, schedule: str, micro_batches: int, steps: int) -> Trained:
    """Train on this rank: AdamW, on texts in which each number is three times the one before.

    Needs a process group. Peak bytes are of everything, the building too.
    """
    with Meter() as meter, Traffic() as traffic, torch.device(example_device()):
        layers = gpt_layers(LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY)
        orders = SCHEDULES[schedule](distributed.get_world_size(), micro_batches)
        plan = plan_pipeline(layers, orders, torch.zeros(BATCH, CONTEXT, dtype=torch.int64))
        torch.manual_seed(0)
        pipeline = Pipeline(plan, gpt_loss, device=example_device())
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
        torch.manual_seed(1)
        losses = torch.zeros(steps)
        for step in range(steps):
            text = [torch.randint(VOCABULARY, (BATCH, 1))]
            for _ in range(CONTEXT):
                text.append(text[-1] * 3 % VOCABULARY)
            text = torch.cat(text, 1)
            loss = pipeline.step(text[:, :-1], text[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            if loss is not None:
                losses[step] = loss.detach()
    if distributed.get_backend() == "fake":
        return Trained([], meter.timeline.peak_bytes, traffic.sent_bytes, example_device())
    distributed.all_reduce(losses)  # the last stage's rank knows them
    return Trained(losses.tolist(), meter.timeline.peak_bytes, traffic.sent_bytes, example_device())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says, and print what came of it: once, on rank 0."""
    parser = example_parser("memlab.pipeline_parallelism", __doc__.splitlines()[0])
    about = f"1f1b if none is said; interleaved: {CHUNKS} stages a rank"
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help=about)
    parser.add_argument("--micro-batches", type=int, default=8, help=f"8, of a batch of {BATCH} texts")
    return run_example(parser, train, settings, arguments)


def settings(given: argparse.Namespace, ranks: int) -> tuple[str, tuple[str, int]]:
    """The title, and what `train` is told. Raises ValueError for numbers that do not go together."""
    schedule = SCHEDULES[given.schedule](ranks, given.micro_batches)
    if schedule.stages > LAYERS + 2:
        raise ValueError(f"expected at most {LAYERS + 2} stages, a layer each, found {schedule.stages}")
    if BATCH % given.micro_batches:
        raise ValueError(f"expected --micro-batches that divide {BATCH} texts, found {given.micro_batches}")
    return given.schedule, (given.schedule, given.micro_batches)


if __name__ == "__main__":
    sys.exit(main())
