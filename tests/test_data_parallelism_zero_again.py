"""ZeRO 1 and 2: optimizers made again, a backward that raised on one rank, hooks, and parameters that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn, optim

from memlab.data_parallelism import DataParallel, ZeroOptimizer
from memlab.ranks import imagined_ranks, run_ranks
from tests.ranks_helpers import FailsInBackward

RANKS = 2


def one_weight() -> nn.Linear:
    """A layer of two weights, 0; its gradient is 1 on rank 0, 2 on rank 1, where `row` is what goes in."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def row(rank: int) -> torch.Tensor:
    return torch.full((1, 2), rank + 1.0)


def stepped(model: nn.Linear, optimizer, rank: int) -> list:
    model(row(rank)).sum().backward()
    optimizer.step()
    return model.weight.tolist()


def made_again(rank, first, second):
    """The older optimizer is held by its scheduler."""
    model = one_weight()
    old = optim.lr_scheduler.StepLR(ZeroOptimizer(model.parameters(), optim.SGD, first, lr=1.0), 1)
    return stepped(model, ZeroOptimizer(model.parameters(), optim.SGD, second, lr=1.0), rank), old.last_epoch


def after_one_that_raised(rank, make):
    """The error holds the optimizer that was not made, as sys.last_exc does."""
    model, held = one_weight(), None
    try:
        ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=-1.0)
    except ValueError as error:
        held = error
    return stepped(model, make(model), rank), "learning rate" in str(held)


def beside_a_wrapper(rank, first):
    """Stage 2 and DataParallel on one model: the later one has the gradients, and whoever is older is closed."""
    model = one_weight()
    if first == "stage 2":
        zero = ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=1.0)
        replica = DataParallel(model)
        return stepped(replica.module, optim.SGD(model.parameters(), lr=1.0), rank), zero._gradients.open
    replica = DataParallel(model)
    zero = ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=1.0)
    return stepped(model, zero, rank), not replica._averaging.closed


def raised_on_one_rank(rank, who, find_unused):
    """Backward raises on one rank between its first gradient and its last; all drop that step. Then one as ever."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer = ZeroOptimizer(
        model.parameters(), optim.SGD, 2, bucket_bytes=8, find_unused_parameters=find_unused, lr=1.0
    )
    found = []
    for step in range(3):
        hidden = model[0](torch.full((1, 1), 10.0**step))
        failed = torch.zeros(())
        try:
            model[1](FailsInBackward.apply(hidden) if step == 1 and rank == who else hidden).sum().backward()
        except ArithmeticError:
            optimizer.zero_grad()
            failed.fill_(1)
        distributed.all_reduce(failed, distributed.ReduceOp.MAX)
        parts = [p.grad.item() for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        found.append("dropped" if failed else parts)
        optimizer.zero_grad()
    return found


def all_facts(rank):
    sgd = {
        "stage 2": lambda model: ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=1.0),
        "DataParallel": lambda model: optim.SGD(DataParallel(model).parameters(), lr=1.0),
    }
    return {
        "again": {stages: made_again(rank, *stages) for stages in ((1, 1), (1, 2), (2, 1), (2, 2))},
        "after one that raised": after_one_that_raised(rank, sgd["stage 2"]),
        "beside": [beside_a_wrapper(rank, first) for first in ("stage 2", "DataParallel")],
        "raised": [raised_on_one_rank(rank, *how) for how in ((1, False), (0, True))],
    }


@pytest.fixture(scope="module")
def facts():
    return run_ranks(all_facts, RANKS)


def test_a_new_optimizer_has_the_gradients_of_an_older_ones_parameters(facts):
    for rank in facts:
        assert list(rank["again"].values()) == [([[-1.5, -1.5]], 0)] * 4


def test_an_optimizer_that_could_not_be_made_takes_no_gradients(facts):
    for rank in facts:
        assert rank["after one that raised"] == ([[-1.5, -1.5]], True)
    with imagined_ranks(RANKS):
        model = one_weight()
        with pytest.raises(ValueError, match="learning rate") as held:
            ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=-1.0)
        assert held.value and not model.weight._post_accumulate_grad_hooks


def test_of_a_wrapper_and_stage_2_on_one_model_the_older_is_closed(facts):
    for rank in facts:
        assert rank["beside"] == [([[-1.5, -1.5]], False)] * 2


def test_where_one_ranks_backward_raises_zero_grad_lets_the_others_end_and_all_may_drop_the_step(facts):
    for how in range(2):
        first, second = (rank["raised"][how] for rank in facts)
        assert first == second == [first[0], "dropped", first[2]]
        assert first[0] == [1.0, 1.0] and first[2] == [100.0, 100.0]


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


def test_hooks_of_saving_and_loading_are_called_as_torch_calls_them():
    def history(make):
        said = []
        optimizer = make(nn.Linear(2, 2).parameters())
        optimizer.register_state_dict_pre_hook(lambda one: said.append("saving"))
        optimizer.register_state_dict_post_hook(lambda one, saved: saved | {"epoch": 3})
        optimizer.register_load_state_dict_pre_hook(lambda one, saved: said.append(saved.pop("epoch")))
        optimizer.register_load_state_dict_pre_hook(lambda one, saved: {**saved, "state": {}})
        optimizer.register_load_state_dict_post_hook(lambda one: said.append("loaded"))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return [*said, saved]

    with imagined_ranks(RANKS):
        assert history(lambda params: ZeroOptimizer(params, optim.SGD, lr=0.1)) == history(
            lambda params: optim.SGD(params, lr=0.1)
        )
