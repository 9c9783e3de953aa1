"""BatchNorm under checkpointing: running statistics and counters move once, as without it."""

import copy
import functools
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.modules import module as nn_module
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.gradient_accumulation.batch_norm import deferred_batch_norm
from memlab.gradient_checkpointing.hooks import checkpoint
from memlab.gradient_checkpointing.modules import checkpointed
from memlab.memory_timeline import Meter

torchs = functools.partial(torch_checkpoint, use_reentrant=False)


def plain(function, *args):
    return function(*args)


def values(*shape, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def after(way, model, function=None, shape=(6, 4), steps: int = 3) -> tuple[dict, list[Tensor]]:
    """State and gradients of the model (a copy, or what it makes) after some steps; function(model) is checkpointed."""
    model = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
    run = function(model) if function else model
    for seed in range(steps):
        x = values(*shape, seed=seed).requires_grad_()
        way(run, x).square().sum().backward()
    return model.state_dict(), [p.grad for p in model.parameters() if p.grad is not None]


def equal(found, expected) -> bool:
    """The same state and gradients, bit for bit."""
    (state, gradients), (states, others) = found, expected
    return (
        state.keys() == states.keys()
        and all(torch.equal(state[name], states[name]) for name in state)
        and len(gradients) == len(others)
        and all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    )


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 2))


def untouched(model: nn.Module) -> bool:
    """No hook is left anywhere."""
    return not nn_module._global_forward_pre_hooks and not any(
        m._forward_hooks or m._forward_hooks_always_called or m._forward_pre_hooks for m in model.modules()
    )


# ---- counted once


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (6, 4)),
        (nn.BatchNorm1d, (6, 4, 3)),
        (nn.BatchNorm2d, (6, 4, 3, 2)),
        (nn.BatchNorm3d, (6, 4, 2, 1, 3)),
        (nn.SyncBatchNorm, (6, 4, 3)),
        (nn.LazyBatchNorm2d, (6, 4, 3, 2)),
    ],
    ids=lambda x: str(len(x)) + "-D" if isinstance(x, tuple) else x.__name__,
)
def test_statistics_and_gradients_are_bitwise_those_without_checkpointing(kind, shape, momentum):
    channels = () if "Lazy" in str(kind) else (4,)
    layer = functools.partial(kind, *channels, momentum=momentum)
    assert equal(after(checkpoint, layer, shape=shape), after(plain, layer, shape=shape))


def test_instance_norm_s_statistics_move_once_too():
    layer = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    assert equal(after(checkpoint, layer, shape=(6, 4, 3, 2)), after(plain, layer, shape=(6, 4, 3, 2)))


def test_torch_s_own_counts_twice():
    layer = nn.BatchNorm1d(4)
    found, expected = (after(way, layer, steps=1)[0] for way in (torchs, plain))
    assert found["num_batches_tracked"] == 2 * expected["num_batches_tracked"] == 2
    assert torch.allclose(found["running_mean"], 1.9 * expected["running_mean"])


FUNCTIONS = {
    "the module": lambda model, way: model,
    "a lambda": lambda model, way: lambda x: model(x),
    "a method": lambda model, way: model.forward,
    "a partial": lambda model, way: functools.partial(lambda m, x: m(x), model),
    "a list": lambda model, way: lambda x, layers=list(model): functools.reduce(lambda x, layer: layer(x), layers, x),
    "twice": lambda model, way: lambda x: model(x) + model(x * 2),
    "nested": lambda model, way: lambda x: way(model[2:], way(model[:2], x)),
    "nested deeply": lambda model, way: lambda x: way(lambda x: way(lambda x: way(model, x), x), x),
    "shared by two inside": lambda model, way: lambda x: way(model, x) + way(model, x * 2),
    "with a backward inside": lambda model, way: lambda x: x * slope(model(x), x),
    "with a checkpoint's backward inside": lambda model, way: lambda x: x * slope(way(model, x), x),
}


def slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("case", FUNCTIONS)
def test_the_layers_are_found_wherever_they_are_called(case):
    function, model = FUNCTIONS[case], network()
    found = after(checkpoint, model, lambda model: function(model, checkpoint))
    assert equal(found, after(plain, model, lambda model: function(model, plain)))


class NormalisedReLU(nn.BatchNorm1d):
    """A block that is a BatchNorm itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("keep", [None, 0])
@pytest.mark.parametrize("which", [nn.BatchNorm1d, NormalisedReLU, nn.Module])
def test_a_layer_that_is_chosen_itself_moves_once(which, keep):
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 5), NormalisedReLU(5)), nn.Linear(5, 2)
    model = nn.Sequential(*layers)

    def way(run, x):
        with checkpointed(run, which, keep=keep):
            return run(x)

    assert equal(after(way, model), after(plain, model)) and untouched(model)


@pytest.mark.parametrize(
    "function", [lambda f: f, functools.partial, lambda f: functools.partial(functools.partial(f))]
)
def test_a_layer_whose_forward_is_the_function_moves_once_and_its_buffers_are_never_written_to(function):
    layer, x = nn.BatchNorm1d(4), values(6, 4).requires_grad_()
    assert equal(after(checkpoint, layer, lambda layer: function(layer.forward)), after(plain, layer))
    y, own = checkpoint(function(layer.forward), x), dict(layer.named_buffers())
    z = layer.eval()(x)  # saves the running statistics
    layer.train()
    (y.square().sum() + z.square().sum()).backward()
    assert untouched(layer) and all(buffer is own[name] for name, buffer in layer.named_buffers())


def test_a_resnet_like_step_is_bitwise_that_without():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    found, expected = (after(way, model, shape=(4, 3, 8, 8)) for way in (checkpoint, plain))
    assert equal(found, expected)


def test_a_second_backward_does_not_count_either():
    model, x = network(), values(6, 4)
    y = checkpoint(model, x).sum()
    state = copy.deepcopy(model.state_dict())
    y.backward(retain_graph=True)
    y.backward()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))


def test_looking_at_a_saved_tensor_does_not_count():
    layer = nn.BatchNorm1d(4)
    y = checkpoint(lambda x: layer(x).exp(), values(6, 4))
    assert y.grad_fn._saved_result.shape == (6, 4)
    assert layer.num_batches_tracked == 1


def test_layers_in_evaluation_mode_read_their_own_statistics_even_beside_training():
    layer = nn.BatchNorm1d(4)

    def train_then_evaluate(layer):
        def function(x):
            x = layer.train()(x.exp())
            return layer.eval()(x.exp() * 100).sin()

        return function

    assert equal(
        after(checkpoint, layer, train_then_evaluate, steps=1), after(plain, layer, train_then_evaluate, steps=1)
    )


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4).eval()])
def test_layers_that_move_nothing_are_left_alone(layer):
    assert equal(after(checkpoint, layer), after(plain, layer))


def test_frozen_layers_in_training_mode_move_once():
    model = network()
    model[2].requires_grad_(False)
    assert equal(after(checkpoint, model), after(plain, model))


def test_inside_deferred_batch_norm_the_group_counts_once():
    states = []
    for way in (plain, checkpoint):
        model = network()
        with deferred_batch_norm(model):
            for seed in range(3):
                way(model, values(6, 4, seed=seed)).sum().backward()
        states.append(list(model.state_dict().values()))
        assert untouched(model)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


# ---- the layer's own buffers are never written to, and always there again


@pytest.mark.parametrize("ends", ["at the end", "in the layer", "by an error before", "by an error after"])
def test_the_layer_has_its_own_buffers_and_no_hook_whatever_ends_the_recomputation(ends):
    layer, calls = nn.BatchNorm1d(4), []

    def function(x):
        calls.append(1)
        again = len(calls) > 1
        if again and ends == "by an error before":
            layer(x[:, :3])
        x = layer(x.exp())
        if again and ends == "by an error after":
            raise ValueError("after")
        return x if ends == "in the layer" else x.exp() + 1

    y = checkpoint(function, values(6, 4))
    own = {name: (id(buffer), buffer._version, buffer.clone()) for name, buffer in layer.named_buffers()}
    if "error" in ends:
        with pytest.raises((ValueError, RuntimeError)):
            y.sum().backward()
    else:
        y.sum().backward()
    assert len(calls) == 2 and untouched(layer)
    for name, buffer in layer.named_buffers():
        address, version, value = own[name]
        assert id(buffer) == address and buffer._version == version and torch.equal(buffer, value)


def test_an_interrupt_in_the_middle_of_a_layer_leaves_its_own_buffers():
    calls = []

    class Interrupted(nn.BatchNorm1d):
        def forward(self, x):
            calls.append(1)
            if len(calls) > 1:
                raise KeyboardInterrupt
            return super().forward(x)

    layer = Interrupted(4)
    own = dict(layer.named_buffers())
    y = checkpoint(lambda x: layer(x).exp(), values(6, 4))
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert untouched(layer) and all(buffer is own[name] for name, buffer in layer.named_buffers())


def test_a_layer_for_which_there_is_no_room_to_lend_has_its_own_buffers_again():
    layer, calls = nn.BatchNorm1d(4), []

    class NoRoomForTheSecond(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.clone.default:
                calls.append(op)
                if len(calls) == 2:
                    raise torch.OutOfMemoryError("no room")
            return op(*args, **(kwargs or {}))

    own = dict(layer.named_buffers())
    y = checkpoint(lambda x: layer(x).exp(), values(6, 4))
    with pytest.raises(torch.OutOfMemoryError), NoRoomForTheSecond():
        y.sum().backward()
    assert len(calls) == 2 and untouched(layer)
    assert all(buffer is own[name] for name, buffer in layer.named_buffers())


def test_what_autograd_saved_of_the_buffers_elsewhere_stays_valid():
    layer, x = nn.BatchNorm1d(4), values(6, 4).requires_grad_()
    y = checkpoint(lambda x: layer(x).exp(), x)
    z = layer.eval()(x)  # saves the running statistics
    layer.train()
    (y.sum() + z.square().sum()).backward()  # writing them back would be an error here


def test_another_thread_s_forward_counts_meanwhile():
    layer, other, calls = nn.BatchNorm1d(4), nn.BatchNorm1d(4), []

    def function(x):
        calls.append(1)
        if len(calls) > 1:
            thread = threading.Thread(target=other, args=(values(6, 4),))
            thread.start()
            thread.join()
        return layer(x).exp()

    checkpoint(function, values(6, 4)).sum().backward()
    assert other.num_batches_tracked == layer.num_batches_tracked == 1
    assert untouched(layer) and untouched(other)


def test_lent_buffers_cost_no_byte_of_the_peak():
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64))))
    x, peaks = values(16, 64), []
    for way in (torchs, checkpoint):
        model.zero_grad()
        with Meter(model, inputs=x) as meter:
            way(model, way(model, x)).sum().backward()
        peaks.append(meter.timeline.peak_bytes)
    assert peaks[1] <= peaks[0]


# ---- what is still counted twice


class Counter(nn.Module):
    """Counts its forwards in a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x.exp()


class ByHand(nn.BatchNorm1d):
    """A module with a BatchNorm's buffers that is none."""

    def __call__(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=True)


STATEFUL = {
    "a counter of one's own": lambda: Counter(),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "an observer": lambda: nn.Sequential(MovingAverageMinMaxObserver(averaging_constant=0.5), nn.Tanh()),
    "F.batch_norm": lambda: ByHand(4),
    "layer.forward": lambda: nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("case", STATEFUL)
@pytest.mark.parametrize("way", [torchs, checkpoint])
def test_other_state_is_still_moved_by_each_run(case, way):
    torch.manual_seed(0)
    model = STATEFUL[case]()
    function = (lambda model: lambda x: model.forward(x).exp()) if case == "layer.forward" else None
    found, expected = (after(each, model, function, steps=2)[0] for each in (way, plain))
    assert any(not torch.equal(found[name], expected[name]) for name in expected)
