"""Weights streamed layer by layer: the same training from a device that holds a layer or two."""

import copy
import functools
import io
import os
import weakref
from contextlib import nullcontext

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
from memlab.ranks import one_rank, run_ranks
from tests.harness import nothing_left_behind, refusals, refused, traces
from tests.tiers import pairs

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


def gradients(parameters) -> list:
    return [p.grad for p in parameters]


def same_gradients(plain, layers, to, do, **options) -> None:
    """do(model) leaves the same gradients in the model as in a copy of which layers(copy) are streamed."""
    streamed = copy.deepcopy(plain)
    with stream_weights(streamed, layers(streamed), to, **options) as weights:
        for model in (plain, streamed):
            torch.manual_seed(1)
            do(model)
        assert alike(gradients(weights.parameters()), gradients(plain.parameters()))
        assert any(p.grad is not None for p in plain.parameters())
    assert alike([*streamed.parameters(), *streamed.buffers()], [*plain.parameters(), *plain.buffers()])


def twins(weights) -> list[nn.Parameter]:
    return [twin for layer in weights.layers for twin in layer.twins]


def sizes_of(model) -> tuple[int, int]:
    """The bytes of all that stays on the device, and of one layer."""
    layers = sum(p.nbytes for p in model.blocks.parameters())
    return sum(p.nbytes for p in model.parameters()) - layers, layers // len(model.blocks)


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


def failing(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(("prefetch", "micro_batches"), [(0, 1), (1, 3), (3, 1), (99, 1)])
def test_training_is_the_same_bit_for_bit(to, prefetch, micro_batches):
    plain, streamed = gpt(), gpt()
    expected = trained(plain, list(plain.parameters()), micro_batches=micro_batches)
    with stream_weights(streamed, streamed.blocks, to, prefetch=prefetch) as weights:
        found = trained(streamed, weights.parameters(), micro_batches=micro_batches)
    assert alike(found, expected)
    assert alike(list(streamed.parameters()), list(plain.parameters()))


def clamp(module: nn.Linear, *_) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.1, 0.1)


def test_a_layer_that_writes_to_its_own_weights_in_its_forward_or_a_hook_before_it_is_refused_and_reads_them_again(to):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 8))
    before = [p.detach().clone() for p in model.parameters()]
    with stream_weights(model, list(model), to):
        for _ in range(2):
            refused(lambda: model(torch.arange(6)), RuntimeError, "found a Embedding whose forward or hook writes")
        hook = model[1].register_forward_pre_hook(clamp)
        for _ in range(2):
            refused(lambda: model[1](torch.ones(2, 8)), RuntimeError, "found a Linear whose forward or hook writes")
        hook.remove()
        found = model[1](torch.ones(2, 8))
    assert alike(list(model.parameters()), before)
    assert torch.equal(found, model[1](torch.ones(2, 8)))


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
    assert alike(gradients(streamed.parameters()), gradients(plain.parameters()))
    assert alike(list(streamed.parameters()), list(plain.parameters()))


def test_an_optimizer_of_the_block_is_refused_after_it_and_one_made_elsewhere_is_not(to):
    model, other = gpt(), gpt()
    before = torch.optim.SGD(model.parameters(), lr=1.0)
    with stream_weights(model, model.blocks, to) as weights:
        optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
        model(*batch()).backward()
        refused(before.step, RuntimeError, "expected an optimizer over streamed.parameters()")
        optimizer.step()
        other(*batch()).backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        optimizer.zero_grad()
    model(*batch()).backward()
    for call in (optimizer.step, optimizer.zero_grad):
        refused(call, RuntimeError, "make one over model.parameters()")
    before.step()
    refused(weights.__enter__, RuntimeError, "call stream_weights again")
    refused(weights.parameters, RuntimeError, "inside the block")


def test_inference_frozen_layers_and_a_partly_streamed_model(to):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    for model in (plain, streamed):
        model.blocks[1].requires_grad_(False)
        model.blocks[2].attention.qkv.weight.requires_grad_(False)
    with stream_weights(streamed, list(streamed.blocks)[1:], to) as weights:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(streamed(*batch()), plain(*batch()))
        expected = trained(plain, list(plain.parameters()))
        assert alike(trained(streamed, weights.parameters()), expected)
        assert len(twins(weights)) == 3 * len(list(streamed.blocks[0].parameters()))


def test_a_forward_without_backward_keeps_nothing_of_what_its_ops_saved(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))  # Tanh saves its own result
    with stream_weights(model, [model[0], model[2]], to=tmp_path):
        y = model(torch.ones(2, 8)).exp()
        saved = weakref.ref(y.untyped_storage())
        del y
        assert saved() is None


def test_a_parameter_that_is_unfrozen_inside_the_block_is_refused_in_the_step(to):
    model = Stack(2).requires_grad_(False)
    with stream_weights(model, model.layers, to) as weights:
        model.requires_grad_(True)
        model(X).sum().backward()
        optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
        refused(optimizer.step, RuntimeError, "unfreeze weights before the block")


class Queries(nn.Module):
    """Returns a parameter of its own and a view of it."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1000, 8))

    def forward(self, x):
        return {"x": x, "queries": (self.queries, self.queries[:2])}


X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


def in_order(*numbers):
    def do(model):
        for _ in range(3):
            x = X
            for number in numbers:
                x = torch.tanh(model.layers[number](x))
            x.square().sum().backward()

    return Stack, lambda model: [*model.layers, model.layers[0]], do


def of_queries(model):
    for grad in (torch.no_grad(), nullcontext()):
        with grad:
            x, out = X[:2, :8], model[0](X[:2, :8])
            for layer in model[1:]:
                x = layer(x)
            loss = (x + out["queries"][1]).square().sum() + out["queries"][0].sum()
    loss.backward()


def twice_and_through_its_own_gradient(model):
    loss = model(X).tanh().square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(g.square().sum() for g in found).backward()


CASES = {
    "backwards": in_order(3, 2, 1, 0),
    "skipping and repeating": in_order(0, 1, 0, 1, 3),
    "one layer three times": in_order(0, 0, 0),
    "a parameter of its own returned": (
        lambda: nn.ModuleList([Queries(), *(nn.Linear(8, 8) for _ in range(4))]),
        list,
        of_queries,
    ),
    "double backward": (Stack, lambda model: model.layers, twice_and_through_its_own_gradient),
}


@pairs("name, prefetch, place", CASES, [1, 0], ["cpu", "file"])
def test_gradients_are_those_without_streaming(name, prefetch, place, tmp_path):
    torch.manual_seed(0)
    make, layers, do = CASES[name]
    same_gradients(make(), layers, "cpu" if place == "cpu" else tmp_path, do, prefetch=prefetch)


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

    def metered(model):
        with Meter(model) as meter:
            model(X).sum().backward()
        left.append(meter.timeline.curves["parameter"][-1])

    left = []
    same_gradients(nn.Sequential(*[Layer() for _ in range(4)]), list, to, metered)
    assert left == [4 * 64 * 64 * 4, 0]


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


@pytest.mark.parametrize("way", [checkpoint, *(functools.partial(torch_checkpoint, use_reentrant=r) for r in (0, 1))])
@pytest.mark.parametrize("segment", [1, 2])
def test_checkpointed_layers_are_brought_for_their_recomputation(tmp_path, way, segment):
    def do(model):
        for seed in range(2):
            x, y = batch(seed)
            x = model.token_embedding(x)
            for start in range(0, 4, segment):
                x = way(nn.Sequential(*model.blocks[start : start + segment]), x)
            nn.functional.cross_entropy(model.head(x).flatten(0, 1), y.flatten()).backward()

    same_gradients(gpt(), lambda model: model.blocks, tmp_path, do)


@pytest.mark.parametrize("way", [checkpoint, functools.partial(torch_checkpoint, use_reentrant=False)])
def test_a_checkpoint_inside_a_layer_finds_the_weights_there_and_as_few_layers_as_ever(tmp_path, way):
    plain, streamed = gpt(), gpt()
    for block in (*plain.blocks, *streamed.blocks):
        block.forward = functools.partial(way, block.forward)
    torch.manual_seed(1)
    plain(*batch()).backward()
    rest, layer = sizes_of(plain)
    with stream_weights(streamed, streamed.blocks, tmp_path) as weights, Meter(streamed) as meter:
        torch.manual_seed(1)
        streamed(*batch()).backward()
        assert alike(gradients(weights.parameters()), gradients(plain.parameters()))
    assert max(meter.timeline.curves["parameter"]) == 2 * layer + rest


@pairs("kinds, streamed_first, prefetch, autocast", [(nn.Linear, nn.LayerNorm), Block], [0, 1], [0, 1], [False, True])
def test_modules_of_layers_that_are_checkpointed_find_their_weights(kinds, streamed_first, prefetch, autocast):
    def gradients_of(model):
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(*batch(seed))
            loss.backward()
        return gradients(model.parameters())

    model = gpt()
    which = [module for module in model.modules() if isinstance(module, kinds)]
    ways = [lambda: checkpointed(model, which), lambda: stream_weights(model, model.blocks, prefetch=prefetch)]
    with ways[streamed_first](), ways[not streamed_first]():
        gradients_of(model)
    assert alike(gradients(model.parameters()), gradients_of(gpt()))


def test_a_checkpoint_of_a_streamed_layer_knows_whose_forward_it_is():
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with stream_weights(layers, list(layers)), checkpointed(layers, list(layers)):
        layers(torch.randn(3, 4)).sum().backward()
        assert layers[1].num_batches_tracked == 1  # BatchNorm's own forward does not count again
        loss = layers(torch.randn(3, 4)).sum()
        layers[1].eval()
        with pytest.raises(RuntimeError, match=r"expected torch\.\S+_BatchNorm\.forward to save the same"):
            loss.backward()


def test_strides_and_dtypes_come_back_as_they_were(to):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Linear(3, 3).double()])
    before = [(p.detach().clone(), p.stride(), p.dtype) for p in model.parameters()]
    with stream_weights(model, model, to):
        assert model[0](torch.ones(1, 3, 4, 4)).shape == (1, 5, 2, 2)
        assert [(p.stride(), p.dtype) for p in model.parameters()] == [b[1:] for b in before]
    assert all(torch.equal(p, b[0]) and p.stride() == b[1] for p, b in zip(model.parameters(), before, strict=True))


@pairs("prefetch, given", [0, 1, 2], [True, False])
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
    with imagine(CARD, "128 MiB") as card:
        x = card.imagined(torch.zeros(1, 16, dtype=torch.long))
        with main_memory():
            model = GPT(layers=12, width=768, heads=6, context=16).bfloat16()
        rest, layer = sizes_of(model)
        assert 12 * layer > 2**27
        before = [p.untyped_storage().in_main_memory for p in model.parameters()]
        with stream_weights(model, model.blocks, device="cuda") as weights, Meter(model, inputs=x) as meter:
            optimizer = torch.optim.SGD(twins(weights), lr=1e-3)
            assert weights.layers[0].nbytes == layer
            model(x, x).backward()
            optimizer.step()
        assert [p.untyped_storage().in_main_memory for p in model.parameters()] == before
        timeline = meter.timeline.on(f"imagined {CARD}")
        assert max(timeline.curves["parameter"]) == rest + 2 * layer
        assert meter.timeline.on("cpu").peak_bytes == 2 * 12 * layer  # weights and gradients at home
        with pytest.raises(OutOfMemory):
            GPT(layers=12, width=768, heads=6, context=16)


def test_an_imagined_card_shows_what_streaming_saves_from_a_folder_too():
    with imagine(CARD):
        model, x = gpt(layers=6), torch.zeros(2, 16, dtype=torch.long)
        rest, layer = sizes_of(model)
        with stream_weights(model, model.blocks, "a folder that is not made"), Meter(model) as meter:
            model(x, x).backward()
    assert max(meter.timeline.on(f"imagined {CARD}").curves["parameter"]) == rest + 2 * layer


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_state_dict_of_the_model_and_of_a_module_inside_a_layer_is_whole(to, keep_vars):
    model = gpt()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    inside = [copy.deepcopy(block.attention.state_dict()) for block in model.blocks]
    with stream_weights(model, model.blocks, to):
        model(*batch())
        found = [loaded(model.state_dict(keep_vars=keep_vars))]
        found += [loaded(block.attention.state_dict(keep_vars=keep_vars)) for block in model.blocks]
    for state, values in zip(found, [expected, *inside], strict=True):
        assert list(state) == list(values) and alike(list(state.values()), list(values.values()))


def loaded(thing):
    saved = io.BytesIO()
    torch.save(thing, saved)
    return torch.load(io.BytesIO(saved.getvalue()), weights_only=False)


CHANGES = {
    "model": lambda model: model.double(),
    "container": lambda model: model[1].double(),
    "part of a layer": lambda model: model[1][1][0].double(),
    "copy": copy.deepcopy,
    "load": lambda model: model.load_state_dict(model.state_dict()),
    "load a part": lambda model: model[1][1].load_state_dict(model[1][1].state_dict(), assign=True),
    "zero": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("which", CHANGES)
def test_a_refused_change_has_changed_nothing(which, to):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))))
    methods = [set(vars(module)) for module in model.modules()]
    with stream_weights(model, [model[1][1]], to):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        refused(lambda: CHANGES[which](model), RuntimeError, "load, convert or copy it before the block, and clear")
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        model(torch.ones(2, 4)).sum().backward()
        model[0].load_state_dict(copy.deepcopy(model[0].double().float()).state_dict())
    assert alike(list(copy.deepcopy(model).parameters()), list(model.parameters()))
    assert [set(vars(module)) for module in model.modules()] == methods


def test_weights_written_between_forward_and_backward_are_an_error(to):
    model = gpt()
    with stream_weights(model, model.blocks, to) as weights:
        loss = model(*batch())
        with torch.no_grad():
            twins(weights)[0].mul_(2)
        refused(loss.backward, RuntimeError, "modified by an inplace operation")


def test_an_activation_written_to_after_it_was_saved_is_autograds_error(to):
    class InPlace(nn.Linear):
        def forward(self, x):
            y = super().forward(x).sigmoid()
            z = y.square()
            y.mul_(2)
            return z

    model = nn.Sequential(InPlace(4, 4))
    with stream_weights(model, model, to):
        refused(model(torch.ones(1, 4)).sum().backward, RuntimeError, "modified by an inplace operation")


@pairs("prefetch, place", [1, 99], ["cpu", "file"])
def test_a_weight_written_after_an_inference_is_read_again(prefetch, place, tmp_path):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    where = "cpu" if place == "cpu" else tmp_path
    with stream_weights(streamed, streamed.blocks, where, prefetch=prefetch) as weights, torch.no_grad():
        streamed(*batch())
        for p in (*weights.parameters(), *plain.parameters()):
            p.mul_(1.5)
        assert torch.equal(streamed(*batch()), plain(*batch()))
    assert alike(list(streamed.parameters()), list(plain.parameters()))


def test_data_of_a_twin_to_which_no_writes_are_counted_is_refused(to):
    model = gpt()
    with stream_weights(model, model.blocks, to) as weights:
        twin = twins(weights)[0]
        for call in (lambda: twin.data, lambda: setattr(twin, "data", torch.zeros(3)), lambda: copy.deepcopy(twin)):
            refused(call, RuntimeError, "expected nobody to take a streamed parameter's .data")
        assert twin.detach().isfinite().all()


def of_a_gpt(layers, **options):
    model = gpt()
    stream_weights(model, layers(model), **options)


def backward_after_the_block():
    model = gpt()
    with stream_weights(model, model.blocks):
        loss = model(*batch())
    loss.backward()


def sparse():
    model = nn.ModuleList([nn.Embedding(4, 4, sparse=True)])
    with stream_weights(model, model):
        model[0](torch.tensor([1])).sum().backward()


def of_inference_mode():
    with torch.inference_mode():
        model = Stack()
    stream_weights(model, model.layers)


REFUSALS = {
    "backward after the block": (backward_after_the_block, RuntimeError, "backward inside the block"),
    "sparse gradients": (sparse, TypeError, "sparse=False"),
    "another's layer": (lambda: of_a_gpt(lambda m: [nn.Linear(2, 2)]), ValueError, "layers of the model"),
    "one in another": (lambda: of_a_gpt(lambda m: [m.blocks[0], m.blocks[0].attention]), ValueError, "contains one"),
    "no weights": (lambda: of_a_gpt(lambda m: [m.dropout]), ValueError, "no weights"),
    "a layer alone": (lambda: of_a_gpt(lambda m: m.blocks[0]), TypeError, "write [layer]"),
    "a negative prefetch": (lambda: of_a_gpt(lambda m: m.blocks, prefetch=-1), ValueError, "0 or more"),
    "of inference mode": (of_inference_mode, ValueError, "make the model outside it"),
    "a missing folder": (lambda: of_a_gpt(lambda m: m.blocks, to="no/where"), OSError, "no/where"),
}


@refusals(REFUSALS)
def test_what_cannot_be_streamed_is_refused(call, error, words):
    refused(call, error, words)


def test_a_model_streamed_in_inference_mode_is_whole_afterwards_and_can_be_trained(to):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    with torch.inference_mode(), stream_weights(streamed, streamed.blocks, to):
        assert torch.equal(streamed(*batch()), plain(*batch()))
        assert torch.is_inference_mode_enabled()
    assert alike(list(streamed.parameters()), list(plain.parameters()))
    assert alike(trained(streamed, list(streamed.parameters())), trained(plain, list(plain.parameters())))


def streamed_under(_, wrappers=(DataParallel, nn.parallel.DistributedDataParallel)) -> list[str]:
    """What is said when a wrapped model is trained in the block."""
    said = []
    for wrapper in wrappers:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        wrapped = wrapper(model)
        try:
            with stream_weights(model, model) as weights:
                wrapped(torch.ones(2, 4)).sum().backward()
                torch.optim.SGD(weights.parameters(), lr=1.0).step()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_gradients_that_would_leave_before_ranks_average_them_are_refused_and_one_rank_alone_may_be_wrapped():
    for said in run_ranks(streamed_under, 2):
        assert len(said) == 2
        assert all("average the gradients of streamed.parameters() before the step" in words for words in said)
    with one_rank("cpu"):
        assert streamed_under(0, (DataParallel,)) == []


@pytest.mark.parametrize("device", [None, "cpu"])
def test_weights_for_which_there_is_no_room_in_the_end_stay_where_they_are_at_home(to, monkeypatch, device):
    plain, streamed = gpt(), gpt()
    weights = stream_weights(streamed, streamed.blocks, to, device=device)
    before = traces(streamed)
    weights.__enter__()
    monkeypatch.setattr(StreamedWeights, "_own", failing(MemoryError()))
    with pytest.raises(MemoryError):
        weights.__exit__(None, None, None)
    assert alike(list(streamed.parameters()), list(plain.parameters()))
    assert traces(streamed) | {"open files": 0} == before | {"open files": 0}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files")
def test_many_layers_take_as_few_open_files_as_one(tmp_path):
    counts = []
    for layers in (1, 50):
        model = Stack(layers, width=4)
        before = traces()["open files"]
        with torch.no_grad(), stream_weights(model, model.layers, tmp_path):
            with torch.enable_grad():
                model(torch.ones(1, 4)).sum().backward()
            counts.append(traces()["open files"] - before)
    assert counts[0] == counts[1] <= 4


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
    model, plain = gpt(), gpt()
    with nothing_left_behind(model):
        refused(
            stream_weights(model, model.blocks, tmp_path).__enter__,
            OSError,
            f"room for …in folder '{tmp_path}', found: No space left on device",
        )
    assert alike(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize(
    ("page", "name", "in_backward"),
    [(homes.FileHome, "read", False), (homes.FileHome, "read", True), (Courier, "_take", True)],
    ids=["a read, in a forward", "a read, in a backward", "a gradient's write"],
)
def test_what_fails_in_the_file_is_raised_and_the_model_works_again(tmp_path, monkeypatch, page, name, in_backward):
    model, plain = gpt(dropout=0.0), gpt(dropout=0.0)
    with stream_weights(model, model.blocks, tmp_path) as weights:
        forward = lambda: model(*batch())  # noqa: E731
        call = forward().backward if in_backward else forward
        with monkeypatch.context() as patch:
            patch.setattr(page, name, failing(OSError(5, "Input/output error")))
            with pytest.raises(OSError, match="Input/output"):
                call()
        torch.optim.SGD(weights.parameters()).zero_grad()
        for each in (model, plain):
            each(*batch()).backward()
        assert alike(gradients(weights.parameters()), gradients(plain.parameters()))
    assert alike(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_exception_in_between_leaves_a_model_that_works(to, moment):
    plain, streamed = gpt(dropout=0.0), gpt(dropout=0.0)
    fail = failing(KeyboardInterrupt())
    with stream_weights(streamed, streamed.blocks, to) as weights:
        norm = streamed.blocks[2].norm2
        hook = norm.register_forward_hook(fail) if moment == "forward" else norm.register_full_backward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            streamed(*batch()).backward()
        hook.remove()
        torch.optim.SGD(weights.parameters()).zero_grad()
        for model in (plain, streamed):
            model(*batch()).backward()
        assert alike(gradients(weights.parameters()), gradients(plain.parameters()))


def test_nothing_is_left_behind(to):
    model = gpt()
    methods = [set(vars(m)) for m in model.modules()]
    with nothing_left_behind(model):
        with stream_weights(model, model.blocks, to) as weights:
            trained(model, weights.parameters(), 2)
            assert traces(model)["threads"] and traces(model)["hooks"]
            gone = [weakref.ref(layer) for layer in weights.layers]
        assert [set(vars(m)) for m in model.modules()] == methods
        del weights
    assert [ref() for ref in gone] == [None] * 4
    assert to == "cpu" or os.listdir(to) == []
    storages = [p.untyped_storage() for p in model.parameters()]
    assert len({s._cdata for s in storages}) == len(storages) and all(s.nbytes() for s in storages)


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


@pytest.mark.gpu
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


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files")
def test_the_weights_file_is_closed_with_the_block_even_if_the_context_is_kept(tmp_path):
    model = gpt()
    weights = stream_weights(model, model.blocks, tmp_path)
    with nothing_left_behind(model), weights:
        model(*batch()).backward()
