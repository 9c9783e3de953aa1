"""How small a card may be: the smallest on which a trace runs, whether or not its cache is emptied by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from memlab.caching_allocator import CachingAllocator, ExpandableAllocator, OutOfMemory, Trace, replay
from memlab.units import MiB

ALLOCATORS = {"CUDA's": CachingAllocator, "expandable segments": ExpandableAllocator}
STEP = 2 * MiB  # the smallest segment: cards are told apart by as much


def smallest_card(trace: Trace, empty_at: Collection[int] = (), make: Callable = CachingAllocator) -> int:
    """Bytes of the smallest card, in steps of 2 MiB, on which an allocator serves a whole trace; found by halving.

    empty_at: positions in the trace before which the program calls `empty_cache()`.
    """
    too_small, enough = 0, 2
    while not _runs(trace, empty_at, make(enough * STEP)):
        too_small, enough = enough, 2 * enough
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if _runs(trace, empty_at, make(middle * STEP)):
            enough = middle
        else:
            too_small = middle
    return enough * STEP


def _runs(trace: Trace, empty_at: Collection[int], allocator: CachingAllocator) -> bool:
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
