"""Pipelines that fail: on the rank to blame, before anything wrong is sent, and with nothing left behind."""

import functools
import gc
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memlab import pipeline_parallelism as pp
from memlab.memory_timeline import Meter
from memlab.ranks import Traffic, imagined_ranks, one_rank
from tests.harness import refused

make = functools.partial
SQUARE = make(nn.Linear, 6, 6, bias=False, dtype=torch.float64)
LAYERS = [SQUARE, nn.Tanh, SQUARE, nn.Tanh]
X = torch.arange(48, dtype=torch.float64).view(8, 6) / 48
Y = X.flip(0)


def pipeline_of(layers=LAYERS, schedule=None, loss=F.mse_loss, x=X, parts=None, tied=(), **options):
    return pp.Pipeline(pp.plan_pipeline(layers, schedule or pp.gpipe(2, 4), x, parts=parts, tied=tied), loss, **options)


class Planted(Exception):
    pass


class Changing(nn.Module):
    """From the third call on, it returns something else."""

    def __init__(self, other):
        super().__init__()
        self.other, self.calls = other, 0

    def forward(self, x):
        self.calls += 1
        return self.other(x) if self.calls > 2 else x


class Step(NamedTuple):
    """On which of two ranks, of which pipeline, which step; the error; how many tensors were sent before."""

    rank: int
    pipeline: dict
    options: dict
    error: type[Exception] = ValueError
    sent: int = 0


def changing(other, error=ValueError) -> Step:
    layers = [SQUARE, make(Changing, other), SQUARE]
    return Step(0, {"layers": layers, "parts": [range(2), range(2, 3)]}, {}, error, sent=2)


REFUSED = {
    "expected x on the rank of the first stage, found None": Step(0, {}, {"x": None}),
    "expected y on the rank of the last stage, found None": Step(1, {}, {"y": None}),
    "expected x of (8, 6) float64, as planned, found (16, 6) float64": Step(0, {}, {"x": X.repeat(2, 1)}),
    "4 micro-batches": Step(0, {}, {"x": X[:6]}),
    "expected y of 8 rows, as planned, found (16, 6)": Step(1, {}, {"y": Y.repeat(2, 1)}),
    "expected stage 0 to return …(2, 3) float64 with a gradient for micro-batch 2": changing(lambda x: x[:, :3]),
    "expected stage 0 to return …(2, 6) float64 for micro-batch 2": changing(lambda x: x.detach()),
    "expected stage 0 to return …, (2, 6) float64 with a gradient for micro-batch 2": changing(lambda x: (x, x)),
    "expected stage 0 to return …found list": changing(lambda x: [x], TypeError),
    "a scalar, found a tensor of (2, 6)": Step(1, {"loss": lambda out, y: out - y}, {}, TypeError),
    "depends on a parameter to train": Step(1, {"loss": lambda out, y: F.mse_loss(out, y).detach()}, {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_step_that_cannot_be_is_refused_before_anything_wrong_is_sent(words):
    step = REFUSED[words]
    with imagined_ranks(2, step.rank):
        pipeline = pipeline_of(**step.pipeline)
        with Traffic() as traffic:
            refused(lambda: pipeline.step(**{"x": X, "y": Y} | step.options), step.error, words)
    assert [message.name for message in traffic.records].count("send") == step.sent
    assert all(not run.in_flight for run in pipeline.runs.values())


def test_a_batch_that_would_wait_for_a_gradient_and_a_step_without_gradients_are_refused_but_in_evaluation():
    made = nn.Linear(6, 6, dtype=torch.float64)(X)
    with one_rank():
        pipeline = pipeline_of(schedule=pp.gpipe(1, 4))
        words = "expected x that needs no gradient…; let what makes x be layer 0"
        refused(lambda: pipeline.step(made, Y), ValueError, words)
        assert pipeline.evaluate(made).shape == (8, 6)
        with torch.no_grad():
            refused(lambda: pipeline.step(X, Y), RuntimeError, "call evaluate")
        pipeline = pipeline_of(schedule=pp.gpipe(1, 4), loss=lambda out, y: (F.mse_loss(out, y), out))
        words = "expected loss_fn to return a scalar, found tuple; take its mean"
        refused(lambda: pipeline.evaluate(X, Y), TypeError, words)


def test_autocast_that_the_plan_did_not_know_is_refused():
    with imagined_ranks(2, rank=0):
        pipeline = pipeline_of([make(nn.Linear, 6, 6), make(nn.Linear, 6, 6)], x=X.float())
        with torch.autocast("cpu", torch.bfloat16):
            refused(lambda: pipeline.step(X.float()), ValueError, "stage 0 …bfloat16 …under the same autocast")


def test_a_wrapper_that_would_average_one_micro_batch_only_and_another_number_of_ranks_are_refused():
    with imagined_ranks(3):
        refused(pipeline_of, ValueError, "expected 2 ranks, as the schedule has, found 3")
    with one_rank():
        wrap = nn.parallel.DistributedDataParallel
        refused(lambda: pipeline_of(schedule=pp.gpipe(1, 4), wrap=wrap), TypeError, "found DistributedDataParallel")


def test_a_group_with_nccl_begins_with_a_talk_of_all_its_ranks(monkeypatch):
    with one_rank(), Traffic() as traffic:
        monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl")
        pipeline_of(schedule=pp.gpipe(1, 4))
    assert [message.name for message in traffic.records] == ["all_reduce"]


def failing(where):
    """A pipeline on one rank that raises once, in its third micro-batch, and runs as ever afterwards."""
    calls = {"left": 3}

    def once():
        calls["left"] -= 1
        if calls["left"] == 0:
            raise KeyboardInterrupt if where == "interrupt" else Planted

    class Fails(nn.Module):
        def forward(self, x):
            if where == "backward" and x.requires_grad:
                x.register_hook(lambda gradient: once())
            if where in ("forward", "interrupt"):
                once()
            return x

    def loss(out, y):
        if where == "loss":
            once()
        return F.mse_loss(out, y)

    plan = pp.plan_pipeline([SQUARE, nn.Tanh, SQUARE], pp.gpipe(1, 4), X)
    plan = plan.__class__(**{**vars(plan), "layers": (*plan.layers, Fails), "parts": (range(4),)})
    torch.manual_seed(0)
    return pp.Pipeline(plan, loss)


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "interrupt"])
def test_after_an_error_nothing_is_left_and_the_next_step_is_as_ever(where):
    with one_rank():
        torch.manual_seed(0)
        expected = pipeline_of([SQUARE, nn.Tanh, SQUARE], pp.gpipe(1, 4))
        loss = expected.step(X, Y)
        pipeline = failing(where)
        with Meter(pipeline.modules[0], inputs=(X, Y)) as meter:
            held = meter.event
            with pytest.raises((Planted, KeyboardInterrupt)):
                pipeline.step(X, Y)
            assert not pipeline.runs[0].in_flight
            for p in pipeline.parameters():
                p.grad = None
            gc.collect()
            now = meter.event
            again = pipeline.step(X, Y)
        assert meter.timeline.totals[now] == meter.timeline.totals[held]
        assert torch.equal(again, loss)
        for p, q in zip(pipeline.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


class Boom(nn.Module):
    """Fails with real numbers, and not while it is planned."""

    def forward(self, x):
        if type(x) is torch.Tensor:
            raise Planted
        return x


def test_what_a_failed_step_has_made_for_another_stage_of_this_rank_is_let_go():
    schedule = pp.with_messages("one rank", ["F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0"])
    with one_rank(), Meter(inputs=(x := torch.randn(8, 4),)) as meter:
        pipeline = pipeline_of([make(nn.Linear, 4, 1024), Boom], schedule, x=x)
        held = meter.event
        with pytest.raises(Planted):
            pipeline.step(x, x)
        gc.collect()
        assert not pipeline.messages.ready
        now = meter.event
    assert meter.timeline.totals[now] == meter.timeline.totals[held]


def test_after_a_step_that_raised_among_other_ranks_no_other_can_follow():
    with imagined_ranks(2, rank=0):
        pipeline = pipeline_of([*LAYERS[:3], Boom], parts=[range(1), range(1, 4)])
        refused(lambda: pipeline.step(X[:6]), ValueError, "4 micro-batches")
        for call in (pipeline.step, pipeline.evaluate):
            refused(lambda call=call: call(X), RuntimeError, "one has raised…let the launch end")
