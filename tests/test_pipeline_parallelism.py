"""Pipelines on real ranks beside one process that accumulates the same micro-batches, whatever crosses a cut."""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F

from memlab import pipeline_parallelism as pp
from memlab.data_parallelism import DataParallel
from memlab.memory_timeline import Meter
from memlab.pipeline_parallelism.schedule import COMPUTATIONS
from memlab.pipeline_parallelism.stage import StageRun
from memlab.ranks import imagined_ranks, one_rank, run_ranks

make = functools.partial
STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the ranks have: how many there are decides the order of sums, and so the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def linear(inputs, outputs, dtype=torch.float64, frozen=False):
    return nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(not frozen)


class PassOn(nn.Module):
    """Computes with the first tensor, and hands the others on as they are."""

    def __init__(self):
        super().__init__()
        self.inner = linear(6, 6)

    def forward(self, streams):
        first, *others = streams
        return self.inner(first), *others


class Do(nn.Module):
    """A layer that computes this."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


Fork, Join = make(Do, lambda x: (torch.tanh(x), x)), make(Do, sum)
Twice = make(Do, lambda x: (x, torch.arange(len(x)), x))  # one tensor twice, with numbers that need no gradient
Untwice = make(Do, lambda streams: streams[0] * streams[1][:, None] + 2 * streams[2])
First = make(Do, lambda streams: streams[0])  # what else has arrived gets no gradient
Turned = make(Do, lambda x: x.T[:4])  # not contiguous, and a part of what it is a view of
Back = make(Do, lambda x: x.T)


class Case(NamedTuple):
    """What is trained, on how many of three ranks."""

    layers: list
    schedule: object
    parts: list | None = None
    loss: object = F.mse_loss
    rows: int = 8
    checkpointed: bool = False
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    wrap: object = None


SKIP = [make(linear, 4, 6), Fork, PassOn, Join, make(linear, 6, 3)]
PLAIN = [make(linear, 4, 6), nn.Tanh, make(linear, 6, 6), nn.GELU, make(linear, 6, 6), make(linear, 6, 3)]
THREE = [range(2), range(2, 3), range(3, 5)]
WRITES = [make(linear, 4, 6), make(nn.ReLU, inplace=True), make(linear, 6, 3)]
SMALL = [make(linear, 4, 6, torch.float32), nn.Tanh, make(linear, 6, 3, torch.float32)]


def one_f_one_b(stages):
    return pp.one_forward_one_backward(stages, 4)


CASES = {
    "GPipe": Case(PLAIN, pp.gpipe(2, 4)),
    "1F1B": Case(PLAIN, one_f_one_b(3)),
    "three micro-batches": Case(PLAIN, pp.one_forward_one_backward(2, 3), rows=9),
    "interleaved": Case(PLAIN, pp.interleaved(2, 2, 4)),
    "a skip connection": Case(SKIP, one_f_one_b(3), THREE),
    "a skip connection, checkpointed": Case(SKIP, one_f_one_b(3), THREE, checkpointed=True),
    "twice, and integers": Case([make(linear, 4, 6), Twice, Untwice, make(linear, 6, 3)], one_f_one_b(2)),
    "not used": Case([*SKIP[:3], First, SKIP[4]], one_f_one_b(3), THREE),
    "a view": Case([make(linear, 4, 6), Turned, Back, make(linear, 4, 3)], one_f_one_b(2)),
    "frozen so far": Case([make(linear, 4, 6, frozen=True), nn.Tanh, *PLAIN[2:]], one_f_one_b(2)),
    "frozen in the middle": Case(
        [PLAIN[0], nn.Tanh, make(linear, 6, 6, frozen=True), nn.Tanh, PLAIN[5]],
        one_f_one_b(3),
        [range(2), range(2, 4), range(4, 5)],
    ),
    "written to in place": Case(WRITES, one_f_one_b(2), [range(1), range(1, 3)]),
    "BatchNorm, checkpointed": Case(
        [PLAIN[0], make(nn.BatchNorm1d, 6, dtype=torch.float64), *PLAIN[2:]], one_f_one_b(2), checkpointed=True
    ),
    "dropout, checkpointed": Case([PLAIN[0], make(nn.Dropout, 0.5), *PLAIN[2:]], one_f_one_b(2), checkpointed=True),
    "BF16": Case([make(linear, 4, 6, torch.bfloat16), nn.Tanh, make(linear, 6, 3, torch.bfloat16)], one_f_one_b(2),
                 dtype=torch.bfloat16),
    "autocast, checkpointed": Case(SMALL, one_f_one_b(2), dtype=torch.float32, autocast=True, checkpointed=True),
    "data parallel": Case(PLAIN, one_f_one_b(2), wrap=DataParallel),
    "data parallel, interleaved": Case(PLAIN, pp.interleaved(2, 2, 4), wrap=DataParallel),
}  # fmt: skip


def batch_of(case, step):
    made = torch.Generator().manual_seed(step)
    x = torch.randn(case.rows, 4, generator=made, dtype=torch.float64).to(case.dtype)
    return x, torch.randn(case.rows, 3, generator=made, dtype=torch.float64).to(case.dtype)


def mixed(case):
    return torch.autocast("cpu", torch.bfloat16, enabled=case.autocast)


def plan_of(case):
    with mixed(case):
        return pp.plan_pipeline(case.layers, case.schedule, batch_of(case, 0)[0], parts=case.parts)


def one_process(case):
    """Gradients after two steps without zero_grad, the second one's loss and the buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in case.layers])
    torch.manual_seed(1)
    m = case.schedule.micro_batches
    for step in range(STEPS):
        x, y = batch_of(case, step)
        loss = 0
        for x_i, y_i in zip(x.chunk(m), y.chunk(m), strict=True):
            with mixed(case):
                part = case.loss(model(x_i), y_i) / m
            part.backward()
            loss = loss + part.detach()
    return {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers()), loss


def in_stages(case, group):
    torch.manual_seed(0)
    alone = distributed.new_group([distributed.get_rank()], use_local_synchronization=True) if case.wrap else None
    wrap = case.wrap and (lambda stage: case.wrap(stage, group=alone))
    pipeline = pp.Pipeline(plan_of(case), case.loss, group=group, checkpointed=case.checkpointed, wrap=wrap)
    torch.manual_seed(1)
    for step in range(STEPS):
        with mixed(case):
            loss = pipeline.step(*batch_of(case, step))
    modules = [getattr(module, "module", module) for module in pipeline.modules.values()]
    gradients = {n: p.grad for n, p in pipeline.named_parameters()}
    left = [len(run.in_flight) for run in pipeline.runs.values()]
    left += [len(pipeline.messages.ready), len(pipeline.messages.arriving), len(pipeline.messages.leaving)]
    return gradients, {n: b for module in modules for n, b in module.named_buffers()}, loss, sum(left)


def evaluated(rank, group, loss_fn=F.mse_loss):
    """Outputs and loss of a pipeline with dropout, before and after; modes as they were."""
    layers = [PLAIN[0], make(nn.Dropout, 0.5), *PLAIN[2:]]
    case = Case(layers, pp.interleaved(2, 2, 4))
    torch.manual_seed(0)
    pipeline = pp.Pipeline(plan_of(case), loss_fn, group=group)
    frozen = next(iter(pipeline.modules.values())).eval()
    x, y = batch_of(case, 0)
    found = pipeline.evaluate(x), pipeline.evaluate(x, y)
    modes = [module.training for module in pipeline.modules.values()]
    assert not frozen.training and modes == [False, True]
    assert all(p.grad is None for p in pipeline.parameters())
    return found


def facts(rank):
    torch.set_num_threads(1)
    groups = {n: distributed.new_group(list(range(n))) for n in (2, 3)}
    found = {}
    for name, case in CASES.items():
        if rank < case.schedule.ranks:
            found[name] = in_stages(case, groups[case.schedule.ranks])
    return found, evaluated(rank, groups[2]) if rank < 2 else None


@pytest.fixture(scope="module")
def found():
    return run_ranks(facts, 3)


@pytest.mark.parametrize("name", CASES)
def test_gradients_losses_and_buffers_are_one_process_s_to_the_bit(found, name):
    case = CASES[name]
    gradients, buffers, loss = one_process(case)
    ranks = [result[name] for result, _ in found[: case.schedule.ranks]]
    together = {n: g for own, _, _, _ in ranks for n, g in own.items()}
    if name == "not used":  # in one process it has no gradient; what is sent back is one of zeros
        assert all(torch.equal(together[n], g) for n, g in gradients.items() if g is not None)
    else:  # a view is sent contiguous: not every CPU's kernels add it in the order of its strides
        tolerance = 1e-13 if name == "a view" else 0
        torch.testing.assert_close(together, gradients, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close({n: b for _, own, _, _ in ranks for n, b in own.items()}, buffers, rtol=0, atol=0)
    last = case.schedule.ranks_of_stages[-1]
    assert [r for r, (_, _, own, _) in enumerate(ranks) if own is not None] == [last]
    torch.testing.assert_close(ranks[last][2], loss)
    assert [left for _, _, _, left in ranks] == [0] * len(ranks)


def test_evaluation_is_the_whole_model_s_without_dropout(found):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in PLAIN])
    del model[1]
    x, y = batch_of(CASES["GPipe"], 0)
    (nothing, neither), (outputs, loss) = found[0][1], found[1][1]
    assert nothing is None and neither is None
    torch.testing.assert_close(outputs, model(x).detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(loss, F.mse_loss(model(x), y).detach())
    assert not outputs.requires_grad


class Merging(nn.Linear):
    """Merges twice its input into what it computes, but only in eval mode."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) + 2 * self.merged * x


def test_evaluation_calls_what_layers_do_when_their_mode_changes_and_undoes_it():
    square = {"in_features": 4, "out_features": 4, "dtype": torch.float64}
    layers, x = [Merging(**square), nn.Sequential(Merging(**square), nn.Dropout())], torch.randn(4, 4).double()
    layers[1][0].eval()
    with one_rank():
        outputs = pp.Pipeline(pp.plan_pipeline(layers, pp.gpipe(1, 2), x), F.mse_loss).evaluate(x)
    assert [part.training for part in (*layers, *layers[1])] == [True, True, False, True]
    assert [layers[0].merged, layers[1][0].merged] == [False, True]
    torch.testing.assert_close(outputs, nn.Sequential(*layers).eval()(x))


@pytest.mark.parametrize("schedule", [pp.gpipe(2, 4), one_f_one_b(3), pp.interleaved(2, 2, 4)], ids=str)
def test_ranks_do_the_schedules_list_and_have_as_much_in_flight_as_simulated(schedule):
    x, y = batch_of(CASES["GPipe"], 0)
    plan = pp.plan_pipeline(PLAIN, schedule, x)
    for rank, actions in enumerate(schedule.actions):
        seen = []
        with imagined_ranks(schedule.ranks, rank):
            pipeline = pp.Pipeline(plan, F.mse_loss)
            in_flight = lambda: sum(len(run.in_flight) for run in pipeline.runs.values())  # noqa: B023, E731
            pipeline.after = lambda action: seen.append((action, in_flight()))  # noqa: B023
            pipeline.step(x, y)
        assert tuple(action for action, _ in seen) == actions
        assert max(number for _, number in seen) == schedule.most_in_flight(schedule.stages_of(rank))
        assert [span.action for span in pipeline.spans] == [action for action in actions if action.kind in COMPUTATIONS]
        assert all(a.begin <= a.end <= b.begin for a, b in itertools.pairwise(pipeline.spans))


@pytest.mark.parametrize("layer, kept", [(nn.ReLU, 2), (nn.Softplus, 3)])
def test_a_stage_keeps_its_input_if_an_op_does_and_its_output_never(layer, kept):
    """ReLU saves its result, softplus its input; sine and linear save theirs."""
    run = StageRun(nn.Sequential(layer(), Do(torch.sin), nn.Linear(6, 6, bias=False)))
    with Meter(run.module) as meter:
        held = meter.event
        run.forward(0, (torch.zeros(2, 6, requires_grad=True),))
        now = meter.event
    totals = meter.timeline.totals
    assert totals[now] - totals[held] == kept * 2 * 6 * 4


class Counts(nn.Module):
    """Hands on how often it has run, twice, and its weight, the other way round: memory of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.again = self.calls.clone()

    def forward(self, x):
        self.calls += 1
        self.again += 1
        return x * self.weight.sum(), self.calls, self.again, self.weight.T


@pytest.mark.parametrize(
    "order", ["F0@0 F0@1 B0@1 B0@0 F1@0 F1@1 B1@1 B1@0", "F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0"]
)
def test_what_a_layer_keeps_and_returns_is_sent_as_it_was_then(order):
    weigh = make(Do, lambda streams: streams[0] * streams[1] * streams[2] * streams[3].sum())
    layers = [make(linear, 4, 6), Counts, weigh]
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in layers])
    x = torch.randn(4, 4, dtype=torch.float64)
    for x_i in x.chunk(2):
        (model(x_i).mean() / 2).backward()
    plan = pp.plan_pipeline(layers, pp.with_messages("two stages, one rank", [order]), x, parts=[range(2), range(2, 3)])
    with one_rank():
        torch.manual_seed(0)
        pipeline = pp.Pipeline(plan, lambda out, y: out.mean())
        pipeline.step(x, x)
    for p, q in zip(pipeline.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_outputs_without_rows_make_no_batch():
    plan = pp.plan_pipeline([nn.PReLU(dtype=torch.float64), Do(torch.mean)], pp.gpipe(1, 2), torch.ones(2, 3).double())
    with one_rank(), pytest.raises(ValueError, match="found a single number of a micro-batch; .* give evaluate y"):
        pp.Pipeline(plan, lambda out, y: out).evaluate(torch.ones(2, 3).double())


class Around(Do):
    """A wrapper that calls what it wraps by a name of its own."""


def test_parameters_have_the_models_names_whatever_a_wrapper_calls_them_and_a_frozen_stage_is_not_wrapped():
    layers = [make(linear, 6, 6, frozen=True), make(linear, 6, 6)]
    plan = pp.plan_pipeline(layers, pp.gpipe(2, 2), torch.zeros(4, 6, dtype=torch.float64))
    for rank, kind in enumerate((nn.Sequential, Around)):
        with imagined_ranks(2, rank):
            pipeline = pp.Pipeline(plan, F.mse_loss, wrap=Around)
        assert type(pipeline.modules[rank]) is kind
        assert [name for name, _ in pipeline.named_parameters()] == [f"{rank}.weight", f"{rank}.bias"]
