"""What leaves under a byte budget: as many bytes as possible, for as long as possible.

A budget of host memory (or of a link's time) is a knapsack: n bytes away for t seconds free n·t byte-seconds on the
device. What the forward saves first is away longest, since backward wants it last; but a small tensor's place is better
given to a large one. So each forward notes when a tensor was saved and when backward wanted it, and the next one lets
those leave whose idle time × bytes is largest, as long as they fit.

Source: Zhang et al. 2019 (AutoSwap), section 4.2: the area of absence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence


class Record:
    """One tensor that could leave: its bytes, when it was saved, and when backward wanted it first (None: not yet)."""

    __slots__ = ("nbytes", "saved_at", "wanted_at")

    def __init__(self, nbytes: int, saved_at: float, wanted_at: float | None = None):
        self.nbytes, self.saved_at, self.wanted_at = nbytes, saved_at, wanted_at

    def wanted(self) -> None:
        """Backward wants it now."""
        if self.wanted_at is None:
            self.wanted_at = time.perf_counter()


def choose(records: Sequence[Record], budget_bytes: int) -> set[int]:
    """Which to send: by idle seconds × bytes, the largest first, each that still fits.

    (`schedule.chosen` takes a policy's order up to the first that does not fit: a plan, where this is a knapsack.)

    >>> long, large, small = Record(10, 0.0, 9.0), Record(80, 1.0, 8.0), Record(20, 2.0, 7.0)
    >>> choose([long, large, small], 100)
    {1, 2}
    """
    last = max((r.wanted_at for r in records if r.wanted_at is not None), default=0.0)
    areas = [r.nbytes * ((last if r.wanted_at is None else r.wanted_at) - r.saved_at) for r in records]
    chosen: set[int] = set()
    for i in sorted(range(len(records)), key=lambda i: (-areas[i], i)):
        if records[i].nbytes <= budget_bytes:
            chosen.add(i)
            budget_bytes -= records[i].nbytes
    return chosen


class Forward:
    """What one forward saved, in order, and what became of it.

    before: the records of the forward before. As long as the sizes are the same, its times decide; from the first
    difference on, and without them, whoever comes first leaves.
    """

    def __init__(self, before: Sequence[Record] = (), budget_bytes: float = math.inf):
        self.records: list[Record] = []
        self.order: list = []  # the pieces that left; None once they are wanted no longer
        self.moved_bytes, self.freed = 0, []
        timed = budget_bytes < math.inf and any(r.wanted_at is not None for r in before)
        self._before, self._chosen = (before, choose(before, budget_bytes)) if timed else ((), set())
        self._as_before = True

    def next_tensor(self, nbytes: int, left_bytes: float) -> tuple[Record, bool]:
        """The next tensor is saved: its record, and whether it leaves. left_bytes: what the budget has left."""
        i = len(self.records)
        self._as_before &= i < len(self._before) and self._before[i].nbytes == nbytes
        self.records.append(Record(nbytes, time.perf_counter()))
        return self.records[-1], nbytes <= left_bytes and (i in self._chosen or not self._as_before)
