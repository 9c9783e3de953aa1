"""A memory snapshot of a real GPU, kept as plain JSON: what was asked of its allocator, and what it decided.

PyTorch records both in one list. The *questions* are `alloc` and `free_completed`, with the bytes requested; the
*answers* are the address of each block, and every `segment_alloc` and `segment_free` (with expandable segments,
`segment_map` and `segment_unmap`). At its end stand the segments with their blocks as they are then. So whoever has a
snapshot can put the questions to a model and hold every answer against the real one (`compare`), on a machine without
a GPU.

    snapshot = record_snapshot(step)                       on a GPU
    snapshot = Snapshot.of(read_snapshot("dump.pickle"))   a file of torch.cuda.memory._dump_snapshot, parsed, not run
    snapshot.save("h100.json"); Snapshot.load("h100.json")

What is kept names no file and no person: stack traces are dropped, and streams, which are pointers, are numbered.
Source: the docstring of `torch.cuda.memory._snapshot`, PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from memlab.caching_allocator.pickles import read_snapshot
from memlab.memory_timeline.documents import Kind, typed

__all__ = ["Block", "DeviceRecord", "Event", "Segment", "Snapshot", "read_snapshot", "record_snapshot"]

FILE = Kind("a snapshot", "memlab-snapshot", version=1)
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map")
ACTIONS += ("segment_unmap", "oom", "snapshot")
PASSED_OVER = ("user_defined", "annotate")  # a program's own remarks between the events, and on an allocation
STATES = ("active_allocated", "active_pending_free", "inactive")
POOLS = ("small", "large")
MOST_DEVICES = 64
MOST_STREAMS = 1000  # and pools: each has a model of its own
MOST_SETTINGS, MOST_CHARACTERS = 100, 1000
MOST_BYTES = 2**48  # of any size in a snapshot; addresses have 64 bits


class Event(NamedTuple):
    """One line of the allocator's history. `size` is what was requested, of a segment what was taken or given back.

    stream: 0 is CUDA's default, others are numbered as they come. pool: 0 is the usual one, others are private (CUDA
    graphs, MemPool). address: of an oom, instead, the bytes that the GPU had free.
    """

    action: str
    address: int
    size: int
    stream: int = 0
    pool: int = 0


class Block(NamedTuple):
    """A block of a segment: its bytes, how many of them were requested, and "inactive" when it is free."""

    size: int
    requested: int
    state: str


class Segment(NamedTuple):
    """A segment at the snapshot's end, with its blocks by address; kind is "small" or "large"."""

    address: int
    size: int
    stream: int
    pool: int
    kind: str
    expandable: bool
    blocks: tuple[Block, ...]


class DeviceRecord(NamedTuple):
    """What one GPU's allocator did (`events`), held at the end (`segments`), and held `before`, where that is known."""

    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    before: tuple[Segment, ...] | None = None

    @property
    def reserved_bytes(self) -> int:
        """Of all segments at the end of the recording."""
        return sum(segment.size for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """Of all blocks in use at the end of the recording."""
        blocks = (block for segment in self.segments for block in segment.blocks)
        return sum(block.size for block in blocks if block.state == "active_allocated")


@dataclass(frozen=True)
class Snapshot:
    """Every GPU's record, by its number, and under which settings: those of PYTORCH_ALLOC_CONF, by PyTorch's names.

    torch, device, capacity_bytes (of one GPU): told by the recorder; "" and None where nobody did.
    """

    devices: tuple[DeviceRecord, ...]
    settings: dict[str, int | float | bool | str | dict[str, int]]
    torch: str = ""
    device: str = ""
    capacity_bytes: int | None = None

    @classmethod
    def of(
        cls,
        dump: dict,
        *,
        before: dict | None = None,
        torch: str = "",
        device: str = "",
        capacity_bytes: int | None = None,
    ) -> Snapshot:
        """A snapshot from what `torch.cuda.memory._snapshot()` returns, or `read_snapshot`.

        before: such a one from just before the first event, where there is one. No history says it to the byte.

        Raises ValueError for a dump that lacks something, or has something of another type, and says where.
        """
        try:
            streams, pools = {0: 0}, {(0, 0): 0}
            segments = _segments_of(dump, streams, pools)
            held = {} if before is None else _segments_of(before, streams, pools)
            traces = [_a(list, trace, "device_traces") for trace in _a(list, dump["device_traces"], "device_traces")]
            devices = []
            for number in range(max([len(traces), *(n + 1 for n in segments | held)], default=0)):
                mine, mine_before = segments.get(number, ()), held.get(number, ())
                events = _events_of(traces[number] if number < len(traces) else [], mine, streams, pools)
                devices.append(DeviceRecord(tuple(events), mine, None if before is None else mine_before))
            settings = {k: v for k, v in dump.get("allocator_settings", {}).items() if _is_setting(v)}
            snapshot = cls(tuple(devices), settings, torch, device, capacity_bytes)
            _check(snapshot)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            told = f"no {error}" if type(error) is KeyError else error
            raise ValueError(f"expected a CUDA memory snapshot of PyTorch's, found one with {told}") from None
        return snapshot

    def save(self, path: str | Path) -> None:
        """Write it as JSON. The file appears whole or not at all. Raises ValueError for what `load` would refuse."""
        _check(self)
        document = {
            "torch": self.torch,
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "settings": self.settings,
            "actions": list(ACTIONS),
            "devices": [
                {
                    "events": [[ACTIONS.index(event.action), *event[1:]] for event in record.events],
                    "segments": _rows_of(record.segments),
                    "before": None if record.before is None else _rows_of(record.before),
                }
                for record in self.devices
            ],
        }
        FILE.save(document, path)

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Read a saved snapshot. Raises ValueError, in one sentence, for anything this version did not write."""
        return FILE.load(path, cls._from)

    @classmethod
    def _from(cls, document: dict) -> Snapshot:
        actions = typed((str,) * len(document["actions"]), document["actions"])
        devices = []
        for record in _a(list, document["devices"], "devices"):
            rows = [typed((int, int, int, int, int), row) for row in _a(list, record["events"], "events")]
            events = [Event(actions[_natural(action)], *more) for action, *more in rows]
            before = None if record["before"] is None else _segments_from(record["before"])
            devices.append(DeviceRecord(tuple(events), _segments_from(record["segments"]), before))
        known = [document[name] for name in ("settings", "torch", "device", "capacity_bytes")]
        snapshot = cls(tuple(devices), *known)
        _check(snapshot)
        return snapshot

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(record.events):,} events" for record in self.devices) or "no GPU"
        return f"Snapshot({counts}, {self.device or 'an unnamed GPU'}, torch {self.torch or 'unknown'})"


def record_snapshot(step: Callable[[], object], *, max_entries: int = 1_000_000) -> Snapshot:
    """Run `step()` on the GPU at hand with the allocator's history on; what its allocator was asked, and did.

    The step runs as it is: the state of the allocator before it is part of the snapshot, so warm up or empty the cache
    first if that is what you want to see. Of more than `max_entries` events the last are kept. The history is off
    afterwards, also when the step fails.

    Raises RuntimeError without a CUDA GPU, and when a history is being recorded already, which this would end.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "expected a CUDA GPU, whose allocator has a history to record; found none. Recorded snapshots are read "
            "with Snapshot.load, on any machine"
        )
    if torch._C._cuda_isHistoryEnabled():
        raise RuntimeError(
            "expected no memory history to be on, found one; save it, end it with "
            "torch.cuda.memory._record_memory_history(None), then record"
        )
    record = torch.cuda.memory._record_memory_history
    record("all", context=None, max_entries=max_entries, clear_history=True)
    try:
        before = torch.cuda.memory._snapshot()
        step()
        torch.cuda.synchronize()
        dump = torch.cuda.memory._snapshot()
    finally:
        record(None)
    if any(len(trace) >= max_entries for trace in dump["device_traces"]):
        before = None  # the first events are no longer there
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Snapshot.of(
        dump, before=before, torch=str(torch.__version__), device=card.name, capacity_bytes=card.total_memory
    )


# ---- PyTorch's rows into ours


def _segments_of(dump: dict, streams: dict[int, int], pools: dict[tuple, int]) -> dict[int, tuple[Segment, ...]]:
    """The segments of each GPU, by address."""
    found: dict[int, list[Segment]] = {}
    for row in _a(list, dump["segments"], "segments"):
        found.setdefault(_natural(row.get("device", 0), MOST_DEVICES), []).append(_segment_of(row, streams, pools))
    return {number: tuple(sorted(segments)) for number, segments in found.items()}


def _segment_of(row: dict, streams: dict[int, int], pools: dict[tuple, int]) -> Segment:
    blocks = [
        Block(block["size"], block.get("requested_size", block["size"]), block["state"].replace("awaiting", "pending"))
        for block in _a(list, row["blocks"], "blocks")
    ]
    return Segment(
        _a(int, row["address"], "address"),
        row["total_size"],
        _numbered(streams, row["stream"]),
        _numbered(pools, tuple(row.get("segment_pool_id", (0, 0)))),
        row["segment_type"],
        row.get("is_expandable", False),
        tuple(blocks),
    )


def _events_of(trace: list[dict], segments: tuple[Segment, ...], streams: dict[int, int], pools: dict[tuple, int]):
    private = [segment for segment in segments if segment.pool]  # where the events do not say it themselves
    for row in trace:
        action = row["action"]
        if action in PASSED_OVER:
            continue
        address = row["device_free" if action == "oom" else "addr"]
        pool = 0
        if "pool_id" in row:
            pool = _numbered(pools, tuple(row["pool_id"]))
        elif action != "oom":
            pool = next((s.pool for s in private if s.address <= address < s.address + s.size), 0)
        yield Event(action, address, row["size"], _numbered(streams, row["stream"]), pool)


def _numbered(numbers: dict, name: object) -> int:
    return numbers.setdefault(name, len(numbers))


# ---- segments in a file


def _rows_of(segments: tuple[Segment, ...]) -> list[list]:
    return [[*s[:6], [[b.size, b.requested, STATES.index(b.state)] for b in s.blocks]] for s in segments]


def _segments_from(rows: list[list]) -> tuple[Segment, ...]:
    segments = []
    for row in _a(list, rows, "segments"):
        *fields, blocks = typed((int, int, int, int, str, bool, list), row)
        blocks = [typed((int, int, int), block) for block in blocks]
        blocks = [Block(size, requested, STATES[_natural(state)]) for size, requested, state in blocks]
        segments.append(Segment(*fields, tuple(blocks)))
    return tuple(segments)


# ---- what every snapshot holds to


def _check(snapshot: Snapshot) -> None:
    typed((str, str), [snapshot.torch, snapshot.device])
    if snapshot.capacity_bytes is not None:
        _natural(snapshot.capacity_bytes, MOST_BYTES)
    for name, value in _a(dict, snapshot.settings, "settings").items():
        if not _is_setting(value):
            raise TypeError(f"setting {name!r} as {str(value)[:60]}")
    for record in snapshot.devices:
        for event in record.events:
            if event.action not in ACTIONS:
                raise ValueError(f"an unknown action {str(event.action)[:60]!r}")
            _natural(event.address, 2**64)
            _natural(event.size, MOST_BYTES)
            _natural(event.stream, MOST_STREAMS), _natural(event.pool, MOST_STREAMS)
        for segments in (record.segments, record.before or ()):
            _check_segments(segments)


def _check_segments(segments: tuple[Segment, ...]) -> None:
    end = 0
    for segment in segments:
        _natural(segment.address, 2**64), _natural(segment.stream), _natural(segment.pool)
        _a(bool, segment.expandable, "is_expandable")
        if segment.kind not in POOLS or any(block.state not in STATES for block in segment.blocks):
            raise ValueError(f"segment {segment.address:#x} or its blocks of an unknown kind or state")
        for block in segment.blocks:
            _natural(block.size, MOST_BYTES), _natural(block.requested, MOST_BYTES)
        if segment.address < end or segment.size != sum(block.size for block in segment.blocks):
            raise ValueError(f"segment {segment.address:#x} in another one, or with blocks of another total")
        end = segment.address + segment.size


def _a(kind: type, value: object, what: str):
    if type(value) is not kind:
        raise TypeError(f"{what} as {type(value).__name__}, expected {kind.__name__}")
    return value


def _natural(number: int, most: int = 2**31) -> int:
    if type(number) is not int or not 0 <= number < most:
        raise ValueError(f"expected a whole number from 0 to below {most}, found {str(number)[:60]}")
    return number


def _is_setting(value: object) -> bool:
    if type(value) is dict:
        numbers = all(type(name) is str and type(n) is int and abs(n) < 2**64 for name, n in value.items())
        return len(value) <= MOST_SETTINGS and numbers
    if type(value) is str:
        return len(value) <= MOST_CHARACTERS
    return type(value) is bool or (type(value) in (int, float) and abs(value) < 2**64)
