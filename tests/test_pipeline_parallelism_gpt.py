"""A GPT as layers: the plain GPT's weights and values, with and without a tensor group; its norm and its state."""

from __future__ import annotations

import copy
import functools
import pickle

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from memlab.book.workloads import GPT, name_in_layers
from memlab.memory_timeline import imagine
from memlab.pipeline_parallelism import (
    Pipeline,
    clip_grad_norm_,
    full_state_dict,
    gpipe,
    gpt_layers,
    gpt_loss,
    interleaved,
    load_full_state_dict,
    plan_pipeline,
)
from memlab.ranks import ALONE, Traffic, imagined_ranks, mesh, one_rank, place_in, run_ranks
from memlab.tensor_parallelism import TensorParallelGPT
from tests.tensor_parallelism_helpers import raised

SIZES = {"layers": 2, "width": 16, "heads": 4, "context": 8, "vocabulary": 32}
TIED = [("0.token_embedding.weight", "3.head.weight")]


def made(layers) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for layer in layers])


def text(batch: int = 4, tokens: int = 8) -> tuple[Tensor, Tensor]:
    found = torch.randint(32, (batch, tokens + 1), generator=torch.Generator().manual_seed(1))
    return found[:, :-1], found[:, 1:]


# ---- without a process group


def test_without_a_process_group_it_is_the_plain_gpt_to_the_bit_in_weights_and_rounding_in_values():
    layers = made(gpt_layers(**SIZES, dtype=torch.float64))
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        plain = GPT(**SIZES)
    finally:
        torch.set_default_dtype(torch.float32)
    state = {name_in_layers(name, 2): p for name, p in plain.state_dict().items()}
    assert state.keys() == layers.state_dict().keys()
    assert all(torch.equal(p, state[name]) for name, p in layers.state_dict().items())
    x, y = text(tokens=5)
    loss, expected = gpt_loss(layers(x), y), plain(x, y)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    loss.backward()
    expected.backward()
    gradients = {name_in_layers(name, 2): p.grad for name, p in plain.named_parameters()}
    for name, p in layers.named_parameters():
        assert (p.grad - gradients[name]).norm() <= 1e-13 * gradients[name].norm() + 1e-17, name


@pytest.mark.parametrize(
    "more", [{}, {"kv_heads": 2, "hidden": 48}, {"sequence_parallel": True, "keep_gathered": True}]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_on_ranks_of_a_tensor_group_weights_are_those_of_the_whole_split_gpt_to_the_bit(more, rank):
    with imagined_ranks(4, rank):
        group = mesh(data=2, tensor=2).get_group("tensor")
        layers = made(gpt_layers(**SIZES, **more, group=group))
        torch.manual_seed(0)
        whole = TensorParallelGPT(**SIZES, **more, group=group)
        state = {name_in_layers(name, 2): p for name, p in whole.state_dict().items()}
        assert state.keys() == layers.state_dict().keys()
        assert all(torch.equal(p, state[name]) for name, p in layers.state_dict().items())


@pytest.mark.parametrize("tensor", [2, 4])
def test_with_sequence_parallel_a_stage_sends_its_tensor_ranks_share_of_the_stream(tensor):
    sent = {}
    for sequence_parallel in (False, True):
        with imagined_ranks(2 * tensor):
            group = mesh(pipeline=2, tensor=tensor).get_group("tensor")
            layers = gpt_layers(**SIZES, group=group, sequence_parallel=sequence_parallel)
            ((wire,),) = plan_pipeline(layers, gpipe(2, 2), text()[0]).wires
        sent[sequence_parallel] = wire.nbytes
    assert sent == {False: 2 * 8 * 16 * 4, True: 2 * 8 * 16 * 4 // tensor}


def test_alone_is_a_group_of_one_that_travels():
    assert place_in(ALONE) == (0, 1) and repr(ALONE) == "ALONE"
    copies = copy.deepcopy(ALONE), pickle.loads(pickle.dumps(ALONE)), cloudpickle.loads(cloudpickle.dumps(ALONE))
    assert all(each is ALONE for each in copies)
    plan = plan_pipeline(gpt_layers(**SIZES), gpipe(2, 2), text()[0])
    assert cloudpickle.loads(cloudpickle.dumps(plan)).layers[0].keywords["group"] is ALONE
    with pytest.raises(RuntimeError, match="expected a process group"):
        place_in()


def test_dropout_is_drawn_in_training_and_not_in_eval():
    layers = made(gpt_layers(**SIZES, dropout=0.5))
    x, _ = text()
    assert not torch.equal(layers(x), layers(x))
    layers.eval()
    assert torch.equal(layers(x), made(gpt_layers(**SIZES)).eval()(x))


@pytest.mark.parametrize(
    ("sizes", "x", "words"),
    [
        ({"heads": 3}, text()[0], "3 heads cannot share a width of 16"),
        ({}, text(tokens=9)[0], "expected at most 8 tokens (the context), found 9"),
        ({}, torch.zeros(2, 0, dtype=torch.int64), "expected at least one text of at least one token"),
    ],
)
def test_what_a_gpt_cannot_be_or_read_is_refused_when_it_is_planned(sizes, x, words):
    with pytest.raises(ValueError) as error:
        plan_pipeline(gpt_layers(**SIZES | sizes), gpipe(2, 2), x)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "tokens", "words"),
    [
        ({"vocabulary": 31}, 8, "31 entries of the vocabulary cannot be split over 4 ranks"),
        ({"context": 10}, 8, "10 positions of the context cannot be split over 4 ranks"),
        ({"heads": 2}, 8, "2 heads cannot be split over 4 ranks"),
        ({"sequence_parallel": True}, 6, "6 tokens cannot be split over 4 ranks"),
    ],
)
def test_sizes_that_tensor_ranks_do_not_divide_are_refused_when_they_are_planned(sizes, tokens, words):
    with imagined_ranks(4):
        group = torch.distributed.group.WORLD
        with pytest.raises(ValueError) as error:
            plan_pipeline(gpt_layers(**SIZES | sizes, group=group), gpipe(1, 1), text(tokens=tokens)[0])
    assert words in str(error.value)


# ---- norms and states, on one rank


def trained_once(schedule, group=None, tensor_group=None, tied=TIED, seed=0) -> Pipeline:
    plan = plan_pipeline(gpt_layers(**SIZES, group=tensor_group, dtype=torch.float64), schedule, text()[0], tied=tied)
    torch.manual_seed(seed)
    pipeline = Pipeline(plan, functools.partial(gpt_loss, group=tensor_group), group=group)
    pipeline.step(*text())
    return pipeline


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_are_pytorchs_own(norm_type):
    with one_rank("cpu"):
        pipeline, other = trained_once(gpipe(1, 2)), trained_once(gpipe(1, 2))
        norm = clip_grad_norm_(pipeline, 0.5, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(list(other.parameters()), 0.5, norm_type)
        assert norm.dtype == torch.float64 and norm.item() == pytest.approx(expected.item(), rel=1e-14)
        for p, q in zip(pipeline.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-13, atol=0)


def test_norms_of_no_kind_and_norms_that_are_not_finite_are_refused():
    with one_rank("cpu"):
        pipeline = trained_once(gpipe(1, 2))
        with pytest.raises(ValueError, match="norm_type above 0"):
            clip_grad_norm_(pipeline, 1.0, 0.0)
        next(pipeline.parameters()).grad.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="expected a finite norm"):
            clip_grad_norm_(pipeline, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_on_imagined_ranks_norms_and_states_run_and_a_state_has_this_ranks_layers(rank):
    with imagine("H100-80GB"), imagined_ranks(8, rank):
        axes = mesh(data=2, pipeline=2, tensor=2)
        split = {"group": axes.get_group("tensor")}
        x = torch.zeros(4, 8, dtype=torch.int64)
        plan = plan_pipeline(gpt_layers(**SIZES, **split), gpipe(2, 2), x, tied=TIED)
        pipeline = Pipeline(plan, functools.partial(gpt_loss, **split), group=axes.get_group("pipeline"))
        pipeline.step(x, x)
        norm = clip_grad_norm_(pipeline, 1.0, tensor_group=split["group"])
        state = full_state_dict(pipeline, split["group"])
        load_full_state_dict(pipeline, state, split["group"])
    assert norm.shape == () and {name[0] for name in state} == ({"0", "1", "3"} if rank == 0 else set())


def test_a_norm_of_stages_in_parts_is_refused_without_their_tensor_group():
    with imagine("H100-80GB"), imagined_ranks(4):
        axes = mesh(pipeline=2, tensor=2)
        split = {"group": axes.get_group("tensor")}
        x = torch.zeros(4, 8, dtype=torch.int64)
        plan = plan_pipeline(gpt_layers(**SIZES, **split), gpipe(2, 2), x, tied=TIED)
        pipeline = Pipeline(plan, functools.partial(gpt_loss, **split), group=axes.get_group("pipeline"))
        pipeline.step(x, x)
        with pytest.raises(ValueError, match="cut for 2 ranks and a group of 1; give that group"):
            clip_grad_norm_(pipeline, 1.0)


# ---- and on several


class Twice(torch.nn.Module):
    """One weight under two names, in one layer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(self.up(x))


def of_one_weight(group) -> list[tuple]:
    """Of a full state, with a tie between two stages and without: names, which weights share memory, bytes sent."""
    plan = plan_pipeline([Twice, Twice], gpipe(2, 2), torch.zeros(4, 4), tied=[("0.down.weight", "1.up.weight")])
    pipeline = Pipeline(plan, torch.nn.functional.mse_loss, group=group)
    other = plan_pipeline([Twice, Twice], gpipe(2, 2), torch.zeros(4, 4))
    apart = Pipeline(other, torch.nn.functional.mse_loss, group=group)
    found = []
    for each in (pipeline, apart):
        with Traffic() as traffic:
            state = full_state_dict(each)
        sent = sum(message.sent_bytes for message in traffic.records if message.name == "send")
        places = [t.data_ptr() for name, t in state.items() if name.endswith("weight")]
        found.append((list(state), [places.index(place) for place in places], sent))
    return found


class Counting(torch.nn.Linear):
    """What it has counted travels as extra state."""

    def __init__(self):
        super().__init__(4, 4)
        self.count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def of_extra_states(group, tensor) -> list:
    """The extra states of a full state, this rank's counts after loading it in two ways, and the error without one."""
    plan = plan_pipeline([Counting, Counting], gpipe(2, 2), torch.zeros(4, 4))
    pipeline = Pipeline(plan, torch.nn.functional.mse_loss, group=group)
    (layer,) = (layer for stage in pipeline.layers.values() for layer in stage)
    layer.count = 5 + torch.distributed.get_rank()
    state = full_state_dict(pipeline, tensor)
    found = [{name: value for name, value in state.items() if "extra" in name}]
    for given in (state, gathered(state)):
        layer.count = 0
        load_full_state_dict(pipeline, given, tensor)
        found.append(layer.count)
    lacking = {name: t for name, t in state.items() if name != "1._extra_state"}
    return [*found, raised(lambda: load_full_state_dict(pipeline, lacking, tensor))]


def on_four(rank: int) -> dict:
    axes = mesh(pipeline=2, tensor=2)
    pipeline, tensor = axes.get_group("pipeline"), axes.get_group("tensor")
    whole = trained_once(interleaved(2, 2, 2), pipeline, tensor)
    state = full_state_dict(whole, tensor)
    found = {"state": state, "shared": state and state[TIED[0][0]] is state[TIED[0][1]]}
    found["of one weight"] = of_one_weight(pipeline)
    found["extra states"] = of_extra_states(pipeline, tensor)
    found["norm"] = clip_grad_norm_(whole, 1.0, tensor_group=tensor).item()

    again = trained_once(gpipe(2, 2), pipeline, tensor, seed=5)  # other weights, other stages
    for name, given in {"from one rank": state, "from each": gathered(state)}.items():
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        load_full_state_dict(again, given, tensor)
        found[name] = full_state_dict(again, tensor)

    lacking = {name: t for name, t in gathered(state).items() if name != "2.norm1.weight"}
    found["lacking"] = raised(lambda: load_full_state_dict(again, lacking, tensor))
    found["too many"] = raised(
        lambda: load_full_state_dict(again, gathered(state) | {"9.weight": torch.ones(1)}, tensor)
    )
    other = {name: t[:1] if name == "3.head.weight" else torch.zeros_like(t) for name, t in state.items()}
    found["unlike"] = raised(lambda: load_full_state_dict(again, other, tensor))
    found["unharmed"] = full_state_dict(again, tensor)
    return found


def gathered(state: dict) -> dict:
    """Rank 0's state, on every rank."""
    box = [state]
    torch.distributed.broadcast_object_list(box)
    return box[0]


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_four, 4)


def test_a_full_state_is_the_plain_models_in_its_order_and_on_the_first_rank_only(ranks):
    plain = made(gpt_layers(**SIZES, dtype=torch.float64)).state_dict()
    plain[TIED[0][1]] = plain[TIED[0][0]]
    state = ranks[0]["state"]
    assert list(state) == list(plain)
    assert all(torch.equal(state[name], p) for name, p in plain.items())
    assert ranks[0]["shared"] and all(rank["state"] == {} for rank in ranks[1:])


def test_weights_that_are_one_share_memory_in_a_full_state_whether_their_layers_are_on_one_stage_or_two(ranks):
    names = [f"{n}.{part}.{kind}" for n in (0, 1) for part in ("up", "down") for kind in ("weight", "bias")]
    (tied, of_tied, _), (apart, of_apart, _) = ranks[0]["of one weight"]
    assert sorted(tied) == sorted(apart) == sorted(names)
    assert (of_tied, of_apart) == ([0, 0, 0, 0], [0, 0, 2, 2])
    assert [sent for *_, sent in ranks[2]["of one weight"]] == [2 * 4 * 4, 2 * 4 * 4 + 4 * 4 * 4]


def test_extra_states_of_all_stages_are_in_a_full_state_and_come_back_from_it(ranks):
    assert ranks[0]["extra states"][0] == {"0._extra_state": {"count": 5}, "1._extra_state": {"count": 7}}
    for rank, found in enumerate(ranks):
        assert found["extra states"][1:3] == [7 if rank >= 2 else 5] * 2
        assert "found no 1._extra_state (1 missing)" in found["extra states"][3]


def test_a_full_state_loads_into_other_stages_from_one_rank_or_from_each(ranks):
    for name in ("from one rank", "from each"):
        assert all(torch.equal(p, ranks[0]["state"][key]) for key, p in ranks[0][name].items())
        assert ranks[0][name].keys() == ranks[0]["state"].keys()


def test_a_state_of_another_model_is_refused_on_every_rank_and_nothing_is_loaded(ranks):
    for rank in ranks:
        assert "KeyError" in rank["lacking"] and "found no 2.norm1.weight (1 missing)" in rank["lacking"]
        assert "KeyError" in rank["too many"] and "found also 9.weight (1 too many)" in rank["too many"]
        assert "ValueError: expected 3.head.weight of shape (32, 16), found (1, 16)" in rank["unlike"]
    assert all(torch.equal(p, ranks[0]["state"][name]) for name, p in ranks[0]["unharmed"].items())


def test_the_norm_on_stages_and_tensor_ranks_is_that_of_the_whole_with_its_tied_table_once(ranks):
    with one_rank("cpu"):
        expected = torch.nn.utils.clip_grad_norm_(list(trained_once(gpipe(1, 2)).parameters()), 1.0).item()
    assert [rank["norm"] for rank in ranks] == pytest.approx([expected] * 4, rel=1e-13)
