"""Watching changes nothing: gradients keep every bit, and nobody's tensor is written to."""

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from memlab.memory_timeline import Meter
from tests.memory_timeline_helpers import (
    Idle,
    Run,
    allocations,
    blocks,
    event_tree,
    events_of,
    one_thread,  # noqa: F401
    peak,
)
from tests.tiers import some
from tests.torch_ops import differentiable_ops_of_torch

WEIGHTS = torch.arange(5, dtype=torch.float64)


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()


def kept_by(register):
    def run():
        x, kept = leaf(), []
        y = x * 2
        b, a = y.sin(), y + 0.0  # `a` passes its gradient on, so the engine adds to the very tensor that was kept
        register(a, kept)
        (b.sum() + (a * WEIGHTS).sum()).backward()
        kept = [torch.as_tensor(one if torch.is_tensor(one) else one.tolist()) for one in kept if one is not None]
        return [x.grad, *kept]

    return run


def kept_by_a_hook(keep):
    return kept_by(lambda a, kept: a.register_hook(lambda gradient: kept.append(keep(gradient))))


class OwnBuffer(torch.autograd.Function):
    """Its backward returns a tensor that it keeps for the next time."""

    @staticmethod
    def forward(ctx, x):
        ctx.buffer = torch.ones(5, dtype=torch.float64)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.buffer


def kept_by_a_function(function_last: bool):
    def run():
        x = leaf()
        y = x * 2
        first, second = (torch.cos, OwnBuffer.apply) if function_last else (OwnBuffer.apply, torch.cos)
        a, b = first(y), second(y)
        total = (a + b).sum()
        total.backward(retain_graph=True)
        total.backward()
        return [x.grad, (b if function_last else a).grad_fn.buffer]

    return run


class Twice(torch.autograd.Function):
    """a + b, whose backward returns one tensor for two inputs and keeps it as well."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, gradient):
        Twice.kept = gradient
        return gradient, gradient


def returned_twice_by_a_function():
    x = leaf()
    y = x * 2
    (Twice.apply(y, y) + Twice.apply(y.sin(), y)).sum().backward()
    return [x.grad, Twice.kept]


def given_by_the_user():
    x = leaf()
    y = x * 1
    given = [torch.ones(5, dtype=torch.float64) for _ in range(2)]
    torch.autograd.backward([y, y.view(5), y + 0], [given[0], given[1], given[1]])
    z = x * 3
    torch.autograd.backward([z, z, z + 1], [given[0], given[0], given[1]])
    return [x.grad, *given]


def with_a_tangent():
    x = leaf()
    with torch.autograd.forward_ad.dual_level():
        y = torch.autograd.forward_ad.make_dual(x, WEIGHTS) * 2
        (y.sin() + y.cos() + y.exp()).sum().backward()
    return [x.grad]


def of_a_sparse_weight():
    weight = torch.ones(4, 3, requires_grad=True)
    first, second = (F.embedding(torch.tensor(rows), weight, sparse=True) for rows in ([0, 2], [2, 3]))
    (first.sin() * second).sum().backward()
    return [weight.grad.to_dense()]


HELD = {
    "the tensor, by a hook": kept_by_a_hook(lambda gradient: gradient),
    "its storage, by a hook": kept_by_a_hook(lambda gradient: gradient.untyped_storage()),
    "an alias, by a hook": kept_by_a_hook(lambda gradient: gradient.detach()),
    "NumPy's view, by a hook": kept_by_a_hook(lambda gradient: gradient.numpy()),
    "by a node's pre-hook": kept_by(lambda a, kept: a.grad_fn.register_prehook(lambda outputs: kept.extend(outputs))),
    "by a node's hook": kept_by(lambda a, kept: a.grad_fn.register_hook(lambda _, outputs: kept.extend(outputs))),
    "by a Function that runs last": kept_by_a_function(True),
    "by a Function that runs first": kept_by_a_function(False),
    "returned twice": returned_twice_by_a_function,
    "given by the user": given_by_the_user,
    "with a tangent": with_a_tangent,
    "sparse": of_a_sparse_weight,
}


@pytest.mark.parametrize("held", HELD)
def test_a_gradient_that_somebody_holds_is_the_same_with_and_without_the_meter(held):
    expected = HELD[held]()
    with Meter():
        found = HELD[held]()
    assert len(expected) == len(found)
    assert all(map(torch.equal, found, expected))


def test_a_gradient_that_nobody_holds_is_added_to_in_place_as_the_engine_does():
    def joined():
        x = torch.ones(1000, requires_grad=True)
        y = x * 2
        total = y.sin().sum() + y.cos().sum() + y.tanh().sum() + y.exp().sum()
        total.backward()

    joined()
    with Meter(workspace=True) as meter:
        joined()
    adds = [op.name for op in meter._history.ops if op.phase == "backward" and op.name.startswith("add")]
    assert adds == ["add_"] * 3
    assert peak(events_of(meter.timeline)) - peak(blocks(allocations(event_tree(joined)))) in range(-64, 65)


def backward_sums(f) -> list[str]:
    x = torch.ones(100, requires_grad=True)
    with Meter() as meter:
        f(x * 2).backward()
    return [op.name for op in meter._history.ops if op.phase == "backward" and op.name in ("add", "add_")]


def test_a_sum_inside_a_nodes_own_formula_or_of_what_the_node_has_read_is_left_as_it_is():
    # The gradient of atan2 divides by x² + y²: a sum of two tensors that the same node made and that nobody else holds.
    assert backward_sums(lambda x: torch.atan2(x, torch.ones(100)).sum()) == ["add"]
    # The engine would add in place here too. But a formula could look the same, and could read that operand again.
    assert backward_sums(lambda x: (x + x.relu()).sin().sum()) == ["add"]
    assert backward_sums(lambda x: (x + x.relu().exp()).sin().sum()) == ["add_"]


def scalar(tensors):
    """A number that depends on every element of every tensor, each with its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        total = total + (real * torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).reshape(real.shape)).sum()
    return total


def differentiable(outputs):
    return [
        t
        for t in tree_flatten(outputs)[0]
        if isinstance(t, torch.Tensor) and t.requires_grad and t.layout is torch.strided
    ]


def read_twice(f, xs):
    return scalar([y * 2 + y.sin() for y in f(xs)])


def residual(f, xs):
    xs = [x * 1 for x in xs]
    ys = f(xs)
    return scalar([x + y for y in ys for x in xs if y.shape == x.shape and y.dtype == x.dtype] + [y.cos() for y in ys])


def one_input_for_all(f, xs):
    shared = xs[0] * 1
    return scalar(f([shared if x.shape == shared.shape and x.dtype == shared.dtype else x for x in xs]))


def second_derivative(f, xs):
    first = torch.autograd.grad(scalar([y.sin() for y in f(xs)]), xs, create_graph=True, allow_unused=True)
    return scalar([g.sin() for g in first if g is not None and g.requires_grad])


GRAPHS = (read_twice, residual, one_input_for_all, second_derivative)

# torch itself computes these by another formula while any mode is on, because it cannot look at values then.
REFORMULATED = {
    "prod",
    "cumprod",
    "masked.prod",
    "masked.cumprod",
    "linalg.vander",
    "linalg.eig",
    "linalg.det",  # its second derivative, in torch 2.11
    "masked_fill",  # with a tensor as the value
    "max",  # of all elements
}


def gradients(graph, op, sample):
    """The graph's value and the gradients of the sample's tensors; None where the op has no such graph."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, one in enumerate(flat) if isinstance(one, torch.Tensor) and one.requires_grad]
    xs = [flat[i].detach().clone().requires_grad_() for i in places]

    if not xs:
        return None

    def f(tensors):
        arguments = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            arguments[place] = tensor
        first, args, kwargs = tree_unflatten(arguments, spec)
        return differentiable(op.get_op()(first, *args, **kwargs))

    torch.manual_seed(0)
    value = graph(f, xs)
    if not value.requires_grad:
        return None
    value.backward()
    return [value.detach(), *(x.grad for x in xs)]


def same_bits(a, b):
    return all((x is None and y is None) or torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def bits(tensor):
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg()
    return torch.empty(dense.numel(), dtype=dense.dtype).copy_(dense.reshape(-1)).view(torch.uint8)


def graphs_of(op):
    """Every graph with every sample of an op, as a function that gives its gradients, and its name."""
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), 2):
        for graph in GRAPHS:
            if graph is not second_derivative or op.supports_gradgrad:
                yield functools.partial(gradients, graph, op, sample), f"{op.name} {graph.__name__}"


@pytest.mark.filterwarnings("ignore")
@some("part", range(10), keep=1)
def test_gradients_of_torchs_own_list_of_ops_keep_every_bit_under_the_meter(part):
    compared, changed = 0, []
    for op in differentiable_ops_of_torch()[part::10]:
        for run, name in graphs_of(op):
            try:
                expected = run()
            except (RuntimeError, ValueError):  # no such graph: its output cannot be read twice, or its input negative
                continue
            if expected is None:
                continue
            with Meter():
                found = run()
            if op.name in REFORMULATED and not same_bits(found, expected):
                with Idle():
                    expected = run()
            compared += 1
            if not same_bits(found, expected):
                changed.append(name)
    assert changed == []
    assert compared > 200


def test_no_tensor_is_kept_alive_by_the_meter():
    run = Run("MLP")
    meter = Meter(run.model, run.optimizer, run.inputs)
    with meter:
        inside = torch.ones(100)
        watched = weakref.ref(inside), weakref.ref(inside.untyped_storage())
        del inside
        assert [ref() for ref in watched] == [None, None]
        run.step()
    watched = [weakref.ref(one) for one in (run.model, *run.model.parameters(), *run.inputs, run.optimizer)]
    storages = [weakref.ref(p.untyped_storage()) for p in run.model.parameters()]
    del run
    gc.collect()
    assert [ref() for ref in (*watched, *storages)] == [None] * (len(watched) + len(storages))


def sparse_embedding():
    embedding, rows = nn.Embedding(1000, 100, sparse=True), torch.arange(1000)
    embedding(rows).backward(torch.ones(1000, 100))


def scattered(read):
    return lambda: read(torch.ones(100, 1000, requires_grad=True)).sum().backward()


TWICE = {  # zeros into which a gradient is scattered are there twice, and a sparse one is copied to its parameter
    "indexing": (scattered(lambda x: x[torch.zeros(1, dtype=torch.int64)]), 400_000),
    "a sparse gradient": (sparse_embedding, 1000 * 100 * 4 + 1000 * 8),
}


@pytest.mark.parametrize("case", TWICE)
def test_a_gradient_that_is_scattered_or_sparse_takes_more_while_any_mode_is_on(case):
    backward, more = TWICE[case]

    def idle():
        with Idle():
            backward()

    backward()
    with Meter(workspace=True) as meter:
        backward()
    unwatched = peak(blocks(allocations(event_tree(backward))))
    watched = peak(blocks(allocations(event_tree(idle))))
    assert watched - unwatched == pytest.approx(more, abs=64)
    assert peak(events_of(meter.timeline)) == pytest.approx(watched, abs=64)
