"""What gradient accumulation refuses: micro-batches, counts, losses, rows and searches that cannot be meant."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from memlab.book.workloads import PackedGPT
from memlab.gradient_accumulation import (
    accumulate,
    deferred_batch_norm,
    examples,
    find_batch_size,
    groups,
    labels,
    pack,
    pack_rows,
    pad_rows,
    token_batches,
)
from tests.harness import refusals, refused

X, Y, IGNORED = torch.zeros(2, 2), torch.tensor([1, 2]), torch.full((2,), -100)
W = torch.ones(2, requires_grad=True)
TEXTS = [torch.arange(length) for length in (5, 6, 4)]


def accumulated(micro_batches=(X, X), loss=lambda batch: (W * batch).sum(), **options):
    return lambda: accumulate(loss, micro_batches, **options)


def counted(count, **options):
    return accumulated(count=lambda batch: count, **options)


def counted_labels(*ys, mean=False):
    loss = (lambda batch: W.square().mean()) if mean else (lambda batch: W.square().sum())
    return accumulated([(X, y) for y in ys], loss, count=labels, reduction="mean" if mean else "sum")


ACCUMULATE = {
    "no micro-batch": (accumulated([]), ValueError, "at least one micro-batch, found none"),
    "a tensor in place of a list": (accumulated(X), TypeError, "expected micro-batches, in a list; found one Tensor"),
    "a group without a label": (
        counted_labels(IGNORED, IGNORED),
        ValueError,
        "found 2 micro-batches with 0 examples or labels",
    ),
    "a mean of nothing": (
        counted_labels(Y, IGNORED, mean=True),
        ValueError,
        "found one with 0 examples or labels; return sums",
    ),
    "a count below 0": (
        counted(-1),
        ValueError,
        "expected a micro-batch's count to be at least 0 and finite, found -1",
    ),
    "an infinite count": (counted(math.inf), ValueError, "count to be at least 0 and finite, found inf"),
    "no count": (counted(None), TypeError, "expected a micro-batch's count as a number, found NoneType"),
    "a bool for a count": (counted(torch.tensor(True)), TypeError, "count as a number, found bool"),
    "several counts": (counted(torch.ones(2)), ValueError, "count to be one number, found a tensor of shape (2,)"),
    "several counts agreed on": (accumulated(agree=lambda whole: torch.ones(2)), ValueError, "count to be one number"),
    "no examples": (
        lambda: examples(("text", torch.tensor(1))),
        ValueError,
        "with a tensor of (examples, …), found tuple",
    ),
    "a model without no_sync": (
        accumulated(model=nn.Linear(2, 2)),
        TypeError,
        "expected model to have no_sync()…found Linear",
    ),
    "another reduction": (accumulated(reduction="none"), ValueError, "expected reduction to be one of 'sum', 'mean'"),
    "a group of none": (lambda: groups([], 0), ValueError, "expected size of at least 1, found 0"),
    "a loss of several": (accumulated(loss=lambda batch: W * 1), TypeError, "a scalar tensor…shape (2,)"),
    "a loss to learn nothing from": (accumulated(loss=lambda batch: X.sum()), TypeError, "a scalar…without a gradient"),
    "a mean for a sum": (
        accumulated(loss=lambda batch: (W * batch).mean()),
        ValueError,
        "expected a loss that is summed, found a mean",
    ),
    "a sum for a mean": (accumulated(reduction="mean"), ValueError, "expected a mean loss, found a sum"),
    "tokens alone": (lambda: labels(Y), TypeError, "found a Tensor without;…count=lambda batch"),
    "labels in a list": (lambda: labels((X, [1, 2])), TypeError, "found list there"),
    "a dict without labels": (lambda: labels({"y": X}), TypeError, "found a dict without"),
    "labels of floats": (lambda: labels((X, X)), TypeError, "found torch.float32"),
}


@refusals(ACCUMULATE)
def test_what_cannot_be_accumulated_is_refused_before_any_backward(call, error, words):
    refused(call, error, words)
    assert W.grad is None or words == "found one with 0 examples or labels; return sums"
    W.grad = None


LENGTHS = {
    "no lengths": ([], ValueError, "at least one example, found none"),
    "an empty example": ([3, 0], ValueError, "at least 1, found 0 in example 1; drop what is empty"),
    "a float": ([3, 2.0], TypeError, "the length of example 1 as an int, found 2.0"),
    "a bool": ([3, True], TypeError, "the length of example 1 as an int, found True"),
}


@pytest.mark.parametrize("function", [token_batches, pack])
@pytest.mark.parametrize("lengths, error, words", LENGTHS.values(), ids=LENGTHS)
def test_lengths_that_no_example_has_are_refused(function, lengths, error, words):
    refused(lambda: function(lengths, 10), error, words)


@pytest.mark.parametrize("function, limit", [(token_batches, "max_tokens"), (pack, "row_tokens")])
def test_limits_and_seeds_that_cannot_be_meant_are_refused(function, limit):
    refused(lambda: function([3], 0), ValueError, f"expected {limit} of at least 1, found 0")
    refused(lambda: function([3], None), TypeError, f"expected {limit} as an int, found None")
    long = f"expected examples of at most 1,000 tokens ({limit}), found 1,200 in example 1; raise {limit} to 1,200, or"
    refused(lambda: function([5, 1200, 1000], 1000), ValueError, long)
    several = "found 1,300 in example 2, the longest of 2 that are over; raise"
    refused(lambda: function([5, 1200, 1300, 1000], 1000), ValueError, several)
    refused(lambda: function([3], 8, seed=None), TypeError, "expected seed as an int…found None")
    refused(lambda: function([3], 8, seed=True), TypeError, "expected seed as an int…found True")
    refused(lambda: function([3], 8, seed=-1), ValueError, "expected a seed of at least 0, found -1…the same as 1")


def packed(examples=TEXTS, rows=((0,),), row_tokens=10):
    return lambda: pack_rows(examples, rows, row_tokens)


def run_packed(tokens, **options):
    model, rows = PackedGPT(layers=1, width=8, heads=1, context=8, vocabulary=8), pack_rows(TEXTS, [[0]], tokens)
    return lambda: model(rows.x, rows.y, **{name: getattr(rows, name) for name in options})


BATCHES = {
    "window": (lambda: token_batches([3], 10, window=0), ValueError, "expected window of at least 1, found 0"),
    "a full row": (
        packed(rows=[[0], [0, 1, 2]]),
        ValueError,
        "at most 10 tokens (row_tokens), found 15 in row 1; make rows…pack()",
    ),
    "floats": (
        packed([TEXTS[0], torch.zeros(5)], [[0, 1]]),
        TypeError,
        "torch.int64, found torch.float32 in example 1",
    ),
    "lists": (lambda: pad_rows([TEXTS[0], [1]]), TypeError, "torch.int64, found a list, no tensor, in example 1"),
    "rows for examples": (packed([TEXTS[0][None]]), ValueError, "of shape (tokens,), found (1, 5) in example 0"),
    "an empty example": (lambda: pad_rows([TEXTS[0][:0]]), ValueError, "of shape (tokens,), found (0,) in example 0"),
    "no example": (packed([], []), ValueError, "at least one example, found none"),
    "row_tokens": (packed(row_tokens=5.0), TypeError, "expected row_tokens as an int"),
    "an index of none": (packed(rows=[[0], [3]]), IndexError, "from 0 to 2 in rows, found 3 in row 1"),
    "documents alone": (run_packed(8, documents=0), ValueError, "expected documents and positions together"),
    "a long row": (run_packed(9, documents=0, positions=0), ValueError, "expected at most 8 tokens"),
}


@refusals(BATCHES)
def test_what_cannot_be_batched_or_packed_is_refused(call, error, words):
    refused(call, error, words)


def step(n):
    torch.empty(2048 * n, dtype=torch.uint8)


SEARCHES = {
    "no function": (partial(find_batch_size, 3, 100), TypeError, "expected step as a function…found int"),
    "no model": (partial(find_batch_size, step, 100, model=step), TypeError, "expected a model"),
    "no optimizer": (partial(find_batch_size, step, 100, optimizer=step), TypeError, "expected an optimizer"),
    "too small a budget": (
        partial(find_batch_size, step, "1 KiB"),
        ValueError,
        "expected a step of batch size 1 to fit 1.0 KiB, found that it takes 2.0 KiB; raise the budget",
    ),
}


@refusals(SEARCHES)
def test_what_cannot_be_searched_with_is_refused(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize("model", [None, [nn.BatchNorm1d(2)], nn.BatchNorm1d])
def test_what_is_no_model_has_no_batch_norm_to_defer(model):
    refused(deferred_batch_norm(model).__enter__, TypeError, "expected a model")
