"""Exercise 5 of chapter 07: batches by tokens, cut greedily, none above the budget."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import torch

from memlab.book.checks.answers import Wrong, a_function, exercise, plain
from memlab.book.workloads import lengths
from memlab.memory_timeline import Meter
from memlab.units import format_bytes

_LENGTHS = {
    "five texts": ((3, 9, 4, 9, 2), (9, 12, 18, 100)),
    "texts of one length": ((6,) * 7, (6, 12, 13, 41, 42)),
    "one text": ((5,), (5, 6)),
    "no texts": ((), (8,)),
}
_TOO_LONG = {  # lengths, max_tokens, which of them are too long
    "the last": ((3, 4, 5, 90), 16, {3}),
    "one in the middle": ((5, 5, 5, 5, 5, 5, 5, 17, 5, 5), 16, {7}),
    "two of them": ((40, 2, 4, 2, 60), 30, {0, 4}),
    "one alone": ((11,), 10, {0}),
}


@functools.cache
def _asked() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return _LENGTHS | {"the 1,024 lengths of the book's list": (lengths(), (max(lengths()), 4096, 16384))}


@exercise
def token_batches(answer: object) -> str:
    """Exercise 5: (lengths, max_tokens) → lists of indices, by length, rows × longest ≤ max_tokens, cut greedily."""
    function = a_function(answer, "token_batches(lengths, max_tokens)")
    for name, (asked, budgets) in _asked().items():
        for budget in budgets:
            where = f"{name}, max_tokens = {budget:,}"
            _cut_right(_batches(function, asked, budget, where), asked, budget, where)
    for name, (asked, budget, too_long) in _TOO_LONG.items():
        where = f"lengths {list(asked)}, max_tokens = {budget}, {name} too long"
        try:
            function(list(asked), budget)
        except ValueError as error:
            if not {int(number) for number in re.findall(r"\d+", str(error))} & too_long:
                named = " or ".join(map(str, sorted(too_long)))
                raise Wrong(f"{where}: expected a ValueError that names its index, {named}; it says: {error}") from None
        else:
            raise Wrong(f"{where}: expected a ValueError. It fits into no batch, and who left it out would never know.")
    return _praise(function)


def _batches(function: Callable, asked: Sequence[int], budget: int, where: str) -> list[list[int]]:
    given = list(asked)
    try:
        found = function(given, budget)
    except ValueError as error:
        longest = max(asked, default=0)
        raise Wrong(f"{where}: each fits, also the longest, of {longest:,} tokens. You raise: {error}") from None
    if given != list(asked):
        raise Wrong(f"{where}: your function has changed the list of lengths; who knows then which text is which?")
    if not isinstance(found, list) or not all(isinstance(batch, list) for batch in found):
        raise Wrong(f"{where}: expected a list of lists of indices, found {type(found).__name__}.")
    found = [list(map(plain, batch)) for batch in found]
    if not all(type(index) is int for batch in found for index in batch):
        raise Wrong(f"{where}: expected indices (int) in the batches.")
    return found


def _cut_right(found: list[list[int]], asked: Sequence[int], budget: int, where: str) -> None:
    """Raise Wrong unless the batches hold every index once, by length, within the budget, and none too early cut."""
    if [] in found:
        raise Wrong(f"{where}: batch {found.index([])} is empty.")
    indices = [index for batch in found for index in batch]
    if sorted(indices) != list(range(len(asked))):
        missing = sorted(set(range(len(asked))) - set(indices))
        twice = sorted({index for index in indices if indices.count(index) > 1})[:5]
        other = sorted(set(indices) - set(range(len(asked))))[:5]
        what = f"{len(missing)} missing (such as {missing[0]})" if missing else f"more than once: {twice}"
        what = f"{other} are no indices" if other else what
        raise Wrong(f"{where}: expected every index exactly once; {what}.")
    for number, batch in enumerate(found):
        longest = max(asked[index] for index in batch)
        if len(batch) * longest > budget:
            filled = sum(asked[index] for index in batch)
            look = " Padding needs memory, too." if filled <= budget else ""
            raise Wrong(
                f"{where}: batch {number} has {len(batch)} rows, the longest of {longest:,} tokens: as a tensor that "
                f"is {len(batch) * longest:,} tokens.{look}"
            )
    order = [asked[index] for index in indices]
    if order != sorted(order) and order != sorted(order, reverse=True):
        raise Wrong(
            f"{where}: the texts are not in the order of their lengths, so they are padded more than they need."
        )
    for number, (batch, following) in enumerate(zip(found, found[1:], strict=False)):
        longest = max(asked[index] for index in [*batch, following[0]])
        if (len(batch) + 1) * longest <= budget:
            raise Wrong(
                f"{where}: batch {number} of {len(batch)} rows was cut too early: with the next text it would be "
                f"{len(batch) + 1} × {longest:,} = {(len(batch) + 1) * longest:,} tokens, which is allowed."
            )


def _praise(function: Callable) -> str:
    asked, budget = lengths(), 16384
    batches = function(list(asked), budget)
    padded = [(len(batch), max(asked[index] for index in batch)) for batch in batches]
    with Meter() as meter:
        for rows, longest in padded:
            torch.zeros(rows, longest, dtype=torch.int64)
    waste = 1 - sum(asked) / sum(rows * longest for rows, longest in padded)
    return (
        f"{len(batches)} batches of at most {format_bytes(meter.timeline.peak_bytes)}, and {waste:.1%} padding; 32 "
        f"texts at a time, in the list's own order, waste {_fixed_waste(asked, 32):.0%}."
    )


def _fixed_waste(asked: Sequence[int], rows: int) -> float:
    cut = [asked[i : i + rows] for i in range(0, len(asked), rows)]
    return 1 - sum(asked) / sum(len(part) * max(part) for part in cut)
