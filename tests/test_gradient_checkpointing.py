"""checkpoint: the same gradients from fewer bytes, compared with plain autograd and with torch's own checkpoint."""

import functools
import gc
import itertools
import math
import threading
import weakref
from collections import namedtuple
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.book.workloads import GPT
from memlab.gradient_checkpointing import checkpoint, selective_checkpoint
from memlab.gradient_checkpointing.state import State
from memlab.memory_timeline import Meter, imagine
from memlab.offloading import swap_activations
from tests.harness import refusals, refused
from tests.tiers import some
from tests.torch_ops import differentiable_ops_of_torch

torchs = functools.partial(torch_checkpoint, use_reentrant=False)
BF16 = torch.bfloat16
grad = torch.autograd.grad


def plain(function, /, *args, preserve_rng_state=True, **kwargs):
    return function(*args, **kwargs)


def values(*shape, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def alike(found, expected) -> bool:
    """Equal bit for bit, None where None is."""
    return len(found) == len(expected) and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(found, expected, strict=True)
    )


class Counted:
    """A function that knows how often it was called, and how often it came to its end."""

    def __init__(self, function):
        self.function, self.calls, self.ends = function, 0, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        result = self.function(*args, **kwargs)
        self.ends += 1
        return result


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mlp(x: Tensor) -> Tensor:
    return (x.sin() * x).exp().cos()


def layers_of_four() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def gpt(way, **sizes) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(**{"layers": 3, "width": 32, "context": 16, **sizes})
    for block in model.blocks:
        block.forward = functools.partial(way, block.forward)
    return model


def step(model: nn.Module, batch: tuple, autocast) -> tuple[int, list, Tensor]:
    """One forward and backward: the peak in bytes, the gradients, and where the stream of random numbers ends."""
    torch.manual_seed(1)
    with Meter(model, inputs=batch) as meter:
        with torch.autocast("cpu", BF16) if autocast else nullcontext():
            loss = model(*batch)
        loss.sum().backward()
    if model.blocks[0].forward.func is checkpoint:
        assert any(event.phase == "recompute" and event.delta > 0 for event in meter.timeline.events)
    return meter.timeline.peak_bytes, [p.grad for p in model.parameters()], torch.get_rng_state()


SIZES = [{}, {"dropout": 0.1}, {"attention": "by hand"}, {"attention": "by hand", "dropout": 0.2}]


@some("sizes, autocast", itertools.product(SIZES, [False, True]), keep=4)
def test_a_gpt_has_the_gradients_of_autograd_and_a_peak_not_above_torch_s(sizes, autocast):
    tokens = torch.randint(0, 256, (2, 2, 16), generator=torch.Generator().manual_seed(0)).unbind()
    peaks, expected = {}, None
    for way in (plain, torchs, checkpoint):
        peaks[way], gradients, stream = step(gpt(way, **sizes), tokens, autocast)
        expected = expected or (gradients, stream)
        assert alike(gradients, expected[0]) and torch.equal(stream, expected[1])
    assert peaks[checkpoint] <= peaks[torchs] < peaks[plain]


def noisy(x: Tensor) -> Tensor:
    return nn.functional.dropout(x.sin(), 0.5).exp() * torch.rand(x.shape)


Pair = namedtuple("Pair", "a b")


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors
        return gradient * ctx.saved_tensors[1]


def a_list_that_grows(way, a, b):
    def function(tensors):
        tensors.append(tensors[-1].exp())
        return tensors[-1].sin() * len(tensors) * b

    tensors = [a]
    y = way(function, tensors)
    assert len(tensors) == 2
    return y


def results_of_any_kind(way, a, b):
    assert way(lambda x: None, a) is None
    found = way(lambda x: {"y": [x.exp() * b, 3], "x": x, "s": "s"}, a)
    assert found["y"][1] == 3 and found["x"] is a and found["s"] == "s"
    return found["y"][0]


def backward_inside(retain):
    def function(x, b):
        z = x.sin().cos() * b
        (g,) = grad(z.sum(), x, retain_graph=retain)
        return x.cos() * g + (z if retain else 0)

    return lambda way, a, b: way(function, a, b)


def a_checkpoints_backward_inside(way, a, b):
    def function(x):
        (g,) = grad(way(mlp, x).sum(), x, create_graph=True)
        return g.sin() * x * b

    return way(function, a)


def random_numbers(way, a, b):
    torch.manual_seed(3)
    y = way(noisy, a)
    return y * b * torch.rand(3)


FUNCTIONS = {
    "keywords": lambda way, a, b: way(lambda *, a, b: a.exp() * b.sin(), a=a, b=b),
    "called function": lambda way, a, b: way(lambda x, function: x.exp() * function, a, function=b),
    "nested": lambda way, a, b: way(lambda x, y: x[0].exp() * y["b"][1][0].sin(), [a, None], {"b": (1, [b])}),
    "a named tuple": lambda way, a, b: way(lambda p, k=1: p.a.exp() * p.b.sin() * k, Pair(a, b), k=3),
    "no tensor": lambda way, a, b: way(lambda n, s, c: c(a).tensor.exp() * b, None, "s", Box),
    "inside an object": lambda way, a, b: way(lambda box, b: box.tensor.exp() * b, Box(a), b),
    "an integer tensor": lambda way, a, b: way(lambda a, b, i: a[i].exp() * b, a, b, torch.tensor([2, 0, 1])),
    "the same twice": lambda way, a, b: way(lambda a, b, c: a.exp() * b * c, a, b, a),
    "a list that grows": a_list_that_grows,
    "results of any kind": results_of_any_kind,
    "random numbers": random_numbers,
    "in torch's own": lambda way, a, b: torchs(lambda x: way(mlp, mlp(x.sin())).cos() * b, a),
    "around torch's own": lambda way, a, b: way(lambda x: torchs(mlp, mlp(x.sin())).cos().sin() * b, a),
    "backward inside, retained": backward_inside(True),
    "a checkpoint's backward inside": a_checkpoints_backward_inside,
    "a Function that reads twice": lambda way, a, b: way(lambda x: ReadsTwice.apply(x.sin()).cos() * b, a),
    "a mapped function": lambda way, a, b: way(torch.vmap(mlp), a) * b,
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_gradients_are_autograd_s_whatever_the_function_is_given_does_and_gives(case):
    found = []
    for way in (plain, checkpoint):
        torch.manual_seed(0)
        a, b = values(3), values(3, seed=1)
        y = FUNCTIONS[case](way, a, b)
        y.sum().backward()
        found.append([y.detach(), a.grad, b.grad, torch.rand(3)])
    assert alike(*found)


def test_double_backward():
    x, seen = values(5), []
    for way in (plain, checkpoint):
        (first,) = grad(way(mlp, x).sum(), x, create_graph=True)
        seen.append((first, *grad((first * first).sum(), x)))
    assert alike(*seen)
    x = values(4).double().detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(mlp, x), x)


@pytest.mark.parametrize("of_input", [False, True])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(of_input):
    layer, x = layers_of_four(), values(2, 4).detach()
    layer[0].requires_grad_(False)
    wanted = [*layer[2].parameters(), *([x.requires_grad_()] if of_input else [])]
    expected = grad(layer(x).sum(), wanted)
    checkpoint(layer, x).sum().backward()
    assert layer[0].weight.grad is None and layer[0].bias.grad is None
    assert alike([one.grad for one in wanted], expected)


def test_without_preserve_rng_state_the_second_run_draws_on():
    x = values(50)
    torch.manual_seed(3)
    before = checkpoint(noisy, x, preserve_rng_state=False).sum()
    state = torch.get_rng_state()
    (drawn_on,) = grad(before, x)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert not torch.equal(drawn_on, *grad(noisy(x).sum(), x))


def test_a_failing_second_run_leaves_the_stream_and_autocast_alone():
    x, calls = values(5), []

    def fails(x):
        calls.append(torch.rand(1))
        if len(calls) > 1:
            raise ValueError("the second time")
        return x.exp()

    with torch.autocast("cpu", BF16):
        y = checkpoint(fails, x).sum()
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match="the second time"):
            y.backward()
        assert torch.equal(torch.get_rng_state(), state) and not torch.is_autocast_enabled("cpu")
    assert torch.equal(calls[1], calls[0]) and torch.equal(calls[2], calls[0])


def test_streams_of_devices_are_noted_and_restored(monkeypatch):
    streams = {torch.device("cuda", 0): 10, torch.device("cuda", 1): 20}
    module = SimpleNamespace(get_rng_state=streams.__getitem__, set_rng_state=lambda s, d: streams.__setitem__(d, s))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    state = State([SimpleNamespace(device=device) for device in streams], preserve_rng_state=True)
    streams.update(dict.fromkeys(streams, 99))
    with ExitStack() as stack:
        state.restore(stack)
        assert list(streams.values()) == [10, 20]
    assert list(streams.values()) == [99, 99]


def test_of_imagined_tensors_the_state_is_a_cpus_also_where_a_gpu_runs(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: pytest.fail("nothing runs there"))
    with imagine("H100-80GB"):
        x = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cuda", BF16):  # which is the CPU's, in the block
            y = checkpoint(lambda x: (x @ x).sin(), x)
        y.sum().backward()
        assert y.dtype is BF16 and x.grad.shape == (2, 2)


def surroundings() -> tuple:
    of_cpu = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return *of_cpu, torch.empty(1).device, torch.is_grad_enabled()


AROUND = {
    "nothing": nullcontext,
    "BF16": lambda: torch.autocast("cpu", BF16),
    "FP16, no cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "off": lambda: torch.autocast("cpu", enabled=False),
    "meta": lambda: torch.device("meta"),
}


@some("inside, outside, elsewhere", itertools.product(AROUND, AROUND, [False, True]), keep=10)
def test_autocast_and_the_default_device_are_those_of_the_forward_in_this_thread_and_elsewhere(
    inside, outside, elsewhere
):
    x, seen = values(3), []

    def function(x):
        seen.append(surroundings())
        return x.exp()

    def backward():
        with AROUND[outside]():
            before = surroundings()
            y.backward(torch.ones(3, device="cpu"))
            assert surroundings() == before
            seen.append(True)

    with AROUND[inside]():
        y = checkpoint(function, x)
    thread = threading.Thread(target=backward)
    (thread.start if elsewhere else backward)()
    if elsewhere:
        thread.join()
    assert seen[0] == seen[1] and seen[2] is True


def fails(x: Tensor) -> Tensor:
    x.exp().sin()
    raise ValueError("once")


NOTHING_KEPT = {
    "no_grad": (mlp, torch.no_grad),
    "inference mode": (mlp, torch.inference_mode),
    "nothing to learn": (mlp, nullcontext),
    "nothing saved": (lambda x: x + 1, nullcontext),
    "an error": (fails, lambda: pytest.raises(ValueError, match="once")),
}


@pytest.mark.parametrize("case", NOTHING_KEPT)
def test_where_backward_needs_nothing_the_function_runs_once_and_nothing_is_left(case, no_gc):
    function, context = NOTHING_KEPT[case]
    counted, x, y = Counted(function), values(3), None
    gone = weakref.ref(counted)
    if case == "nothing to learn":
        x = x.detach()
    with context():
        y = checkpoint(counted, x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    if case == "nothing saved":
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(3))
    assert counted.calls == 1 and (y is None or torch.equal(y, function(x)))
    del counted
    assert gone() is None


def test_what_comes_after_the_last_saved_tensor_is_not_run_again():
    after = Counted(lambda x: x + 2)
    counted = Counted(lambda x: after(x.exp().sin()) + 1)
    checkpoint(counted, values(3)).sum().backward()
    assert (counted.calls, counted.ends, after.calls) == (2, 1, 1)
    later = Counted(mlp)
    checkpoint(lambda x: (x.exp(), later(x)), values(3))[0].sum().backward()  # what only a dropped result needs
    assert later.calls == 1


def test_a_function_that_catches_everything_is_stopped_all_the_same():
    def stubborn(x):
        try:
            return x.exp().sin()
        except Exception:
            return x.exp().sin().cos().sin()

    x, counted = values(3), Counted(stubborn)
    checkpoint(counted, x).sum().backward()
    assert (counted.calls, counted.ends) == (2, 1)
    assert torch.equal(x.grad, *grad(stubborn(x).sum(), x))


def nest(way, depth: int, leaves: list):
    """A binary tree of checkpoints, `depth` high, over functions that are counted."""
    if depth == 0:
        leaves.append(Counted(mlp))
        return leaves[-1]
    first, second = (nest(way, depth - 1, leaves) for _ in range(2))
    return lambda x: way(second, way(first, x))


@pytest.mark.parametrize("depth", [1, 3])
def test_nested_checkpoints_run_as_often_as_torch_s_and_no_oftener_than_they_must(depth):
    x, runs, gradients = values(5), {}, {}
    for way in (plain, torchs, checkpoint):
        leaves = []
        (gradients[way],) = grad(way(nest(way, depth, leaves), x).sum(), x)
        runs[way] = [leaf.calls for leaf in leaves]
    assert torch.equal(gradients[checkpoint], gradients[plain])
    # Each run of a tree runs its first half again to reach the second's input; what comes last is spared.
    expected = [1]
    for _ in range(depth):
        expected = [n + 1 for n in expected] + expected
    assert runs[checkpoint] == runs[torchs] == [n + 1 for n in expected]


def test_two_backwards_with_retain_graph_run_the_function_once_each():
    x, counted = values(5), Counted(mlp)
    y = checkpoint(counted, x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert counted.calls == 3 and torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def watched(storages: list):
    """A function of two results; storages: of what it makes, by weak references."""

    def function(x):
        a, b = x.exp(), x.sin().sin()
        storages.extend(weakref.ref(t.untyped_storage()) for t in (a, b))
        return a.sin(), b.sin()

    return function


def second_time(change):
    """A function that does something else when it is run again."""
    calls = []

    def changing(x):
        calls.append(1)
        return change(x, len(calls) > 1)

    return changing


def test_gradients_of_a_part_run_the_function_once_and_keep_nothing_of_the_rest():
    x, storages = values(5), []
    counted = Counted(watched(storages))
    a, b = checkpoint(counted, x)
    for calls, part, expected in ((2, a, x.exp().cos() * x.exp()), (3, b, grad(x.sin().sin().sin().sum(), x)[0])):
        assert torch.equal(*grad(part.sum(), x), expected) and counted.calls == calls
        assert [s() for s in storages] == [None] * 2 * calls


@pytest.mark.parametrize("way", ["backward", "dropped", "retained", "nested", "failed", "looked at"])
def test_without_the_collector_all_is_gone_when_backward_is(no_gc, way):
    x, storages = values(5), []
    inputs = x * 1
    held = weakref.ref(inputs.untyped_storage())
    function = lambda x: sum(watched(storages)(x)).cos()  # noqa: E731
    if way == "nested":
        inner = function
        function = lambda x: checkpoint(inner, checkpoint(inner, x))  # noqa: E731
    elif way == "failed":
        function = second_time(lambda x, again: watched(storages)(x)[0] if again else sum(watched(storages)(x)).cos())
    y = checkpoint(function, inputs).sum()
    del inputs
    if way == "failed":
        with pytest.raises(RuntimeError, match="no such tensor"):
            y.backward()
    elif way == "looked at":
        assert torch.equal(y.grad_fn.next_functions[0][0]._saved_self, sum(watched([])(x)))
    elif way != "dropped":
        y.backward(retain_graph=way == "retained")
        assert way == "retained" or held() is None
    assert [s() for s in storages] == [None] * len(storages)
    del y
    assert held() is None


def test_recomputed_tensors_die_as_backward_uses_them_even_when_the_graph_stays():
    alive_then, storages = [], []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            alive_then.append([s() is not None for s in storages[2:]])
            return gradient

    def function(x):
        a = Look.apply(x.sin()).exp()
        b = Look.apply(a.sin())
        storages.extend(weakref.ref(t.untyped_storage()) for t in (a, b))
        return b.sin()

    y = checkpoint(function, values(5)).sum()
    y.backward(retain_graph=True)
    assert alive_then == [[True, False], [False, False]]


@pytest.mark.parametrize("outer", ["a checkpoint", "save_on_cpu"])
def test_a_view_of_a_weight_that_was_written_to_comes_back_from_outer_hooks_and_is_the_same(outer):
    x, w = values(2, 3), values(3, 3, seed=1)
    w.detach().mul_(1.1)
    block = functools.partial(checkpoint, lambda x, w: (x @ w).tanh(), x)
    with save_on_cpu() if outer == "save_on_cpu" else nullcontext():
        y = checkpoint(lambda w: block(w.t()), w) if outer == "a checkpoint" else block(w.t())
    assert alike(grad(y.sum(), [x, w]), grad((x @ w.t()).tanh().sum(), [x, w]))


@pytest.mark.parametrize("outer", ["a checkpoint", "save_on_cpu", "swap_activations"])
def test_a_tensor_given_as_several_arguments_is_one_object_again_within_other_hooks(outer):
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2), values(4, 3, 8)  # its projections are one where `query is key is value`
    block = functools.partial(lambda way, x: way(attention, x, x, x)[0].tanh(), checkpoint)
    with {"save_on_cpu": save_on_cpu, "swap_activations": swap_activations}.get(outer, nullcontext)():
        y = checkpoint(block, x) if outer == "a checkpoint" else block(x)
    expected = grad(attention(x, x, x)[0].tanh().sum(), [x, *attention.parameters()])
    assert alike(grad(y.sum(), [x, *attention.parameters()]), expected)


class Flighty(nn.Module):
    """Saves nothing when it is run again."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x.exp() if self.calls == 1 else x


def changed(change):
    return lambda: checkpoint(second_time(change), values(6)).sum().backward()


def backward_of(function):
    return lambda: checkpoint(function, values(3)).sum().backward()


def writes_to_what_it_saved(x):
    a = x.exp()
    b = a.sin()
    a.mul_(2)
    return a * b


def an_input_is_written_to(way_of_giving):
    def call():
        a, b = values(3), values(3, seed=1).detach()
        y = way_of_giving(a, b).sum()
        b.add_(1)
        y.backward()

    return call


def a_weight_is_written_to():
    layer, x = nn.Linear(3, 3), values(2, 3)
    y = checkpoint(lambda x: layer(x.exp()), x).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    y.backward()


SAVED, INPLACE = "at tensor 1 of 2…", "modified by an inplace operation"
VMAP = "expected a checkpoint of…mlp outside torch.vmap, torch.func.jvp…checkpoint(torch.vmap(func"
DIFFERENT = {
    "shape": (changed(lambda x, again: x.sin()[: 2 if again else None].exp()), SAVED + "(6,) of torch.float32…(2,)"),
    "dtype": (changed(lambda x, again: x.sin().to(torch.float64 if again else torch.float32).exp()), SAVED + "float64"),
    "device": (changed(lambda x, again: x.sin().to("meta" if again else "cpu").exp()), SAVED + "on meta"),
    "fewer": (changed(lambda x, again: x.sin() if again else x.sin().exp()), SAVED + "no such tensor"),
    "none": (
        changed(lambda x, again: x + 1 if again else x.sin().exp()),
        "second_time.<locals>.changing…tensor 0 of 2",
    ),
    "a module": (backward_of(Flighty()), "test_gradient_checkpointing.Flighty to save"),
    "a partial": (backward_of(functools.partial(Flighty())), "test_gradient_checkpointing.Flighty to save"),
    "written to in the function": (backward_of(writes_to_what_it_saved), "found it written to afterwards"),
    "an input, in the function": (
        lambda: checkpoint(lambda z: z.mul_(2).exp(), values(3) * 1).sum().backward(),
        INPLACE,
    ),
    "a keyword": (an_input_is_written_to(lambda a, b: checkpoint(lambda a, b: a.exp() * b, a, b=b)), INPLACE),
    "in a list": (an_input_is_written_to(lambda a, b: checkpoint(lambda x: x[0].exp() * x[1], [a, b])), INPLACE),
    "a weight": (a_weight_is_written_to, "cpu, at version 1 in the forward…at version 2 in the rec"),
    "in a vmap": (lambda: torch.vmap(lambda row: checkpoint(mlp, row))(values(5, 4)), VMAP),
    "in a jvp": (lambda: torch.func.jvp(lambda x: checkpoint(mlp, x), (values(4),), (torch.ones(4),)), VMAP),
}


@refusals({name: (call, RuntimeError, words) for name, (call, words) in DIFFERENT.items()})
def test_what_is_not_the_same_in_backward_is_an_error_that_says_so(call, error, words):
    refused(call, error, words)


def test_equal_shapes_with_other_values_and_more_tensors_at_the_end_are_not_noticed():
    changed(lambda x, again: (x + again).sin().exp())()
    changed(lambda x, again: x.sin().exp().cos() if again else x.sin().exp())()


LEFT_OUT = {
    "nn.functional.rrelu": "saves its noise before it draws it",
    "nn.functional.instance_norm": "writes to the running statistics among its arguments",
    "linalg.lstsq": "rounds by where its memory begins",
}


def keeping_half(function, *args, **kwargs):
    """Selective checkpointing that keeps the results of some ops, inside a checkpoint."""
    keep = functools.partial(selective_checkpoint, keep=lambda op, *_, **__: len(op.name()) % 2 == 0)
    return checkpoint(functools.partial(keep, function), *args, **kwargs)


def results(op, sample, alias: bool, way, context) -> list:
    """What the op gives, twice the gradients of its tensors, and where the stream of random numbers ends.

    alias: each tensor that needs gradients and has the shape of the first is the first.
    """
    flat, form = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, one in enumerate(flat) if isinstance(one, Tensor) and one.requires_grad]
    xs = {i: flat[i].detach().clone().requires_grad_() for i in places}
    if alias:
        xs = {i: xs[places[0]] if x.shape == xs[places[0]].shape else x for i, x in xs.items()}
    inside = {x: x * 1 for x in xs.values()}  # an op's result, as an activation is
    args, kwargs = tree_unflatten([inside[xs[i]] if i in xs else one for i, one in enumerate(flat)], form)
    torch.manual_seed(0)
    with context:
        given = tree_leaves(way(lambda *args, **kwargs: op(*args, **kwargs), *args, **kwargs))
    ys = [y for y in given if isinstance(y, Tensor) and y.requires_grad]
    leaves, weights = list(inside), [torch.linspace(1, 2, y.numel()).to(y.dtype).view(y.shape) for y in ys]
    gradients = [torch.autograd.grad(ys, leaves, weights, retain_graph=True, allow_unused=True) for _ in range(2)]
    return [*given, *gradients[0], *gradients[1], torch.get_rng_state()]


def same(a, b) -> bool:
    """Equal bit for bit, but for the bits of a NaN."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a == b
    return torch.allclose(a.detach().to_dense(), b.detach().to_dense(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_list_of_ops_has_the_same_bits_swapped_and_checkpointed(tmp_path):
    compared, changed = 0, []
    for op in (op for op in differentiable_ops_of_torch() if op.name not in LEFT_OUT):
        samples = op.sample_inputs("cpu", torch.float64, requires_grad=True)
        for (alias, way), sample in zip(((True, keeping_half), (False, plain)), samples, strict=False):
            try:
                expected = results(op, sample, alias, plain, nullcontext())
            except (RuntimeError, ValueError):  # its output cannot be differentiated
                continue
            swap = swap_activations(tmp_path, min_bytes=0, ram_bytes="64 KiB")
            found = results(op, sample, alias, way, swap)
            compared += 1
            if len(found) != len(expected) or not all(map(same, found, expected)):
                changed.append(op.name)
    assert changed == []
    assert compared > 800


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8))


def gradients_of(call, model) -> list[Tensor]:
    x = values(4, 8)
    model.zero_grad()
    torch.manual_seed(1)
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@some("way", [checkpoint, functools.partial(selective_checkpoint, keep=math.inf)], keep=1)
def test_inside_a_compiled_function_a_checkpoint_runs_as_it_is(way):
    torch._dynamo.reset()
    model = two_layers()
    compiled = torch.compile(lambda x: way(model, x * 2).sin(), backend="aot_eager")
    for _ in range(2):
        assert alike(gradients_of(compiled, model), gradients_of(lambda x: model(x * 2).sin(), model))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_function_stays_compiled_when_it_is_checkpointed():
    torch._dynamo.reset()
    model, graphs = two_layers(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs)
    expected = gradients_of(model, model)
    for _ in range(2):
        assert alike(gradients_of(functools.partial(checkpoint, compiled), model), expected)
    assert graphs.frame_count == 1
