"""Token batches: every example once, every batch within the budget, and as few of them as there can be."""

import random
from collections import Counter
from functools import cache
from itertools import combinations, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.book.workloads import lengths as committed_lengths
from memlab.gradient_accumulation import token_batches

some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)
few_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=7)
windows = st.none() | st.integers(1, 100)
seeds = st.integers(0, 10)
few = settings(max_examples=30, deadline=None, derandomize=True)


def padded_tokens(lengths, batch) -> int:
    return len(batch) * max(lengths[i] for i in batch)


def padding_waste(lengths, batches) -> float:
    tokens = sum(lengths[i] for batch in batches for i in batch)
    return 1 - tokens / sum(padded_tokens(lengths, batch) for batch in batches)


def fewest_batches(lengths: list[int], max_tokens: int) -> int:
    """By trying every batch that the first example left can be in."""
    n = len(lengths)

    def allowed(members: int) -> bool:
        batch = [i for i in range(n) if members >> i & 1]
        return padded_tokens(lengths, batch) <= max_tokens

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


@few
@given(some_lengths, st.integers(60, 400), windows, seeds)
def test_every_example_is_in_one_batch_and_every_batch_keeps_the_budget(lengths, max_tokens, window, seed):
    batches = token_batches(lengths, max_tokens, window=window, seed=seed)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert padded_tokens(lengths, batch) <= max_tokens


def test_the_same_seed_gives_the_same_batches_whatever_else_draws():
    lengths, state = committed_lengths(), random.getstate()
    first = token_batches(lengths, 8192, window=100, seed=3)
    assert random.getstate() == state
    random.random()
    assert token_batches(lengths, 8192, window=100, seed=3) == first


@few
@given(few_lengths, st.integers(20, 90), seeds)
def test_sorted_whole_there_are_as_few_batches_as_there_can_be(lengths, max_tokens, seed):
    assert len(token_batches(lengths, max_tokens, seed=seed)) == fewest_batches(lengths, max_tokens)


def shared(first: list[list[int]], second: list[list[int]]) -> float:
    """Of the pairs of examples that share a batch in the first epoch, the part that does so in the second."""
    pairs = {pair for batch in first for pair in combinations(sorted(batch), 2)}
    return len(pairs & {pair for batch in second for pair in combinations(sorted(batch), 2)}) / len(pairs)


def test_every_epoch_has_other_batches_and_the_smaller_the_window_the_more():
    lengths = committed_lengths()
    kept = []
    for window in (None, 256, 1):
        epochs = [token_batches(lengths, 8192, window=window, seed=epoch) for epoch in range(4)]
        assert len({frozenset(map(frozenset, epoch)) for epoch in epochs}) == 4, "not just another order of the same"
        longest = [max(lengths[i] for i in batch) for batch in epochs[0]]
        assert longest != sorted(longest) and longest != sorted(longest, reverse=True)
        kept.append(max(shared(first, second) for first, second in pairwise(epochs)))
    assert 1 > kept[0] > kept[1] > kept[2] and kept[1] < 1 / 2 and kept[2] < 1 / 20


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

    ours = [padding_waste(lengths, token_batches(lengths, max_tokens, window=window, seed=seed)) for seed in range(8)]
    theirs = [padding_waste(lengths, all_upwards(seed)) for seed in range(8)]
    assert sum(ours) < 2 / 3 * sum(theirs)


def test_of_lengths_that_all_differ_the_seed_chooses_from_which_end_they_are_cut():
    lengths = list(range(1, 61))
    found = {frozenset(map(frozenset, token_batches(lengths, 200, seed=seed))) for seed in range(20)}
    assert len(found) == 2


def test_lengths_may_be_numbers_of_torch_and_numpy():
    expected = token_batches([3, 5, 2], 10)
    assert token_batches(torch.tensor([3, 5, 2]), 10) == expected
    assert token_batches(torch.tensor([3, 5, 2]).numpy(), 10) == expected
    assert token_batches((n for n in (3, 5, 2)), 10) == expected
