"""The meter: every byte of a training step, its birth, its death, the line that made it and why it was kept.

    with Meter(model, optimizer, inputs=(x, y)) as meter:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
    meter.timeline.peak_bytes

Read the pages in this order: `events` and `timeline` (the record) and `timeline_file` (how it is saved), `meter` (how
it is taken), `storages` (births and deaths) and `history` (what its notes come to), `whereabouts` (phase, line and
module) and `lines` (whose line it was), `nodes` (whose gradient an op computes), `ownership` (who owns tensors by name)
and `recognition` (what existed before, and what a storage became), `resizing` (sizes that change without an op),
`accumulation` (the observer's own footprint, and how it is undone), `workspace` (what kernels allocate for themselves,
from the allocator's log), and the folder `imagined` (hardware that isn't there).
"""

from memlab.memory_timeline.events import CATEGORIES, Event, Line, Span, Storage
from memlab.memory_timeline.imagined.budget import OutOfMemory
from memlab.memory_timeline.imagined.imagine import CARDS, imagine
from memlab.memory_timeline.imagined.places import in_main_memory, main_memory, on_imagined_card
from memlab.memory_timeline.meter import Meter
from memlab.memory_timeline.timeline import Timeline

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
