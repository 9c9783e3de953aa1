"""Exercise 1 of chapter 05: how many more steps a run that grows will live through."""

from __future__ import annotations

import math

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.units import GiB, KiB, MiB, parse_bytes

_CASES = (  # end, peak, growth a step, budget
    (9 * GiB, 14 * GiB, 2 * MiB, "16 GiB"),
    (9 * GiB, 14 * GiB, 2 * MiB, "16 GB"),
    (5_000_000_001, 21_345_678_901, 777_777, "24 GB"),
    (5_000_000_001, 21_345_678_901, 777_777, "24 GiB"),
    (1 * GiB, 3 * GiB, 1 * KiB, 80_000_000_000),
    (1 * GiB, 3 * GiB, 1, "4 GiB"),
    (100, 1000, 300, 1900),
    (100, 1000, 300, 1899),
    (100, 1000, 1000, 1999),
    (100, 1000, 7, 1000),
    (9 * GiB, 14 * GiB, 0, "16 GiB"),
    (9 * GiB, 14 * GiB, -3 * MiB, "16 GiB"),
)


@exercise
def steps_left(answer: object) -> str:
    """Exercise 1: (end_bytes, peak_bytes, growth_bytes, budget) → steps whose peaks still fit; math.inf for all."""
    function = a_function(answer, "steps_left(end_bytes, peak_bytes, growth_bytes, budget)")
    for case in _CASES:
        _counted(function(*case), case)
    end, peak, growth, budget = _CASES[0]
    late = (parse_bytes(budget) - end) // growth
    found = _right(_CASES[0])
    return f"{found:,} steps; whoever looks at what is held between steps expects {late:,}."


def _right(case: tuple[int, int, int, int | str]) -> int | float:
    _, peak, growth, budget = case
    return (parse_bytes(budget) - peak) // growth if growth > 0 else math.inf


def _counted(found: object, case: tuple[int, int, int, int | str]) -> None:
    end, peak, growth, budget = case
    name, right = f"steps_left({end:,}, {peak:,}, {growth:,}, {budget!r})", _right(case)
    if right == math.inf:
        if type(found) is not float or found != math.inf:
            raise Wrong(f"{name}: expected math.inf, found {str(found)[:40]}. What does not grow is never full.")
        return
    if type(found) is not int:
        raise Wrong(f"{name}: expected a whole number of steps (int), found {type(found).__name__} {str(found)[:40]}.")
    if found == right:
        return
    nbytes, other = parse_bytes(budget), parse_bytes(budget)
    if isinstance(budget, str):
        other = parse_bytes(budget.replace("GiB", "GB") if "GiB" in budget else budget.replace("GB", "GiB"))
    looks = {  # the last of equals counts
        right - 1: "One too few: a peak of exactly the budget still fits.",
        right + 1: "One too many: that step's peak is above the budget.",
        nbytes // growth: "That is from an empty card.",
        (other - peak) // growth: "A GiB has 2**30 bytes, a GB 10**9: `parse_bytes` knows them all.",
        (nbytes - end) // growth: "At its *end* a step holds little; the run dies at a *peak*.",
    }
    many = "too many" if found > right else "too few"
    raise Wrong(f"{name}: {found:,} steps are {many}. {looks.get(found, 'Step k from here has a peak k growths up.')}")
