"""Whose bytes grow: what each line of the code has alive at one step's end, compared with the ends before.

A step makes many storages that outlive it: gradients, states, the last loss. They are *replaced*, step by step. Two
timelines of one loop, one some steps longer, show it: of a line that replaces, as many bytes are alive after n steps as
after m; a line of which more are alive after the longer run is where a leak is born (`growing_lines`).

Two ends can mislead: a longer batch at the second end looks like growth. Marks at every step's end tell more
(`piling_up`). Of a line that leaks, storages stay that are *old*: born in many steps of the first half, and in many of
the second, and still there. What is replaced has none that is old; what was made once, for good, has one birthday.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from memlab.memory_timeline import Line, Storage, Timeline
from memlab.units import format_bytes

BIRTHDAYS = 2  # in each half of the steps: a line that leaks has storages from at least so many of them
OWNED = ("parameter", "buffer", "gradient", "optimizer_state", "input", "workspace")


class GrowingLine(NamedTuple):
    """A line of the model's or the loop's code whose storages pile up, `bytes_per_step` a step; why each is kept.

    holder: who holds them, in words, from the object outwards; "" where that was not asked or is not known.
    keeps: the lines whose storages autograd's graph of this line's tensors keeps; their bytes count in this line's.
    """

    line: Line
    category: str
    bytes_per_step: float
    storages_per_step: float
    reason: str
    holder: str = ""
    keeps: tuple[GrowingLine, ...] = ()

    def __str__(self) -> str:
        where = str(self.line) if self.line.source else "(no line is known)"
        held = f"; held by {self.holder}" if self.holder else ""
        return f"{format_bytes(round(self.bytes_per_step))} a step: {where} ({self.reason}{held})"


def growing_lines(before: Timeline, after: Timeline, steps: int) -> list[GrowingLine]:
    """The lines that hold more at the end of `after` than of `before`, most bytes first.

    before, after: timelines of one loop from the same start, both at a step's end and on one device, `after` being
    `steps` steps longer: two readings of one running meter, or two meters' of two runs. Let `before` be past the
    warm-up, or states that are made at the first step count as growth.
    Raises ValueError for fewer than 1 step, and for timelines of two devices.
    """
    if steps < 1:
        raise ValueError(f"expected `after` to be at least 1 step longer than `before`, found steps={steps}")
    if before.device != after.device and len(before.storages):
        raise ValueError(
            f"expected timelines of one device, found {before.device!r} and {after.device!r}; ask for one: "
            f"before.on({after.device!r})"
        )
    then, now = _held(before), _held(after)
    grown = []
    for key, storages in now.items():
        more = sum(s.nbytes for s in storages) - sum(s.nbytes for s in then.get(key, ()))
        if more > 0:
            count = len(storages) - len(then.get(key, ()))
            grown.append(_row(key[0], storages, more / steps, count / steps))
    return sorted(grown, key=lambda one: -one.bytes_per_step)


def _held(timeline: Timeline) -> dict[tuple[Line, str], list[Storage]]:
    held = defaultdict(list)
    for storage in timeline.alive(len(timeline)):
        held[_key(storage)].append(storage)
    return held


def _key(storage: Storage) -> tuple[Line, str]:
    """A temporary that is kept becomes an activation when a backward runs: both are one row."""
    return storage.line, storage.category if storage.category in OWNED else ""


def _row(line: Line, storages: Sequence[Storage], nbytes: float, count: float) -> GrowingLine:
    """A row whose category and reason are those of most of its bytes."""
    weights = Counter()
    for storage in storages:
        weights[storage.category, storage.reason] += storage.nbytes
    category, reason = weights.most_common(1)[0][0]
    return GrowingLine(line, category, nbytes, count, reason)


class Pile(NamedTuple):
    """A growing line, and the numbers of its storages that are old: they outlived many steps."""

    row: GrowingLine
    old: tuple[int, ...]


def piling_up(timeline: Timeline, marks: Sequence[int]) -> list[Pile]:
    """The lines whose storages pile up from mark to mark, most bytes first, of all devices together.

    marks: `meter.event_count` at the ends of steps that follow one another, at least 5; the first past the warm-up.
    A line is named when storages of at least two steps of the first half, and of two of the second, are alive at the
    end; storages that were there at the first mark and have gone since, of the same size, take as many off (a buffer
    that is full throws out its oldest). Or when its bytes never fall, and rise at least four times: one storage that is
    replaced by a larger one, again and again. Raises ValueError for fewer than 5 marks.
    """
    if len(marks) < 2 * BIRTHDAYS + 1:
        raise ValueError(f"expected marks at {2 * BIRTHDAYS + 1} steps' ends or more, found {len(marks)}")
    storages, events = timeline.of_all_devices  # marks count the events of all devices
    of = {storage.id: storage for storage in storages}
    steps, half = len(marks) - 1, (len(marks) - 1) // 2
    birth: dict[int, int] = {}
    held = Counter()
    gone = Counter()  # storages from before the first mark that went in the second half, by what they looked like
    curves = defaultdict(lambda: [0] * len(marks))
    number = 0
    for step, mark in enumerate(marks):
        for event in events[number:mark]:
            one = event.storage
            birth.setdefault(one, step)
            held[one] += event.delta
            if not held[one] and not birth[one] and step:
                gone[_looks(of[one])] += step > half
            curves[_key(of[one])][step] += event.delta
        number = mark
    alive = defaultdict(list)
    for one, nbytes in held.items():
        if nbytes and birth[one]:
            alive[_key(of[one])].append(one)
    old = {key: [one for one in ones if birth[one] <= half] for key, ones in alive.items()}
    looks = Counter(_looks(of[one]) for ones in old.values() for one in ones)
    piles = []
    for key, curve in curves.items():
        for step in range(1, len(curve)):
            curve[step] += curve[step - 1]
        young = {birth[one] for one in alive[key] if half < birth[one] < steps}
        kept = _not_replaced(old.get(key, ()), of, looks, gone)
        if len({birth[one] for one in kept}) >= BIRTHDAYS and len(young) >= BIRTHDAYS and curve[-1] > curve[0]:
            row = _row(key[0], [of[one] for one in kept], sum(held[one] for one in kept) / half, len(kept) / half)
            piles.append(Pile(row, tuple(kept)))
        elif _only_rises(curve) and 0 < len({birth[one] for one in alive[key]}) <= 2:
            row = _row(key[0], [of[one] for one in alive[key]], (curve[-1] - curve[0]) / steps, 0.0)
            piles.append(Pile(row._replace(reason="each time replaced by a larger one"), tuple(alive[key][-1:])))
    return sorted(piles, key=lambda pile: -pile.row.bytes_per_step)


def _looks(storage: Storage) -> tuple:
    return storage.nbytes, storage.dtype, storage.device


def _not_replaced(old: Sequence[int], of: dict[int, Storage], looks: Counter, gone: Counter) -> list[int]:
    """Old storages, less those that took the place of one that has gone; lines that share a look share the loss."""
    kept, owed = [], Counter()
    for one in old:
        look = _looks(of[one])
        owed[look] += min(1.0, gone[look] / looks[look])
        if owed[look] >= 1 - 1e-9:
            owed[look] -= 1
        else:
            kept.append(one)
    return kept


def _only_rises(curve: Sequence[int]) -> bool:
    changes = [b - a for a, b in zip(curve, curve[1:], strict=False) if a != b]
    return len(changes) >= 2 * BIRTHDAYS and min(changes) > 0
