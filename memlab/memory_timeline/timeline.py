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
from dataclasses import replace
from pathlib import Path

from memlab.memory_timeline import timeline_file
from memlab.memory_timeline.events import CATEGORIES, Event, Span, Storage


class Timeline:
    """Every byte's birth and death in order. Made by `Meter`, or read back with `Timeline.load`.

    All figures are at the *storages* level: what tensors hold, before an allocator rounds up. With the meter's
    `workspace=True` they include what kernels allocate for themselves.

    Bytes on different devices are never added up: a timeline answers for `device` (the one that holds the most at its
    fullest moment, unless asked for another with `on`); `devices` lists all of them. `of_all_devices` is the record
    itself, storages and events, among which a meter's `event_count` is a place: `event_of` finds it on this device.

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
        self.of_all_devices = list(storages), list(events)
        self.workspace = workspace
        self.levels = levels or {}
        of = {storage.id: storage.device for storage in self.of_all_devices[0]}
        self.devices = tuple(sorted(set(of.values()))) or ("cpu",)
        if device is None:
            device = max(
                self.devices, key=lambda name: _peak(e.delta for e in self.of_all_devices[1] if of[e.storage] == name)
            )
        self.device = device
        self.storages = {storage.id: storage for storage in self.of_all_devices[0] if storage.device == device}
        mine = [event for event in self.of_all_devices[1] if event.storage in self.storages]
        first = next((i for i, event in enumerate(mine) if event.phase != "before"), len(mine))
        self._before, self.events = mine[:first], mine[first:]

    def on(self, device: str) -> Timeline:
        """The same record, asked about another device: "cpu", "cuda:0" … Raises ValueError for one it never saw."""
        if device not in self.devices:
            raise ValueError(f"expected one of the devices seen, {', '.join(self.devices)}; found {device!r}")
        storages, events = self.of_all_devices
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

    def event_of(self, mark: int) -> int:
        """The event of this device at which a meter's `event_count` was `mark`: `bytes_at(event)` was held then.

        A meter with `workspace=True` counts less than its timeline has, so its marks are of no use.
        Raises ValueError for a mark that is not from 0 to the number of all devices' events.
        """
        events = self.of_all_devices[1]
        if not 0 <= mark <= len(events):
            raise ValueError(f"expected a mark from 0 to {len(events)}, a meter's event_count, found {mark!r}")
        return max(0, sum(event.storage in self.storages for event in events[:mark]) - len(self._before))

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
        """The events at which a storage was born (0: before the first op) and freed (None: it outlived the meter).

        Raises KeyError for a storage that is not on this device, or never had a byte.
        """
        if storage not in self._lifetimes:
            raise KeyError(
                f"expected the id of a storage on {self.device} that had bytes, found {storage!r}; alive(event) lists "
                "ids"
            )
        return self._lifetimes[storage]

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
        if not isinstance(event, int) or isinstance(event, bool) or not 0 <= event <= len(self.events):
            raise IndexError(
                f"expected an event from 0 (what existed before) to {len(self.events)} (the last), found {event!r}"
            )
        return event

    def __repr__(self) -> str:
        counts = f"{len(self.events)} events, {len(self.storages)} storages"
        return f"Timeline({counts}, peak {self.peak_bytes:,} B, {self.device})"

    # ---- on disk

    def save(self, path: str | Path) -> None:
        """Write everything, all devices, as JSON. The file appears whole or not at all."""
        timeline_file.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a saved timeline. Raises ValueError, in one sentence, for anything this version did not write."""
        return cls(**timeline_file.load(path))


def _peak(deltas: Iterable[int]) -> int:
    return max(itertools.accumulate(deltas), default=0)
