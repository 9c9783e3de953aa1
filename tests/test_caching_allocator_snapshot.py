"""Snapshots: read without running anything, kept whole, and replayed on the model decision by decision."""

import copy
import copyreg
import io
import json
import os
import pickle
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from memlab.book import snapshots
from memlab.book.snapshots import recorded_snapshots
from memlab.caching_allocator import (
    CachingAllocator,
    ExpandableAllocator,
    Snapshot,
    compare,
    read_snapshot,
    record_snapshot,
)
from memlab.caching_allocator.records import Block, DeviceRecord, Event, Segment
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
    assert found.real_peak_bytes == found.model_peak_bytes > 0
    return found


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_what_pickle_wrote_is_read_as_it_was_but_for_stack_traces(protocol, tmp_path):
    shared = [1, 2]
    more = {"more": (None, True, 1.5, (), (1,), (1, 2, 3, 4), -(2**40), 2**63, {"a": []}), "shared": [shared, shared]}
    dump = recorded().dump() | more
    path = tmp_path / "dump.pickle"
    path.write_bytes(pickle.dumps(dump, protocol))
    found = read_snapshot(path)
    assert found == read_snapshot(path.read_bytes()) == without_frames(dump)
    assert "secret" in str(dump) and "secret" not in str(found)


def without_frames(value):
    if isinstance(value, dict):
        return {name: without_frames(inner) for name, inner in value.items() if name != "frames"}
    return [without_frames(inner) for inner in value] if isinstance(value, list) else value


class Planted:
    """What happens where this is unpickled: an import, a call with these arguments."""

    ran = []

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return Planted.ran.append, self.arguments


def dumped(segments):
    return pickle.dumps({"segments": segments, "device_traces": []})


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def broad(depth):
    """A list of ten lists, one and the same, and so on: 10 ** depth for whoever walks them."""
    found = [1]
    for _ in range(depth):
        found = [found] * 10
    return found


def within_itself():
    found = []
    found.append(found)
    return found


class WithParts(pickle.Pickler):
    def persistent_id(self, value):
        return 7 if value == "elsewhere" else None


def with_parts():
    file = io.BytesIO()
    WithParts(file, 4).dump({"segments": "elsewhere", "device_traces": []})
    return file.getvalue()


WHOLE = dumped([{"address": 2**41, "blocks": []}] * 50)
HOSTILE = {
    "a call": (dumped(Planted(1)), "a program that would import 'builtins.getattr', of which nothing was run"),
    "a class": (dumped(Planted), "would import 'tests.test_caching_allocator_snapshot.Planted'"),
    "a number for an import": (b"\x80\x04\x82\x07.", "would import 'tests.test_caching_allocator_snapshot.Planted'"),
    "parts elsewhere": (with_parts(), "a pickle with parts elsewhere"),
    "cut off": (WHOLE[:-40], "a truncated or foreign file"),
    "cut off at once": (WHOLE[:5], "a truncated or foreign file"),
    "nothing": (b"", r"a truncated or foreign file \(EOFError"),
    "a set": (dumped({1, 2}), "one with a set"),
    "a list within itself": (dumped(within_itself()), "more than 32 deep"),
    "deep lists": (dumped(nested(100)), "more than 32 deep"),
    "broad lists": (dumped(broad(9)), "more values than the file has bytes"),
    "more after the end": (WHOLE + b"]", "more bytes after the end"),
    "text": (b"hello, this is no pickle at all\n", "a truncated or foreign file"),
    "a list, as old snapshots were": (pickle.dumps([]), "data without segments"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_malicious_file_is_refused_in_one_sentence_and_nothing_of_it_runs(name, monkeypatch):
    raw, words = HOSTILE[name]
    monkeypatch.setitem(copyreg._inverted_registry, 7, (__name__, "Planted"))
    monkeypatch.setitem(copyreg._extension_cache, 7, Planted)  # as if the program had used it before
    with pytest.raises(ValueError, match=f"^these bytes: expected a pickled CUDA memory .*{words}") as error:
        read_snapshot(raw)
    assert Planted.ran == []
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
    if raw:
        refused(lambda: read_snapshot(raw, max_bytes=len(raw) - 1), ValueError, "more than …bytes, which max_bytes=")


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
    assert sum(segment.size for segment in record.segments) == gpu.total("used", "free")
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
    assert found.segments_equal >= 0.99 * found.segments, str(found)
    assert found.model_peak_bytes == pytest.approx(found.real_peak_bytes, rel=0.01)


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
    assert found.model_peak_bytes == pytest.approx(found.real_peak_bytes, rel=0.01)


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
}


@some("seed", range(20), keep=3)
@pytest.mark.parametrize("kind", RECORDINGS)
def test_the_model_makes_every_decision_of_an_independent_allocator(kind, seed):
    make, options = RECORDINGS[kind]
    gpu = make(seed=seed)
    dump, before = in_the_middle(gpu, seed, **options)
    found = all_equal(compare(Snapshot.of(dump, before=before)))
    actions = [row["action"] for row in gpu.trace]
    assert found.requests == actions.count("alloc")
    assert found.segments == sum(action.startswith("segment") for action in actions)
    if kind == "a full GPU":
        assert "segment_free" in actions and found.real_peak_bytes <= gpu.capacity


def test_an_allocator_with_another_rounding_is_found_out():
    gpu = NaiveGPU(rounding=256 * KiB)
    work(gpu, 600, 3)
    found = compare(Snapshot.of(gpu.dump()))
    assert found.addresses_equal < found.requests
    assert found.segments_equal < found.segments and found.decisions_equal < found.decisions
    assert "served it at" in str(found.differences[0]) and len(found.differences) == 20


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
    assert (found.real_peak_bytes, found.model_peak_bytes) == (40 * MiB, 20 * MiB)
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
    notes = sorted(compare(Snapshot.of(dump)).notes)
    assert len(notes) == 2 and "garbage_collection_threshold" in notes[0] and "roundup_power2_divisions" in notes[1]
    assert compare(Snapshot.of(gpu.dump())).notes == []


def stray(*events, segments=None):
    record = two_requests(second_segment=False).devices[0]
    record = record._replace(events=(*record.events, *events))
    return Snapshot((record if segments is None else record._replace(segments=segments),), {})


def from_the_middle():
    dump, _ = in_the_middle(NaiveGPU(), 0)
    return compare(Snapshot.of(dump))


def expandable():
    gpu = NaiveGPU(expandable=True)
    work(gpu, 12)
    return compare(Snapshot.of(gpu.dump()))


def with_a_model_of_pages():
    return compare(two_requests(second_segment=False), ExpandableAllocator)


CACHED = (Segment(2**45, 2 * MiB, 0, 0, "small", False, (Block(2 * MiB, 0, "inactive"),)),)
REFUSALS = {
    "no events": (
        lambda: compare(Snapshot((), {})),
        ValueError,
        "expected events of one GPU, found those of none",
    ),
    "two GPUs": (
        lambda: compare(Snapshot(stray().devices * 2, {})),
        ValueError,
        "found those of [0, 1]; record one at a time",
    ),
    "no segments at the end": (lambda: compare(stray(segments=())), ValueError, "at its end that no event made"),
    "a free of before": (
        lambda: compare(stray(Event("free_completed", 5, 512))),
        ValueError,
        "found event 3, free_completed at 0x5, of one from before; record with record_snapshot",
    ),
    "a segment of before": (
        lambda: compare(stray(segments=CACHED + stray().devices[0].segments)),
        ValueError,
        "at its end that no event made; record with record_snapshot",
    ),
    "from the middle": (from_the_middle, ValueError, "expected a recording from an empty allocator, or"),
    "expandable segments": (expandable, ValueError, "without expandable segments, which are not compared here"),
    "a model of pages": (with_a_model_of_pages, ValueError, "a model that takes whole segments"),
}


@refusals(REFUSALS)
def test_a_recording_that_leads_nowhere_is_refused(call, error, words):
    refused(call, error, words)
