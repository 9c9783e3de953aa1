"""How small a card may be: the smallest on which a trace runs, whether or not its cache is emptied by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator

from memlab.caching_allocator import CachingAllocator, ExpandableAllocator, OutOfMemory, replay
from memlab.units import MiB

ALLOCATORS = {"CUDA's": CachingAllocator, "expandable segments": ExpandableAllocator}
STEP = 2 * MiB  # the smallest segment: cards are told apart by as much


def smallest_card(
    trace: Iterable[tuple[int, int]], empty_at: Collection[int] = (), make: Callable = CachingAllocator
) -> int:
    """Bytes of the smallest card, in steps of 2 MiB, on which an allocator serves a whole trace.

    Each card is tried, from the first that has room for what is in use at once: a trace may run on one card and fail on
    a larger one, where the cache is emptied later, and so other blocks are cut.

    trace: (id, nbytes) of each request. empty_at: positions in it before which the program calls `empty_cache()`.
    Raises ValueError or TypeError for a malformed trace, as `replay` does.
    """
    trace = list(trace)
    least = -(-replay(make(), trace).peak_requested_bytes // STEP)
    return next(steps * STEP for steps in itertools.count(max(1, least)) if _runs(trace, empty_at, make(steps * STEP)))


def _runs(trace: list[tuple[int, int]], empty_at: Collection[int], allocator: CachingAllocator) -> bool:
    empty_at = frozenset(empty_at)

    def emptied() -> Iterator[tuple[int, int]]:
        for position, request in enumerate(trace):
            if position in empty_at:
                allocator.empty_cache()
            yield request

    try:
        replay(allocator, emptied())
    except OutOfMemory:
        return False
    return True
