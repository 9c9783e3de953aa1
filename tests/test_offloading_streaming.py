"""Weights streamed layer by layer: the same training from a device that holds a layer or two."""

import copy
import functools
import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.book.workloads import GPT, Block
from memlab.data_parallelism import DataParallel
from memlab.gradient_checkpointing import checkpoint, checkpointed
from memlab.memory_timeline import Meter, OutOfMemory, imagine, main_memory
from memlab.offloading import courier as courier_page
from memlab.offloading import homes, stream_weights
from memlab.offloading.courier import Courier
from memlab.offloading.streaming import StreamedWeights
from memlab.ranks import run_ranks

CARD = "H100-80GB"


def gpt(layers=4, dropout=0.1, **sizes):
    torch.manual_seed(0)
    return GPT(**{"layers": layers, "width": 32, "heads": 2, "context": 16, "dropout": dropout} | sizes)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (2, 16), generator=generator) for _ in "xy")


def trained(model, parameters, steps=3, optimizer=torch.optim.AdamW, micro_batches=1):
    """Losses, and the gradients before each step."""
    optimizer, record = optimizer(parameters, lr=1e-2), []
    for step in range(steps):
        torch.manual_seed(step)
        for micro_batch in range(micro_batches):
            loss = model(*batch(step * micro_batches + micro_batch))
            loss.backward()
            record.append(loss.detach())
        record += [None if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
    return record


def alike(found, expected) -> bool:
    return len(found) == len(expected) and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(found, expected, strict=True)
    )


class Stack(nn.Module):
    """Linear layers without bias. x: (batch, width) → the same."""

    def __init__(self, layers=5, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(params=["cpu", "folder"])
def to(request, tmp_path):
    return "cpu" if request.param == "cpu" else tmp_path


def hooks_of(model) -> int:
    return sum(
        len(value) for m in model.modules() for name, value in vars(m).items() if name.endswith("_hooks") and value
    ) + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("memlab")]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


# ---- the same training


@pytest.mark.parametrize("prefetch", [0, 1, 3, 99])
def test_training_is_the_same_bit_for_bit(to, prefetch):
    plain, streamed = gpt(), gpt()
    expected = trained(plain, list(plain.parameters()))
    with stream_weights(streamed, streamed.blocks, to, prefetch=prefetch) as weights:
        found = trained(streamed, weights.parameters())
    assert alike(found, expected)
    assert alike(list(streamed.parameters()), list(plain.parameters()))


def clamp(module: nn.Linear, *_) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.1, 0.1)


class Clamped(nn.Linear):
    def forward(self, x):
        clamp(self)
        return super().forward(x)


@pytest.mark.parametrize("writes", ["in its forward", "in a hook before it"])
def test_what_a_layer_writes_to_its_own_weights_comes_home(to, writes):
    def model():
        torch.manual_seed(0)
        last = (Clamped if writes == "in its forward" else nn.Linear)(8, 8)
        if writes == "in a hook before it":
            last.register_forward_pre_hook(clamp)
        return nn.Sequential(nn.Embedding(10, 8, max_norm=1.0), nn.Linear(8, 8), last)

    plain, streamed, x = model(), model(), torch.arange(6)
    after = []
    for each in (plain, streamed):
        with stream_weights(each, list(each), to) if each is streamed else nullcontext() as weights:
            optimizer = torch.optim.SGD(weights.parameters() if weights else each.parameters(), 0.5)
            for _ in range(3):
                each(x).square().sum().backward()
                each(x + 2).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        after.append(list(each.parameters()))
    assert alike(*after)


def test_gradients_of_several_backwards_add_up_at_home(to):
    plain, streamed = gpt(), gpt()
    expected = trained(plain, list(plain.parameters()), micro_batches=3, optimizer=torch.optim.SGD)
    with stream_weights(streamed, streamed.blocks, to) as weights:
        found = trained(streamed, weights.parameters(), micro_batches=3, optimizer=torch.optim.SGD)
    assert alike(found, expected)


def test_the_gradient_and_the_model_are_whole_again_after_the_block(to):
    plain, streamed = gpt(), gpt()
    for model in (plain, streamed):
        torch.manual_seed(1)
        model(*batch()).backward()  # a gradient that is there before
    same = [id(p) for p in streamed.parameters()]
    with stream_weights(streamed, streamed.blocks, to):
        assert all(p.grad is None for p in streamed.blocks.parameters())
        torch.manual_seed(2)
        streamed(*batch(1)).backward()
        assert all(p.grad is None for p in streamed.blocks.parameters())
    torch.manual_seed(2)
    plain(*batch(1)).backward()
    assert [id(p) for p in streamed.parameters()] == same
    assert alike([p.grad for p in streamed.parameters()], [p.grad for p in plain.parameters()])
    assert alike(list(streamed.parameters()), list(plain.parameters()))


def test_a_model_can_be_streamed_again(to):
    plain, streamed = gpt(), gpt()
    for _ in range(2):
        expected = trained(plain, list(plain.parameters()), 2)
        with stream_weights(streamed, streamed.blocks, to) as weights:
            assert alike(trained(streamed, weights.parameters(), 2), expected)


def test_one_context_can_be_entered_again(to):
    model = gpt(dropout=0.0)
    expected = model(*batch())
    weights = stream_weights(model, model.blocks, to)
    for _ in range(2):
        with weights:
            assert torch.equal(model(*batch()), expected)
            with pytest.raises(RuntimeError, match="streamed already"):
                weights.__enter__()
    with pytest.raises(RuntimeError, match="inside the block"):
        weights.parameters()


def test_an_optimizer_of_the_first_entry_trains_at_the_next_as_well(to):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    reference, optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2), None
    weights = stream_weights(streamed, streamed.blocks, to)
    for entry in range(3):
        with weights:
            optimizer = optimizer or torch.optim.AdamW(weights.parameters(), lr=1e-2)
            assert optimizer.param_groups[0]["params"] == weights.parameters()
            for model, each in ((plain, reference), (streamed, optimizer)):
                for step in range(2):
                    model(*batch(2 * entry + step)).backward()
                    each.step()
                    each.zero_grad()
        assert alike(list(streamed.parameters()), list(plain.parameters()))


def test_an_optimizer_of_the_block_is_refused_after_it_and_in_another(to):
    model = gpt()
    with stream_weights(model, model.blocks, to) as weights:
        optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
        copies = copy.deepcopy(weights.parameters())
    optimizer.step()
    model(*batch()).backward()
    with pytest.raises(RuntimeError, match=r"make one over model.parameters\(\)"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.optim.SGD(copies, lr=1.0).step()
    with stream_weights(model, model.blocks, to), pytest.raises(RuntimeError, match="or of another block"):
        optimizer.step()


def test_inference_frozen_layers_and_a_partly_streamed_model(to):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    for model in (plain, streamed):
        model.blocks[1].requires_grad_(False)
        model.blocks[2].attention.qkv.weight.requires_grad_(False)
    with stream_weights(streamed, list(streamed.blocks)[1:], to) as weights:
        with torch.no_grad():
            assert torch.equal(streamed(*batch()), plain(*batch()))
        with torch.inference_mode():
            assert torch.equal(streamed(*batch()), plain(*batch()))
        expected = trained(plain, list(plain.parameters()))
        assert alike(trained(streamed, weights.parameters()), expected)
        assert len(weights.host_parameters()) == 3 * len(list(streamed.blocks[0].parameters()))


def test_a_forward_without_backward_keeps_nothing_of_what_its_ops_saved(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))  # Tanh saves its own result
    with stream_weights(model, [model[0], model[2]], to=tmp_path):
        y = model(torch.ones(2, 8)).exp()
        saved = weakref.ref(y.untyped_storage())
        del y
        assert saved() is None


def test_a_parameter_that_is_unfrozen_inside_the_block_has_its_gradient_at_home(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    with stream_weights(model, model, to=tmp_path):
        model[0].weight.requires_grad_(True)
        model(torch.ones(2, 8)).sum().backward()
        assert model[0].weight.grad is None
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    assert torch.equal(found, model[0].weight.grad)


def test_a_parameter_is_trained_that_is_unfrozen_in_a_layer_of_which_only_the_parts_are_called(to):
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)).requires_grad_(False)
    x = torch.ones(2, 8)
    with stream_weights(model, model, to) as weights:
        model[1][0](model[0][0](x))
        model.requires_grad_(True)
        model[1][0](model[0][0](x)).sum().backward()
        found = [p.grad.clone() for p in weights.parameters()]
        assert all(p.grad is None for p in model.parameters())
    model.zero_grad()
    model[1][0](model[0][0](x)).sum().backward()
    assert alike(found, [p.grad for p in model.parameters()])


def test_a_layer_may_return_its_own_parameter_or_a_view_of_it(to):
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1000, 8))

        def forward(self, x):
            return {"x": x, "queries": (self.queries, self.queries[:2])}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.layers = Queries(), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            out = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return (x + out["queries"][1]).square().sum() + out["queries"][0].sum()

    plain, streamed, x = Model(), Model(), torch.ones(2, 8)
    with stream_weights(streamed, [streamed.first, *streamed.layers], to) as weights:
        for model in (plain, streamed):
            with torch.no_grad():
                model(x)
        assert torch.equal(plain(x), streamed(x))
        for model in (plain, streamed):
            model(x).backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])


def test_a_backward_inside_another_leaves_the_weights_that_the_outer_one_has_unpacked(to):
    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return torch.tanh(x @ w)

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            with torch.enable_grad():
                inner = w.detach().requires_grad_()
                (of_w,) = torch.autograd.grad(torch.tanh(x.detach().requires_grad_() @ inner), inner, gradient)
            return (gradient * (1 - torch.tanh(x @ w) ** 2)) @ w.t(), of_w

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x):
            return Tanh.apply(x, self.w)

    torch.manual_seed(0)
    plain = nn.Sequential(*[Layer() for _ in range(4)])
    streamed, x = copy.deepcopy(plain), torch.randn(2, 64)
    with stream_weights(streamed, streamed, to) as weights, Meter(streamed) as meter:
        for model in (plain, streamed):
            model(x).sum().backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])
        assert meter.timeline.curves["parameter"][-1] == 0


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 1, 0, 1, 3], [2], [0, 0, 0]])
def test_layers_in_another_order_used_twice_or_skipped_are_right(to, order):
    def forward(model, x):
        for number in order:
            x = torch.tanh(model.layers[number](x))
        return x.square().sum()

    plain, streamed = Stack(), Stack()
    streamed.load_state_dict(plain.state_dict())
    x = torch.randn(3, 64)
    with stream_weights(streamed, streamed.layers, to) as weights:
        for _ in range(3):
            forward(plain, x).backward()
            forward(streamed, x).backward()
            assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])


def test_shared_weights_stay_on_the_device(to):
    plain = gpt()
    plain.head.weight = plain.token_embedding.weight
    plain.blocks[2].attention = plain.blocks[0].attention
    streamed = copy.deepcopy(plain)
    expected = trained(plain, list(plain.parameters()))
    with stream_weights(streamed, [*streamed.blocks, streamed.head], to) as weights:
        kept = {id(p) for p in weights.parameters()} & {id(p) for p in streamed.parameters()}
        shared = [streamed.head.weight, *streamed.blocks[0].attention.parameters()]
        assert {id(p) for p in shared} <= kept
        assert alike(trained(streamed, weights.parameters()), expected)


def test_one_block_called_many_times_is_streamed_once(to):
    class Albert(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.blocks = [self.block] * 4

        def forward(self, x, y):
            for block in self.blocks:
                x = block(x)
            return (x - y).square().sum()

    plain, streamed = Albert(), Albert()
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    plain(x, y).backward()
    with stream_weights(streamed, streamed.blocks, to) as weights:
        streamed(x, y).backward()
        assert alike([p.grad for p in weights.host_parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("way", ["ours", "torch", "re-entrant"])
@pytest.mark.parametrize("segment", [1, 2])
def test_checkpointed_layers_are_brought_for_their_recomputation(tmp_path, way, segment):
    def call(function, x):
        if way == "ours":
            return checkpoint(function, x)
        return torch_checkpoint(function, x, use_reentrant=way == "re-entrant")

    def forward(model, x, y):
        x = model.token_embedding(x)
        for start in range(0, 4, segment):
            x = call(nn.Sequential(*model.blocks[start : start + segment]), x)
        return nn.functional.cross_entropy(model.head(x).flatten(0, 1), y.flatten())

    plain, streamed = gpt(), gpt()
    with stream_weights(streamed, streamed.blocks, tmp_path) as weights:
        for seed in range(2):
            for model in (plain, streamed):
                torch.manual_seed(seed)
                forward(model, *batch(seed)).backward()
        found = [p.grad for p in weights.parameters()]
        assert alike(found, [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("way", [checkpoint, functools.partial(torch_checkpoint, use_reentrant=False)])
def test_a_checkpoint_inside_a_layer_finds_the_weights_there_and_as_few_layers_as_ever(tmp_path, way):
    plain, streamed = gpt(), gpt()
    for block in (*plain.blocks, *streamed.blocks):
        block.forward = functools.partial(way, block.forward)
    torch.manual_seed(1)
    plain(*batch()).backward()
    with stream_weights(streamed, streamed.blocks, tmp_path) as weights, Meter(streamed) as meter:
        torch.manual_seed(1)
        streamed(*batch()).backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])
        two_layers = 2 * weights.layers[0].nbytes
    rest = sum(p.nbytes for p in plain.parameters()) - sum(p.nbytes for p in plain.blocks.parameters())
    assert max(meter.timeline.curves["parameter"]) == two_layers + rest


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("streamed_first", [False, True])
@pytest.mark.parametrize("which", [(nn.Linear, nn.LayerNorm), Block])
def test_modules_of_layers_that_are_checkpointed_find_their_weights(which, streamed_first, prefetch, autocast):
    def gradients(model):
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(*batch(seed))
            loss.backward()
        return [p.grad for p in model.parameters()]

    model = gpt()
    ways = [lambda: checkpointed(model, which), lambda: stream_weights(model, model.blocks, prefetch=prefetch)]
    with ways[streamed_first](), ways[not streamed_first]():
        gradients(model)
    assert alike([p.grad for p in model.parameters()], gradients(gpt()))


def test_a_checkpoint_of_a_streamed_layer_knows_whose_forward_it_is():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with stream_weights(layers, list(layers)), checkpointed(layers, list(layers)):
        layers(torch.randn(3, 4)).sum().backward()
        assert layers[1].num_batches_tracked == 1  # BatchNorm's own forward does not count again
        loss = layers(torch.randn(3, 4)).sum()
        layers[1].eval()
        with pytest.raises(RuntimeError, match=r"expected torch\.\S+_BatchNorm\.forward to save the same"):
            loss.backward()


def test_an_optimizer_over_the_models_own_parameters_is_refused_and_one_made_elsewhere_is_not(tmp_path):
    model, other = gpt(), gpt()
    before = torch.optim.SGD(model.parameters(), lr=1.0)
    with stream_weights(model, model.blocks, tmp_path) as weights:
        model(*batch()).backward()
        with pytest.raises(RuntimeError, match=r"expected an optimizer over streamed.parameters\(\)"):
            before.step()
        torch.optim.SGD(weights.parameters(), lr=1.0).step()
        other(*batch()).backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
    before.step()


def test_a_checkpointed_layer_keeps_its_inputs_only(tmp_path):
    model = gpt(dropout=0.0)
    kept = {}
    for name in ("plain", "checkpointed"):
        with stream_weights(model, model.blocks, tmp_path), Meter(model) as meter:
            x = model.token_embedding(batch()[0])
            for block in model.blocks:
                x = block(x) if name == "plain" else checkpoint(block, x)
            kept[name] = meter.timeline.bytes_at(len(meter.timeline))
    inputs = 5 * 2 * 16 * 32 * 4  # the embedding's output and each block's
    with stream_weights(model, model.blocks, tmp_path) as weights:
        two_layers = 2 * weights.layers[0].nbytes
        rest = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in model.blocks.parameters())
    assert kept["checkpointed"] == two_layers + rest + inputs + 2 * 16 * 8
    assert kept["plain"] > 2 * kept["checkpointed"]


def test_backward_may_run_twice_and_through_its_own_gradient(to):
    plain, streamed = Stack(), Stack()
    streamed.load_state_dict(plain.state_dict())
    x = torch.randn(3, 64)
    with stream_weights(streamed, streamed.layers, to) as weights:
        results = []
        for model, parameters in ((plain, list(plain.parameters())), (streamed, weights.parameters())):
            loss = model(x).tanh().square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            sum(g.square().sum() for g in gradients).backward()
            results.append([p.grad for p in parameters])
        assert alike(*results)


def test_two_forwards_before_one_backward_and_a_forward_without_one(to):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    with stream_weights(streamed, streamed.blocks, to) as weights:
        for model in (plain, streamed):
            model(*batch(9))
            (model(*batch(0)) + model(*batch(1))).backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])


def test_a_loss_that_a_layer_leaves_on_the_side_finds_its_weights(to):
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.router = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.inner(x)
            self.side = self.router(x).softmax(-1).square().sum()  # reaches the loss past the layer's output
            return {"hidden": x}

    torch.manual_seed(0)
    plain = nn.ModuleList(Router() for _ in range(3))
    streamed = copy.deepcopy(plain)
    x = torch.randn(2, 8)
    with stream_weights(streamed, streamed, to, prefetch=0) as weights:
        for model in (plain, streamed):
            hidden = x
            for layer in model:
                hidden = layer(hidden)["hidden"]
            (hidden.sum() + sum(layer.side for layer in model)).backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])


def test_autocast_and_buffers_are_as_without(to):
    def block():
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))

    torch.manual_seed(0)
    plain = nn.Sequential(block(), block(), block())
    streamed = copy.deepcopy(plain)
    x = torch.randn(4, 16)
    with stream_weights(streamed, streamed, to) as weights:
        for model in (plain, streamed):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])
    assert alike(list(streamed.buffers()), list(plain.buffers()))


def test_strides_and_dtypes_come_back_as_they_were(to):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Linear(3, 3).double()])
    before = [(p.detach().clone(), p.stride(), p.dtype) for p in model.parameters()]
    with stream_weights(model, model, to):
        assert model[0](torch.ones(1, 3, 4, 4)).shape == (1, 5, 2, 2)
        assert [(p.stride(), p.dtype) for p in model.parameters()] == [b[1:] for b in before]
    assert all(torch.equal(p, b[0]) and p.stride() == b[1] for p, b in zip(model.parameters(), before, strict=True))


# ---- bytes


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_parameters_on_the_device_are_the_rest_and_as_many_layers_as_are_needed(tmp_path, prefetch):
    model = gpt(layers=6)
    rest = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in model.blocks.parameters())
    with stream_weights(model, model.blocks, tmp_path, prefetch=prefetch) as weights:
        for _ in range(2):
            with Meter(model) as meter:
                model(*batch()).backward()
            layer = weights.layers[0].nbytes
            assert layer == sum(p.nbytes for p in model.blocks[0].parameters())
            assert max(meter.timeline.curves["parameter"]) == rest + (1 + prefetch) * layer
            assert meter.timeline.curves["parameter"][-1] == rest


@pytest.mark.parametrize("given", [True, False])  # to the meter, the model
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_peak_of_inference_is_the_layers_needed_and_two_activations(tmp_path, prefetch, given):
    model, x = Stack(layers=5, width=64), torch.randn(3, 64)
    streamed = stream_weights(model, model.layers, tmp_path, prefetch=prefetch)
    with streamed, torch.no_grad(), Meter(model if given else None) as meter:
        model(x)
    w, a = 64 * 64 * 4, 3 * 64 * 4
    # beside x, a layer's input and output; from the second layer on the input is not x
    assert meter.timeline.peak_bytes == (1 + prefetch) * w + 3 * a


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_peak_of_training_does_not_grow_with_the_weights_of_more_layers(tmp_path, prefetch):
    w, a = 64 * 64 * 4, 3 * 64 * 4
    for layers in (5, 9):
        model, x = Stack(layers=layers, width=64), torch.randn(3, 64)
        with stream_weights(model, model.layers, tmp_path, prefetch=prefetch), Meter(model, inputs=x) as meter:
            model(x).backward(torch.ones(3, 64))
        # First reached in the backward of layer `layers - prefetch`, when gradients of 1 + prefetch layers meet. There
        # are the inputs of all layers up to it (x is the first), the output and its gradient, which the caller holds,
        # the gradient of this layer's input, and that of its output (with prefetch 0 it is the caller's).
        activations = layers - prefetch + 3 + (prefetch > 0)
        assert meter.timeline.peak_bytes == 2 * (1 + prefetch) * w + activations * a, layers


def test_a_model_larger_than_the_card_is_trained_on_it():
    with imagine(CARD, "1 GiB") as card:
        x = card.imagined(torch.zeros(1, 16, dtype=torch.long))
        with main_memory():
            model = GPT(layers=12, width=2048, heads=16, context=16).bfloat16()
        layers = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
        rest = sum(p.nbytes for p in model.parameters()) - sum(layers)
        assert sum(layers) > 2**30
        before = [p.untyped_storage().in_main_memory for p in model.parameters()]
        with stream_weights(model, model.blocks, device="cuda") as weights, Meter(model, inputs=x) as meter:
            optimizer = torch.optim.SGD(weights.host_parameters(), lr=1e-3)
            model(x, x).backward()
            optimizer.step()
        assert [p.untyped_storage().in_main_memory for p in model.parameters()] == before
        timeline = meter.timeline.on(f"imagined {CARD}")
        assert max(timeline.curves["parameter"]) == rest + 2 * layers[0]
        assert meter.timeline.on("cpu").peak_bytes == 2 * sum(layers)  # weights and gradients at home
        with pytest.raises(OutOfMemory):
            GPT(layers=12, width=2048, heads=16, context=16)


def test_an_imagined_card_shows_what_streaming_saves_from_a_folder_too():
    with imagine(CARD):
        model = gpt(layers=6)
        x = torch.zeros(2, 16, dtype=torch.long)
        with stream_weights(model, model.blocks, "a folder that is not made") as weights, Meter(model) as meter:
            model(x, x).backward()
            layer = weights.layers[0].nbytes
    rest = sum(p.nbytes for p in model.parameters()) - sum(p.nbytes for p in model.blocks.parameters())
    timeline = meter.timeline.on(f"imagined {CARD}")
    assert max(timeline.curves["parameter"]) == rest + 2 * layer


# ---- the rest of the model's life


def test_a_state_dict_is_whole_and_can_be_loaded(to):
    model, other = gpt(), gpt(layers=4)
    for p in other.parameters():
        nn.init.normal_(p)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with stream_weights(model, model.blocks, to) as weights:
        model(*batch())
        found = model.state_dict()
        assert list(found) == list(expected)
        assert alike(list(found.values()), list(expected.values()))
        model.load_state_dict(other.state_dict())
        assert torch.equal(weights.host_parameters()[0], other.blocks[0].norm1.weight)
        torch.manual_seed(0)
        loss = model(*batch())
        with pytest.raises(RuntimeError, match="without assign=True"):
            model.load_state_dict(other.state_dict(), assign=True)
    torch.manual_seed(0)
    assert torch.equal(loss, other(*batch()))
    assert alike(list(model.parameters()), list(other.parameters()))


def test_a_module_inside_a_layer_can_be_saved_and_loaded_by_itself(to):
    model, other = gpt(dropout=0.0), gpt(dropout=0.0)
    before = [list(block.attention.state_dict().values()) for block in copy.deepcopy(model).blocks]
    for p in other.parameters():
        nn.init.normal_(p)
    with stream_weights(model, model.blocks, to):
        model(*batch())
        for inner, outer in zip(model.blocks, other.blocks, strict=True):
            saved = io.BytesIO()
            torch.save(inner.attention.state_dict(), saved)
            assert alike(list(torch.load(io.BytesIO(saved.getvalue())).values()), before.pop(0))
            inner.attention.load_state_dict(outer.attention.state_dict())
            with pytest.raises(RuntimeError, match="without assign=True"):
                inner.attention.qkv.load_state_dict(outer.attention.qkv.state_dict(), assign=True)
        loss = model(*batch())
    assert torch.equal(loss, model(*batch()))
    for inner, outer in zip(model.blocks, other.blocks, strict=True):
        assert alike(list(inner.attention.parameters()), list(outer.attention.parameters()))


def test_a_layer_of_two_dtypes_is_saved_and_what_is_written_to_its_state_dict_counts(to):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4)
            self.empty = nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return self.norm(self.linear(x.bfloat16()).float())

    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(2, 4)
    expected = [p.detach().clone() for p in model.parameters()]
    with stream_weights(model, model, to), torch.no_grad():
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        assert alike(list(torch.load(io.BytesIO(saved.getvalue())).values()), expected)
        for _ in range(3):
            model(x)
        for value in model.state_dict().values():
            value.zero_()
        assert not model(x).any()
    assert not any(p.any() for p in model.parameters())


def test_what_is_saved_of_the_twins_are_plain_parameters(to):
    model = gpt()
    with stream_weights(model, model.blocks, to) as weights:
        saved = io.BytesIO()
        torch.save([weights.parameters(), model.state_dict(keep_vars=True)], saved)
    parameters, state = torch.load(io.BytesIO(saved.getvalue()))
    assert {type(p) for p in (*parameters, *state.values())} == {nn.Parameter}
    assert alike(parameters, list(model.parameters()))


@pytest.mark.parametrize("which", ["model", "list of layers", "layers", "parts of layers"])
def test_zero_grad_of_any_module_clears_what_is_at_home(to, which):
    model = gpt(dropout=0.0)
    blocks = list(model.blocks)
    parts = [module for block in blocks for module in block.modules()]
    with stream_weights(model, model.blocks, to) as weights:
        model(*batch()).backward()
        before = [p.grad.clone() for p in weights.host_parameters()]
        chosen = {"model": [model], "list of layers": [model.blocks], "layers": blocks, "parts of layers": parts}[which]
        blocks[0].norm1.zero_grad()
        assert [p.grad is None for p in weights.host_parameters()] == [True, True] + [False] * (len(before) - 2)
        for module in chosen:
            module.zero_grad()
        model(*batch()).backward()
        assert alike([p.grad for p in weights.host_parameters()], before)


def test_zero_grad_of_the_model_clears_what_is_at_home(to):
    model = gpt()
    with stream_weights(model, model.blocks, to) as weights:
        model(*batch()).backward()
        model.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in weights.parameters())
        model.zero_grad()
        assert all(p.grad is None for p in weights.parameters())


def test_a_conversion_is_refused(to):
    model = gpt()
    with (
        stream_weights(model, model.blocks, to),
        pytest.raises(RuntimeError, match="convert or copy it before the block"),
    ):
        model.double()
    model.double()


@pytest.mark.parametrize("which", ["model", "container", "part of a layer"])
def test_a_refused_conversion_has_converted_nothing(which, to):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))))
    chosen = {"model": model, "container": model[1], "part of a layer": model[1][1][0]}[which]
    with stream_weights(model, [model[1][1]], to):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match="convert or copy it before the block"):
            chosen.double()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        model(torch.ones(2, 4)).sum().backward()
        model[0].double().float()
    assert not [name for module in model.modules() for name in ("_apply", "__deepcopy__") if name in vars(module)]


def test_a_copy_is_refused_whose_weights_would_be_empty(to):
    model = gpt()
    with stream_weights(model, model.blocks, to):
        with pytest.raises(RuntimeError, match="convert or copy it before the block"):
            copy.deepcopy(model)
        copy.deepcopy(model.head)
    assert alike(list(copy.deepcopy(model).parameters()), list(model.parameters()))


def test_weights_written_between_forward_and_backward_are_an_error(to):
    model = gpt()
    with stream_weights(model, model.blocks, to) as weights:
        loss = model(*batch())
        with torch.no_grad():
            weights.host_parameters()[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_activation_written_to_after_it_was_saved_is_autograds_error(to):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x).sigmoid()
            z = y.square()
            y.mul_(2)
            return z

    model = nn.Sequential(InPlace())
    with stream_weights(model, model, to), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(1, 4)).sum().backward()


def test_a_weight_written_after_an_inference_is_read_again(to):
    model = gpt(dropout=0.0)
    with stream_weights(model, model.blocks, to) as weights, torch.no_grad():
        first = [model(*batch()) for _ in range(3)][-1]  # the next pass's first layer is expected by now
        for twin in weights.host_parameters():
            twin.mul_(1.5)
        second = model(*batch())
    assert not torch.equal(first, second)
    with torch.no_grad():
        assert torch.equal(model(*batch()), second)


@pytest.mark.parametrize("way", ["data.copy_", "data =", "vector_to_parameters"])
@pytest.mark.parametrize("prefetch", [1, 99])
def test_a_weight_written_through_its_data_after_an_inference_is_read_again(to, way, prefetch):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)

    def write(parameters):
        if way == "vector_to_parameters":
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 1.5, parameters)
        for p in parameters:
            if way == "data.copy_":
                p.data.copy_(p.detach() * 1.5)
            elif way == "data =":
                p.data = p.detach() * 1.5

    with stream_weights(streamed, streamed.blocks, to, prefetch=prefetch) as weights, torch.no_grad():
        for _ in range(3):
            streamed(*batch())
        write(weights.parameters())
        write(list(plain.parameters()))
        assert torch.equal(streamed(*batch()), plain(*batch()))
    assert alike(list(streamed.parameters()), list(plain.parameters()))


def test_an_optimizer_that_writes_through_data_trains_the_same_with_a_validation_before_each_step(to):
    class OfTheOldSchool(torch.optim.SGD):
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad.data, alpha=-0.1)

    plain, streamed, losses = gpt(dropout=0.0), gpt(dropout=0.0), []
    with stream_weights(streamed, streamed.blocks, to) as weights:
        for model, parameters in ((plain, list(plain.parameters())), (streamed, weights.parameters())):
            optimizer = OfTheOldSchool(parameters)
            for step in range(4):
                model(*batch(step)).backward()
                with torch.no_grad():
                    losses.append(model(*batch(9)))
                optimizer.step()
                optimizer.zero_grad()
    assert alike(losses[:4], losses[4:])
    assert alike(list(streamed.parameters()), list(plain.parameters()))


def test_data_is_read_between_forward_and_backward_without_complaint_and_not_replaced_by_another_shape(to):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    with stream_weights(streamed, streamed.blocks, to) as weights:
        for model, parameters in ((plain, list(plain.parameters())), (streamed, weights.parameters())):
            loss = model(*batch())
            assert all(p.data.isfinite().all() for p in parameters)
            loss.backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])
        with pytest.raises(ValueError, match="change it before the block"):
            weights.host_parameters()[0].data = torch.zeros(3)


def test_backward_after_the_block_is_an_error(to):
    model = gpt()
    with stream_weights(model, model.blocks, to):
        loss = model(*batch())
    with pytest.raises(RuntimeError, match="backward inside the block"):
        loss.backward()


def test_sparse_gradients_are_refused(to):
    model = nn.ModuleList([nn.Embedding(4, 4, sparse=True)])
    with stream_weights(model, model, to), pytest.raises(TypeError, match="sparse=False"):
        model[0](torch.tensor([1])).sum().backward()


@pytest.mark.parametrize(
    "layers, message",
    [
        (lambda model: [nn.Linear(2, 2)], "layers of the model"),
        (lambda model: [model.blocks[0], model.blocks[0].attention], "contains one"),
        (lambda model: [model.dropout], "no weights"),
        (lambda model: [], "no weights"),
        (lambda model: model.blocks[0], "write .layer."),
    ],
)
def test_layers_that_cannot_be_streamed_are_refused(layers, message):
    model = gpt()
    with pytest.raises((TypeError, ValueError), match=message):
        stream_weights(model, layers(model))


def test_a_negative_prefetch_is_refused():
    model = gpt()
    with pytest.raises(ValueError, match="0 or more"):
        stream_weights(model, model.blocks, prefetch=-1)


def test_layers_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = Stack()
    with pytest.raises(ValueError, match="make the model outside it"):
        stream_weights(model, model.layers)


# ---- inference mode, and ranks


def test_a_model_streamed_in_inference_mode_is_whole_afterwards_and_can_be_trained(to):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    with torch.inference_mode(), stream_weights(streamed, streamed.blocks, to):
        assert torch.equal(streamed(*batch()), plain(*batch()))
        assert torch.is_inference_mode_enabled()
    assert alike(list(streamed.parameters()), list(plain.parameters()))
    assert alike(trained(streamed, list(streamed.parameters())), trained(plain, list(plain.parameters())))


def streamed_under(_, wrapper):
    """What is said when a wrapped model is trained in the block."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    wrapped = wrapper(model)
    try:
        with stream_weights(model, model) as weights:
            wrapped(torch.ones(2, 4)).sum().backward()
            torch.optim.SGD(weights.parameters(), lr=1.0).step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("wrapper", [DataParallel, nn.parallel.DistributedDataParallel])
def test_gradients_that_would_leave_before_ranks_average_them_are_refused(wrapper):
    for said in run_ranks(streamed_under, 2, wrapper):
        assert "average the gradients of streamed.parameters() before the step" in said


def test_one_rank_alone_may_be_wrapped():
    assert run_ranks(streamed_under, 1, DataParallel) == ["nothing"]


# ---- faults


@pytest.mark.parametrize("device", [None, "cpu"])
def test_weights_for_which_there_is_no_room_in_the_end_stay_where_they_are_at_home(to, monkeypatch, device):
    def full(*_):
        raise MemoryError

    plain, streamed = gpt(), gpt()
    weights = stream_weights(streamed, streamed.blocks, to, device=device)
    weights.__enter__()
    monkeypatch.setattr(StreamedWeights, "_own", full)
    with pytest.raises(MemoryError):
        weights.__exit__(None, None, None)
    assert alike(list(streamed.parameters()), list(plain.parameters()))
    assert threads() == [] and hooks_of(streamed) == 0


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files")
def test_many_layers_take_as_few_open_files_as_one(tmp_path):
    counts = []
    for layers in (1, 50):
        model, before = Stack(layers, width=4), open_files()
        with torch.no_grad(), stream_weights(model, model.layers, tmp_path):
            with torch.enable_grad():
                model(torch.ones(1, 4)).sum().backward()
            counts.append(open_files() - before)
    assert counts[0] == counts[1] <= 4


def test_a_missing_folder_is_named_before_anything_moves(tmp_path):
    model = gpt()
    with pytest.raises(OSError, match=str(tmp_path / "missing")):
        stream_weights(model, model.blocks, tmp_path / "missing")


@pytest.mark.parametrize("room_for", [0, 1])
def test_a_full_disk_is_named_at_the_start_and_the_model_is_as_it_was(tmp_path, monkeypatch, room_for):
    calls = []

    def reserve(*call):
        calls.append(call)
        if len(calls) > room_for:
            raise OSError(28, "No space left on device")
        file, start, nbytes = call
        os.truncate(file, start + nbytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve, raising=False)
    model, plain, before = gpt(), gpt(), open_files()
    with pytest.raises(OSError, match=f"room for .* in folder '{tmp_path}', found: No space left on device"):
        stream_weights(model, model.blocks, tmp_path).__enter__()
    assert alike(list(model.parameters()), list(plain.parameters()))
    gc.collect()  # in Python 3.12 the error's frames hold each other, and the map of the file for which there was room
    assert hooks_of(model) == 0 and threads() == [] and open_files() == before


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_read_that_fails_is_raised_and_the_model_works_again(tmp_path, monkeypatch, moment):
    model, plain = gpt(dropout=0.0), gpt(dropout=0.0)
    read = homes.FileHome.read
    with stream_weights(model, model.blocks, tmp_path) as weights:
        if moment == "backward":
            loss = model(*batch())

        def fail(home, into):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(homes.FileHome, "read", fail)
        with pytest.raises(OSError, match="Input/output"):
            loss.backward() if moment == "backward" else model(*batch())
        monkeypatch.setattr(homes.FileHome, "read", read)
        model.zero_grad()
        for each in (model, plain):
            each(*batch()).backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])
    assert alike(list(model.parameters()), list(plain.parameters()))


def test_a_gradient_that_cannot_be_written_is_raised_by_backward(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    model = gpt()
    with stream_weights(model, model.blocks, tmp_path):
        loss = model(*batch())
        with monkeypatch.context() as patch:
            patch.setattr(Courier, "_take", fail)
            with pytest.raises(OSError, match="Input/output"):
                loss.backward()
        model(*batch()).backward()


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_exception_in_between_leaves_a_model_that_works(to, moment):
    def fail(*_):
        raise KeyboardInterrupt

    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    with stream_weights(streamed, streamed.blocks, to) as weights:
        norm = streamed.blocks[2].norm2
        hook = norm.register_forward_hook(fail) if moment == "forward" else norm.register_full_backward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            streamed(*batch()).backward()
        hook.remove()
        streamed.zero_grad()
        for model in (plain, streamed):
            model(*batch()).backward()
        assert alike([p.grad for p in weights.parameters()], [p.grad for p in plain.parameters()])
    with pytest.raises(ZeroDivisionError), stream_weights(streamed, streamed.blocks, to):
        streamed(*batch())
        raise ZeroDivisionError
    assert alike(list(streamed.parameters()), list(plain.parameters()))
    assert threads() == []


def test_nothing_is_left_behind(to):
    gc.collect()
    model, files = gpt(), open_files()
    methods = [set(vars(m)) for m in model.modules()]
    with stream_weights(model, model.blocks, to) as weights:
        trained(model, weights.parameters(), 2)
        assert threads() and hooks_of(model)
        gone = [weakref.ref(layer) for layer in weights.layers]
    assert threads() == [] and hooks_of(model) == 0
    assert [set(vars(m)) for m in model.modules()] == methods
    del weights
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    assert open_files() == files
    assert to == "cpu" or os.listdir(to) == []
    storages = [p.untyped_storage() for p in model.parameters()]
    assert len({s._cdata for s in storages}) == len(storages) and all(s.nbytes() for s in storages)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process the POSIX way")
def test_a_killed_process_leaves_no_file(tmp_path):
    code = """
        import os, signal, sys
        from memlab.book.workloads import GPT, Block
        from memlab.offloading import stream_weights
        model = GPT(layers=2, width=32, heads=2)
        stream_weights(model, model.blocks, sys.argv[1]).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path], env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


# ---- a GPU's streams, by a stand-in


class Stream:
    """Notes what a courier asks of a stream."""

    def __init__(self, device=None):
        self.device, self.log = device, []

    def wait_event(self, event):
        self.log.append(event)

    def synchronize(self):
        self.log.append("synchronize")

    def record_event(self):
        return "here"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_on_a_gpu_each_copy_waits_for_the_computation_and_is_waited_for(to, monkeypatch, prefetch):
    streams = []

    def init(courier, device, imagined):
        courier.on_gpu, courier.imagined, courier.bytes_up, courier.bytes_down = True, False, None, None
        streams[:] = courier.up, courier.down = Stream(), Stream()

    monkeypatch.setattr(Courier, "__init__", init)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(courier_page, "pinned_bytes", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    plain, streamed = gpt(), gpt()
    expected = trained(plain, list(plain.parameters()), micro_batches=2)
    with stream_weights(streamed, streamed.blocks, to, prefetch=prefetch) as weights:
        assert alike(trained(streamed, weights.parameters(), micro_batches=2), expected)
        for stream in streams:
            assert len(stream.log) >= 12 and stream.log == ["here", "synchronize"] * (len(stream.log) // 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_gpu_trains_from_the_host_as_it_does_by_itself(to, device):
    plain, streamed = gpt(dropout=0.0).cuda(), gpt(dropout=0.0)
    if device is None:
        streamed.cuda()
    x, y = (t.cuda() for t in batch())
    with stream_weights(streamed, streamed.blocks, to, device=device) as weights:
        for model, parameters in ((plain, list(plain.parameters())), (streamed, weights.parameters())):
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            for _ in range(3):
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert alike([p.cpu() for p in streamed.parameters()], [p.cpu() for p in plain.parameters()])
    assert {p.device.type for p in streamed.parameters()} == {"cpu" if device else "cuda"}


# ---- beside accelerate


def accelerated(model, way, folder):
    accelerate = pytest.importorskip("accelerate")
    if way == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if way == "disk_offload":
        return accelerate.disk_offload(model, folder, execution_device="cpu")
    where = {name: "cpu" for name, _ in model.named_children() if name != "blocks"}
    where |= {f"blocks.{i}": "cpu" if i < 2 else "disk" for i in range(len(model.blocks))}
    return accelerate.dispatch_model(model, where, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_accelerate_gives_the_same_outputs_and_no_gradient_of_what_it_moved(tmp_path, way):
    plain = gpt(dropout=0.0)
    expected = plain(*batch())
    theirs = accelerated(gpt(dropout=0.0), way, tmp_path)
    ours = gpt(dropout=0.0)
    with stream_weights(ours, ours.blocks, tmp_path) as weights:
        for model in (theirs, ours):
            loss = model(*batch())
            assert torch.equal(loss, expected)
            loss.backward()
        moved = [p for p in theirs.parameters() if p.is_meta]
        assert moved and all(p.grad is None for p in moved)
        assert all(p.grad is not None for p in weights.parameters())


def test_with_gradients_on_disk_offload_holds_the_whole_model_and_streaming_two_layers(tmp_path):
    model = gpt(layers=8, width=128, dropout=0.0)
    layer = sum(p.nbytes for p in model.blocks[0].parameters())
    theirs, peaks = accelerated(copy.deepcopy(model), "disk_offload", tmp_path), {}
    with stream_weights(model, model.blocks, tmp_path):
        for name, each in (("theirs", theirs), ("ours", model)):
            for gradients in (False, True):
                with Meter() as meter, torch.set_grad_enabled(gradients):
                    each(*batch())
                peaks[name, gradients] = meter.timeline.peak_bytes
    activations = peaks["ours", True] - peaks["ours", False]
    assert peaks["theirs", False] < 2 * layer  # one Linear after the other
    assert peaks["theirs", True] > 7 * layer  # autograd holds each weight that was brought
    assert peaks["ours", True] < 4 * layer + activations


def test_infer_auto_device_map_fills_by_size_in_the_order_of_registration_and_looks_at_nothing_else():
    accelerate = pytest.importorskip("accelerate")
    w = 64 * 64 * 4

    def placed(*names):
        model = Stack(layers=6, width=64)
        model.never_called = nn.Linear(64, 64, bias=False)
        ordered = nn.Module()
        for name in names:
            setattr(ordered, name, getattr(model, name))
        budget = {0: 5 * w, "cpu": 2 * w}
        found = accelerate.infer_auto_device_map(ordered, budget, no_split_module_classes=["Linear"])
        return found["never_called"], [found[f"layers.{i}"] for i in range(6)]

    # The first device keeps room for one more layer, which is to pass through it. The rest is filled first come, first
    # served, with what is never called as with what always is.
    assert placed("never_called", "layers") == (0, [0, 0, 0, "cpu", "disk", "disk"])
    assert placed("layers", "never_called") == ("disk", [0, 0, 0, 0, "cpu", "disk"])
