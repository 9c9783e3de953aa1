"""CUDA's caching allocator: every decision equals that of a naive one, and its facts follow from the rules."""

import random
import re

import pytest
import torch

from memlab.caching_allocator import (
    FREE,
    CachingAllocator,
    ExpandableAllocator,
    FirstFit,
    MaxSplitAllocator,
    OutOfMemory,
    Replay,
    plan,
    replay,
    requests,
)
from memlab.caching_allocator.allocator import Decision
from memlab.caching_allocator.device import FIRST_ADDRESS, Device
from memlab.memory_timeline import Event, Line, Meter, Storage, Timeline
from memlab.units import GiB, KiB, MiB
from tests.caching_allocator_naive import Naive
from tests.harness import refusals, refused

SIZES = [0, 1, 511, 512, 513, 1024, 100 * KiB, MiB - 512, MiB - 1, MiB, MiB + 1, 2 * MiB, 3 * MiB + 5, 9 * MiB]
SIZES += [10 * MiB - 512, 10 * MiB - 1, 10 * MiB, 10 * MiB + 1, 11 * MiB, 12 * MiB, 18 * MiB, 19 * MiB - 1, 19 * MiB]
OVERSIZE = [20 * MiB, 21 * MiB - 1, 21 * MiB, 23 * MiB + 1, 32 * MiB, 41 * MiB, 43 * MiB, 60 * MiB]
BESIDE = [0, 1, 511, 512, 1024, MiB - 512, MiB, MiB + 512, 2 * MiB, 20 * MiB - 512, 20 * MiB, 20 * MiB + 512]
KINDS = {
    "caching": lambda capacity, rng: (CachingAllocator(capacity), Naive(capacity)),
    "max split": lambda capacity, rng: with_max_split(capacity, rng.choice([20 * MiB, 21 * MiB, 32 * MiB])),
    "expandable": lambda capacity, rng: (ExpandableAllocator(capacity), Naive(capacity, expandable=True)),
}


def with_max_split(capacity, most):
    return MaxSplitAllocator(most, capacity), Naive(capacity, max_split=most)


def picture(allocator):
    states = {"active_allocated": "used", "inactive": "free"}
    return [
        (
            segment["segment_type"],
            [(b["address"], b["size"], b["requested_size"], states[b["state"]]) for b in segment["blocks"]],
        )
        for segment in allocator.segments()
    ]


def check_counts(allocator):
    """Its counters are sums over its blocks, and its segments' own totals too."""
    blocks = [block for _, blocks in picture(allocator) for block in blocks]
    used = [block for block in blocks if block[3] == "used"]
    assert allocator.requested_bytes == sum(block[2] for block in used)
    assert allocator.allocated_bytes == sum(block[1] for block in used)
    assert allocator.reserved_bytes == sum(block[1] for block in blocks) == allocator.device.used_bytes
    assert allocator.largest_free_bytes == max((block[1] for block in blocks if block[3] == "free"), default=0)
    segments = allocator.segments()
    assert allocator.reserved_bytes == sum(segment["total_size"] for segment in segments)
    assert allocator.requested_bytes == sum(segment["requested_size"] for segment in segments)
    assert allocator.allocated_bytes == sum(segment["active_size"] for segment in segments)


def next_size(rng, naive):
    """At a boundary, or beside the size of a block that is free."""
    free = [cell[0] for _, cell, _ in naive.cells("free")]
    if free and rng.random() < 0.3:
        return max(1, rng.choice(free) - rng.choice(BESIDE))
    if rng.random() < 0.2:
        return int(2 ** rng.uniform(0, 25))
    return rng.choice(OVERSIZE if rng.random() < 0.15 else SIZES)


def compare(kind, seed, events=50):
    """One random trace put to both; every answer, picture and counter compared after every event."""
    rng = random.Random(seed)
    capacity = rng.choice([None, rng.randint(20, 60), rng.randint(40, 200)])
    allocator, naive = KINDS[kind](capacity and capacity * MiB + rng.choice([0, 512, MiB]), rng)
    held, keep = [], rng.choice([0.4, 0.5, 0.6])
    for _ in range(events):
        draw = rng.random()
        if draw < 0.04:
            allocator.empty_cache(), naive.empty_cache()
        elif held and draw > keep:
            block, address = held.pop(rng.randrange(len(held)))
            allocator.free(block), naive.free(address)
        else:
            nbytes = next_size(rng, naive)
            try:
                expected = naive.malloc(nbytes)
            except MemoryError:
                with pytest.raises(OutOfMemory):
                    allocator.malloc(nbytes)
            else:
                block = allocator.malloc(nbytes)
                assert (block and block.address) == expected and (block is None or block.in_use)
                held.append((block, expected))
        assert picture(allocator) == naive.picture()
        assert allocator.inactive_split_bytes == (0 if kind == "expandable" else naive.inactive_split_bytes())
        check_counts(allocator)
    assert [tuple(decision) for decision in allocator.decisions] == naive.log
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (naive.retries, naive.ooms)
    for block, address in held:
        allocator.free(block), naive.free(address)
    assert picture(allocator) == naive.picture() and allocator.allocated_bytes == allocator.requested_bytes == 0
    allocator.empty_cache()
    check_counts(allocator)
    assert allocator.reserved_bytes == 0 and allocator.segments() == []
    return naive


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 500), marks=pytest.mark.thorough)], ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_on_random_traces_every_decision_is_the_naive_allocators(kind, seeds):
    retries = ooms = 0
    for seed in seeds:
        naive = compare(kind, seed)
        retries, ooms = retries + naive.retries, ooms + naive.ooms
    assert ooms > 10 and retries > ooms  # that is, requests that only emptying the cache could serve


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB - 511, 10 * MiB, 10 * MiB),
        (11 * MiB, 12 * MiB, 12 * MiB),  # a rest of exactly 1 MiB is not split off
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),  # one of 512 B more is
        (200 * MiB - 1, 200 * MiB, 200 * MiB),
    ],
)
def test_what_a_first_request_takes(nbytes, allocated, reserved):
    allocator = CachingAllocator()
    block = allocator.malloc(nbytes)
    held = allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes
    assert held == (nbytes, allocated, reserved)
    assert block.size == allocated and block.in_use and allocator.largest_free_bytes == reserved - allocated
    assert allocator.decisions == [Decision(0, "segment_alloc", block.address, reserved)]


CUDAS_WORDS = re.compile(
    r"CUDA out of memory\. Tried to allocate (\S+ \S+)\. GPU 0 has a total capacity of (\S+ \S+) of which (\S+ \S+) is "
    r"free\. Of the allocated memory (\S+ \S+) is allocated by PyTorch, and (\S+ \S+) is reserved by PyTorch but "
    r"unallocated\. "
)


def test_out_of_memory_says_what_cuda_says_and_where_the_unallocated_bytes_are():
    allocator = CachingAllocator("1 GiB")
    held = [allocator.malloc(10 * MiB - 512) for _ in range(102)]
    for block in held[::2]:
        allocator.free(block)
    with pytest.raises(OutOfMemory) as error:
        allocator.malloc(15 * MiB)
    figures = CUDAS_WORDS.match(str(error.value)).groups()
    assert figures == ("16.00 MiB", "1.00 GiB", "4.00 MiB", "510.02 MiB", "509.98 MiB")
    assert "15.00 MiB, from the large pool, which has 509.98 MiB of the unallocated bytes" in str(error.value)
    assert "bytes, in pieces of at most 10.00 MiB: fragmentation" in str(error.value)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB.*too little, with all that is free"):
        allocator.malloc(2 * GiB)
    assert (allocator.num_ooms, allocator.num_alloc_retries) == (2, 2)
    assert repr(allocator) == "CachingAllocator(510.0 MiB allocated, 1,020.0 MiB reserved)"


def test_a_device_gives_the_lowest_gap_that_is_large_enough_and_counts_bytes_apart_from_addresses():
    device = Device(8 * MiB)
    ranges = [(device.take(2 * MiB), 2 * MiB) for _ in range(4)]
    assert ranges[0][0] == FIRST_ADDRESS and device.take(1) is None
    assert device.reserve(64 * MiB) == ranges[-1][0] + 2 * MiB  # addresses without bytes are never full
    for i in (0, 2, 1):
        device.give_back(*ranges[i])
    assert device.used_bytes == 2 * MiB and device.take(6 * MiB) == ranges[0][0]
    assert not device.map(1)
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MiB) for size in (30, 12, 30)]
    allocator.free(blocks[0]), allocator.empty_cache()
    assert allocator.malloc(40 * MiB).address == FIRST_ADDRESS + 72 * MiB  # the gap of 30 MiB is too small
    assert [allocator.malloc(size * MiB).address - FIRST_ADDRESS for size in (20, 10)] == [0, 20 * MiB]


def test_another_device_may_say_where_segments_lie_and_when_there_are_none():
    class Recorded:
        def __init__(self, addresses):
            self.addresses, self.back = iter(addresses), []

        def take(self, nbytes):
            return next(self.addresses)

        def give_back(self, address, nbytes):
            self.back.append((address, nbytes))

    device = Recorded([0x500, 0x100, None, None])
    allocator = CachingAllocator(device=device)
    high, low = allocator.malloc(MiB), allocator.malloc(9 * MiB)
    assert (high.address, low.address) == (0x500, 0x100)
    assert [segment["address"] for segment in allocator.segments()] == [0x100, 0x500]
    allocator.free(low)
    with pytest.raises(OutOfMemory, match=r"total capacity of 2.00 MiB of which 0 B is free"):
        allocator.malloc(40 * MiB)
    assert device.back == [(0x100, 20 * MiB)]


def test_an_oversize_block_is_neither_split_nor_given_to_a_request_much_smaller():
    allocator, plain = MaxSplitAllocator("40 MiB"), CachingAllocator()
    for one in (allocator, plain):
        one.free(one.malloc(60 * MiB))
        one.malloc(3 * MiB)
    assert (plain.reserved_bytes, allocator.reserved_bytes) == (60 * MiB, 80 * MiB)
    assert allocator.malloc(50 * MiB).size == 60 * MiB  # 10 MiB stay unused, and no new segment is asked for
    assert allocator.reserved_bytes == 80 * MiB
    for found, reserved in ((58, 58), (60, 60 + 40)):  # only requests less than 20 MiB smaller are served
        allocator = MaxSplitAllocator(30 * MiB)
        allocator.free(allocator.malloc(found * MiB))
        allocator.malloc(40 * MiB)
        assert allocator.reserved_bytes == reserved * MiB


def test_a_segment_grows_where_others_would_leave_a_gap():
    """Requests that get larger each step, as of longer and longer sequences."""
    plain, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (plain, expandable):
        for size in range(20, 60, 4):
            blocks = [allocator.malloc(size * MiB) for _ in range(4)]
            for block in blocks:
                allocator.free(block)
    assert plain.reserved_bytes == sum(4 * size * MiB for size in range(20, 60, 4))
    assert expandable.reserved_bytes == 240 * MiB  # 4 × 56 MiB, in pages of 20 MiB


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


@pytest.mark.parametrize(
    ("changes", "trace"),
    [
        (
            [("before", 7, 100), (3, 50), (7, -100), (4, 60), (3, -50)],  # what was before comes first
            [(0, 100), (1, 50), (0, FREE), (2, 60), (1, FREE)],
        ),
        ([(1, 10), (1, -10), (1, 30)], [(0, 10), (0, FREE), (1, 30)]),
        ([(1, 100), (1, 90)], [(0, 100), (1, 190), (0, FREE)]),  # there twice for a moment
        ([(1, 100), (1, -90)], [(0, 100), (1, 10), (0, FREE)]),
    ],
)
def test_a_timelines_births_deaths_and_changes_of_size_are_mallocs_and_frees(changes, trace):
    assert requests(timeline_of(*changes)) == trace


def test_a_metered_step_is_replayed_request_by_request():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64)
    with Meter(model, optimizer, inputs=(x,)) as meter:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    done, timeline = CachingAllocator().replay(meter.timeline), meter.timeline
    assert done.peak_requested_bytes == timeline.peak_bytes
    assert done.requested[len(timeline.everything()) - len(timeline) :] == timeline.totals
    assert all(a <= b <= c for a, b, c in zip(done.requested, done.allocated, done.reserved, strict=True))


def test_what_is_noted_follows_each_event_and_decisions_are_counted_by_events():
    allocator = CachingAllocator()
    done = replay(allocator, iter([("a", 5), ("b", 11 * MiB), ("a", FREE), ("b", FREE), ("a", 0), ("a", FREE)]))
    assert done.requested == [0, 5, 5 + 11 * MiB, 11 * MiB, 0, 0, 0]
    assert done.allocated == [0, 512, 512 + 12 * MiB, 12 * MiB, 0, 0, 0]
    assert done.reserved == [0, 2 * MiB, *[14 * MiB] * 5]
    assert done.largest_free == [0, 2 * MiB - 512, 2 * MiB - 512, 2 * MiB, *[12 * MiB] * 3]
    assert (done.peak_requested_bytes, done.peak_allocated_bytes) == (5 + 11 * MiB, 512 + 12 * MiB)
    assert (done.peak_reserved_bytes, done.peak_event) == (14 * MiB, 2)
    assert done.overhead == 14 * MiB / (5 + 11 * MiB)
    allocator.empty_cache()
    assert [decision.event for decision in allocator.decisions] == [0, 1, 6, 6]
    done = replay(CachingAllocator(), [])
    assert done == Replay() and done.overhead == 1 and done.peak_event == 0


@pytest.mark.parametrize("kind", KINDS)
def test_zero_bytes_are_a_null_pointer_and_a_block_is_freed_once_and_where_it_is_from(kind):
    (allocator, _), (other, _) = KINDS[kind](None, random.Random(0)), KINDS[kind](None, random.Random(0))
    assert allocator.malloc(0) is None and allocator.free(None) is None and allocator.segments() == []
    block, wall, foreign = allocator.malloc(600), allocator.malloc(600), other.malloc(600)
    allocator.free(block)
    refused(lambda: allocator.free(block), ValueError, "expected a block in use, found Block(…free…freed already")
    allocator.free(wall)  # which is part of another block from here on
    refused(lambda: allocator.free(wall), ValueError, "freed already")
    refused(lambda: allocator.free(foreign), ValueError, "of this allocator, found one of another")
    refused(lambda: allocator.free(512), TypeError, "expected a block that malloc returned, found 512")
    check_counts(allocator), check_counts(other)
    assert other.allocated_bytes == 1024 and allocator.allocated_bytes == 0


def replayed(*trace):
    return lambda: replay(CachingAllocator(), trace)


def planned(*trace):
    return lambda: plan(trace)


REFUSALS = {
    "fewer than 0 bytes": (lambda: CachingAllocator().malloc(-1), ValueError, "expected a request"),
    "a float": (lambda: CachingAllocator().malloc(1.0), TypeError, "expected a request"),
    "a bool": (lambda: CachingAllocator().malloc(True), TypeError, "expected a request"),
    "a capacity of a float": (lambda: CachingAllocator(1.5), TypeError, "expected a size"),
    "a capacity in words": (lambda: FirstFit("much"), ValueError, "expected a size"),
    "too small a max_split_size": (lambda: MaxSplitAllocator(20 * MiB - 1), ValueError, "at least 20.0 MiB…found"),
    "a free too many": (replayed(("a", 1), *[("a", FREE)] * 2), ValueError, "event 2: …found 'a'…never asked for"),
    "an id in use": (replayed(("a", 1), ("a", 1)), ValueError, "event 1: expected a new id, found 'a', which has not"),
    "a size below 0": (replayed(("a", -2)), ValueError, "event 0: expected a request of 0 bytes or more…found -2"),
    "a size of a float": (
        replayed(("a", 1), ("b", 1.5)),
        TypeError,
        "event 1: expected a request …as an int…found 1.5",
    ),
    "a plan of a free too many": (planned((0, 8), (0, FREE), (0, FREE)), ValueError, "event 2: expected"),
    "a plan of an id in use": (planned((0, 8), (0, 8)), ValueError, "event 1: expected"),
    "a plan of a size below 0": (planned((0, -2)), ValueError, "event 0: expected"),
    "a plan of a size of a float": (
        planned((0, 8), (1, -1.0)),
        TypeError,
        "event 1: expected a request …or FREE; found",
    ),
    "a plan without an order": (lambda: plan([(0, 8)], {}), ValueError, "at least one order"),
}


@refusals(REFUSALS)
def test_what_makes_no_sense_is_refused(call, error, words):
    refused(call, error, words)
