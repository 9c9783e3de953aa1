"""A Timeline in PyTorch's snapshot format: PyTorch's own tools take it, and the reader of chapter 04 reads it back."""

import functools
import itertools

import pytest
import torch
from torch.cuda import _memory_viz

from memlab.book.workloads import GPT, LSTM
from memlab.caching_allocator import (
    FREE,
    CachingAllocator,
    ExpandableAllocator,
    MaxSplitAllocator,
    Snapshot,
    compare,
    read_snapshot,
    requests,
)
from memlab.memory_monitoring import as_snapshot, save_snapshot
from memlab.memory_timeline import Meter, Timeline, imagine
from memlab.units import MiB
from tests.harness import refused
from tests.tiers import pairs

GiB = 1024 * MiB


def step_of(model, device="cpu"):
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (torch.zeros(4, 32, dtype=torch.int64) for _ in "xy")
    with Meter(model, optimizer, inputs=(x, y)) as meter:
        for _ in range(2):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.timeline


@pytest.fixture
def imagined() -> Timeline:
    return timeline_of("an imagined card")


TIMELINES = ["a CPU", "an imagined card", "an LSTM", "grown and shrunk"]
ALLOCATORS = {
    "the usual": lambda peak: CachingAllocator(),
    "with little room": lambda peak: CachingAllocator(peak + 24 * MiB),
    "max_split_size": lambda peak: MaxSplitAllocator(20 * MiB + MiB),
    "expandable": lambda peak: ExpandableAllocator(16 * GiB),
}
MODELS = {"max_split_size": functools.partial(MaxSplitAllocator, 20 * MiB + MiB)}


@functools.cache
def timeline_of(name) -> Timeline:
    if name == "an imagined card":
        with imagine("H100-80GB"):
            return step_of(GPT(layers=2, width=256, heads=4, context=64))
    if name == "a CPU":
        return step_of(GPT(layers=2, width=64, heads=2, context=32))
    if name == "an LSTM":
        return step_of(LSTM(width=32))
    with Meter() as meter:
        x = torch.zeros(300_000)
        x.untyped_storage().resize_(2_000_000)
        x.untyped_storage().resize_(1_000)
        torch.zeros(7)
    return meter.timeline


@pytest.fixture(params=TIMELINES)
def timeline(request) -> Timeline:
    return timeline_of(request.param)


@pairs("timeline, name", TIMELINES, [name for name in ALLOCATORS if name != "expandable"])
def test_chapter_04_reads_a_saved_snapshot_back_and_finds_every_decision_equal(timeline, tmp_path, name):
    timeline = timeline_of(timeline)
    make = lambda: ALLOCATORS[name](timeline.peak_bytes)  # noqa: E731
    path = tmp_path / "step.pickle"
    allocator = make()
    save_snapshot(timeline, path, allocator)
    assert path.read_bytes()[:2] in (b"\x80\2", b"\x80\3", b"\x80\4")  # those that PyTorch's page reads
    found = compare(Snapshot.of(read_snapshot(path)), MODELS.get(name, CachingAllocator))
    assert found.decisions and found.decisions_equal == found.decisions
    assert found.segments and found.segments_equal == found.segments
    assert found.requests == sum(nbytes > 0 for _, nbytes in requests(timeline)) == found.addresses_equal
    assert found.model_peak_bytes == found.real_peak_bytes == make().replay(timeline).peak_reserved_bytes


def test_a_line_with_a_semicolon_is_one_frame_of_a_flame_graph():
    with Meter() as meter:
        kept = torch.zeros(300); kept = kept + 1  # noqa: E702 # fmt: skip
    lines = _memory_viz.memory(as_snapshot(meter.timeline), format_flamegraph=str).splitlines()
    assert [line.count(";") for line in lines if "active_allocated" in line and "<gaps>" not in line] == [5]
    del kept


def test_every_block_in_use_at_the_end_carries_the_frames_of_the_storage_it_serves(imagined):
    snapshot = as_snapshot(imagined)
    blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    alive = imagined.alive(len(imagined))
    assert {s["device"] for s in snapshot["segments"]} == {0}
    assert sorted(b["requested_size"] for b in blocks) == sorted(s.nbytes for s in alive)
    told = lambda frames: [frames[0]["name"], *(f["name"] for f in frames[2:])]  # noqa: E731
    assert sorted(told(b["frames"]) for b in blocks) == sorted([s.reason, s.category, s.phase] for s in alive)


def test_pytorchs_plots_and_flame_graphs_take_it(timeline):
    snapshot = as_snapshot(timeline)
    for html in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in html
    lines = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
    held = sum(int(line.rpartition(" ")[2]) for line in lines if ";active_allocated;" in line and "<gaps>" not in line)
    assert held == timeline.totals[-1]
    # phase, category, module and line, reason: four frames each, cut nowhere by what a line's text has in it.
    assert {line.count(";") for line in lines if "active_allocated" in line and "<gaps>" not in line} == {5}
    assert _memory_viz.segments(snapshot, format_flamegraph=str)


def test_a_full_card_ends_the_history_with_its_refusal(imagined):
    room = imagined.peak_bytes // 2
    snapshot = as_snapshot(imagined, allocator := CachingAllocator(room))
    last = snapshot["device_traces"][0][-1]
    assert last["action"] == "oom" and last["device_free"] == room - allocator.reserved_bytes
    assert last["size"] == next(e.delta for e in imagined.everything() if e.delta == last["size"])
    found = compare(Snapshot.of(snapshot))
    assert found.decisions_equal == found.decisions


def test_a_file_that_cannot_be_written_leaves_nothing_and_the_old_one_whole(imagined, tmp_path, monkeypatch):
    path = tmp_path / "step.pickle"
    save_snapshot(Timeline(), path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save_snapshot(imagined, path)
    assert [p.name for p in tmp_path.iterdir()] == ["step.pickle"] and path.read_bytes() == before


def test_held_bytes_over_the_events_are_the_timelines_and_requests_come_in_pytorchs_order(timeline):
    """Independent of the writer: what the viewer's page adds up, alloc and free_completed."""
    events = [e for e in as_snapshot(timeline)["device_traces"][0] if e["action"] in ("alloc", "free_completed")]
    curve = list(itertools.accumulate(e["size"] * (1 if e["action"] == "alloc" else -1) for e in events))
    assert curve[-1] == timeline.totals[-1]
    grown = sum(e.delta > 0 for e in timeline.everything()) > len(timeline.storages)
    if not grown:  # what grows is asked for anew before the old bytes go back, so for a moment both are held
        assert max(curve) == timeline.peak_bytes
    told = [e["size"] if e["action"] == "alloc" else FREE for e in events]
    assert told == [nbytes for _, nbytes in requests(timeline)]


def test_the_settings_are_those_of_the_allocator_which_has_served_nobody_yet():
    snapshots = [as_snapshot(Timeline(), make(0)) for make in ALLOCATORS.values()]
    assert all(s["segments"] == [] and s["device_traces"] == [[]] for s in snapshots)
    settings = [s["allocator_settings"] for s in snapshots]
    assert [s["expandable_segments"] for s in settings] == [False, False, False, True]
    assert [s["max_split_size"] for s in settings] == [-1, -1, 21 * MiB, -1]
    used = CachingAllocator()
    used.free(used.malloc(512))
    refused(lambda: as_snapshot(Timeline(), used), ValueError, "expected an allocator that has served nothing yet")
