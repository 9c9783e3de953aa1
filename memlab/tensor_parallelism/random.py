"""Dropout's random numbers: the same on all ranks where they hold the same, different where each holds a part.

The ranks' generators begin equal (torch.manual_seed with one seed) and stay equal, as long as every rank draws the same
from them. Where ranks must differ, each forks: it draws one seed from the common generator, which keeps that in step,
and adds its rank. Nothing is remembered between two forks, so a checkpoint that restores PyTorch's own generators, as
every checkpoint does, makes the same numbers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from memlab.ranks import place_in


@contextlib.contextmanager
def different_on_ranks(group=None, enabled: bool = True) -> Iterator[None]:
    """Within the block PyTorch's random numbers differ between ranks; afterwards they are in step again."""
    rank, ranks = place_in(group)
    if not enabled or ranks == 1:
        yield
        return
    seed = int(torch.randint(2**62, ())) + rank
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
