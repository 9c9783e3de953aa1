"""The smallest card on which a trace runs: it runs there, and on none that is smaller."""

import contextlib
import functools
import itertools
import random

import pytest

from memlab.book.cards import ALLOCATORS, STEP, smallest_card
from memlab.caching_allocator import FREE, CachingAllocator, MaxSplitAllocator, OutOfMemory, replay
from memlab.units import MiB

LONGER = [event for n in range(1, 20) for event in ((n, 11 * n * MiB), (n, FREE))]
MAKERS = ALLOCATORS | {"max_split_size": functools.partial(MaxSplitAllocator, "128 MiB")}


def test_a_tensor_that_grows_needs_no_more_than_itself_since_a_full_card_empties_the_cache():
    assert smallest_card(LONGER) == 11 * 19 * MiB + 1 * MiB
    assert replay(CachingAllocator(), LONGER).peak_reserved_bytes > 5 * smallest_card(LONGER)


def test_the_cache_is_emptied_where_it_is_asked_to_be():
    trace = [(0, 5 * MiB), (0, FREE), (1, 18 * MiB), (2, 5 * MiB)]
    assert smallest_card(trace) == 20 * MiB + 20 * MiB  # 18 MiB out of the cached 20: then there is no room for 5 more
    assert smallest_card(trace, [2]) == 18 * MiB + 20 * MiB
    assert smallest_card(trace, [1, 3]) == smallest_card(trace)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_trace_that_fails_on_larger_cards_too_gets_the_smallest_of_all_that_serve_it(make):
    # All but the first two of them run on one card and fail on some larger one.
    for trace in ([(0, 1)], *map(_mixed, (0, 35, 156, 280, 290))):
        card = smallest_card(iter(trace), make=make)
        assert card == next(n * STEP for n in itertools.count(1) if _serves(make(n * STEP), trace))


def _mixed(seed):
    draw, live, trace = random.Random(seed), [], []
    for n in range(draw.randint(6, 14)):
        if live and draw.random() < 0.45:
            trace.append((live.pop(draw.randrange(len(live))), FREE))
        trace.append((n, draw.choice([1, 3, 5, 7, 9, 11, 13, 19, 21, 27, 33]) * MiB))
        live.append(n)
    return trace


def _serves(allocator, trace):
    with contextlib.suppress(OutOfMemory):
        return bool(replay(allocator, trace))
    return False
