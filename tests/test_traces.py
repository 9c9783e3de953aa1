"""The workloads are what they say: whole programs, the same every time, that a manager can be judged by."""

import functools
import time
from collections import Counter

import pytest
import torch

from memlab.book.traces import (
    MANAGERS,
    SIZES,
    TRACES,
    Training,
    driver_events,
    growing_cache,
    leak,
    times,
    token_budget,
    train_and_eval,
    training_steps,
    varying_lengths,
)
from memlab.book.workloads import GPT, lengths
from memlab.caching_allocator import FREE, FirstFit, plan, replay
from memlab.caching_allocator.static_plan import lifetimes
from memlab.memory_timeline import Meter, imagine
from memlab.units import MiB
from tests.tiers import some

every = pytest.mark.parametrize("name", TRACES)


@functools.cache
def weights_bytes() -> int:
    with torch.device("meta"):
        return sum(4 * p.numel() for p in GPT(**SIZES).parameters())


def held_at_the_end(trace) -> list[int]:
    return [r.nbytes for r in lifetimes(trace) if r.stop == len(trace)]


@every
def test_a_trace_is_well_formed_long_enough_to_tell_and_short_enough_to_replay(name):
    trace = TRACES[name]()
    assert 1_000 < len(trace) < 60_000
    done = replay(FirstFit(), trace)  # raises for a trace that is not well formed
    assert done.peak_requested_bytes > 100 * MiB


PLANNED = sorted(TRACES, key=lambda name: name == "a growing cache")  # the longest last


@some("name", PLANNED, keep=1)
def test_a_static_plan_is_within_two_percent_of_the_lower_bound(name):
    planned = plan(TRACES[name]())
    assert planned.lower_bound_bytes <= planned.aligned_bound_bytes <= planned.peak_bytes
    assert planned.peak_bytes <= 1.02 * planned.lower_bound_bytes


def test_every_workload_is_the_same_when_it_is_metered_again():
    assert training_steps.__wrapped__(2) == training_steps(2)
    assert varying_lengths.__wrapped__("shortest first", 3) == varying_lengths("shortest first", 3)
    assert leak.__wrapped__(2) == leak(2)
    assert growing_cache.__wrapped__(5) == growing_cache(5)


def test_after_the_first_every_step_of_one_shape_asks_for_the_same_in_the_same_order():
    sizes = {}
    for steps in (2, 3, 4):
        trace = training_steps(steps)
        born = {}
        sizes[steps] = [born.pop(i) * -1 if n == FREE else born.setdefault(i, n) for i, n in trace]
        kept = [replay(FirstFit(), trace).requested[end] for end in trace.ends]
        assert len(set(kept[1:])) == 1  # a step ends where it holds no more than the one before
    first = len(sizes[3]) - len(sizes[2])
    assert sizes[4] == sizes[3] + sizes[3][-first:] and sizes[3][-first:] == sizes[2][-first:]


def test_training_holds_weights_and_two_moments_in_the_end_and_the_weights_are_the_books_gpts():
    """Fused AdamW keeps each parameter's step count on the card, 4 bytes of it."""
    tensors = len(list(GPT(**{**SIZES, "width": 8}).parameters()))
    for trace in (training_steps(), varying_lengths(), token_budget(), train_and_eval()):
        assert sum(held_at_the_end(trace)) == 3 * weights_bytes() + 4 * tensors


def test_the_peak_is_that_of_the_same_step_metered_alone():
    with imagine("H100-80GB"):
        model = GPT(**SIZES)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            with Meter(model, optimizer) as meter:
                model(torch.randint(256, (8, 1024)), torch.randint(256, (8, 1024))).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert replay(FirstFit(), training_steps()).peak_requested_bytes == meter.timeline.peak_bytes


def test_orders_of_lengths_are_the_same_batches_and_the_longest_comes_last_or_first():
    shuffled, up, down = (
        [nbytes for _, nbytes in varying_lengths(order) if nbytes >= 0]
        for order in ("shuffled", "shortest first", "longest first")
    )
    assert Counter(shuffled) == Counter(up) == Counter(down) and shuffled != up != down
    hidden = 4 * 16 * 4 * SIZES["width"]  # bytes a token of 16 rows takes between the two layers of a feed-forward
    assert max(up) % hidden == 0 and max(up) // hidden in lengths()
    places = [sizes.index(max(sizes)) / len(sizes) for sizes in (up, down)]
    assert places[0] > 11 / 12 and places[1] < 2 / 12


def test_a_leak_leaves_its_samples_and_nothing_else():
    assert held_at_the_end(leak()) == [2 * MiB] * 8
    assert held_at_the_end(leak(3)) == [2 * MiB] * 3


def test_a_growing_cache_makes_every_layer_anew_and_one_token_longer():
    trace = growing_cache(tokens=3, layers=1, rows=2, width=4)
    sizes = [nbytes for _, nbytes in trace if nbytes >= 0]
    row = 2 * 4 * 4
    assert sizes == [64 * row] * 2 + [row, 65 * row] * 2 + [row, 66 * row] * 2 + [row, 67 * row] * 2
    assert held_at_the_end(trace) == [67 * row] * 2


def test_events_at_the_driver_are_the_changes_of_what_is_reserved():
    trace = [(0, 2 * MiB), (1, 2 * MiB), (0, FREE), (2, 2 * MiB), (1, FREE), (2, FREE)]
    assert driver_events(replay(MANAGERS["slab"](trace), trace)) == 6
    assert driver_events(replay(MANAGERS["first fit"](trace), trace)) == 2
    assert driver_events(replay(MANAGERS["static plan"](trace), trace)) == 1


def test_of_some_replays_the_fastest_counts_each_by_an_allocator_of_its_own():
    made = []

    def slow_at_first(trace):
        made.append(MANAGERS["slab"](trace))
        if len(made) == 1:
            made[0].free = lambda block: time.sleep(0.05)
        return made[-1]

    shown = times({"short": lambda: [(0, 1000), (0, FREE)]}, {"slow at first": slow_at_first}, repeats=3)
    assert shown.columns == ["workload", "events", "slow at first"]
    assert len(made) == 3 and shown.rows[0][2] < 0.05 / 2 * 1e6


def test_a_block_that_raises_leaves_no_meter_and_no_imagined_card():
    with pytest.raises(ZeroDivisionError), Training() as run:
        run.step(1, 8)
        raise ZeroDivisionError
    assert torch.ones(1).item() == 1
    with imagine("cpu"):
        pass
    assert run.trace
