"""Does a run grow? The part of its bytes that rises step by step, apart from warm-up and noise.

What a step holds at its *end* is what it keeps. In a healthy run that is flat, after some steps of warm-up (optimizer
states, caches), but for noise: a batch that is still held, an evaluation, cycles that wait for the collector. Noise
goes up and comes down again; what leaks only goes up. So the last steps, however many, are cut into `STRETCHES`, and
of each counts the least that was held, its *floor*. A leak's floors

    never fall, and rise in most stretches, with no rise that makes most of it: jumps do not look like that;
    have risen by twice as much as floors of as many steps ever rose and then fell: a sawtooth has not;
    still rise in the second half: a warm-up does not;
    and the peaks do not rise by many times as much: else the work has grown (longer sequences), not what is kept.

The last steps are looked at in windows of many lengths, so a leak that begins late is found in the shorter ones.
What no figures can tell: a buffer that is still filling grows as a leak does, until it is full. How long to wait for
its end is not decided here, but where the budget is known (`forecasts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from memlab.memory_monitoring.steps import StepHistory

STRETCHES = 8
LEAST_WIDTH = 2  # blocks in a stretch
LEAST_RECENT_WIDTH = 4  # steps in a stretch of recent ones: of these windows there are many in a long run
FLAT_STRETCHES = 2  # so many may pass without a rise: five jumps are a leak's, four are not
GREATEST_RISE = 0.4  # of the whole rise
SWINGS = 2.0  # times the greatest swing
SLOWING = 0.25  # of the first half's rise
PEAKS = 3.0  # times the floors' rise; outputs that are kept and stacked at each step stay below
T_90 = 1.943  # Student's t for 6 degrees of freedom: the mean of 7 rises, two-sided 90 %
DEVIATIONS = 1.0  # by which growth may slow down more than it seems to


class Growth(NamedTuple):
    """Bytes a step by which the floor rises, between `low` and `high` (90 %); `grows` if that is a leak's pattern.

    since_step, until_step: the window in which it was found; the end of the last block, which may not be full yet.
    rise_bytes: by how much the floor rose in it.
    power: the least power of steps as which the kept bytes grow: 1 for an even growth, 0 for one that may be ending.
    peaks: what the peak is at its end, by what the stretches' peaks were above their floors: least, middle, most.
    pause_steps: the longest that nothing changed in the window's second half, for growth in jumps.
    """

    grows: bool
    bytes_per_step: float
    low: float
    high: float
    since_step: int
    until_step: int
    rise_bytes: int = 0
    power: float = 1.0
    peaks: tuple[int, int, int] = (0, 0, 0)
    pause_steps: int = 0


def growth(history: StepHistory) -> Growth:
    """How what a run keeps has grown: in the longest window that looks like a leak's."""
    blocks = len(history.ends)
    while (width := blocks // STRETCHES) >= LEAST_WIDTH:
        if found := _growth_of_window(history, history.ends, history.peaks, width, history.steps_in_block):
            return found
        blocks = blocks * 3 // 4
    steps = min(len(history.recent_ends), STRETCHES * LEAST_WIDTH * history.steps_in_block - 1)
    while history.steps_in_block > 1 and (width := steps // STRETCHES) >= LEAST_RECENT_WIDTH:
        if found := _growth_of_window(history, history.recent_ends, history.recent_peaks, width, 1):
            return found
        steps = steps * 3 // 4
    return Growth(False, 0.0, 0.0, 0.0, history.steps, history.steps)


def floors_of(ends: Sequence[int], width: int) -> list[int]:
    """The least of each `width` neighbours, counted from the end, in order; a shorter rest at the start is left out.

    >>> floors_of([9, 5, 3, 4, 6, 5], 2)
    [5, 3, 5]
    """
    return [min(ends[at : at + width]) for at in range(len(ends) % width, len(ends), width)]


def swing_of(floors: Sequence[int]) -> int:
    """The most by which floors rose and then fell again.

    >>> swing_of([9, 5, 8, 6, 7])
    2
    """
    before = accumulate(floors, min)
    after = reversed(list(accumulate(reversed(floors), min)))
    return max(floor - max(low, next_low) for floor, low, next_low in zip(floors, before, after, strict=True))


def _growth_of_window(
    history: StepHistory, ends: Sequence[int], peaks: Sequence[int], width: int, size: int
) -> Growth | None:
    """The growth in the last STRETCHES × width blocks of `size` steps, or None where it is not a leak's."""
    floors = floors_of(ends[-STRETCHES * width :], width)
    rises = [b - a for a, b in zip(floors, floors[1:], strict=False)]
    rise, half = floors[-1] - floors[0], STRETCHES // 2
    if min(rises) < 0 or rises.count(0) > FLAT_STRETCHES or max(rises) > GREATEST_RISE * rise:
        return None
    first, second = floors[half - 1] - floors[0], floors[-1] - floors[half]
    if second < SLOWING * first or rise <= SWINGS * _swing(history, ends, width):
        return None
    block_peaks = peaks[-STRETCHES * width :]
    low_peaks = floors_of(block_peaks, width)
    peaks_rise = low_peaks[-1] - low_peaks[0]
    if peaks_rise > PEAKS * rise:
        return None
    until = -(-history.steps // size) * size
    full = STRETCHES if until == history.steps else STRETCHES - 1
    above = sorted(max(block_peaks[i * width : (i + 1) * width]) - floors[i] for i in range(full))
    steps = width * size
    pause = max(len(list(same)) for _, same in groupby(ends[-half * width :])) - 1
    mean = rise / len(rises)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rises) / (len(rises) - 1))
    spread = T_90 * deviation / math.sqrt(len(rises))
    return Growth(
        True,
        mean / steps,
        max(0.0, mean - spread) / steps,
        max(mean + spread, second / (half - 1), peaks_rise / len(rises) + spread) / steps,
        until - STRETCHES * steps,
        until,
        rise,
        _power(first, second, DEVIATIONS * deviation * math.sqrt(half - 1)),
        (floors[-1] + above[0], floors[-1] + above[half], floors[-1] + above[-1]),
        pause * size,
    )


def _swing(history: StepHistory, ends: Sequence[int], width: int) -> int:
    """The greatest swing of the whole run; where the window is of recent steps, also of blocks before them."""
    swing = swing_of(floors_of(ends, width))
    return swing if ends is history.ends else max(swing, swing_of(history.ends))


def _power(first: float, second: float, spread: float) -> float:
    """The least p for which bytes that grow as steps ** p rise as much in the second half, beside the first."""
    if first <= 0:
        return 1.0
    ratio = second / first
    ratio -= spread * math.hypot(1, ratio) / first
    return min(1.0, math.log2(1 + max(0.0, ratio)))
