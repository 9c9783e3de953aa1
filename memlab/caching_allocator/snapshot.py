"""A memory snapshot of a real GPU, kept as plain JSON: what was asked of its allocator, and what it decided.

PyTorch records both in one list. The *questions* are `alloc` and `free_completed`, with the bytes requested; the
*answers* are the address of each block, and every `segment_alloc` and `segment_free` (with expandable segments,
`segment_map` and `segment_unmap`). At its end stand the segments with their blocks as they are then. So whoever has a
snapshot can put the questions to a model and hold every answer against the real one (`compare`), on a machine without
a GPU.

    snapshot = record_snapshot(step)                       on a GPU
    snapshot = Snapshot.of(read_snapshot("dump.pickle"))   a file of torch.cuda.memory._dump_snapshot, read as data
    snapshot.save("h100.json"); Snapshot.load("h100.json")

Source: the docstring of `torch.cuda.memory._snapshot`, PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from memlab.caching_allocator.records import (
    ACTIONS,
    MOST_BYTES,
    STATES,
    Block,
    DeviceRecord,
    Event,
    Segment,
    check_record,
    expect,
    natural,
)
from memlab.files import Kind, typed

FILE = Kind("a snapshot", "memlab-snapshot", version=1)
MOST_SETTINGS, MOST_CHARACTERS = 100, 1000
PASSED_OVER = ("user_defined", "annotate")  # a program's own remarks between the events, and on an allocation
MOST_DEVICES = 64


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

        before: such a one from just before the first event, where there is one. `compare` needs it of an allocator
        that held anything then.

        Raises ValueError for a dump that lacks something, or has something of another type, and says where.
        """
        try:
            devices = _records_of(dump, before)
            settings = {k: v for k, v in dump.get("allocator_settings", {}).items() if _is_setting(v)}
            snapshot = cls(devices, settings, torch, device, capacity_bytes)
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
        for record in expect(list, document["devices"], "devices"):
            rows = [typed((int, int, int, int, int), row) for row in expect(list, record["events"], "events")]
            events = [Event(actions[natural(action)], *more) for action, *more in rows]
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
    torch.cuda.init()  # without it the next line asks allocators that are not there yet, and the process ends
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


# ---- PyTorch's dump as records: without stack traces, and with streams, which are pointers, numbered


def _records_of(dump: dict, before: dict | None = None) -> tuple[DeviceRecord, ...]:
    """Each GPU's record. before: a dump from just before the first event, where there is one.

    Raises KeyError, TypeError, AttributeError or ValueError for a dump that lacks something, or has something else.
    """
    streams, pools = {0: 0}, {(0, 0): 0}
    segments = _segments_of(dump, streams, pools)
    held = {} if before is None else _segments_of(before, streams, pools)
    traces = [expect(list, trace, "device_traces") for trace in expect(list, dump["device_traces"], "device_traces")]
    records = []
    for number in range(max([len(traces), *(n + 1 for n in segments | held)], default=0)):
        mine, mine_before = segments.get(number, ()), held.get(number, ())
        events = _events_of(traces[number] if number < len(traces) else [], mine, streams, pools)
        records.append(DeviceRecord(tuple(events), mine, None if before is None else mine_before))
    return tuple(records)


def _segments_of(dump: dict, streams: dict[int, int], pools: dict[tuple, int]) -> dict[int, tuple[Segment, ...]]:
    """The segments of each GPU, by address."""
    found: dict[int, list[Segment]] = {}
    for row in expect(list, dump["segments"], "segments"):
        found.setdefault(natural(row.get("device", 0), MOST_DEVICES), []).append(_segment_of(row, streams, pools))
    return {number: tuple(sorted(segments)) for number, segments in found.items()}


def _segment_of(row: dict, streams: dict[int, int], pools: dict[tuple, int]) -> Segment:
    blocks = [
        Block(block["size"], block.get("requested_size", block["size"]), block["state"].replace("awaiting", "pending"))
        for block in expect(list, row["blocks"], "blocks")
    ]
    return Segment(
        expect(int, row["address"], "address"),
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
    for row in expect(list, rows, "segments"):
        *fields, blocks = typed((int, int, int, int, str, bool, list), row)
        blocks = [typed((int, int, int), block) for block in blocks]
        blocks = [Block(size, requested, STATES[natural(state)]) for size, requested, state in blocks]
        segments.append(Segment(*fields, tuple(blocks)))
    return tuple(segments)


# ---- what every snapshot holds to


def _check(snapshot: Snapshot) -> None:
    typed((str, str), [snapshot.torch, snapshot.device])
    if snapshot.capacity_bytes is not None:
        natural(snapshot.capacity_bytes, MOST_BYTES)
    for name, value in expect(dict, snapshot.settings, "settings").items():
        if type(name) is not str or not _is_setting(value):
            raise TypeError(f"setting {str(name)[:60]!r} as {str(value)[:60]}")
    for record in snapshot.devices:
        check_record(record)


def _is_setting(value: object) -> bool:
    if type(value) is dict:
        numbers = all(type(name) is str and type(n) is int and abs(n) < 2**64 for name, n in value.items())
        return len(value) <= MOST_SETTINGS and numbers
    if type(value) is str:
        return len(value) <= MOST_CHARACTERS
    return type(value) is bool or (type(value) in (int, float) and abs(value) < 2**64)
