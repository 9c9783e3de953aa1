"""fully_shard: what there is only as a whole, norms and states: clipped, saved, loaded, refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from memlab.data_parallelism import (
    clip_grad_norm_,
    full_optimizer_state,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state,
    load_full_state_dict,
)
from memlab.ranks import mesh, one_rank, run_ranks
from tests.harness import refused
from tests.ranks_helpers import Cases
from tests.sharding_helpers import (
    apart,
    assert_same_gradients,
    backward,
    both,
    gpt,
    mine,
    rows,
    sharded,
    stack,
    texts,
)

on_two_ranks = Cases(2)


def trained(steps, state=None, optimizer_state=None):
    """What a model is after these steps on the ranks that there are, its norms, and its optimizer's state."""
    rank = distributed.get_rank()
    model = sharded(gpt(seed=rank))  # other values on every rank
    if state is not None:
        load_full_state_dict(model, state if rank == 0 else {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if optimizer_state is not None:
        load_full_optimizer_state(model, optimizer, optimizer_state if rank == 0 else {})
    norms = []
    for step in steps:
        model(*mine(texts(step))).backward()
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model), torch.stack(norms), full_optimizer_state(model, optimizer)


def trained_alone(steps, state=None, optimizer_state=None):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if state is not None:
        model.load_state_dict(state)
        optimizer.load_state_dict(optimizer_state)
    norms = []
    for step in steps:
        model(*texts(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), torch.stack(norms), optimizer.state_dict()


def ten_steps(rank):
    """From the beginning, half of them, and from there."""
    half = trained(range(5))
    return trained(range(10)), half, trained(range(5, 10), half[0], half[2])


def going_on(rank, half):
    return trained(range(5, 10), half[0], half[2])


@pytest.fixture(scope="module")
def two():
    return run_ranks(ten_steps, 2)


@pytest.fixture(scope="module")
def three(two):
    return run_ranks(going_on, 3, two[0][1])


def close(found, expected):
    assert apart(found[0], expected[0]) < 1e-12
    assert torch.allclose(found[1], expected[1][-len(found[1]) :], rtol=1e-12)
    assert found[2]["param_groups"] == expected[2]["param_groups"]
    assert list(found[2]["state"]) == list(expected[2]["state"])
    for i, state in expected[2]["state"].items():
        assert found[2]["state"][i]["step"] == state["step"]
        assert apart(found[2]["state"][i], state) <= 1e-11


def test_ten_steps_are_those_of_the_single_process_and_rank_0_has_the_whole(two):
    close(two[0][0], trained_alone(range(10)))
    (state, norms, optimizer_state), _, _ = two[1]
    assert state == optimizer_state == {} and torch.equal(norms, two[0][0][1])
    with one_rank("cpu"):
        close(trained(range(10)), trained_alone(range(10)))


def test_training_goes_on_bit_for_bit_from_a_saved_state_and_on_other_numbers_of_ranks(two, three):
    through, half, resumed = two[0]
    assert all(torch.equal(resumed[0][key], value) for key, value in through[0].items())
    for i, state in through[2]["state"].items():
        assert all(torch.equal(resumed[2]["state"][i][name], value) for name, value in state.items())
    close(three[0], through)
    close(trained_alone(range(5, 10), half[0], half[2]), through)


@on_two_ranks
def norms_and_clipped_gradients_are_torchs():
    plain, model = both(stack)
    for norm in (2.0, 1.0, "inf"):
        backward(plain, rows())
        backward(model, mine(rows()))
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm)
        assert abs(clip_grad_norm_(model.parameters(), 1e-3, norm) - expected) / expected < 1e-12, norm
        assert_same_gradients(plain, model, 1e-12)
    assert clip_grad_norm_(model, 1.0) == 0 == clip_grad_norm_([], 1.0)
    backward(model, (mine(rows())[0] * (float("inf") if distributed.get_rank() else 1.0),))
    refused(lambda: clip_grad_norm_(model, 1.0, error_if_nonfinite=True), RuntimeError, "expected a finite norm")
    model.zero_grad()
    refused(lambda: clip_grad_norm_(plain, 1.0), ValueError, "in no unit")


@on_two_ranks
def norms_of_complex_numbers_are_torchs():
    def made():
        return nn.ParameterList([torch.arange(1, 4) * (1 + 1j), torch.arange(1.0, 4.0)])

    plain, model = made(), fully_shard(made())
    for each in (plain, model):
        for p in each.parameters():
            p.grad = p.detach().clone()
    expected, found = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0), clip_grad_norm_(model, 1.0)
    assert found.dtype is expected.dtype is torch.float32 and abs(found - expected) <= 1e-6 * expected
    assert_same_gradients(plain, model, 1e-6)


@on_two_ranks
def tied_parameters_share_memory_and_dtypes_stay_in_a_whole_state():
    model = gpt(dtype=torch.float32)
    model.head.weight = model.token_embedding.weight
    model.frozen = nn.Parameter(torch.arange(5, dtype=torch.int16), requires_grad=False)
    state = full_state_dict(sharded(model, param_dtype=torch.bfloat16))
    if distributed.get_rank() == 0:
        assert state["head.weight"].data_ptr() == state["token_embedding.weight"].data_ptr()
        assert {value.dtype for value in state.values()} == {torch.float32, torch.int16}
        assert state["frozen"].tolist() == [0, 1, 2, 3, 4]
    load_full_state_dict(model, {key: value + 1 for key, value in state.items()})
    assert model.frozen.dtype is torch.int16
    again = full_state_dict(model)
    assert all(torch.equal(again[key], value + 1) for key, value in state.items())


class Counting(nn.Linear):
    """A layer with extra state."""

    def __init__(self):
        super().__init__(4, 4)

    def get_extra_state(self):
        return {"count": 7}


class Expert(nn.Module):
    """Two factors, one on each of two ranks; the call names one or none. x: (n, 4) → same."""

    def __init__(self):
        super().__init__()
        self.factors = nn.ParameterList(torch.tensor(2.0) for _ in range(2))

    def forward(self, x: Tensor, chosen: int | None) -> Tensor:
        return x * (1 if chosen is None else self.factors[chosen])


@on_two_ranks
def units_of_single_numbers_go_on_also_where_rank_0_has_none_of_them_and_the_saved_state_stays_as_it_was():
    rank = distributed.get_rank()

    def made(apart):
        torch.manual_seed(0)
        model = nn.ModuleDict({"linear": nn.Linear(4, 4), "expert": Expert()})
        model.forward = lambda x: model["expert"](model["linear"](x), 1 if rank else None).square().sum()
        for each in model.values() if apart else [model]:
            fully_shard(each)
        return model, torch.optim.NAdam(model.parameters(), lr=0.1)

    def train(model, optimizer):
        for _ in range(2):
            model(torch.ones(1, 4) * (rank + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            return full_state_dict(model), full_optimizer_state(model, optimizer)

    for factors_apart in (False, True):
        through, optimizer = made(factors_apart)
        weights, states = train(through, optimizer)
        expected = train(through, optimizer)
        for _ in range(2):  # twice from one state: what the first did to it, the second would see
            resumed, other = made(factors_apart)
            load_full_state_dict(resumed, weights)
            load_full_optimizer_state(resumed, other, states)
            found = train(resumed, other)
            assert all(map(torch.equal, through.parameters(), resumed.parameters()))
        if rank == 0:
            of_second_factor = states["state"][3]
            assert of_second_factor["step"] == 2 and of_second_factor["exp_avg"].shape == ()
            for i, state in expected[1]["state"].items():
                assert all(torch.equal(found[1]["state"][i][name], value) for name, value in state.items())


@on_two_ranks
def buffers_are_rank_0s_and_are_loaded():
    rank = distributed.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(rank)
    model.register_buffer("strided", (torch.arange(16.0) + 100 * rank)[::2])
    fully_shard(model)
    assert not model[1].running_mean.any() and model.strided.tolist() == [*range(0, 16, 2)]
    assert model.strided._base[1::2].tolist() == [n + 100 * rank for n in range(1, 16, 2)]
    state = full_state_dict(model)
    if rank == 0:
        state["strided"] += 1
        assert [key for key in state if "gathered" in key] == []
    load_full_state_dict(model, state)
    assert model.strided.tolist() == [*range(1, 17, 2)]


def body_and_head():
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 2)})


@on_two_ranks
def a_part_of_a_sharded_model_gives_and_takes_whole_parameters_also_of_the_unit_around_it():
    plain, model, rank = body_and_head(), body_and_head(), distributed.get_rank()
    fully_shard(model["body"][0])
    fully_shard(model)
    for name in ("body", "body.1", "head"):
        found, expected = full_state_dict(model.get_submodule(name)), plain.get_submodule(name).state_dict()
        assert rank or [*found] == [*expected]
        assert all(found[key].shape == expected[key].shape for key in found), name
    state = full_state_dict(model["body"])
    load_full_state_dict(model["body"], {key: value + 1 for key, value in state.items()})
    before, after = body_and_head().state_dict(), full_state_dict(model)
    for key, value in after.items():
        assert torch.equal(value, before[key] + 1 if key.startswith("body") else before[key]), key
    refused(lambda: full_state_dict(plain["head"]), ValueError, "found a plain Linear")


@on_two_ranks
def an_optimizers_states_are_whole_also_of_parameters_beside_the_module():
    model = body_and_head()
    for each in (model["body"], model["head"]):
        fully_shard(each)
    optimizer = torch.optim.Adam(model.parameters())
    model["head"](model["body"](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    state = full_optimizer_state(model["body"], optimizer)
    load_full_optimizer_state(model["body"], optimizer, state)
    shapes = {i: values["exp_avg"].shape for i, values in state.get("state", {}).items()}
    expected = {i: p.shape for i, p in enumerate(body_and_head().parameters())}
    assert shapes == ({} if distributed.get_rank() else expected)


@on_two_ranks
def states_that_do_not_fit_are_refused_and_nothing_is_loaded():
    model, state = sharded(stack()), stack(seed=1).state_dict()
    before = full_state_dict(model)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW([{"params": [*stack().parameters()][:3]}, {"params": [*stack().parameters()][3:]}])
    without = {key: value for key, value in state.items() if key != "last.bias"}
    for given, error, words in (
        (without, KeyError, "found no last.bias"),
        (state | {"more": torch.ones(1)}, KeyError, "found also more"),
        (state | {"last.bias": torch.ones(7)}, ValueError, "of shape"),
        (state | {"last.bias": np.ones(8)}, ValueError, "expected last.bias as a tensor"),
        (state | {"last.bias": torch.ones(8, device="meta")}, ValueError, "expected last.bias dense"),
    ):
        given = given if distributed.get_rank() == 0 else {}
        refused(lambda given=given: load_full_state_dict(model, given), error, words)
    packed = optimizer.state_dict()
    for given, words in (
        (other.state_dict(), "parameter groups"),
        ({}, "expected state and param_groups"),
        (packed | {"state": {99: {"exp_avg": torch.ones(9)}}}, "number 99, which is not"),
        (packed | {"state": {0: {"exp_avg": torch.ones(9)}}}, "of shape (12, 8), found (9,)"),
        (packed | {"state": {0: {"exp_avg": np.ones((12, 8))}}}, "found exp_avg of number 0 as ndarray"),
    ):
        given = given if distributed.get_rank() == 0 else {}
        refused(lambda given=given: load_full_optimizer_state(model, optimizer, given), ValueError, words)
    after = full_state_dict(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    refused(lambda: full_state_dict(stack()), ValueError, "found a plain Stack")
    counting = Counting()
    fully_shard(counting)
    for call in (lambda: full_state_dict(counting), lambda: load_full_state_dict(counting, {})):
        refused(call, ValueError, "found _extra_state, a module's extra state; save it beside")


@on_two_ranks
def a_state_that_is_not_elementwise_on_one_rank_is_refused_on_all():
    model = fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters())
    if distributed.get_rank() == 1:
        optimizer.state[model.weight]["row"] = torch.ones(3)
    refused(lambda: full_optimizer_state(model, optimizer), ValueError, "'row' of shape (3,) for a part of 8")


@on_two_ranks
def a_hook_that_puts_other_tensors_in_the_parameters_place_is_refused_and_one_that_adds_is_not():
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(more=torch.ones(2)))
    values = full_state_dict(model)
    assert list(values) == ([] if distributed.get_rank() else ["0.weight", "0.bias", "more"])
    model.register_state_dict_post_hook(lambda module, state, *_: state.update({"0.weight": torch.ones(4, 4)}))
    for call in (lambda: full_state_dict(model), lambda: load_full_state_dict(model, values)):
        refused(call, ValueError, "another tensor as 0.weight: a state-dict hook replaced it")


def over_two_groups(rank):
    groups = mesh(data=2, expert=2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], group=groups.get_group("expert"))
    fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    assert clip_grad_norm_(model[0], 1.0).isfinite()
    for call in (lambda: clip_grad_norm_(model, 1.0), lambda: full_state_dict(model)):
        refused(call, ValueError, "over one group of ranks, found 2")


def test_units_of_several_groups_have_no_norm_and_no_state_in_common():
    run_ranks(over_two_groups, 4)


@pytest.mark.parametrize("name", on_two_ranks)
def test_on_two_ranks(name):
    on_two_ranks.assert_holds(name)
