"""Does a run grow? The part of its bytes that rises step by step, apart from warm-up and noise.

What a step holds at its *end* is what it keeps. In a healthy run that is flat, after some steps of warm-up (optimizer
states, caches), but for noise: a batch that is still held, an evaluation, cycles that wait for the collector. Noise
goes up and comes down again; what leaks only goes up. So the last steps, however many, are cut into `STRETCHES`, and
of each counts the least that was held, its *floor*. A leak's floors

    never fall, and rise in most stretches, with no rise that makes most of it: jumps do not look like that;
    have risen by twice as much as floors of as many steps ever rose and then fell: a sawtooth has not;
    still rise in the second half: a warm-up does not;
    and the peaks do not rise by many times as much: else the work has grown (longer sequences), not what is kept.

There is noise that grows with the leak: of a hook that is registered again and again, each copy is as long as the
batch. Floors then rise and fall with the shortest batch of each stretch. So where floors do not tell, the same is asked
of the *means* of longer stretches, which are steadier; but floors must rise, too, and nothing may have jumped, or
a jump would pass for a slope. The peaks of such a run rise faster than its floors, and they are what fills the budget:
how fast, tells a line through the highest of each stretch, which one tall peak does not bend.

The last steps are looked at in windows of many lengths, so a leak that begins late is found in the shorter ones.
What no figures can tell: a buffer that is still filling grows as a leak does, until it is full. How long to wait for
its end is not decided here, but where the budget is known (`forecasts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, groupby
from operator import eq, sub
from statistics import median
from typing import NamedTuple

from memlab.memory_monitoring.steps import StepHistory

STRETCHES = 8
LEAST_WIDTH = 2  # blocks in a stretch
LEAST_RECENT_WIDTH = 4  # steps in a stretch of recent ones: of these windows there are many in a long run
LEAST_NOISY_WIDTH = 4  # blocks in a stretch that has a mean, and a highest peak that is not just any
FLAT_STRETCHES = 2  # so many may pass without a rise: five jumps are a leak's, four are not
GREATEST_RISE = 0.4  # of the whole rise
SWINGS = 2.0  # times the greatest swing
SLOWING = 0.25  # of the first half's rise
PEAKS = 3.0  # times the floors' rise; outputs that are kept and stacked at each step stay below
T_90 = 1.943  # Student's t for 6 degrees of freedom: the mean of 7 rises, two-sided 90 %
DEVIATIONS = 1.0  # by which growth may slow down more than it seems to

Level = Callable[[Sequence[int]], int]


class Growth(NamedTuple):
    """Bytes a step by which the floor rises, between `low` and `high` (90 %); `grows` if that is a leak's pattern.

    since_step, until_step: the window in which it was found; the end of the last block, which may not be full yet.
    rise_bytes: by how much the floor, or the mean, rose in it. peaks_rise_bytes: by how much the highest peaks did.
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
    peaks_rise_bytes: int = 0


def growth(history: StepHistory) -> Growth:
    """How what a run keeps has grown: in the longest window in which its floors, or its means, look like a leak's."""
    for ends, peaks, width, size in _windows(history):
        floors = floors_of(ends[-STRETCHES * width :], width)
        if floors[-1] > floors[0] and sum(map(eq, floors, floors[1:])) <= FLAT_STRETCHES:
            for level in (min, _mean) if width >= LEAST_NOISY_WIDTH else (min,):
                if found := _growth_of_window(history, ends, peaks, width, size, level):
                    return found
    return Growth(False, 0.0, 0.0, 0.0, history.steps, history.steps)


def floors_of(ends: Sequence[int], width: int, level: Level = min) -> list[int]:
    """The least of each `width` neighbours, counted from the end, in order; a shorter rest at the start is left out.

    level: what is taken of each instead of the least.

    >>> floors_of([9, 5, 3, 4, 6, 5], 2)
    [5, 3, 5]
    """
    return [level(ends[at : at + width]) for at in range(len(ends) % width, len(ends), width)]


def swing_of(floors: Sequence[int]) -> int:
    """The most by which floors rose and then fell again.

    >>> swing_of([9, 5, 8, 6, 7])
    2
    """
    before = accumulate(floors, min)
    after = reversed(list(accumulate(reversed(floors), min)))
    return max(floor - max(low, next_low) for floor, low, next_low in zip(floors, before, after, strict=True))


def slope_of(values: Sequence[float]) -> float:
    """The rise from one value to the next: the middle of the slopes between any two (Theil 1950, Sen 1968).

    >>> slope_of([1, 3, 5, 7, 100])
    2.0
    """
    return median((later - value) / (j - i) for (i, value), (j, later) in combinations(enumerate(values), 2))


def gap_of(values: Sequence[int]) -> int:
    """The greatest jump that stays one: from the most before it to the least after it.

    >>> gap_of([3, 1, 2, 7, 6, 9])
    3
    """
    after = list(accumulate(reversed(values), min))[-2::-1]
    return max(map(sub, after, accumulate(values, max)))


def _mean(values: Sequence[int]) -> int:
    return sum(values) // len(values)


def _windows(history: StepHistory) -> Iterator[tuple[Sequence[int], Sequence[int], int, int]]:
    """Where to look, the longest first: ends and peaks, blocks in a stretch and steps in a block."""
    blocks = len(history.ends)
    while (width := blocks // STRETCHES) >= LEAST_WIDTH:
        yield history.ends, history.peaks, width, history.steps_in_block
        blocks = blocks * 3 // 4
    steps = min(len(history.recent_ends), STRETCHES * LEAST_WIDTH * history.steps_in_block - 1)
    while history.steps_in_block > 1 and (width := steps // STRETCHES) >= LEAST_RECENT_WIDTH:
        yield history.recent_ends, history.recent_peaks, width, 1
        steps = steps * 3 // 4


def _growth_of_window(
    history: StepHistory, ends: Sequence[int], peaks: Sequence[int], width: int, size: int, level: Level
) -> Growth | None:
    """The growth in the last STRETCHES × width blocks of `size` steps, or None where it is not a leak's."""
    window = ends[-STRETCHES * width :]
    levels = floors_of(window, width, level)
    rises = [b - a for a, b in zip(levels, levels[1:], strict=False)]
    rise, half = levels[-1] - levels[0], STRETCHES // 2
    if min(rises) < 0 or max(rises) > GREATEST_RISE * rise:
        return None
    if level is _mean and gap_of(window) > GREATEST_RISE * rise:
        return None
    first, second = levels[half - 1] - levels[0], levels[-1] - levels[half]
    if second < SLOWING * first or rise <= SWINGS * _swing(history, ends, width, level):
        return None
    block_peaks = peaks[-STRETCHES * width :]
    low_peaks = floors_of(block_peaks, width)
    peaks_rise = low_peaks[-1] - low_peaks[0]
    if peaks_rise > PEAKS * rise:
        return None
    until = -(-history.steps // size) * size
    tops = floors_of(block_peaks, width, max)[: STRETCHES if until == history.steps else -1]
    tops_slope = slope_of(tops) if width >= LEAST_NOISY_WIDTH else 0.0
    above = sorted(top - held for top, held in zip(tops, levels, strict=False))
    steps = width * size
    pause = max(len(list(same)) for _, same in groupby(window[-half * width :])) - 1
    mean = rise / len(rises)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rises) / (len(rises) - 1))
    spread = T_90 * deviation / math.sqrt(len(rises))
    return Growth(
        True,
        mean / steps,
        max(0.0, mean - spread) / steps,
        (max(mean, second / (half - 1), peaks_rise / len(rises), tops_slope) + spread) / steps,
        until - STRETCHES * steps,
        until,
        rise,
        _power(first, second, DEVIATIONS * deviation * math.sqrt(half - 1)),
        (levels[-1] + above[0], levels[-1] + above[half], levels[-1] + above[-1]),
        pause * size,
        round(min(tops_slope * len(rises), max(tops) - min(tops), PEAKS * rise)),
    )


def _swing(history: StepHistory, ends: Sequence[int], width: int, level: Level) -> int:
    """The greatest swing of the whole run; where the window is of recent steps, also of blocks before them."""
    swing = swing_of(floors_of(ends, width, level))
    return swing if ends is history.ends else max(swing, swing_of(history.ends))


def _power(first: float, second: float, spread: float) -> float:
    """The least p for which bytes that grow as steps ** p rise as much in the second half, beside the first.

    Both rises may be off by `spread`: their point, seen from the origin, may lie lower by that angle (Fieller 1954).
    """
    far = math.hypot(first, second)
    if spread >= far:
        return 0.0
    angle = math.atan2(second, first) - math.asin(spread / far)
    return math.log2(1 + math.tan(min(max(0.0, angle), math.pi / 4)))
