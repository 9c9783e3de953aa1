"""A small GPT, split over ranks: its losses, and what each rank holds at most and sends.

    python -m memlab.tensor_parallelism --ranks 2 --sequence-parallel
    torchrun --nproc-per-node 2 -m memlab.tensor_parallelism
    python -m memlab.tensor_parallelism --imagined 8

The first launches its ranks, the second is started once for each, on several machines as `memlab.ranks.run_ranks` says;
the third is rank 0 of 8 on imagined hardware, in this process: bytes without values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import distributed

from memlab.memory_timeline import Meter
from memlab.ranks import Traffic
from memlab.ranks.example import Trained, example_device, example_parser, run_example
from memlab.tensor_parallelism import TensorParallelGPT
from memlab.tensor_parallelism.cuts import share

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH = 4, 128, 8, 64, 256, 4


def train(rank: int, sequence_parallel: bool, steps: int) -> Trained:
    """Train on this rank: AdamW, on every rank the same texts, in which each number is three times the one before.

    Needs a process group. Peak bytes are of everything, the building too.
    """
    losses = []
    with Meter() as meter, Traffic() as traffic, torch.device(example_device()):
        torch.manual_seed(0)
        model = TensorParallelGPT(LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, sequence_parallel=sequence_parallel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(steps):
            text = [torch.randint(VOCABULARY, (BATCH, 1))]
            for _ in range(CONTEXT):
                text.append(text[-1] * 3 % VOCABULARY)
            text = torch.cat(text, 1)
            loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        values = [loss.item() for loss in losses] if distributed.get_backend() != "fake" else []
    return Trained(values, meter.timeline.peak_bytes, traffic.sent_bytes, example_device())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says, and print what came of it: once, on rank 0."""
    parser = example_parser("memlab.tensor_parallelism", __doc__.splitlines()[0])
    parser.add_argument("--sequence-parallel", action="store_true", help="between layers, rows of its own on each rank")
    return run_example(parser, train, settings, arguments)


def settings(given: argparse.Namespace, ranks: int) -> tuple[str, tuple[bool]]:
    """The title, and what `train` is told. Raises ValueError for ranks that do not divide the heads."""
    share(HEADS, "heads", ranks)
    title = "tensor and sequence parallel" if given.sequence_parallel else "tensor parallel"
    return title, (given.sequence_parallel,)


if __name__ == "__main__":
    sys.exit(main())
