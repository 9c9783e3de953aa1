"""A pipeline's plan: it knows what stages send, leaves no trace, and refuses in one process what ranks could not do."""

from __future__ import annotations

import doctest
import functools
import itertools
import pickle
import random

import numpy
import pytest
import torch
from torch import distributed, nn

from memlab.memory_timeline import Meter, imagine
from memlab.pipeline_parallelism import (
    Wire,
    balance,
    balancing,
    forward_only,
    gpipe,
    gpt_layers,
    plan,
    plan_pipeline,
)
from memlab.pipeline_parallelism.balancing import even_parts
from memlab.pipeline_parallelism.plan import split_batch
from memlab.ranks import Traffic, imagined_ranks, run_ranks

linear = functools.partial(functools.partial, nn.Linear)
LAYERS = [linear(16, 16), nn.Tanh, linear(16, 16), linear(16, 4)]
X = torch.zeros(8, 16)


class Layer(nn.Module):
    """A layer whose forward is this function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Counts(nn.Module):
    """Returns one column more each time."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def forward(self, x):
        self.times += 1
        return x[:, : self.times]


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(16, 8)

    def forward(self, x):
        return self.inside(x), x.argmax(1)


class OneStream(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 2)

    def forward(self, streams):
        stream, rows = streams
        return self.inside(stream) + rows[:, None]


def wires_of_a_run(layers, parts, x):
    """What really crosses the cuts, in one process with one graph."""
    found = []
    for part in parts[:-1]:
        for number in part:
            x = layers[number](x)
        out = x if isinstance(x, tuple) else (x,)
        found.append(tuple(Wire(tuple(t.shape), t.dtype, t.requires_grad) for t in out))
    return tuple(found)


# ---- what a plan knows


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_wires_are_what_a_real_run_has_at_the_cuts(stages):
    layers = [linear(16, 16), TwoStreams, OneStream]
    made = plan_pipeline(layers, gpipe(stages, 4), X)
    assert made.wires == wires_of_a_run([layer() for layer in layers], made.parts, X[:2])


def test_frozen_layers_send_no_gradients_and_neither_does_an_evaluation():
    frozen = nn.Linear(16, 16).requires_grad_(False)
    made = plan_pipeline([frozen, *LAYERS], gpipe(5, 2), X)
    assert [wire.gradient for (wire,) in made.wires] == [False, True, True, True]
    assert not any(wire.gradient for (wire,) in plan_pipeline(LAYERS, forward_only(4, 2), X).wires)


def test_wires_have_the_dtype_of_the_autocast_under_which_the_plan_is_made():
    with torch.autocast("cpu", torch.bfloat16):
        made = plan_pipeline(LAYERS, gpipe(2, 2), X)
        assert made.wires == wires_of_a_run([layer() for layer in LAYERS], made.parts, X[:4])
    assert made.wires[0][0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [nn.Sequential, lambda *layers: nn.ModuleList(layers), lambda *layers: layers])
def test_layers_may_be_any_list_of_modules(kind):
    made = plan_pipeline(kind(*[layer() for layer in LAYERS]), gpipe(2, 2), X)
    assert [type(layer) for layer in made.layers] == [nn.Linear, nn.Tanh, nn.Linear, nn.Linear]


def test_a_plan_of_functions_travels_without_weights_and_says_what_it_is():
    big = [linear(16, 4096), linear(4096, 16)]
    made = plan_pipeline(big, gpipe(2, 2), X)
    assert len(pickle.dumps(made)) < 2_000 and pickle.loads(pickle.dumps(made)).wires == made.wires
    assert [one.parameter_bytes for one in made.facts] == [4 * 4096 * 17, 4 * (4096 + 1) * 16]
    assert made.wire_bytes(0) == 4 * 4 * 4096 and made.batch == Wire((8, 16), torch.float32, False)
    said = str(made)
    for words in ("stage 0  rank 0  layer 0: Linear", "(4, 4096) float32: 64.0 KiB", "gradients back 64.0 KiB"):
        assert words in said
    assert "2 × Block" in str(plan_pipeline(gpt_layers(4, 8, 2, 4, 8), gpipe(2, 1), torch.zeros(1, 4).long()))


def test_ties_are_named_and_may_lie_within_a_stage():
    made = plan_pipeline(LAYERS, gpipe(2, 2), X, tied=[("0.weight", "2.weight")], parts=[range(3), range(3, 4)])
    assert made.tied == (("0.weight", "2.weight"),) and "0.weight = 2.weight, on stage 0" in str(made)


def test_micro_batches_may_come_as_a_list():
    parts = [torch.zeros(2, 16) for _ in range(4)]
    assert plan_pipeline(LAYERS, gpipe(2, 4), parts).wires == plan_pipeline(LAYERS, gpipe(2, 4), X).wires
    assert all(a is b for a, b in zip(split_batch(parts, 4), parts, strict=True))


# ---- what a plan leaves behind


def test_planning_leaves_modules_and_random_numbers_as_they_were():
    shared = {"seen": torch.zeros(3)}

    def note(x):
        shared["seen"].add_(1)
        random.random(), numpy.random.random()  # noqa: NPY002 the state of all is meant
        return x + torch.rand_like(x)

    layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), Counts().eval(), linear(1, 4)]
    layers[0].weight.grad = torch.ones(16, 16)
    layers[0].register_buffer("buffer", torch.ones(2))
    of_numpy = lambda: pickle.dumps(numpy.random.get_state())  # noqa: E731, NPY002
    before = pickle.dumps([layer.state_dict() for layer in layers[:4]]), torch.random.get_rng_state()
    others = random.getstate(), of_numpy()
    grad, times = layers[0].weight.grad, layers[3].times
    plan_pipeline([*layers, functools.partial(Layer, note)], gpipe(3, 1), X)
    assert pickle.dumps([layer.state_dict() for layer in layers[:4]]) == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert others == (random.getstate(), of_numpy())
    assert layers[0].weight.grad is grad and layers[3].times == times and not layers[3].training and layers[1].training


def test_modules_on_meta_are_planned_as_those_in_memory():
    layers = [nn.Linear(16, 16, device="meta"), nn.ReLU(inplace=True), nn.Linear(16, 4)]
    assert (
        plan_pipeline(layers, gpipe(2, 2), X).wires
        == plan_pipeline(LAYERS, gpipe(2, 2), X, parts=[range(1), range(1, 4)]).wires
    )
    assert layers[0].weight.is_meta


def test_no_meter_sees_a_plan_and_no_budget_counts_it():
    with imagine("H100-80GB", "1 KiB"), Meter() as meter:
        inside = plan_pipeline(LAYERS, gpipe(2, 2), X)
    assert len(meter.timeline) == 0
    assert inside.wires == plan_pipeline(LAYERS, gpipe(2, 2), X).wires


def test_a_module_imagined_on_a_card_is_planned_like_a_real_one():
    with imagine("H100-80GB") as gpu, imagined_ranks(4, rank=1):
        group = torch.distributed.group.WORLD
        layers = [make() for make in gpt_layers(2, 8, 4, 8, 8, group=group)]
        x = torch.zeros(4, 8, dtype=torch.int64)
        made = plan_pipeline(layers, gpipe(2, 2), x)
        assert made.wires == ((Wire((2, 8, 8), torch.float32, True),),)
        assert gpu.capacity_bytes and layers[0].group is group


def plans_alone(rank):
    """Rank 0 plans layers that talk, the other one does not."""
    if rank:
        return None
    group, t = distributed.group.WORLD, torch.zeros

    def talk(x):
        distributed.recv(t(4), 1)
        distributed.all_reduce(t(4), async_op=True).wait()
        distributed.all_gather([t(4), t(4)], t(4))
        distributed.broadcast(t(4), 1)
        distributed.barrier()
        return x

    with Traffic() as traffic:
        made = plan_pipeline(
            [*gpt_layers(1, 8, 4, 8, 8, group=group), lambda: Layer(talk)], gpipe(2, 2), t(4, 8).long()
        )
    return made.wires, traffic.sent_bytes


def test_planning_sends_nothing_even_where_layers_talk_to_each_other():
    (wires, sent_bytes), _ = run_ranks(plans_alone, 2)
    assert wires == ((Wire((2, 8, 8), torch.float32, True),),) and sent_bytes == 0


# ---- what a plan refuses

REFUSED = {
    "more stages than layers": ({"schedule": gpipe(5, 2)}, "at most 4 stages for 4 layers"),
    "a batch that does not divide": ({"schedule": gpipe(2, 3)}, "3 micro-batches divide, found 8 rows"),
    "no rows": ({"x": X[:0]}, "at least one row"),
    "a scalar": ({"x": torch.tensor(1.0)}, "at least one row"),
    "no tensor": ({"x": {"x": X}}, "list of micro-batches, found dict"),
    "too few micro-batches": ({"x": [X]}, "list of 2 micro-batches, found 1"),
    "too few parts": ({"parts": [range(4)]}, "expected 2 parts"),
    "an empty part": ({"parts": [range(4), range(0)]}, "found none on stage 1"),
    "a gap": ({"parts": [range(1), range(2, 4)]}, "layers 0 to 3 in order"),
    "parts twice": ({"parts": [range(3), range(2, 4)]}, "layers 0 to 3 in order"),
    "no list": ({"layers": nn.Linear(16, 4)}, "list of layers, found one Linear"),
    "no layer": ({"layers": [*LAYERS, 3]}, "layer 4 to be a module"),
    "a function of no module": ({"layers": [*LAYERS, dict]}, "layer 4 to make a module"),
    "no schedule": ({"schedule": "GPipe"}, "expected a Schedule"),
    "lazy": ({"layers": [*LAYERS, nn.LazyLinear(3)]}, "say its sizes"),
    "a size too many": (
        {"layers": [*LAYERS, linear(5, 5)]},
        r"layer 4 \(Linear\) of stage 1 cannot take \(4, 4\) float32 from layer 3 \(Linear\) of stage 1",
    ),
    "a dict": ({"layers": [lambda: Layer(lambda x: {"x": x}), *LAYERS]}, "tuple of tensors, found dict"),
    "a tuple with None": ({"layers": [lambda: Layer(lambda x: (x, None)), *LAYERS]}, "found .*NoneType"),
    "a tuple of one": ({"layers": [lambda: Layer(lambda x: (x,)), *LAYERS]}, "found a tuple of 1"),
    "sparse": ({"layers": [*LAYERS, lambda: Layer(lambda x: x.to_sparse())]}, "dense tensors|depend on values"),
    "a mask": ({"layers": [*LAYERS, lambda: Layer(lambda x: x[x > 0])]}, "do not depend on values.*layer 4"),
    "an item": ({"layers": [*LAYERS, lambda: Layer(lambda x: x[: int(x.sum())])]}, "do not depend on values"),
    "a shape by a counter": ({"layers": [Counts(), linear(1, 4), *LAYERS]}, "cannot take"),
    "an output by a counter": ({"layers": [*LAYERS, Counts]}, r"stage 1 to return one shape.*\(4, 2\).*\(4, 1\)"),
    "micro-batches of other lengths": ({"x": [X[:4], X[:3]]}, "stage 0 to return one shape"),
    "nothing to train": ({"layers": [nn.Tanh, nn.Tanh]}, "parameters to train, found none"),
    "a tie with nobody": ({"tied": [("0.weight", "1.weight")]}, "'1.weight'"),
    "a tie outside": ({"tied": [("0.weight", "9.weight")]}, "'9.weight'"),
    "a tie of other shapes": ({"tied": [("0.weight", "3.weight")]}, "alike"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_one_process(case):
    options, words = REFUSED[case]
    options = {"layers": LAYERS, "schedule": gpipe(2, 2), "x": X} | options
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        plan_pipeline(**options)


def test_a_parameter_on_two_stages_is_refused_and_told_how_to_tie_it():
    layer, other = nn.Linear(16, 16), nn.Linear(16, 16)
    other.weight = layer.weight
    for layers in ([layer, nn.Tanh(), layer], [layer, nn.Tanh(), other], [lambda: layer, nn.Tanh, lambda: other]):
        with pytest.raises(ValueError, match=r"tied=\[\('0.weight', '2.weight'\)\]"):
            plan_pipeline(layers, gpipe(2, 2), X)
        plan_pipeline(layers, gpipe(1, 2), X)


def test_layers_of_a_group_that_is_not_there_are_refused_as_they_say_it():
    with imagined_ranks(2):
        layers = gpt_layers(1, 8, 4, 8, 8, group=distributed.group.WORLD)
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        plan_pipeline(layers, gpipe(2, 2), torch.zeros(4, 8, dtype=torch.int64))


# ---- balance


def cuts(layers, stages):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise([0, *ends, layers])]


@pytest.mark.parametrize("layers,stages", [(1, 1), (5, 5), (7, 3), (9, 4), (10, 2)])
@pytest.mark.parametrize("by_stage", [False, True])
def test_no_cut_has_a_cheaper_dearest_stage_or_as_cheap_a_one_and_is_more_even(layers, stages, by_stage):
    draw = random.Random(layers)
    for _ in range(20):
        table = [[draw.choice([0, 1, 2, 3, 7, 50]) for _ in range(layers)] for _ in range(stages)]
        cost = functools.partial(lambda table, layer, stage: table[stage if by_stage else 0][layer], table)
        found = balance(cost, stages, layers) if by_stage else balance(table[0], stages)

        def worth(cut, cost=cost):
            each = [sum(cost(layer, stage) for layer in part) for stage, part in enumerate(cut)]
            return max(each), sum(c * c for c in each), sum(len(part) ** 2 for part in cut)

        assert worth(found) == min(map(worth, cuts(layers, stages)))


def test_equal_layers_are_cut_evenly_and_later_stages_get_the_rest_also_of_fractions():
    assert [len(part) for part in balance([1] * 10, 4)] == [2, 2, 3, 3]
    assert [len(part) for part in balance([0.1] * 10, 4)] == [2, 2, 3, 3]
    assert [len(part) for part in balance([0] * 10, 4)] == [2, 2, 3, 3]
    for layers, stages in itertools.combinations_with_replacement(range(9, 0, -1), 2):
        assert even_parts(layers, stages) == balance([1] * layers, stages)


@pytest.mark.parametrize(
    "costs,stages,words",
    [
        ([1, 2], 3, "1 to 2 stages"),
        ([1, 2], 0, "1 to 2 stages"),
        ([1, -2], 1, "found -2"),
        ([1, float("nan")], 1, "nan"),
    ],
)
def test_costs_that_are_none_and_stages_without_layers_are_refused(costs, stages, words):
    with pytest.raises(ValueError, match=words):
        balance(costs, stages)
    with pytest.raises(ValueError, match="layers="):
        balance(lambda layer, stage: 1, 2)


@pytest.mark.parametrize("page", [plan, balancing])
def test_examples_in_the_pages_are_true(page):
    assert doctest.testmod(page).failed == 0


def test_a_plan_from_a_list_of_micro_batches_knows_the_batch_that_it_makes():
    layers, whole = [nn.Linear(4, 4), nn.Tanh()], torch.zeros(6, 4)
    assert plan_pipeline(layers, gpipe(2, 3), list(whole.split(2))) == plan_pipeline(layers, gpipe(2, 3), whole)


def test_a_plan_wants_a_layer():
    with pytest.raises(ValueError, match="at least one layer, found none"):
        plan_pipeline([], gpipe(1, 1), torch.zeros(2, 2))
