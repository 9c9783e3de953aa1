"""Made-up runs from a seed: what a step holds at its end and at its peak, with a leak or without.

A run is a list of (end, peak) in bytes. `leak(seed)` also says when its peak first reaches the budget.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

MIB = 2**20
BUDGET = 4096 * MIB


class Run(NamedTuple):
    """A made-up run. full_at: how many steps are over when the peak first reaches the budget; None if it never does."""

    kind: str
    noise: str
    steps: list[tuple[int, int]]
    budget_bytes: int
    full_at: int | None


def no_noise(rng: random.Random, steps: int, room: float) -> list[float]:
    return [0.0] * steps


def lengths(rng: random.Random, steps: int, room: float) -> list[float]:
    """The last batch is still held; lengths vary evenly."""
    size = room * rng.uniform(0.01, 0.1)
    return [size * rng.uniform(0.1, 1) for _ in range(steps)]


def heavy_tails(rng: random.Random, steps: int, room: float) -> list[float]:
    size = room * rng.uniform(0.005, 0.02)
    return [min(size * rng.paretovariate(1.5), room * 0.3) for _ in range(steps)]


def cycles(rng: random.Random, steps: int, room: float) -> list[float]:
    """Cycles wait for the garbage collector: a sawtooth."""
    period, height = rng.randint(10, min(150, steps // 4)), room * rng.uniform(0.02, 0.2)
    phase, found = rng.randrange(period), []
    for _ in range(steps):
        phase += 1
        if phase >= period:
            phase = 0
            period = max(3, round(period * rng.uniform(0.8, 1.25)))
        found.append(height * phase / period)
    return found


def evaluations(rng: random.Random, steps: int, room: float) -> list[float]:
    """Every so often much is held for some steps."""
    every, long = rng.randint(20, max(21, min(200, steps // 4))), rng.randint(1, 10)
    size = room * rng.uniform(0.05, 0.3)
    return [size if step % every < long and step > every else 0.0 for step in range(steps)]


NOISES = (no_noise, lengths, heavy_tails, cycles, evaluations)


def every_step(rng, steps):
    return [float(step) for step in range(1, steps + 1)]


def ever_rarer(rng, steps):
    """New keys come ever more rarely, but without end (Heaps' law)."""
    power, kept, found = rng.uniform(0.6, 0.9), 0.0, []
    for step in range(1, steps + 1):
        if rng.random() < power * step ** (power - 1):
            kept += rng.uniform(0.5, 1.5)
        found.append(kept)
    return found


def by_length(rng, steps):
    """What is kept is as long as the batch; lengths are like those of sentences."""
    kept, found = 0.0, []
    for _ in range(steps):
        kept += min(rng.lognormvariate(0, 0.8), 8)
        found.append(kept)
    return found


def begins_late(rng, steps):
    start = rng.randint(steps // 5, steps // 2)
    return [float(max(0, step - start)) for step in range(1, steps + 1)]


def in_segments(rng, steps):
    """A leak seen through *reserved* or resident bytes: rounded up to segments."""
    segment = steps / rng.randint(12, 60)
    return [math.ceil(step / segment) * segment for step in range(1, steps + 1)]


def stacked(rng, steps):
    """Outputs that are kept, and stacked at each step: the peak rises by twice as much."""
    return every_step(rng, steps)


LEAKS = (every_step, ever_rarer, by_length, begins_late, in_segments, stacked)


def flat(rng, steps):
    return [1.0] * steps


def saturating(rng, steps):
    """A cache over a finite set of shapes: the coupon collector's."""
    shapes = rng.randint(5, 400)
    seen, found = set(), []
    skew = rng.uniform(0.5, 2.5)
    for _ in range(steps):
        seen.add(int(shapes * rng.random() ** skew))
        found.append(len(seen) / shapes)
    return found


def bounded_cache(rng, steps):
    """An LRU cache: it fills evenly up to its capacity."""
    full = steps * rng.uniform(0.02, 0.7)
    return [min(1.0, step / full) for step in range(steps)]


def curriculum(rng, steps):
    start, long = steps * rng.uniform(0, 0.4), steps * rng.uniform(0.05, 0.5)
    return [min(1.0, max(0.0, (step - start) / long)) for step in range(steps)]


def jumps(rng, steps):
    """One to three jumps: a copy of the weights begun, layers unfrozen."""
    count = rng.randint(1, 3)
    if rng.random() < 0.5:
        at = [steps * (k + 1) / (count + 2) for k in range(count)]
    else:
        at = [rng.uniform(0, steps) for _ in range(count)]
    return [sum(step >= a for a in at) / count for step in range(steps)]


def floats(rng, steps):
    """A list of Python floats: a true growth, and no run is long enough."""
    return [step * 32 / (1024 * MIB) for step in range(steps)]


CLEANS = (flat, saturating, bounded_cache, curriculum, jumps, floats)


def leak(seed: int, kind=None, noise=None) -> Run:
    """A run with a leak that fills the budget after 60 to 4000 steps or so."""
    rng = random.Random(f"leak {seed}")
    kind, noise = kind or LEAKS[seed % len(LEAKS)], noise or NOISES[seed // len(LEAKS) % len(NOISES)]
    steps = round(math.exp(rng.uniform(math.log(150), math.log(4000))))
    kept = kind(rng, steps)
    follows = 1.0 if kind is stacked else 0.0
    run, _ = _run(rng, kept, noise, rng.uniform(0.05, 0.5), lambda before: BUDGET, follows)
    full_at = next(step for step, (_, peak) in enumerate(run, start=1) if peak >= BUDGET)
    return Run(kind.__name__, noise.__name__, run[:full_at], BUDGET, full_at)


def clean(seed: int, kind=None, noise=None, most: float = 0.5) -> Run:
    """A run without a leak. most: what its peak rises by, of the way to 80 % of the budget, is this share at most."""
    rng = random.Random(f"clean {seed}")
    kind, noise = kind or CLEANS[seed % len(CLEANS)], noise or NOISES[seed // len(CLEANS) % len(NOISES)]
    steps = round(math.exp(rng.uniform(math.log(150), math.log(6000))))
    follows = rng.uniform(3, 10) if kind is curriculum else 0.0
    share = rng.uniform(0.05, most) / (1 + follows)
    kept = kind(rng, steps)
    run, _ = _run(rng, kept, noise, rng.uniform(0.05, 0.5), lambda before: (0.8 * BUDGET - before) * share, follows)
    return Run(kind.__name__, noise.__name__, run, BUDGET, None)


def _run(rng, kept, noise, base, keeps, follows=0.0):
    """keeps: from the highest peak without a leak, how many bytes the greatest of `kept` is."""
    room = BUDGET * (1 - base)
    above, transient = noise(rng, len(kept), room), room * rng.uniform(0.02, 0.1)
    twice, states = rng.choice([1.0, 2.0]), rng.choice([0.0, 0.6])
    before = BUDGET * base + transient + twice * max(above)
    scale = keeps(before) / max(max(kept), 1e-9)
    run = []
    for step, (k, a) in enumerate(zip(kept, above, strict=True)):
        held = BUDGET * base * (1 - states * (step == 0)) + k * scale
        run.append((int(held + a), int(held + transient + twice * a + follows * k * scale)))
    return run, before
