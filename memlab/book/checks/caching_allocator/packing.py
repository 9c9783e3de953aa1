"""Exercise 6 of chapter 04: a static plan, every request at an offset of its own for all its life."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.caching_allocator.levels import training
from memlab.caching_allocator import requests
from memlab.caching_allocator.managers import aligned
from memlab.caching_allocator.static_plan import lifetimes
from memlab.units import KiB, format_bytes

Request = tuple[int, int, int]  # start, stop, nbytes
_ABOVE = 1.02
_SHUFFLED = "training, in another order"


def _training(features: int, width: int, layers: int, batches: tuple[int, ...]) -> list[Request]:
    """What an MLP's training asks for."""
    trace = requests(training(features, width, layers, batches))
    return [(r.start, r.stop, aligned(r.nbytes)) for r in lifetimes(trace)]


def _cache(tokens: int, caches: int, entry: int) -> list[Request]:
    """Caches that are made anew for every token, an entry longer each time."""
    return [
        (token * caches + i, token * caches + i + caches + 1, (64 + token) * entry)
        for token in range(tokens)
        for i in range(caches)
    ]


@functools.cache
def _programs() -> dict[str, list[Request]]:
    """Those that must be packed well."""
    trained, cache = _training(300, 900, 4, (500, 700, 900)), _cache(40, 4, 16 * KiB)
    shuffled = random.Random(0).sample(trained, len(trained))
    return {
        "one after the other": [(3, 7, 1024), (7, 9, 1024), (0, 3, 512), (9, 30, 1024)],
        "all at once": [(0, 9, 512 * n) for n in range(1, 9)],
        "training": trained,
        _SHUFFLED: shuffled,
        "a training that you have not seen": _training(200, 1100, 3, (300, 1000)),
        "cache": cache,
        "another cache": _cache(25, 6, 512),
    }


def _random(seed: int) -> list[Request]:
    draw = random.Random(seed)
    starts = [draw.randrange(100) for _ in range(80)]
    return [(start, start + draw.randint(1, 30), 512 * draw.randint(1, 300)) for start in starts]


@exercise
def offsets(answer: object) -> str:
    """Exercise 6: (requests) → an offset for each; valid on any, within 2 % of the lower bound on the programs."""
    function = a_function(answer, "offsets(requests)")
    for name, asked in {"no requests": [], "one request": [(0, 1, 512)]}.items():
        _valid(function, asked, name)
    over = [(name, asked, _valid(function, asked, name)) for name, asked in _programs().items()]
    for seed in range(5):
        _valid(function, _random(seed), f"80 random requests (seed {seed})")
    for name, asked, peak in over:
        bound = _bound(asked)
        if peak > _ABOVE * bound:
            look = " Which requests should be placed first? And is every gap used, also one that fits exactly?"
            if peak == sum(nbytes for *_, nbytes in asked):
                look = " Every request has bytes of its own. Those that are never alive together may share."
            elif name == "one after the other":
                look = " A request that ends at 7 and one that begins at 7 are never alive together."
            elif name == _SHUFFLED:  # in the order of the training it has passed
                look = (
                    " These are the training's requests, listed in another order, and there your plan was low enough: "
                    "of equally large ones, which is placed first? Let their lives decide, not the list."
                )
            elif "cache" in name:
                look = " Does your order of placing suit this program? Try another one, and return the lower plan."
            raise Wrong(
                f"{name}: the plan takes {format_bytes(peak)}, {peak / bound:.3f} times the lower bound of "
                f"{format_bytes(bound)}; at most {_ABOVE} is allowed.{look}"
            )
    worst = max(peak / _bound(asked) for _, asked, peak in over)
    return f"No two in one place, and at most {worst:.3f} times the lower bound."


def _bound(asked: list[Request]) -> int:
    """The most bytes alive at one moment."""
    return max(sum(n for start, stop, n in asked if start <= at < stop) for at, *_ in asked)


def _valid(function: Callable, asked: list[Request], where: str) -> int:
    """The plan's peak. Raises Wrong unless every request has a place of its own for all its life."""
    given = list(asked)
    found = function(given)
    if given != asked:
        raise Wrong(f"{where}: your function has changed the list of requests; offsets follow its order.")
    if not isinstance(found, list) or len(found) != len(asked):
        what = f"{len(found)} of them" if isinstance(found, list) else type(found).__name__
        raise Wrong(f"{where}: expected a list of {len(asked)} offsets, found {what}.")
    for number, offset in enumerate(found):
        if type(offset) is not int:
            raise Wrong(f"{where}: expected whole numbers of bytes (int), found {type(offset).__name__}.")
        if offset < 0 or offset % 512:
            raise Wrong(f"{where}: request {number} is at {offset:,}; expected a multiple of 512 B, 0 or more.")
    at_start = sorted(range(len(asked)), key=lambda i: asked[i][0])
    alive: list[int] = []
    for i in at_start:
        start, _, nbytes = asked[i]
        alive = [j for j in alive if asked[j][1] > start]
        for j in alive:
            if found[i] < found[j] + asked[j][2] and found[j] < found[i] + nbytes:
                raise Wrong(
                    f"{where}: requests {min(i, j)} and {max(i, j)} overlap: (start, stop, nbytes) {asked[min(i, j)]} "
                    f"at {found[min(i, j)]:,}, and {asked[max(i, j)]} at {found[max(i, j)]:,}. Both are alive "
                    f"at event {start}. (Offsets are in the order of the requests.)"
                )
        alive.append(i)
    return max((offset + nbytes for offset, (*_, nbytes) in zip(found, asked, strict=True)), default=0)
