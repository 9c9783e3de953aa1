"""Whose bytes grow: two timelines of one loop, one some steps longer, compared line by line.

A step makes many storages that outlive it: gradients, states, the last loss. They are *replaced*, step by step, so of
each line as many bytes are alive after n steps as after m. A line of which more are alive after the longer run is where
the leak is born.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from memlab.memory_timeline import Line, Timeline


class GrowingLine(NamedTuple):
    """A line of the model's or the loop's code whose storages pile up, `bytes_per_step` a step; why each is kept."""

    line: Line
    category: str
    bytes_per_step: float
    storages_per_step: float
    reason: str


def growing_lines(before: Timeline, after: Timeline, steps: int) -> list[GrowingLine]:
    """The lines that hold more at the end of `after` than of `before`, most bytes first.

    before, after: timelines of one loop from the same start, `after` being `steps` steps longer.
    """
    then, now, reasons = Counter(), Counter(), {}
    counts_then, counts_now = Counter(), Counter()
    for timeline, held, counts in ((before, then, counts_then), (after, now, counts_now)):
        for storage in timeline.alive(len(timeline) - 1):
            key = storage.line, storage.category
            held[key] += storage.nbytes
            counts[key] += 1
            reasons[key] = storage.reason
    grown = [
        GrowingLine(*key, (now[key] - then[key]) / steps, (counts_now[key] - counts_then[key]) / steps, reasons[key])
        for key in now
        if now[key] > then[key]
    ]
    return sorted(grown, key=lambda one: -one.bytes_per_step)
