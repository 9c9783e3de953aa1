"""Exercise 3 of chapter 05: the growth of a floor, beneath what comes and goes."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from memlab.book.checks.answers import Wrong, a_function, exercise, plain
from memlab.units import GiB, KiB, MiB, format_bytes

_NEAR, _FLAT_BYTES = 0.1, 1 * KiB


class _Run(NamedTuple):
    """A series of ends: what is kept grows by `growth` a step; every `period` steps at least one holds no more."""

    name: str
    growth: int
    period: int
    steps: int
    tooth: int = 0  # by so much a step, what waits for the collector grows, up to its next turn
    held: int = 0  # what other steps hold besides, at most
    warm: int = 0  # what comes or, below zero, goes in the first quarter
    regular: bool = True

    def ends(self) -> list[int]:
        """Bytes at the end of each step."""
        draw, found, since = random.Random(self.name), [], 0
        turn = self.period
        for n in range(self.steps):
            since += 1
            clean = since >= turn
            if clean:
                since, turn = 0, self.period if self.regular else draw.randint(self.period // 2, self.period)
            warm = self.warm * min(1.0, 4 * n / self.steps)
            besides = 0 if clean else self.held // 4 + draw.randrange(self.held) if self.held else 0
            found.append(2 * GiB + int(warm) + self.growth * n + self.tooth * since + besides)
        return found


_RUNS = (
    _Run("a leak of 1 MiB a step", 1 * MiB, 20, 400, 4 * MiB, 60 * MiB, 700 * MiB),
    _Run("a clean run with a saw", 0, 20, 400, 4 * MiB, 60 * MiB, 700 * MiB),
    _Run("a clean run that ends in a tooth", 0, 50, 449, 3 * MiB),
    _Run("a clean run that needed much at first", 0, 10, 200, 1 * MiB, 8 * MiB, -900 * MiB),
    _Run("a slow leak under much noise", 300 * KiB, 16, 512, 2 * MiB, 900 * MiB, 100 * MiB, False),
    _Run("a clean run under much noise", 0, 16, 512, 2 * MiB, 900 * MiB, 100 * MiB, False),
    _Run("a leak without any noise", 4096, 1, 100),
    _Run("a run that lets go", -500 * KiB, 12, 360, 3 * MiB, 40 * MiB, 300 * MiB),
    _Run("a leak, and a last period that is cut off", 2 * MiB, 30, 505, 5 * MiB, 30 * MiB, 2 * GiB, False),
)


@exercise
def floor_growth(answer: object) -> str:
    """Exercise 3: (ends, period) → bytes a step by which what is kept grows, within 10 % or 1 KiB."""
    function = a_function(answer, "floor_growth(ends, period)")
    for run in _RUNS:
        ends = run.ends()
        given = list(ends)
        found = plain(function(given, run.period))
        if given != ends:
            raise Wrong(f"{run.name}: your function has changed the list of ends.")
        if type(found) not in (int, float) or not math.isfinite(found):
            raise Wrong(f"{run.name}: expected bytes a step, a number, found {type(found).__name__} {str(found)[:40]}.")
        if abs(found - run.growth) > max(_NEAR * abs(run.growth), _FLAT_BYTES):
            raise Wrong(
                f"{run.name}, {run.steps} steps, period {run.period}: you have {found:,.0f} B a step, but what is kept "
                f"grows by {run.growth:,}.{_look(found, ends, run)}"
            )
    ends = _RUNS[1].ends()
    naive = (ends[-1] - ends[0]) // (len(ends) - 1)
    return f"From its first step to its last, a clean run seems to grow by {format_bytes(naive)} a step."


def _look(found: float, ends: list[int], run: _Run) -> str:
    if math.isclose(found, (ends[-1] - ends[0]) / (len(ends) - 1), rel_tol=0.02):
        return " The first step is of the warm-up, and who says that the last one holds nothing else?"
    if run.growth and math.isclose(found, run.growth * run.period, rel_tol=_NEAR):
        return " That is for each period."
    for unit in (KiB, MiB):
        if run.growth and math.isclose(found * unit, run.growth, rel_tol=_NEAR):
            return " Bytes were asked for."
    for factor, part in ((2, "half"), (4, "a quarter"), (8, "an eighth")):
        if run.growth and math.isclose(found, run.growth * factor, rel_tol=0.02):
            return f" That is {factor} times as much. How many steps is one floor from the next?"
        if run.growth and math.isclose(found * factor, run.growth, rel_tol=0.02):
            return f" That is {part} of it. How many steps is one floor from the next?"
    if not run.growth:
        return " It is clean: leave out the warm-up, and of each period let only the lowest step count."
    return " Of each period only the lowest step counts, and none of the first quarter."
