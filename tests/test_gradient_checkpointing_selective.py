"""Selective checkpointing, by block, module and op: the same gradients, and the bytes and FLOPs that it promises."""

import functools
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.book.workloads import GPT, Block, GPTConfig
from memlab.gradient_checkpointing.costs import LINEARS, MATMULS, op_costs
from memlab.gradient_checkpointing.hooks import checkpoint
from memlab.gradient_checkpointing.modules import checkpointed, every
from memlab.gradient_checkpointing.selective import selective_checkpoint
from memlab.memory_hierarchy import OpCounter
from memlab.memory_timeline import Meter

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


def gradients(function, *inputs, seed=0):
    """The result and the gradients of the inputs, each tensor's bits, and of random numbers drawn afterwards."""
    inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    torch.manual_seed(seed)
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum(result.double().pow(2).sum() for result in results)
    loss.backward()
    after = torch.rand(3)
    return [*(result.detach() for result in results), *(tensor.grad for tensor in inputs), after]


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


@pytest.mark.parametrize("keep", EVERYTHING.values(), ids=EVERYTHING)
@pytest.mark.parametrize("attention", ["by hand", "fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_whatever_is_kept_a_block_s_gradients_have_the_bits_of_the_plain_ones(keep, attention, dropout):
    block = functional_block(dropout=dropout, attention=attention)
    x = torch.randn(3, 16, 8)
    plain = block_step(block, lambda block, x: block(x), x)
    same_bits(block_step(block, functools.partial(selective_checkpoint, keep=keep), x), plain)


@pytest.mark.parametrize("keep", EVERYTHING.values(), ids=EVERYTHING)
def test_whatever_is_kept_autocast_is_computed_again_as_it_was(keep):
    block = functional_block()
    x = torch.randn(3, 16, 8)

    def twice(call, block, x):  # the second call finds autocast's cache warm
        with torch.autocast("cpu", torch.bfloat16):
            return call(block, call(block, x)).float()

    plain = block_step(block, functools.partial(twice, lambda block, x: block(x)), x)
    same_bits(block_step(block, functools.partial(twice, functools.partial(selective_checkpoint, keep=keep)), x), plain)


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


# ---- bytes and FLOPs, by closed form


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


@pytest.mark.parametrize("ops", [LINEARS, MATMULS], ids=["linears", "products"])
@pytest.mark.parametrize("attention", ["by hand", "fused"])
def test_never_more_bytes_than_torch_s_selective_checkpoint_and_the_same_gradients(attention, ops):
    step, stream_bytes = measured_gpt(attention)
    overloads = [getattr(op, name) for op in ops for name in op.overloads()]

    def by_torch(block, x):
        contexts = functools.partial(torchs.create_selective_checkpoint_contexts, overloads)
        return torchs.checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    mine, theirs = step(call=functools.partial(selective_checkpoint, keep=ops)), step(call=by_torch)
    same_bits(mine[2], theirs[2])
    assert mine[0] == theirs[0] - 3 * stream_bytes  # torch keeps what `down` gives too
    assert mine[1] < theirs[1]
    assert mine[3] == theirs[3]


def test_keeping_nothing_costs_the_bytes_of_a_checkpoint():
    step, _ = measured_gpt("by hand")
    full, nothing = step(call=checkpoint), step(call=functools.partial(selective_checkpoint, keep=()))
    assert nothing[:2] == full[:2]
    assert nothing[3] == full[3]


# ---- what is written to


def twice_in_place(x, w):
    return (x @ w).mul_(2).sin()  # x has three dimensions: the product's result is seen through _unsafe_view


def relu_in_place(x, w):
    return torch.relu_(F.linear(x, w.T, w[0])).mul(3).sin()


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


WRITES = [twice_in_place, relu_in_place, through_a_view, out_of_detached_data, overwritten_random]


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("keep", EVERYTHING.values(), ids=EVERYTHING)
def test_what_the_function_writes_to_is_made_again(function, keep):
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    mine = gradients(lambda x, w: selective_checkpoint(function, x, w, keep=keep), x, w)
    same_bits(mine, gradients(function, x, w))


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


def test_an_output_that_backward_does_not_need_may_be_written_to():
    def function(x, w):
        return x.sin() @ w

    x, w = torch.randn(3, 4), torch.randn(4, 4)
    mine = gradients(lambda x, w: selective_checkpoint(function, x, w, keep=0).mul_(2), x, w)
    same_bits(mine, gradients(lambda x, w: function(x, w).mul_(2), x, w))


# ---- random ops


def draws(x, w):
    first = torch.bernoulli(torch.full_like(x, 0.5)) * x
    second = F.dropout(first @ w, 0.5)
    return second.sin() * torch.rand_like(x) + torch.randn(x.shape[-1])


RANDOM = {
    "bernoulli": [aten.bernoulli],
    "rand": [aten.rand_like],
    "randn": [aten.randn],
    "both": [aten.bernoulli, aten.rand_like],
    "everything": 0,
}


@pytest.mark.parametrize("keep", RANDOM.values(), ids=RANDOM)
def test_a_kept_random_op_leaves_the_numbers_that_follow_as_they_were(keep):
    x, w = torch.randn(5, 4), torch.randn(4, 4)
    mine = gradients(lambda x, w: selective_checkpoint(draws, x, w, keep=keep), x, w)
    same_bits(mine, gradients(draws, x, w))


def test_without_rng_state_the_generator_is_not_touched_in_backward():
    x = torch.randn(5, 4, requires_grad=True)
    keep = [aten.bernoulli]

    def function(x):
        return (x * torch.bernoulli(torch.full_like(x, 0.5))).sin()

    torch.manual_seed(0)
    result = selective_checkpoint(function, x, keep=keep, preserve_rng_state=False)
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    result.sum().backward()
    assert torch.equal(torch.get_rng_state(), expected)
    torch.manual_seed(0)
    plain = x.detach().requires_grad_()
    function(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


# ---- several results, several backwards, nesting


def several(x):
    values, indices = x.max(-1, keepdim=True)
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    parts = (x * variance).split(2, -1)
    return (x - mean).exp().gather(-1, indices) * values * parts[0].sin() * parts[1].cos(), indices


@pytest.mark.parametrize("keep", EVERYTHING.values(), ids=EVERYTHING)
def test_ops_of_several_results_are_kept_whole(keep):
    x = torch.randn(5, 4)
    same_bits(gradients(lambda x: selective_checkpoint(several, x, keep=keep), x), gradients(several, x))


@pytest.mark.parametrize("keep", EVERYTHING.values(), ids=EVERYTHING)
def test_backward_can_run_again_and_makes_what_was_handed_back_again(keep):
    x = torch.randn(5, 4, requires_grad=True)
    result = selective_checkpoint(lambda x: draws(x, x.T @ x), x, keep=keep).square().sum()
    first, second, third = (torch.autograd.grad(result, x, retain_graph=more)[0] for more in (True, True, False))
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize("keep", EVERYTHING.values(), ids=EVERYTHING)
def test_second_derivatives_have_the_bits_of_the_plain_ones(keep):
    def second(function):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        w = torch.linspace(1, 2, 16).view(4, 4).requires_grad_()
        first = torch.autograd.grad(function(x, w).pow(2).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.pow(2).sum(), (x, w))

    def function(x, w):
        return ((x @ w).sin() @ w).exp()

    same_bits(second(lambda x, w: selective_checkpoint(function, x, w, keep=keep)), second(function))


def test_one_of_two_results_can_go_backward_alone_then_the_other():
    def function(x, w):
        h = x @ w
        return h.sin(), (h @ w).cos()

    x, w = torch.randn(3, 4), torch.randn(4, 4)

    def alone(call):
        inputs = [t.clone().requires_grad_() for t in (x, w)]
        a, b = call(*inputs)
        first = torch.autograd.grad(b.sum(), inputs, retain_graph=True)
        return [*first, *torch.autograd.grad(a.sum(), inputs)]

    same_bits(alone(lambda *args: selective_checkpoint(function, *args, keep=[aten.mm])), alone(function))


NESTS = {
    "a checkpoint inside": lambda f, g: (
        lambda *a: selective_checkpoint(lambda *a: g(checkpoint(f, *a), *a[1:]), *a, keep=MATMULS)
    ),
    "inside a checkpoint": lambda f, g: (
        lambda *a: checkpoint(lambda *a: g(selective_checkpoint(f, *a, keep=MATMULS), *a[1:]), *a)
    ),
    "in itself": lambda f, g: (
        lambda *a: selective_checkpoint(lambda *a: g(selective_checkpoint(f, *a, keep=0), *a[1:]), *a, keep=MATMULS)
    ),
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_nested_in_either_order_the_gradients_are_the_plain_ones(nest):
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4)
    same_bits(
        gradients(nest(draws, twice_in_place), x, w), gradients(lambda x, w: twice_in_place(draws(x, w), w), x, w)
    )


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


def test_hooks_around_the_call_are_given_what_is_kept():
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor.numpy(force=True).copy()

    def function(x, w):
        return (x @ w).sin()

    x, w = torch.randn(3, 4), torch.randn(4, 5)
    plain = gradients(function, x, w)

    def moved(x, w):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            return selective_checkpoint(function, x, w, keep=[aten.mm])

    same_bits(gradients(moved, x, w), plain)
    assert (3, 5) in seen


# ---- nothing stays behind


@pytest.mark.parametrize("backward", [False, True])
def test_no_kept_tensor_outlives_its_graph_and_no_cycle_holds_it(backward):
    kept = []

    def keep(op, *args, **kwargs):
        return op.overloadpacket is aten.mm

    def function(x, w):
        h = x @ w
        kept.append(weakref.ref(h.untyped_storage()))
        return h.sin() @ w

    gc.collect()
    gc.disable()
    try:
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        result = selective_checkpoint(function, x, w, keep=keep)
        assert kept[0]() is not None
        if backward:
            result.sum().backward()
            assert all(storage() is None for storage in kept)
        del result
        assert all(storage() is None for storage in kept)
    finally:
        gc.enable()


def test_a_kept_tensor_is_freed_when_backward_has_used_it():
    freed = []

    def function(x, w):
        early = (x @ w).sin()
        late = early @ w
        if not freed:
            storage = weakref.ref(late.untyped_storage())
            early.register_hook(lambda grad: freed.append(storage() is None))
        return late.cos()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    result = selective_checkpoint(function, x, w, keep=[aten.mm])
    result.sum().backward()
    assert freed == [True]


def test_a_function_that_raises_leaves_no_mode_and_no_hooks():
    def function(x):
        x = x @ x
        raise KeyError("mine")

    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(KeyError, match="mine"):
        selective_checkpoint(function, x, keep=[aten.mm])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with Ops() as ops:
        (x @ x).sum().backward()
    assert ops.names.count("mm") == 3


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


def test_without_gradients_nothing_is_asked_or_kept():
    asked = []
    x = torch.randn(4, 4, requires_grad=True)
    with torch.no_grad():
        result = selective_checkpoint(lambda x: x @ x, x, keep=lambda op, *args, **kwargs: asked.append(op))
    assert not asked
    assert not result.requires_grad


# ---- what keep may be


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


@pytest.mark.parametrize("keep", [None, True, "mm", [torch.mm], math.nan, ["mm"], 1j])
def test_what_is_no_choice_of_ops_is_refused(keep):
    with pytest.raises(TypeError, match="expected keep to be a collection of ops"):
        selective_checkpoint(torch.sin, torch.ones(2, requires_grad=True), keep=keep)


def test_a_kept_op_called_with_other_shapes_the_second_time_is_named():
    sizes = [3, 2]

    def function(x):
        return ((x[: sizes.pop(0)] + 1).sum() * x).sin()

    result = selective_checkpoint(function, torch.randn(3, 4, requires_grad=True), keep=[aten.add])
    with pytest.raises(
        RuntimeError, match=r"call 1 of aten.add.Tensor, shapes \(3, 4\) as in the forward, found \(2, 4\)"
    ):
        result.sum().backward()


def test_a_kept_op_called_once_more_the_second_time_is_named():
    more = [1, 2]

    def function(x):
        for _ in range(more.pop(0)):
            x = x + 1
        return x.sin()

    result = selective_checkpoint(function, torch.randn(3, 4, requires_grad=True), keep=[aten.add])
    with pytest.raises(RuntimeError, match="call 2 of aten.add.Tensor, no such call in the forward, found one"):
        result.sum().backward()


def test_views_casts_and_copies_are_never_kept():
    def function(x):
        return x.t().contiguous().double().view(-1).exp()

    x = torch.randn(64, 32)
    asked = []
    mine = gradients(lambda x: selective_checkpoint(function, x, keep=lambda op, *_, **__: asked.append(op) or True), x)
    same_bits(mine, gradients(function, x))
    assert asked == [aten.exp.default]


# ---- what ops cost


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


# ---- modules


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
    "a class": lambda model: Block,
    "classes": lambda model: (nn.Linear, nn.LayerNorm),
    "modules": lambda model: model.blocks,
    "every other": lambda model: every(model.blocks, 2),
    "a function": lambda model: lambda name, module: name.endswith("attention"),
    "nested": lambda model: (Block, nn.Linear),
    "all": lambda model: nn.Module,
    "one twice": lambda model: [model.blocks[1], model.blocks[1]],
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("keep", [None, LINEARS], ids=["", "selective"])
def test_whichever_modules_are_checkpointed_the_step_is_the_same_and_nothing_is_left(choose, keep):
    model = lively_model()
    plain = model_step(model, *BATCH)
    names, before = list(model.state_dict()), [dict(vars(module)) for module in model.modules()]
    with checkpointed(model, choose(model), keep=keep):
        assert list(model.state_dict()) == names
        same_bits(model_step(model, *BATCH), plain)
    assert [dict(vars(module)) for module in model.modules()] == before
    same_bits(model_step(model, *BATCH), plain)


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
    with checkpointed(model, nn.Linear):
        model(torch.randn(2, 4)).sum().backward()
    assert calls == ["hook"]
    assert model[1].forward is own
    assert "forward" not in vars(model[0])


def test_a_module_that_is_called_twice_by_two_names_is_chosen_once():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    plain = shared.weight.grad
    shared.weight.grad = None
    with checkpointed(model, nn.Linear) as chosen:
        assert chosen == [shared]
        model(x).sum().backward()
    assert torch.equal(shared.weight.grad, plain)


def test_an_error_in_the_block_leaves_nothing_behind():
    model = lively_model()
    with pytest.raises(KeyError), checkpointed(model, Block):
        raise KeyError
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_module_is_not_checkpointed_twice_and_the_first_block_goes_on():
    model = lively_model()
    with checkpointed(model, model.blocks):
        with (
            pytest.raises(RuntimeError, match="not checkpointed, found a Block that is"),
            checkpointed(model, [model.head, model.blocks[1]]),
        ):
            pass
        assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [
            f"blocks.{i}" for i in range(3)
        ]
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("keep", [None, LINEARS], ids=["", "selective"])
def test_backward_may_come_after_the_block_and_evaluation_runs_plainly(choose, keep):
    model = lively_model()
    plain = model_step(model, *BATCH)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with checkpointed(model, choose(model), keep=keep):
        loss = model(*BATCH)
    loss.backward()
    same_bits([loss.detach(), *(p.grad for p in model.parameters()), torch.rand(2)], plain)
    assert all("forward" not in vars(module) for module in model.modules())
    model.eval()
    with torch.no_grad(), checkpointed(model, choose(model), keep=keep):
        found = model(*BATCH)
    assert torch.equal(found, model(*BATCH))


def test_after_the_block_chosen_modules_inside_one_another_are_run_as_often_as_in_it_and_nothing_holds_the_model():
    calls, gradients = [], []

    class Counts(nn.Tanh):
        def forward(self, x):
            calls.append(1)
            return super().forward(x).sin()

    x = torch.randn(2, 4, requires_grad=True)
    for after in (False, True):
        model = nn.Sequential(nn.Sequential(Counts(), nn.Sequential(Counts(), Counts()), nn.Sigmoid()), nn.Tanh())
        with checkpointed(model, nn.Module):
            y = model(x).sum()
            if not after:
                gradients += torch.autograd.grad(y, x)
        if after:
            gradients += torch.autograd.grad(y, x)
        gradients.append(len(calls))
        calls.clear()
    assert torch.equal(gradients[0], torch.autograd.grad(model(x).sum(), x)[0])
    assert torch.equal(gradients[2], gradients[0]) and gradients[1] == gradients[3]
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model)
        with checkpointed(model, nn.Module):
            y = model(x).sum()
        y.backward()
        del model, y
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "which, error, words",
    [
        (lambda model: model.head, TypeError, "a single module goes into a list"),
        (lambda model: 3, TypeError, "expected modules, a class of modules or a function"),
        (lambda model: ["blocks.0"], TypeError, "expected modules, found 'blocks.0'"),
        (lambda model: [nn.Linear(2, 2)], ValueError, "found a Linear that is no part of it"),
        (lambda model: nn.Conv2d, ValueError, "expected at least one module of the GPT to be chosen"),
        (lambda model: [], ValueError, "expected at least one module"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(which, error, words):
    model = lively_model()
    with pytest.raises(error, match=words), checkpointed(model, which(model)):
        pass


def test_every_is_the_first_of_every_k():
    assert every(range(12), 1) == list(range(12))
    assert every(range(12), 3) == [0, 3, 6, 9]
    assert every(range(5), 9) == [0]
    for k in (0, -1):
        with pytest.raises(ValueError, match="expected k >= 1"):
            every([], k)
    for k in (True, 1.5):
        with pytest.raises(TypeError, match="expected k to be an int"):
            every([], k)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_transformers_model_has_the_bytes_and_gradients_of_its_own_checkpointing(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
        model, block = transformers.GPT2LMHeadModel(config), transformers.models.gpt2.modeling_gpt2.GPT2Block
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            use_cache=False,
        )
        model, block = transformers.LlamaForCausalLM(config), transformers.models.llama.modeling_llama.LlamaDecoderLayer
    model.train()
    ids = torch.randint(0, 64, (2, 16))

    def step():
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with Meter(model, inputs=ids) as meter:
            loss = model(ids, labels=ids).loss
            forward = len(meter.timeline)
            loss.backward()
        return (
            [loss.detach(), *(p.grad for p in model.parameters())],
            meter.timeline.bytes_at(forward),
            meter.timeline.peak_bytes,
        )

    step()
    plain = step()
    with checkpointed(model, block):
        mine = step()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    theirs = step()
    same_bits(mine[0], plain[0])
    same_bits(theirs[0], plain[0])
    assert mine[1] <= theirs[1] < plain[1]
    assert mine[2] <= theirs[2]


# ---- selective inside others, and others inside it


class Witness:
    """Dies with what holds it."""


def kept(f, x, w):
    return selective_checkpoint(f, x, w, keep=0)


def by_torch(f, x, w):
    return torchs.checkpoint(f, x, w, use_reentrant=False)


NESTINGS = [*itertools.product((kept, checkpoint, by_torch), repeat=2), (kept, kept, kept), (checkpoint, kept, kept)]


@pytest.mark.parametrize("around", NESTINGS, ids=lambda around: " ".join(one.__name__ for one in around))
def test_nested_in_any_way_gradients_are_bitwise_and_nothing_is_left_to_the_collector(around):
    def sines(x, w):
        return x.sin().exp().tanh()

    x, witness = torch.randn(4, requires_grad=True), Witness()
    expected = torch.autograd.grad(sines(x, None).sum(), x)[0]
    seen, run = weakref.ref(witness), sines
    for one in around:
        run = functools.partial(one, run)
    gc.disable()
    try:
        y = run(x, witness)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
        del y, witness
        assert seen() is None
    finally:
        gc.enable()


def looks_inside(x):
    b = x.sin().exp()
    assert b.grad_fn._saved_result is not None
    return (b * 2).sin().sin()


def differentiates_inside(x):
    (g,) = torch.autograd.grad((x.sin() * x).exp().sum(), x, create_graph=True)
    return (x * g).exp()


@pytest.mark.parametrize("function", [looks_inside, differentiates_inside])
@pytest.mark.parametrize("keep", [0, LINEARS, float("inf")], ids=["all", "linears", "nothing"])
def test_a_function_may_look_at_what_it_saved_and_run_a_backward(function, keep):
    x = torch.randn(5, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    found = torch.autograd.grad(selective_checkpoint(function, x, keep=keep).sum(), x)[0]
    assert torch.equal(found, expected)


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


def test_vmap_and_forward_mode_go_through_a_checkpoint():
    x = torch.randn(3, 4)
    assert torch.equal(torch.vmap(lambda row: checkpoint(torch.sin, row))(x), x.sin())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        out = torch.autograd.forward_ad.unpack_dual(checkpoint(torch.sin, dual))
    assert torch.equal(out.tangent, x.cos())


def test_an_argument_may_be_called_function():
    assert checkpoint(lambda x, function: x * function, torch.ones(2), function=3).tolist() == [3, 3]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_torch_compile_compiles_the_function_at_most_and_nothing_of_what_keeps():
    torch._dynamo.reset()
    model, graphs = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), CompileCounterWithBackend("eager")
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    y = selective_checkpoint(torch.compile(model, backend=graphs), x, keep=LINEARS)
    assert torch.equal(*torch.autograd.grad(y.sum(), x), expected)
    assert graphs.frame_count <= 1  # torch 2.13 compiles none while a dispatch mode is on
