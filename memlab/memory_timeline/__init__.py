"""The meter: every byte of a training step, its birth, its death, the line that made it and why it was kept.

    with Meter(model, optimizer, inputs=(x, y)) as meter:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
    meter.timeline.peak_bytes

Read the pages in this order: `timeline` (the record) and `documents` (how it is saved), `meter` (how it is taken),
`lines` (whose line it was), `ownership` (what existed before, and what a storage became), `accumulation` (the
observer's own footprint, and how it is undone), `workspace` (what kernels allocate for themselves, from the
allocator's log), and `imagine` (hardware that isn't there) with `gpu_ops` and `gpu_autocast` (where it works unlike a
CPU) and `budget` (when it is full).
"""

from memlab.memory_timeline.budget import OutOfMemory
from memlab.memory_timeline.imagine import CARDS, imagine, in_main_memory, main_memory, on_imagined_card
from memlab.memory_timeline.meter import Meter
from memlab.memory_timeline.timeline import CATEGORIES, Event, Line, Span, Storage, Timeline

__all__ = [
    "CARDS",
    "CATEGORIES",
    "Event",
    "Line",
    "Meter",
    "OutOfMemory",
    "Span",
    "Storage",
    "Timeline",
    "imagine",
    "in_main_memory",
    "main_memory",
    "on_imagined_card",
]
