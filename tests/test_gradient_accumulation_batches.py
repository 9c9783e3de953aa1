"""Token batches: every example once, every batch within the budget, and as few of them as there can be."""

import random
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from memlab.book.workloads import lengths as committed_lengths
from memlab.gradient_accumulation.packing import pad_rows
from memlab.gradient_accumulation.token_batches import padded_tokens, padding_waste, token_batches

some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)
few_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=7)
windows = st.none() | st.integers(1, 100)
caps = st.none() | st.integers(1, 9)
seeds = st.integers(0, 10)


def fewest_batches(lengths: list[int], max_tokens: int, max_examples: int | None) -> int:
    """By trying every batch that the first example left can be in."""
    n = len(lengths)

    def allowed(members: int) -> bool:
        batch = [i for i in range(n) if members >> i & 1]
        return len(batch) <= (max_examples or n) and len(batch) * max(lengths[i] for i in batch) <= max_tokens

    @cache
    def fewest(left: int) -> int:
        if not left:
            return 0
        first, best, others = left & -left, n, left & (left - 1)
        chosen = others
        while True:
            if allowed(chosen | first):
                best = min(best, 1 + fewest(others & ~chosen))
            if not chosen:
                return best
            chosen = (chosen - 1) & others

    return fewest(2**n - 1)


@given(some_lengths, st.integers(60, 400), windows, seeds, caps)
def test_every_example_is_in_one_batch_and_every_batch_keeps_the_budget(lengths, max_tokens, window, seed, most):
    batches = token_batches(lengths, max_tokens, window=window, seed=seed, max_examples=most)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= (most or len(lengths))
        assert len(batch) * max(lengths[i] for i in batch) <= max_tokens


@given(some_lengths, st.integers(60, 400), windows, seeds)
def test_the_same_seed_gives_the_same_batches_whatever_else_draws(lengths, max_tokens, window, seed):
    state = random.getstate()
    first = token_batches(lengths, max_tokens, window=window, seed=seed)
    assert random.getstate() == state
    random.random()
    assert token_batches(lengths, max_tokens, window=window, seed=seed) == first


@settings(deadline=None)
@given(few_lengths, st.integers(20, 90), seeds, caps)
def test_sorted_whole_there_are_as_few_batches_as_there_can_be(lengths, max_tokens, seed, most):
    batches = token_batches(lengths, max_tokens, seed=seed, max_examples=most)
    assert len(batches) == fewest_batches(lengths, max_tokens, most)


@given(some_lengths, st.integers(60, 400), seeds)
def test_sorted_whole_no_length_of_one_batch_lies_inside_another(lengths, max_tokens, seed):
    spans = [
        (min(lengths[i] for i in batch), max(lengths[i] for i in batch))
        for batch in token_batches(lengths, max_tokens, seed=seed)
    ]
    spans.sort()
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def shared(first: list[list[int]], second: list[list[int]]) -> float:
    """Of the pairs of examples that share a batch in the first epoch, the part that does so in the second."""
    pairs = {pair for batch in first for pair in combinations(sorted(batch), 2)}
    return len(pairs & {pair for batch in second for pair in combinations(sorted(batch), 2)}) / len(pairs)


def test_every_epoch_has_other_batches_and_the_smaller_the_window_the_more():
    lengths = committed_lengths()
    kept = []
    for window in (None, 256, 100, 1):
        epochs = [token_batches(lengths, 8192, window=window, seed=epoch) for epoch in range(6)]
        assert len({frozenset(map(frozenset, epoch)) for epoch in epochs}) == 6, "not just another order of the same"
        kept.append(max(shared(first, second) for first, second in pairwise(epochs)))
    assert 1 > kept[0] > kept[1] > kept[2] > kept[3] and kept[1] < 1 / 2 and kept[3] < 1 / 20


def test_batches_do_not_come_in_order_of_length():
    lengths = committed_lengths()
    longest = [max(lengths[i] for i in batch) for batch in token_batches(lengths, 2 * max(lengths))]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_equal_examples_need_no_sorting_and_are_not_padded():
    for window in (None, 7, 1):
        batches = token_batches([50] * 1000, 1000, window=window)
        assert Counter(map(len, batches)) == {20: 50} and padding_waste([50] * 1000, batches) == 0


def test_without_sorting_a_batch_is_a_run_of_the_shuffled_examples_and_ends_only_where_the_budget_does():
    """Recovered from the batches alone: a run is followed by the one whose first example did not fit any more."""
    lengths = committed_lengths()
    batches = token_batches(lengths, 8192, window=1)
    short = [b for b in batches if (len(b) + 1) * max(map(lengths.__getitem__, b)) <= 8192]
    starts = [lengths[b[0]] for b in batches]
    fits = [all((len(b) + 1) * max(start, *(lengths[i] for i in b)) <= 8192 for start in starts) for b in short]
    assert sum(fits) <= 1, "only the last batch may have room for whatever comes"


def test_windows_share_a_batch_where_they_meet():
    """Ten windows of ten examples in batches of four: cut at every window there would be thirty, and here are 25."""
    assert len(token_batches([1] * 100, 4, window=10)) == 25


def test_windows_that_meet_in_like_lengths_are_padded_less_than_windows_all_sorted_upwards():
    lengths, max_tokens, window = [1, 100] * 500, 400, 50

    def all_upwards(seed: int) -> list[list[int]]:
        order = random.Random(seed).sample(range(len(lengths)), len(lengths))
        batches = [[]]
        for start in range(0, len(order), window):
            for i in sorted(order[start : start + window], key=lambda i: lengths[i]):
                if padded_tokens(lengths, [*batches[-1], i]) > max_tokens:
                    batches.append([])
                batches[-1].append(i)
        return batches

    ours = [padding_waste(lengths, token_batches(lengths, max_tokens, window=window, seed=seed)) for seed in range(20)]
    theirs = [padding_waste(lengths, all_upwards(seed)) for seed in range(20)]
    assert sum(ours) < 2 / 3 * sum(theirs)


def test_of_lengths_that_all_differ_the_seed_chooses_from_which_end_they_are_cut():
    lengths = list(range(1, 61))
    found = {frozenset(map(frozenset, token_batches(lengths, 200, seed=seed))) for seed in range(20)}
    assert len(found) == 2


def test_more_sorting_means_less_padding_on_the_committed_lengths():
    lengths = committed_lengths()
    waste = [padding_waste(lengths, token_batches(lengths, 8192, window=window)) for window in (None, 256, 100, 1)]
    assert waste == sorted(waste)
    fixed = BatchSampler(RandomSampler(lengths, generator=torch.Generator().manual_seed(0)), 8, drop_last=False)
    assert waste[-1] < padding_waste(lengths, fixed)


def test_a_fixed_batch_costs_what_its_longest_example_decides_and_a_token_batch_what_the_budget_says():
    lengths = committed_lengths()
    fixed = BatchSampler(RandomSampler(lengths, generator=torch.Generator().manual_seed(0)), 16, drop_last=False)
    assert max(padded_tokens(lengths, batch) for batch in fixed) == 16 * max(lengths)
    assert max(padded_tokens(lengths, batch) for batch in token_batches(lengths, 8192)) <= 8192


@given(some_lengths, st.integers(60, 400), windows)
def test_waste_is_the_share_of_padding_in_the_padded_batches(lengths, max_tokens, window):
    batches = token_batches(lengths, max_tokens, window=window)
    examples = [torch.ones(length, dtype=torch.int64) for length in lengths]
    padded = [pad_rows([examples[i] for i in batch])[0] for batch in batches]
    zeros, slots = sum(int((x == 0).sum()) for x in padded), sum(x.numel() for x in padded)
    assert [x.numel() for x in padded] == [padded_tokens(lengths, batch) for batch in batches]
    assert padding_waste(lengths, batches) == pytest.approx(float(Fraction(zeros, slots)), abs=1e-15)


def test_torchs_dataloader_takes_the_batches_as_its_sampler():
    rng = random.Random(0)
    examples = [torch.tensor([i + 1] * rng.randint(1, 50)) for i in range(200)]
    batches = token_batches([len(example) for example in examples], 300, window=50)
    loader = DataLoader(examples, batch_sampler=batches, collate_fn=pad_rows)
    assert len(loader) == len(batches)
    found = Counter()
    for x, y in loader:
        assert x.numel() <= 300 and x.shape == y.shape
        found.update(x[x > 0].tolist())
    assert found == {i + 1: len(example) for i, example in enumerate(examples)}


def test_lengths_may_be_numbers_of_torch_and_numpy():
    expected = token_batches([3, 5, 2], 10)
    assert token_batches(torch.tensor([3, 5, 2]), 10) == expected
    assert token_batches(torch.tensor([3, 5, 2]).numpy(), 10) == expected
    assert token_batches((n for n in (3, 5, 2)), 10) == expected


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int64])
def test_waste_is_a_float_that_no_small_integer_type_overflows(kind):
    lengths, batches = [200, 100, 120], [[0, 1], [2]]
    few_bits = torch.tensor(lengths).to(kind)
    many = few_bits.repeat(200), [[i + 3 * j for i in batch] for batch in batches for j in range(200)]
    for found in (
        padding_waste(few_bits, batches),
        padding_waste(few_bits.numpy(), batches),
        padding_waste(*many),
        padding_waste(many[0].numpy(), many[1]),
    ):
        assert type(found) is float and found == padding_waste(lengths, batches)


# ---- bad input


def test_an_example_longer_than_the_budget_is_named_with_what_to_do():
    message = (
        r"expected examples of at most 1,000 tokens \(max_tokens\), found 1,200 in example 1; "
        "raise max_tokens to 1,200, or truncate or drop"
    )
    with pytest.raises(ValueError, match=message):
        token_batches([5, 1200, 1000], 1000)
    with pytest.raises(ValueError, match="found 1,300 in example 2, the longest of 2 that are over; raise"):
        token_batches([5, 1200, 1300, 1000], 1000)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "options", "error", "message"),
    [
        ([], 10, {}, ValueError, "at least one example, found none"),
        ([3, 0], 10, {}, ValueError, "at least 1, found 0 in example 1; drop what is empty"),
        ([3, -2], 10, {}, ValueError, "at least 1, found -2 in example 1"),
        ([3, 2.0], 10, {}, TypeError, "the length of example 1 as an int, found 2.0"),
        (["abc"], 10, {}, TypeError, "the length of example 0 as an int, found 'abc'"),
        ([3, True], 10, {}, TypeError, "the length of example 1 as an int, found True"),
        ([3], 0, {}, ValueError, "expected max_tokens of at least 1, found 0"),
        ([3], 10.0, {}, TypeError, "expected max_tokens as an int, found 10.0"),
        ([3], True, {}, TypeError, "expected max_tokens as an int, found True"),
        ([3], None, {}, TypeError, "expected max_tokens as an int, found None"),
        ([3], 10, {"window": 0}, ValueError, "expected window of at least 1, found 0"),
        ([3], 10, {"window": True}, TypeError, "expected window as an int, found True"),
        ([3], 10, {"max_examples": 0}, ValueError, "expected max_examples of at least 1, found 0"),
    ],
)
def test_what_cannot_be_batched_is_refused(lengths, max_tokens, options, error, message):
    with pytest.raises(error, match=message):
        token_batches(lengths, max_tokens, **options)


def test_a_spent_sampler_has_no_waste_to_tell():
    batches = iter([[0], [1]])
    padding_waste([3, 4], batches)
    with pytest.raises(ValueError, match="at least one batch, found none"):
        padding_waste([3, 4], batches)


def test_a_batch_without_examples_is_refused():
    with pytest.raises(ValueError, match="at least one example in every batch"):
        padding_waste([3, 4], [[0, 1], []])


@pytest.mark.parametrize(("seed", "error"), [(None, TypeError), (1.0, TypeError), (True, TypeError), (-1, ValueError)])
def test_a_seed_that_another_rank_could_read_otherwise_is_refused(seed, error):
    with pytest.raises(error, match="expected .*seed"):
        token_batches([3, 4], 8, seed=seed)
