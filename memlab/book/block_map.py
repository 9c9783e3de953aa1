"""The map of an allocator: its segments and their blocks at a moment, above what was asked for, held and reserved.

Segments flow like words on a page, in the order of their addresses, one pool after the other, so that a card with
hundreds of them still fits a figure. A box is a segment; within it, blocks in use are filled and free ones are empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from memlab.book.interactive import Interactive
from memlab.book.style import COLOURS, LINE_COLOURS, SMALL_SIZE, Picture, byte_unit, finish
from memlab.caching_allocator import CachingAllocator, Replay, Trace, replay
from memlab.units import format_bytes

MOST_LINES = 14  # of segments
MOMENTS = 80
LEVELS = {
    "reserved": {"color": LINE_COLOURS[0], "linewidth": 1.8},
    "allocated": {"color": COLOURS["activation"], "linewidth": 3.2},
    "requested": {"color": "black", "linewidth": 0.6},
}
"""How each is drawn: the last two are often nearly the same, and then one lies within the other."""


class History(NamedTuple):
    """A replay, and the segments that the allocator had at some of its events."""

    replay: Replay
    segments: dict[int, list[dict]]


def history(allocator: CachingAllocator, trace: Trace, moments: int = MOMENTS) -> History:
    """Replay a trace, and look at the segments at up to `moments` events, the fullest and the last among them."""
    trace = list(trace)
    seen: dict[int, list[dict]] = {}
    at = {len(trace) * n // moments for n in range(moments + 1)}
    fullest = 0

    def watched() -> Iterator[tuple[int, int]]:
        nonlocal fullest
        for event, request in enumerate(trace):
            look(event)
            yield request
        look(len(trace))

    def look(event: int) -> None:
        nonlocal fullest
        if event in at:
            seen[event] = allocator.segments()
        if allocator.reserved_bytes > fullest:
            fullest = allocator.reserved_bytes
            seen["fullest"] = event, allocator.segments()

    done = replay(allocator, watched())
    event, segments = seen.pop("fullest", (0, []))
    return History(done, dict(sorted((seen | {event: segments}).items())))


def draw_blocks(history: History, event: int, title: str = "") -> Picture:
    """The segments and blocks at one of the events of a history, above the three levels over all events."""
    figure = Figure(figsize=(8, 4.6), dpi=90)
    above, below = figure.subplots(2, height_ratios=(2, 1))
    figure.subplots_adjust(0.09, 0.11, 0.98, 0.9, hspace=0.35)
    done, segments = history.replay, history.segments[event]
    _draw_segments(above, segments)
    unit, scale = byte_unit(max(done.peak_reserved_bytes, 1))
    events = range(len(done.reserved))
    for number, (level, look) in enumerate(LEVELS.items()):
        values = [nbytes / scale for nbytes in getattr(done, level)]
        below.step(events, values, where="post", **look)
        # A legend of matplotlib's takes as long as all the rest of this panel, and a slider draws it again each time.
        left, at = 0.55 + 0.15 * number, {"transform": below.transAxes}
        below.plot([left, left + 0.04], [1.05, 1.05], clip_on=False, **look, **at)
        below.text(left + 0.045, 1.05, level, va="center", fontsize=SMALL_SIZE, **at)
    below.axvline(event, color="black", linewidth=1)
    below.set_xlim(0, max(len(events) - 1, 1))
    below.set_ylim(0, max(done.peak_reserved_bytes / scale * 1.15, 1e-9))
    finish(below, "event (a malloc or a free)", f"bytes ({unit})")
    now = {level: getattr(done, level)[event] for level in LEVELS}
    words = f"{len(segments)} segments; " + ", ".join(f"{format_bytes(n)} {level}" for level, n in now.items())
    free = done.largest_free[event]
    words += f"; largest free block {format_bytes(free)}" if free else "; no free block"
    figure.suptitle(f"{title}: {words}" if title else words, x=0.02, ha="left", fontsize=9)
    used = sum(_in_use(block) for segment in segments for block in segment["blocks"])
    return Picture(
        figure,
        f"A map of segments and blocks {f'({title}) ' if title else ''}after event {event} of {len(events) - 1}: "
        f"{used} blocks in use in {words}. Below it, the three levels over all events.",
    )


def explore_blocks(
    allocators: Mapping[str, Callable[[], CachingAllocator]], trace: Trace, start: int | None = None
) -> Interactive:
    """The block map of a trace with a slider for the event, and buttons for the allocator where there are several.

    start: the event to begin at, or the nearest that is shown; None: in the middle.
    """
    histories = {name: history(make(), trace) for name, make in allocators.items()}
    events = sorted(set.intersection(*(set(one.segments) for one in histories.values())) or {0})
    first = next(iter(histories))
    middle = len(trace) // 2 if start is None else start
    start = min(events, key=lambda event: abs(event - middle))

    def draw(allocator: str = first, event: int = start) -> Picture:
        return draw_blocks(histories[allocator], event, allocator)

    if len(histories) > 1:
        return Interactive(draw, allocator=list(histories), event=events)
    return Interactive(functools.partial(draw, first), event=events)


def _draw_segments(axes, segments: Sequence[dict]) -> None:
    """Segments from left to right and line by line; each pool begins a line of its own."""
    pools = {name: [s for s in segments if s["segment_type"] == name] for name in ("small", "large")}
    total = sum(segment["total_size"] for segment in segments)
    width = max([total / MOST_LINES * 1.2, 1, *(segment["total_size"] for segment in segments)])
    gap = width / 150
    boxes, used, wasted, names, line = [], [], [], [], 0
    for name, pool in pools.items():
        x = 0.0
        if pool:
            names.append((line, name))
        for segment in pool:
            size = segment["total_size"]
            if x and x + size > width * 1.001:
                x, line = 0.0, line + 1
            boxes.append(_box(x, line, size))
            for block in filter(_in_use, segment["blocks"]):
                at, asked = x + block["address"] - segment["address"], block["requested_size"]
                used.append(_box(at, line, asked))
                wasted.append(_box(at + asked, line, block["size"] - asked))
            x += size + gap
        line += bool(pool)
    axes.add_collection(PolyCollection(used, facecolor=COLOURS["parameter"], edgecolor="white", linewidth=0.4))
    # Paler than what is in use, so that it shows in grey too; hatching many boxes would double a picture's time.
    axes.add_collection(PolyCollection(wasted, facecolor=COLOURS["activation"], edgecolor="none"))
    axes.add_collection(PolyCollection(boxes, facecolor="none", edgecolor="black", linewidth=0.8))
    axes.set_xlim(-gap, width * 1.12)
    axes.set_ylim(max(line, 4), 0)
    axes.set_axis_off()
    for at, name in names:
        axes.text(-2 * gap, at + 0.45, name, ha="right", va="center", fontsize=SMALL_SIZE)
    note = f"a line is {format_bytes(round(width))} long · box: segment · dark: in use · paler: rounding · empty: free"
    axes.text(0, -0.2, note, fontsize=SMALL_SIZE)


def _in_use(block: Mapping) -> bool:
    return block["state"] != "inactive"


def _box(x: float, line: int, width: float) -> list[tuple[float, float]]:
    return [(x, line + 0.1), (x + width, line + 0.1), (x + width, line + 0.85), (x, line + 0.85)]
