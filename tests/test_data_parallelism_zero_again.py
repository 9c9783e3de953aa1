"""ZeRO 1 and 2: optimizers made again, a backward that raised on one rank, hooks, and parameters that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from memlab.data_parallelism import ZeroOptimizer
from memlab.ranks import imagined_ranks, run_ranks

RANKS = 2


def test_parameters_in_a_set_are_refused_since_ranks_would_have_them_in_different_orders():
    params = set(nn.Linear(2, 2).parameters())
    with imagined_ranks(RANKS):
        for given in (params, frozenset(params), [{"params": params}]):
            with pytest.raises(TypeError, match="parameters in order, found a set"):
                ZeroOptimizer(given, optim.SGD, lr=0.1)
        optimizer = ZeroOptimizer(nn.Linear(2, 2).parameters(), optim.SGD, lr=0.1)
        with pytest.raises(TypeError, match="parameters in order, found a set"):
            optimizer.add_param_group({"params": params})


def unlike(rank):
    errors = []
    for model, options in (
        (nn.Linear(2, 2 + rank), {}),
        (nn.Linear(2, 2, dtype=torch.float64 if rank else torch.float32), {}),
        (nn.Linear(2, 2).requires_grad_(rank == 0), {}),
        (nn.Linear(2, 2), {"stage": 1 + rank}),
        (nn.Linear(2, 2), {"bucket_bytes": 8 + rank}),
    ):
        try:
            ZeroOptimizer(model.parameters(), optim.SGD, lr=0.1, **options)
        except ValueError as error:
            errors.append(str(error))
    model = nn.Linear(2, 2)
    groups = [{"params": [p]} for p in model.parameters()] if rank else [{"params": list(model.parameters())}]
    try:
        ZeroOptimizer(groups, optim.SGD, lr=0.1)
    except ValueError as error:
        errors.append(str(error))
    return errors


def test_parameters_and_settings_unlike_rank_0s_are_refused_on_all_ranks():
    for rank in run_ranks(unlike, RANKS):
        shape, dtype, frozen, stage, bucket, groups = rank
        assert "found parameter 0 on rank 1: (3, 2) of torch.float32, trained, in group 0, on rank 0: (2, 2)" in shape
        assert "found parameter 0 on rank 1: (2, 2) of torch.float64" in dtype
        assert "(2, 2) of torch.float32, frozen" in frozen
        assert "found stage on rank 1: 2, on rank 0: 1" in stage
        assert "found bucket_bytes on rank 1: 9, on rank 0: 8" in bucket
        assert "found parameter 1 on rank 1: (2,) of torch.float32, trained, in group 1" in groups


def test_parameters_that_share_some_elements_are_refused_and_those_in_each_others_gaps_are_taken():
    with imagined_ranks(RANKS):
        base = torch.arange(12.0)
        for others in (
            [base[:6], base[3:]],
            [base[:9], base[4:6]],
            [base[1:4], base[::3]],
            [base, base.view(3, 4).t()],
        ):
            with pytest.raises(ValueError, match="found numbers 1 and 2 in the same memory"):
                ZeroOptimizer([nn.Parameter(t) for t in (torch.ones(2), *others)], optim.SGD, lr=0.1)
        empty = nn.Parameter(torch.empty(0, 3))
        with pytest.raises(ValueError, match="found numbers 0 and 1 given twice"):
            ZeroOptimizer([empty, empty], optim.SGD, lr=0.1)
        columns = [nn.Parameter(half) for half in base.view(3, 4).chunk(2, dim=1)]
        values = [p.tolist() for p in columns]
        ZeroOptimizer(columns, optim.SGD, lr=0.1)
        assert [p.tolist() for p in columns] == values


def test_parameters_without_memory_and_with_gradients_of_another_dtype_are_refused():
    wide = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    wide.grad_dtype = torch.float32
    with imagined_ranks(RANKS):
        for params in (nn.LazyLinear(3).parameters(), nn.Linear(2, 2, device="meta").parameters()):
            with pytest.raises(ValueError, match="with memory, found none at number 0; initialise it first"):
                ZeroOptimizer(params, optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="number 0 of torch.bfloat16 with a grad_dtype of torch.float32"):
            ZeroOptimizer([wide], optim.SGD, lr=0.1)
