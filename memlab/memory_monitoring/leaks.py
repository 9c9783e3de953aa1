"""Does a run grow? The part of its bytes that rises step by step, apart from warm-up and noise.

What a step holds at its *end* is what it keeps. In a healthy run that is flat, after some steps of warm-up (optimizer
states, caches), but for noise: a batch that is still held, an evaluation, cycles that wait for the collector. Noise
goes up and comes down again; what leaks only goes up. So the steps are cut into stretches, and of each the *minimum*
counts.
"""

from __future__ import annotations

from typing import NamedTuple

from memlab.memory_monitoring.steps import StepHistory

STRETCHES = 8


class Growth(NamedTuple):
    """Bytes a step by which the floor rises, between `low` and `high` (90 %); `grows` if that is a leak's pattern."""

    grows: bool
    bytes_per_step: float
    low: float
    high: float
    since_step: int


def growth(history: StepHistory) -> Growth:
    """How what a run keeps has grown since its warm-up."""
    ends = list(history.ends)
    first = len(ends) // 4
    width = (len(ends) - first) // STRETCHES
    if width < 2:
        return Growth(False, 0.0, 0.0, 0.0, 0)
    floors = [min(ends[first + width * k : first + width * (k + 1)]) for k in range(STRETCHES)]
    slopes = sorted(
        (floors[j] - floors[i]) / ((j - i) * width * history.steps_in_block) for j in range(STRETCHES) for i in range(j)
    )
    middle, edge = slopes[len(slopes) // 2], len(slopes) // 20
    rises = all(a < b for a, b in zip(floors, floors[1:], strict=False))
    return Growth(rises, middle, slopes[edge], slopes[-1 - edge], first * history.steps_in_block)
