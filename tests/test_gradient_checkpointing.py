"""checkpoint: the same gradients from fewer bytes, compared with plain autograd and with torch's own checkpoint."""

import functools
import gc
import math
import threading
import traceback
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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from memlab.book.workloads import GPT
from memlab.gradient_checkpointing.hooks import _Handle, _Region, checkpoint, checkpoint_within
from memlab.gradient_checkpointing.selective import selective_checkpoint
from memlab.gradient_checkpointing.state import State
from memlab.memory_timeline import Meter, imagine
from memlab.offloading import swap_activations
from tests.torch_ops import differentiable_ops_of_torch

torchs = functools.partial(torch_checkpoint, use_reentrant=False)
BF16 = torch.bfloat16


def plain(function, *args, preserve_rng_state=True, **kwargs):
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


def alive() -> list:
    """What checkpoints there are that nothing has let go of."""
    return [o for o in gc.get_objects() if type(o) in (_Region, _Handle)]


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mlp(x: Tensor) -> Tensor:
    return (x.sin() * x).exp().cos()


# ---- models: gradients, peak, random numbers


def checkpointed(model: nn.Module, blocks, way) -> nn.Module:
    for block in blocks:
        block.forward = functools.partial(way, block.forward)
    return model


def gpt(way, **sizes) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(**{"layers": 3, "width": 32, "context": 16, **sizes})
    return checkpointed(model, model.blocks, way)


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.body(x)).relu()


def resnet(way) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(Residual(8) for _ in range(3)), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 3, 8, 8))
    return checkpointed(model, model[1:4], way)


def step(model: nn.Module, batch: tuple, autocast) -> tuple[int, list, Tensor]:
    """One forward and backward: the peak in bytes, the gradients, and where the stream of random numbers ends."""
    torch.manual_seed(1)
    with Meter(model, inputs=batch) as meter:
        with torch.autocast("cpu", BF16) if autocast else nullcontext():
            loss = model(*batch)
        loss.sum().backward()
    return meter.timeline.peak_bytes, [p.grad for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("autocast", [False, True], ids=["FP32", "autocast"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"dropout": 0.1}, {"attention": "by hand"}, {"attention": "by hand", "dropout": 0.2}],
    ids=["fused", "fused, dropout", "by hand", "by hand, dropout"],
)
def test_a_gpt_has_the_gradients_of_autograd_and_a_peak_not_above_torch_s(sizes, autocast):
    tokens = torch.randint(0, 256, (2, 2, 16), generator=torch.Generator().manual_seed(0)).unbind()
    peaks = {}
    expected = None
    for way in (plain, torchs, checkpoint):
        peaks[way], gradients, stream = step(gpt(way, **sizes), tokens, autocast)
        expected = expected or (gradients, stream)
        assert alike(gradients, expected[0]) and torch.equal(stream, expected[1])
    assert peaks[checkpoint] <= peaks[torchs] < peaks[plain]


def test_a_resnet_has_the_gradients_of_autograd_and_a_peak_not_above_torch_s():
    batch = (values(4, 3, 8, 8).detach(),)
    peaks, gradients = {}, {}
    for way in (plain, torchs, checkpoint):
        peaks[way], gradients[way], _ = step(resnet(way), batch, False)
    assert alike(gradients[checkpoint], gradients[plain])
    assert peaks[checkpoint] <= peaks[torchs] < peaks[plain]


@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_transformers_layers_have_the_gradients_of_autograd(kind):
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = None
    for way in (plain, checkpoint):
        torch.manual_seed(0)
        if kind == "GPT-2":
            model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
            layers = model.transformer.h
        else:
            sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
            layers = model.model.layers
        checkpointed(model.train(), layers, way)
        torch.manual_seed(1)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        gradients = [p.grad for p in model.parameters()]
        expected = expected or gradients
        assert alike(gradients, expected)


def test_it_works_on_imagined_hardware():
    peaks = {}
    for way in (plain, torchs, checkpoint):
        with imagine("H100-80GB") as gpu:
            model = gpt(way, dropout=0.1)
            batch = gpu.imagined(torch.zeros(2, 2, 16, dtype=torch.int64).unbind())
            with Meter(model, inputs=batch) as meter:
                model(*batch).backward()
        peaks[way] = meter.timeline.peak_bytes
    assert peaks[checkpoint] <= peaks[torchs] < peaks[plain]


def test_the_meter_sees_the_second_run_as_recomputation():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), values(4, 8)
    with Meter(model, inputs=x) as meter:
        checkpoint(model, x).sum().backward()
    ops = [event.op for event in meter.timeline.events if event.phase == "recompute" and event.delta > 0]
    assert "gelu" in " ".join(ops)


# ---- random numbers, autocast, default device


def noisy(x: Tensor) -> Tensor:
    return nn.functional.dropout(x.sin(), 0.5).exp() * torch.rand(x.shape)


def test_random_numbers_are_those_of_the_forward_and_the_stream_goes_on_as_without():
    x, seen = values(50), []
    for way in (plain, checkpoint):
        torch.manual_seed(3)
        y = way(noisy, x).sum()
        torch.rand(7)
        (gradient,) = torch.autograd.grad(y, x)
        seen.append((gradient, torch.rand(3)))
    assert alike(*seen)


def test_without_preserve_rng_state_the_second_run_draws_on():
    x = values(50)
    torch.manual_seed(3)
    before = checkpoint(noisy, x, preserve_rng_state=False).sum()
    state = torch.get_rng_state()
    (drawn_on,) = torch.autograd.grad(before, x)
    assert not torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    (expected,) = torch.autograd.grad(noisy(x).sum(), x)
    assert not torch.equal(drawn_on, expected)


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
    with pytest.raises(ValueError, match="the second time"):
        y.backward()
    assert torch.equal(torch.get_rng_state(), state) and not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="the second time"):
        y.backward()
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


def surroundings() -> tuple:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.empty(1).device,
        torch.is_grad_enabled(),
    )


AROUND = {
    "nothing": nullcontext,
    "BF16": lambda: torch.autocast("cpu", BF16),
    "FP16, no cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "off": lambda: torch.autocast("cpu", enabled=False),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("outside", AROUND)
@pytest.mark.parametrize("inside", AROUND)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["this thread", "another thread"])
def test_autocast_and_the_default_device_are_those_of_the_forward(inside, outside, elsewhere):
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
    if elsewhere:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    assert seen[0] == seen[1] and seen[2] is True


def test_backward_in_another_thread_gives_the_same_gradients():
    model, x = gpt(checkpoint, dropout=0.1), torch.zeros(2, 16, dtype=torch.int64)
    torch.manual_seed(1)
    with torch.autocast("cpu", BF16):
        loss = model(x, x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    _, expected, _ = step(gpt(plain, dropout=0.1), (x, x), True)
    assert alike([p.grad for p in model.parameters()], expected)


# ---- arguments and results

Pair = namedtuple("Pair", "a b")


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


ARGUMENTS = {
    "positional": (lambda a, b: a.exp() * b.sin(), lambda a, b: ((a, b), {})),
    "keywords": (lambda *, a, b: a.exp() * b.sin(), lambda a, b: ((), {"a": a, "b": b})),
    "nested": (lambda x, y: x[0].exp() * y["b"][1][0].sin(), lambda a, b: (([a, None], {"b": (1, [b])}), {})),
    "a named tuple": (lambda p, k=1: p.a.exp() * p.b.sin() * k, lambda a, b: ((Pair(a, b),), {"k": 3})),
    "None, a string, a class": (
        lambda a, n, s, *, c, b: c(a).tensor.exp() * b,
        lambda a, b: ((a, None, "s"), {"c": Box, "b": b}),
    ),
    "inside an object": (lambda box, b: box.tensor.exp() * b, lambda a, b: ((Box(a), b), {})),
    "a dictionary of their own": (lambda d, b: d["a"].exp() * b, lambda a, b: ((type("D", (dict,), {})(a=a), b), {})),
    "an integer tensor": (lambda a, b, i: a[i].exp() * b, lambda a, b: ((a, b, torch.tensor([2, 0, 1])), {})),
    "the same twice": (lambda a, b, c: a.exp() * b * c, lambda a, b: ((a, b, a), {})),
    "made in inference mode": (lambda a, b, c: a.exp() * b + c, lambda a, b: ((a, b, inferred()), {})),
}


def inferred() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_tensors_may_be_anywhere_in_the_arguments(case):
    function, arrange = ARGUMENTS[case]
    a, b, gradients = values(3), values(3, seed=1), []
    for way in (plain, checkpoint):
        args, kwargs = arrange(a, b)
        gradients.append(torch.autograd.grad(way(function, *args, **kwargs).sum(), (a, b)))
    assert alike(*gradients)


def test_a_list_that_the_function_changes_is_what_it_was_for_the_second_run():
    def function(tensors):
        tensors.append(tensors[-1].exp())
        return tensors[-1].sin() * len(tensors)

    a, tensors = values(3), []
    tensors.append(a)
    (found,) = torch.autograd.grad(checkpoint(function, tensors).sum(), a)
    assert len(tensors) == 2
    assert torch.equal(found, torch.autograd.grad(function([a]).sum(), a)[0])


def test_results_are_passed_on_whatever_they_are():
    x = values(3)
    assert checkpoint(lambda x: None, x) is None
    found = checkpoint(lambda x: {"y": [x.exp(), 3], "x": x, "s": "s"}, x)
    assert found["y"][1] == 3 and found["x"] is x and found["s"] == "s"
    (gradient,) = torch.autograd.grad(found["y"][0].sum(), x)
    assert torch.equal(gradient, x.exp())


@pytest.mark.parametrize("where", ["positional", "nested", "keywords"])
def test_writing_to_an_input_before_backward_is_autograd_s_error(where):
    function, arrange = ARGUMENTS[where]
    a, b = (v.detach().clone() for v in (values(3), values(3, seed=1)))
    args, kwargs = arrange(a.requires_grad_(), b)
    y = checkpoint(function, *args, **kwargs)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_function_that_writes_to_its_input_is_autograd_s_error():
    x = values(3)
    for way in (torchs, checkpoint):
        y = way(lambda z: z.mul_(2).exp(), x * 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_no_tensor_in_the_arguments_is_no_obstacle():
    x = values(3)
    counted = Counted(lambda: mlp(x))
    y = checkpoint(counted).sum()
    y.backward()
    assert counted.calls == 2 and torch.equal(x.grad, torch.autograd.grad(mlp(x).sum(), x)[0])


def test_parameters_alone_may_need_gradients():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), values(2, 4).detach()
    found = torch.autograd.grad(checkpoint(layer, x).sum(), list(layer.parameters()))
    assert alike(found, torch.autograd.grad(layer(x).sum(), list(layer.parameters())))


def test_frozen_parameters_get_no_gradient_and_the_others_theirs():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), values(2, 4)
    layer[0].requires_grad_(False)
    expected = torch.autograd.grad(layer(x).sum(), [x, *layer[2].parameters()])
    checkpoint(layer, x).sum().backward()
    assert layer[0].weight.grad is None and layer[0].bias.grad is None
    assert alike([x.grad, *(p.grad for p in layer[2].parameters())], expected)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_it_is_a_plain_call(off, no_gc):
    counted, x = Counted(mlp), values(3)
    with off():
        y = checkpoint(counted, x)
    assert counted.calls == 1 and not y.requires_grad and torch.equal(y, mlp(x))
    assert not alive()


def test_a_function_without_gradients_saves_nothing_and_leaves_nothing(no_gc):
    counted, x = Counted(mlp), values(3).detach()
    y = checkpoint(counted, x)
    assert counted.calls == 1 and not y.requires_grad and not alive()


def test_a_function_that_saves_nothing_is_not_run_again(no_gc):
    counted, x = Counted(lambda x: x + 1), values(3)
    checkpoint(counted, x).sum().backward()
    assert counted.calls == 1 and torch.equal(x.grad, torch.ones(3)) and not alive()


def test_an_error_in_the_forward_leaves_nothing(no_gc):
    def fails(x):
        x.exp().sin()
        raise ValueError("once")

    x = values(3)
    with pytest.raises(ValueError, match="once"):
        checkpoint(fails, x)
    assert not alive()
    assert (x * x).grad_fn._saved_self is x  # no hooks are left


# ---- nesting and early stop


def test_what_comes_after_the_last_saved_tensor_is_not_run_again():
    counted, after = Counted(lambda x: after(x.exp().sin()) + 1), Counted(lambda x: x + 2)
    checkpoint(counted, values(3)).sum().backward()
    assert (counted.calls, counted.ends, after.calls) == (2, 1, 1)


def test_what_only_dropped_results_need_is_not_run_again_either():
    later = Counted(mlp)
    first = checkpoint(lambda x: (x.exp(), later(x)), values(3))[0]
    first.sum().backward()
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
    assert torch.equal(x.grad, torch.autograd.grad(stubborn(x).sum(), x)[0])


def nest(way, depth: int, leaves: list):
    """A binary tree of checkpoints, `depth` high, over functions that are counted."""

    def function(x):
        if depth == 0:
            return mlp(x)
        for part in parts:
            x = way(part, x)
        return x

    parts = [nest(way, depth - 1, leaves) for _ in range(2)] if depth else []
    counted = Counted(function)
    if depth == 0:
        leaves.append(counted)
    return counted


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_checkpoints_run_as_often_as_torch_s_and_no_oftener_than_they_must(depth):
    x, runs, gradients = values(5), {}, {}
    for way in (plain, torchs, checkpoint):
        leaves = []
        y = way(nest(way, depth, leaves), x).sum()
        (gradients[way],) = torch.autograd.grad(y, x)
        runs[way] = [leaf.calls for leaf in leaves]
    assert torch.equal(gradients[checkpoint], gradients[plain])
    # Each run of a tree runs its first half again to reach the second's input; what comes last is spared.
    expected = [1]
    for _ in range(depth):
        expected = [n + 1 for n in expected] + expected
    assert runs[checkpoint] == runs[torchs] == [n + 1 for n in expected]


def test_early_stop_inside_early_stop():
    last = Counted(lambda x: x + 1)
    inner = Counted(lambda x: last(mlp(x)))
    after = Counted(lambda x: x + 1)
    outer = Counted(lambda x: after(checkpoint(inner, x.exp())))
    checkpoint(outer, values(3)).sum().backward()
    assert (outer.calls, outer.ends) == (2, 1)  # stopped when the inner one's input was saved
    assert (inner.calls, inner.ends, last.calls, after.calls) == (2, 1, 1, 1)


def test_nested_checkpoints_give_their_inputs_back():
    layers = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU())))
    x = values(256, 64).detach()

    def forward(way, low, high):
        if high - low == 2:
            return lambda x: layers[low:high](x)
        middle = (low + high) // 2
        return lambda x: way(forward(way, middle, high), way(forward(way, low, middle), x))

    peaks = {}
    for way in (plain, torchs, checkpoint):
        layers.zero_grad()
        with Meter(layers, inputs=x) as meter:
            y = way(forward(way, 0, 16), x)
            y.sum().backward()
        peaks[way] = meter.timeline.peak_bytes
    assert peaks[checkpoint] <= peaks[torchs] < peaks[plain]


@pytest.mark.parametrize("outer", [torchs, checkpoint])
@pytest.mark.parametrize("inner", [torchs, checkpoint, functools.partial(torch_checkpoint, use_reentrant=True)])
def test_it_nests_with_torch_s_own(outer, inner):
    x, seen = values(5), []

    def function(way):
        return lambda x: way(mlp, mlp(x.sin())).cos().sin()

    seen = [torch.autograd.grad(o(function(i), x).sum(), x) for o, i in ((plain, plain), (outer, plain))]
    x.grad = None
    outer(function(inner), x).sum().backward()
    assert alike(*seen) and alike([x.grad], seen[0])


# ---- backward, in all its forms


def test_double_backward():
    x, seen = values(5), []
    for way in (plain, checkpoint):
        (first,) = torch.autograd.grad(way(mlp, x).sum(), x, create_graph=True)
        second = torch.autograd.grad((first * first).sum(), x)
        seen.append((first, *second))
    assert alike(*seen)
    x = values(4).double().detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(mlp, x), x)


def test_two_backwards_with_retain_graph_run_the_function_once_each():
    x, counted = values(5), Counted(mlp)
    y = checkpoint(counted, x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert counted.calls == 3 and torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_gradients_of_a_part_run_the_function_once_and_keep_nothing_of_the_rest():
    storages = []

    def function(x):
        a, b = x.exp(), x.sin().sin()
        storages.extend(weakref.ref(t.untyped_storage()) for t in (a, b))
        return a.sin(), b.sin()

    x = values(5)
    counted = Counted(function)
    a, b = checkpoint(counted, x)
    expected = [torch.autograd.grad(part.sum(), x)[0] for part in function(x)]
    del storages[:]
    assert torch.equal(torch.autograd.grad(a.sum(), x)[0], expected[0]) and counted.calls == 2
    assert [s() for s in storages] == [None, None]
    assert torch.equal(torch.autograd.grad(b.sum(), x)[0], expected[1]) and counted.calls == 3


def test_backward_inside_the_function_works():
    def function(x, retain):
        y = x.sin()
        z = y.cos()
        (g,) = torch.autograd.grad(z.sum(), x, retain_graph=retain)
        return x.cos() * g + (z if retain else 0)

    for retain in (True, False):
        x, seen = values(5), []
        for way in (plain, torchs, checkpoint):
            seen.append(torch.autograd.grad(way(function, x, retain).sum(), x))
        assert alike(seen[2], seen[0]) and alike(seen[1], seen[0])


def test_backward_of_a_checkpoint_inside_a_checkpoint_works():
    def function(way):
        def inside(x):
            (g,) = torch.autograd.grad(way(mlp, x).sum(), x, create_graph=True)
            return g.sin() * x

        return inside

    x = values(5)
    assert alike(*[torch.autograd.grad(way(function(way), x).sum(), x) for way in (plain, checkpoint)])


def test_several_checkpoints_may_share_a_module():
    layer, x, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)), values(3, 4), []
    for way in (plain, checkpoint):
        torch.manual_seed(0)
        y = way(layer, way(layer, way(layer, x)))
        seen.append(torch.autograd.grad(y.sum(), [x, *layer.parameters()]))
    assert alike(*seen)


def test_a_custom_function_may_read_its_saved_tensors_twice(no_gc):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            _ = ctx.saved_tensors
            return grad * ctx.saved_tensors[1]

    x = values(5)
    checkpoint(lambda x: Twice.apply(x.sin()).cos(), x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().cos().sum(), x)[0])
    assert not alive()


def test_backward_in_several_threads_at_once_is_right():
    x = values(1000)
    y = checkpoint(mlp, x).sum()
    (expected,) = torch.autograd.grad(mlp(x).sum(), x)
    found = []

    def backward():
        for _ in range(20):
            found.extend(torch.autograd.grad(y, x, retain_graph=True))

    threads = [threading.Thread(target=backward) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(torch.equal(g, expected) for g in found)


def test_looking_at_a_saved_tensor_is_right_keeps_nothing_and_spoils_nothing():
    x, storages = values(5), []

    def function(x):
        a = x.exp()
        storages.append(weakref.ref(a.untyped_storage()))
        return a.sin()

    counted = Counted(function)
    y = checkpoint(counted, x)
    assert torch.equal(y.grad_fn._saved_self, x.exp()) and counted.calls == 2
    assert storages[1]() is None
    y.sum().backward()
    assert counted.calls == 3 and torch.equal(x.grad, x.exp().cos() * x.exp())


# ---- vmap


@pytest.mark.parametrize(
    "way",
    [
        checkpoint,
        functools.partial(selective_checkpoint, keep=0),
        functools.partial(selective_checkpoint, keep=math.inf),
    ],
    ids=["all", "every result kept", "none kept"],
)
def test_backward_outside_of_a_vmap_is_refused_and_around_the_vmap_it_is_right(way):
    x, other = values(5, 4), values(5, 4, seed=1).detach()
    function = lambda row: row.softmax(0).square().exp()  # noqa: E731
    (expected,) = torch.autograd.grad((torch.vmap(function)(x) * other).sum(), x)
    y = torch.vmap(lambda row: way(function, row))(x)
    assert torch.equal(y, torch.vmap(function)(x))
    with pytest.raises(RuntimeError, match=r"inside the torch.vmap .*<lambda>.*checkpoint\(torch.vmap\(func"):
        (y * other).sum().backward()
    with pytest.raises(RuntimeError, match="expected backward inside the torch.vmap"):  # another one
        torch.vmap(lambda v: torch.autograd.grad(y, x, v)[0])(torch.ones(2, 5, 4))
    with pytest.raises(RuntimeError, match="expected backward inside the torch.vmap"):  # nested, also in the second run
        way(lambda x: torch.vmap(lambda row: way(function, row))(x.sin()).exp(), x).sum().backward()
    (found,) = torch.autograd.grad((way(torch.vmap(function), x) * other).sum(), x)
    assert torch.equal(found, expected)


def test_backward_outside_of_a_jvp_is_refused_too():
    x = values(4)
    for part in torch.func.jvp(lambda x: checkpoint(mlp, x), (x,), (torch.ones(4),)):
        with pytest.raises(RuntimeError, match="or torch.func.jvp"):
            part.sum().backward(retain_graph=True)


def test_vmap_of_a_backward_and_a_backward_inside_of_vmap_are_right():
    w, ways = values(4), []
    for way in (plain, checkpoint):
        y = way(mlp, w)
        of_each = torch.vmap(lambda v: torch.autograd.grad(y, w, v, retain_graph=True)[0])(torch.eye(4))  # noqa: B023
        inside = torch.vmap(lambda v: v * torch.autograd.grad(way(mlp, w).sum(), w)[0])(torch.eye(4))  # noqa: B023
        jacobian = torch.autograd.functional.jacobian(lambda w: way(mlp, w), w, vectorize=True)  # noqa: B023
        ways.append((of_each, inside, jacobian))
    assert alike(*ways)


@pytest.mark.parametrize("needs", [False, True])
def test_vmap_without_gradients_gives_the_same_values(needs):
    x = values(3, 4).detach().requires_grad_(needs)
    with torch.set_grad_enabled(not needs):
        assert torch.equal(torch.vmap(lambda row: checkpoint(mlp, row))(x), mlp(x))


# ---- what must be the same the second time


def second_time(change):
    """A function that does something else when it is run again."""
    calls = []

    def changing(x):
        calls.append(1)
        return change(x, len(calls) > 1)

    return changing


DIFFERENT = {
    "shape": (lambda x, again: x.sin()[: 2 if again else None].exp(), r"\(6,\) of torch.float32 .*\(2,\)"),
    "dtype": (lambda x, again: x.sin().to(torch.float64 if again else None or torch.float32).exp(), "torch.float64"),
    "fewer": (lambda x, again: x.sin() if again else x.sin().exp(), "no such tensor"),
    "none": (lambda x, again: x + 1 if again else x.sin().exp(), "no such tensor"),
    "device": (lambda x, again: x.sin().to("meta" if again else "cpu").exp(), "on meta"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_function_that_saves_something_else_is_named(case):
    change, says = DIFFERENT[case]
    x = values(6)
    y = checkpoint(second_time(change), x)
    with pytest.raises(RuntimeError, match=says) as error:
        y.sum().backward()
    text = str(error.value)
    assert "second_time.<locals>.changing" in text and f"at tensor {0 if case == 'none' else 1} of 2" in text
    if case in ("shape", "dtype", "device"):  # the traceback ends where the other tensor was saved
        lines = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
        assert "<lambda>" in lines


def test_modules_methods_and_partials_are_named():
    class Flighty(nn.Module):
        calls = 0

        def forward(self, x):
            Flighty.calls += 1
            return x.exp() if Flighty.calls == 1 else x

    for function in (Flighty(), Flighty().forward, functools.partial(Flighty().forward)):
        Flighty.calls = 0
        y = checkpoint(function, values(3))
        with pytest.raises(RuntimeError, match=r"test_gradient_checkpointing\.\S+Flighty"):
            y.sum().backward()


def test_a_parameter_written_to_before_backward_is_an_error_as_in_autograd():
    layer, x = nn.Linear(3, 3), values(2, 3)
    y = checkpoint(lambda x: layer(x.exp()), x).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"cpu, at version 1 in the forward, .* at version 2 in the rec"):
        y.backward()


VIEWS = {
    "a leaf": lambda way, x, w: way(torch.sin, x.view(-1)),
    "a weight, transposed": lambda way, x, w: way(lambda x, w: (x @ w).tanh(), x, w.t()),
    "a slice of a weight": lambda way, x, w: way(lambda x, w: (x + w).tanh() * w, x, w[:2]),
}


@pytest.mark.parametrize("writes", [0, 3])
@pytest.mark.parametrize("outer", ["a checkpoint", "torch's", "save_on_cpu", "swap_activations"])
@pytest.mark.parametrize("case", VIEWS)
def test_views_of_leaves_come_back_from_outer_hooks_and_are_the_same(case, outer, writes):
    x, w, found = values(2, 3), values(3, 3, seed=1), []
    for _ in range(writes):
        w.detach().mul_(1.1)
    for way in (plain, checkpoint):
        function = functools.partial(VIEWS[case], way)
        if outer in ("a checkpoint", "torch's") and way is checkpoint:
            y = {"a checkpoint": checkpoint, "torch's": torchs}[outer](function, x, w)
        else:
            with save_on_cpu() if outer == "save_on_cpu" else swap_activations(min_bytes=0):
                y = function(x, w)
        found.append(torch.autograd.grad(y.square().sum(), [x, w], allow_unused=True))
    assert alike(*found)


@pytest.mark.parametrize("outer", ["a checkpoint", "save_on_cpu", "swap_activations"])
def test_a_tensor_given_as_several_arguments_is_one_object_again_within_other_hooks(outer):
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2), values(4, 3, 8)  # its projections are one where `query is key is value`
    block = functools.partial(lambda way, x: way(attention, x, x, x)[0].tanh(), checkpoint)
    with {"save_on_cpu": save_on_cpu, "swap_activations": swap_activations}.get(outer, nullcontext)():
        y = checkpoint(block, x) if outer == "a checkpoint" else block(x)
    expected = torch.autograd.grad(attention(x, x, x)[0].tanh().sum(), [x, *attention.parameters()])
    assert alike(torch.autograd.grad(y.sum(), [x, *attention.parameters()]), expected)


def test_writing_to_what_an_op_saved_is_an_error_as_in_autograd():
    def function(x):
        a = x.exp()
        b = a.sin()
        a.mul_(2)
        return a * b

    x = values(3)
    for way, says in ((plain, "inplace"), (checkpoint, "written to afterwards")):
        with pytest.raises(RuntimeError, match=says):
            way(function, x).sum().backward()


def test_equal_shapes_with_other_values_and_more_tensors_at_the_end_are_not_noticed():
    x = values(6)
    checkpoint(second_time(lambda x, again: (x + again).sin().exp()), x).sum().backward()
    checkpoint(second_time(lambda x, again: x.sin().exp().cos() if again else x.sin().exp()), x).sum().backward()


# ---- nothing stays


def watched(storages: list):
    def function(x):
        a = x.exp()
        b = a.sin() * a
        storages.extend(weakref.ref(t.untyped_storage()) for t in (a, b))
        return b.cos()

    return function


@pytest.mark.parametrize("way", ["backward", "dropped", "retained", "nested", "failed", "looked at"])
def test_without_the_collector_all_is_gone_when_backward_is(no_gc, way):
    storages = []
    x = values(5)
    inputs = x * 1
    held = weakref.ref(inputs.untyped_storage())
    function = watched(storages)
    if way == "nested":
        inner = function
        function = lambda x: checkpoint(inner, checkpoint(inner, x))  # noqa: E731
    elif way == "failed":
        function = second_time(lambda x, again: inner_fail(x, again, storages))
    y = checkpoint(function, inputs).sum()
    del inputs
    if way == "failed":
        with pytest.raises(RuntimeError):
            y.backward()
        assert [s() for s in storages] == [None] * len(storages)
    elif way == "looked at":
        assert y.grad_fn.next_functions[0][0]._saved_self is not None
    elif way == "retained":
        y.backward(retain_graph=True)
        assert [s() for s in storages] == [None] * len(storages)
    elif way != "dropped":
        y.backward()
        assert not alive() and held() is None
    del y
    assert not alive() and held() is None
    assert [s() for s in storages] == [None] * len(storages)


def inner_fail(x, again, storages):
    a = x.exp()
    storages.append(weakref.ref(a.untyped_storage()))
    return a.sin() if again else a.sin().exp()


def test_recomputed_tensors_die_as_backward_uses_them_even_when_the_graph_stays():
    alive_then = []
    storages = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive_then.append([s() is not None for s in storages[2:]])
            return grad

    def function(x):
        a = Look.apply(x.sin()).exp()
        b = Look.apply(a.sin())
        storages.extend(weakref.ref(t.untyped_storage()) for t in (a, b))
        return b.sin()

    y = checkpoint(function, values(5)).sum()
    y.backward(retain_graph=True)
    assert alive_then == [[True, False], [False, False]]


def test_contexts_surround_each_run():
    entered = []

    class Note:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *error):
            entered.append(f"end of {self.name}: {error[0]}")

    x = values(3)
    y = checkpoint_within(lambda: (Note("forward"), Note("again")), mlp, (x,), {}).sum()
    y.backward(retain_graph=True)
    y.backward()
    again = ["again", "end of again: None"]
    assert entered == ["forward", "end of forward: None", *again, *again]


def test_of_imagined_tensors_the_state_is_a_cpus_also_where_a_gpu_runs(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: pytest.fail("nothing runs there"))
    with imagine("H100-80GB"):
        x = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):  # which is the CPU's, in the block
            y = checkpoint(lambda x: (x @ x).sin(), x)
        y.sum().backward()
        assert y.dtype is torch.bfloat16 and x.grad.shape == (2, 2)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_where_nothing_is_saved_a_checkpoint_is_compiled_with_the_rest(off):
    block = nn.Linear(4, 4)
    with off():
        x = torch.ones(2, 4)
        found = torch.compile(lambda x: checkpoint(block, x) * 2, backend="eager", fullgraph=True)(x)
        assert torch.equal(found, block(x) * 2)
    torch.compiler.reset()


# ---- every op that torch's own tests enumerate

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


# ---- compilers, and a backward in other modes than the forward


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


@pytest.mark.parametrize("way", [checkpoint, functools.partial(selective_checkpoint, keep=math.inf)])
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


def test_a_compiled_backward_runs_the_function_again_as_it_is():
    torch._dynamo.reset()
    model, x = two_layers().eval(), values(4, 8)
    expected = torch.autograd.grad(model(x).sum(), x)
    loss = checkpoint(model, x).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert torch.equal(x.grad, *expected)


@pytest.mark.parametrize("way", [checkpoint, functools.partial(selective_checkpoint, keep=0)])
def test_backward_may_be_in_inference_mode(way):
    model, x = two_layers().eval(), values(4, 8)
    expected = torch.autograd.grad(model(x).sum(), x)
    loss = way(model, x).sum()
    with torch.inference_mode():
        loss.backward()
    assert torch.equal(x.grad, *expected)
