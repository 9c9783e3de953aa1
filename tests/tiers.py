"""Two tiers of tests: what runs by default, and what `-m thorough` adds.

A fixed subset of the cases runs by default. The other cases carry the marker `thorough`: pyproject.toml deselects it.
Nothing here depends on the date or on the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest


def some(names: str, cases: Iterable, keep: int) -> pytest.MarkDecorator:
    """parametrize over all cases, of which `keep`, spread evenly over the list, run by default.

    >>> [len(case.marks) for case in some("n", range(5), keep=2).args[1]]
    [0, 1, 1, 1, 0]
    """
    cases = list(cases)
    last = max(len(cases) - 1, 1)
    kept = {round(i * last / max(keep - 1, 1)) for i in range(keep)} if keep < len(cases) else range(len(cases))
    alone = len(names.split(",")) == 1
    return pytest.mark.parametrize(
        names, [_param((case,) if alone else case, i in kept) for i, case in enumerate(cases)]
    )


def pairs(names: str, *axes: Iterable) -> pytest.MarkDecorator:
    """parametrize over the product of the axes. By default few cases run: any two values of two axes meet in one.

    >>> cases = pairs("a, b, c", "xy", "xy", "xy").args[1]
    >>> ["".join(case.values) for case in cases if not case.marks], len(cases)
    (['xxx', 'xyy', 'yxy', 'yyx'], 8)
    """
    product = list(itertools.product(*map(list, axes)))
    meetings = {i: {(a, b, repr(case[a]), repr(case[b])) for a, b in _couples(case)} for i, case in enumerate(product)}
    missing, kept = set().union(*meetings.values()), set()
    while missing:
        best = max(meetings, key=lambda i: (len(meetings[i] & missing), -i))
        kept.add(best)
        missing -= meetings[best]
    return pytest.mark.parametrize(names, [_param(case, i in kept) for i, case in enumerate(product)])


def _couples(case: tuple) -> Iterable[tuple[int, int]]:
    return itertools.combinations(range(len(case)), 2) if len(case) > 1 else [(0, 0)]


def _param(case: Iterable, by_default: bool):
    return pytest.param(*case, marks=() if by_default else pytest.mark.thorough)
