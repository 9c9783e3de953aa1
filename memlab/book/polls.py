"""What nvidia-smi in a loop sees of a small GPT that leaks: the claim `smi-loop`, by a formula and by replay.

The GPT trains on an imagined card and keeps 2 MiB of its logits each step. Its requests are put to the caching
allocator; a few metered steps, the last repeated, stand for a long run. Bytes, and the same on every machine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from memlab.book.tables import Table
from memlab.book.traces import Steps, Training
from memlab.book.workloads import lengths
from memlab.caching_allocator import CachingAllocator, ExpandableAllocator, OutOfMemory, Replay, Trace, replay
from memlab.memory_monitoring.polling import EmptiedEachStep, LeakSeen, Polled, leak_seen, polled, repeated
from memlab.units import format_bytes, parse_bytes

METERED, STEPS = 5, 400
STEP_SECONDS = 0.25  # chosen, not measured: four steps to a look of nvidia-smi --loop=1
ALLOCATORS: dict[str, Callable[[Sequence[int]], CachingAllocator]] = {
    "cache kept": lambda ends: CachingAllocator(),
    "expandable segments": lambda ends: ExpandableAllocator(),
    "cache emptied each step": lambda ends: EmptiedEachStep(ends=ends),
}


@functools.cache
def leaking(evaluation: bool = False, steps: int = STEPS) -> Steps:
    """Requests of a GPT that keeps 2 MiB of its logits each step; evaluation: of a large batch, once, after step 1."""
    samples, ends = [], []
    with Training() as run:
        for step in range(METERED):
            x, y = run.batch(8, 1024)
            logits = run.model(x)
            samples.append(logits[:, :256].detach().clone())
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            del logits
            run.update(loss)
            ends.append(len(run.trace))
            if evaluation and step == 0:
                with torch.no_grad():
                    run.model(*run.batch(24, 1024))
        trace = run.trace
    return Steps(*repeated(trace, ends, steps))


@functools.cache
def seen(evaluation: bool = False, allocator: str = "cache kept") -> LeakSeen:
    """When that leak shows, with one of ALLOCATORS."""
    trace = leaking(evaluation)
    return leak_seen(replay(ALLOCATORS[allocator](trace.ends), trace), trace.ends)


def leaks_seen() -> Table:
    """When the leak shows in what is allocated, and when in the driver's figure: by the formula, and by replay."""
    rows = []
    for evaluation in (False, True):
        for allocator in ("cache kept", "expandable segments"):
            found = seen(evaluation, allocator)
            rows.append(
                (
                    ("after one evaluation" if evaluation else "steps of one shape") + f", {allocator}",
                    format_bytes(found.slack_bytes),
                    found.allocated_after,
                    found.at_most,
                    found.driver_after,
                    format_bytes(found.hidden_bytes),
                    found.moves[-1],
                )
            )
    columns = ["program", "slack", "allocated shows it", "driver, at most", "driver", "hidden by then", "between moves"]
    return Table(columns, rows)


def polls(evaluation: bool = False, allocator: str = "cache kept", every: float = 1.0) -> Polled:
    """What polls every so many seconds see of the leaking GPT, at STEP_SECONDS a step."""
    trace = leaking(evaluation)
    return polled(replay(ALLOCATORS[allocator](trace.ends), trace), trace.ends, STEP_SECONDS, every)


def until_full(capacity: int | str, evaluation: bool = True) -> tuple[Replay, list[int], int]:
    """The leaking GPT on a card that gives PyTorch `capacity`: its replay and ends until it is full, and in which step.

    Raises ValueError for a card on which it does not get full.
    """
    trace = leaking(evaluation, 4 * STEPS)
    reached = 0

    def counted(requests: Trace) -> Iterator[tuple[int, int]]:
        nonlocal reached
        for request in requests:
            yield request
            reached += 1

    try:
        replay(CachingAllocator(capacity), counted(trace))
    except OutOfMemory:
        ends = [end for end in trace.ends if end <= reached]
        return replay(CachingAllocator(capacity), trace[:reached]), ends, len(ends) + 1
    raise ValueError(
        f"expected a card that is full within {len(trace.ends)} steps, found {capacity}; take a smaller one"
    )


def cards(capacities: Sequence[str] = ("1.25 GiB", "1.5 GiB", "2 GiB")) -> Table:
    """On cards of several sizes: how much of the room left at the start is gone when the driver's figure moves.

    The room is what the card has beyond the peak of the first step after the warm-up.
    """
    rows = []
    for capacity in capacities:
        done, ends, step = until_full(capacity)
        found = leak_seen(done, ends)
        room = parse_bytes(capacity) - max(done.allocated[ends[1] : ends[2] + 1])
        gone = "all" if found.driver_after is None else f"{found.hidden_bytes / room:.0%}"
        rows.append((capacity, found.allocated_after, found.driver_after or "never", step - 2, gone))
    return Table(
        ["card", "allocated shows it", "driver shows it", "out of memory", "room gone when the driver moves"], rows
    )


def false_signs(batches: int = 24, rows: int = 16) -> tuple[int, int]:
    """A clean GPT on batches of varying length: steps after the second in which the driver's figure reaches a new high,
    and steps at whose end more is allocated than after the second.
    """
    drawn = random.Random(1).sample(lengths(), rows * batches)
    ends = []
    with Training() as run:
        for i in range(0, len(drawn), rows):
            run.step(rows, max(drawn[i : i + rows]))
            ends.append(len(run.trace))
        trace = run.trace
    done = replay(CachingAllocator(), trace)
    highest = [done.reserved[end] for end in ends]
    rises = sum(highest[k] > max(highest[:k]) for k in range(2, batches))
    return rises, sum(done.allocated[end] > done.allocated[ends[1]] for end in ends[2:])
