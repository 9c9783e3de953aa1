"""What one micro-batch shows of each stage: with it the simulator knows every schedule's bytes before anything runs."""

from __future__ import annotations

import functools
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memlab.memory_timeline import Meter, imagine
from memlab.pipeline_parallelism import (
    Pipeline,
    balance,
    bytes_on_stages,
    gpipe,
    gpt_layers,
    gpt_loss,
    interleaved,
    measure_layers,
    measure_stages,
    one_forward_one_backward,
    plan_pipeline,
    with_messages,
)
from memlab.pipeline_parallelism.line import bytes_along
from memlab.ranks import imagined_ranks

CARD = "H100-80GB"
linear = functools.partial(functools.partial, nn.Linear)


class AddOne(nn.Module):
    """Saves nothing for backward."""

    def forward(self, x):
        return x + 1


LAYERS = {
    "saved inputs": [linear(16, 32), AddOne, linear(32, 32), AddOne, linear(32, 24), AddOne, linear(24, 8), AddOne],
    "outputs that are saved": [
        linear(16, 32),
        nn.ReLU,
        linear(32, 32),
        nn.Tanh,
        linear(32, 24),
        nn.ReLU,
        linear(24, 8),
        nn.ReLU,
    ],
    "stages that save nothing": [linear(16, 32), nn.ReLU, AddOne, AddOne, AddOne, AddOne, linear(32, 8), nn.Sigmoid],
}
SCHEDULES = [
    gpipe(2, 4),
    gpipe(4, 3),
    one_forward_one_backward(4, 6),
    one_forward_one_backward(3, 2),
    interleaved(2, 2, 4),
]
BATCH = torch.linspace(-1, 1, 12 * 16).view(12, 16), torch.arange(12) % 8
SGD, ADAM = torch.optim.SGD, functools.partial(torch.optim.AdamW, lr=1e-3)


def on_hardware(hardware):
    return imagine(CARD) if hardware == "gpu" else nullcontext()


def brought_in(gpu, batch):
    return batch if gpu is None else gpu.imagined(batch)


def on_device(meter, hardware):
    return meter.timeline.on(f"imagined {CARD}" if hardware == "gpu" else "cpu")


def bytes_of(*tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def metered(plan, rank, x, y, loss_fn, optimizer, hardware, **options):
    """What a rank of the runtime holds after each action of its second step, and the most it holds."""
    marks, meters = [], []
    with imagined_ranks(plan.schedule.ranks, rank):
        pipeline = Pipeline(
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
    with on_hardware(hardware) as gpu:
        x, y = brought_in(gpu, batch)
        plan = plan_pipeline(layers, schedule, x, parts=parts)
        costs = measure_stages(plan, x, y, loss_fn, optimizer=optimizer, repeats=1, **options)
        simulated = [bytes_along(schedule, costs, rank) for rank in range(schedule.ranks)]
        return simulated, [
            metered(plan, rank, x, y, loss_fn, optimizer, hardware, **options) for rank in range(schedule.ranks)
        ]


# ---- the line


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name} {s.stages} {s.micro_batches}")
@pytest.mark.parametrize("layers", LAYERS)
def test_what_one_micro_batch_shows_is_the_runtimes_line_at_every_action_and_its_peak(layers, schedule):
    simulated, found = both(LAYERS[layers], schedule, BATCH, F.cross_entropy)
    assert simulated == found


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_so_it_is_with_checkpoints_and_on_an_imagined_card(layers, hardware):
    schedule = one_forward_one_backward(3, 4)
    options = {"hardware": hardware, "optimizer": ADAM, "checkpointed": True}
    simulated, found = both(LAYERS[layers], schedule, BATCH, F.cross_entropy, **options)
    assert simulated == found
    if hardware == "gpu":
        simulated, found = both(LAYERS[layers], schedule, BATCH, F.cross_entropy, hardware="gpu")
        assert simulated == found


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_so_it_is_for_a_gpt_of_uneven_stages_and_adam(hardware):
    batch = torch.zeros(8, 12, dtype=torch.int64), torch.zeros(8, 12, dtype=torch.int64)
    layers, parts = gpt_layers(4, 16, 4, 12, 64), [range(1), range(1, 5), range(5, 6)]
    simulated, found = both(
        layers, one_forward_one_backward(3, 4), batch, gpt_loss, parts=parts, hardware=hardware, optimizer=ADAM
    )
    assert simulated == found


def test_casts_of_weights_under_autocast_count_as_static_from_the_first_forward_on():
    with torch.autocast("cpu", torch.bfloat16):
        simulated, found = both(LAYERS["saved inputs"], one_forward_one_backward(2, 3), BATCH, F.cross_entropy)
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
    "schedule", [one_forward_one_backward(2, 4), with_messages("one rank", ["F0@0 F0@1 B0@1 B0@0"])]
)
def test_so_it_is_where_one_gradient_is_sent_twice_and_received_as_two(schedule):
    layers = [linear(16, 32), lambda: Fork(32, 32), lambda: Join(32, 32), linear(32, 8)]
    simulated, found = both(layers, schedule, BATCH, F.cross_entropy)
    assert simulated == found


# ---- the parts of a cost


def test_a_linear_layer_saves_its_input_and_a_relu_its_output():
    x, y = torch.randn(6, 16), torch.arange(6) % 8
    first, relu, last = measure_layers([linear(16, 32), nn.ReLU, linear(32, 8)], x, y, F.cross_entropy, repeats=1)
    wide, weights = 4 * 6 * 32, 4 * 32 * 17
    assert (first.input_bytes, first.saved_bytes, first.output_bytes) == (0, 0, wide)  # x is the caller's
    assert (relu.input_bytes, relu.saved_bytes, relu.output_bytes) == (wide, wide, 0)  # what it returns is saved
    assert last.saved_bytes >= wide and last.output_bytes == 4 and last.gradient_bytes == wide
    assert (first.static_bytes, relu.static_bytes) == (2 * weights, 0)
    with_states = measure_layers([linear(16, 32), linear(32, 8)], x, y, F.cross_entropy, optimizer=ADAM, repeats=1)
    assert with_states[0].static_bytes == 4 * weights + 4 * 2  # and Adam's two counters


def test_layers_add_up_to_stages():
    batch = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)
    layers = gpt_layers(4, 16, 4, 12, 64)
    each = measure_layers(layers, *batch, gpt_loss, repeats=1)
    plan = plan_pipeline(layers, gpipe(2, 1), batch[0])
    for part, stage in zip(plan.parts, measure_stages(plan, *batch, gpt_loss, repeats=1), strict=True):
        assert stage.static_bytes == sum(each[number].static_bytes for number in part)
        assert stage.saved_bytes == sum(each[number].saved_bytes for number in part)


def test_a_tie_within_a_stage_is_held_once():
    layers = [linear(8, 8), nn.Tanh, linear(8, 8)]
    x, y = torch.randn(4, 8), torch.arange(4)
    tied = plan_pipeline(layers, gpipe(1, 1), x, tied=[("0.weight", "2.weight")])
    apart, one = (measure_stages(p, x, y, F.cross_entropy)[0] for p in (plan_pipeline(layers, gpipe(1, 1), x), tied))
    assert apart.static_bytes - one.static_bytes == 2 * 4 * 8 * 8


def draw(*_):
    random.random()


def test_measuring_leaves_modules_and_random_numbers_as_they_were():
    layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4)]
    layers[2].register_forward_hook(draw)
    python = random.getstate()
    before = [p.clone() for layer in layers for p in layer.state_dict().values()]
    state = torch.random.get_rng_state()
    measure_layers(layers, torch.randn(8, 16), torch.arange(8) % 4, F.cross_entropy, optimizer=ADAM)
    drawn = torch.random.get_rng_state()
    assert random.getstate() == python
    torch.random.set_rng_state(state)
    torch.randn(8, 16)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    after = [p for layer in layers for p in layer.state_dict().values()]
    assert all(map(torch.equal, before, after)) and layers[0].weight.grad is None


def test_imagined_seconds_are_flops_and_real_ones_are_measured():
    x, y = torch.randn(6, 16), torch.arange(6) % 8
    layers = [linear(16, 32), linear(32, 8)]
    assert all(c.forward_seconds > 0 and c.backward_seconds > 0 for c in measure_layers(layers, x, y, F.cross_entropy))
    with imagine(CARD) as gpu:
        first, last = measure_layers(layers, *gpu.imagined((x, y)), F.cross_entropy, flops_per_second=1)
    assert (first.forward_seconds, first.backward_seconds) == (2 * 6 * 16 * 32, 2 * 6 * 16 * 32)  # of x no gradient
    assert (last.forward_seconds, last.backward_seconds) == (2 * 6 * 32 * 8, 4 * 6 * 32 * 8)


# ---- what balance makes of it


def test_by_bytes_counts_what_each_stage_has_in_flight():
    x, y = torch.randn(6, 16), torch.arange(6) % 8
    each = measure_layers([linear(16, 16)] * 3 + [linear(16, 8)], x, y, F.cross_entropy, repeats=1)
    for schedule, held in (
        (one_forward_one_backward(3, 8), [3, 2, 1]),
        (gpipe(3, 8), [8, 8, 8]),
        (gpipe(3, 1), [1, 1, 1]),
    ):
        cost = bytes_on_stages(each, schedule)
        for layer, stage in ((0, 0), (1, 1), (3, 2)):
            assert cost(layer, stage) == each[layer].static_bytes + held[stage] * each[layer].saved_bytes


def test_a_gpt_is_cut_differently_by_bytes_and_by_time_and_each_is_best_at_its_own():
    schedule = one_forward_one_backward(4, 16)
    with imagine(CARD) as gpu:
        x, y = gpu.imagined((torch.zeros(1, 512, dtype=torch.int64), torch.zeros(1, 512, dtype=torch.int64)))
        each = measure_layers(gpt_layers(12, 128, 4, 512, 2048), x, y, gpt_loss, optimizer=ADAM)
    by_bytes, seconds = bytes_on_stages(each, schedule), [c.forward_seconds + c.backward_seconds for c in each]
    cuts = {
        "bytes": balance(by_bytes, 4, len(each)),
        "time": balance(seconds, 4),
        "number": balance([1] * len(each), 4),
    }
    most = {name: max(sum(by_bytes(n, s) for n in part) for s, part in enumerate(cut)) for name, cut in cuts.items()}
    slowest = {name: max(sum(seconds[n] for n in part) for part in cut) for name, cut in cuts.items()}
    assert most["bytes"] < most["number"] and most["bytes"] < most["time"]
    assert slowest["time"] < slowest["number"] and slowest["time"] < slowest["bytes"]
