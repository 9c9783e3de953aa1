"""A timeline in a file: everything, of all devices, as plain JSON that is parsed and checked, never unpickled.

Lines of code come once each and are numbered, since thousands of storages and events share them.
"""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.files import Kind, typed
from memlab.memory_timeline.events import CATEGORIES, LEVELS, PHASES, Event, Line, Storage

if TYPE_CHECKING:
    from memlab.memory_timeline.timeline import Timeline

FILE = Kind("a timeline", "memlab-timeline", version=1)
MOST_BYTES = 2**63 - 1  # a storage's size has 64 bits in PyTorch, one of them its sign


def save(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline. The file appears whole or not at all."""
    storages, events = timeline.of_all_devices
    lines: dict[Line, int] = {}
    number = lambda line: lines.setdefault(line, len(lines))  # noqa: E731
    document = {
        "workspace": timeline.workspace,
        "device": timeline.device,
        "levels": timeline.levels,
        "storages": [asdict(s) | {"shape": list(s.shape), "line": number(s.line)} for s in storages],
        "events": [[e.storage, e.delta, e.op, e.phase, number(e.line)] for e in events],
        "lines": [],
    }
    document["lines"] = [list(line) for line in lines]
    FILE.save(document, path)


def load(path: str | Path) -> dict[str, Any]:
    """What a Timeline is made with, by its arguments' names. Raises ValueError, in one sentence, for any other file."""
    return FILE.load(path, _read)


def _read(document: dict) -> dict[str, Any]:
    lines = [Line(*typed((str, str), row)) for row in _rows(document["lines"])]
    storages = [_storage(row, lines) for row in _rows(document["storages"])]
    events = []
    for row in _rows(document["events"]):
        storage, delta, op, phase, line = typed((int, int, str, str, int), row)
        events.append(Event(storage, delta, op, phase, lines[_size(line)]))
    device, workspace, levels = typed((str, bool, dict), [document[k] for k in ("device", "workspace", "levels")])
    _check_levels(levels)
    _check(storages, events)
    if device not in ({storage.device for storage in storages} or {"cpu"}):
        raise ValueError(f"no storage is on {device!r}")
    return {"storages": storages, "events": events, "device": device, "workspace": workspace, "levels": levels}


def _rows(table: list) -> list:
    return typed((list,), [table])[0]


def _size(number: int) -> int:
    if not 0 <= number <= MOST_BYTES:
        raise ValueError(f"expected a number from 0 to {MOST_BYTES}, found {str(number)[:20]}")
    return number


def _storage(row: dict, lines: list[Line]) -> Storage:
    kinds = {"id": int, "nbytes": int, "shape": list, "line": int}
    fields = {field.name: kinds.get(field.name, str) for field in dataclass_fields(Storage)}
    if type(row) is not dict or row.keys() != fields.keys():
        raise TypeError(f"expected a storage with {', '.join(fields)}, found {str(row)[:60]}")
    typed(tuple(fields.values()), [row[name] for name in fields])
    shape = typed((int,) * len(row["shape"]), row["shape"])
    for number in (row["nbytes"], row["line"], *shape):
        _size(number)
    return Storage(**row | {"shape": tuple(shape), "line": lines[row["line"]]})


def _check_levels(levels: dict) -> None:
    for name, level in levels.items():
        if name not in LEVELS or type(level) is not dict or level.keys() != {"before", "peak", "after"}:
            raise ValueError(f"expected a level's bytes before, peak and after, found {name!r}: {str(level)[:60]}")
        for figure in typed((int,) * len(level), list(level.values())):
            _size(figure)
        if max(level["before"], level["after"]) > level["peak"]:
            raise ValueError(f"expected a peak of {name!r} that is no less than before and after, found {level}")


def _check(storages: list[Storage], events: list[Event]) -> None:
    known = {s.id for s in storages}
    if len(known) != len(storages):
        raise ValueError("two storages with one id")
    for storage in storages:
        if storage.category not in CATEGORIES or storage.phase not in PHASES:
            raise ValueError(f"unknown category or phase {storage.category!r}, {storage.phase!r}")
    born = {s.id: s for s in storages if s.nbytes}  # one that begins with 0 bytes has no event until it has some
    held = dict.fromkeys(known, 0)
    begun = False
    for event in events:
        if event.phase not in PHASES:
            raise ValueError(f"unknown phase {event.phase!r}")
        if begun and event.phase == "before":
            raise ValueError(f"storage {event.storage} was there before, after the first op")
        begun = event.phase != "before"
        if not event.delta:
            raise ValueError(f"storage {event.storage} changes by 0 bytes")
        if (storage := born.pop(event.storage, None)) and (storage.nbytes, storage.phase) != (event.delta, event.phase):
            raise ValueError(f"{storage} begins with {event}")
        held[event.storage] += event.delta
        if not 0 <= held[event.storage] <= MOST_BYTES:
            raise ValueError(f"storage {event.storage} holds fewer than 0 bytes, or more than {MOST_BYTES}")
