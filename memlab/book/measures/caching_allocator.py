"""Chapter 04: how fast the allocator's model replays, how near a static plan comes to its bound, recorded decisions."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from memlab.book.measures.timing import interleaved, spread
from memlab.book.snapshots import FOLDER, recorded_decisions
from memlab.book.traces import TRACES
from memlab.caching_allocator import FREE, CachingAllocator, ExpandableAllocator, Trace, plan, replay


def replay_speed(device: str, rounds: int) -> list[tuple]:
    """Events a second through `replay`: traces of training, and random requests and frees."""
    traces = {
        "a GPT's training, varying lengths": TRACES["lengths, shuffled"](),
        "300,000 random events": random_trace(),
    }
    runs, events = {}, {}
    for make, (name, trace) in itertools.product((CachingAllocator, ExpandableAllocator), traces.items()):
        row = f"{make.__name__}, {name}, 10⁵ events a second"
        runs[row], events[row] = lambda make=make, trace=trace: replay(make(), trace), len(trace)
    rows = []
    for row, times in interleaved(runs, rounds).items():
        speeds = spread([events[row] / time / 1e5 for time in times], "{:.1f}")
        rows.append((row, speeds, "≥ 5" if row.startswith("CachingAllocator") else ""))
    return rows


def random_trace(events: int = 300_000, live: int = 500, seed: int = 0) -> Trace:
    """Requests of 1 B to 32 MiB, most of them small, of which about `live` are held at a time."""
    draw = random.Random(seed)
    trace: Trace = []
    held: list[int] = []
    for name in range(events):
        if len(trace) >= events:
            break
        trace.append((name, int(2 ** draw.uniform(0, 25))))
        held.append(name)
        if len(held) > live:
            at = draw.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            trace.append((held.pop(), FREE))
    return trace[:events]


def static_plans(device: str, rounds: int) -> list[tuple]:
    """A static plan's peak against the most that is ever held at once, no plan's peak being lower."""
    rows = []
    for name in ("steps of one shape", "lengths, shuffled", "training and evaluation"):
        packed = plan(TRACES[name]())
        figure = f"{packed.peak_bytes / packed.lower_bound_bytes:.5f}×"
        rows.append((f"static plan / the most held at once, a GPT's training: {name}", figure, "≤ 1.02×"))
    return rows


def recorded_allocator(device: str, rounds: int) -> list[tuple]:
    """The model's decisions against a GPU's recorded ones."""
    rows = recorded_decisions(Path(__file__).parents[3] / "chapters" / FOLDER).rows
    return [(f"allocator's decisions equal to a GPU's: {name}", figure, "≥ 99 %") for name, *_, figure, _ in rows]
