"""Packing: rows are full, documents do not meet, and each has the loss and the gradients it has alone."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask

from memlab.book.workloads import GPT, PackedGPT
from memlab.book.workloads import lengths as committed_lengths
from memlab.gradient_accumulation import document_mask, pack, pack_rows, pad_rows
from memlab.memory_timeline import Meter

some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)
seeds = st.integers(0, 10)
few = settings(max_examples=30, deadline=None, derandomize=True)


def waste(lengths, rows, row_tokens) -> float:
    return 1 - sum(lengths) / (len(rows) * row_tokens)


def fills(rows, lengths) -> list[int]:
    return sorted(sum(lengths[i] for i in row) for row in rows)


@few
@given(some_lengths, st.integers(60, 300), seeds)
def test_every_example_is_in_one_row_and_no_row_is_too_long(lengths, row_tokens, seed):
    state = random.getstate()
    rows = pack(lengths, row_tokens, seed=seed)
    assert random.getstate() == state
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert fills(rows, lengths)[-1] <= row_tokens
    assert rows == pack(lengths, row_tokens, seed=seed)


@few
@given(some_lengths, st.integers(60, 300), seeds)
def test_rows_are_those_of_best_fit_by_looking_at_every_row(lengths, row_tokens, seed):
    filled = []
    for length in sorted(lengths, reverse=True):
        fitting = [fill for fill in filled if fill + length <= row_tokens]
        if fitting:
            filled.remove(max(fitting))
        filled.append(max(fitting, default=0) + length)
    assert fills(pack(lengths, row_tokens, seed=seed), lengths) == sorted(filled)


@pytest.mark.parametrize("row_tokens", [1024, 2048, 4096, 8192])
def test_packed_rows_of_the_committed_lengths_waste_at_most_two_percent(row_tokens):
    lengths = [min(length, row_tokens) for length in committed_lengths()]
    rows = pack(lengths, row_tokens)
    assert waste(lengths, rows, row_tokens) <= 0.02
    assert len(rows) == -(-sum(lengths) // row_tokens), "no packing has fewer rows"


def test_another_seed_puts_others_of_equal_length_together_and_the_rows_stay_as_few():
    lengths = committed_lengths()
    first, second = ({frozenset(row) for row in pack(lengths, 4096, seed=seed)} for seed in (0, 1))
    assert len(first) == len(second) and first != second
    ordered = [lengths[row[0]] for row in pack(lengths, 4096)]
    assert ordered != sorted(ordered, reverse=True), "rows are shuffled too"


def documents_of(lengths, vocabulary=32, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def test_a_packed_row_written_out():
    examples = [torch.tensor(tokens) for tokens in ([11, 12, 13], [21, 22], [31], [41, 42, 43, 44])]
    packed = pack_rows(examples, [[3, 1], [0, 2]], 7, padding=9)
    assert packed.x.tolist() == [[41, 42, 43, 44, 21, 22, 9], [11, 12, 13, 31, 9, 9, 9]]
    assert packed.y.tolist() == [[42, 43, 44, -100, 22, -100, -100], [12, 13, -100, -100, -100, -100, -100]]
    assert packed.documents.tolist() == [[0, 0, 0, 0, 1, 1, -1], [0, 0, 0, 1, -1, -1, -1]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0], [0, 1, 2, 0, 0, 0, 0]]
    assert all(field.dtype is torch.int64 for field in packed)
    assert pack_rows(examples, [[2]], 2, ignore_index=-1).y.tolist() == [[-1, -1]]


def test_padded_rows_are_the_examples_with_padding_on_the_right():
    examples = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    x, y = pad_rows(examples, padding=9)
    assert x.tolist() == [[1, 2, 3], [4, 9, 9]] and y.tolist() == [[2, 3, -100], [-100, -100, -100]]


def test_the_mask_is_causal_and_within_a_document_as_flexattention_makes_it_of_that_rule():
    documents = pack_rows(documents_of([5, 3, 6, 2]), [[0, 1], [2, 3]], 10).documents  # padded by 2
    rule = lambda row, head, i, j: (documents[row, i] == documents[row, j]) & (j <= i)  # noqa: E731
    assert torch.equal(document_mask(documents), create_mask(rule, 2, 1, 10, 10, device="cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_mask_as_numbers_is_zero_or_minus_infinity(dtype):
    documents = torch.tensor([[0, 0, 1, -1]])
    added, seen = document_mask(documents, dtype), document_mask(documents)
    assert added.dtype is dtype
    assert (added[seen] == 0).all() and (added[~seen] == float("-inf")).all()


SIZES = {"layers": 2, "width": 32, "heads": 4, "context": 48, "vocabulary": 32}
LENGTHS = [20, 17, 9, 1, 13, 2, 30, 5]
ROWS = [[0, 1, 2, 3], [6, 4, 5], [7]]  # 47, 45 and 5 of 48 tokens


def models(attention="fused") -> tuple[GPT, PackedGPT]:
    torch.manual_seed(0)
    alone, packed = (kind(**SIZES, attention=attention).double() for kind in (GPT, PackedGPT))
    for name, p in alone.named_parameters():
        nn.init.normal_(p, mean=float("norm" in name and name.endswith("weight")), std=0.3)
    packed.load_state_dict(alone.state_dict())
    return alone, packed


def summed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")


def each_alone(model: GPT, examples: list[Tensor]) -> Tensor:
    """Σ of the documents' losses, each document run by itself; gradients add up in the parameters."""
    total = 0.0
    for example in examples:
        if len(example) > 1:
            loss = summed(model(example[None, :-1]), example[None, 1:])
            loss.backward()
            total = total + loss.detach()
    return total


def distances(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """‖found − expected‖ / ‖expected‖ of every gradient."""
    expected = dict(reference.named_parameters())
    return {
        name: ((p.grad - expected[name].grad).norm() / expected[name].grad.norm()).item()
        for name, p in model.named_parameters()
    }


each_attention = pytest.mark.parametrize("attention", ["fused", "by hand"])


@pytest.mark.parametrize("attention", ["fused", "by hand", "padded"])
def test_packed_or_padded_documents_have_the_loss_and_the_gradients_they_have_alone(attention):
    alone, model = models("fused" if attention == "padded" else attention)
    examples = documents_of(LENGTHS)
    expected = each_alone(alone, examples)
    if attention == "padded":  # needs no mask
        x, y = pad_rows(examples)
        loss = summed(model(x), y)
    else:
        packed = pack_rows(examples, ROWS, 48)
        loss = summed(model(packed.x, documents=packed.documents, positions=packed.positions), packed.y)
        labels = int((packed.y != -100).sum())
        torch.testing.assert_close(model(*packed), loss / labels, rtol=1e-12, atol=0)
    loss.backward()
    assert abs(loss - expected) <= 1e-12 * expected
    assert max(distances(model, alone).values()) <= 1e-12


@each_attention
def test_a_row_of_padding_alone_and_documents_of_one_token_bring_no_nan(attention):
    _, model = models(attention)
    packed = pack_rows(documents_of([1, 2]), [[0], [1], []], 8)
    loss = model(*packed)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@each_attention
def test_without_documents_it_is_a_gpt(attention):
    alone, model = models(attention)
    x, y = (torch.randint(32, (2, 16)) for _ in range(2))
    assert torch.equal(model(x), alone(x)) and torch.equal(model(x, y), alone(x, y))


def test_all_layers_share_one_mask():
    peaks = {}
    for layers in (1, 3):
        for packed in (True, False):
            torch.manual_seed(0)
            model = PackedGPT(layers=layers, width=32, context=128)
            rows = pack_rows(documents_of([100, 28, 90]), [[0, 1], [2]], 128)
            batch = tuple(rows if packed else rows[:2])
            with Meter(model, inputs=batch) as meter:
                model(*batch).backward()
            peaks[layers, packed] = meter.timeline.bytes_at(meter.timeline.peak_event)
    extra = [peaks[layers, True] - peaks[layers, False] for layers in (1, 3)]
    assert extra[0] == extra[1] >= 4 * 2 * 128 * 128
