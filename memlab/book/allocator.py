"""What the allocator itself says: the book's independent witness, with no meter involved."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def allocated_peak(run: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """The most bytes that were allocated at once while `run()` ran, beyond what was allocated before it.

    On the CPU the figure is read from the log of allocations and frees that torch's profiler writes, on CUDA from the
    caching allocator's count of requested bytes. Both include what kernels allocate for themselves.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.init()  # before it there are no statistics at all
        gc.collect()  # garbage that is freed while `run()` runs would hide as much of what that takes
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    changes = []
    nodes = list(profile.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        if node.tag == torch._C._profiler._EventType.Allocation:
            changes.append((node.start_time_ns, node.extra_fields.alloc_size))
    held = peak = 0
    for _, delta in sorted(changes, key=lambda change: change[0]):
        held += delta
        peak = max(peak, held)
    return peak
