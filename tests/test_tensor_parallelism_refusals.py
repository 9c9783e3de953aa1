"""What chapter 14's library refuses, and the words that say what would do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from memlab import tensor_parallelism as tp
from memlab.book.steps import metered_step
from memlab.book.workloads import MLP
from memlab.memory_arithmetic import Transformer
from memlab.ranks import imagined_ranks
from tests.harness import refusals, refused

SHAPE = Transformer(layers=2, width=64, heads=8, vocabulary=32, context=48, hidden=160)
WHOLE, PART, TOKENS = torch.zeros(8, 16), torch.zeros(8, 4), torch.zeros(3, 6, dtype=torch.int64)


def column(**options) -> tp.ColumnParallelLinear:
    return tp.ColumnParallelLinear(16, 24, **options)


def row(**options) -> tp.RowParallelLinear:
    return tp.RowParallelLinear(16, 24, **options)


def gpt(*sizes, **options) -> tp.TensorParallelGPT:
    return tp.TensorParallelGPT(1, 32, *(sizes or (4, 8, 16)), **options)


def loss(z=(5, 7), y=(5,), dtype=torch.int64, **options):
    return tp.vocabulary_parallel_cross_entropy(torch.zeros(z), torch.zeros(y, dtype=dtype), **options)


def kept(model=SHAPE, tokens=48, ranks=4, **options):
    return tp.block_activations(model, 2, tokens, ranks, **options)


def step(model=SHAPE, **options):
    return metered_step(model, 2, 40, **options)


def other(**changes) -> Transformer:
    return replace(SHAPE, **changes)


def create_graph() -> None:
    layer = column()
    torch.autograd.grad(layer(WHOLE.clone().requires_grad_()).sum(), layer.weight, create_graph=True)


def in_place_of_a_part() -> None:
    row().weight = nn.Parameter(torch.zeros(24, 16))


ON_FOUR_RANKS = {  # what is said → the call, on one of four imagined ranks
    "whole x, (..., 16), found (8, 4)…gather_from_ranks makes parts whole": lambda: column()(PART),
    "whole x, (..., 16), found (8, 5); the layer reads 16 features": lambda: column()(torch.zeros(8, 5)),
    "part of x, (..., 4), found (8, 16)…scatter_to_ranks takes the part of a whole x": lambda: row()(WHOLE),
    "outputs of 10 cannot…(1, 2, 5, 10), or a number of outputs of 8 or 12": lambda: tp.ColumnParallelLinear(16, 10),
    "inputs of 3 cannot be split over 4…(1, 3), or a number of inputs of 4": lambda: tp.RowParallelLinear(3, 24),
    "7 rows cannot be split…divides 7 (1, 7), or for 4 ranks 8 rows": lambda: row(sequence_parallel=True)(PART[:7]),
    "rows, (rows, ..., features), for sequence_parallel": lambda: column(sequence_parallel=True)(WHOLE[0]),
    "sections that make 24 together, found 8 + 8 = 16": lambda: column(sections=(8, 8)),
    "outputs of 3 cannot be split into 2 pieces…(1, 3)…2 or 4": lambda: column(sections=(16, (3, 2), 5)),
    "expected x of at least one dimension…x.reshape(1)": lambda: tp.gather_from_ranks(torch.tensor(3.0)),
    "without create_graph…F.linear(copy_to_ranks(x), layer.w": (create_graph, RuntimeError),
    "this rank's part as weight, (24, 4), found (24, 16)": in_place_of_a_part,
    "a dimension of (8, 4), from -2 to 1, found 2": lambda: tp.cut_evenly((8, 4), 2, 0, 2),
    "a rank from 0 to 1, found 2": lambda: tp.cut_evenly((8, 4), 0, 2, 2),
    "a rank from 0 to 1, found -1": lambda: tp.cut_evenly((8, 4), 0, -1, 2),
    # of a GPT
    "6 heads cannot be split over 4…divides 6 (1, 2, 3, 6)": lambda: tp.TensorParallelAttention(96, 6),
    "12 heads cannot share a width of 100": lambda: tp.TensorParallelAttention(100, 12),
    "5 key-value…divide them (1, 2, 3, 4, 6, 12)": lambda: tp.TensorParallelAttention(96, 12, kv_heads=5),
    "heads of at least 1, found 0": lambda: tp.TensorParallelAttention(96, 0),
    "42 hidden features cannot be split": lambda: tp.TensorParallelFeedForward(96, 42),
    "4 ranks 50260 entries of the vocabulary": lambda: gpt(4, 32, 50_257),
    "30 positions of the context cannot be split over 4 ranks": lambda: gpt(4, 30, 256),
    "at most 8 tokens": lambda: gpt()(torch.zeros(1, 9, dtype=torch.int64)),
    "18 rows (batch · tokens) cannot be": lambda: gpt(sequence_parallel=True)(TOKENS),
    "rows of 2 texts of one length, found 9 rows": lambda: tp.TensorParallelBlock(32, 4)(torch.zeros(9, 32), 2),
    # of a vocabulary
    "a target for each row of logits, (5,), found (4,)": lambda: loss(y=(4,)),
    "of int64, found torch.float32 and torch.int32": (lambda: loss(dtype=torch.int32), TypeError),
    "a vocabulary of 50257 cannot be split over 4 ranks…50260": lambda: tp.VocabularyParallelEmbedding(50257, 8),
    "found none in MLP; build it of such": lambda: tp.check_replicas(MLP()).__enter__(),
}
ALONE = {
    "8 heads cannot be split over 3 ranks; pick…divides 8 (1, 2, 4, 8)": lambda: kept(ranks=3),
    "expected precision to be one of": lambda: kept(precision="fp8"),
    "expected ranks of at least 1": lambda: kept(ranks=0),
    "expected family to be one of 'gpt'": lambda: kept(other(family="llama"), ranks=2),
    "expected at most 45 tokens": lambda: kept(other(context=45), ranks=1),
    "counted for 2 tokens or more, found 1": lambda: kept(tokens=1),
    "42 rows (batch · tokens) cannot be split over 4 ranks": lambda: kept(tokens=21, sequence_parallel=True),
    "expected ranks or tensor_ranks, found both: 2 and 4": lambda: step(ranks=2, tensor_ranks=4),
    "expected sizes of family 'gpt'": lambda: step(other(family="llama"), tensor_ranks=2),
    "expected tensor_ranks above 1 for sequence_parallel": lambda: step(sequence_parallel=True),
    "expected a process group, found none; call this in a function that run_": (lambda: column(), RuntimeError),
}


def cases(table: dict) -> dict:
    """By what is said, which names the case, too."""
    pairs = {words: value if isinstance(value, tuple) else (value, ValueError) for words, value in table.items()}
    return {words: (call, error, words) for words, (call, error) in pairs.items()}


@refusals(cases(ON_FOUR_RANKS))
def test_what_ranks_cannot_do_is_refused_and_the_error_says_what_they_can(call, error, words):
    with imagined_ranks(4):
        refused(call, error, words)


@refusals(cases(ALONE))
def test_what_no_rank_could_hold_or_no_formula_counts_is_refused(call, error, words):
    refused(call, error, words)


def test_what_is_refused_in_one_way_is_counted_in_another():
    assert kept(tokens=1, precision="fp32").nbytes > 0
    assert kept(tokens=21).nbytes > 0
    assert tp.cut_evenly((4, 6, 8), -1, 1, 2) == tp.cut_evenly((4, 6, 8), 2, 1, 2)


def test_a_group_without_this_rank_is_refused():
    with imagined_ranks(4, rank=1):
        group = torch.distributed.new_group([2, 3])
        with pytest.raises(ValueError, match="group that this rank is of"):
            column(group=group)
