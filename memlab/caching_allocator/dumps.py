"""PyTorch's dump of its allocator as records: plain data of `torch.cuda.memory._snapshot()`, or of a file parsed.

What is kept names no file and no person: stack traces are dropped, and streams, which are pointers, are numbered.
"""

from __future__ import annotations

from memlab.caching_allocator.records import Block, DeviceRecord, Event, Segment, expect, natural

PASSED_OVER = ("user_defined", "annotate")  # a program's own remarks between the events, and on an allocation
MOST_DEVICES = 64


def records_of(dump: dict, before: dict | None = None) -> tuple[DeviceRecord, ...]:
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
