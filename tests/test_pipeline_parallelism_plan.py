"""A pipeline's plan: what it knows; and all that is refused in one process, with words that say what to do."""

from __future__ import annotations

import functools
import itertools
import pickle
import random

import pytest
import torch
from torch import distributed, nn

from memlab import pipeline_parallelism as pp
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import Meter, imagine
from memlab.pipeline_parallelism.__main__ import main
from memlab.pipeline_parallelism.balancing import even_parts
from memlab.pipeline_parallelism.tied import check_tied
from memlab.ranks import Traffic, begin, imagined_ranks, run_ranks
from tests.harness import refusals, refused

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
        found.append(tuple(pp.Wire(tuple(t.shape), t.dtype, t.requires_grad) for t in out))
    return tuple(found)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_wires_are_what_a_real_run_has_at_the_cuts(stages):
    layers = [linear(16, 16), TwoStreams, OneStream]
    made = pp.plan_pipeline(layers, pp.gpipe(stages, 4), X)
    assert made.wires == wires_of_a_run([layer() for layer in layers], made.parts, X[:2])


def test_frozen_layers_send_no_gradients():
    frozen = nn.Linear(16, 16).requires_grad_(False)
    made = pp.plan_pipeline([frozen, *LAYERS], pp.gpipe(5, 2), X)
    assert [wire.gradient for (wire,) in made.wires] == [False, True, True, True]


def test_wires_have_the_dtype_of_the_autocast_under_which_the_plan_is_made():
    with torch.autocast("cpu", torch.bfloat16):
        made = pp.plan_pipeline(LAYERS, pp.gpipe(2, 2), X)
        assert made.wires == wires_of_a_run([layer() for layer in LAYERS], made.parts, X[:4])
    assert made.wires[0][0].dtype == torch.bfloat16


def test_layers_may_be_any_list_of_modules_also_on_meta():
    layers = [nn.Linear(16, 16, device="meta"), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)]
    for kind in (nn.Sequential, lambda *layers: nn.ModuleList(layers), lambda *layers: layers):
        made = pp.plan_pipeline(kind(*layers), pp.gpipe(2, 2), X)
        assert made.layers == tuple(layers) and made.wires == pp.plan_pipeline(LAYERS, pp.gpipe(2, 2), X).wires
    assert layers[0].weight.is_meta
    pp.plan_pipeline([layers[2], nn.Tanh(), layers[2]], pp.gpipe(1, 2), X)  # within one stage a layer may stand twice


def test_a_plan_of_functions_travels_without_weights_and_says_what_it_is():
    big = [linear(16, 4096), linear(4096, 16)]
    made = pp.plan_pipeline(big, pp.gpipe(2, 2), X)
    assert len(pickle.dumps(made)) < 2_000 and pickle.loads(pickle.dumps(made)).wires == made.wires
    assert [one.parameter_bytes for one in made.facts] == [4 * 4096 * 17, 4 * (4096 + 1) * 16]
    assert made.wires[0][0].nbytes == 4 * 4 * 4096 and made.batch == pp.Wire((8, 16), torch.float32, False)
    said = str(made)
    for words in ("stage 0  rank 0  layer 0: Linear", "(4, 4096) float32: 64.0 KiB", "gradients back 64.0 KiB"):
        assert words in said
    assert "2 × Block" in str(pp.plan_pipeline(pp.gpt_layers(4, 8, 2, 4, 8), pp.gpipe(2, 1), torch.zeros(1, 4).long()))


def test_planning_leaves_modules_and_random_numbers_as_they_were():
    shared = {"seen": torch.zeros(3)}

    def note(x):
        shared["seen"].add_(1)
        return x + torch.rand_like(x)

    layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), Counts().eval(), linear(1, 4)]
    layers[0].weight.grad = torch.ones(16, 16)
    layers[0].register_buffer("buffer", torch.ones(2))
    before = pickle.dumps([layer.state_dict() for layer in layers[:4]]), torch.random.get_rng_state()
    grad, times = layers[0].weight.grad, layers[3].times
    pp.plan_pipeline([*layers, functools.partial(Layer, note)], pp.gpipe(3, 1), X)
    assert pickle.dumps([layer.state_dict() for layer in layers[:4]]) == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert layers[0].weight.grad is grad and layers[3].times == times and not layers[3].training and layers[1].training


def test_no_meter_sees_a_plan_and_no_budget_counts_it():
    with imagine("H100-80GB", "1 KiB"), Meter() as meter:
        inside = pp.plan_pipeline(LAYERS, pp.gpipe(2, 2), X)
    assert len(meter.timeline) == 0
    assert inside.wires == pp.plan_pipeline(LAYERS, pp.gpipe(2, 2), X).wires


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
        made = pp.plan_pipeline(
            [*pp.gpt_layers(1, 8, 4, 8, 8, group=group), lambda: Layer(talk)], pp.gpipe(2, 2), t(4, 8).long()
        )
    return made.wires, traffic.sent_bytes


def test_planning_sends_nothing_even_where_layers_talk_to_each_other():
    (wires, sent_bytes), _ = run_ranks(plans_alone, 2)
    assert wires == ((pp.Wire((2, 8, 8), torch.float32, True),),) and sent_bytes == 0


def cuts(layers, stages):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise([0, *ends, layers])]


@pytest.mark.parametrize("layers,stages", [(1, 1), (5, 5), (7, 3), (9, 4), (10, 2)])
@pytest.mark.parametrize("by_stage", [False, True])
def test_no_cut_has_a_cheaper_dearest_stage_or_as_cheap_a_one_and_is_more_even(layers, stages, by_stage):
    draw = random.Random(layers)
    for _ in range(10):
        table = [[draw.choice([0, 1, 2, 3, 7, 50]) for _ in range(layers)] for _ in range(stages)]
        cost = functools.partial(lambda table, layer, stage: table[stage if by_stage else 0][layer], table)
        found = pp.balance(cost, stages, layers) if by_stage else pp.balance(table[0], stages)

        def worth(cut, cost=cost):
            each = [sum(cost(layer, stage) for layer in part) for stage, part in enumerate(cut)]
            return max(each), sum(c * c for c in each), sum(len(part) ** 2 for part in cut)

        assert worth(found) == min(map(worth, cuts(layers, stages)))


def test_equal_layers_are_cut_evenly_and_later_stages_get_the_rest_also_of_fractions():
    for cost in (1, 0.1, 0):
        assert [len(part) for part in pp.balance([cost] * 10, 4)] == [2, 2, 3, 3]
    for layers, stages in itertools.combinations_with_replacement(range(9, 0, -1), 2):
        assert even_parts(layers, stages) == pp.balance([1] * layers, stages)


TOKENS = torch.zeros(4, 8, dtype=torch.int64)
GPT = {"layers": 2, "width": 16, "heads": 4, "context": 8, "vocabulary": 32}
EQUAL = pp.StageCost()
SHAPE = Transformer(layers=4, width=32, heads=4, vocabulary=34, context=12)


class Twice(nn.Module):
    """A layer that has its weight under two names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def plan(layers=LAYERS, schedule=None, x=X, **options):
    return pp.plan_pipeline(layers, schedule or pp.gpipe(2, 2), x, **options)


def returning(function):
    return plan([lambda: Layer(function), *LAYERS])


def shared():
    layer = nn.Linear(16, 16)
    plan([layer, nn.Tanh(), layer])


def shared_buffers():
    norm = nn.BatchNorm1d(16, affine=False)
    plan([nn.Linear(16, 16), norm, norm, nn.Linear(16, 4)])


def gpt(x=TOKENS, stages=2, **sizes):
    return plan(pp.gpt_layers(**GPT | sizes), pp.gpipe(stages, 1), x)


def split_gpt(x=TOKENS, **sizes):
    with imagined_ranks(4):
        return gpt(x, 1, group=distributed.group.WORLD, **sizes)


def other_group():
    with imagined_ranks(2):
        layers = pp.gpt_layers(**GPT, group=distributed.group.WORLD)
    plan(layers, x=TOKENS)


def tied(*names):
    check_tied([nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False)], [names])


def ordered(*texts):
    return pp.with_messages("", texts)


def shares(**options):
    return pp.stage_shares(SHAPE, 8, 12, **options)


def order(*axes):
    return pp.axis_seconds(pp.ways(4, SHAPE, 8, 12)[0], axes)


SAID = {  # what is said → the call
    # a plan
    "at most 4 stages for 4 layers": lambda: plan(schedule=pp.gpipe(5, 2)),
    "3 micro-batches divide, found 8 rows": lambda: plan(schedule=pp.gpipe(2, 3)),
    "at least one row, (batch, …), found shape (0, 16)": lambda: plan(x=X[:0]),
    "expected a tensor (batch, …), found dict": (lambda: plan(x={"x": X}), TypeError),
    "expected 2 parts": lambda: plan(parts=[range(4)]),
    "found none on stage 1": lambda: plan(parts=[range(4), range(0)]),
    "layers 0 to 3 in order, each once": lambda: plan(parts=[range(1), range(2, 4)]),
    "list of layers, found one Linear": (lambda: plan(nn.Linear(16, 4)), TypeError),
    "layer 4 to make a module": (lambda: plan([*LAYERS, dict]), TypeError),
    "expected a Schedule": (lambda: plan(schedule="GPipe"), TypeError),
    "say its sizes": lambda: plan([*LAYERS, nn.LazyLinear(3)]),
    "layer 4 (Linear) of stage 1 cannot take (4, 4) float32 from layer 3": lambda: plan([*LAYERS, linear(5, 5)]),
    "tuple of tensors, found dict": lambda: returning(lambda x: {"x": x}),
    "found a tuple of 1": lambda: returning(lambda x: (x,)),
    "do not depend on values…layer 0": lambda: returning(lambda x: x[x > 0]),
    "stage 1 to return one shape…(4, 2)…(4, 1)": lambda: plan([*LAYERS, Counts]),
    "parameters to train, found none": lambda: plan([nn.Tanh, nn.Tanh]),
    "found '1.weight'": lambda: plan(tied=[("0.weight", "1.weight")]),
    "(16, 16) torch.float32 trained, found (4, 16)…alike": lambda: plan(tied=[("0.weight", "3.weight")]),
    "found '0.weight' of stage 0 to be '2.weight' of stage 1…say tied=[('0.weight', '2.weight')]": shared,
    "at least one layer, found none": lambda: plan([], pp.gpipe(1, 1)),
    "process group": (other_group, (RuntimeError, ValueError)),
    # of a GPT
    "3 heads cannot share a width of 16": lambda: gpt(heads=3),
    "at most 8 tokens (the context), found 9": lambda: gpt(torch.zeros(4, 9, dtype=torch.int64)),
    "at least one text of at least one token": lambda: gpt(torch.zeros(2, 0, dtype=torch.int64)),
    "6 tokens cannot be split over 4 ranks": lambda: split_gpt(TOKENS[:, :6], sequence_parallel=True),
    # ties
    "found '1.bias'; layer 1 has 1.weight": lambda: tied("0.weight", "1.bias"),
    "expected 1.weight as 0.weight, which it is tied to, (3, 2) …, found (4, 3)": lambda: tied("0.weight", "1.weight"),
    "'1.b.weight' is a parameter of (0.weight, 1.a.weight), too; make one group": lambda: plan(
        [linear(16, 16), Twice, linear(16, 16)],
        pp.gpipe(3, 1),
        tied=[("0.weight", "1.a.weight"), ("1.b.weight", "2.weight")],
    ),
    # schedules
    "expected stages of at least 1, found 0": lambda: pp.gpipe(0, 2),
    "expected chunks of at least 1": lambda: pp.interleaved(2, 0, 4),
    "expected stages as an int, found True": (lambda: pp.gpipe(True, 2), TypeError),
    "expected B0 of stage 0 on rank 0, found none": lambda: plan(schedule=ordered("F0", "F0")),
    "found '1.running_mean' of stage 0 to be '2.running_mean' of stage 1": shared_buffers,
    "micro-batches that 4 ranks divide, found 6; pick 8": lambda: pp.interleaved(4, 2, 6),
    "expected B0 of stage 1 on rank 1, found none; put it in": lambda: ordered("F0 B0", "F0"),
    "expected F1 of stage 0 on rank 0, found none": lambda: ordered("F0 F2 B0 B2"),
    "each computation once, found F0 of stage 0 twice on rank 0": lambda: ordered("F0 B0 F0", "F0 B0"),
    "expected stage 0 on one rank, found F0 of stage 0 on rank 1 and others on rank 0": lambda: ordered(
        "F0 B0", "F0@0 F0 B0"
    ),
    "stages 0 to 2, found stage 1 on no rank": lambda: ordered("F0 B0", "F0@2 B0@2"),
    "a stage on each of 2 ranks, found stages on ranks [0]": lambda: ordered("F0 B0", ""),
    "rank 0 waits with B0 of stage 0 for B0 of stage 1; rank 1 waits with F1": lambda: ordered(
        "F0 B0 F1 B1", "F0 F1 B0 B1"
    ),
    "forwards and backwards only, found send F0 of stage 0 on rank 0; take it out": (
        lambda: pp.with_messages("", [[pp.Action("send activation", 0, 0)]])
    ),
    **{
        f"expected F or B and a micro-batch, as in F0 or B3@2, found '{word}": (
            lambda word=word: pp.with_messages("", [f"F0 {word} B0"])
        )
        for word in ("F-1", "F0,B0")
    },
    **{
        f"expected a stage on each of {lists} ranks, found stages on ranks {list(at)}": (
            lambda at=at, lists=lists: pp.Schedule("", 1, at, ((),) * lists)
        )
        for at, lists in (((0, 2), 2), ((0, 0), 2), ((), 0))
    },
    # costs and closed forms
    "found -2": lambda: pp.balance([1, -2], 1),
    "1 to 2 stages for 2 layers, found 3": lambda: pp.balance([1, 2], 3),
    "layers=": lambda: pp.balance(lambda layer, stage: 1, 2),
    "expected a cost for each of 3 stages, found 2": lambda: pp.simulate(pp.gpipe(3, 2), [pp.StageCost()] * 2),
    "saved_bytes of at least 0, found -1": lambda: pp.StageCost(saved_bytes=-1),
    "forward_seconds of at least 0, found nan": lambda: pp.StageCost(float("nan")),
    "of at least 0 and link_bytes_per_second above 0, found -1": lambda: pp.simulate(pp.gpipe(2, 2), EQUAL, -1.0),
    "'GPipe', '1F1B', 'interleaved 1F1B'; found 'gpipe'": lambda: pp.in_flight("gpipe", 0, 2, 2),
    "a stage from 0 to 3, found 4": lambda: pp.in_flight("1F1B", 4, 4, 2),
    "stages that 3 chunks divide, found 4": lambda: pp.in_flight("interleaved 1F1B", 0, 4, 4, chunks=3),
    # three axes
    "8 texts cannot be split over 3 data ranks": lambda: shares(data=3),
    "16 micro-batches each": lambda: shares(micro_batches=16),
    "1 to 6 stages": lambda: shares(pipeline=7),
    "pipeline of at least 1": lambda: shares(pipeline=0),
    "2F2B": lambda: shares(schedule="2F2B"),
    "expected 2 parts, one for each stage, found 1": lambda: shares(pipeline=2, parts=[range(6)]),
    "texts_at_once of at least 1, found 0": lambda: pp.ways(8, SHAPE, 8, 12, texts_at_once=0),
    "each of data, pipeline, tensor once, found data, tensor": lambda: order("data", "tensor"),
}


def cases(table: dict) -> dict:
    """By what is said, which names the case, too."""
    pairs = {words: value if isinstance(value, tuple) else (value, ValueError) for words, value in table.items()}
    return {words: (call, error, words) for words, (call, error) in pairs.items()}


@refusals(cases(SAID))
def test_it_is_refused_and_the_error_says_what_to_do(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize(("name", "peer"), [("receive", 2), ("Send", 1)])
def test_a_message_to_nobody_is_refused_before_anything_is_sent(name, peer):
    with imagined_ranks(2), Traffic() as traffic, pytest.raises(ValueError, match="a rank of the group, 0 to 1"):
        begin([("send", torch.zeros(3), 1), (name, torch.zeros(3), peer)])
    assert not traffic.records


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--ranks 0", "expected at least one rank, found 0"),
        ("--steps 0", "expected at least one step, found 0"),
        ("--micro-batches 0", "expected micro_batches of at least 1, found 0"),
        ("--schedule interleaved --ranks 3", "expected micro-batches that 3 ranks divide, found 8"),
        ("--schedule interleaved --ranks 8", "expected at most 8 stages, a layer each, found 16"),
        ("--micro-batches 3", "expected --micro-batches that divide 16 texts, found 3"),
    ],
)
def test_the_example_refuses_numbers_that_do_not_go_together(wrong, words, capsys):
    with pytest.raises(SystemExit):
        main(wrong.split())
    assert words in " ".join(capsys.readouterr().err.split())
