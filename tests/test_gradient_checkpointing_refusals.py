"""What gradient checkpointing refuses: cuts, layers, choices of modules and ops, attention, stages and budgets."""

from functools import partial

import torch
from torch import Tensor, nn

from memlab.gradient_checkpointing import (
    Plan,
    best_segments,
    checkpoint_sequential,
    checkpointed,
    checkpointed_attention,
    every,
    exponent,
    measure_chain,
    plan_segments,
    segment_bounds,
    segmented_bytes,
    selective_checkpoint,
)
from tests.harness import refusals, refused

X = torch.ones(2, 4, requires_grad=True)
cuts = partial(partial, segment_bounds, 10)

SEGMENTS = {
    "no segment": (cuts(0), ValueError, "segments of at least 1, found 0"),
    "more segments than layers": (
        cuts(11),
        ValueError,
        "at most as many segments as layers (10), found 11; pick 1 to 10",
    ),
    "half a segment": (cuts(2.5), TypeError, "segments as an int, found 2.5"),
    "another word": (cuts("root"), ValueError, "'sqrt' or a list of cuts; found 'root'"),
    "the same cut twice": (cuts([3, 3]), ValueError, "cuts that rise, found 3 after 3"),
    "a cut before the first layer": (cuts([0, 3]), ValueError, "between 1 and 9, found 0"),
    "a cut behind the last layer": (cuts([3, 10]), ValueError, "between 1 and 9, found 10"),
    "a float for a cut": (cuts([2, 3.5]), TypeError, "cuts as ints, found 3.5 at position 1"),
    "no layers": (partial(segment_bounds, 0, 1), ValueError, "expected layers of at least 1, found 0"),
    "one module": (
        partial(checkpoint_sequential, nn.Linear(2, 2), 1, X),
        TypeError,
        "found Linear; one module alone is checkpoint",
    ),
    "a number for a layer": (
        partial(checkpoint_sequential, [torch.sin, 3], 1, X),
        TypeError,
        "found int at position 1",
    ),
    "saved_bytes": (partial(segmented_bytes, 5, 2, 0, 1), ValueError, "saved_bytes of at least 1"),
    "input_bytes": (partial(best_segments, 5, 1, 0), ValueError, "input_bytes of at least 1"),
    "a larger input": (partial(segmented_bytes, 5, 2, 3, 4), ValueError, "at least input_bytes (4); found 3"),
    "one point": (partial(exponent, [1], [1]), ValueError, "expected a y for each x and two different x"),
    "a missing y": (partial(exponent, [1, 2], [1]), ValueError, "found 2 x and 1 y"),
    "x of 0": (partial(exponent, [0, 1], [1, 1]), ValueError, "expected numbers above 0…found 0"),
}


@refusals(SEGMENTS)
def test_segments_that_cannot_be_are_refused_with_a_reason(call, error, words):
    refused(call, error, words)


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def keeping(keep):
    return lambda: selective_checkpoint(torch.sin, X, keep=keep)


def choosing(which, model=MODEL):
    return lambda: checkpointed(model, which).__enter__()


CHOICES = {
    "keep nothing": (keeping(None), TypeError, "expected keep to be a collection of ops…found None"),
    "keep names": (keeping(["mm"]), TypeError, "expected keep to be a collection of ops"),
    "keep no op": (keeping([torch.mm]), TypeError, "expected keep to be a collection of ops"),
    "no model": (choosing(nn.Linear, [MODEL]), TypeError, "expected a model (torch.nn.Module), found list"),
    "one module": (choosing(MODEL[0]), TypeError, "expected a list of modules to choose, found Linear"),
    "a class": (choosing(nn.Linear), TypeError, "expected a list of modules to choose, found type"),
    "a name of a module": (choosing(["0"]), TypeError, "expected modules, found '0'"),
    "a stranger": (choosing([nn.Linear(2, 2)]), ValueError, "found a Linear that is no part of it"),
    "none": (choosing([]), ValueError, "expected at least one module of the Sequential to be chosen"),
    "one inside another": (
        choosing([MODEL, MODEL[0]]),
        ValueError,
        "found a Linear inside another; choose",
    ),
    "every 0th": (partial(every, [], 0), ValueError, "expected k >= 1"),
    "every half": (partial(every, [], 1.5), TypeError, "expected k to be an int, found 1.5"),
}


@refusals(CHOICES)
def test_a_choice_that_cannot_be_meant_is_refused(call, error, words):
    refused(call, error, words)
    assert not any("forward" in vars(module) for module in MODEL.modules())


Q = torch.zeros(2, 3, 5, 4)


def attention(q=Q, k=Q, v=Q, **options):
    return lambda: checkpointed_attention(q, k, v, **options)


ATTENTION = {
    "no batch": (attention(Q[0]), ValueError, "expected q, k and v of shape (batch, heads, tokens"),
    "another head_dim": (attention(k=Q[..., :3]), ValueError, "the same head_dim"),
    "fewer keys than values": (attention(k=Q[:, :, :3]), ValueError, "a value for every key"),
    "two for three": (attention(k=Q[:, :2], v=Q[:, :2]), ValueError, "2 key-value heads cannot serve 3 heads"),
    "another dtype": (attention(k=Q.double()), TypeError, "of one dtype"),
    "no tile": (attention(tile_queries=0), ValueError, "tile_queries"),
    "a tensor to scale by": (attention(scale=torch.ones(())), TypeError, "found a tensor, which would get no gradient"),
}


@refusals(ATTENTION)
def test_attention_refuses_what_tiled_attention_does_and_a_tensor_for_a_scale(call, error, words):
    refused(call, error, words)


class KeepsAnAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.kept = x.exp()
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * ctx.kept


class OfDetached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def stage(one):
    return partial(measure_chain, [nn.Linear(4, 4), one, nn.Tanh()], torch.randn(2, 4))


def budget(nbytes):
    return lambda: plan_segments(measure_chain([nn.Linear(4, 4)], X.detach()), nbytes)


def steps(*numbers):
    return lambda: Plan(measure_chain([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], X.detach()), numbers)


CHAINS = {
    "a stage of None": (stage(Of(lambda x: None)), ValueError, "expected stage 1 to return one tensor, found None"),
    "a stage of two": (
        stage(Of(lambda x: (x, x))),
        ValueError,
        "stage 1 to return one tensor, found 2 values in a tuple",
    ),
    "in place": (
        stage(nn.ReLU(inplace=True)),
        ValueError,
        "found stage 1 writing into it…make it one stage with stage 0",
    ),
    "an attribute": (
        stage(Of(KeepsAnAttribute.apply)),
        ValueError,
        "expected stage 1 to keep for backward only what autograd saves",
    ),
    "nothing to learn": (stage(Of(lambda x: x.detach() * 1)), ValueError, "found one with nothing to learn"),
    "a stage that detaches": (stage(OfDetached(4, 4)), ValueError, "stage 1 to send stage 0 a gradient, found none"),
    "no stages": (partial(measure_chain, [], X), ValueError, "at least one stage"),
    "a number for a stage": (partial(measure_chain, [MODEL[0], 3], X), TypeError, "stage 1 as an nn.Module, found int"),
    "a function for a stage": (partial(measure_chain, [MODEL[0], torch.sin], X), TypeError, "nn.Module, found builtin"),
    "a view": (stage(nn.Flatten(0)), ValueError, "found that stage 1 returns its input or a view of it…with stage 0"),
    "nothing saved": (stage(Of(lambda x: x + 1)), ValueError, "found that stage 1 saves nothing"),
    "a weight shared": (
        partial(measure_chain, [MODEL[0]] * 2, X),
        ValueError,
        "found one of shape (4, 4) in stages 0 and 1",
    ),
    "no tensor": (partial(measure_chain, [MODEL[0]], 3), TypeError, "expected x as a tensor, found int"),
    "a budget without a unit": (budget("16 apples"), ValueError, "expected a size"),
    "a stage too few": (steps(0, 1), ValueError, "expected steps through stages 0 to 2 in order, found [0, 1]"),
}


@refusals(CHAINS)
def test_what_cannot_be_planned_is_refused(call, error, words):
    refused(call, error, words)
