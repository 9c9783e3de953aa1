"""What polls of the driver's figure see of programs whose every byte is known: closed forms on traces made by hand."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from memlab.caching_allocator import FREE, CachingAllocator, Replay, replay
from memlab.memory_monitoring import leak_seen, polled
from memlab.memory_monitoring.polling import CONTEXT_BYTES, repeated
from memlab.units import MiB
from tests.harness import refusals, refused


def steps(count: int, peak: int, leak: int = 0) -> tuple[list, list[int]]:
    """Steps that each take `peak` bytes, give them back, and keep `leak` bytes; the trace and the ends."""
    trace, ends = [], []
    for k in range(count):
        trace += [(("work", k), peak), (("work", k), FREE)]
        if leak:
            trace.append((("kept", k), leak))
        ends.append(len(trace))
    return trace, ends


def levels(allocated: list[int], reserved: list[int]) -> Replay:
    """A replay that held these bytes after each event, and nothing before."""
    return Replay([0, *allocated], [0, *allocated], [0, *reserved], [0] * (len(allocated) + 1))


def test_a_poll_shows_what_is_reserved_at_its_moment_and_the_context():
    done = levels([1, 5, 2, 3], [10, 20, 20, 30])
    found = polled(done, [2, 4], 2.0, 1.0)
    assert found.seconds == [0.0, 1.0, 2.0, 3.0]
    assert found.driver == [CONTEXT_BYTES + n for n in (0, 10, 20, 20)]
    assert found.peak_driver == CONTEXT_BYTES + 30
    found = polled(done, [2, 4], 2.0, 4.0)  # one poll, at any moment of the four seconds
    assert found.highest_driver == (CONTEXT_BYTES, CONTEXT_BYTES + 20)
    assert found.allocated_peaks_met == 0.25
    trace, ends = steps(60, 40 * MiB)  # a cache that is kept shows the highest to every poll
    for every in (0.37, 4.0):
        found = polled(replay(CachingAllocator(), trace), ends, 0.2, every)
        assert found.highest_driver == (found.peak_driver, found.peak_driver) and found.peak_driver == 552 * MiB


@pytest.mark.parametrize("every", [0.03, 0.15, 7.0])
def test_of_peaks_of_allocated_polls_meet_the_seconds_at_the_peak_over_the_seconds_between_polls(every):
    trace, ends = steps(40, 40 * MiB)  # half of each step is at its peak
    found = polled(replay(CachingAllocator(), trace), ends, 0.2, every)
    assert math.isclose(found.allocated_peaks_met, min(1, 0.1 / every))


def test_peaks_met_agree_with_a_thousand_clocks():
    generator = random.Random(5)
    allocated = [generator.randrange(4) for _ in range(60)]
    ends, every = [9, 20, 41, 60], 0.7
    seconds = [0.0]  # a step of a second, its events at even distances
    for step, (start, stop) in enumerate(pairwise((0, *ends))):
        seconds += [step + (i + 1 - start) / (stop - start) for i in range(start, stop)]
    found = polled(levels(allocated, allocated), ends, 1.0, every)
    held, met, clocks = [0, *allocated], 0, 1000
    for clock in range(clocks):
        looked = set()
        for k in range(-1, 60):
            at = (clock + 0.5) / clocks * every + k * every
            looked |= {i for i in range(60) if seconds[i] <= at < seconds[i + 1]}
        met += sum(
            any(i in looked and held[i] == max(held[start:stop]) for i in range(start, stop))
            for start, stop in pairwise((0, *ends))
        )
    assert abs(found.allocated_peaks_met - met / clocks / len(ends)) < 0.005


@pytest.mark.parametrize("leak", [2 * MiB, 5 * MiB])
def test_without_fragmentation_the_driver_shows_a_leak_after_slack_over_growth_steps(leak):
    """An evaluation left 100 MiB more than a step needs, in one piece; what is kept lies at its low end."""
    trace, ends = steps(60, 40 * MiB, leak)
    trace = [("evaluation", 140 * MiB), ("evaluation", FREE), *trace]
    found = leak_seen(replay(CachingAllocator(), trace), [end + 2 for end in ends], warm_up=1)
    assert found.growth_bytes == leak and found.allocated_after == 1
    assert found.slack_bytes == 100 * MiB - leak
    assert found.driver_after == found.at_most == 100 * MiB // leak + 1
    assert found.hidden_bytes == found.driver_after * leak


def test_a_leak_shows_in_allocated_after_one_step_and_in_the_driver_when_the_slack_is_eaten():
    allocated, reserved, ends = [], [], []
    for k in range(40):
        allocated += [100 + 3 * k, 10 + 3 * (k + 1)]
        reserved += [max(150, 150 + 30 * math.ceil((100 + 3 * k - 150) / 30))] * 2
        ends.append(len(allocated))
    found = leak_seen(levels(allocated, reserved), ends)
    assert found.growth_bytes == 3 and found.allocated_after == 1
    assert found.slack_bytes == 150 - 106  # the peak of the third step, the first after the warm-up
    assert found.driver_after == found.at_most == 44 // 3 + 2
    assert found.hidden_bytes == 16 * 3
    found = leak_seen(levels([50, 10, 50, 11, 50, 12, 50, 13], [90] * 8), [2, 4, 6, 8])  # one that never moved
    assert (found.driver_after, found.hidden_bytes) == (None, 2)
    assert found.at_most == 40 + 2
    found = leak_seen(levels([50, 10, 50, 11, 92, 12], [90, 90, 90, 90, 95, 95]), [2, 4, 6])  # one that moved at once
    assert (found.slack_bytes, found.at_most, found.driver_after) == (-2, 1, 1)


def of_four(ends, **options):
    return lambda: polled(levels([1, 5, 2, 3], [10, 20, 20, 30]), ends, **{"step_seconds": 1.0, **options})


def of_trace(trace, ends):
    return lambda: repeated(trace, ends, 9)


REACHES_BACK = [("a", 1), ("b", 2), ("c", 2), ("a", FREE)]
STILL = levels([50, 10, 50, 10], [90] * 4)


REFUSALS = {
    "a step of nothing": (of_four([0, 2]), ValueError, "expected ends of steps that rise"),
    "a step beyond the last": (of_four([2, 5]), ValueError, "from 1 to 4"),
    "polls without a pause": (of_four([2, 4], every=0), ValueError, "expected times above 0"),
    "steps that differ": (of_trace([("a", 1), ("b", 2), ("c", 3)], [1, 2, 3]), ValueError, "two that differ"),
    "steps that reach back": (of_trace(REACHES_BACK, [1, 2, 4]), ValueError, "at most a step old, found 'a' freed"),
    "two steps to repeat": (of_trace([("a", 1), ("b", 1)], [1, 2]), ValueError, "three steps"),
    "no leak to see": (lambda: leak_seen(STILL, [2, 4], warm_up=1), ValueError, "more after each step, found 0 bytes"),
    "a warm-up of all steps": (lambda: leak_seen(STILL, [2, 4]), ValueError, "of 1 to 1 steps of 2, found 2"),
}


@refusals(REFUSALS)
def test_what_makes_no_sense_is_refused(call, error, words):
    refused(call, error, words)


def test_a_last_step_done_again_is_what_a_longer_run_asks_for():
    def made(count):
        trace, ends, last = [], [], None
        for k in range(count):
            trace += [(("x", k), 5), (("y", k), 6 + (k == 0)), (("x", k), FREE), (("kept", k), 2)]
            if last is not None:
                trace.append((last, FREE))
            last = "y", k
            ends.append(len(trace))
        return trace, ends

    short, long = made(4), made(30)
    trace, ends = repeated(*short, 30)
    assert ends == long[1] and [nbytes for _, nbytes in trace] == [nbytes for _, nbytes in long[0]]
    one, other = (replay(CachingAllocator(), each) for each in (trace, long[0]))
    assert one == other
    assert repeated(*short, 4) == short
