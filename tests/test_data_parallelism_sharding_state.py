"""fully_shard: whole states where ranks use different parts of a model, of a part of one, and over several groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memlab.data_parallelism import (
    clip_grad_norm_,
    full_optimizer_state,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state,
    load_full_state_dict,
)
from memlab.ranks import mesh, run_ranks


class Expert(nn.Module):
    """Two factors, of which the call names one or none: in two ranks' pieces, one each. x: (n, 4) → the same."""

    def __init__(self):
        super().__init__()
        self.factors = nn.ParameterList(torch.full((1,), 2.0) for _ in range(2))

    def forward(self, x: Tensor, chosen: int | None) -> Tensor:
        return x * (1 if chosen is None else self.factors[chosen])


def experts(rank: int, apart: bool):
    """A model whose second factor is used where it lies, on the last rank only, and Adam; 2 steps, saved, 2 steps more.

    apart: the factors are a unit of their own. Returns the weights after 4 steps, those after 2 steps of the model
    into which all was loaded, and the optimizer's state by number.
    """

    def made():
        torch.manual_seed(0)
        model = nn.ModuleDict({"linear": nn.Linear(4, 4), "expert": Expert()})
        model.forward = lambda x: model["expert"](model["linear"](x), 1 if rank else None).square().sum()
        for each in model.values() if apart else [model]:
            fully_shard(each)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def train(model, optimizer):
        for _ in range(2):
            model(torch.ones(1, 4) * (rank + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    through, optimizer = made()
    train(through, optimizer)
    weights, states = full_state_dict(through), full_optimizer_state(through, optimizer)
    train(through, optimizer)
    resumed, other = made()
    load_full_state_dict(resumed, weights)
    load_full_optimizer_state(resumed, other, states)
    again = full_optimizer_state(resumed, other)
    train(resumed, other)
    last = full_optimizer_state(resumed, other)
    return full_state_dict(through), full_state_dict(resumed), states, again, last


@pytest.mark.parametrize("apart", [False, True], ids=["one unit", "a unit of its own"])
def test_an_optimizer_state_of_a_parameter_that_rank_0_has_nothing_of_and_did_not_use_is_saved_and_loaded(apart):
    through, resumed, states, again, last = run_ranks(experts, 2, apart)[0]
    assert all(torch.equal(resumed[key], value) for key, value in through.items())
    number = list(through).index("expert.factors.1")
    assert states["state"][number]["step"] == 2 and states["state"][number]["exp_avg"].shape == (1,)
    assert last["state"][number]["step"] == 4
    for i, state in states["state"].items():
        assert all(torch.equal(again["state"][i][name], value) for name, value in state.items())


def a_factored_optimizer(rank: int) -> str:
    model = fully_shard(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters())
    if rank == 1:
        optimizer.state[model.weight]["row"] = torch.ones(3)
    with pytest.raises(ValueError) as error:
        full_optimizer_state(model, optimizer)
    return str(error.value)


def test_a_state_that_is_not_elementwise_on_one_rank_is_refused_on_all():
    found = run_ranks(a_factored_optimizer, 2, timeout=20)
    assert found[0] == found[1] and "'row' of shape (3,) for a part of 8" in found[0]


# ---- a part of a model


def body_and_head():
    torch.manual_seed(0)
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 2)})


def parts_of_a_model(rank: int) -> bool:
    plain, model = body_and_head(), body_and_head()
    fully_shard(model["body"][0])
    fully_shard(model)
    for name in ("body", "body.1", "head"):
        found = full_state_dict(model.get_submodule(name))
        expected = plain.get_submodule(name).state_dict()
        assert rank or [*found] == [*expected]
        assert rank or all(found[key].shape == expected[key].shape for key in found), name
    state = full_state_dict(model["body"])
    load_full_state_dict(model["body"], {key: value + 1 for key, value in state.items()})
    before, after = body_and_head().state_dict(), full_state_dict(model)
    for key, value in after.items():
        assert torch.equal(value, before[key] + 1 if key.startswith("body") else before[key]), key
    with pytest.raises(ValueError, match="found a plain Linear"):
        full_state_dict(plain["head"])
    return True


def optimizer_of_all_and_a_part(rank: int) -> dict:
    model = body_and_head()
    for each in (model["body"], model["head"]):
        fully_shard(each)
    optimizer = torch.optim.Adam(model.parameters())
    model["head"](model["body"](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    state = full_optimizer_state(model["body"], optimizer)
    load_full_optimizer_state(model["body"], optimizer, state)
    return {i: values["exp_avg"].shape for i, values in state.get("state", {}).items()}


def test_a_part_of_a_sharded_model_gives_and_takes_whole_parameters_also_of_the_unit_around_it():
    assert run_ranks(parts_of_a_model, 2, timeout=20) == [True, True]


def test_an_optimizers_states_are_whole_also_of_parameters_beside_the_module():
    found = run_ranks(optimizer_of_all_and_a_part, 2, timeout=20)[0]
    assert found == {i: p.shape for i, p in enumerate(body_and_head().parameters())}


# ---- what no rank may do alone


def over_two_groups(rank: int) -> bool:
    groups = mesh(data=2, expert=2)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], group=groups.get_group("expert"))
    fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    for call in (lambda: clip_grad_norm_(model, 1.0), lambda: full_state_dict(model)):
        with pytest.raises(ValueError, match="over one group of ranks, found 2"):
            call()
    return bool(clip_grad_norm_(model[0], 1.0).isfinite())


def test_units_of_several_groups_have_no_norm_and_no_state_in_common():
    assert run_ranks(over_two_groups, 4, timeout=20) == [True] * 4


def states_of_arrays(rank: int) -> bool:
    model = fully_shard(nn.Linear(4, 2))
    before = full_state_dict(model)
    for value in (np.ones((2, 4)), None, torch.ones(2, 4).to_sparse(), torch.ones(2, 4, device="meta")):
        with pytest.raises(ValueError, match=r"expected weight (as a tensor|dense)"):
            load_full_state_dict(model, {"weight": value, "bias": torch.ones(2)} if rank == 0 else {})
    optimizer = torch.optim.Adam(model.parameters())
    packed = optimizer.state_dict() | {"state": {0: {"exp_avg": np.ones((2, 4))}}}
    with pytest.raises(ValueError, match="found exp_avg of number 0 as ndarray"):
        load_full_optimizer_state(model, optimizer, packed if rank == 0 else {})
    after = full_state_dict(model)
    return all(torch.equal(after[key], value) for key, value in before.items())


def test_values_that_are_no_tensors_are_refused_on_every_rank():
    assert run_ranks(states_of_arrays, 2, timeout=20) == [True, True]


def in_16_bits(module, state_dict, prefix, metadata):
    state_dict.update({name: value.bfloat16() for name, value in state_dict.items()})


def hooked(rank: int):
    """What saving and loading say of a model whose hook converts its state dict, and of one whose hook adds to it."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    values = full_state_dict(model)
    hook = model.register_state_dict_post_hook(in_16_bits)
    said = []
    for call in (lambda: full_state_dict(model), lambda: load_full_state_dict(model, values)):
        with pytest.raises(ValueError, match="another tensor as 0.weight: a state-dict hook replaced it") as error:
            call()
        said.append(type(error.value))
    hook.remove()
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update(more=torch.ones(2)))
    return said, {name: tuple(value.shape) for name, value in full_state_dict(model).items()}


def test_a_hook_that_puts_other_tensors_in_the_parameters_place_is_refused_and_one_that_adds_is_not():
    for rank, (said, shapes) in enumerate(run_ranks(hooked, 2)):
        assert said == [ValueError, ValueError]
        layers = {"0.weight": (4, 4), "0.bias": (4,), "1.weight": (4, 4), "1.bias": (4,)}
        assert shapes == ({} if rank else layers | {"more": (2,)})
