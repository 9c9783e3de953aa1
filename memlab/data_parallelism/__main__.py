"""The four techniques on a small model of their own: what each rank loses, holds at most, and sends.

    python -m memlab.data_parallelism --technique zero2 --ranks 4
    torchrun --nproc-per-node 4 -m memlab.data_parallelism --technique zero2
    python -m memlab.data_parallelism --technique zero3 --imagined 64

The first launches its ranks, the second is started once for each, on several machines as `memlab.ranks.run_ranks` says;
the third is rank 0 of 64 on imagined hardware, in this process: bytes without values.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard, mean_over_ranks
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks, run_ranks
from memlab.ranks.torchrun import under_torchrun
from memlab.units import format_bytes

TECHNIQUES = ("data-parallel", "zero1", "zero2", "zero3")
CARD, ROWS, WIDTH, DEPTH = "H100-80GB", 32, 256, 8


@dataclass
class Trained:
    """What a rank came to. losses: of each step, the mean over ranks; none where there are no values."""

    losses: list[float]
    peak_bytes: int
    sent_bytes: int


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
    backends, counts_values = str(distributed.get_backend_config()), distributed.get_backend() != "fake"
    device = f"cuda:{torch.cuda.current_device()}" if "nccl" in backends else "cpu"
    losses = []
    with Meter() as meter, torch.device(device):
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
        values = [mean_over_ranks(loss).item() for loss in losses] if counts_values else []
    return Trained(values, meter.timeline.peak_bytes, traffic.sent_bytes)


def report(technique: str, results: Sequence[Trained], ranks: int) -> str:
    """One line for each rank's bytes, and the losses."""
    losses = "  ".join(f"{loss:.6f}" for loss in results[0].losses) or "no values on imagined hardware"
    lines = [f"{technique}, {ranks} ranks\nloss    {losses}"]
    for rank, of in enumerate(results):
        lines.append(f"rank {rank}  peak {format_bytes(of.peak_bytes):>9}   sent {format_bytes(of.sent_bytes):>9}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says, and print what came of it: once, on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m memlab.data_parallelism", description=__doc__.splitlines()[0])
    parser.add_argument("--technique", choices=TECHNIQUES, default="data-parallel")
    parser.add_argument("--ranks", type=int, help="2, and under torchrun as many as it started")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--imagined", type=int, metavar="N", help="be rank 0 of N, on imagined hardware")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"expected at least one step, found {given.steps}")
    launched = under_torchrun()
    wanted = given.imagined if given.imagined is not None else given.ranks
    ranks = (int(os.environ["WORLD_SIZE"]) if launched else 2) if wanted is None else wanted
    if ranks < 1:
        parser.error(f"expected at least one rank, found {ranks}")
    if given.imagined is not None:
        with imagine(CARD), imagined_ranks(ranks):
            results = [train(0, given.technique, given.steps)]
    else:
        results = run_ranks(train, ranks, given.technique, given.steps)
    if not launched or os.environ["RANK"] == "0":
        print(report(given.technique, results, ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
