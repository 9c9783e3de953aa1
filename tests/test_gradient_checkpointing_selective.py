"""Selective checkpointing, by block, module and op: the same gradients, and the bytes and FLOPs that it promises."""

import functools
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.book.workloads import GPT, Block, GPTConfig
from memlab.gradient_checkpointing import (
    LINEARS,
    MATMULS,
    checkpoint,
    checkpointed,
    every,
    op_costs,
    selective_checkpoint,
)
from memlab.memory_hierarchy import OpCounter
from memlab.memory_timeline import Meter
from tests.harness import nothing_left_behind, refused
from tests.tiers import pairs, some

aten = torch.ops.aten
EVERYTHING = {
    "nothing": math.inf,
    "linears": LINEARS,
    "products": MATMULS,
    "cheap ones": lambda op, *args, **kwargs: op.overloadpacket not in MATMULS,
    "every result": 0,
    "some of each": lambda op, *args, **kwargs: (
        sum(map(ord, str(op) + str([getattr(a, "shape", a) for a in args]))) % 2
    ),
}


class Ops(TorchDispatchMode):
    """Lists the names of the ops that run in its block."""

    def __init__(self):
        super().__init__()
        self.names = []

    @classmethod
    def _should_skip_dynamo(cls):  # spares importing the compiler
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def no_gc():
    gc.disable()
    yield
    gc.enable()


def gradients(function, *inputs, seed=0):
    """Results and gradients, of two backwards, each tensor's bits, and of random numbers drawn afterwards."""
    inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    torch.manual_seed(seed)
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(result.double().pow(2).sum() for result in results)
    once = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
    loss.backward()  # makes again what was handed back the first time
    return [*(result.detach() for result in results), *once, *(tensor.grad for tensor in inputs), torch.rand(3)]


def same_bits(these, those):
    assert len(these) == len(those)
    for one, other in zip(these, those, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def functional_block(heads=2, width=8, dropout=0.0, attention="by hand", dtype=torch.float32):
    torch.manual_seed(1)
    return Block(GPTConfig(width=width, heads=heads, context=16, dropout=dropout, attention=attention)).to(dtype)


def block_step(block, call, x):
    """Output, gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    block.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    out = call(block, x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in block.parameters()), torch.rand(2)]


@pairs("keep, attention, dropout, autocast", EVERYTHING, ["by hand", "fused"], [0.0, 0.5], [False, True])
def test_whatever_is_kept_a_block_s_gradients_have_the_bits_of_the_plain_ones(keep, attention, dropout, autocast):
    block, x = functional_block(dropout=dropout, attention=attention), torch.randn(3, 16, 8)

    def twice(call, block, x):  # the second call finds autocast's cache warm
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return call(block, call(block, x)).float()

    plain = block_step(block, functools.partial(twice, plainly), x)
    way = functools.partial(selective_checkpoint, keep=EVERYTHING[keep])
    same_bits(block_step(block, functools.partial(twice, way), x), plain)


def test_what_is_kept_is_not_computed_again_and_what_is_not_is():
    a, b, c = (torch.randn(4, 4) for _ in range(3))

    def function(a, b, c):
        return ((a @ b).tanh() @ c).exp().atan()

    def backward_ops(keep):
        result = selective_checkpoint(function, a.requires_grad_(), b.requires_grad_(), c.requires_grad_(), keep=keep)
        with Ops() as ops:
            result.sum().backward()
        return [name for name in ops.names if name in ("mm", "tanh", "exp")]

    gradients_alone = 4  # two for each product
    assert backward_ops([]).count("mm") == gradients_alone + 2
    assert backward_ops([aten.mm]).count("mm") == gradients_alone
    assert backward_ops([aten.mm.default]).count("mm") == gradients_alone
    assert backward_ops(aten.mm).count("mm") == gradients_alone
    assert {"tanh", "exp"} <= set(backward_ops([aten.mm]))
    assert "exp" not in backward_ops([aten.exp])
    assert set(backward_ops(lambda op, *args: op in (aten.tanh.default, aten.exp.default))) == {"mm"}


def gpt_step(model, call, x, y):
    """Bytes held after the forward, the step's peak (both above what existed before), gradients, products' FLOPs."""

    def loss():
        stream = model.token_embedding(x) + model.position_embedding.weight
        for block in model.blocks:
            stream = call(block, stream)
        return F.cross_entropy(model.head(model.norm(stream)).flatten(0, 1), y.flatten())

    model.zero_grad(set_to_none=True)
    with Meter(model, inputs=(x, y)) as meter:
        result = loss()
        forward = len(meter.timeline)
        result.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with OpCounter() as counter:
        loss().backward()
    flops = sum(op.flops for op in counter.ops if "mm" in op.name or "attention" in op.name)
    timeline = meter.timeline
    before = timeline.bytes_at(0)
    return timeline.bytes_at(forward) - before, timeline.peak_bytes - before, found, flops


def measured_gpt(attention, *, heads=4, tokens=32, width=16, layers=3):
    torch.manual_seed(0)
    model = GPT(layers=layers, width=width, heads=heads, context=tokens, attention=attention)
    x, y = torch.randint(0, 256, (2, 2, tokens))
    return functools.partial(gpt_step, model, x=x, y=y), 2 * tokens * width * 4


def plainly(block, x):
    return block(x)


@pytest.mark.parametrize("attention", ["by hand", "fused"])
def test_keeping_linear_layers_holds_their_results_but_the_last_and_computes_attention_again(attention):
    step, stream_bytes = measured_gpt(attention)
    plain, full = step(call=plainly), step(call=checkpoint)
    some = step(call=functools.partial(selective_checkpoint, keep=LINEARS))
    same_bits(some[2], plain[2])
    # q, k, v: 3, attention's projection: 1, up: 4; nothing that backward needs is made of what `down` gives
    assert some[0] - full[0] == 3 * (3 + 1 + 4) * stream_bytes
    attention_flops = 3 * 2 * 2 * (2 * 32 * 32 * 16)  # layers · products · 2 FLOPs · (batch · T · T · width)
    assert some[3] - plain[3] == attention_flops
    assert full[3] - some[3] == 3 * 2 * (2 * 32 * 16 * 16) * (3 + 1 + 4)


def test_a_number_keeps_what_takes_that_many_flops_a_byte():
    step, stream_bytes = measured_gpt("by hand")
    scores, linears, weights_at_v = (2 * inner / 4 for inner in (16 // 4, 16, 32))  # FLOPs a byte
    full = step(call=checkpoint)[0]

    def kept(keep):  # per block, in units of its input's bytes
        return (step(call=functools.partial(selective_checkpoint, keep=keep))[0] - full) / 3 / stream_bytes

    assert kept(math.inf) == kept(weights_at_v + 0.1) == 0
    assert kept(weights_at_v) == kept(linears + 0.1) == 1
    assert kept(linears) == kept(scores + 0.1) == 1 + 8
    assert kept(scores) == 1 + 8 + 32 * 4 / 16


def twice_in_place(x, w):
    return (x @ w).mul_(2).sin()  # x has three dimensions: the product's result is seen through _unsafe_view


def through_a_view(x, w):
    h = x.flatten(0, 1) @ w
    h[1:].view(-1)[2:5] *= 3
    return h.sin() * h


def out_of_detached_data(x, w):
    h = x @ w
    h.data.mul_(2)
    return h.sin()


def overwritten_random(x, w):
    mask = torch.bernoulli(torch.full_like(x, 0.5))
    mask.mul_(2)
    return (x * mask) @ w * torch.rand_like(x)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_writing_to_a_kept_result_after_the_call_is_an_error_in_backward(dimensions):
    x, w = torch.randn(*(2, 3, 4)[-dimensions:], requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def function(x, w):
        h = x @ w
        return h, (h * 2).sin()

    h, result = selective_checkpoint(function, x, w, keep=[aten.mm])
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def draws(x, w):
    first = torch.bernoulli(torch.full_like(x, 0.5)) * x
    second = F.dropout(first @ w, 0.5)
    return second.sin() * torch.rand_like(x) + torch.randn(x.shape[-1])


RANDOM = {
    "bernoulli": [aten.bernoulli],
    "rand": [aten.rand_like],
    "randn": [aten.randn],
    "both": [aten.bernoulli, aten.rand_like],
}


def test_without_rng_state_the_generator_is_not_touched_in_backward():
    x = torch.randn(5, 4, requires_grad=True)
    keep = [aten.bernoulli]

    def function(x):
        return (x * torch.bernoulli(torch.full_like(x, 0.5))).sin()

    torch.manual_seed(0)
    result = selective_checkpoint(function, x, keep=keep)
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    result.sum().backward()
    assert torch.equal(torch.get_rng_state(), expected)
    torch.manual_seed(0)
    plain = x.detach().requires_grad_()
    function(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def several(x):
    values, indices = x.max(-1, keepdim=True)
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    parts = (x * variance).split(2, -1)
    return (x - mean).exp().gather(-1, indices) * values * parts[0].sin() * parts[1].cos(), indices


def looks_inside(x):
    b = x.sin().exp()
    assert b.grad_fn._saved_result is not None
    return (b * 2).sin().sin()


def differentiates_inside(x):
    (g,) = torch.autograd.grad((x.sin() * x).exp().sum(), x, create_graph=True)
    return (x * g).exp()


WRITES = (twice_in_place, through_a_view, out_of_detached_data, overwritten_random)
PLAIN = {one.__name__: one for one in WRITES} | {
    "random": lambda x, w: draws(x[0], w),
    "several results": lambda x, w: several(x[0]),
    "looks inside": lambda x, w: looks_inside(x),
    "differentiates inside": lambda x, w: differentiates_inside(x),
}


@pytest.mark.parametrize("keep", [*EVERYTHING, *RANDOM])
@pytest.mark.parametrize("case", PLAIN)
def test_whatever_is_kept_results_gradients_and_random_numbers_have_the_bits_of_the_plain_ones(case, keep):
    x, w, function = torch.randn(2, 3, 4), torch.randn(4, 4), PLAIN[case]
    keep = (EVERYTHING | RANDOM)[keep]
    mine = gradients(lambda x, w: selective_checkpoint(function, x, w, keep=keep), x, w)
    same_bits(mine, gradients(function, x, w))


def test_an_outer_checkpoint_drops_what_an_inner_selective_one_keeps():
    def function(x, w):
        return ((x @ w).sin() @ w).cos()

    def held(call):
        x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
        with Meter(inputs=(x, w)) as meter:
            result = call(x, w)
            forward = len(meter.timeline)
            result.sum().backward()
        return meter.timeline.bytes_at(forward)

    inner = functools.partial(selective_checkpoint, function, keep=MATMULS)
    assert held(functools.partial(checkpoint, inner)) == held(functools.partial(checkpoint, function))
    assert held(inner) == held(functools.partial(checkpoint, function)) + 2 * 64 * 64 * 4


@pytest.mark.parametrize("backward", [False, True])
def test_no_kept_tensor_outlives_its_graph_and_no_cycle_holds_it(backward, no_gc):
    kept = []

    def function(x, w):
        h = x @ w
        kept.append(weakref.ref(h.untyped_storage()))
        return h.sin() @ w

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    result = selective_checkpoint(function, x, w, keep=[aten.mm])
    assert kept[0]() is not None
    if backward:
        result.sum().backward()
        assert all(storage() is None for storage in kept)
    del result
    assert all(storage() is None for storage in kept)


def test_a_function_that_raises_leaves_no_mode_and_no_hooks_and_without_gradients_nothing_is_asked():
    def function(x):
        x = x @ x
        raise KeyError("mine")

    x = torch.randn(4, 4, requires_grad=True)
    with nothing_left_behind(), pytest.raises(KeyError, match="mine"):
        selective_checkpoint(function, x, keep=[aten.mm])
    with torch.no_grad():
        result = selective_checkpoint(lambda x: x @ x, x, keep=lambda op, *args: pytest.fail("asked"))
    assert not result.requires_grad


def test_a_look_at_the_graph_takes_nothing_away_and_leaves_nothing_there():
    made = []

    def function(x, w):
        h = x.exp()
        made.append(weakref.ref(h.untyped_storage()))
        return (h @ w).sin()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    result = selective_checkpoint(function, x, w, keep=[aten.mm])
    with Ops() as looking:
        assert result.grad_fn._saved_self.shape == (3, 4)
    assert "mm" not in looking.names
    assert [storage() for storage in made] == [None, None]
    with Ops() as ops:
        result.sum().backward()
    assert ops.names.count("mm") == 2


def test_a_policy_is_asked_in_the_forward_once_for_each_op_with_what_the_op_was_given():
    asked = []

    def keep(op, *args, **kwargs):
        asked.append((op, [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))
        return True

    x = torch.randn(3, 4, requires_grad=True)
    result = selective_checkpoint(lambda x: (x @ x.T).exp().view(-1), x, keep=keep)
    expected = [(aten.mm.default, [(3, 4), (4, 3)]), (aten.exp.default, [(3, 3)])]
    assert asked == expected
    result.sum().backward()
    assert asked == expected


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda x, again: ((x[: 2 if again else 3] + 1).sum() * x).sin(),
            "call 1 of aten.add.Tensor, shapes (3, 4) as in the forward, found (2, 4)",
        ),
        (
            lambda x, again: (x + 1 + 1 if again else x + 1).sin(),
            "call 2 of aten.add.Tensor, no such call in the forward, found one",
        ),
    ],
    ids=["other shapes", "once more"],
)
def test_a_kept_op_that_is_called_otherwise_the_second_time_is_named(function, words):
    runs = []

    def counted(x):
        runs.append(1)
        return function(x, len(runs) > 1)

    result = selective_checkpoint(counted, torch.randn(3, 4, requires_grad=True), keep=[aten.add])
    refused(result.sum().backward, RuntimeError, words)


def test_views_casts_and_copies_are_never_kept():
    def function(x):
        return x.t().contiguous().double().view(-1).exp()

    x = torch.randn(64, 32)
    asked = []
    mine = gradients(lambda x: selective_checkpoint(function, x, keep=lambda op, *_, **__: asked.append(op) or True), x)
    same_bits(mine, gradients(function, x))
    assert asked == [aten.exp.default]


def test_op_costs_of_a_block_sort_products_by_their_inner_dimension():
    block = functional_block(heads=2, width=8)
    x = torch.randn(3, 16, 8)
    costs = op_costs(block, x.requires_grad_())
    assert [cost.flops_per_byte for cost in costs] == sorted(cost.flops_per_byte for cost in costs)
    products = {cost.shape: cost.flops_per_byte for cost in costs if "mm" in cost.op}
    inner = {(6, 16, 16): 4, (6, 16, 4): 16, (48, 24): 8, (48, 32): 8, (48, 8): 32}
    assert products == {shape: 2 * k / 4 for shape, k in inner.items()} | {(48, 8): products[48, 8]}
    assert {cost.flops_per_byte for cost in costs if cost.shape == (48, 8) and cost.op == "addmm"} == {
        2 * 8 / 4,
        2 * 32 / 4,
    }


@pytest.mark.parametrize("attention", ["by hand", "fused"])
def test_the_saved_of_op_costs_are_what_a_block_holds_after_its_forward(attention):
    block = functional_block(attention=attention)
    x = torch.randn(3, 16, 8, requires_grad=True)
    with Meter(block, inputs=x) as meter:
        result = block(x)
    timeline = meter.timeline
    held = timeline.bytes_at(len(timeline)) - timeline.bytes_at(0) - result.nbytes
    costs = op_costs(block, x)
    assert sum(cost.nbytes for cost in costs if cost.saved) == held


def lively_model():
    torch.manual_seed(0)
    return GPT(layers=3, width=8, heads=2, context=16, dropout=0.1)


def model_step(model, *batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), torch.rand(2)]


BATCH = torch.randint(0, 256, (2, 2, 16), generator=torch.Generator().manual_seed(0))
CHOICES = {
    "of two classes": lambda model: [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm))],
    "blocks": lambda model: model.blocks,
    "every other": lambda model: every(model.blocks, 2),
    "attention": lambda model: (block.attention for block in model.blocks),
    "one twice": lambda model: [model.blocks[1], model.blocks[1]],
}


@some("choice, keep", itertools.product(CHOICES, [None, LINEARS]), keep=5)
def test_whichever_modules_are_checkpointed_the_step_is_the_same_and_nothing_is_left(choice, keep):
    model = lively_model()
    which, plain = list(CHOICES[choice](model)), model_step(model, *BATCH)
    names, before = list(model.state_dict()), [dict(vars(module)) for module in model.modules()]
    with pytest.raises(KeyError), checkpointed(model, which, keep=keep):
        assert list(model.state_dict()) == names
        same_bits(model_step(model, *BATCH), plain)
        torch.manual_seed(3)
        model.zero_grad(set_to_none=True)
        loss = model(*BATCH)
        raise KeyError
    assert [dict(vars(module)) for module in model.modules()] == before
    loss.backward()  # after the block
    same_bits([loss.detach(), *(p.grad for p in model.parameters()), torch.rand(2)], plain)
    assert [dict(vars(module)) for module in model.modules()] == before
    model.eval()
    with torch.no_grad(), checkpointed(model, which, keep=keep):
        found = model(*BATCH)
    assert torch.equal(found, model(*BATCH))


def held_after_forward(model, x):
    with Meter(model, inputs=x) as meter:
        loss = model(x).sum()
        held = meter.timeline.totals[-1] - meter.timeline.bytes_at(0)
    loss.backward()
    return held


def test_a_checkpointed_block_holds_its_input_alone():
    """… so with n of L blocks checkpointed, n times what a block saves less its input is gone."""
    torch.manual_seed(0)
    model = GPT(layers=6, width=8, heads=2, context=16)
    x = BATCH[0]
    plain = held_after_forward(model, x)
    gone = {}
    for k in (1, 2, 3, 6):
        with checkpointed(model, every(model.blocks, k)) as chosen:
            gone[len(chosen)] = plain - held_after_forward(model, x)
    assert list(gone) == [6, 3, 2, 1]
    assert {n: n * gone[1] for n in gone} == gone
    saved = sum(
        cost.nbytes for cost in op_costs(model.blocks[0], torch.randn(2, 16, 8, requires_grad=True)) if cost.saved
    )
    assert gone[1] == saved


def test_hooks_on_a_chosen_module_run_once_and_its_own_forward_comes_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    own = functools.partial(nn.Linear.forward, model[1])
    model[1].forward = own
    with checkpointed(model, list(model)):
        model(torch.randn(2, 4)).sum().backward()
    assert calls == ["hook"]
    assert model[1].forward is own
    assert "forward" not in vars(model[0])


def test_a_module_is_not_checkpointed_twice_and_the_first_block_goes_on():
    model = lively_model()
    with checkpointed(model, model.blocks):
        with (
            pytest.raises(RuntimeError, match="not checkpointed, found a Block that is"),
            checkpointed(model, [model.head, model.blocks[1]]),
        ):
            pass
        assert [m for m in model.modules() if "forward" in vars(m)] == list(model.blocks)
    assert all("forward" not in vars(module) for module in model.modules())


class Witness:
    """Dies with what holds it."""


def kept(f, *args):
    return selective_checkpoint(f, *args, keep=0)


def by_torch(f, *args):
    return torchs.checkpoint(f, *args, use_reentrant=False)


NESTINGS = [*itertools.product((kept, checkpoint, by_torch), repeat=2), (kept, kept, kept), (checkpoint, kept, kept)]


@pytest.mark.parametrize("around", NESTINGS, ids=lambda around: " ".join(one.__name__ for one in around))
def test_nested_in_any_way_gradients_are_bitwise_and_nothing_is_left_to_the_collector(around, no_gc):
    def function(x, w, witness):
        return twice_in_place(draws(x, w).exp(), w).tanh()

    x, w, witness = torch.randn(2, 3, 4), torch.randn(4, 4), [Witness()]
    expected = gradients(lambda x, w: function(x, w, None), x, w)
    seen, run = weakref.ref(witness[0]), function
    for one in around:
        run = functools.partial(one, run)
    same_bits(gradients(lambda x, w: run(x, w, witness.pop()), x, w), expected)
    assert seen() is None


def test_buffers_lent_to_batch_norm_are_no_result_of_the_function():
    for run in (
        lambda f, x: selective_checkpoint(f, x, keep=0),
        lambda f, x: selective_checkpoint(lambda x: selective_checkpoint(f, x, keep=0), x, keep=0),
        lambda f, x: selective_checkpoint(lambda x: checkpoint(f, x), x, keep=0),
    ):
        norm, x = nn.BatchNorm1d(4), torch.randn(3, 4, requires_grad=True)

        def function(x, norm=norm):
            return (norm(x) + torch.zeros_like(x)).exp()

        found = torch.autograd.grad(run(function, x).sum(), x)[0]
        assert norm.num_batches_tracked == 1
        assert torch.equal(found, torch.autograd.grad(function(x).sum(), x)[0])
