"""Exercise 2 of chapter 13: whose an element is, and what travels when the number of ranks changes."""

from __future__ import annotations

import itertools

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of
from memlab.book.checks.memory_arithmetic.sizes import NoTensors

_SIZES = [(12, 4), (10, 4), (10, 1), (3, 5), (7, 3), (1000, 48), (1, 1), (31, 8), (9, 6)]
_CHANGES = [
    (12, 2, 4),
    (10, 4, 6),
    (10, 6, 4),
    (10, 4, 4),
    (7, 1, 3),
    (7, 3, 1),
    (3, 5, 2),
    (3, 2, 5),
    (9, 6, 7),
    (1000, 8, 12),
    (1000, 12, 8),
    (1, 1, 1),
]


@exercise
def owner(answer: object) -> str:
    """Exercise 2, first part: (index, numel, ranks) → the rank whose piece has the element, and its place there."""
    function = a_function(answer, "owner(index, numel, ranks)")
    for numel, ranks in _SIZES:
        piece = -(-numel // ranks)
        for index in range(numel):
            with NoTensors():
                found = function(index, numel, ranks)
            where = f"owner({index}, {numel}, {ranks})"
            if not isinstance(found, (tuple, list)) or [type(n) for n in found] != [int, int]:
                raise Wrong(f"{where}: expected a pair (rank, place) of two int, found {str(found)[:60]}.")
            if tuple(found) != divmod(index, piece):
                raise Wrong(f"{where}: {_look(tuple(found), index, numel, ranks)}")
    return "Nobody needs a table: whose an element is, each rank can tell alone."


def _look(found: tuple[int, int], index: int, numel: int, ranks: int) -> str:
    piece = -(-numel // ranks)
    due = divmod(index, piece)
    if found == due[::-1]:
        return "the rank first, then the place in its piece."
    if not 0 <= found[0] < ranks:
        return f"there is no rank {found[0]}; the ranks are 0 to {ranks - 1}. Is a piece of ⌈{numel} / {ranks}⌉?"
    if found == (due[0], index):
        return f"the rank is right; the place is counted from where its piece begins, not from 0: {due[1]}."
    if found == (index % ranks, index // ranks):
        return "that deals elements out like cards; here a rank's piece is contiguous."
    return (
        f"expected {due}, found {found}: pieces are of ⌈{numel} / {ranks}⌉ = {piece} elements, rank 0's first, and "
        "what is missing is missing at the end."
    )


def _owned(rank: int, numel: int, ranks: int) -> range:
    piece = -(-numel // ranks)
    return range(min(rank * piece, numel), min((rank + 1) * piece, numel))


@exercise
def moves(answer: object) -> str:
    """Exercise 2, second part: (numel, before, after) → (source, target, begin, end) of each message."""
    function = a_function(answer, "moves(numel, before, after)")
    for numel, before, after in _CHANGES:
        with NoTensors():
            found = function(numel, before, after)
        _resharded(found, numel, before, after, f"moves({numel}, {before}, {after})")
    sent = sum(end - begin for *_, begin, end in function(1000, 8, 12))
    return f"From 8 ranks to 12, {4 * sent:,} of 4,000 B travel; gathering all everywhere would be {4 * 1000 * 11:,}."


def _resharded(found: object, numel: int, before: int, after: int, where: str) -> None:
    """Carry the messages out, and look at what every rank has then."""
    if not isinstance(found, (list, tuple, set, frozenset)):
        raise Wrong(f"{where}: expected a list of messages, found {kind_of(found)}.")
    has = [set(_owned(rank, numel, before)) & set(_owned(rank, numel, after)) for rank in range(after)]
    has = [set(_owned(rank, numel, after)) & mine if rank < before else set() for rank, mine in enumerate(has)]
    fewest = 0
    for source, target in itertools.product(range(before), range(after)):
        common = set(_owned(source, numel, before)) & set(_owned(target, numel, after))
        fewest += source != target and bool(common)
    for message in found:
        if not isinstance(message, (tuple, list)) or [type(n) for n in message] != [int] * 4:
            raise Wrong(
                f"{where}: expected messages (source, target, begin, end) of four int, found {str(message)[:60]}."
            )
        source, target, begin, end = message
        what = f"{where}: the message ({source}, {target}, {begin}, {end})"
        if not 0 <= source < before or not 0 <= target < after:
            raise Wrong(f"{what} names a rank that is not there; {before} ranks were before, and {after} are after.")
        if begin >= end:
            raise Wrong(f"{what} is empty; whoever has nothing to send sends nothing.")
        if end > numel:
            raise Wrong(f"{what} sends padding: the last of {numel} elements is number {numel - 1}.")
        if source == target:
            raise Wrong(f"{what} goes from a rank to itself; what it has, it keeps.")
        mine, due = _owned(source, numel, before), _owned(target, numel, after)
        if begin < mine.start or end > mine.stop:
            held = f"elements {mine.start} to {mine.stop - 1}" if mine else "nothing"
            raise Wrong(f"{what} sends what rank {source} does not have. Before, it holds {held}.")
        if begin < due.start or end > due.stop:
            wants = f"elements {due.start} to {due.stop - 1}" if due else "nothing"
            raise Wrong(f"{what} brings what rank {target} does not hold afterwards; it wants {wants}.")
        if has[target] & set(range(begin, end)):
            raise Wrong(f"{what} brings rank {target} what another message has brought.")
        has[target] |= set(range(begin, end))
    for rank in range(after):
        if missing := sorted(set(_owned(rank, numel, after)) - has[rank]):
            raise Wrong(f"{where}: nobody sends element {missing[0]} to rank {rank}, which holds it afterwards.")
    if len(found) > fewest:
        raise Wrong(f"{where}: all arrives, in {len(found)} messages; {fewest} do, one for each pair of ranks.")
