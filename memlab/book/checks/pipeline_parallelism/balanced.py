"""Exercise 6 of chapter 15: layers cut into stages by the bytes that each rank will hold, in flight and once."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.units import format_bytes


class _Case(NamedTuple):
    """What each layer holds, once and for each micro-batch in flight, in bytes."""

    name: str
    static: list[int]
    saved: list[int]
    stages: int
    micro_batches: int

    def held(self, cuts: list[tuple[int, int]]) -> list[int]:
        """Bytes on each rank under 1F1B."""
        flights = (min(self.stages - stage, self.micro_batches) for stage in range(self.stages))
        return [
            sum(self.static[begin:end]) + flight * sum(self.saved[begin:end])
            for (begin, end), flight in zip(cuts, flights, strict=True)
        ]

    def best(self) -> int:
        """The least that the fullest rank can hold, by trying all cuts."""
        layers = len(self.static)
        tried = ((0, *inner, layers) for inner in combinations(range(1, layers), self.stages - 1))
        return min(max(self.held(list(zip(borders, borders[1:], strict=False)))) for borders in tried)

    def __str__(self) -> str:
        return f"{self.name} ({len(self.static)} layers, {self.stages} stages, {self.micro_batches} micro-batches)"


_MIB = 2**20


def _cases() -> list[_Case]:
    mib = lambda *numbers: [number * _MIB for number in numbers]  # noqa: E731
    return [
        _Case("equal layers", mib(*[10] * 12), mib(*[10] * 12), 4, 8),
        _Case("an embedding, blocks, a head", mib(300, *[40] * 10, 300), mib(1, *[24] * 10, 80), 4, 8),
        _Case("activations alone", mib(*[0] * 12), mib(*[16] * 12), 4, 16),
        _Case("parameters alone", mib(9, 1, 1, 1, 9, 1, 1, 1, 9), mib(*[0] * 9), 3, 6),
        _Case("few micro-batches", mib(*[10] * 9), mib(*[30] * 9), 3, 1),
        _Case("as many stages as layers", mib(1, 2, 3, 4), mib(4, 3, 2, 1), 4, 4),
        _Case("one stage", mib(1, 2, 3), mib(1, 1, 1), 1, 4),
        _Case(
            "layers of all sizes", mib(7, 3, 19, 2, 2, 31, 5, 8, 1, 13, 4), mib(2, 11, 3, 8, 1, 5, 9, 2, 7, 3, 20), 5, 3
        ),
    ]


@exercise
def cuts(answer: object) -> str:
    """Exercise 6: (static_bytes, saved_bytes, stages, micro_batches) → [(begin, end)], one pair a stage."""
    function = a_function(answer, "cuts(static_bytes, saved_bytes, stages, micro_batches)")
    for case in _cases():
        given = list(case.static), list(case.saved)
        _least(function(*given, case.stages, case.micro_batches), case)
        if given != (case.static, case.saved):
            raise Wrong(f"{case}: the cuts are right, and your function has changed the lists that it was given.")
    case = _cases()[1]
    equal = max(case.held([(0, 3), (3, 6), (6, 9), (9, 12)]))
    return (
        f"{case.name}: {format_bytes(case.best())} on the fullest rank; with three layers each, {format_bytes(equal)}."
    )


def _least(found: object, case: _Case) -> None:
    if not isinstance(found, (list, tuple)):
        raise Wrong(f"{case}: expected a list of pairs (begin, end), found {type(found).__name__}.")
    pairs = []
    for pair in found:
        if isinstance(pair, range):
            pair = (pair.start, pair.stop)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or any(type(number) is not int for number in pair):
            raise Wrong(f"{case}: expected pairs (begin, end) of whole numbers, found {str(pair)[:40]}.")
        pairs.append(tuple(pair))
    if len(pairs) != case.stages:
        raise Wrong(f"{case}: expected {case.stages} pairs, found {len(pairs)}.")
    at = 0
    for stage, (begin, end) in enumerate(pairs):
        if begin != at:
            raise Wrong(
                f"{case}: stage {stage} begins with layer {begin}; expected {at}, the one after the stage before."
            )
        if end <= begin:
            raise Wrong(f"{case}: stage {stage} has no layer; every stage needs one.")
        at = end
    if at != len(case.static):
        raise Wrong(
            f"{case}: the last stage ends before layer {at}; there are {len(case.static)}. `end` is not included."
        )
    held, best = case.held(pairs), case.best()
    if max(held) > best:
        fullest = held.index(max(held))
        raise Wrong(
            f"{case}: rank {fullest} holds {format_bytes(held[fullest])}; cut elsewhere, no rank holds more than "
            f"{format_bytes(best)}. A stage's saved bytes count once for each micro-batch that "
            "1F1B has in flight there: not for all, and on the first stage for more than on the last."
        )
