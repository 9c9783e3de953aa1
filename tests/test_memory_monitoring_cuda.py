"""PyTorch's peak counters, shared: a stand-in counts as its allocator does, for there need not be a GPU."""

import gc
import threading

import pytest
import torch

from memlab.memory_monitoring import CUDAMemory, Monitor, cuda, high_water
from memlab.memory_timeline.workspace import CUDALevels


class Card:
    """The counters of one GPU."""

    def __init__(self):
        self.now = self.peak = 0

    def to(self, *figures):
        for now in figures:
            self.now, self.peak = now, max(self.peak, now)

    def statistics(self):
        entry = {"current": self.now, "peak": self.peak, "allocated": 0, "freed": 0}
        pools = {"all": entry, "small_pool": dict(entry)}
        names = ("allocated_bytes", "reserved_bytes", "requested_bytes")
        return {name: {pool: dict(figures) for pool, figures in pools.items()} for name in names} | {"num_ooms": 0}


@pytest.fixture
def cards(monkeypatch):
    found = [Card(), Card()]
    read, back = cuda.FUNCTIONS[0]
    monkeypatch.setattr(torch._C, read, lambda index: found[index].statistics(), raising=False)
    monkeypatch.setattr(torch._C, back, lambda index: setattr(found[index], "peak", found[index].now), raising=False)
    monkeypatch.setattr(cuda, "FUNCTIONS", cuda.FUNCTIONS[:1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    own = [getattr(torch._C, name) for name in cuda.FUNCTIONS[0]]
    yield found
    gc.collect()
    assert [getattr(torch._C, name) for name in cuda.FUNCTIONS[0]] == own
    assert not any(table.marks for table in high_water._tables.values())


def test_a_steps_peak_is_the_counters_and_the_programs_own_peak_is_untouched(cards):
    card = cards[0]
    card.to(100, 10)
    with Monitor(every=1000, sources=[CUDAMemory()]) as monitor:
        for figures in ((50, 20), (90, 20), (30, 20)):
            card.to(*figures)
            monitor.step()
        assert monitor.exact_peaks and list(monitor.history.peaks) == [50, 90, 30]
        assert torch.cuda.max_memory_allocated(0) == 100
        torch.cuda.reset_peak_memory_stats(0)
        assert torch.cuda.max_memory_allocated(0) == 20
        card.to(60, 20)
        monitor.step()
        card.to(25, 20)
        monitor.step()
        assert torch.cuda.max_memory_allocated(0) == 60
    assert list(monitor.history.peaks) == [50, 90, 30, 60, 25]


def test_two_monitors_and_a_meters_levels_do_not_take_each_others_peaks(cards):
    card = cards[0]
    levels = CUDALevels(
        None,
        torch.device("cuda", 0),
        lambda: torch.cuda.memory_stats_as_nested_dict(0),
        lambda: torch.cuda.reset_peak_memory_stats(0),
    )
    with Monitor(every=1000, sources=[CUDAMemory(0)]) as outer:
        card.to(70, 10)
        levels.reset_peak()
        with Monitor(every=1000, sources=[CUDAMemory(0)]) as inner:
            for peak in (30, 50):
                card.to(peak, 10)
                inner.step()
        assert levels.read("peak")["allocated"] == 50
        outer.step()
        card.to(20, 10)
        outer.step()
    assert list(inner.history.peaks) == [30, 50] and list(outer.history.peaks) == [70, 20]


def test_two_cards_have_a_mark_each_and_the_order_of_leaving_does_not_matter(cards):
    first, second = (Monitor(every=1000, sources=[CUDAMemory(index)]) for index in range(2))
    first.__enter__()
    second.__enter__()
    cards[0].to(5, 1)
    cards[1].to(7, 1)
    first.step()
    second.step()
    first.__exit__(None, None, None)
    cards[1].to(9, 1)
    torch.cuda.reset_peak_memory_stats(1)
    second.step()
    second.__exit__(None, None, None)
    assert list(first.history.peaks) == [5] and list(second.history.peaks) == [7, 9]


def test_the_monitor_is_never_the_first_to_use_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with Monitor(every=1000, sources=[CUDAMemory()]) as monitor:
        monitor.step()
    assert monitor.watch == "allocated" and list(monitor.history.ends) == [0]


def test_the_first_step_that_uses_cuda_has_its_peak(cards, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cards[0].peak > 0)
    with Monitor(every=1000, sources=[CUDAMemory()]) as monitor:
        for figures in ((), (9000, 100), (500, 100), (80, 60)):
            cards[0].to(*figures)
            monitor.step()
    assert list(monitor.history.peaks) == [0, 9000, 500, 100] and list(monitor.history.ends) == [0, 100, 100, 60]


def test_a_monitor_that_was_made_in_another_thread_than_it_watches_is_not_blind(cards, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cards[0].peak > 0)
    monitor = Monitor(every=1000, sources=[CUDAMemory()])

    def train():
        with monitor:
            for figures in ((7, 5), (9, 5)):
                cards[0].to(*figures)
                monitor.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert list(monitor.history.ends) == [5, 5] and list(monitor.history.peaks) == [7, 9]
