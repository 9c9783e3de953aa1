"""DataParallel: gradients that somebody keeps, models that are wrapped again, and what is refused at once."""

from __future__ import annotations

import torch
from torch import nn

from memlab.data_parallelism import DataParallel, ring_all_reduce
from memlab.ranks import run_ranks

RANKS = 2


def row(rank: int, n: int = 2) -> torch.Tensor:
    return torch.full((1, n), rank + 1.0)


def layers() -> nn.Sequential:
    """Two layers of weights 1, the last in the first bucket."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    return model


def of_double(rank, all_reduce):
    """A model that became FP64 after it was wrapped: its pieces are twice as large."""
    model = layers()
    replica = DataParallel(model, 1, all_reduce).double()
    replica(row(rank).double()).sum().backward()
    return model[1].weight.grad.tolist()


def test_a_ring_has_scratch_for_a_model_whose_dtype_was_changed():
    for rank in run_ranks(of_double, RANKS, ring_all_reduce):
        assert rank == [[3.0, 3.0]] * 2
