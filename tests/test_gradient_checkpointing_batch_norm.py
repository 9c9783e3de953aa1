"""BatchNorm under checkpointing: running statistics and counters move once, as without it."""

import contextlib
import copy
import functools
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.gradient_accumulation import deferred_batch_norm
from memlab.gradient_checkpointing import checkpoint, checkpointed
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


@pytest.mark.parametrize(
    ("kind", "shape", "momentum"),
    [
        (nn.BatchNorm1d, (6, 4), 0.1),
        (nn.BatchNorm2d, (6, 4, 3, 2), None),
        (nn.BatchNorm3d, (6, 4, 2, 1, 3), 1.0),
        (nn.SyncBatchNorm, (6, 4, 3), 0.0),
        (nn.LazyBatchNorm2d, (6, 4, 3, 2), 0.1),
        (functools.partial(nn.InstanceNorm2d, affine=True, track_running_stats=True), (6, 4, 3, 2), 0.1),
    ],
)
def test_statistics_and_gradients_are_bitwise_those_without_checkpointing(kind, shape, momentum):
    channels = () if "Lazy" in str(kind) else (4,)
    layer = functools.partial(kind, *channels, momentum=momentum)
    assert equal(after(checkpoint, layer, shape=shape), after(plain, layer, shape=shape))


FUNCTIONS = {
    "the module": lambda model, way: model,
    "a method": lambda model, way: model.forward,
    "a partial": lambda model, way: functools.partial(lambda m, x: m(x), model),
    "twice": lambda model, way: lambda x: model(x) + model(x * 2),
    "nested": lambda model, way: lambda x: way(model[2:], way(model[:2], x)),
    "shared by two inside": lambda model, way: lambda x: way(model, x) + way(model, x * 2),
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


@pytest.mark.parametrize(("kind", "keep"), [(nn.BatchNorm1d, None), (NormalisedReLU, 0), (nn.Sequential, None)])
def test_a_layer_that_is_chosen_itself_moves_once(kind, keep):
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 5), NormalisedReLU(5)), nn.Linear(5, 2)
    model = nn.Sequential(*layers)

    def way(run, x):
        with checkpointed(run, [m for m in run.modules() if isinstance(m, kind) and m is not run], keep=keep):
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


ENDS = ["at the end", "in the layer", "by an error before", "by an error after", "by an interrupt"]


@pytest.mark.parametrize("ends", ENDS)
def test_the_layer_has_its_own_buffers_and_no_hook_whatever_ends_the_recomputation(ends):
    layer, calls = nn.BatchNorm1d(4), []

    def interrupt(x):
        raise KeyboardInterrupt

    def function(x):
        calls.append(1)
        again = len(calls) > 1
        if again and ends == "by an error before":
            layer(x[:, :3])
        if again and ends == "by an interrupt":
            layer._check_input_dim = interrupt
        x = layer(x.exp())
        if again and ends == "by an error after":
            raise ValueError("after")
        return x if ends == "in the layer" else x.exp() + 1

    y = checkpoint(function, values(6, 4)).sum()
    own = {name: (id(buffer), buffer._version, buffer.clone()) for name, buffer in layer.named_buffers()}
    fails = ends.startswith("by")
    with pytest.raises((ValueError, RuntimeError, KeyboardInterrupt)) if fails else contextlib.nullcontext():
        y.backward()
    assert len(calls) == 2 and untouched(layer)
    for name, buffer in layer.named_buffers():
        address, version, value = own[name]
        assert id(buffer) == address and buffer._version == version and torch.equal(buffer, value)


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
