"""The Timeline: the one record of what happened to memory, from which everything else is computed.

It is a list of events, each `storage, ±bytes, op, phase, line`, and beside it what each storage turned out to be.
Peaks, categories, tables, plots, claims and allocator replays are all read from this and nothing else.

Event 0 stands for what existed before the first op. Event i is the i-th allocation or free after it, so a question
about a moment is a question about an event: `bytes_at(i)` is what was held just after event i.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import NamedTuple

from memlab.memory_timeline.documents import Kind, typed

CATEGORIES = ("parameter", "buffer", "input", "gradient", "optimizer_state", "activation", "temporary", "workspace")
"""What a storage is for, as a plot stacks them from the bottom up."""
PHASES = ("before", "forward", "backward", "recompute", "optimizer")
FILE = Kind("a timeline", "memlab-timeline", version=1)


class Line(NamedTuple):
    """A place in the reader's code: the function and the source text. No path, no number: those change by machine."""

    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.function}: {self.source}" if self.function != "<module>" else self.source


NOWHERE = Line("", "")


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: the block of bytes that one or many tensors view. Counted once, whoever shares it.

    `nbytes` is its size at the moment asked about (see `Timeline.alive`), at birth in `Timeline.storages`.
    `op`, `phase`, `line` and `module` say where it was born; for bytes born in backward, line and module are those of
    the forward op whose gradient they are. `reason` says in words why it is there.
    """

    id: int
    nbytes: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    op: str
    phase: str
    line: Line
    module: str
    name: str
    reason: str


class Event(NamedTuple):
    """One change: `delta` bytes (positive when born or grown, negative when freed) of storage number `storage`."""

    storage: int
    delta: int
    op: str
    phase: str
    line: Line


class Span(NamedTuple):
    """A run of events in one phase: from event `start` to event `stop`, both included."""

    phase: str
    start: int
    stop: int


class Timeline:
    """Every byte's birth and death in order. Made by `Meter`, or read back with `Timeline.load`.

    All figures are at the *storages* level: what tensors hold, before an allocator rounds up. With the meter's
    `workspace=True` they include what kernels allocate for themselves.

    Bytes on different devices are never added up: a timeline answers for `device` (the one that holds the most at its
    fullest moment, unless asked for another with `on`); `devices` lists all of them.

    On CUDA, `levels` has what the caching allocator counted meanwhile: for each of "requested", "allocated" and
    "reserved" the bytes "before", at the "peak" and "after". Elsewhere it is empty.
    """

    def __init__(
        self,
        storages: Iterable[Storage] = (),
        events: Iterable[Event] = (),
        *,
        device: str | None = None,
        workspace: bool = False,
        levels: dict[str, dict[str, int]] | None = None,
    ):
        self._everything = list(storages), list(events)
        self.workspace = workspace
        self.levels = levels or {}
        of = {storage.id: storage.device for storage in self._everything[0]}
        self.devices = tuple(sorted(set(of.values()))) or ("cpu",)
        if device is None:
            device = max(
                self.devices, key=lambda name: _peak(e.delta for e in self._everything[1] if of[e.storage] == name)
            )
        self.device = device
        self.storages = {storage.id: storage for storage in self._everything[0] if storage.device == device}
        mine = [event for event in self._everything[1] if event.storage in self.storages]
        first = next((i for i, event in enumerate(mine) if event.phase != "before"), len(mine))
        self._before, self.events = mine[:first], mine[first:]

    def on(self, device: str) -> Timeline:
        """The same record, asked about another device: "cpu", "cuda:0" … Raises ValueError for one it never saw."""
        if device not in self.devices:
            raise ValueError(f"expected one of the devices seen, {', '.join(self.devices)}; found {device!r}")
        storages, events = self._everything
        return Timeline(storages, events, device=device, workspace=self.workspace, levels=self.levels)

    # ---- the curve

    def __len__(self) -> int:
        return len(self.events)

    @functools.cached_property
    def totals(self) -> list[int]:
        """Bytes held after each event: `totals[0]` is what existed before, `totals[i]` follows event i."""
        before = sum(event.delta for event in self._before)
        return list(itertools.accumulate((event.delta for event in self.events), initial=before))

    @functools.cached_property
    def curves(self) -> dict[str, list[int]]:
        """For each category, bytes held after each event. Their sum is `totals`."""
        columns = {}
        for category in CATEGORIES:
            mine = {s.id for s in self.storages.values() if s.category == category}
            before = sum(event.delta for event in self._before if event.storage in mine)
            deltas = (event.delta if event.storage in mine else 0 for event in self.events)
            columns[category] = list(itertools.accumulate(deltas, initial=before))
        return columns

    @property
    def peak_bytes(self) -> int:
        """The most bytes ever held at once on `device`, what existed before included."""
        return self.totals[self.peak_event]

    @functools.cached_property
    def peak_event(self) -> int:
        """The first event after which `peak_bytes` were held (0 when nothing was ever held)."""
        return max(range(len(self.totals)), key=lambda i: (self.totals[i], -i))

    def bytes_at(self, event: int) -> int:
        """Bytes held just after `event`. Raises IndexError outside 0 … len(timeline)."""
        return self.totals[self._checked(event)]

    def op_at(self, event: int) -> str:
        """The op during or after which `event` happened; "" for event 0."""
        return self.events[event - 1].op if self._checked(event) else ""

    def bytes_by_category(self, event: int) -> dict[str, int]:
        """Bytes of each of the eight categories just after `event`; their sum is `bytes_at(event)`."""
        event = self._checked(event)
        return {category: curve[event] for category, curve in self.curves.items()}

    def everything(self) -> list[Event]:
        """All events in order, those that stand for what existed before (event 0) included."""
        return self._before + self.events

    # ---- who

    def alive(self, event: int) -> list[Storage]:
        """The storages that held bytes just after `event`, largest first, each with its size at that moment."""
        held: dict[int, int] = {}
        for one in itertools.chain(self._before, self.events[: self._checked(event)]):
            held[one.storage] = held.get(one.storage, 0) + one.delta
        living = [replace(self.storages[i], nbytes=nbytes) for i, nbytes in held.items() if nbytes]
        return sorted(living, key=lambda storage: (-storage.nbytes, storage.id))

    def lifetime(self, storage: int) -> tuple[int, int | None]:
        """The events at which a storage was born (0: before the first op) and freed (None: it outlived the meter)."""
        if storage not in self.storages:
            raise KeyError(f"expected the id of a storage on {self.device}, found {storage!r}; alive(event) lists ids")
        born, freed = self._lifetimes[storage]
        return born, freed

    @functools.cached_property
    def _lifetimes(self) -> dict[int, tuple[int, int | None]]:
        held = dict.fromkeys(self.storages, 0)
        born: dict[int, int] = {}
        freed: dict[int, int | None] = {}
        numbered = itertools.chain(((0, e) for e in self._before), enumerate(self.events, 1))
        for number, event in numbered:
            held[event.storage] += event.delta
            born.setdefault(event.storage, number)
            freed[event.storage] = None if held[event.storage] else number
        return {i: (born[i], freed[i]) for i in born}

    @functools.cached_property
    def phases(self) -> list[Span]:
        """The step as runs of events in one phase, in order: forward, backward, (recompute,) optimizer …"""
        spans: list[Span] = []
        for number, event in enumerate(self.events, 1):
            if spans and spans[-1].phase == event.phase:
                spans[-1] = spans[-1]._replace(stop=number)
            else:
                spans.append(Span(event.phase, number, number))
        return spans

    def _checked(self, event: int) -> int:
        if not isinstance(event, int) or not 0 <= event <= len(self.events):
            raise IndexError(
                f"expected an event from 0 (what existed before) to {len(self.events)} (the last), found {event!r}"
            )
        return event

    def __repr__(self) -> str:
        counts = f"{len(self.events)} events, {len(self.storages)} storages"
        return f"Timeline({counts}, peak {self.peak_bytes:,} B, {self.device})"

    # ---- on disk: plain JSON, parsed and checked, never unpickled

    def save(self, path: str | Path) -> None:
        """Write everything, all devices, as JSON. The file appears whole or not at all."""
        storages, events = self._everything
        lines: dict[Line, int] = {}
        number = lambda line: lines.setdefault(line, len(lines))  # noqa: E731
        document = {
            "workspace": self.workspace,
            "device": self.device,
            "levels": self.levels,
            "storages": [asdict(s) | {"shape": list(s.shape), "line": number(s.line)} for s in storages],
            "events": [[e.storage, e.delta, e.op, e.phase, number(e.line)] for e in events],
            "lines": [],
        }
        document["lines"] = [list(line) for line in lines]
        FILE.save(document, path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a saved timeline. Raises ValueError, in one sentence, for anything this version did not write."""
        return FILE.load(path, cls._from)

    @classmethod
    def _from(cls, document: dict) -> Timeline:
        lines = [Line(*typed((str, str), row)) for row in _rows(document["lines"])]
        storages = [_storage(row, lines) for row in _rows(document["storages"])]
        events = []
        for row in _rows(document["events"]):
            storage, delta, op, phase, line = typed((int, int, str, str, int), row)
            events.append(Event(storage, delta, op, phase, lines[_at_least_0(line)]))
        device, workspace, levels = typed((str, bool, dict), [document[k] for k in ("device", "workspace", "levels")])
        for level in typed((dict,) * len(levels), list(levels.values())):
            for figure in typed((int,) * len(level), list(level.values())):
                _at_least_0(figure)
        _check(storages, events)
        timeline = cls(storages, events, device=device, workspace=workspace, levels=levels)
        if device not in timeline.devices:
            raise ValueError(f"no storage is on {device!r}")
        return timeline


def _peak(deltas: Iterable[int]) -> int:
    return max(itertools.accumulate(deltas), default=0)


def _rows(table: list) -> list:
    return typed((list,), [table])[0]


def _at_least_0(number: int) -> int:
    if number < 0:
        raise ValueError(f"expected a number from 0 on, found {number}")
    return number


def _storage(row: dict, lines: list[Line]) -> Storage:
    kinds = {"id": int, "nbytes": int, "shape": list, "line": int}
    fields = {field.name: kinds.get(field.name, str) for field in dataclass_fields(Storage)}
    if type(row) is not dict or row.keys() != fields.keys():
        raise TypeError(f"expected a storage with {', '.join(fields)}, found {str(row)[:60]}")
    typed(tuple(fields.values()), [row[name] for name in fields])
    shape = typed((int,) * len(row["shape"]), row["shape"])
    for number in (row["nbytes"], row["line"], *shape):
        _at_least_0(number)
    return Storage(**row | {"shape": tuple(shape), "line": lines[row["line"]]})


def _check(storages: list[Storage], events: list[Event]) -> None:
    known = {s.id for s in storages}
    if len(known) != len(storages):
        raise ValueError("two storages with one id")
    for storage in storages:
        if storage.category not in CATEGORIES or storage.phase not in PHASES:
            raise ValueError(f"unknown category or phase {storage.category!r}, {storage.phase!r}")
    held = dict.fromkeys(known, 0)
    for event in events:
        if event.phase not in PHASES:
            raise ValueError(f"unknown phase {event.phase!r}")
        held[event.storage] += event.delta
        if held[event.storage] < 0:
            raise ValueError(f"storage {event.storage} holds fewer than 0 bytes")
