"""Other managers: what is in use never overlaps, what is free is found again, and a plan wastes next to nothing."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.caching_allocator import FREE, BestFit, Buddy, FirstFit, PlannedArena, Slab, Trace, plan, replay
from memlab.caching_allocator.managers import ALIGNMENT, aligned
from memlab.caching_allocator.static_plan import ORDERS, lifetimes, most_alive
from memlab.units import GiB, KiB, MiB
from tests.harness import refused

MANAGERS = (FirstFit, BestFit, Buddy, Slab)
every = pytest.mark.parametrize("manager", MANAGERS)


def random_trace(seed: int, events: int, largest: int = 22) -> Trace:
    """Sizes of 1 byte to 2**largest, as many on every scale; some of 0 bytes; ids come back into use."""
    rng = random.Random(seed)
    live, spare, trace = [], [], []
    for _ in range(events):
        if live and rng.random() < rng.choice((0.3, 0.6)):
            spare.append(live.pop(rng.randrange(len(live))))
            trace.append((spare[-1], FREE))
        else:
            live.append(spare.pop() if spare and rng.random() < 0.5 else len(live) + len(spare))
            trace.append((live[-1], 0 if rng.random() < 0.05 else int(2 ** rng.uniform(0, largest))))
    return trace


traces = st.builds(random_trace, st.integers(0, 10**9), st.integers(0, 60), st.sampled_from((11, 22)))


def some_examples(count):
    """As many made-up cases, the same ones each time."""
    return settings(max_examples=count, derandomize=True, deadline=None)


def run(manager, trace):
    """Yield, after each event, what is held: id → (block, bytes asked for)."""
    held = {}
    for name, nbytes in trace:
        if nbytes == FREE:
            manager.free(held.pop(name)[0])
        else:
            held[name] = manager.malloc(nbytes), nbytes
        yield held


def spans(held) -> list[tuple[int, int]]:
    return sorted((block.address, block.address + block.size) for block, _ in held.values() if block is not None)


@every
@some_examples(25)
@given(trace=traces)
def test_what_is_in_use_never_overlaps_nor_moves_and_the_counts_are_its_sums(manager, trace):
    make, manager = manager, manager()
    born = {}
    for held in run(manager, trace):
        places = spans(held)
        assert all(first[1] <= second[0] for first, second in pairwise(places))
        for block, nbytes in held.values():
            assert (block is None) == (nbytes == 0)
            if block is not None:
                assert block.address % ALIGNMENT == 0 and block.size >= block.requested == nbytes
                assert born.setdefault(id(block), (block, block.address))[1] == block.address
        assert manager.allocated_bytes == sum(stop - start for start, stop in places)
        assert manager.allocated_bytes <= manager.reserved_bytes
        assert manager.largest_free_bytes <= manager.reserved_bytes - manager.allocated_bytes
    for extra in (0, 1):  # the largest free piece serves as it says, and one more byte is not in it
        tried = make()
        for _ in run(tried, trace):
            pass
        reserved, largest = tried.reserved_bytes, tried.largest_free_bytes
        if largest + extra:
            tried.malloc(largest + extra)
            assert (tried.reserved_bytes > reserved) == bool(extra)
    done = replay(make(), trace)
    reached = done.peak_reserved_bytes
    assert replay(make(reached), trace) == done
    if reached and make is not Slab:  # which gives empty pages back first
        with pytest.raises(torch.OutOfMemoryError):
            replay(make(reached - 1), trace)


@every
def test_a_block_is_freed_once_and_by_its_own_manager_and_of_0_bytes_there_is_none(manager):
    one, other, empty = manager(), manager(), manager(capacity_bytes=0)
    assert empty.malloc(0) is None and empty.free(None) is None
    assert empty.allocated_bytes == empty.reserved_bytes == empty.largest_free_bytes == 0
    block, kept = one.malloc(1000), one.malloc(1000)
    one.free(block)
    refused(lambda: one.free(block), ValueError, "expected a block in use")
    assert one.malloc(1000).address == block.address
    refused(lambda: one.free(block), ValueError, "expected a block in use")
    refused(lambda: other.free(kept), ValueError, "expected a block in use")
    refused(lambda: one.malloc(-1), ValueError, "expected a request")
    refused(lambda: one.malloc(True), TypeError, "expected a request")
    assert one.allocated_bytes == 2 * kept.size and other.allocated_bytes == 0


@every
def test_freed_whole_it_holds_nothing_and_serves_the_same_again_without_the_device(manager):
    manager, reserved = manager(), set()
    for seed in range(3):
        blocks = [manager.malloc(700 * k) for k in range(1, 300)]
        reserved.add(manager.reserved_bytes)
        for block in random.Random(seed).sample(blocks, len(blocks)):
            manager.free(block)
        reserved.add(manager.reserved_bytes)
        assert manager.allocated_bytes == 0 and len(reserved) == 1


@every
def test_beyond_the_capacity_it_raises_and_stays_as_it_was(manager):
    manager = manager("8 MiB")
    blocks = [manager.malloc(2 * MiB) for _ in range(4)]
    before = manager.allocated_bytes, manager.reserved_bytes, manager.largest_free_bytes
    assert before == (8 * MiB, 8 * MiB, 0)
    for nbytes in (1, 2 * MiB, 9 * MiB):
        with pytest.raises(torch.OutOfMemoryError, match=r"at most 8.0 MiB .* 8.0 MiB allocated and 8.0 MiB reserved"):
            manager.malloc(nbytes)
    assert (manager.allocated_bytes, manager.reserved_bytes, manager.largest_free_bytes) == before
    manager.free(blocks[1])
    assert manager.malloc(2 * MiB).address != blocks[0].address


class Scan:
    """An arena as one bit per 512 B. A request takes the first run of zeros, or the shortest, that is long enough."""

    def __init__(self, best: bool):
        self.cells, self.best = [], best

    def malloc(self, nbytes: int) -> tuple[int, int]:
        need = -(-nbytes // 512)
        runs, start = [], None
        for i, used in enumerate([*self.cells, True]):
            if not used and start is None:
                start = i
            if used and start is not None:
                runs.append((i - start, start))
                start = None
        fitting = [r for r in runs if r[0] >= need]
        if fitting:
            at = min(fitting)[1] if self.best else fitting[0][1]
        else:
            at = len(self.cells)
            while at and not self.cells[at - 1]:
                at -= 1
        self.cells += [False] * (at + need - len(self.cells))
        self.cells[at : at + need] = [True] * need
        return at, need

    def free(self, block: tuple[int, int]) -> None:
        self.cells[block[0] : block[0] + block[1]] = [False] * block[1]


@pytest.mark.parametrize(("manager", "best"), [(FirstFit, False), (BestFit, True)])
@some_examples(30)
@given(trace=st.builds(random_trace, st.integers(0, 10**9), st.integers(0, 150), st.just(14)))
def test_every_address_is_the_one_that_a_scan_of_the_whole_arena_finds(manager, best, trace):
    manager, scan = manager(), Scan(best)
    held = {}
    for name, nbytes in trace:
        if nbytes == FREE:
            block, cells = held.pop(name)
            manager.free(block)
            if cells:
                scan.free(cells)
        else:
            held[name] = manager.malloc(nbytes), scan.malloc(nbytes) if nbytes else None
            if nbytes:
                assert held[name][0].address == 512 * held[name][1][0]
        assert manager.reserved_bytes == 512 * len(scan.cells)


@some_examples(40)
@given(traces)
def test_buddies_are_powers_of_two_at_multiples_of_themselves_and_merge_back_to_one(trace):
    manager = Buddy()
    held = {}
    for held in run(manager, trace):
        for start, stop in spans(held):
            size = stop - start
            assert size & (size - 1) == 0 and start % size == 0
        for block, nbytes in held.values():
            assert block is None or block.size == 512 or block.size < 2 * nbytes
    for block, _ in held.values():
        manager.free(block)
    assert not manager.reserved_bytes or 2 * manager.largest_free_bytes > manager.reserved_bytes
    assert manager.malloc(1024 * GiB).address == 0, "one free block of all addresses"


def test_free_neighbours_that_are_no_buddies_stay_two_and_there_is_no_more_than_a_tebibyte():
    manager = Buddy()
    first, second, third, fourth = (manager.malloc(512) for _ in range(4))
    assert [block.address for block in (first, second, third, fourth)] == [0, 512, 1024, 1536]
    manager.free(second)
    manager.free(third)
    assert manager.largest_free_bytes == 512
    manager.free(fourth)
    assert manager.largest_free_bytes == 1024
    assert [Buddy().malloc(n).size for n in (1, 512, 513, 1025, 5 * MiB)] == [512, 512, 1024, 2048, 8 * MiB]
    with pytest.raises(torch.OutOfMemoryError, match="1 TiB"):
        Buddy().malloc(1024 * GiB + 1)


def test_a_slot_wastes_at_most_a_fifth_of_itself_above_two_kibibytes_and_classes_are_few():
    sizes = {nbytes: Slab.size_class(nbytes) for nbytes in range(1, MiB + 1, 257)}
    assert all(size >= nbytes and size % 512 == 0 for nbytes, size in sizes.items())
    assert all(size - aligned(nbytes) < size / 5 for nbytes, size in sizes.items())
    assert len(set(sizes.values())) == 4 + 4 * 9, "512 to 2048 in steps of 512, then four a doubling up to 1 MiB"


def test_a_page_serves_one_class_until_it_is_empty_and_then_any():
    manager = Slab()
    small = [manager.malloc(512 * KiB) for _ in range(4)]
    assert manager.reserved_bytes == 2 * MiB and manager.largest_free_bytes == 0
    manager.free(small[0])
    other = manager.malloc(1024)
    assert manager.reserved_bytes == 4 * MiB, "a free slot of 512 KiB is no help to another class"
    manager.free(other)
    for block in small[1:]:
        manager.free(block)
    assert manager.largest_free_bytes == 1 * MiB
    assert {manager.malloc(MiB).address // (2 * MiB) for _ in range(4)} == {0, 1}
    assert manager.reserved_bytes == 4 * MiB


def test_a_slab_gives_empty_pages_back_before_it_gives_up():
    manager = Slab("4 MiB")
    manager.free(manager.malloc(512))
    assert manager.reserved_bytes == 2 * MiB
    large = manager.malloc(2 * MiB + 1)  # more than half a page is the device's, and goes back to it
    assert large.size == manager.reserved_bytes == 4 * MiB
    manager.free(large)
    assert manager.reserved_bytes == manager.largest_free_bytes == 0
    page = manager.malloc(512)
    with pytest.raises(torch.OutOfMemoryError):
        manager.malloc(3 * MiB)
    manager.free(page)


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def lowest_offsets(requests, key) -> tuple[int, ...]:
    """Each in turn where it lies lowest beside all that were placed before, and are alive when it is."""
    placed = {}
    for i in sorted(range(len(requests)), key=lambda i: key(requests[i])):
        r, size = requests[i], aligned(requests[i].nbytes)
        others = [
            (at, at + aligned(requests[j].nbytes))
            for j, at in placed.items()
            if overlap((r.start, r.stop), (requests[j].start, requests[j].stop))
        ]
        free = (
            at
            for at in sorted([0, *(stop for _, stop in others)])
            if not any(overlap((at, at + size), o) for o in others)
        )
        placed[i] = next(free)
    return tuple(placed[i] for i in range(len(requests)))


@some_examples(40)
@given(trace=traces)
def test_every_request_lies_as_low_as_it_can_and_the_order_with_the_lowest_peak_is_taken(trace):
    peaks = {}
    for name, key in ORDERS.items():
        planned = plan(trace, {name: key})
        assert planned.offsets == lowest_offsets(planned.requests, key)
        assert planned.peak_bytes >= planned.aligned_bound_bytes >= planned.lower_bound_bytes
        peaks[planned.order] = planned.peak_bytes
    best, requested = plan(trace), replay(FirstFit(), trace).peak_requested_bytes
    assert best.peak_bytes == min(peaks.values()) == peaks[best.order]
    assert best.lower_bound_bytes == most_alive(lifetimes(trace)) == requested
    wide = [(name, nbytes if nbytes == FREE else -(-nbytes // 512) * 512) for name, nbytes in trace]
    assert best.aligned_bound_bytes == replay(FirstFit(), wide).peak_requested_bytes


@some_examples(40)
@given(trace=traces)
def test_the_arena_gives_the_planned_addresses_and_reserves_the_plans_peak(trace):
    planned = plan(trace)
    arena = PlannedArena(planned)
    assert arena.reserved_bytes == planned.peak_bytes
    given_out = []
    for held, (name, nbytes) in zip(run(arena, trace), trace, strict=True):
        if nbytes != FREE:
            given_out.append(held[name][0])
        places = spans(held)
        assert all(first[1] <= second[0] for first, second in pairwise(places))
        assert arena.allocated_bytes == sum(stop - start for start, stop in places)
        free = [b - a for a, b in pairwise([0, *(x for place in places for x in place), planned.peak_bytes])][::2]
        assert arena.largest_free_bytes == max(free)
    for block, offset in zip(given_out, planned.offsets, strict=True):
        assert block is None or block.address == offset
    assert replay(PlannedArena(planned), trace).peak_allocated_bytes == planned.aligned_bound_bytes


PROGRAM = [(0, 1000), (1, 2000), (0, FREE), (2, 3000), (1, FREE), (2, FREE)]


@pytest.mark.parametrize(
    ("planned", "run", "words"),
    [
        (PROGRAM, [(0, 1000), (1, 2001)], "event 1: expected a request of 2,000 B…found a request of 2001 B"),
        (PROGRAM, [*PROGRAM[:2], (1, FREE)], "event 2: expected the free of 1,000 B…found the free of …requested=2000"),
        (PROGRAM, [(0, 1000), (0, FREE)], "event 1: expected a request of 2,000 B…found the free of"),
        (PROGRAM[:2], [*PROGRAM[:2], (1, FREE), (2, 5)], "event 3: expected nothing more, …found a request of 5 B"),
    ],
)
def test_another_program_than_the_planned_one_is_refused_where_it_differs(planned, run, words):
    refused(lambda: replay(PlannedArena(plan(planned)), run), ValueError, words)


def test_after_the_planned_program_what_is_left_may_be_freed_once():
    arena = PlannedArena(plan([(0, 1000), (1, 2000), (2, 0), (1, FREE)]))
    first, second, nothing = arena.malloc(1000), arena.malloc(2000), arena.malloc(0)
    refused(lambda: arena.free(None), ValueError, "event 3: expected the free of 2,000 B…found the free of None")
    arena.free(second)
    arena.free(nothing)
    arena.free(first)
    assert arena.allocated_bytes == 0
    refused(lambda: arena.free(first), ValueError, "expected a block in use")
    assert plan([]).peak_bytes == plan([(0, 0)]).peak_bytes == 0
    assert replay(PlannedArena(plan([(0, 0), (0, FREE)])), [(0, 0), (0, FREE)]).peak_reserved_bytes == 0
