"""Pipelines that fail: on the rank to blame, before anything wrong is sent, and with nothing left behind."""

import functools
import gc
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memlab.data_parallelism import DataParallel
from memlab.memory_timeline import Meter
from memlab.pipeline_parallelism import (
    Pipeline,
    forward_only,
    gpipe,
    one_forward_one_backward,
    plan_pipeline,
    with_messages,
)
from memlab.pipeline_parallelism.schedule import BACKWARD, FORWARD, Action
from memlab.pipeline_parallelism.stage import StageRun
from memlab.ranks import RankError, Traffic, imagined_ranks, mesh, one_rank, run_ranks

make = functools.partial
SQUARE = make(nn.Linear, 6, 6, bias=False, dtype=torch.float64)
LAYERS = [SQUARE, nn.Tanh, SQUARE, nn.Tanh]
X = torch.arange(48, dtype=torch.float64).view(8, 6) / 48
Y = X.flip(0)


def pipeline_of(layers=LAYERS, schedule=None, loss=F.mse_loss, x=X, parts=None):
    return Pipeline(plan_pipeline(layers, schedule or gpipe(2, 4), x, parts=parts), loss)


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request):
    """One of two imagined ranks."""
    with imagined_ranks(2, rank=request.param):
        yield request.param


@pytest.fixture
def first():
    with imagined_ranks(2, rank=0):
        yield


@pytest.fixture
def last():
    with imagined_ranks(2, rank=1):
        yield


def refused(pipeline, error, match, x=X, y=Y, sent=0, **options):
    """A step that raises before this rank has sent more than so many tensors."""
    with Traffic() as traffic, pytest.raises(error, match=match):
        pipeline.step(x, y, **options)
    assert [message.name for message in traffic.records].count("send") == sent
    assert all(not run.in_flight for run in pipeline.runs.values())


def test_a_missing_batch_is_named(rank):
    name, x, y = [("x on the rank of the first", None, Y), ("y on the rank of the last", X, None)][rank]
    refused(pipeline_of(), ValueError, f"expected {name} stage, found None", x=x, y=y)


@pytest.mark.parametrize(
    "x, found",
    [
        (X.repeat(2, 1), r"\(4, 6\) float64"),
        (X[:, :5], r"\(2, 5\) float64"),
        (X.float(), r"\(2, 6\) float32"),
        (X[:6], "4 micro-batches"),
    ],
)
def test_another_batch_than_planned_is_refused_before_anything_is_sent(first, x, found):
    refused(pipeline_of(), ValueError, found, x=x)


def test_a_batch_that_would_wait_for_a_gradient_is_refused_but_in_evaluation():
    made = nn.Linear(6, 6, dtype=torch.float64)(X)
    with one_rank():
        pipeline = pipeline_of(schedule=gpipe(1, 4))
        for x in (made, list(made.chunk(4))):
            refused(pipeline, ValueError, "expected x that needs no gradient.*; let what makes x be layer 0", x=x)
            assert pipeline.evaluate(x).shape == (8, 6)


def test_labels_of_another_batch_are_refused(last):
    refused(pipeline_of(), ValueError, r"expected y whose micro-batches are 2 rows, as planned, found \(4, 6\)",
            y=Y.repeat(2, 1))  # fmt: skip


class Changing(nn.Module):
    """From the third call on, it returns something else."""

    def __init__(self, other):
        super().__init__()
        self.other, self.calls = other, 0

    def forward(self, x):
        self.calls += 1
        return self.other(x) if self.calls > 2 else x


@pytest.mark.parametrize(
    "other, error, found",
    [
        (lambda x: x[:, :3], ValueError, r"\(2, 3\) float64 with a gradient for micro-batch 2"),
        (lambda x: x.float(), ValueError, r"\(2, 6\) float32 with a gradient for micro-batch 2"),
        (lambda x: x.detach(), ValueError, r"\(2, 6\) float64 for micro-batch 2"),
        (lambda x: (x, x), ValueError, "for micro-batch 2"),
        (lambda x: [x], TypeError, "found list"),
    ],
)
def test_an_output_that_changes_is_refused_before_it_is_sent(first, other, error, found):
    pipeline = pipeline_of([SQUARE, make(Changing, other), SQUARE], parts=[range(2), range(2, 3)])
    refused(pipeline, error, f"expected stage 0 to return .*{found}", sent=2)


def test_autocast_that_the_plan_did_not_know_is_refused(first):
    layers = [make(nn.Linear, 6, 6), make(nn.Linear, 6, 6)]
    pipeline = pipeline_of(layers, x=X.float())
    with torch.autocast("cpu", torch.bfloat16):
        refused(pipeline, ValueError, "stage 0 .* bfloat16 .*under the same autocast", x=X.float())


@pytest.mark.parametrize(
    "loss, error, match",
    [
        (lambda out, y: out - y, TypeError, r"a scalar, found a tensor of \(2, 6\)"),
        (lambda out, y: 0.5, TypeError, "a scalar, found float"),
        (lambda out, y: F.mse_loss(out, y).detach(), ValueError, "depends on a parameter to train"),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_gradient_is_refused(last, loss, error, match):
    refused(pipeline_of(loss=loss), error, match)


def test_a_loss_that_is_no_scalar_is_refused_in_evaluation_as_in_training(last):
    pipeline = pipeline_of(loss=lambda out, y: (F.mse_loss(out, y), out))
    with pytest.raises(TypeError, match="expected loss_fn to return a scalar, found tuple; take its mean"):
        pipeline.evaluate(X, Y)


@pytest.mark.parametrize("number", [0, -5, float("nan"), float("inf"), torch.tensor(0)])
def test_a_number_that_losses_cannot_be_divided_by_is_refused(last, number):
    refused(pipeline_of(), ValueError, f"expected divide_by above 0 and finite.*found {number}", divide_by=number)


def test_a_step_needs_gradients_and_backwards(first):
    with torch.no_grad():
        refused(pipeline_of(), RuntimeError, "call evaluate")
    refused(pipeline_of(schedule=forward_only(2, 4)), RuntimeError, "call evaluate")


def test_a_wrapper_that_would_average_one_micro_batch_only_is_refused():
    with one_rank():
        plan = plan_pipeline(LAYERS, gpipe(1, 4), X)
        with pytest.raises(TypeError, match="found DistributedDataParallel"):
            Pipeline(plan, F.mse_loss, wrap=nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_with_nccl_begins_with_a_talk_of_all_its_ranks(backend, monkeypatch):
    with one_rank(), Traffic() as traffic:
        monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: backend)
        Pipeline(plan_pipeline(LAYERS, gpipe(1, 4), X), F.mse_loss)
    assert [message.name for message in traffic.records] == ["all_reduce"]


def test_another_number_of_ranks_is_refused():
    with imagined_ranks(3), pytest.raises(ValueError, match="expected 2 ranks, as the schedule has, found 3"):
        pipeline_of()


class Planted(Exception):
    pass


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

    plan = plan_pipeline([SQUARE, nn.Tanh, SQUARE], gpipe(1, 4), X)
    plan = plan.__class__(**{**vars(plan), "layers": (*plan.layers, Fails), "parts": (range(4),)})
    torch.manual_seed(0)
    after = lambda action: once() if where == "after" and action.kind == BACKWARD else None  # noqa: E731
    return Pipeline(plan, loss, after=after)


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "after", "interrupt"])
def test_after_an_error_nothing_is_left_and_the_next_step_is_as_ever(where):
    with one_rank():
        torch.manual_seed(0)
        expected = pipeline_of([SQUARE, nn.Tanh, SQUARE], gpipe(1, 4))
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


PLACES = [
    (0, Action(FORWARD, 0, 2)),
    (1, Action(FORWARD, 1, 0)),
    (1, Action(BACKWARD, 1, 1)),
    (0, Action(BACKWARD, 0, 3)),
]


def goes_on(rank, schedule):
    """Gradients of the steps that follow steps in which one rank has raised, once at each place."""
    plan = plan_pipeline(LAYERS, schedule, X, tied=[("0.weight", "2.weight")])
    found = []
    for culprit, place in PLACES:

        def after(action, culprit=culprit, place=place, left=[1]):  # noqa: B006
            if rank == culprit and action == place and left and left.pop():
                raise Planted

        torch.manual_seed(0)
        pipeline = Pipeline(plan, F.mse_loss, after=after)
        try:
            pipeline.step(X, Y)
        except Planted:
            assert rank == culprit
        for p in pipeline.parameters():
            p.grad = None
        loss = pipeline.step(X, Y)
        outputs = pipeline.evaluate(X)
        found.append(({n: p.grad for n, p in pipeline.named_parameters()}, loss, outputs))
    return found


@pytest.mark.parametrize("schedule", [gpipe(2, 4), one_forward_one_backward(2, 4)], ids=lambda s: s.name)
def test_ranks_that_all_go_on_after_one_has_raised_are_in_step(schedule):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in LAYERS])
    model[2].weight = model[0].weight
    total = 0
    for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
        loss = F.mse_loss(model(x), y) / 4
        loss.backward()
        total += loss.detach()
    for first, last in zip(*run_ranks(goes_on, 2, schedule), strict=True):
        assert torch.equal(first[0]["0.weight"], last[0]["2.weight"])
        torch.testing.assert_close(first[0]["0.weight"], model[0].weight.grad, rtol=1e-13, atol=1e-15)
        assert first[1] is None and torch.equal(last[1], total)
        torch.testing.assert_close(last[2], model(X).detach())


def agrees(rank, schedule):
    """Whether all ranks have ended a step, asked by each when its own has: it raises on the last in the 2nd loss."""
    calls = []

    def loss(out, y):
        calls.append(out)
        if len(calls) == 2:
            raise Planted
        return F.mse_loss(out, y)

    pipeline = Pipeline(plan_pipeline(LAYERS, schedule, X, tied=[("0.weight", "2.weight")]), loss)
    found = []
    for _ in range(2):
        well = torch.ones(1)
        try:
            pipeline.step(X, Y)
        except Planted:
            well.zero_()
            pipeline.catch_up()
        torch.distributed.all_reduce(well, torch.distributed.ReduceOp.MIN)
        found.append(well.item())
        pipeline.catch_up()  # nothing is owed
    return found


@pytest.mark.parametrize("schedule", [gpipe(2, 4), one_forward_one_backward(2, 4)], ids=lambda s: s.name)
def test_ranks_may_agree_that_one_has_failed_before_the_next_step(schedule):
    assert run_ranks(agrees, 2, schedule, timeout=20) == [[0, 1], [0, 1]]


class Boom(nn.Module):
    """Fails with real numbers, and not while it is planned."""

    def forward(self, x):
        if type(x) is torch.Tensor:
            raise Planted
        return x


def test_what_a_failed_step_has_made_for_another_stage_of_this_rank_is_let_go():
    schedule = with_messages("one rank", ["F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0"])
    layers = [make(nn.Linear, 4, 1024), Boom]
    with one_rank(), Meter(inputs=(x := torch.randn(8, 4),)) as meter:
        pipeline = pipeline_of(layers, schedule, x=x)
        held = meter.event
        with pytest.raises(Planted):
            pipeline.step(x, x)
        gc.collect()
        assert not pipeline.messages.ready
        now = meter.event
    assert meter.timeline.totals[now] == meter.timeline.totals[held]


def goes_on_beside_replicas(rank, clear):
    """Gradients of two steps, of other rows each, after one that the first replica's last stage did not end."""
    axes = mesh(data=2, pipeline=2)
    data, pipeline = axes.get_group("data"), axes.get_group("pipeline")
    first = axes.get_local_rank("data") == 0

    def loss(out, y):
        if first and fails:
            raise fails.pop()
        return F.mse_loss(out, y)

    torch.manual_seed(0)
    plan = plan_pipeline(LAYERS, one_forward_one_backward(2, 2), X[:4])
    wrapped = Pipeline(plan, loss, group=pipeline, wrap=functools.partial(DataParallel, group=data))
    fails, found = [], []
    for step in range(4):
        if step == 1:
            fails.append(Planted())
        mine = slice(0, 4) if first else slice(4, 8)
        try:
            wrapped.step(X[mine] + step, Y[mine])
        except Planted:
            assert first and step == 1
        if step > 1:
            found.append({n: p.grad.clone() for n, p in wrapped.named_parameters()})
        for p in wrapped.parameters():
            if clear == "None":
                p.grad = None
            else:
                p.grad.zero_()
    return found


@pytest.mark.parametrize("clear", ["None", "zero"])
def test_replicas_stay_in_step_with_one_whose_step_has_raised(clear):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in LAYERS])
    ranks = run_ranks(goes_on_beside_replicas, 4, clear, timeout=20)
    for number, step in enumerate((2, 3)):
        model.zero_grad()
        F.mse_loss(model(X + step), Y).backward()
        for name, p in model.named_parameters():
            found = [rank[number][name] for rank in ranks if name in rank[number]]
            assert len(found) == 2
            for gradient in found:
                torch.testing.assert_close(gradient, p.grad, rtol=1e-13, atol=1e-15)


def goes_on_after_a_refused_batch(rank, bad):
    """The losses of three steps, of other rows each. The first batch lacks what is read on one rank, or on both."""
    plan = plan_pipeline(LAYERS, gpipe(2, 4), X, tied=[("0.weight", "2.weight")])
    torch.manual_seed(0)
    pipeline = Pipeline(plan, F.mse_loss)
    losses = []
    for step in range(3):
        x, y = X + step, Y * step
        try:
            loss = pipeline.step(x[:7] if step == 0 and "x" in bad else x, y[:4] if step == 0 and "y" in bad else y)
        except ValueError:
            loss = None
        losses.append(loss)
    return losses


@pytest.mark.parametrize("bad", ["x", "y", "x and y"])
def test_a_batch_that_one_rank_refuses_does_not_put_it_a_step_ahead(bad):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in LAYERS])
    model[2].weight = model[0].weight
    _, losses = run_ranks(goes_on_after_a_refused_batch, 2, bad, timeout=20)
    for step in (1, 2):
        torch.testing.assert_close(losses[step], F.mse_loss(model(X + step), Y * step).detach())


def ends(rank, how):
    def loss(out, y):
        if how == "raises":
            raise Planted("in the loss")
        if how == "exits":
            os._exit(3)
        raise KeyboardInterrupt

    pipeline_of(schedule=one_forward_one_backward(2, 4), loss=loss).step(X, Y)


@pytest.mark.parametrize(
    "how, said", [("raises", "Planted"), ("exits", "exit code 3"), ("interrupt", "KeyboardInterrupt")]
)
def test_a_rank_that_fails_in_mid_schedule_ends_the_launch_by_name(how, said):
    with pytest.raises(RankError, match=f"rank 1 .*{said}") as error:
        run_ranks(ends, 2, how, timeout=20)
    assert error.value.rank == 1


def test_a_stage_by_itself_says_which_it_is():
    run = StageRun(nn.Linear(6, 6), stage=3, planned=pipeline_wires())
    with pytest.raises(ValueError, match=r"expected stage 3 to return \(2, 6\) float64"):
        run.forward(1, (X[:2].float(),))
    assert not run.in_flight


def pipeline_wires():
    return plan_pipeline(LAYERS, gpipe(2, 4), X).wires[0]
