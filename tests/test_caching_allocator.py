"""CUDA's caching allocator: every decision equals that of a naive one, and its facts follow from the rules."""

import random
from itertools import pairwise

import pytest
import torch

from memlab.caching_allocator.allocator import CachingAllocator, Decision, OutOfMemory, segment_bytes
from memlab.caching_allocator.blocks import FREE, UNMAPPED, Block, chain
from memlab.caching_allocator.device import FIRST_ADDRESS, Device
from memlab.caching_allocator.expandable_segments import ExpandableAllocator, page_bytes
from memlab.caching_allocator.max_split_size import MaxSplitAllocator
from memlab.caching_allocator.trace import FREE as FREED
from memlab.caching_allocator.trace import replay
from memlab.units import KiB, MiB
from tests.caching_allocator_naive import Naive

SIZES = [0, 1, 511, 512, 513, 1024, 100 * KiB, MiB - 512, MiB - 1, MiB, MiB + 1, 2 * MiB, 3 * MiB + 5, 9 * MiB]
SIZES += [10 * MiB - 512, 10 * MiB - 1, 10 * MiB, 10 * MiB + 1, 11 * MiB, 12 * MiB, 18 * MiB, 19 * MiB - 1, 19 * MiB]
OVERSIZE = [20 * MiB, 21 * MiB - 1, 21 * MiB, 23 * MiB + 1, 32 * MiB, 41 * MiB, 43 * MiB, 60 * MiB]
BESIDE = [0, 1, 511, 512, 1024, MiB - 512, MiB, MiB + 512, 2 * MiB, 20 * MiB - 512, 20 * MiB, 20 * MiB + 512]
KINDS = {
    "caching": lambda capacity, rng: (CachingAllocator(capacity), Naive(capacity)),
    "max split": lambda capacity, rng: with_max_split(capacity, rng.choice([20 * MiB + 512, 21 * MiB, 32 * MiB])),
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


def compare(kind, seed, events=60):
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
