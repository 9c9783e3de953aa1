"""One command line for the packages' own examples: ranks of its own, torchrun's, or imagined ones.

python -m PACKAGE --ranks 4
torchrun --nproc-per-node 4 -m PACKAGE
python -m PACKAGE --imagined 64
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from memlab.memory_timeline import imagine
from memlab.ranks.imagined import imagined_ranks
from memlab.ranks.launch import run_ranks
from memlab.ranks.torchrun import under_torchrun
from memlab.units import format_bytes

CARD = "H100-80GB"


@dataclass
class Trained:
    """A rank's results. losses: of each step, the mean over ranks; none where there are no values."""

    losses: list[float]
    peak_bytes: int
    sent_bytes: int
    device: str


def example_parser(package: str, description: str) -> argparse.ArgumentParser:
    """A parser of what every example understands: --ranks, --steps, --imagined."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=description)
    parser.add_argument("--steps", type=int, default=3, help="3, if nothing is said")
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--ranks", type=int, help="2, and under torchrun as many as it started")
    ranks.add_argument("--imagined", type=int, metavar="N", help="be rank 0 of N, on imagined hardware")
    return parser


def example_device() -> str:
    """Where this rank's tensors belong: its GPU, if the process group is NCCL's."""
    nccl = "nccl" in str(distributed.get_backend_config())
    return f"cuda:{torch.cuda.current_device()}" if nccl else "cpu"


def run_example(
    parser: argparse.ArgumentParser,
    train: Callable[..., Trained],
    settings: Callable[[argparse.Namespace, int], tuple[str, tuple[Any, ...]]],
    arguments: Sequence[str] | None,
) -> int:
    """Call train(rank, *settings, steps) on every rank as the command line says; print what came of it, on rank 0.

    settings: from what was parsed and the number of ranks to the example's title and its settings; its ValueError is
    the parser's. Returns 0; bad numbers end the program with the parser's error.
    """
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"expected at least one step, found {given.steps}")
    launched = under_torchrun()
    wanted = given.imagined if given.imagined is not None else given.ranks
    ranks = (int(os.environ["WORLD_SIZE"]) if launched else 2) if wanted is None else wanted
    if ranks < 1:
        parser.error(f"expected at least one rank, found {ranks}")
    try:
        title, chosen = settings(given, ranks)
    except ValueError as error:
        parser.error(str(error))
    if given.imagined is not None:
        with imagine(CARD), imagined_ranks(ranks):
            results = [train(0, *chosen, given.steps)]
    else:
        results = run_ranks(train, ranks, *chosen, given.steps)
    if not launched or os.environ["RANK"] == "0":
        on = "the CPU" if results[0].device == "cpu" else results[0].device
        on = "imagined hardware" if given.imagined is not None else on
        print(report(f"{title}, {ranks} rank{'s' * (ranks > 1)} on {on}", results))
    return 0


def report(title: str, results: Sequence[Trained]) -> str:
    """The losses, and one line for each rank's bytes."""
    losses = "  ".join(f"{loss:.6f}" for loss in results[0].losses) or "no values on imagined hardware"
    lines = [title, f"loss    {losses}"]
    for rank, of in enumerate(results):
        lines.append(f"rank {rank}  peak {format_bytes(of.peak_bytes):>9}   sent {format_bytes(of.sent_bytes):>9}")
    return "\n".join(lines)
