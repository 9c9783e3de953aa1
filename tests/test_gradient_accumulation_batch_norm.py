"""Deferred BatchNorm: under accumulation, running statistics move once, as the full batch moves them."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from memlab.gradient_accumulation import deferred_batch_norm
from memlab.memory_timeline import Meter
from tests.harness import nothing_left_behind

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


def distance(found: nn.Module, expected: nn.Module | dict) -> float:
    """The largest relative difference of two sets of statistics; the counters must be equal."""
    found, expected = (s if isinstance(s, dict) else statistics(s) for s in (found, expected))
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], expected[name]) for name in found if name.endswith("tracked"))
    moved = [name for name in found if not name.endswith("tracked")]
    return max(
        ((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)).item() for name in moved
    )


def norm(channels=6, kind=nn.BatchNorm1d, dtype=FP64, **options) -> nn.Module:
    return kind(channels, dtype=dtype, **options)


def network(dtype=FP64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    ).to(dtype)


def deferred(model: nn.Module, x: torch.Tensor, sizes=RAGGED, call=None) -> nn.Module:
    """The model after one block around all micro-batches of x."""
    with deferred_batch_norm(model):
        for piece in x.split(sizes):
            (call or model)(piece)
    return model


def in_one_batch(model: nn.Module, x: torch.Tensor) -> nn.Module:
    model(x)
    return model


@pytest.mark.parametrize(
    ("kind", "shape", "momentum"),
    [
        (nn.BatchNorm1d, (16, 5), None),
        (nn.BatchNorm1d, (16, 5, 3), 0.1),
        (nn.BatchNorm2d, (16, 5, 3, 2), 0.7),
        (nn.BatchNorm3d, (16, 5, 2, 1, 3), 0.0),
        (nn.SyncBatchNorm, (16, 5, 3), 1.0),
        (nn.LazyBatchNorm1d, (16, 5), 0.1),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else str(x),
)
def test_over_several_steps_running_statistics_are_the_full_batch_s(kind, shape, momentum):
    channels = () if "Lazy" in kind.__name__ else (5,)
    full, found = (kind(*channels, momentum=momentum, dtype=FP64) for _ in range(2))
    for step in range(3):
        x = values(*shape, seed=step)
        full(x)
        deferred(found, x)
    assert found.num_batches_tracked == 3
    assert distance(found, full) <= 1e-14


@settings(max_examples=20, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(2, 9), min_size=1, max_size=8), offset=st.sampled_from([0.0, 1e3, -1e6]))
def test_any_ragged_split_gives_the_same_statistics(sizes, offset):
    x = values(sum(sizes), 4) + offset
    found, full = deferred(norm(4, momentum=1.0), x, sizes), in_one_batch(norm(4, momentum=1.0), x)
    assert distance(found, full) <= 1e-13 * max(1, abs(offset))


def test_a_deeper_layer_has_the_exact_statistics_of_the_inputs_it_saw_which_are_not_the_full_batch_s():
    model, full, x, seen = network(), network(), values(16, 6), []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    deferred(model, x, call=lambda piece: model(piece).sum().backward())
    full(x)
    assert distance(model[0], full[0]) <= 1e-14
    assert distance(model[2], in_one_batch(norm(8), torch.cat(seen))) <= 1e-14
    assert distance(model[2], full[2]) > 1e-3


def test_outputs_and_gradients_are_those_without_the_block_to_the_bit():
    results = []
    for block in (deferred_batch_norm, lambda model: torch.enable_grad()):
        model, outputs = network(FP32), []
        x = values(16, 6, dtype=FP32).requires_grad_()
        with block(model):
            for piece in x.split(RAGGED):
                outputs.append(model(piece))
                outputs[-1].square().sum().backward()
        results.append([*outputs, x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_in_evaluation_mode_and_without_running_statistics_are_left_alone():
    frozen, untracked, stopped = norm(), norm(track_running_stats=False), norm()
    frozen.eval()
    stopped.track_running_stats = False
    model = nn.Sequential(frozen, untracked, stopped, nn.LayerNorm(6, dtype=FP64))
    before = copy.deepcopy(model.state_dict())
    with nothing_left_behind(model):
        deferred(model, values(16, 6))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_layer_without_a_counter_moves_as_torch_moves_it(momentum):
    layer, full, x = norm(momentum=momentum), norm(momentum=momentum), values(16, 6)
    layer.num_batches_tracked = full.num_batches_tracked = None
    assert distance(deferred(layer, x), in_one_batch(full, x)) <= 1e-14 and layer.num_batches_tracked is None


def test_a_layer_that_no_forward_reaches_does_not_move_and_neither_does_an_empty_block():
    model = nn.ModuleList([norm(3), norm(3)])
    deferred(model, values(4, 3), 4, call=model[0])
    with deferred_batch_norm(model):
        pass
    assert [layer.num_batches_tracked.item() for layer in model] == [1, 0]
    assert torch.equal(model[1].running_var, torch.ones(3, dtype=FP64))


class Pair(nn.Module):
    """A forward that calls the model twice."""

    def __init__(self):
        super().__init__()
        self.both = network()

    def forward(self, x, y):
        return self.both(x) + self.both(y)


def test_a_layer_that_is_called_twice_for_a_micro_batch_moves_once_towards_all_values_together():
    x, y, full = values(16, 6), values(16, 6) * 2 + 1, norm()
    once, pair = network(), Pair()
    with deferred_batch_norm(once), deferred_batch_norm(pair):
        for piece in zip(x.split(RAGGED), y.split(RAGGED), strict=True):
            pair(*piece)
            for half in piece:
                once(half)
    full(torch.cat((x, y)))
    assert distance(once[0], full) <= 1e-14 and distance(pair.both[0], full) <= 1e-14


def fails_in_the_middle(model, piece):
    failing = model[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(piece)
    failing.remove()


def inference(model, piece):
    with torch.inference_mode():
        model(piece)


FORWARDS = {
    "failed": fails_in_the_middle,
    "inference_mode": inference,
    "checkpointed": lambda model, piece: checkpoint(model, piece, use_reentrant=False).sum().backward(),
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_every_kind_of_forward_counts_once_with_those_of_the_whole_model(forward):
    model, full, x = network(), network(), values(16, 6).requires_grad_()
    with deferred_batch_norm(model):
        forward(model, x[:5])
        model(x[5:9]).sum().backward()
        model[0](x[9:])
    full(x)
    assert distance(model[0], full[0]) <= 1e-14
    assert model[2].num_batches_tracked == 1


def test_a_hook_of_the_model_s_own_that_changes_an_output_changes_no_count():
    layer, x = norm(), values(16, 6)
    layer.register_forward_hook(lambda module, args, output: (output[:1], "and more"))
    assert distance(deferred(layer, x), in_one_batch(norm(), x)) <= 1e-14


def test_an_empty_micro_batch_weighs_nothing_and_backward_may_come_after_the_block():
    layer, x, losses = norm(), values(16, 6), []
    deferred(layer, x, [4, 0, 12], call=lambda piece: losses.append(layer(piece).sum()))
    sum(losses).backward()
    assert distance(layer, in_one_batch(norm(), x)) <= 1e-14


@pytest.mark.parametrize("narrow_layer", [False, True])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_16_bit_inputs_under_fp32_buffers_lose_nothing_and_a_16_bit_layer_is_within_its_rounding(dtype, narrow_layer):
    layer, x = norm(dtype=dtype if narrow_layer else FP32), values(64, 6, dtype=dtype)
    deferred(layer, x, 4)
    assert layer.running_var.dtype is (dtype if narrow_layer else FP32)
    bound = torch.finfo(dtype).eps if narrow_layer else 4 * torch.finfo(FP32).eps
    assert distance(layer.double(), in_one_batch(norm(), x.double())) <= bound


def test_a_16_bit_layer_s_buffers_are_rounded_once_from_the_merged_statistics():
    layer, x = norm(64, dtype=BF16), values(64, 64, dtype=BF16)
    layer.running_mean.copy_(torch.linspace(-9, 9, 64))
    start = layer.running_mean.double()
    deferred(layer, x, 4)
    rounded = torch.stack([piece.double().mean(0).to(BF16) for piece in x.split(4)]).double()
    assert torch.equal(layer.running_mean, (0.9 * start + 0.1 * rounded.mean(0)).to(BF16))


def own(model: nn.Module) -> list:
    """What a block could exchange: buffers by identity and value, momenta, forwards."""
    buffers = [(id(b), b.tolist()) for b in model.buffers()]
    return [buffers, [getattr(m, "momentum", None) for m in model.modules()], [set(vars(m)) for m in model.modules()]]


@pytest.mark.parametrize(
    ("error", "where"), [(KeyboardInterrupt, "block"), (ValueError, "forward"), (KeyboardInterrupt, "hook")]
)
def test_a_block_that_raises_moves_nothing_and_leaves_nothing(error, where):
    model = network()

    def fail(*_):
        raise error("on purpose")

    before, undo = own(model), []
    if where == "hook":
        undo += [model[2].register_forward_pre_hook(fail), model[2].register_forward_hook(fail)]
    if where == "forward":
        model[2]._check_input_dim = fail
    with nothing_left_behind(model), pytest.raises(error, match="on purpose"), deferred_batch_norm(model):
        model[0](values(5, 6))
        model[1:3](values(5, 6)) if where != "block" else fail()
    for handle in undo:
        handle.remove()
    vars(model[2]).pop("_check_input_dim", None)
    assert own(model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_fails_or_is_interrupted_inside_the_block_loses_no_statistics(error):
    class Failing(nn.BatchNorm1d):
        def _check_input_dim(self, x):
            if len(x) == 1:
                raise error

    layer, x = norm(kind=Failing), values(16, 6)
    before = own(layer)

    def with_failures(piece):
        with pytest.raises(error):
            layer(piece[:1])
        assert torch.equal(layer.eval()(piece), norm().eval()(piece))
        with pytest.raises(error):
            layer.train()(piece[:1])
        layer(piece)
        assert own(layer) == before

    assert distance(deferred(layer, x, call=with_failures), in_one_batch(norm(), x)) <= 1e-14
    assert [id(b) for b in layer.buffers()] == [number for number, _ in before[0]]


@pytest.mark.parametrize(("k", "in_flight"), [(4, 1), (8, 4)])
def test_the_block_costs_16_bytes_a_channel_and_8_a_layer_whatever_k_and_saves_no_other_tensors(k, in_flight):
    peaks, ends = {}, {}
    for block in (deferred_batch_norm, lambda model: torch.enable_grad()):
        model = network(FP32)
        pieces = [values(32, 6, dtype=FP32) for _ in range(k)]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with Meter(model, inputs=pieces) as meter, block(model):
            for first in range(0, k, in_flight):
                losses = [model(piece).sum() for piece in pieces[first : first + in_flight]]
                while losses:
                    losses.pop().backward()
        peaks[block], ends[block] = meter.timeline.peak_bytes, meter.timeline.bytes_at(len(meter.timeline))
    found, plain = peaks.values()
    assert found - plain == 16 * (6 + 8) + 8 * 2
    assert len(set(ends.values())) == 1


def test_another_block_inside_is_refused_and_one_afterwards_is_not():
    model = network()
    part = nn.ModuleDict({"part": model[2]})
    with deferred_batch_norm(model):
        with pytest.raises(RuntimeError, match="found 'part' inside another"), deferred_batch_norm(part):
            pass
        model(values(4, 6))
    deferred(part, values(4, 6), 4, call=model)
    assert model[0].num_batches_tracked == model[2].num_batches_tracked == 2


def test_a_sync_batch_norm_over_several_ranks_is_refused_and_nothing_stays():
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    found = pytest.raises(NotImplementedError, match="found '1', a SyncBatchNorm over 2 ranks")
    try:
        with nothing_left_behind(model), found, deferred_batch_norm(model):
            pass
    finally:
        distributed.destroy_process_group()


def test_a_compiled_model_is_right_if_its_first_call_is_in_a_block():
    model, full = network(), network()
    compiled = torch.compile(model, backend="eager")
    try:
        for step in range(2):
            x = values(16, 6, seed=step)
            deferred(model, x, call=lambda piece: compiled(piece).sum().backward())
            full(x)
    finally:
        torch._dynamo.reset()
    assert distance(model[0], full[0]) <= 1e-14


def test_statistics_that_moved_though_no_forward_was_seen_are_refused():
    """As compiled code moves them that looks at no hooks."""
    model = nn.Sequential(norm())
    with pytest.raises(RuntimeError, match="expected the forward of '0' to run its hooks"), deferred_batch_norm(model):
        model[0].forward(values(16, 6))
