"""A monitor's figures are the system's own, its peaks miss nothing that a high-water mark saw, and it stays small."""

import contextlib
import ctypes
import gc
import math
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from memlab.memory_monitoring import (
    Forecast,
    Forecaster,
    Gone,
    Growth,
    MemoryWarning,
    MeteredMemory,
    Monitor,
    ProcessMemory,
    read_log,
    sources,
)
from memlab.memory_monitoring.alarms import Threshold
from memlab.memory_monitoring.forecasts import Outlook
from memlab.memory_monitoring.high_water import HighWater, _tables, join_mark
from memlab.memory_monitoring.readings import Readings
from memlab.memory_timeline import Meter, imagine
from memlab.units import KiB, MiB

ROUGHLY = 24  # MiB: since Linux 6.2 every core counts some resident pages late, on a host of many cores many

linux = pytest.mark.skipif(not sources.HAS_PROC, reason="needs /proc")
glibc = pytest.mark.skipif(ProcessMemory()._heap is None, reason="needs glibc's mallinfo2")


class Figures:
    """A source that says what it is told to."""

    def __init__(self, name="figures", **figures):
        self.name, self.figures, self.marks, self.asked, self.closed = name, figures, {}, 0, 0

    def read(self):
        self.asked += 1
        return dict(self.figures)

    def peaks(self):
        marks, self.marks = self.marks, {}
        return marks

    def close(self):
        self.closed += 1


def run(monitor, source, ends, level="allocated", peaks=None):
    """A step for each end (and peak) in bytes."""
    for number, end in enumerate(ends):
        source.figures[level] = end
        if peaks is not None:
            source.marks = {level: peaks[number]}
        monitor.step()


def monitors_threads():
    return [thread for thread in threading.enumerate() if thread.name == "memlab monitor"]


@linux
def test_resident_is_what_the_systems_own_account_of_the_pages_adds_up_to():
    held = torch.ones(24 * MiB, dtype=torch.uint8)
    with open("/proc/self/smaps_rollup") as file:
        told = next(int(line.split()[1]) * KiB for line in file if line.startswith("Rss:"))
    assert abs(ProcessMemory().read()["resident"] - told) < ROUGHLY * MiB
    assert held.numel() == 24 * MiB


@linux
def test_a_steps_resident_peak_is_seen_though_no_sample_fell_into_it_and_by_two_monitors():
    def files():
        return len(os.listdir("/proc/self/fd"))

    before = files()
    with Monitor(every=1000, watch="resident") as outer:
        torch.ones(320 * MiB, dtype=torch.uint8)
        with Monitor(every=1000, watch="resident") as inner:
            assert inner.exact_peaks
            inner.step()
            opened = files()
            for size in (96, 192, 80):  # above 32 MiB malloc maps pages for each, and gives them back
                torch.ones(size * MiB, dtype=torch.uint8)
                inner.step()
            assert files() == opened
        outer.step()
        torch.ones(128 * MiB, dtype=torch.uint8)
        outer.step()
    for monitor, sizes in ((inner, (0, 96, 192, 80)), (outer, (320, 128))):
        rises = [(peak - monitor.history.ends[0]) / MiB for peak in monitor.history.peaks]
        assert all(abs(rise - size) < ROUGHLY for rise, size in zip(rises, sizes, strict=True))
    assert files() == before and not any(table.marks for table in _tables.values())


@glibc
def test_the_heap_grows_by_what_malloc_is_asked_for_and_falls_when_it_is_given_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    memory, asked = ProcessMemory(), 40 * MiB
    before = memory.read()["heap"]
    pointer = libc.malloc(ctypes.c_size_t(asked))
    during = memory.read()["heap"] - before
    libc.free(pointer)
    assert asked <= during < asked + 64 * KiB
    assert abs(memory.read()["heap"] - before) < 64 * KiB


@linux
@pytest.mark.parametrize(("known", "watch"), [(True, "heap"), (False, "resident")])
def test_the_heap_is_watched_only_where_mallinfo2_knows_what_malloc_handed_out(monkeypatch, known, watch):
    info, held = sources._MallInfo2(uordblks=7 * MiB), []

    def malloc(nbytes):
        held.append(nbytes)
        info.hblkhd = sum(held) * known
        return len(held)

    def free(pointer):
        del held[pointer - 1]
        info.hblkhd = sum(held) * known

    libc = SimpleNamespace(malloc=malloc, free=free, mallinfo2=lambda: info)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: libc)
    monkeypatch.setattr(sources, "_heap", sources._heap.__wrapped__)
    with Monitor(every=1000, sources=[ProcessMemory()]) as monitor:
        assert monitor.watch == watch and monitor.samples[-1].figures.get("heap") == (7 * MiB if known else None)
    assert held == []


@linux
def test_where_the_mark_cannot_be_set_back_peaks_are_sampled_and_the_monitor_says_so(monkeypatch):
    real = os.open

    def no_right(path, *rest):
        if str(path).endswith("clear_refs"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest)

    monkeypatch.setattr(os, "open", no_right)
    before = len(os.listdir("/proc/self/fd"))
    with Monitor(every=0.002, watch="resident") as monitor:
        assert not monitor.exact_peaks and monitor.peaks == {}
        held = torch.ones(192 * MiB, dtype=torch.uint8)
        looks = len(monitor.samples)
        while len(monitor.samples) < looks + 3:
            time.sleep(0.002)
        del held
        monitor.step()
        monitor.step()
    (first_end, _), (first, second) = monitor.history.ends, monitor.history.peaks
    assert first - first_end > 160 * MiB and second - first_end < 32 * MiB
    assert len(os.listdir("/proc/self/fd")) == before


class OneMark:
    """A counter with one peak, as the system and PyTorch keep it."""

    def __init__(self):
        self.now = self.peak = 0

    def to(self, now):
        self.now, self.peak = now, max(self.peak, now)

    def water(self):
        return HighWater(lambda: {"level": self.peak}, lambda: setattr(self, "peak", self.now))


def test_each_reader_of_a_mark_hears_the_most_since_it_asked_itself():
    mark = OneMark()
    water, inner, leave_inner = join_mark("one", mark.water, mark)
    same, outer, leave_outer = join_mark("one", mark.water, mark)
    assert same is water
    told = []
    for now, who in ((5, inner), (3, outer), (9, inner), (2, inner), (4, outer), (1, outer), (1, inner)):
        mark.to(now)
        told.append(water.take(who)["level"])
    #         inner: 5; outer: 5 (3 now); inner: 9; inner: 9, for it began at 9; outer: 9; outer: 4; inner: 4
    assert told == [5, 5, 9, 9, 9, 4, 4]
    leave_inner()
    assert "one" in _tables[os.getpid()].marks
    leave_outer()
    assert "one" not in _tables[os.getpid()].marks


@pytest.mark.parametrize("imagined", [False, True])
def test_a_metered_history_is_the_closed_form_of_a_toy_leak(imagined):
    kept = []
    card = imagine("H100-80GB") if imagined else contextlib.nullcontext()
    with card, Meter() as meter, Monitor(every=1000, sources=[MeteredMemory(meter)]) as monitor:
        for _ in range(20):
            x = torch.ones(1024)
            y = x * 2
            kept.append(y[:1].clone())
            del x, y
            monitor.step()
    assert monitor.watch == "storages" and monitor.exact_peaks
    # A step keeps one float; at its peak it holds x and y, of 1024 floats, and that one.
    assert list(monitor.history.ends) == [4 * (n + 1) for n in range(20)]
    assert list(monitor.history.peaks) == [4 * n + 2 * 4096 + 4 for n in range(20)]
    assert max(monitor.history.peaks) == meter.timeline.peak_bytes


def test_a_second_source_of_a_level_is_told_and_left_out():
    told = []
    first, second = Figures("cuda:0", allocated=1, reserved=2), Figures("cuda:1", allocated=3)
    readings = Readings([first, second], lambda kind, message: told.append((kind, message)))
    for _ in range(2):
        assert readings.read() == {"allocated": 1, "reserved": 2}
    ((kind, message),) = told
    assert kind == "source" and "cuda:1 failed" in message and "found allocated of cuda:0, too" in message


def test_a_step_asks_only_the_source_that_is_watched():
    watched, other = Figures(allocated=5), Figures(driver=7)
    with Monitor(every=1000, sources=[other, watched]) as monitor:
        asked = other.asked
        for _ in range(10):
            monitor.step()
        assert monitor.watch == "allocated" and other.asked == asked
    assert (watched.closed, other.closed) == (1, 1)


def test_the_last_step_and_the_last_look_are_told_however_seldom_the_thread_looks():
    source = Figures(allocated=5, driver=6)
    with Monitor(every=1000, sources=[source]) as monitor:
        run(monitor, source, [7, 9])
        assert "allocated 9 B, peak 9 B" in repr(monitor)
        source.figures["driver"] = 12
    assert [sample.figures["driver"] for sample in monitor.samples] == [6, 12]
    assert "allocated 9 B" in repr(monitor)
    with pytest.raises(KeyError), Monitor(every=1000, sources=[source]) as monitor:
        raise KeyError
    assert len(monitor.samples) == 1  # by an error nobody looks once more


def test_a_threshold_is_told_once_and_again_only_after_the_steps_stayed_below_it():
    threshold = Threshold(1000, 0.9)
    uses = [899, 900, 950, *[899] * 15, 900, *[899] * 16, 900, 900, 899]
    assert [step for step, use in enumerate(uses) if threshold.step(use)] == [1, 35]


def test_looks_within_a_step_tell_a_threshold_and_do_not_end_it():
    threshold = Threshold(1000, 0.9)
    assert [look for look, use in enumerate((5, 900, *[5] * 100, 900)) if threshold.see(use)] == [1]


@pytest.mark.parametrize(
    "levels, watch",
    [(("resident", "heap", "allocated"), "allocated"), (("resident", "heap"), "heap"), (("driver",), "driver")],
)
def test_what_is_watched_is_the_level_nearest_to_the_tensors(levels, watch):
    with Monitor(every=1000, sources=[Figures(**dict.fromkeys(levels, 1))]) as monitor:
        assert monitor.watch == watch and f"{watch} 1 B" in repr(monitor)


def test_the_thread_warns_at_once_and_the_callback_waits_for_the_step():
    source, called = Figures(allocated=100), []
    with pytest.warns(MemoryWarning), Monitor(1000, every=0.002, sources=[source], on_alarm=called.append) as monitor:
        source.figures["allocated"] = 950
        until = time.monotonic() + 20
        while not monitor.alarms and time.monotonic() < until:
            time.sleep(0.002)
        assert [alarm.kind for alarm in monitor.alarms] == ["threshold"] and called == []
        monitor.step()
    assert called == monitor.alarms


def test_a_growth_is_called_once_and_again_when_half_of_its_steps_are_left(monkeypatch):
    said = [math.inf, 1000, 900, 501, 500, math.inf, 499, 251, 250, 2, 1, 0.5, 0]
    outlook = Outlook(1000)
    nothing = Growth(True, 1.0, 1.0, 1.0, 0, 0)
    forecasts = iter([Forecast(0, 1000, 0, nothing, left, left, left) for left in said])
    monkeypatch.setattr(Forecaster, "__call__", lambda self: next(forecasts))
    outlook.history.append(1, 1)
    told = [outlook.call() for _ in said]
    assert [one.steps_left for one in told if one is not None] == [1000, 500, 250, 2, 1]


def test_a_callback_that_changed_the_run_is_not_called_again_for_what_was_before():
    source, called = Figures(allocated=0), []

    def shrink(alarm):
        called.append(alarm)
        source.figures["allocated"] = 0
        return True

    with pytest.warns(MemoryWarning), Monitor(100_000, every=1000, sources=[source], on_alarm=shrink) as monitor:
        run(monitor, source, range(0, 95_000, 500))
        after = monitor.steps
        assert called and monitor.history.steps < after
        told = len(monitor.alarms)
        run(monitor, source, [10_000] * 200)
    assert len(monitor.alarms) == told and not monitor.forecast().runs_out
    assert monitor.forecast().step == monitor.steps == after + 200


def test_the_log_has_the_start_each_step_the_alarms_and_the_end(tmp_path):
    source = Figures(allocated=10)
    source.marks = {"allocated": 10}
    with (
        pytest.warns(MemoryWarning, match="905 B of 1000 B are in use"),  # a peak between two samples
        Monitor(1000, every=1000, sources=[source], log=tmp_path / "run.jsonl") as monitor,
    ):
        run(monitor, source, [10, 20, 30], peaks=[15, 25, 905])
    lines = list(read_log(tmp_path / "run.jsonl"))
    assert [line["kind"] for line in lines] == ["start", "sample", "step", "step", "alarm", "step", "end"]
    assert [(line["end"], line["peak"]) for line in lines if line["kind"] == "step"] == [(10, 15), (20, 25), (30, 905)]
    assert lines[0]["budget"] == 1000 and lines[0]["watch"] == "allocated" and lines[-1]["error"] is None
    assert len({line["run"] for line in lines}) == 1


def test_without_proc_the_resident_pages_are_macoss_to_tell(monkeypatch):
    def proc_pid_rusage(pid, flavor, found):
        found[:10] = [1, 2, 3, 4, 5, 6, 7, 8, 12_345, 10]  # uuid, uuid, six counters, resident, footprint
        return 0 if pid == os.getpid() else -1

    monkeypatch.setattr(sources, "HAS_PROC", False)
    monkeypatch.setattr(sources, "_proc_pid_rusage", lambda: proc_pid_rusage)
    assert ProcessMemory().read()["resident"] == 12_345
    assert ProcessMemory().peaks() == {}
    with pytest.raises(Gone, match="process 12 has ended"):
        ProcessMemory(12)


@glibc
def test_a_heap_that_is_slow_to_look_at_is_looked_at_now_and_then(monkeypatch):
    process, clock, heap, slow = ProcessMemory(paced=True), [1e6], [0], [0.0]
    for name in ("thread_time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: clock[0])

    def look():
        clock[0] += slow[0]
        return heap[0]

    process._heap = look

    def read(n):
        found = []
        for _ in range(n):
            heap[0] += 1
            found.append(process.read()["heap"])
        return found

    assert read(3) == [1, 2, 3]
    slow[0] = 1e-3
    assert read(5) == [4, 5, 6, 6, 6]  # three slow looks in a row: not by accident
    clock[0] += 2.0
    assert read(2) == [9, 9]


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    source = Figures(allocated=1)
    with Monitor(10**9, every=1000, sources=[source]) as monitor:
        run(monitor, source, [1] * 2000)
        gc.collect()
        before = len(gc.get_objects()), ProcessMemory().read().get("heap", 0)
        run(monitor, source, [1] * 20_000)
        gc.collect()
        after = len(gc.get_objects()), ProcessMemory().read().get("heap", 0)
    assert after[0] - before[0] < 50 and after[1] - before[1] < 64 * KiB


def test_a_thread_whose_looks_are_slow_looks_less_often():
    source = Figures(allocated=1)

    def slow():
        began = time.thread_time()
        while time.thread_time() < began + 0.02:
            pass
        source.asked += 1
        return {"allocated": 1}

    source.read = slow
    with Monitor(every=0.001, sources=[source]):
        began = source.asked
        time.sleep(0.5)
        assert source.asked <= began + 3  # the third look of 20 ms is followed by 4 s of rest
