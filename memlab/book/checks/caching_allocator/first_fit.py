"""Exercise 4 of chapter 04: first fit over a list of holes, and what is freed joined with its neighbours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.units import GiB

Holes = list[tuple[int, int]]


def _first(holes: Holes, nbytes: int) -> int | None:
    """The right answer, in its place."""
    for i, (start, stop) in enumerate(holes):
        if stop - start >= nbytes:
            holes[i : i + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
            return start
    return None


def _joined(holes: Holes, address: int, nbytes: int) -> None:
    """The right answer, in its place: from the set of all edges, those that two holes share cancel out."""
    edges = [edge for hole in [*holes, (address, address + nbytes)] for edge in hole]
    edges = sorted(edge for edge in edges if edges.count(edge) == 1)
    holes[:] = zip(edges[::2], edges[1::2], strict=True)


def _shown(holes: Holes) -> str:
    return f"[{', '.join(map(str, holes[:6]))}{', …' if len(holes) > 6 else ''}]"


def _same(found: object, right: Holes, before: Holes, where: str) -> None:
    """Raise Wrong unless the list of holes, as it was before, has become what it should."""
    if not isinstance(found, list) or not all(isinstance(hole, (tuple, list)) and len(hole) == 2 for hole in found):
        raise Wrong(f"{where}: holes is no list of pairs (start, stop) any more.")
    holes = [tuple(hole) for hole in found]
    if not all(type(edge) is int for hole in holes for edge in hole):
        raise Wrong(f"{where}: expected addresses that are whole numbers (int), found {_shown(holes)}.")
    if holes == right:
        return
    look = f" Expected {_shown(right)}, found {_shown(holes)}."
    if holes == before:
        raise Wrong(f"{where}: the list is as it was; change it in place, as `holes[i] = …` does.{look}")
    more = sum(stop - start for start, stop in holes) - sum(stop - start for start, stop in right)
    if any(start >= stop for start, stop in holes):
        raise Wrong(f"{where}: a hole of no bytes is no hole; the list would grow for ever.{look}")
    if holes != sorted(holes):
        raise Wrong(f"{where}: the holes are not in the order of their addresses.{look}")
    if any(stop > start for (_, stop), (start, _) in pairwise(holes)):
        raise Wrong(f"{where}: two holes overlap, so the same bytes would be given out twice.{look}")
    if more:
        lost = "are free now and should be in use" if more > 0 else "are neither free nor in use: they are lost"
        raise Wrong(f"{where}: {abs(more):,} B {lost}.{look}")
    if any(stop == start for (_, stop), (start, _) in pairwise(holes)):
        raise Wrong(f"{where}: two holes touch; as one they would serve a larger request.{look}")
    raise Wrong(f"{where}: these are other holes than they should be.{look}")


def _trace(seed: int, most: int) -> Iterator[tuple[str, tuple[int, ...], Holes]]:
    """A random program on a card of 40 GiB: ("malloc", (nbytes,), holes) and ("free", (address, nbytes), holes)."""
    draw = random.Random(seed)
    holes, live = [(0, 40 * GiB)], []
    for _ in range(600):
        if live and draw.random() < 0.45:
            freed = live.pop(draw.randrange(len(live)))
            yield "free", freed, holes
            _joined(holes, *freed)
        else:
            nbytes = 512 * draw.randint(1, most)
            yield "malloc", (nbytes,), holes
            if (address := _first(holes, nbytes)) is not None:
                live.append((address, nbytes))
    while live:
        freed = live.pop(draw.randrange(len(live)))
        yield "free", freed, holes
        _joined(holes, *freed)


@exercise
def malloc(answer: object) -> str:
    """Exercise 4, first part: (holes, nbytes) → the start of the first hole that is large enough, which shrinks."""
    function = a_function(answer, "malloc(holes, nbytes)")
    for holes, nbytes in (
        ([(0, 4096)], 512),
        ([(0, 1024), (2048, 8192), (9216, 10240)], 1024),
        ([(512, 1024), (2048, 8192), (9216, 10240)], 1024),
        ([(512, 1024), (1536, 3072)], 1536),
        ([(512, 1024), (1536, 3072)], 2048),
        ([], 512),
    ):
        _gives(function, holes, nbytes)
    for seed, most in ((1, 40), (2, 2 * 10**6)):
        for action, sizes, holes in _trace(seed, most):
            if action == "malloc":
                _gives(function, holes, *sizes)
    return "What fits exactly leaves no hole, and what fits nowhere changes none."


def _gives(function: Callable, holes: Holes, nbytes: int) -> None:
    where = f"holes {_shown(holes)}, malloc(holes, {nbytes:,})"
    given, right = list(holes), list(holes)
    address = _first(right, nbytes)
    try:
        found = function(given, nbytes)
    except MemoryError as error:
        if not str(error):
            raise
        raise Wrong(f"{where}: expected {address}; you raise MemoryError: {error}") from None
    if found is not None and type(found) is not int:
        raise Wrong(f"{where}: expected an address (int) or None, found {type(found).__name__}.")
    if found != address:
        fits = [(stop - start, start, stop) for start, stop in holes if stop - start >= nbytes]
        if address is None:
            raise Wrong(f"{where}: expected None, since no hole is large enough; found {found:,}.")
        if found is None:
            exact = " It fits exactly." if fits[0][0] == nbytes else ""
            raise Wrong(f"{where}: expected {address:,}, found None.{exact}")
        small = [stop - start for start, stop in holes if start == found and stop - start < nbytes]
        look = ""
        if small:
            look = f" The hole there has {small[0]:,} B only."
        elif fits[0][0] == nbytes:
            look = " The first of them that will do fits exactly."
        elif found == min(fits)[1]:
            look = " That is best fit, the smallest hole. First fit takes the one at the lowest address."
        elif found == max(fits)[1]:
            look = " That is the largest hole. First fit takes the one at the lowest address."
        elif found == fits[0][2] - nbytes:
            look = " That is the high end of the hole; take the low one."
        raise Wrong(f"{where}: expected {address:,}, found {found:,}.{look}")
    _same(given, right, holes, f"{where} gives {found if found is None else format(found, ',')}; after it")


@exercise
def free(answer: object) -> str:
    """Exercise 4, second part: (holes, address, nbytes): the bytes are a hole, one with those that they touch."""
    function = a_function(answer, "free(holes, address, nbytes)")
    for holes, address, nbytes in (
        ([], 0, 512),
        ([(4096, 8192)], 0, 512),
        ([(0, 512)], 4096, 512),
        ([(0, 512), (4096, 8192)], 512, 1024),
        ([(0, 512), (4096, 8192)], 3072, 1024),
        ([(0, 512), (4096, 8192)], 512, 3584),
        ([(0, 512), (1024, 1536), (2048, 2560)], 1536, 512),
    ):
        _takes(function, holes, address, nbytes)
    for seed, most in ((3, 40), (4, 2 * 10**6)):
        for action, sizes, holes in _trace(seed, most):
            if action == "free":
                _takes(function, holes, *sizes)
    for holes, address, nbytes in (
        ([(0, 4096)], 0, 4096),
        ([(0, 4096)], 1024, 512),
        ([(0, 512), (4096, 8192)], 3584, 1024),
        ([(0, 512), (4096, 8192)], 8191, 512),
        ([(512, 1024), (4096, 8192)], 0, 16384),
    ):
        _refuses(function, holes, address, nbytes)
    return "When all is freed, one hole is left, whatever came before."


def _takes(function: Callable, holes: Holes, address: int, nbytes: int) -> None:
    where = f"holes {_shown(holes)}, after free(holes, {address:,}, {nbytes:,})"
    given, right = list(holes), list(holes)
    try:
        function(given, address, nbytes)
    except ValueError as error:
        raise Wrong(f"{where}: these bytes are in use, also where they touch a hole. You raise: {error}") from None
    _joined(right, address, nbytes)
    _same(given, right, holes, where)


def _refuses(function: Callable, holes: Holes, address: int, nbytes: int) -> None:
    where = f"holes {_shown(holes)}, free(holes, {address:,}, {nbytes:,})"
    given = list(holes)
    try:
        function(given, address, nbytes)
    except ValueError:
        _same(given, holes, [], f"{where} raises; after it")
    else:
        raise Wrong(
            f"{where}: some of these bytes are free already. Expected a ValueError: a program that frees twice "
            "will soon have two tensors in one place."
        )
