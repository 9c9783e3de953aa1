"""Pictures that answer: how soon, in a real browser."""

from __future__ import annotations

import importlib.util

from memlab.book.measures.memory_timeline import metered
from memlab.book.measures.timing import spread, trainer
from memlab.book.workloads import GPT, text_batch

BLOCKS = """
from memlab.book.block_map import explore_blocks
from memlab.book.traces import TRACES
from memlab.caching_allocator import CachingAllocator
explore_blocks({"CUDA's": CachingAllocator}, TRACES["lengths, shortest first"]())
"""


def pictures_that_move(device: str, rounds: int) -> list[tuple]:
    """In a real browser: from a slider's key to new pixels, from the pointer to the explorer's table; opening it."""
    from memlab.book.browser import chromium
    from memlab.book.responsiveness import response_times, slide_times

    if chromium() is None or any(importlib.util.find_spec(name) is None for name in ("playwright", "jupyterlab")):
        return [("pictures that move", "not measured: needs Chromium and the test extra", "")]
    batch = tuple(tensor.to(device) for tensor in text_batch(1, 8))
    model, optimizer, step = trainer(GPT(layers=24, width=16, heads=2, context=8).to(device), batch, foreach=True)
    steps = [metered(model, optimizer, batch, step)().timeline for _ in range(12)]
    many = metered(model, optimizer, batch, lambda: [step() for _ in range(8)])().timeline
    times = response_times(steps, many, rounds)
    blocks = slide_times(BLOCKS, 12)
    return [
        ("block map's slider to new pixels, half a second apart, ms", spread(blocks, "{:.0f}"), "≤ 150"),
        ("slider to new pixels, half a second apart, ms", spread(times["slide"], "{:.0f}"), "≤ 150"),
        (f"explorer hover, {len(many):,} events, ms", spread(times["hover"], "{:.0f}"), "≤ 50"),
        (f"opening explore, {len(many):,} events, s", spread([ms / 1e3 for ms in times["open"]]), "≤ 1"),
    ]


def live_figure(device: str, rounds: int) -> list[tuple]:
    """In a real browser, while a cell trains: how often the live figure moves, and how long the page stands still."""
    from memlab.book.browser import chromium
    from memlab.book.live_times import follow

    needed = ("playwright", "jupyterlab", "anywidget")
    if chromium() is None or any(importlib.util.find_spec(name) is None for name in needed):
        return [("live figure", "not measured: needs Chromium and the test extra", "")]
    found = follow()
    return [
        ("live figure while a cell trains, updates a second", f"{found.updates_per_second:.1f}", "≥ 2"),
        ("live figure, the page's longest task, ms", f"{found.longest_task_ms:.0f}", "≤ 100"),
        ("live figure, longest time between two frames, ms", f"{found.longest_frame_ms:.0f}", ""),
        ("live figure, the kernel's time for an update, ms", spread(found.message_ms), "≤ 1"),
    ]
