"""Segments: where a chain of layers is cut, what that costs in forwards, and what it holds, to the byte."""

import itertools
import math
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from memlab.book.workloads import GPT, Block, GPTConfig
from memlab.gradient_checkpointing import (
    best_segments,
    checkpoint_sequential,
    exponent,
    segment_bounds,
    segmented_bytes,
)
from memlab.memory_timeline import Meter, Timeline
from tests.tiers import some

few = settings(max_examples=40, deadline=None, derandomize=True)


@few
@given(st.integers(1, 300), st.data())
def test_a_number_of_segments_gives_sizes_that_differ_by_one_at_most_the_larger_first(layers, data):
    segments = data.draw(st.integers(1, layers))
    bounds = segment_bounds(layers, segments)
    sizes = [stop - start for start, stop in bounds]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(layers))
    assert len(bounds) == segments and sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


@few
@given(st.integers(1, 10**6))
def test_sqrt_is_the_whole_number_nearest_to_the_root(layers):
    found = len(segment_bounds(layers, "sqrt"))
    assert all(abs(found - math.sqrt(layers)) <= abs(other - math.sqrt(layers)) for other in (found - 1, found + 1))
    assert found >= 1


def test_cuts_are_the_first_layers_of_segments():
    assert segment_bounds(10, [3, 6, 8]) == segment_bounds(10, 4) == segment_bounds(10, torch.tensor([3, 6, 8]))
    assert segment_bounds(10, ()) == segment_bounds(10, 1) == [(0, 10)]
    assert segment_bounds(5, iter(range(1, 5))) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def calls_of(function, layers: int, **options) -> list[int]:
    """Which layer runs when, in a forward and a backward of a chain."""
    calls = []

    def layer(number, x):
        calls.append(number)
        return x.sin()

    function(
        [partial(layer, i) for i in range(layers)], 4, torch.ones(2, requires_grad=True), **options
    ).sum().backward()
    return calls


def test_backward_runs_each_segment_again_the_last_one_first():
    again = [8, 9, 6, 7, 3, 4, 5, 0, 1, 2]
    assert calls_of(checkpoint_sequential, 10) == [*range(10), *again]


CUTS = [1, 2, 5, 7, "sqrt", [3], [1, 2, 6]]


def chain(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(GPTConfig(width=16, heads=2, dropout=dropout)) for _ in range(7)))


def learned(run, layers: nn.Module) -> list[torch.Tensor]:
    """Output and all gradients."""
    torch.manual_seed(1)
    x = torch.randn(2, 5, 16, requires_grad=True)
    y = run(layers, x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in layers.parameters())]


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().view(torch.int32) for t in tensors]


@some("segments, dropout", itertools.product(CUTS, [0.0, 0.3]), keep=7)
def test_values_and_gradients_are_bitwise_those_of_the_plain_chain(segments, dropout):
    plain = learned(lambda layers, x: layers(x), chain(dropout))
    found = learned(lambda layers, x: checkpoint_sequential(layers, segments, x), chain(dropout))
    assert all(map(torch.equal, bits(plain), bits(found)))


FORMS = [iter, nn.ModuleList, tuple, lambda layers: [layer.forward for layer in layers]]


@pytest.mark.parametrize("form", FORMS)
def test_layers_may_be_a_sequential_a_module_list_or_functions(form):
    plain = learned(lambda layers, x: layers(x), chain())
    found = learned(lambda layers, x: checkpoint_sequential(form(layers), 3, x), chain())
    assert all(map(torch.equal, bits(plain), bits(found)))


layer_bytes = st.integers(1, 40).flatmap(lambda saved: st.tuples(st.just(saved), st.integers(1, saved)))


def played(layers: int, cuts, saved: int, given: int) -> int:
    """The fullest instant of a step on bare numbers: inputs are kept, and segments are taped and let go."""
    edges, held, fullest = [0, *cuts, layers], 0, 0
    for _ in edges[:-1]:
        held += given
    for start, stop in reversed(list(zip(edges, edges[1:], strict=False))):
        held -= given  # it is the first layer's input, on the tape
        fullest = max(fullest, held + (stop - start) * saved)
    return fullest


@few
@given(st.integers(1, 60), layer_bytes, st.data())
def test_segmented_bytes_are_those_of_a_step_played_on_numbers_and_no_cuts_hold_less_than_the_root(
    layers, nbytes, data
):
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    saved, given = nbytes
    found = segmented_bytes(layers, cuts, *nbytes)
    assert found == played(layers, cuts, *nbytes)
    assert found >= math.sqrt(2 * layers * saved * given) - given / 2 - 1e-9


@few
@given(st.integers(1, 60), layer_bytes)
def test_the_best_number_of_segments_holds_the_least_and_is_the_lowest_that_does(layers, nbytes):
    bounds = ([start for start, _ in segment_bounds(layers, k)][1:] for k in range(1, layers + 1))
    of = [played(layers, cuts, *nbytes) for cuts in bounds]
    best, (saved, given) = best_segments(layers, *nbytes), nbytes
    assert best == 1 + of.index(min(of))
    assert best == layers or layers > saved // given
    k = math.ceil(min(layers, max(1, math.sqrt(layers * saved / given))))
    assert min(of) <= (k - 1) * given + math.ceil(layers / k) * saved  # the root, rounded up


def test_the_exponent_is_that_of_a_power_law_and_otherwise_the_least_squares_slope():
    assert exponent([1, 2, 5, 9], [7 * x**-1.5 for x in (1, 2, 5, 9)]) == pytest.approx(-1.5, abs=1e-12)
    xs, ys = [4, 9, 16, 64, 100], [5, 20, 21, 90, 80]
    table = torch.tensor([[math.log(x), 1.0] for x in xs], dtype=torch.float64)
    slope = torch.linalg.lstsq(table, torch.tensor(ys, dtype=torch.float64).log()[:, None]).solution[0].item()
    assert exponent(xs, ys) == pytest.approx(slope, abs=1e-12)


BATCH, TOKENS, WIDTH, VOCABULARY = 2, 32, 32, 256
INPUT = BATCH * TOKENS * WIDTH * 4
SAVED = 16 * INPUT + 4 * BATCH * TOKENS * 4 + BATCH * 4 * TOKENS * 4
"""A block's own activations, FP32: 16 of the stream's size, statistics of two norms, log Σ exp of 4 heads' scores."""
OUTSIDE = TOKENS * 8 + 4
"""What there is besides at that moment: the positions, which the embedding saves, and the loss."""


@cache
def metered(layers: int, segments, vocabulary: int = VOCABULARY) -> Timeline:
    """The second micro-batch of a GPT, whose gradients are there already. segments None: nothing is checkpointed."""
    config = GPTConfig(layers=layers, width=WIDTH, heads=4, context=TOKENS, vocabulary=vocabulary)
    model = GPT(config)
    x, y = torch.randint(vocabulary, (2, BATCH, TOKENS)).unbind()

    def loss_of():
        stream = model.dropout(model.token_embedding(x) + model.position_embedding(torch.arange(TOKENS)))
        if segments is None:
            for block in model.blocks:
                stream = block(stream)
        else:
            stream = checkpoint_sequential(model.blocks, segments, stream)
        return F.cross_entropy(model.head(model.norm(stream)).flatten(0, 1), y.flatten())

    loss_of().backward()
    with Meter(model, inputs=(x, y)) as meter:
        loss = loss_of()
        loss.backward()
    return meter.timeline


def activations(*case) -> int:
    """The most bytes of activations at one time. Storages, on a CPU."""
    return max(metered(*case).curves["activation"])


def test_a_block_saves_what_its_formula_says():
    assert activations(3, None) - activations(2, None) == SAVED


def said(layers: int, segments) -> int:
    return segmented_bytes(layers, segments, SAVED, INPUT) + OUTSIDE


@some("segments", [1, *range(2, 16), (2, 3), "sqrt", (9, 14), 16], keep=7)
def test_sixteen_blocks_hold_what_the_formula_says_to_the_byte(segments):
    assert activations(16, segments) == said(16, segments)


@some("layers", [1, 36, 9, 25, 2, 64, 4, 16], keep=3)
def test_chains_of_any_depth_hold_what_the_formula_says_to_the_byte(layers):
    for segments in {layers, "sqrt", best_segments(layers, SAVED, INPUT)}:
        assert activations(layers, segments) == said(layers, segments)


DEPTHS = (4, 9, 16, 25, 36, 49, 64)


def fitted(depths, segments_of) -> float:
    return exponent(depths, [said(layers, segments_of(layers)) for layers in depths])


def test_activations_grow_as_the_depth_without_and_as_its_root_with_sqrt_segments():
    assert activations(3, None) - activations(2, None) == activations(2, None) - activations(1, None)
    assert fitted(DEPTHS, lambda layers: "sqrt") == pytest.approx(0.5, abs=0.01)
