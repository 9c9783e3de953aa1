"""What a loop around nvidia-smi sees: the driver's figure, now and then, of a program whose bytes are all known.

`nvidia-smi --loop=1` looks once a second at what the driver has handed out: PyTorch's *reserved* bytes and CUDA's
context. The caching allocator keeps its segments, so this figure does not fall, and no poll can miss the highest: it is
still there at the next. What it does miss is everything below. A leak first eats what is cached and unused,

    slack = reserved - allocated at a step's peak,

and the driver's figure stands still meanwhile, for about slack / growth steps: no more, and fewer where the slack is in
pieces that requests do not fit. From then on it moves by a segment every segment / growth steps. What is *allocated* at
the end of a step shows the same leak after one step. A poll of *allocated* in the middle of steps shows where in a step
it happened to look: of the peaks of steps it meets those during which it falls, and that is a share of

    min(1, seconds at the peak / seconds between polls)

on average, if polls and steps keep no common time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memlab.caching_allocator import FREE, Replay, Trace
from memlab.units import MiB

CONTEXT_BYTES = 512 * MiB  # about what CUDA's context, its kernels and cuBLAS take; another card, another figure
CLOCKS = 16


@dataclass(frozen=True)
class Polled:
    """What polls saw, beside the truth. Bytes; `driver` is reserved bytes and the context.

    seconds, driver: the polls of a clock that starts with the program, one entry each.
    highest_driver: the highest figure polled, (least, most) over clocks that start otherwise.
    peak_driver: the true one.
    allocated_peaks_met: the share of steps whose peak of *allocated* a poll falls on, on average over all clocks.
    """

    seconds: list[float]
    driver: list[int]
    highest_driver: tuple[int, int]
    peak_driver: int
    allocated_peaks_met: float


def polled(
    done: Replay,
    ends: Sequence[int],
    step_seconds: float,
    every: float = 1.0,
) -> Polled:
    """Poll a replayed program every so many seconds.

    done: a trace put to an allocator. ends: the positions in it where steps end. The events of a step are spread evenly
    over its step_seconds.

    Raises ValueError for ends that do not rise within the trace, or no time at all.
    """
    if not (0 < every < math.inf and 0 < step_seconds < math.inf):
        raise ValueError(f"expected times above 0, found {every} between polls and {step_seconds} for a step")
    _check(done, ends)
    seconds = _spread(ends, step_seconds)
    driver = [reserved + CONTEXT_BYTES for reserved in done.reserved]
    clocks = [_look(seconds, seconds[ends[-1]], every, every * k / CLOCKS) for k in range(CLOCKS)]
    highest = [max((driver[i] for _, i in looks), default=0) for looks in clocks]
    return Polled(
        [at for at, _ in clocks[0]],
        [driver[i] for _, i in clocks[0]],
        (min(highest), max(highest)),
        max(driver[: ends[-1] + 1]),
        _peaks_met(done.allocated, ends, seconds, every),
    )


@dataclass(frozen=True)
class LeakSeen:
    """When a leak shows, in steps after the warm-up; None: not by the end. Bytes.

    growth_bytes: what a step adds to *allocated* at its end. slack_bytes: what was reserved by the end of the warm-up
    and is unused at the peak of the next step (below 0: that step needs more). allocated_after: the first step whose
    end holds more than the warm-up's. driver_after: the first in which more is reserved than in the warm-up's last.
    at_most: driver_after by the formula, the first step whose peak no longer fits into what was reserved:
    slack // growth + 2, or 1 where the slack is below 0. With a cache that is kept it is no later, and earlier as far
    as the slack is in pieces that requests do not fit. hidden_bytes: by how much *allocated* had risen when the
    driver's figure first moved (or by the end, if it did not).
    """

    growth_bytes: int
    slack_bytes: int
    allocated_after: int | None
    driver_after: int | None
    at_most: int
    hidden_bytes: int


def leak_seen(done: Replay, ends: Sequence[int], warm_up: int = 2) -> LeakSeen:
    """When the leak of a replayed program shows: in *allocated* at ends of steps, and in what is reserved.

    warm_up: steps after which a healthy run would hold the same at every end; the last of them is compared with.
    Raises ValueError for ends that do not rise within the trace or are too few, and for a program that does not grow.
    """
    _check(done, ends)
    if not 1 <= warm_up < len(ends):
        raise ValueError(f"expected a warm-up of 1 to {len(ends) - 1} steps of {len(ends)}, found {warm_up}")
    steps = list(pairwise((0, *ends)))[warm_up - 1 :]
    held = [done.allocated[stop] for _, stop in steps]
    reserved = [max(done.reserved[start + 1 : stop + 1]) for start, stop in steps]
    growth = (held[-1] - held[0]) // (len(held) - 1)
    if growth < 1:
        raise ValueError(f"expected a program that holds more after each step, found {growth} bytes a step")
    start, stop = steps[1]
    slack = reserved[0] - max(done.allocated[start + 1 : stop + 1])
    held_after, driver_after = (
        next((k for k, now in enumerate(level) if now > level[0]), None) for level in (held, reserved)
    )
    return LeakSeen(
        growth,
        slack,
        held_after,
        driver_after,
        at_most=slack // growth + 2 if slack >= 0 else 1,
        hidden_bytes=held[-1 if driver_after is None else driver_after] - held[0],
    )


def repeated(trace: Trace, ends: Sequence[int], steps: int) -> tuple[Trace, list[int]]:
    """A trace whose last step is done again until there are `steps`, and the ends of its steps.

    So a few metered steps stand for a long run: a storage dies in its step, in the next one, or never. Raises
    ValueError for fewer than three steps, and where the last two do not ask for the same, or free what is older.
    """
    if len(ends) < 3:
        raise ValueError(f"expected three steps or more, the first to warm up, found {len(ends)}")
    begun, ended = (list(trace[a:b]) for a, b in pairwise(ends[-3:]))
    born = [{name: i for i, (name, nbytes) in enumerate(step) if nbytes != FREE} for step in (begun, ended)]
    again = []
    for name, nbytes in ended:
        age = next((age for age, step in ((0, born[1]), (1, born[0])) if name in step), None)
        if nbytes == FREE and age is None:
            raise ValueError(f"expected steps that free what is at most a step old, found {name!r} freed in the last")
        again.append((age, born[1 - age][name], nbytes))
    sizes = [[nbytes for _, nbytes in step] for step in (begun, ended)]
    if sizes[0] != sizes[1]:
        raise ValueError("expected two steps at the end that ask for the same in the same order, found two that differ")
    longer, marks = list(trace[: ends[-1]]), list(ends)
    names = {(len(ends) - 1, i): name for name, i in born[1].items()}
    for step in range(len(ends), steps):
        for age, i, nbytes in again:
            name = names.get((step - age, i), ("again", step - age, i))
            longer.append((name, nbytes))
        marks.append(len(longer))
    return longer, marks


def _check(done: Replay, ends: Sequence[int]) -> None:
    if not ends or any(a >= b for a, b in pairwise((0, *ends))) or ends[-1] >= len(done.allocated):
        raise ValueError(
            f"expected ends of steps that rise, from 1 to {len(done.allocated) - 1}, positions in the trace; found "
            f"{list(ends[:3])} … {list(ends[-1:])}"
        )


def _spread(ends: Sequence[int], step_seconds: float) -> list[float]:
    """When each position is reached: a step's events at even distances, the last at its end."""
    seconds = [0.0]
    for step, (start, stop) in enumerate(pairwise((0, *ends))):
        seconds += [(step + (i - start) / (stop - start)) * step_seconds for i in range(start + 1, stop + 1)]
    return seconds


def _look(seconds: Sequence[float], stop: float, every: float, first: float) -> list[tuple[float, int]]:
    """The polls before `stop`: when, and the position that is reached by then."""
    count = max(0, math.ceil((stop - first) / every))
    return [(first + k * every, bisect_right(seconds, first + k * every) - 1) for k in range(count)]


def _peaks_met(figures: Sequence[int], ends: Sequence[int], seconds: Sequence[float], every: float) -> float:
    """The share of steps on whose peak a poll falls: of all starts of the clock, those that put one there."""
    met = 0.0
    for start, stop in pairwise((0, *ends)):
        peak = max(figures[start:stop])
        pieces = []
        for i in range(start, stop):
            low, high = seconds[i], seconds[i + 1]
            if figures[i] == peak and high > low:
                if high - low >= every:
                    pieces = [(0.0, every)]
                    break
                low, long = low % every, high - low
                pieces += [(low, min(low + long, every)), (0.0, max(0.0, low + long - every))]
        reach = 0.0
        for low, high in sorted(pieces):
            met += max(0.0, high - max(low, reach)) / every
            reach = max(reach, high)
    return met / len(ends)
