"""Deferred BatchNorm: under accumulation, running statistics move once, as the full batch moves them."""

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from memlab.gradient_accumulation.batch_norm import deferred_batch_norm
from memlab.memory_timeline import Meter

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RAGGED = [2, 7, 3, 4]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def values(*shape, dtype=FP64, seed=0) -> torch.Tensor:
    """Normal data whose channels differ, and whose mean drifts along the batch, so that micro-batches' means differ."""
    x = torch.randn(*shape, dtype=FP64, generator=torch.Generator().manual_seed(seed))
    along = [-1] + [1] * (len(shape) - 1)
    channel = torch.arange(1, shape[1] + 1, dtype=FP64).view([1, -1] + [1] * (len(shape) - 2))
    return (x * channel + channel + torch.linspace(-3, 3, shape[0], dtype=FP64).view(along)).to(dtype)


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if name.rpartition(".")[2] in STATISTICS}


def distance(found: dict, expected: dict) -> float:
    """The largest relative difference of two sets of statistics; the counters must be equal."""
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], expected[name]) for name in found if name.endswith("tracked"))
    moved = [name for name in found if not name.endswith("tracked")]
    return max(
        ((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)).item() for name in moved
    )


def trace(model: nn.Module) -> str:
    """What a module could be left changed by: its attributes, hooks and buffers, as text."""
    return str([vars(module) for module in model.modules()])


def network(dtype=FP64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    ).to(dtype)


# ---- the full batch's update


@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, 0.0, None])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (16, 5)),
        (nn.BatchNorm1d, (16, 5, 3)),
        (nn.BatchNorm2d, (16, 5, 3, 2)),
        (nn.BatchNorm3d, (16, 5, 2, 1, 3)),
        (nn.SyncBatchNorm, (16, 5, 3)),
        (nn.LazyBatchNorm1d, (16, 5)),
        (nn.LazyBatchNorm2d, (16, 5, 2, 2)),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else str(len(x)) + "-D",
)
def test_over_several_steps_running_statistics_are_the_full_batch_s(kind, shape, momentum):
    channels = () if "Lazy" in kind.__name__ else (5,)
    full, found = (kind(*channels, momentum=momentum, dtype=FP64) for _ in range(2))
    for step in range(3):
        x = values(*shape, seed=step)
        full(x)
        with deferred_batch_norm(found):
            for piece in x.split(RAGGED):
                found(piece)
    assert found.num_batches_tracked == 3
    assert distance(statistics(found), statistics(full)) <= 1e-14


@pytest.mark.parametrize("affine", [True, False])
def test_the_update_is_momentum_times_the_mean_and_unbiased_variance_of_all_values(affine):
    layer = nn.BatchNorm2d(5, affine=affine, momentum=0.3, dtype=FP64)
    layer.running_mean.fill_(2)
    x = values(16, 5, 3, 3)
    with deferred_batch_norm(layer):
        for piece in x.split(RAGGED):
            layer(piece)
    expected = {
        "running_mean": 0.7 * 2 + 0.3 * x.mean((0, 2, 3)),
        "running_var": 0.7 * 1 + 0.3 * x.var((0, 2, 3), correction=1),
        "num_batches_tracked": torch.tensor(1),
    }
    assert distance(statistics(layer), expected) <= 1e-14


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=8), offset=st.sampled_from([0.0, 1e3, -1e6]))
def test_any_ragged_split_gives_the_same_statistics(sizes, offset):
    full, found = (nn.BatchNorm1d(4, momentum=1.0, dtype=FP64) for _ in range(2))
    x = values(sum(sizes), 4) + offset
    full(x)
    with deferred_batch_norm(found):
        for piece in x.split(sizes):
            found(piece)
    assert distance(statistics(found), statistics(full)) <= 1e-13 * max(1, abs(offset))


def test_plain_accumulation_moves_k_times_and_misses_the_variance_between_micro_batches():
    plain, deferred = (nn.BatchNorm1d(5, dtype=FP64) for _ in range(2))
    x, k = values(16, 5), 4
    pieces = x.chunk(k)
    for piece in pieces:
        plain(piece)
    weights = torch.tensor([0.1 * 0.9 ** (k - 1 - i) for i in range(k)], dtype=FP64)
    expected = {
        "running_mean": weights @ torch.stack([piece.mean(0) for piece in pieces]),
        "running_var": 0.9**k + weights @ torch.stack([piece.var(0) for piece in pieces]),
        "num_batches_tracked": torch.tensor(k),
    }
    assert distance(statistics(plain), expected) <= 1e-14
    assert torch.isclose(weights.sum(), torch.tensor(1 - 0.9**k, dtype=FP64), rtol=1e-15)
    with deferred_batch_norm(deferred):
        for piece in pieces:
            deferred(piece)
    within = sum(3 * piece.var(0) for piece in pieces)
    between = sum(4 * (piece.mean(0) - x.mean(0)) ** 2 for piece in pieces)
    assert torch.allclose(deferred.running_var, 0.9 + 0.1 * (within + between) / 15, rtol=1e-14)


def test_a_deeper_layer_has_the_exact_statistics_of_the_inputs_it_saw_which_are_not_the_full_batch_s():
    model, full = network(), network()
    x, seen = values(16, 6), []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    with deferred_batch_norm(model):
        for piece in x.split(RAGGED):
            model(piece).sum().backward()
    full(x)
    alone = nn.BatchNorm1d(8, dtype=FP64)
    alone(torch.cat(seen))
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14
    assert distance(statistics(model[2]), statistics(alone)) <= 1e-14
    assert distance(statistics(model[2]), statistics(full[2])) > 1e-3


def test_outputs_and_gradients_are_those_without_the_block_to_the_bit():
    results = []
    for deferred in (True, False):
        model, outputs = network(FP32), []
        x = values(16, 6, dtype=FP32).requires_grad_()
        with deferred_batch_norm(model) if deferred else torch.enable_grad():
            for piece in x.split(RAGGED):
                outputs.append(model(piece))
                outputs[-1].square().sum().backward()
        results.append([*outputs, x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_all_forwards_first_and_backwards_after_the_block_are_fine_too():
    model, full = network(), network()
    x = values(16, 6)
    with deferred_batch_norm(model):
        losses = [model(piece).sum() for piece in x.split(RAGGED)]
    sum(losses).backward()
    full(x)
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14


# ---- which layers, which forwards


def test_layers_in_evaluation_mode_and_without_running_statistics_are_left_alone():
    frozen, untracked, stopped = nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(6)
    frozen.eval()
    stopped.track_running_stats = False
    model = nn.Sequential(frozen, untracked, stopped, nn.LayerNorm(6))
    before = trace(model)
    with deferred_batch_norm(model):
        for piece in values(16, 6, dtype=FP32).split(RAGGED):
            model(piece)
    assert trace(model) == before


def test_a_layer_whose_running_statistics_were_taken_away_counts_as_torch_counts():
    layer = nn.BatchNorm1d(6)
    layer.running_mean = layer.running_var = None
    with deferred_batch_norm(layer):
        for piece in values(16, 6, dtype=FP32).split(RAGGED):
            layer(piece)
    assert layer.num_batches_tracked == 4 and layer.running_mean is None


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_layer_without_a_counter_moves_as_torch_moves_it(momentum):
    layer, full = (nn.BatchNorm1d(6, momentum=momentum, dtype=FP64) for _ in range(2))
    layer.num_batches_tracked = full.num_batches_tracked = None
    x = values(16, 6)
    with deferred_batch_norm(layer):
        for piece in x.split(RAGGED):
            layer(piece)
    full(x)
    assert layer.num_batches_tracked is None and distance(statistics(layer), statistics(full)) <= 1e-14


def test_a_layer_that_no_forward_reaches_does_not_move_and_neither_does_an_empty_block():
    model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    with deferred_batch_norm(model):
        model[0](values(4, 3, dtype=FP32))
    assert [layer.num_batches_tracked.item() for layer in model] == [1, 0]
    assert torch.equal(model[1].running_var, torch.ones(3))
    with deferred_batch_norm(model):
        pass
    assert [layer.num_batches_tracked.item() for layer in model] == [1, 0]


def test_evaluation_inside_the_block_uses_the_statistics_from_before_and_is_not_counted():
    model, full = network(), network()
    x = values(16, 6)
    model(x), full(x)
    expected = copy.deepcopy(model).eval()(x)
    with deferred_batch_norm(model):
        for piece in x.split(RAGGED):
            model(piece).sum().backward()
            with torch.no_grad():
                assert torch.equal(model.eval()(x), expected)
            model.train()
    full(x)
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_a_forward_without_gradients_counts_as_it_does_for_the_full_batch(mode):
    model, full = network(), network()
    x = values(16, 6)
    with deferred_batch_norm(model):
        with mode():
            model(x[:5])
        model(x[5:]).sum().backward()
    full(x)
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14


class Twice(nn.Module):
    """One BatchNorm in two places."""

    def __init__(self):
        super().__init__()
        self.norm = self.alias = nn.BatchNorm1d(6, dtype=FP64)
        self.linear = nn.Linear(6, 6, dtype=FP64)

    def forward(self, x):
        return self.norm(input=self.linear(self.alias(x)))


def test_a_layer_called_twice_in_a_forward_moves_twice_call_by_call():
    model, alone = Twice(), nn.BatchNorm1d(6, dtype=FP64)
    x, between = values(16, 6), []
    model.linear.register_forward_hook(lambda module, args, output: between.append(output.detach()))
    with deferred_batch_norm(model):
        for piece in x.split(RAGGED):
            model(piece).sum().backward()
    alone(x)
    alone(torch.cat(between))
    assert model.norm.num_batches_tracked == 2
    assert distance(statistics(model.norm), statistics(alone)) <= 1e-14


def test_a_loss_that_calls_a_model_twice_moves_it_once_and_in_a_module_that_makes_both_calls_as_the_full_batch():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = network()

        def forward(self, x, y):
            return self.both(x) + self.both(y)

    x, y = values(16, 6), values(16, 6) * 2 + 1
    once, pair, full, twice = network(), Pair(), network(), network()
    pieces = list(zip(x.split(RAGGED), y.split(RAGGED), strict=True))
    with deferred_batch_norm(once), deferred_batch_norm(pair):
        for piece in pieces:
            pair(*piece)
            for half in piece:
                once(half)
    full[0](torch.cat((x, y)))
    twice[0](x)
    twice[0](y)
    for model, expected, moves in ((once, full, 1), (pair.both, twice, 2)):
        assert model[0].num_batches_tracked == moves
        assert distance(statistics(model[0]), statistics(expected[0])) <= 1e-14


def test_parts_of_a_model_that_are_called_alone_are_of_the_same_group():
    model, full = network(), network()
    x = values(16, 6)
    *pieces, last = x.split(RAGGED)
    with deferred_batch_norm(model):
        for piece in pieces:
            model[0](piece)
        model(last)
        model[0](x)
    full[0](torch.cat((x, x)))
    assert model[0].num_batches_tracked == 1
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14


def test_after_a_forward_that_failed_a_part_called_alone_is_of_the_same_group():
    model, full = network(), network()
    x = values(16, 6)
    failing = model[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with deferred_batch_norm(model):
        with pytest.raises(ZeroDivisionError):
            model(x[:5])
        failing.remove()
        model[0](x[5:])
    full[0](x)
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14


def test_a_hook_of_the_model_s_own_that_changes_an_output_changes_no_count():
    layer, full = nn.BatchNorm1d(6, dtype=FP64), nn.BatchNorm1d(6, dtype=FP64)
    layer.register_forward_hook(lambda module, args, output: (output[:1], "and more"))
    x = values(16, 6)
    with deferred_batch_norm(layer):
        for piece in x.split(RAGGED):
            layer(piece)
    full(x)
    assert distance(statistics(layer), statistics(full)) <= 1e-14


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_recomputes_in_backward_is_not_counted_again(reentrant):
    model, full = network(), network()
    x = values(16, 6).requires_grad_()
    with deferred_batch_norm(model):
        for piece in x.split(RAGGED):
            checkpoint(model, piece, use_reentrant=reentrant).sum().backward()
    full(x)
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14
    assert model[2].num_batches_tracked == 1


def test_an_empty_micro_batch_weighs_nothing():
    layer, full = nn.BatchNorm1d(6, dtype=FP64), nn.BatchNorm1d(6, dtype=FP64)
    x = values(16, 6)
    with deferred_batch_norm(layer):
        for piece in x.split([4, 0, 12]):
            layer(piece)
    full(x)
    assert distance(statistics(layer), statistics(full)) <= 1e-14


# ---- dtypes


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_16_bit_inputs_under_fp32_buffers_lose_nothing(dtype):
    layer, full = nn.BatchNorm1d(6), nn.BatchNorm1d(6, dtype=FP64)
    x = values(64, 6, dtype=dtype)
    with deferred_batch_norm(layer):
        for piece in x.split(4):
            layer(piece)
    full(x.double())
    assert layer.running_var.dtype is FP32
    assert distance(statistics(layer.double()), statistics(full)) <= 4 * torch.finfo(FP32).eps


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_a_16_bit_layer_is_within_its_rounding(dtype):
    layer, full = nn.BatchNorm1d(6).to(dtype), nn.BatchNorm1d(6, dtype=FP64)
    x = values(64, 6, dtype=dtype)
    with deferred_batch_norm(layer):
        for piece in x.split(4):
            layer(piece)
    full(x.double())
    assert layer.running_var.dtype is dtype
    assert distance(statistics(layer.double()), statistics(full)) <= torch.finfo(dtype).eps


def test_a_16_bit_layer_s_buffers_are_rounded_once_from_the_merged_statistics():
    layer, x = nn.BatchNorm1d(64, dtype=BF16), values(64, 64, dtype=BF16)
    layer.running_mean.copy_(torch.linspace(-9, 9, 64))
    start, pieces = layer.running_mean.double(), x.split(4)
    with deferred_batch_norm(layer):
        for piece in pieces:
            layer(piece)
    rounded = torch.stack([piece.double().mean(0).to(BF16) for piece in pieces]).double()
    assert torch.equal(layer.running_mean, (0.9 * start + 0.1 * rounded.mean(0)).to(BF16))


def test_many_values_do_not_overflow_the_sums_of_an_fp16_layer():
    layer = nn.BatchNorm1d(2, momentum=1.0).half()
    x = values(4096, 2, dtype=FP16) * 20
    with deferred_batch_norm(layer):
        for piece in x.chunk(4):
            layer(piece)
    assert torch.allclose(layer.running_var.double(), x.double().var(0), rtol=2e-3)


# ---- nothing stays behind


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["block", "forward", "hook"])
def test_a_block_that_raises_moves_nothing_and_leaves_nothing(error, where):
    model = network()

    def fail(*_):
        raise error("on purpose")

    before = trace(model), statistics(model)
    undo = []
    if where == "forward":
        model[2]._check_input_dim = fail
    if where == "hook":
        undo += [model[2].register_forward_pre_hook(fail), model[2].register_forward_hook(fail)]
    with pytest.raises(error, match="on purpose"), deferred_batch_norm(model):
        model[0](values(5, 6))
        model[1:3](values(5, 6)) if where != "block" else fail()
    for handle in undo:
        handle.remove()
    vars(model[2]).pop("_check_input_dim", None)
    assert trace(model) == before[0]
    assert all(torch.equal(b, before[1][name]) for name, b in statistics(model).items())


def test_the_model_is_the_same_object_by_object_after_the_block_and_between_its_forwards():
    model = network()
    buffers, before = {name: id(b) for name, b in model.named_buffers()}, statistics(model)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with deferred_batch_norm(model):
        for piece in values(16, 6).split(RAGGED):
            model(piece).sum().backward()
            assert {name: id(b) for name, b in model.named_buffers()} == buffers
            assert all(torch.equal(model.state_dict()[name], b) for name, b in before.items())
            assert model[0].momentum == 0.1
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert not any(m._forward_hooks_always_called or m._forward_hooks_with_kwargs for m in model.modules())


def test_a_forward_that_fails_and_is_tried_again_inside_the_block_leaves_its_layer_in_order():
    layer, full = nn.BatchNorm1d(6, dtype=FP64), nn.BatchNorm1d(6, dtype=FP64)
    x = values(16, 6)
    with deferred_batch_norm(layer):
        for piece in x.split(RAGGED):
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                layer(piece[:1])
            assert layer.momentum == 0.1 and layer.num_batches_tracked == 0
            layer(piece)
    full(x)
    assert distance(statistics(layer), statistics(full)) <= 1e-14


def test_an_interrupted_forward_that_is_caught_inside_the_block_loses_no_statistics():
    class Interrupted(nn.BatchNorm1d):
        def _check_input_dim(self, x):
            if len(x) == 1:
                raise KeyboardInterrupt

    layer, full = Interrupted(6, dtype=FP64), nn.BatchNorm1d(6, dtype=FP64)
    x, buffers = values(16, 6), {name: id(b) for name, b in layer.named_buffers()}
    with deferred_batch_norm(layer):
        for piece in x.split(RAGGED):
            with pytest.raises(KeyboardInterrupt):
                layer(piece[:1])
            assert torch.equal(layer.eval()(piece), nn.BatchNorm1d(6, dtype=FP64).eval()(piece))
            with pytest.raises(KeyboardInterrupt):
                layer.train()(piece[:1])
            layer(piece)
    full(x)
    assert {name: id(b) for name, b in layer.named_buffers()} == buffers and layer.momentum == 0.1
    assert distance(statistics(layer), statistics(full)) <= 1e-14


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("k", [4, 8])
def test_the_block_costs_16_bytes_a_channel_and_8_a_layer_whatever_k_and_saves_no_other_tensors(k, in_flight):
    peaks, ends = {}, {}
    for deferred in (False, True):
        model = network(FP32)
        pieces = [values(32, 6, dtype=FP32) for _ in range(k)]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with Meter(model, inputs=pieces) as meter, deferred_batch_norm(model) if deferred else torch.enable_grad():
            for first in range(0, k, in_flight):
                losses = [model(piece).sum() for piece in pieces[first : first + in_flight]]
                while losses:
                    losses.pop().backward()
        peaks[deferred], ends[deferred] = meter.timeline.peak_bytes, meter.timeline.bytes_at(len(meter.timeline))
    assert peaks[True] - peaks[False] == 16 * (6 + 8) + 8 * 2
    assert ends[True] == ends[False]


# ---- around other things


def test_another_block_inside_is_refused_and_one_afterwards_is_not():
    model = network()
    part = nn.ModuleDict({"part": model[2]})
    with deferred_batch_norm(model):
        with pytest.raises(RuntimeError, match="found 'part' inside another"), deferred_batch_norm(part):
            pass
        model(values(4, 6))
    with deferred_batch_norm(part):
        model(values(4, 6))
    assert model[0].num_batches_tracked == model[2].num_batches_tracked == 2


@pytest.mark.parametrize("model", [None, [nn.BatchNorm1d(2)], nn.BatchNorm1d])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="expected a model"), deferred_batch_norm(model):
        pass


def test_a_model_without_batch_norm_goes_through():
    model = nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3), nn.LayerNorm(3))
    with deferred_batch_norm(model):
        model(torch.randn(2, 3)).sum().backward()


@pytest.fixture
def process_group(request):
    backend, ranks, store = request.param
    distributed.init_process_group(backend, rank=0, world_size=ranks, store=store())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("process_group", [("fake", 2, FakeStore)], indirect=True, ids=["two ranks"])
def test_a_sync_batch_norm_over_several_ranks_is_refused_and_nothing_stays(process_group):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    with (
        pytest.raises(NotImplementedError, match="found '1', a SyncBatchNorm over 2 ranks"),
        deferred_batch_norm(model),
    ):
        pass
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("process_group", [("gloo", 1, distributed.HashStore)], indirect=True, ids=["gloo"])
@pytest.mark.parametrize("outside", [True, False])
def test_it_works_around_ddp_and_inside_it(process_group, outside):
    model, full = network(), network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = values(16, 6)
    *first, last = x.split(RAGGED)
    with deferred_batch_norm(wrapped if outside else model):
        with wrapped.no_sync():
            for piece in first:
                wrapped(piece).sum().backward()
        wrapped(last).sum().backward()
    full(x)
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14


def test_a_compiled_model_is_right_if_its_first_call_is_in_a_block():
    model, full = network(), network()
    compiled = torch.compile(model, backend="eager")
    try:
        for step in range(2):
            x = values(16, 6, seed=step)
            with deferred_batch_norm(model):
                for piece in x.split(RAGGED):
                    compiled(piece).sum().backward()
            full(x)
    finally:
        torch._dynamo.reset()
    assert distance(statistics(model[0]), statistics(full[0])) <= 1e-14


COMPILED_BEFORE = """
import torch
from memlab.gradient_accumulation import deferred_batch_norm

model, x = torch.nn.Sequential(torch.nn.BatchNorm1d(6)), torch.randn(16, 6)
compiled = torch.compile(model, backend="eager")
compiled(x)
try:
    with deferred_batch_norm(model):
        compiled(x)
except RuntimeError as error:
    print(error)
print(not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))
"""


def test_a_model_that_was_compiled_before_is_told_from_one_that_runs_its_hooks():
    """In a process of its own: what dynamo guards depends on every global hook that there is or was."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILED_BEFORE]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert printed[0].startswith("expected the forward of '0' to run")
    assert printed[1:] == ["True"]
