"""Snapshots: read without running anything, kept whole, and replayed on the model decision by decision."""

import copy
import json
import os
import pickle
import random
import re
import struct
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from memlab.book import snapshots
from memlab.book.snapshots import recorded_snapshots
from memlab.caching_allocator.allocator import CachingAllocator
from memlab.caching_allocator.compare import compare
from memlab.caching_allocator.expandable_segments import ExpandableAllocator
from memlab.caching_allocator.max_split_size import MaxSplitAllocator
from memlab.caching_allocator.pickles import read_snapshot
from memlab.caching_allocator.records import Block, DeviceRecord, Event, Segment
from memlab.caching_allocator.snapshot import Snapshot, record_snapshot
from memlab.caching_allocator.start import segments_at_start
from memlab.units import GiB, KiB, MiB
from tests.caching_allocator_naive import NaiveGPU, block_row, whole_dump
from tests.harness import refusals, refused
from tests.tiers import some


def work(gpu, steps, seed=0, *, streams=(0,), live=None, largest=40 * MiB, empty=0.01):
    """Random requests of every size class, frees in any order, now and then an empty_cache."""
    draw, live = random.Random(seed), [] if live is None else live
    for _ in range(steps):
        if live and draw.random() < 0.48:
            gpu.free(live.pop(draw.randrange(len(live))))
        else:
            top = draw.choice([4 * KiB, MiB, MiB, 3 * MiB, 12 * MiB, largest])
            address = gpu.malloc(draw.randint(1, top), draw.choice(streams))
            if address is not None:
                live.append(address)
        if draw.random() < empty:
            gpu.empty_cache()
    return live


def recorded():
    """A recording that begins in the middle."""
    gpu = NaiveGPU()
    live = work(gpu, 100, seed=1)
    gpu.trace.clear()
    work(gpu, 150, seed=2, live=live)
    return gpu


def all_equal(found):
    assert found.differences == [], str(found)
    assert found.decisions == found.decisions_equal > 0
    assert found.segments == found.segments_equal
    assert found.requests == found.addresses_equal > 0
    assert found.real_peak_bytes == found.model_peak_bytes and found.peaks_apart == 0
    return found


@pytest.mark.parametrize("protocol", [2, 5])
def test_what_pickle_wrote_is_read_as_it_was_and_stack_traces_only_when_asked_for(protocol, tmp_path):
    shared = [1, 2]
    dump = recorded().dump() | {"more": (None, True, 1.5, (), (1,), (1, 2), (1, 2, 3, 4), -(2**40), 2**63, {"a": []})}
    dump |= {"shared": [shared, shared, (shared,)]}
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(dump, protocol))
    assert read_snapshot(path.read_bytes(), frames=True) == read_snapshot(path, frames=True) == dump
    assert "secret" in str(dump) and "secret" not in str(read_snapshot(path))


HEAD = b"\x80\x04"


def inside(program):
    """A snapshot whose segments are what this program leaves on the stack."""
    return HEAD + b"}(\x8c\x08segments" + program + b"\x8c\x0ddevice_traces]u."


# Lists of a hundred lists, one and the same, and so on: 100 ** 6 for whoever walks them.
BROAD = b"(]\x94" + b"".join(b"]\x94(" + bytes([*b"h", i]) * 100 + b"e" for i in range(6)) + b"t"
HOSTILE = {
    "an import": (HEAD + b"cos\nsystem\n.", r"opcode GLOBAL at byte \d+: it would import os system"),
    "a call": (HEAD + b"]\x85R.", "it would call a function"),
    "a list within itself": (inside(b"]\x94h\x00a"), "finished, so none holds itself"),
    "broad lists": (inside(BROAD), "more than 10,000,000 values"),
    "deep lists": (inside(b"]" * 2000 + b"a" * 1999), "deeper than 32"),
    "empty lists without end": (inside(b"]" * 120_000), "too many values"),
    "memo entries without end": (inside(b"]" + b"\x94" * 500_000), "remembered twice"),
    "text of a huge declared length": (inside(b"\x8d" + b"\xff" * 7 + b"\x3fabc"), "truncated"),
    "a number of a megabyte": (inside(b"\x8b" + struct.pack("<i", 10**6) + b"\x11" * 10**6), "more than 64 bits"),
    "values from beyond a mark": (inside(b"(K\x01K\x02(K\x03\x87K\x05K\x06tt"), "never put there"),
    "a key without a value": (inside(b"}(\x8c\x01au"), "a key that has no value"),
    "a list as a key": (inside(b"}(]]u"), "a key that is no text"),
    "two values": (HEAD + b"]].", "or several"),
    "more after the end": (inside(b"]") + b"]", "1 bytes more after its end"),
    "text": (b"hello, this is no pickle at all\n", "something else"),
    "a list, as old snapshots were": (pickle.dumps([]), "no dict with segments"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_malicious_file_is_told_so_in_bounded_memory(name):
    raw, words = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"^these bytes: expected a pickled CUDA memory .*{words}") as error:
            read_snapshot(raw)
        assert tracemalloc.get_traced_memory()[1] < 32 * MiB + 4 * len(raw)
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 400
    refused(lambda: read_snapshot(raw, max_bytes=len(raw) - 1), ValueError, "more than …bytes; with max_bytes=")


def small_gpu():
    gpu = NaiveGPU()
    work(gpu, 12)
    return gpu


def test_a_snapshot_has_the_events_and_segments_of_the_dump_and_comes_back_from_its_file(tmp_path):
    gpu = recorded()
    dump = gpu.dump()
    snapshot = Snapshot.of(dump, before=dump, torch="2.13.0", device="a GPU", capacity_bytes=16 * GiB)
    record = snapshot.devices[0]
    assert [e[:3] for e in record.events] == [(row["action"], row["addr"], row["size"]) for row in gpu.trace]
    assert record.reserved_bytes == gpu.total("used", "free") and record.allocated_bytes == gpu.total("used")
    assert len(record.segments) == len(gpu.segments)
    path = tmp_path / "gpu.json"
    snapshot.save(path)
    assert Snapshot.load(path) == snapshot
    assert [file.name for file in tmp_path.iterdir()] == ["gpu.json"]
    assert len(snapshot.devices) == 2 and snapshot.devices[1].events == ()
    assert "secret" not in path.read_text() and "someone" not in path.read_text()
    assert repr(snapshot) == f"Snapshot({len(gpu.trace):,} events, 0 events, a GPU, torch 2.13.0)"


def test_streams_are_numbered_and_private_pools_found_by_address():
    trace = [
        {"action": "segment_alloc", "addr": 2**41, "size": 2 * MiB, "stream": 94_000_000_000},
        {"action": "alloc", "addr": 2**41, "size": 5, "stream": 94_000_000_000},
        {"action": "oom", "device_free": 7, "size": 1024, "stream": 94_000_000_000},
        {"action": "alloc", "addr": 2**42, "size": 5, "stream": 0, "pool_id": (0, 3)},
        {"action": "user_defined", "addr": 0, "size": 0, "stream": 0},
        {"action": "annotate", "addr": 2**42, "size": 5, "stream": 0, "user_metadata": "weights"},
    ]
    blocks = [block_row(2**41, 512, 5, True), block_row(2**41 + 512, 2 * MiB - 512, 0, False)]
    blocks[0]["state"] = "active_awaiting_free"  # as PyTorch's docstring has it
    segment = {"address": 2**41, "total_size": 2 * MiB, "stream": 94_000_000_000, "segment_type": "small"}
    dump = whole_dump([segment | {"blocks": blocks, "segment_pool_id": (0, 1), "is_expandable": False}], trace)
    record = Snapshot.of(dump).devices[0]
    assert record.events == (
        Event("segment_alloc", 2**41, 2 * MiB, 1, 1),
        Event("alloc", 2**41, 5, 1, 1),
        Event("oom", 7, 1024, 1, 0),
        Event("alloc", 2**42, 5, 0, 2),
    )
    assert record.segments[0].blocks[0].state == "active_pending_free"


def test_failing_to_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    snapshot = Snapshot.of(small_gpu().dump())
    path = tmp_path / "gpu.json"
    snapshot.save(path)
    before = path.read_bytes()
    refused(lambda: replace(snapshot, device=3).save(path), TypeError, "")  # what load would refuse
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    refused(lambda: snapshot.save(path), OSError, "disk full")
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def damaged(change):
    """Load what was saved, with this done to the document."""

    def call(folder):
        Snapshot.of(small_gpu().dump()).save(folder / "gpu.json")
        document = json.loads((folder / "gpu.json").read_text())
        change(document)
        (folder / "gpu.json").write_text(json.dumps(document))
        Snapshot.load(folder / "gpu.json")

    return call, r"gpu.json: expected (a complete snapshot, found one|format version 1)"


def lacking(change):
    """Read PyTorch's dump, with this done to it."""

    def call(folder):
        dump = copy.deepcopy(small_gpu().dump())
        change(dump)
        Snapshot.of(dump)

    return call, "expected a CUDA memory snapshot of PyTorch's, found one with"


def foreign(folder):
    (folder / "gpu.json").write_text('{"format": "memlab-timeline"}')
    Snapshot.load(folder / "gpu.json")


DAMAGE = {
    "another program's": (foreign, "expected a snapshot saved by memlab"),
    "another version": damaged(lambda d: d.update(version=2)),
    "no capacity": damaged(lambda d: d.pop("capacity_bytes")),
    "a setting NaN": damaged(lambda d: d["settings"].update(garbage_collection_threshold=float("nan"))),
    "an action below 0": damaged(lambda d: d["devices"][0]["events"][0].__setitem__(0, -1)),
    "a size below 0": damaged(lambda d: d["devices"][0]["events"][0].__setitem__(2, -5)),
    "a short event": damaged(lambda d: d["devices"][0]["events"][0].pop()),
    "a segment's total": damaged(lambda d: d["devices"][0]["segments"][0].__setitem__(1, 5)),
    "segments that overlap": damaged(lambda d: d["devices"][0]["segments"].append(d["devices"][0]["segments"][-1])),
    "a state of a block": damaged(lambda d: d["devices"][0]["segments"][0][6][0].__setitem__(2, 7)),
    "actions of numbers": damaged(lambda d: d.update(actions=[0, 1])),
    "no segments": lacking(lambda d: d.pop("segments")),
    "an unknown action": lacking(lambda d: d["device_traces"][0][0].update(action="think")),
    "no address": lacking(lambda d: d["device_traces"][0][0].pop("addr")),
    "settings of text": lacking(lambda d: d.update(allocator_settings="x")),
    "an unknown state": lacking(lambda d: d["segments"][0]["blocks"][0].update(state="lost")),
    "a device of many": lacking(lambda d: d["segments"][0].update(device=10**9)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_file_or_dump_is_refused_in_one_sentence(name, tmp_path):
    call, words = DAMAGE[name]
    with pytest.raises(ValueError, match=words) as error:
        call(tmp_path)
    assert "\n" not in str(error.value)


def pretend_gpu(monkeypatch, dump, calls, *, already=False):
    started = []

    def history(enabled, **options):
        calls.append((enabled, options))

    def is_enabled():
        assert started, "PyTorch has no allocators yet, and this would be a segmentation fault"
        return already

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(1))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", is_enabled, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: dump)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = type("Card", (), {"name": "a GPU", "total_memory": 16 * GiB})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)


def test_recording_switches_the_history_on_and_always_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="expected a CUDA GPU.*found none"):
        record_snapshot(lambda: pytest.fail("it ran"))
    calls, gpu = [], small_gpu()
    pretend_gpu(monkeypatch, gpu.dump(), calls)
    found = record_snapshot(lambda: calls.append("step"), max_entries=77)
    assert calls[0] == ("all", {"context": None, "max_entries": 77, "clear_history": True})
    assert calls[1:] == ["step", (None, {})]
    assert found == Snapshot.of(
        gpu.dump(), before=gpu.dump(), torch=str(torch.__version__), device="a GPU", capacity_bytes=16 * GiB
    )
    assert record_snapshot(lambda: None, max_entries=len(gpu.trace)).devices[0].before is None  # some may be lost
    with pytest.raises(ZeroDivisionError):
        record_snapshot(lambda: 1 / 0)
    assert calls[-1] == (None, {})
    calls.clear()
    pretend_gpu(monkeypatch, {}, calls, already=True)
    with pytest.raises(RuntimeError, match="expected no memory history to be on"):
        record_snapshot(lambda: None)
    assert calls == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_nearly_every_decision_of_a_real_step_is_the_models():
    def step():
        model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 512)).cuda()
        for tokens in (64, 4096, 128, 8192):
            model(torch.randn(tokens, 512, device="cuda")).square().mean().backward()

    found = compare(record_snapshot(step))
    assert found.segments_equal >= 0.99 * found.segments and found.peaks_apart <= 0.01, str(found)


def test_recorded_snapshots_are_found_and_damaged_ones_named_and_of_an_unknown_program_nothing_is_imagined(tmp_path):
    assert recorded_snapshots(tmp_path / "none") == ({}, [])
    assert snapshots.recorded_decisions(tmp_path / "none").rows[0][-2] == "not recorded yet"
    snapshot = Snapshot.of(small_gpu().dump())
    snapshot.save(tmp_path / "one.json")
    (tmp_path / "two.json").write_text("{")
    assert recorded_snapshots(tmp_path) == ({"one": snapshot}, [tmp_path / "two.json"])
    one, two = snapshots.recorded_decisions(tmp_path).rows
    assert one[0] == "one" and one[1] == one[3] == "–" and re.fullmatch(r"(\d+) of \1", one[-2])
    assert two == ["two.json", *"––––––", "damaged: record it anew", "–"]


RECORDED = sorted((Path(__file__).parents[1] / "chapters" / snapshots.FOLDER).glob("*.json"))


@some("path", RECORDED, keep=2)
def test_the_model_takes_the_decisions_of_every_card_that_was_recorded(path):
    found = compare(Snapshot.load(path))
    assert found.segments_equal >= 0.99 * found.segments > 0 and found.addresses_equal >= 0.99 * found.requests
    assert found.peaks_apart <= 0.01


H200S = sorted((path for path in RECORDED if "h200" in path.name), key=lambda path: "of_one_shape" not in path.name)


@some("path", H200S, keep=1)
def test_what_a_card_was_asked_for_is_storages_what_cublas_keeps_and_scratch_of_one_kernel(path):
    snapshot = Snapshot.load(path)
    requested, kept = snapshots.requested_bytes(snapshot.devices[0])
    assert kept == 2 * 32 * MiB + 1 * MiB  # cuBLAS for forward's thread and for backward's, and cuBLASLt
    scratch = requested - kept - snapshots.imagined_bytes(path.stem, snapshot)
    if "longer" in path.stem:
        assert 0 < scratch < 0.03 * requested
    else:  # a bias's gradient: sums of 1,024 features by 16 × 128 parts, in FP32, and two semaphores
        assert scratch == 4 * 1024 * 16 * 128 + 2 * 4


def test_requested_bytes_count_what_was_there_before():
    block = Block(1024, 1000, "active_allocated")
    before = (Segment(0, 2 * MiB, 0, 0, "small", False, (block, Block(2 * MiB - 1024, 7, "inactive"))),)
    events = [Event("alloc", 1024, 500), Event("free_requested", 1024, 500), Event("free_completed", 1024, 500)]
    assert snapshots.requested_bytes(DeviceRecord((*events, Event("alloc", 1024, 30)), (), before)) == (1500, 1030)
    assert snapshots.requested_bytes(DeviceRecord(tuple(events), ())) == (500, 0)


def test_programs_are_recorded_on_a_card_of_any_name_and_one_that_fails_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert snapshots.main([str(tmp_path / "none")]) == 2
    assert "expected a CUDA GPU" in capsys.readouterr().err and not any(tmp_path.iterdir())

    def record(program):
        program()
        return Snapshot.of(small_gpu().dump())

    def too_large():
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Quadro RTX 6000/8000")
    monkeypatch.setattr(snapshots, "record_snapshot", record)
    monkeypatch.setattr(snapshots, "PROGRAMS", {"one": too_large, "steps of one shape": lambda: None})
    assert snapshots.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == "one: not recorded: OutOfMemoryError: planted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["quadro-rtx-6000-8000_steps_of_one_shape.json"]
    monkeypatch.setattr(snapshots, "PROGRAMS", {"two": lambda: None})
    assert snapshots.main([str(tmp_path)]) == 0


def in_the_middle(gpu, seed, **options):
    """A recording that begins with blocks of before; and what was there then."""
    live = work(gpu, 60 + 20 * (seed % 20), seed, **options | {"empty": 0})
    gpu.trace.clear()
    before = copy.deepcopy(gpu.dump())
    work(gpu, 300, seed + 1, live=live, **options)
    return gpu.dump(), before


RECORDINGS = {
    "plain": (NaiveGPU, {}),
    "a full GPU": (partial(NaiveGPU, 120 * MiB), {}),
    "streams": (partial(NaiveGPU, 400 * MiB), {"streams": (0, 9, 17)}),
    "oversize": (partial(NaiveGPU, max_split=24 * MiB), {"largest": 80 * MiB}),
    "oversize, full": (partial(NaiveGPU, 300 * MiB, max_split=24 * MiB), {"largest": 80 * MiB}),
    "oversize, streams": (partial(NaiveGPU, 400 * MiB, max_split=24 * MiB), {"largest": 80 * MiB, "streams": (0, 9)}),
    "expandable": (partial(NaiveGPU, expandable=True), {}),
    "expandable, full": (partial(NaiveGPU, 300 * MiB, expandable=True), {}),
}


@some("seed", range(20), keep=3)
@pytest.mark.parametrize("kind", RECORDINGS)
def test_the_model_makes_every_decision_of_an_independent_allocator(kind, seed):
    make, options = RECORDINGS[kind]
    gpu = make(seed=seed)
    dump, before = in_the_middle(gpu, seed, **options)
    capacity = gpu.capacity if gpu.capacity < float("inf") else None
    found = all_equal(compare(Snapshot.of(dump, before=before, capacity_bytes=capacity)))
    actions = [row["action"] for row in gpu.trace]
    assert found.requests == actions.count("alloc")
    assert found.segments == sum(action.startswith("segment") for action in actions)
    if kind == "a full GPU":
        assert "segment_free" in actions and found.real_peak_bytes <= capacity


@some("seed", range(40), keep=8)
def test_what_was_there_before_follows_from_what_is_there_at_the_end(seed):
    dump, before = in_the_middle(NaiveGPU(seed=seed, capacity=(None, 250 * MiB)[seed % 2]), seed)
    snapshot = Snapshot.of(dump)
    found = segments_at_start(snapshot.devices[0])
    truth = Snapshot.of(before).devices[0].segments
    assert [segment[:6] for segment in found] == [segment[:6] for segment in truth]
    for segment, true in zip(found, truth, strict=True):
        assert live_blocks(segment).keys() == live_blocks(true).keys()
        for address, (size, requested) in live_blocks(segment).items():
            true_size, true_request = live_blocks(true)[address]
            assert requested == true_request and (size == true_size or 0 < true_size - size <= MiB)
    if list(truth) == found:  # else no event makes it clear; with the state before, all of them are
        all_equal(compare(snapshot))


def live_blocks(segment):
    address, found = segment.address, {}
    for block in segment.blocks:
        if block.state != "inactive":
            found[address] = block.size, block.requested
        address += block.size
    return found


def test_an_allocator_with_another_rounding_is_found_out():
    gpu = NaiveGPU(rounding=256 * KiB)
    work(gpu, 600, 3)
    found = compare(Snapshot.of(gpu.dump()))
    assert found.addresses_equal < found.requests
    assert found.segments_equal < found.segments and found.decisions_equal < found.decisions
    assert "served it at" in str(found.differences[0]) and len(found.differences) == 20


@pytest.mark.parametrize("options", [{}, {"max_split": 25 * MiB}, {"expandable": True}], ids=str)
def test_every_recording_is_compared_with_a_model_of_other_rules_to_its_end(options):
    dump, before = in_the_middle(NaiveGPU(250 * MiB, **options), 0)
    snapshot = Snapshot.of(dump, before=before, capacity_bytes=250 * MiB)
    found = compare(snapshot, partial(ExpandableAllocator, 50 * MiB))
    assert found.decisions_equal < found.decisions
    if "expandable" in options:
        words = "expected a model with expandable segments…found CachingAllocator"
        refused(lambda: compare(snapshot, CachingAllocator), ValueError, words)


def test_an_address_that_the_model_still_holds_is_not_given_again():
    a, b = 2**46, 2**46 + GiB
    rows = [("segment_alloc", a, 20 * MiB), ("alloc", a, 3 * MiB), ("segment_alloc", b, 20 * MiB)]
    rows += [("alloc", b, 4 * MiB), ("free_completed", a, 3 * MiB), ("segment_free", a, 20 * MiB)]  # the model: beside
    rows += [("segment_alloc", a, 18 * MiB), ("alloc", a, 18 * MiB), ("free_completed", a, 18 * MiB)]
    rows += [("free_completed", b, 4 * MiB), ("segment_free", a, 18 * MiB), ("segment_free", b, 20 * MiB)]
    found = compare(Snapshot.of(whole_dump([], [{"action": x, "addr": y, "size": z, "stream": 0} for x, y, z in rows])))
    assert found.requests == 3 and found.addresses_equal == 1
    assert "the model took 18.0 MiB at 0x1" in str(found)
    assert found.model_peak_bytes == 38 * MiB


def test_the_end_of_a_private_pool_empties_that_pool_alone():
    a, b, private = 2**46, 2**46 + GiB, {"pool_id": (0, 1)}
    rows = [("segment_alloc", a, 30 * MiB, {}), ("alloc", a, 30 * MiB, {}), ("free_completed", a, 30 * MiB, {})]
    rows += [("segment_alloc", b, 40 * MiB, private), ("alloc", b, 40 * MiB, private)]
    rows += [("free_completed", b, 40 * MiB, private), ("segment_free", b, 40 * MiB, private)]
    rows += [("alloc", a, 30 * MiB, {})]  # out of the cache
    trace = [
        {"action": action, "addr": address, "size": size, "stream": 0} | pool for action, address, size, pool in rows
    ]
    kept = {"address": a, "total_size": 30 * MiB, "stream": 0, "segment_type": "large"}
    all_equal(compare(Snapshot.of(whole_dump([kept | {"blocks": [block_row(a, 30 * MiB, 30 * MiB, True)]}], trace))))


def test_part_of_a_segment_is_not_given_back_as_an_oversize_block():
    gpu = NaiveGPU(150 * MiB)
    parts = [gpu.malloc(50 * MiB) for _ in range(3)]
    gpu.free(parts[0])
    gpu.malloc(10 * MiB)  # beside it are 40 MiB free, as with max_split_size there could not be
    gpu.trace.clear()
    assert gpu.malloc(60 * MiB) is None
    found = compare(Snapshot.of(gpu.dump()), partial(MaxSplitAllocator, 25 * MiB))
    assert found.decisions == found.decisions_equal == 1


def two_requests(*, second_segment):
    """A request of 3 MiB, then one that the first segment's rest would serve; CUDA's rules need no second segment."""
    a, b = 2**46, 2**46 + GiB
    trace = [("segment_alloc", a, 20 * MiB), ("alloc", a, 3 * MiB)]
    trace += (
        [("segment_alloc", b, 20 * MiB), ("alloc", b, 4 * MiB)] if second_segment else [("alloc", a + 3 * MiB, 4 * MiB)]
    )
    blocks = [block_row(a, 3 * MiB, 3 * MiB, True)]
    blocks += [] if second_segment else [block_row(a + 3 * MiB, 4 * MiB, 4 * MiB, True)]
    rows = [(a, blocks)]
    if second_segment:
        rows.append((b, [block_row(b, 4 * MiB, 4 * MiB, True)]))
    segments = []
    for address, blocks in rows:
        used = sum(block["size"] for block in blocks)
        blocks = [*blocks, block_row(address + used, 20 * MiB - used, 0, False)]
        segments.append(
            {"address": address, "total_size": 20 * MiB, "stream": 0, "segment_type": "large", "blocks": blocks}
        )
    return Snapshot.of(whole_dump(segments, [{"action": x, "addr": y, "size": z, "stream": 0} for x, y, z in trace]))


def test_a_segment_that_only_the_real_one_took_is_told_with_its_size_and_place():
    found = compare(two_requests(second_segment=True))
    assert [str(one) for one in found.differences] == [
        "event 3, a request of 4.0 MiB: the GPU's allocator took 20.0 MiB at 0x400040000000; "
        "the model needed no segment"
    ]
    assert (found.decisions, found.decisions_equal, found.segments, found.segments_equal) == (2, 1, 2, 1)
    assert (found.real_peak_bytes, found.model_peak_bytes, found.peaks_apart) == (40 * MiB, 20 * MiB, 0.5)
    all_equal(compare(two_requests(second_segment=False)))


def test_a_model_of_other_rules_is_found_out_too():
    class TooEager(CachingAllocator):
        def _best_fit(self, pool, size):
            return None  # a segment for every request

    found = compare(two_requests(second_segment=False), TooEager)
    assert found.segments == 2 and found.segments_equal == 1
    assert "needed no segment; the model took 20.0 MiB" in str(found.differences[0])

    class Generous(CachingAllocator):
        def _from_device(self, pool, size):
            return super()._from_device(pool, 2 * max(size, 20 * MiB))

    found = compare(two_requests(second_segment=False), Generous)
    assert (found.segments, found.segments_equal, found.model_peak_bytes) == (2, 0, 40 * MiB)
    assert "took 20.0 MiB at 0x400000000000; the model took 40.0 MiB" in str(found.differences[0])

    class Stingy(CachingAllocator):
        def _from_device(self, pool, size):
            return None

    snapshot = two_requests(second_segment=False)
    assert "the model refused" in str(compare(snapshot, Stingy).differences[0])
    events = (*snapshot.devices[0].events, Event("oom", 0, 2 * MiB))
    found = compare(Snapshot((snapshot.devices[0]._replace(events=events),), {}))
    assert str(found.differences[0]).endswith("allocator refused; the model needed no segment")


def test_settings_that_the_model_lacks_are_noted():
    gpu = small_gpu()
    dump = gpu.dump()
    dump["allocator_settings"] |= {"roundup_power2_divisions": {"1": 4}, "garbage_collection_threshold": 0.8}
    notes = compare(Snapshot.of(dump)).notes
    assert len(notes) == 2 and "roundup_power2_divisions" in notes[0] and "garbage_collection_threshold" in notes[1]
    assert compare(Snapshot.of(gpu.dump())).notes == []


def test_private_pools_and_blocks_that_wait_for_a_stream_are_noted():
    record = two_requests(second_segment=False).devices[0]
    first, second = (event.address for event in record.events if event.action == "alloc")
    frees = [Event("free_requested", first, 0), Event("free_requested", second, 0)]

    def notes(*events):
        return compare(Snapshot((record._replace(events=(*record.events, *events)),), {})).notes

    assert notes(frees[0], Event("free_completed", first, 0), Event("oom", 0, 2**40)) == []
    for waits in (frees[:1], [frees[0], Event("oom", 0, 2**40), Event("free_completed", first, 0)], frees):
        (note,) = notes(*waits)
        assert "waited for another stream" in note and "on a full GPU only after it failed" in note
    private = notes(Event("oom", 0, 2**40, pool=1))
    assert "a model each" in private[0] and "not retried there" in private[1] and "no_split" in private[2]


def stray(*events, segments=None):
    record = two_requests(second_segment=False).devices[0]
    record = record._replace(events=(*record.events, *events))
    return Snapshot((record if segments is None else record._replace(segments=segments),), {})


STRAY = Event("free_completed", 5, 512)
REFUSALS = {
    "no events": (lambda: compare(Snapshot((), {})), ValueError, "of a GPU with recorded events, one of []"),
    "two GPUs": (lambda: compare(Snapshot(stray().devices * 2, {})), ValueError, "one of [0, 1]; found None"),
    "no segments at the end": (lambda: compare(stray(segments=())), ValueError, "event 0: expected a segment that"),
    "a block outside": (lambda: compare(stray(STRAY)), ValueError, "expected every block in a segment"),
}


@refusals(REFUSALS)
def test_a_recording_that_leads_nowhere_is_refused(call, error, words):
    refused(call, error, words)


def test_the_gpu_and_what_makes_a_model_can_be_given():
    all_equal(compare(Snapshot(stray().devices * 2, {}), partial(CachingAllocator, None), device=1))
