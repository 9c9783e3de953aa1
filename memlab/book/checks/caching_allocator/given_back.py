"""Exercise 3 of chapter 04: what empty_cache() would give back, from a snapshot's segments and blocks alone."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable

from memlab.book.checks.answers import Wrong, a_function, exercise, same_bytes
from memlab.caching_allocator import FREE, CachingAllocator, ExpandableAllocator, Trace, replay
from memlab.units import KiB, MiB

_KEPT = {"nothing": 0, "one tensor in forty": 1 / 40, "every third tensor": 1 / 3, "all": 1}


def _program(kept: float, largest: int, seed: int) -> Trace:
    """Tensors of all sizes, some of which are replaced meanwhile; at the end, all but a part `kept` are let go."""
    draw = random.Random(seed)
    trace: Trace = []
    live: list[int] = []
    for name in range(160):
        if live and draw.random() < 0.3:
            trace.append((live.pop(draw.randrange(len(live))), FREE))
        trace.append((name, draw.choice((draw.randint(1, 900 * KiB), draw.randint(MiB, largest)))))
        live.append(name)
    trace += [(name, FREE) for name in draw.sample(live, len(live)) if draw.random() >= kept]
    return trace


def _tower(sizes: tuple[int, ...], freed: tuple[int, ...]) -> Trace:
    """Tensors of these sizes, in MiB, one after the other, and those `freed` let go."""
    return [*((name, size * MiB) for name, size in enumerate(sizes)), *((name, FREE) for name in freed)]


@functools.cache
def _snapshots(kind: Callable[[], CachingAllocator]) -> dict[str, tuple[list[dict], int]]:
    """A card's segments, and what its empty_cache() then gave back."""
    programs: dict[str, Trace] = {
        "an empty card": [],
        "tensors of 31, 71 and 31 MiB, the middle one freed": _tower((31, 71, 31), (1,)),
        "ten tensors of 5 MiB, all but the last freed": _tower((5,) * 10, tuple(range(9))),
        "tensors of 3 and 50 MiB in turn, the large ones freed": _tower((3, 50) * 5, (1, 3, 5, 7, 9)),
    }
    for words, kept in _KEPT.items():
        for seed, largest in ((1, 12 * MiB), (2, 70 * MiB)):
            programs[f"160 tensors of up to {largest // MiB} MiB, {words} kept"] = _program(kept, largest, seed)
    found = {}
    for name, program in programs.items():
        card = kind()
        replay(card, program)
        segments, before = card.segments(), card.reserved_bytes
        card.empty_cache()
        found[name] = segments, before - card.reserved_bytes
    return found


def _counted(
    answer: object, name: str, kind: Callable, known: Callable[[list[dict]], dict[int, str]], hint: str
) -> None:
    """Raise Wrong unless the answer says of each of these cards what empty_cache() gave back.

    known: from a card's segments, what is to be said of well-known wrong figures; hint: of all others.
    """
    function = a_function(answer, f"{name}(segments)")
    for card, (segments, right) in _snapshots(kind).items():
        given = copy.deepcopy(segments)
        found = function(given)
        where = f"{card}: {name}(segments)"
        same_bytes(found, right, where, known(segments).get(found, hint) if type(found) is int else "")
        if given != segments:
            raise Wrong(f"{where}: your function has changed the snapshot that it was given.")


def _free(segments: list[dict]) -> list[tuple[dict, int, int]]:
    """(segment, start, size) of every free block; start from the segment's own."""
    return [
        (segment, block["address"] - segment["address"], block["size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


@exercise
def given_back(answer: object) -> str:
    """Exercise 3, first part: (segments) → the bytes that empty_cache() gives back."""

    def known(segments: list[dict]) -> dict[int, str]:
        free = [size for _, _, size in _free(segments)]
        idle = [segment for segment in segments if not segment["active_size"]]
        return {
            len(idle): "That is how many segments. How many bytes?",
            sum(free): "Those are all the free blocks. A segment goes back as a whole, or not at all.",
            max(free, default=0): "That is the largest free block. Every segment that is free as a whole goes back.",
            sum(segment["total_size"] for segment in segments): "That is all that is reserved.",
            sum(segment["allocated_size"] for segment in segments): "That is what is in use, and stays.",
        }

    hint = "Those segments go back in which no block is in use, and no others."
    _counted(answer, "given_back", CachingAllocator, known, hint)
    return "What is cached beside a block in use stays, however large."


@exercise
def pages_given_back(answer: object) -> str:
    """Exercise 3, second part: the same for expandable segments, which give back every page that is wholly free."""

    def pages(segments: list[dict], count: Callable[[int, int, int, int], int], page: int = 0) -> int:
        """What `count` makes of every free block: (segment's address, start in it, stop in it, page)."""
        return sum(
            count(
                segment["address"], start, start + size, page or (2 if segment["segment_type"] == "small" else 20) * MiB
            )
            for segment, start, size in _free(segments)
        )

    def inside(address: int, start: int, stop: int, page: int) -> int:
        return max(0, stop // page - -(-start // page)) * page

    def known(segments: list[dict]) -> dict[int, str]:
        absolute = pages(segments, lambda base, start, stop, page: inside(0, base + start, base + stop, page))
        return {  # the last of equals counts
            absolute: "Pages are counted from their segment's first address, which need not be a multiple of 20 MiB.",
            pages(segments, inside, 20 * MiB): "Pages of the small pool have 2 MiB.",
            pages(segments, inside, 2 * MiB): "Pages of the large pool have 20 MiB.",
            pages(segments, lambda base, start, stop, page: (stop // page - -(-start // page)) * page): "A free "
            "block within one page has no whole page, and takes none from the others either: at least 0.",
            pages(segments, lambda base, start, stop, page: (-(-stop // page) - start // page) * page): "Those are "
            "all pages that a free block touches. Other blocks are in some of them.",
            pages(segments, lambda base, start, stop, page: (stop - start) // page * page): "So many pages would fit "
            "into the free blocks, but a block begins where it likes: what counts are pages that lie in it whole.",
            sum(s["total_size"] for s in segments if not s["active_size"]): "Those are the segments that are free as a "
            "whole. These ones go back page by page.",
            pages(segments, lambda base, start, stop, page: stop - start): "Those are all the free bytes. A page "
            "goes back as a whole, or not at all.",
        }

    hint = "Of each free block: from the first beginning of a page in it to the last."
    _counted(answer, "pages_given_back", lambda: ExpandableAllocator("80 GB"), known, hint)
    return "A block in use keeps its own pages, and no others."
