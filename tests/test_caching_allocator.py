"""CUDA's caching allocator: every decision equals that of a naive one, and its facts follow from the rules."""

import random
import re
from http import HTTPStatus
from itertools import pairwise

import pytest
import torch

from memlab.caching_allocator.allocator import CachingAllocator, Decision, OutOfMemory
from memlab.caching_allocator.blocks import FREE, UNMAPPED, chain
from memlab.caching_allocator.device import FIRST_ADDRESS, Device
from memlab.caching_allocator.expandable_segments import ExpandableAllocator, page_bytes
from memlab.caching_allocator.max_split_size import MaxSplitAllocator
from memlab.caching_allocator.trace import FREE as FREED
from memlab.memory_timeline import Meter
from memlab.units import GiB, KiB, MiB
from tests.caching_allocator_naive import Naive

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


def check_invariants(allocator):
    """Blocks tile their segments, free neighbours are joined, pools hold what is free, and counters are sums."""
    sums = {"requested": 0, "allocated": 0, "reserved": 0}
    free, ranges = {"small": [], "large": []}, []
    for address, first in allocator._segments.items():
        assert first.address == address and first.prev is None
        blocks = chain(first)
        assert {block.pool for block in blocks} == {first.pool} and first.pool in allocator._pools
        for block, following in pairwise(blocks):
            assert following.prev is block and block.next is following
            assert following.address == block.address + block.size
            assert block.state != following.state or block.in_use
        for block in blocks:
            assert block.size > 0 and block.size % 512 == 0
            if block.state is UNMAPPED:
                assert block.size % page_bytes(block.pool) == (block.address - address) % page_bytes(block.pool) == 0
                continue
            sums["reserved"] += block.size
            if block.state is FREE:
                assert block.requested == 0
                free[block.pool.name].append((block.size, block.address, block))
            else:
                assert 0 < block.requested <= block.size
                sums["requested"] += block.requested
                sums["allocated"] += block.size
        ranges.append((address, blocks[-1].address + blocks[-1].size))
    assert all(stop <= start for (_, stop), (start, _) in pairwise(sorted(ranges)))
    for pool in allocator._pools:
        assert pool.free == sorted(free[pool.name])
    assert allocator.requested_bytes == sums["requested"] <= allocator.allocated_bytes == sums["allocated"]
    assert allocator.allocated_bytes <= allocator.reserved_bytes == sums["reserved"] == allocator.device.used_bytes
    assert allocator.capacity_bytes is None or allocator.reserved_bytes <= allocator.capacity_bytes
    sizes = [size for pool in free.values() for size, _, _ in pool]
    assert allocator.largest_free_bytes == max(sizes, default=0)


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
            before = allocator.allocated_bytes
            allocator.empty_cache(), naive.empty_cache()
            assert allocator.allocated_bytes == before
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
                assert (block and block.address) == expected
                held.append((block, expected))
        assert picture(allocator) == naive.picture()
        assert allocator.inactive_split_bytes == (0 if kind == "expandable" else naive.inactive_split_bytes())
        check_invariants(allocator)
    assert [tuple(decision) for decision in allocator.decisions] == naive.log
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (naive.retries, naive.ooms)
    for block, address in held:
        allocator.free(block), naive.free(address)
    assert picture(allocator) == naive.picture() and allocator.allocated_bytes == allocator.requested_bytes == 0
    allocator.empty_cache()
    check_invariants(allocator)
    assert allocator.reserved_bytes == 0 and allocator.segments() == []
    return naive


@pytest.mark.parametrize("kind", KINDS)
def test_on_500_random_traces_every_decision_is_the_naive_allocators(kind):
    retries = ooms = 0
    for seed in range(500):
        naive = compare(kind, seed)
        retries, ooms = retries + naive.retries, ooms + naive.ooms
    assert ooms > 50 and retries - ooms > 50  # that is, requests that only emptying the cache could serve


# ---- facts that follow from the rules


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB - 511, 10 * MiB, 10 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (11 * MiB, 12 * MiB, 12 * MiB),  # a rest of exactly 1 MiB is not split off
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),  # one of 512 B more is
        (12 * MiB + 1, 12 * MiB + 512, 14 * MiB),
        (200 * MiB - 1, 200 * MiB, 200 * MiB),
    ],
)
def test_what_a_first_request_takes(nbytes, allocated, reserved):
    allocator = CachingAllocator()
    block = allocator.malloc(nbytes)
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (
        nbytes,
        allocated,
        reserved,
    )
    assert block.size == allocated and block.in_use and allocator.largest_free_bytes == reserved - allocated
    assert allocator.decisions == [Decision(0, "segment_alloc", block.address, reserved)]


def test_a_small_rest_is_split_off_from_512_bytes_on():
    allocator = CachingAllocator()
    first, wall = allocator.malloc(10 * KiB), allocator.malloc(512)
    allocator.free(first)
    assert allocator.malloc(10 * KiB - 512).size == 10 * KiB - 512  # the rest, 512 B, is a block
    assert allocator.malloc(512).address == first.address + 10 * KiB - 512
    allocator.free(wall)


def test_best_fit_takes_the_smallest_block_that_will_do_and_of_equals_the_lowest():
    allocator = CachingAllocator()
    sizes = [4096, 1024, 2048, 1024]
    blocks = [(allocator.malloc(size), allocator.malloc(512))[0] for size in sizes]  # a wall of 512 B after each
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert [allocator.malloc(1024).address for _ in range(3)] == [addresses[1], addresses[3], addresses[2]]
    assert allocator.malloc(3000).address == addresses[0]


def test_a_freed_block_joins_both_free_neighbours_and_the_segment_is_whole_again():
    allocator = CachingAllocator()
    low, middle, high = (allocator.malloc(6 * MiB) for _ in range(3))
    assert [b["size"] for b in allocator.segments()[0]["blocks"]] == [6 * MiB] * 3 + [2 * MiB]
    allocator.free(low), allocator.free(high)
    assert allocator.largest_free_bytes == 8 * MiB and allocator.inactive_split_bytes == 14 * MiB
    allocator.free(middle)
    assert allocator.largest_free_bytes == 20 * MiB and allocator.inactive_split_bytes == 0
    assert len(allocator.segments()[0]["blocks"]) == 1


def test_blocks_of_one_pool_never_serve_the_other():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MiB))
    allocator.malloc(MiB)
    assert allocator.reserved_bytes == 22 * MiB
    allocator.malloc(MiB + 1)
    assert allocator.reserved_bytes == 22 * MiB


def test_empty_cache_gives_back_whole_free_segments_and_nothing_else():
    allocator = CachingAllocator()
    whole, split, small = allocator.malloc(30 * MiB), allocator.malloc(2 * MiB), allocator.malloc(5)
    kept = allocator.malloc(2 * MiB)
    allocator.free(whole), allocator.free(split), allocator.free(small)
    assert allocator.reserved_bytes == 52 * MiB
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MiB, 20 * MiB)
    assert allocator.inactive_split_bytes == 18 * MiB  # one block of 2 MiB pins them
    freed = [(d.action, d.size) for d in allocator.decisions if d.action == "segment_free"]
    assert freed == [("segment_free", 30 * MiB), ("segment_free", 2 * MiB)]  # the large pool first
    allocator.free(kept), allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_retry_does_by_itself_what_empty_cache_would():
    by_itself, by_hand = CachingAllocator(64 * MiB), CachingAllocator(64 * MiB)
    for allocator in (by_itself, by_hand):
        for size in (30 * MiB, 30 * MiB, 3):
            allocator.free(allocator.malloc(size))
    by_hand.empty_cache()
    assert by_itself.malloc(50 * MiB).address == by_hand.malloc(50 * MiB).address
    assert by_itself.segments() == by_hand.segments()
    assert (by_itself.num_alloc_retries, by_hand.num_alloc_retries) == (1, 0)
    assert by_itself.num_ooms == by_hand.num_ooms == 0
    actions = [[d.action for d in allocator.decisions] for allocator in (by_itself, by_hand)]
    assert actions[0] == actions[1]


def test_zero_bytes_are_a_null_pointer():
    allocator = CachingAllocator(0)
    assert allocator.malloc(0) is None
    allocator.free(None)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0 and allocator.segments() == []


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


@pytest.mark.parametrize("kind", KINDS)
def test_after_running_out_the_allocator_is_whole_and_usable(kind):
    allocator, _ = KINDS[kind](60 * MiB, random.Random(0))
    first, second, small = allocator.malloc(15 * MiB), allocator.malloc(18 * MiB), allocator.malloc(100)
    allocated = allocator.allocated_bytes
    with pytest.raises(OutOfMemory):
        allocator.malloc(50 * MiB)
    check_invariants(allocator)
    assert allocator.allocated_bytes == allocated
    for block in (first, second, small):
        allocator.free(block)
    assert allocator.malloc(39 * MiB).requested == 39 * MiB
    check_invariants(allocator)


def test_the_address_of_a_segment_that_was_given_back_is_given_again():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MiB) for size in (30, 12, 30)]
    assert [block.address - FIRST_ADDRESS for block in blocks] == [0, 30 * MiB, 42 * MiB]
    allocator.free(blocks[0]), allocator.empty_cache()
    assert allocator.malloc(40 * MiB).address == FIRST_ADDRESS + 72 * MiB  # the gap of 30 MiB is too small
    assert allocator.malloc(20 * MiB).address == FIRST_ADDRESS
    assert allocator.malloc(10 * MiB).address == FIRST_ADDRESS + 20 * MiB


def test_a_device_joins_gaps_and_counts_bytes_apart_from_addresses():
    device = Device(8 * MiB)
    ranges = [(device.take(2 * MiB), 2 * MiB) for _ in range(4)]
    assert device.take(1) is None
    assert device.reserve(64 * MiB) == ranges[-1][0] + 2 * MiB  # addresses without bytes are never full
    for i in (0, 2, 1):
        device.give_back(*ranges[i])
    assert device.used_bytes == 2 * MiB and device.take(6 * MiB) == ranges[0][0]
    assert not device.map(1)


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


# ---- max_split_size


def test_an_oversize_block_is_neither_split_nor_given_to_a_small_request():
    allocator, plain = MaxSplitAllocator("40 MiB"), CachingAllocator()
    for one in (allocator, plain):
        one.free(one.malloc(60 * MiB))
        one.malloc(3 * MiB)
    assert (plain.reserved_bytes, allocator.reserved_bytes) == (60 * MiB, 80 * MiB)
    assert allocator.malloc(50 * MiB).size == 60 * MiB  # 10 MiB stay unused, and no new segment is asked for
    assert allocator.reserved_bytes == 80 * MiB


@pytest.mark.parametrize(("found", "reserved"), [(60 * MiB - 2 * MiB, 58), (60 * MiB, 60 + 40)])
def test_an_oversize_block_serves_only_requests_less_than_20_mib_smaller(found, reserved):
    allocator = MaxSplitAllocator(30 * MiB)
    allocator.free(allocator.malloc(found))
    allocator.malloc(40 * MiB)
    assert allocator.reserved_bytes == reserved * MiB


def test_when_full_one_oversize_block_goes_before_the_whole_cache_does():
    allocator = MaxSplitAllocator(30 * MiB, 150 * MiB)
    blocks = [allocator.malloc(size * MiB) for size in (30, 45, 60, 10)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(31 * MiB)  # that of 45 MiB does
    assert allocator.reserved_bytes == 146 * MiB
    allocator.malloc(35 * MiB)  # that of 60 MiB is too large to have, and enough to give back
    assert allocator.reserved_bytes == (146 - 60 + 36) * MiB and allocator.num_alloc_retries == 0


def test_when_none_is_large_enough_the_largest_go_until_they_are_together():
    allocator = MaxSplitAllocator(30 * MiB, 110 * MiB)
    blocks = [allocator.malloc(size * MiB) for size in (30, 34, 30, 10)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(60 * MiB)  # 34 MiB and one of the two of exactly 30 MiB
    assert [d.size // MiB for d in allocator.decisions if d.action == "segment_free"] == [34, 30]
    assert allocator.reserved_bytes == 100 * MiB and allocator.num_alloc_retries == 0


def test_when_together_they_are_not_the_whole_cache_goes_though_what_is_free_already_might_do():
    allocator = MaxSplitAllocator(30 * MiB, 100 * MiB)
    held, oversize, other = (allocator.malloc(size * MiB) for size in (40, 30, 10))
    allocator.free(oversize), allocator.free(other)
    allocator.malloc(50 * MiB)  # 20 MiB are free, 30 more would do
    assert [d.size // MiB for d in allocator.decisions if d.action == "segment_free"] == [30, 10]
    assert held.in_use and allocator.num_alloc_retries == 1


def test_max_split_size_is_at_least_the_segments_that_are_there_to_be_cut():
    allocator = MaxSplitAllocator("20 MiB")
    assert [allocator.malloc(size * MiB).size for size in (9, 9)] == [9 * MiB] * 2
    assert allocator.max_split_bytes == allocator.reserved_bytes == 20 * MiB


@pytest.mark.parametrize("size", [20 * MiB - 1, "19 MiB", 0])
def test_max_split_size_of_less_than_the_segments_that_are_there_to_be_cut_is_refused(size):
    with pytest.raises(ValueError, match=r"at least 20.0 MiB, .* found"):
        MaxSplitAllocator(size)


# ---- expandable segments


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


def test_pages_are_mapped_as_far_as_they_are_needed_and_no_further():
    allocator = ExpandableAllocator()
    first = allocator.malloc(MiB + 1)
    assert allocator.reserved_bytes == 20 * MiB
    second = allocator.malloc(50 * MiB)
    assert second.address == first.address + first.size and allocator.reserved_bytes == 60 * MiB
    allocator.malloc(1), allocator.malloc(MiB)
    assert allocator.reserved_bytes == 62 * MiB
    assert [d.size for d in allocator.decisions] == [20 * MiB, 40 * MiB, 2 * MiB]
    assert {d.action for d in allocator.decisions} == {"segment_map"}


def test_whole_pages_are_given_back_beside_a_block_in_use():
    allocator, plain = ExpandableAllocator(), CachingAllocator()
    for one in (allocator, plain):
        low, high = one.malloc(90 * MiB), one.malloc(2 * MiB)
        one.free(low)
        one.empty_cache()
        assert high.in_use
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MiB, 20 * MiB)
    assert plain.reserved_bytes == 20 * MiB
    ((start, size),) = [(d.address, d.size) for d in allocator.decisions if d.action == "segment_unmap"]
    assert (start, size) == (low.address, 80 * MiB)
    assert allocator.malloc(70 * MiB).address == low.address  # the hole is filled first
    assert allocator.inactive_split_bytes == 0


def test_a_segment_whose_last_page_is_given_back_gives_its_addresses_back():
    allocator = ExpandableAllocator(200 * MiB)
    block = allocator.malloc(25 * MiB)
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.segments() == [] and allocator.reserved_bytes == 0
    assert allocator.malloc(1).address == block.address


def test_what_was_mapped_before_the_card_was_full_is_a_free_block_until_the_cache_is_emptied():
    allocator = ExpandableAllocator(50 * MiB)
    low, high = allocator.malloc(30 * MiB), allocator.malloc(5 * MiB)
    allocator.free(low), allocator.empty_cache(), allocator.free(high)  # a hole of 20 MiB, 20 MiB free, and no more
    known = len(allocator.decisions)
    with pytest.raises(OutOfMemory):
        allocator.malloc(55 * MiB)
    assert [d[1:] for d in allocator.decisions[known:]] == [
        ("segment_map", low.address, 20 * MiB),
        ("segment_unmap", low.address, 40 * MiB),
    ]
    assert allocator.reserved_bytes == 0 and allocator.malloc(39 * MiB).in_use


# ---- traces and bad input


def training_trace():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64)
    with Meter(model, optimizer, inputs=(x,)) as meter:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.timeline


def test_a_metered_step_is_replayed_request_by_request():
    timeline = training_trace()
    done = CachingAllocator().replay(timeline)
    assert done.peak_requested_bytes == timeline.peak_bytes
    before = len(timeline.everything()) - len(timeline)
    assert done.requested[before:] == timeline.totals
    assert all(a <= b <= c for a, b, c in zip(done.requested, done.allocated, done.reserved, strict=True))
    assert done.peak_reserved_bytes == done.reserved[done.peak_event] and done.overhead >= 1


def test_decisions_are_counted_by_the_events_of_the_trace():
    allocator = CachingAllocator()
    allocator.replay([("a", 5), ("none", 0), ("a", FREED), ("none", FREED), ("b", 2 * MiB), ("c", 3 * MiB)])
    assert [decision.event for decision in allocator.decisions] == [0, 4]
    allocator.empty_cache()
    assert allocator.decisions[-1][:2] == (6, "segment_free")


def test_a_million_events():
    rng, names, trace = random.Random(0), [], []
    for i in range(10**6):
        if names and (len(names) >= 500 or rng.random() < 0.45):
            trace.append((names.pop(rng.randrange(len(names))), FREED))
        else:
            trace.append((i, rng.choice(SIZES)))
            names.append(i)
    allocator = CachingAllocator()
    done = allocator.replay(trace)
    assert len(done.reserved) == 10**6 + 1 and done.reserved[-1] == allocator.reserved_bytes
    check_invariants(allocator)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_freed_once_and_where_it_is_from(kind):
    (allocator, _), (other, _) = KINDS[kind](None, random.Random(0)), KINDS[kind](None, random.Random(0))
    block, wall, foreign = allocator.malloc(600), allocator.malloc(600), other.malloc(600)
    allocator.free(block)
    with pytest.raises(ValueError, match=r"expected a block in use, found Block\(.*free.*freed already"):
        allocator.free(block)
    allocator.free(wall)  # which is part of another block from here on
    with pytest.raises(ValueError, match="freed already"):
        allocator.free(wall)
    with pytest.raises(ValueError, match="of this allocator, found one of another"):
        allocator.free(foreign)
    with pytest.raises(TypeError, match="expected a block that malloc returned, found 512"):
        allocator.free(512)
    check_invariants(allocator), check_invariants(other)
    assert other.allocated_bytes == 1024 and allocator.allocated_bytes == 0


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (-1, ValueError),
        (1.0, TypeError),
        ("512", TypeError),
        (True, TypeError),
        (None, TypeError),
        (HTTPStatus.OK, TypeError),
    ],
)
def test_a_request_is_a_number_of_bytes(nbytes, error):
    allocator = CachingAllocator()
    with pytest.raises(error, match="expected a request"):
        allocator.malloc(nbytes)
    assert allocator.segments() == []


@pytest.mark.parametrize("capacity", [-1, 1.5, "much", True])
def test_a_capacity_is_a_size(capacity):
    with pytest.raises((TypeError, ValueError), match="expected a size"):
        CachingAllocator(capacity)
