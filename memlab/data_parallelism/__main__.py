"""The four techniques on a small model of their own: what each rank loses, holds at most, and sends.

    python -m memlab.data_parallelism --technique zero2 --ranks 4
    torchrun --nproc-per-node 4 -m memlab.data_parallelism --technique zero2
    python -m memlab.data_parallelism --technique zero3 --imagined 64

The first launches its ranks, the second is started once for each, on several machines as `memlab.ranks.run_ranks` says;
the third is rank 0 of 64 on imagined hardware, in this process: bytes without values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn

from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard, mean_over_ranks
from memlab.memory_timeline import Meter
from memlab.ranks import Traffic
from memlab.ranks.example import Trained, example_device, example_parser, run_example

TECHNIQUES = ("data-parallel", "zero1", "zero2", "zero3")
ROWS, WIDTH, DEPTH = 32, 256, 8


class Block(nn.Module):
    """A residual pair of linear layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: (rows, WIDTH) → (rows, WIDTH)."""
        return x + self.down(torch.relu(self.up(x)))


def train(rank: int, technique: str, steps: int) -> Trained:
    """Train on this rank: AdamW, ROWS rows of its own each step. Needs a process group.

    Peak bytes are of everything, the building too; sent bytes of the steps, without what makes the ranks start equal.
    """
    losses = []
    with Meter() as meter, torch.device(example_device()):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
        if technique == "zero3":
            for block in model:
                fully_shard(block)
            fully_shard(model)
        wrapped = DataParallel(model, "2 MiB") if technique == "data-parallel" else model
        if technique in ("zero1", "zero2"):
            stage = int(technique[-1])
            optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage, bucket_bytes="2 MiB", lr=1e-4)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(1 + rank)
        with Traffic() as traffic:
            for _ in range(steps):
                x = torch.randn(ROWS, WIDTH)
                loss = (wrapped(x) - x.roll(1, dims=1)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        values = [mean_over_ranks(loss).item() for loss in losses] if distributed.get_backend() != "fake" else []
    return Trained(values, meter.timeline.peak_bytes, traffic.sent_bytes, example_device())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says, and print what came of it: once, on rank 0."""
    parser = example_parser("memlab.data_parallelism", __doc__.splitlines()[0])
    parser.add_argument("--technique", choices=TECHNIQUES, default="data-parallel")
    return run_example(parser, train, lambda given, ranks: (given.technique, (given.technique,)), arguments)


if __name__ == "__main__":
    sys.exit(main())
