"""The simulator: against closed forms, a ledger kept tensor by tensor, and the bytes that ranks are metered at."""

from __future__ import annotations

import functools
import itertools
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memlab import pipeline_parallelism as pp
from memlab.memory_timeline import Meter, imagine
from memlab.pipeline_parallelism.line import bytes_along
from memlab.pipeline_parallelism.schedule import SENDS
from memlab.ranks import imagined_ranks
from tests.tiers import pairs

CARD = "H100-80GB"
linear = functools.partial(functools.partial, nn.Linear)


class AddOne(nn.Module):
    """Saves nothing for backward."""

    def forward(self, x):
        return x + 1


LAYERS = {
    "saved inputs": [linear(16, 32), AddOne, linear(32, 32), AddOne, linear(32, 24), AddOne, linear(24, 8), AddOne],
    "outputs that are saved": [linear(16, 32), nn.ReLU, linear(32, 32), nn.Tanh, linear(32, 8), nn.ReLU],
    "stages that save nothing": [linear(16, 32), nn.ReLU, AddOne, AddOne, AddOne, AddOne, linear(32, 8), nn.Sigmoid],
}
SCHEDULES = [
    pp.gpipe(4, 3),
    pp.one_forward_one_backward(4, 6),
    pp.one_forward_one_backward(3, 2),
    pp.interleaved(2, 2, 4),
]
BATCH = torch.linspace(-1, 1, 12 * 16).view(12, 16), torch.arange(12) % 8
SGD, ADAM = torch.optim.SGD, functools.partial(torch.optim.AdamW, lr=1e-3)


def on_device(meter, hardware):
    return meter.timeline.on(f"imagined {CARD}" if hardware == "gpu" else "cpu")


def bytes_of(*tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def metered(plan, rank, x, y, loss_fn, optimizer, hardware, **options):
    """What a rank of the runtime holds after each action of its second step, and the most it holds."""
    marks, meters = [], []
    with imagined_ranks(plan.schedule.ranks, rank):
        pipeline = pp.Pipeline(
            plan, loss_fn, after=lambda _: marks.extend(len(on_device(meter, hardware)) for meter in meters), **options
        )
        parameters = list(pipeline.parameters())
        stepping = optimizer(parameters) if parameters else None
        pipeline.step(x, y)
        if stepping:
            stepping.step()
        with Meter([*pipeline.modules.values()], stepping, inputs=(x, y)) as meter:
            meters.append(meter)
            pipeline.step(x, y)
    totals = on_device(meter, hardware).totals
    return [totals[mark] - bytes_of(x, y) for mark in marks], max(totals) - bytes_of(x, y)


def both(layers, schedule, batch, loss_fn, *, parts=None, hardware="cpu", optimizer=SGD, **options):
    """For each rank what is simulated from one micro-batch, and what the runtime is metered at."""
    with imagine(CARD) if hardware == "gpu" else nullcontext() as gpu:
        x, y = batch if gpu is None else gpu.imagined(batch)
        plan = pp.plan_pipeline(layers, schedule, x, parts=parts)
        costs = pp.measure_stages(plan, x, y, loss_fn, optimizer=optimizer, repeats=1, **options)
        ranks = range(schedule.ranks)
        found = [metered(plan, rank, x, y, loss_fn, optimizer, hardware, **options) for rank in ranks]
    return [bytes_along(schedule, costs, rank) for rank in ranks], found


@pairs("layers, schedule", LAYERS, SCHEDULES)
def test_what_one_micro_batch_shows_is_the_runtimes_line_at_every_action_and_its_peak(layers, schedule):
    simulated, found = both(LAYERS[layers], schedule, BATCH, F.cross_entropy)
    assert simulated == found


@pairs("hardware, layers, checkpointed", ("cpu", "gpu"), LAYERS, (True, False))
def test_so_it_is_with_checkpoints_with_adam_and_on_an_imagined_card(hardware, layers, checkpointed):
    options = {"hardware": hardware, "optimizer": ADAM, "checkpointed": checkpointed}
    simulated, found = both(LAYERS[layers], pp.one_forward_one_backward(3, 4), BATCH, F.cross_entropy, **options)
    assert simulated == found


def test_casts_of_weights_under_autocast_count_as_static_from_the_first_forward_on():
    with torch.autocast("cpu", torch.bfloat16):
        simulated, found = both(LAYERS["saved inputs"], pp.one_forward_one_backward(2, 3), BATCH, F.cross_entropy)
    assert [(line[1:], peak) for line, peak in simulated] == [(line[1:], peak) for line, peak in found]
    assert simulated[0] == found[0] and simulated[1][0][0] > found[1][0][0]  # before it, rank 1 receives


class Fork(nn.Linear):
    """A residual stream that is cut before its addition."""

    def forward(self, x):
        return x, super().forward(x)


class Join(nn.Linear):
    """Its sum's two inputs have one gradient between them."""

    def forward(self, streams):
        return super().forward(sum(streams))


@pytest.mark.parametrize(
    "schedule", [pp.one_forward_one_backward(2, 4), pp.with_messages("one rank", ["F0@0 F0@1 B0@1 B0@0"])]
)
def test_so_it_is_where_one_gradient_is_sent_twice_and_received_as_two(schedule):
    layers = [linear(16, 32), lambda: Fork(32, 32), lambda: Join(32, 32), linear(32, 8)]
    simulated, found = both(layers, schedule, BATCH, F.cross_entropy)
    assert simulated == found


def test_a_linear_layer_saves_its_input_and_a_relu_its_output():
    x, y = torch.randn(6, 16), torch.arange(6) % 8
    first, relu, last = pp.measure_layers([linear(16, 32), nn.ReLU, linear(32, 8)], x, y, F.cross_entropy, repeats=1)
    wide, weights = 4 * 6 * 32, 4 * 32 * 17
    assert (first.input_bytes, first.saved_bytes, first.output_bytes) == (0, 0, wide)  # x is the caller's
    assert (relu.input_bytes, relu.saved_bytes, relu.output_bytes) == (wide, wide, 0)  # what it returns is saved
    assert last.saved_bytes >= wide and last.output_bytes == 4 and last.gradient_bytes == wide
    assert (first.static_bytes, relu.static_bytes) == (2 * weights, 0)
    with_states = pp.measure_layers([linear(16, 32), linear(32, 8)], x, y, F.cross_entropy, optimizer=ADAM, repeats=1)
    assert with_states[0].static_bytes == 4 * weights + 4 * 2  # and Adam's two counters


def test_a_tie_within_a_stage_is_held_once():
    layers, x, y = [linear(8, 8), nn.Tanh, linear(8, 8)], torch.randn(4, 8), torch.arange(4)
    plans = (pp.plan_pipeline(layers, pp.gpipe(1, 1), x, tied=tied) for tied in ((), [("0.weight", "2.weight")]))
    apart, one = (pp.measure_stages(plan, x, y, F.cross_entropy)[0].static_bytes for plan in plans)
    assert apart - one == 2 * 4 * 8 * 8


def test_measuring_leaves_modules_and_random_numbers_as_they_were():
    layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4)]
    before = [p.clone() for layer in layers for p in layer.state_dict().values()]
    state = torch.random.get_rng_state()
    pp.measure_layers(layers, torch.randn(8, 16), torch.arange(8) % 4, F.cross_entropy, optimizer=ADAM)
    drawn = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    torch.randn(8, 16)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    after = [p for layer in layers for p in layer.state_dict().values()]
    assert all(map(torch.equal, before, after)) and layers[0].weight.grad is None


def test_imagined_seconds_are_flops_and_real_ones_are_measured():
    x, y = torch.randn(6, 16), torch.arange(6) % 8
    layers = [linear(16, 32), linear(32, 8)]
    assert all(
        c.forward_seconds > 0 and c.backward_seconds > 0 for c in pp.measure_layers(layers, x, y, F.cross_entropy)
    )
    with imagine(CARD) as gpu:
        first, last = pp.measure_layers(layers, *gpu.imagined((x, y)), F.cross_entropy, flops_per_second=1)
    assert (first.forward_seconds, first.backward_seconds) == (2 * 6 * 16 * 32, 2 * 6 * 16 * 32)  # of x no gradient
    assert (last.forward_seconds, last.backward_seconds) == (2 * 6 * 32 * 8, 4 * 6 * 32 * 8)


def test_by_bytes_counts_what_each_stage_has_in_flight():
    x, y = torch.randn(6, 16), torch.arange(6) % 8
    each = pp.measure_layers([linear(16, 16)] * 3 + [linear(16, 8)], x, y, F.cross_entropy, repeats=1)
    for schedule, held in (
        (pp.one_forward_one_backward(3, 8), [3, 2, 1]),
        (pp.gpipe(3, 8), [8, 8, 8]),
        (pp.gpipe(3, 1), [1, 1, 1]),
    ):
        cost = pp.bytes_on_stages(each, schedule)
        for layer, stage in ((0, 0), (1, 1), (3, 2)):
            assert cost(layer, stage) == each[layer].static_bytes + held[stage] * each[layer].saved_bytes


SIZES = [(stages, micro_batches) for stages in range(1, 6) for micro_batches in (1, 2, 3, 8, 12)]
RATIOS = [(1, 1), (3, 2)]


def some_costs(chance: random.Random, stages: int) -> list[pp.StageCost]:
    return [
        pp.StageCost(
            forward_seconds=chance.randint(1, 9),
            backward_seconds=chance.randint(1, 9),
            input_bytes=chance.randint(1, 30) if stage else 0,
            received_gradient_bytes=chance.randint(0, 60) if stage else 0,
        )
        for stage in range(stages)
    ]


def some_schedules() -> list[pp.Schedule]:
    made = [
        make(p, m)
        for p, m in [(1, 3), (2, 1), (2, 5), (4, 3), (4, 8)]
        for make in (pp.gpipe, pp.one_forward_one_backward)
    ]
    made += [pp.interleaved(2, 3, 4), pp.interleaved(4, 2, 8), pp.interleaved(3, 1, 6)]
    return [*made, pp.with_messages("mine", ["F0 F1 B1 B0", "F0 F0@2 F1 F1@2 B0@2 B1@2 B1 B0"])]


@pytest.mark.parametrize(("forward", "backward"), RATIOS)
def test_the_bubble_is_the_closed_form_whatever_a_backward_takes(forward, backward):
    cost = pp.StageCost(forward, backward)
    for p, m in SIZES:
        for make in (pp.gpipe, pp.one_forward_one_backward):
            run = pp.simulate(make(p, m), cost)
            assert run.seconds == (m + p - 1) * (forward + backward)
            assert run.bubble_share == pytest.approx(pp.bubble_share(p, m), abs=1e-12)
        for chunks in (1, 2, 3):
            if m % p == 0:
                run = pp.simulate(pp.interleaved(p, chunks, m), cost)
                assert run.seconds == (chunks * m + p - 1) * (forward + backward)
                assert run.bubble_share == pytest.approx(pp.bubble_share(p, m, chunks), abs=1e-12)


def test_in_flight_is_the_closed_form():
    for p, m in SIZES:
        for name, make in (("GPipe", pp.gpipe), ("1F1B", pp.one_forward_one_backward)):
            run = pp.simulate(make(p, m))
            assert [run.in_flight(s) for s in range(p)] == [pp.in_flight(name, s, p, m) for s in range(p)]
        for chunks in (1, 2, 3):
            if m % p == 0:
                run = pp.simulate(pp.interleaved(p, chunks, m))
                found = [run.schedule.most_in_flight(run.schedule.stages_of(rank)) for rank in range(p)]
                assert found == [pp.in_flight("interleaved 1F1B", rank, p * chunks, m, chunks) for rank in range(p)]


@pytest.mark.parametrize("link", [0.125, 1.0])
def test_1f1b_pays_the_link_there_and_back_for_each_micro_batch_and_gpipe_for_each_turn(link):
    for p, m in [(3, 6), (4, 8), (6, 24)]:
        assert pp.simulate(pp.gpipe(p, m), link_seconds=link).seconds == 3 * (m + p - 1) + 2 * link * (m + p - 2)
        run = pp.simulate(pp.one_forward_one_backward(p, m), link_seconds=link)
        assert run.seconds == 3 * (m + p - 1) + 2 * link * (m + p - 3)


def test_a_message_takes_its_latency_and_its_bytes_over_the_bandwidth():
    costs = [pp.StageCost(), pp.StageCost(input_bytes=600, gradient_bytes=300)]
    run = pp.simulate(pp.gpipe(2, 1), costs, link_seconds=0.5, link_bytes_per_second=100)
    assert [(one.rank, one.begin, one.end) for one in run.messages] == [(0, 1.0, 7.5), (1, 10.5, 14.0)]
    assert run.seconds == 16.0


def test_messages_leave_when_both_ends_have_begun_and_follow_each_other_on_a_link():
    chance = random.Random(3)
    for one in some_schedules():
        run = pp.simulate(one, some_costs(chance, one.stages), link_seconds=0.5, link_bytes_per_second=7)
        when = {
            (rank, action): moment
            for rank, actions in enumerate(one.actions)
            for action, moment in zip(actions, run.moments[rank], strict=True)
        }
        links: dict[tuple[int, int], list] = {}
        for message in run.messages:
            peer = one.peer(message.action)
            assert message.begin >= max(when[message.rank, message.action], when[peer, message.action.counterpart])
            links.setdefault((message.rank, peer), []).append(message)
        for on_link in links.values():
            assert all(a.end <= b.begin for a, b in itertools.pairwise(on_link))
        assert len(run.messages) == sum(action.kind in SENDS for actions in one.actions for action in actions)


def test_a_rank_waits_after_its_next_computation_until_what_it_sent_has_been_received():
    """Rank 1 begins to receive F2 after a long B0. Rank 0 computes F3 meanwhile, and only then waits."""
    lists = ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    run = pp.simulate(pp.with_messages("mine", lists), [pp.StageCost(1, 1), pp.StageCost(1, 50)])
    ends = {str(span.action): span.end for span in run.spans}
    done, begun = ({str(action): moment for moment, _, action in run.line(rank)} for rank in (0, 1))
    assert done["F2 of stage 0"] == ends["F2 of stage 0"] == 3.0
    assert ends["F3 of stage 0"] == 4.0
    assert done["F3 of stage 0"] == begun["receive F2 of stage 1"] == ends["B0 of stage 1"] == 52.0


def test_a_wrong_schedule_is_refused_before_it_is_played():
    right = pp.gpipe(2, 2)
    wrong = pp.Schedule("wrong", 2, right.ranks_of_stages, (right.actions[0][:-1], right.actions[1]))
    with pytest.raises(ValueError, match="expected B1 of stage 0 on rank 0, found none"):
        pp.simulate(wrong)
    assert pp.simulate(right, pp.StageCost(0, 0)).bubble_share == 0.0  # stages that cost no time have no bubble
