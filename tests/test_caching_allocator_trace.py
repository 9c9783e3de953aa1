"""Traces: read off a Timeline, put to an allocator, and refused where they cannot be."""

import pytest
import torch

from memlab.caching_allocator.allocator import CachingAllocator, OutOfMemory
from memlab.caching_allocator.trace import FREE, Replay, replay, requests
from memlab.memory_timeline import Event, Line, Meter, Storage, Timeline
from memlab.units import MiB

NOWHERE = Line("", "")


def timeline_of(*changes):
    """A Timeline of (storage, ±bytes), those before the first op given as ("before", storage, bytes)."""
    events = [
        Event(*change[1:], "", "before", NOWHERE) if change[0] == "before" else Event(*change, "op", "forward", NOWHERE)
        for change in changes
    ]
    storages = [
        Storage(i, 0, "temporary", (), "float32", "cuda:0", "op", "forward", NOWHERE, "", "", "")
        for i in sorted({event.storage for event in events})
    ]
    return Timeline(storages, events)


class Plain:
    """Hands out nothing and notes what it is asked."""

    allocated_bytes = reserved_bytes = largest_free_bytes = 0

    def __init__(self):
        self.asked, self.given_back = [], []

    def malloc(self, nbytes):
        self.asked.append(nbytes)
        return len(self.asked)

    def free(self, block):
        self.given_back.append(block)


def test_a_timelines_births_and_deaths_are_mallocs_and_frees_and_what_was_before_comes_first():
    timeline = timeline_of(("before", 7, 100), (3, 50), (7, -100), (4, 60), (3, -50))
    assert requests(timeline) == [(0, 100), (1, 50), (0, FREE), (2, 60), (1, FREE)]


def test_a_storage_that_is_used_again_is_another_request():
    assert requests(timeline_of((1, 10), (1, -10), (1, 30))) == [(0, 10), (0, FREE), (1, 30)]


@pytest.mark.parametrize("delta", [90, -90])
def test_a_storage_that_changes_its_size_is_there_twice_for_a_moment(delta):
    assert requests(timeline_of((1, 100), (1, delta))) == [(0, 100), (1, 100 + delta), (0, FREE)]


def test_resize_of_a_real_storage_is_a_request_and_a_free():
    with Meter() as meter:
        x = torch.empty(1000, dtype=torch.uint8)
        x.untyped_storage().resize_(3000)
        x.untyped_storage().resize_(0)
        del x
    assert requests(meter.timeline) == [(0, 1000), (1, 3000), (0, FREE), (1, FREE)]
    assert replay(Plain(), meter.timeline).peak_requested_bytes == 4000
    assert meter.timeline.peak_bytes == 3000


def test_what_is_noted_follows_each_event():
    done = replay(CachingAllocator(), [("a", 5), ("b", 11 * MiB), ("a", FREE), ("b", FREE)])
    assert done.requested == [0, 5, 5 + 11 * MiB, 11 * MiB, 0]
    assert done.allocated == [0, 512, 512 + 12 * MiB, 12 * MiB, 0]
    assert done.reserved == [0, 2 * MiB, 14 * MiB, 14 * MiB, 14 * MiB]
    assert done.largest_free == [0, 2 * MiB - 512, 2 * MiB - 512, 2 * MiB, 12 * MiB]
    assert (done.peak_requested_bytes, done.peak_allocated_bytes) == (5 + 11 * MiB, 512 + 12 * MiB)
    assert (done.peak_reserved_bytes, done.peak_event) == (14 * MiB, 2)
    assert done.internal_bytes(2) == 507 + MiB and done.unused_bytes(4) == 14 * MiB
    assert done.external_fragmentation(4) == pytest.approx(1 / 7) and done.external_fragmentation(3) == 0
    assert done.overhead == 14 * MiB / (5 + 11 * MiB)


def test_an_empty_trace_has_figures_too():
    done = replay(CachingAllocator(), [])
    assert done == Replay() and done.overhead == 1 and done.external_fragmentation(0) == 0 and done.peak_event == 0


def test_the_block_of_an_id_is_the_one_that_is_freed_and_an_id_may_come_again():
    allocator = Plain()
    replay(allocator, iter([("a", 1), ("b", 2), ("a", FREE), ("a", 3), ("a", FREE), ("b", FREE)]))
    assert allocator.asked == [1, 2, 3] and allocator.given_back == [1, 3, 2]


@pytest.mark.parametrize(
    ("trace", "error", "message"),
    [
        (
            [("a", 1), ("a", FREE), ("a", FREE)],
            ValueError,
            "event 2: .*found 'a', .* never asked for or is freed",
        ),
        ([("a", 1), ("b", FREE)], ValueError, "event 1: .*found 'b', which was never asked for"),
        ([("a", 1), ("a", 1)], ValueError, "event 1: expected a new id, found 'a', which has not been freed"),
        ([("a", -2)], ValueError, r"event 0: expected a request of 0 bytes or more.*found -2"),
        ([("a", 1), ("b", 1.5)], TypeError, r"event 1: expected a request .* as an int.*found 1.5"),
        ([("a", "512")], TypeError, "event 0: .*found '512'"),
        ([("a", True)], TypeError, "event 0: .*found True"),
        ([("a", None)], TypeError, "event 0: .*found None"),
    ],
)
def test_a_trace_that_cannot_have_happened_is_refused_with_its_position(trace, error, message):
    with pytest.raises(error, match=message):
        replay(CachingAllocator(), trace)


def test_a_trace_larger_than_the_card_raises_what_cuda_would_and_leaves_the_rest_in_use():
    allocator = CachingAllocator("30 MiB")
    with pytest.raises(OutOfMemory, match="Tried to allocate 12.00 MiB"):
        allocator.replay([("a", 11 * MiB), ("b", 11 * MiB), ("c", 11 * MiB)])
    assert allocator.requested_bytes == 22 * MiB and len(allocator.segments()) == 2


def test_zero_bytes_are_an_event_as_any_other():
    allocator = CachingAllocator()
    assert replay(allocator, [("a", 0), ("a", FREE)]).reserved == [0, 0, 0]
