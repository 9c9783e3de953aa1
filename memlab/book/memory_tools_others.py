"""One program under memlab's tools, the system's and other people's: `memlab.book.planted`, run once under each.

A tool is a function that makes the program, trains it for `STEPS` steps under itself, and returns what it saw. What it
cannot tell is left empty. PyTorch's own are in `memory_tools_torch`; `memory_tools` holds all of it against the truth.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import statistics
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from memlab.book.memory_tools_torch import STEPS, Seen, train
from memlab.book.planted import Planted
from memlab.memory_monitoring import Monitor, ProcessMemory
from memlab.memory_timeline import Meter
from memlab.units import GiB


def meter() -> Seen:
    """memlab's Meter: peak, lines and reasons from its timeline; growth from what is alive after each step."""
    program = Planted()
    with Meter(program.model, program.optimizer, inputs=program.batch) as watching:
        ends = [watching.event for _ in program.run(STEPS)]
    timeline = watching.timeline
    largest = timeline.alive(timeline.peak_event)[0]
    held = [Counter() for _ in ends]
    for lines, end in zip(held, ends, strict=True):
        for storage in timeline.alive(end):
            lines[storage.line.source] += storage.nbytes
    line, grown = max((held[-1] - held[0]).items(), key=lambda item: item[1])
    return Seen(
        "storages", timeline.peak_bytes, largest.line.source, grown / (STEPS - 1), line, largest.reason,
        program.slowdown,
    )  # fmt: skip


def monitor() -> Seen:
    """memlab's Monitor alone, at the level it watches by itself. Its peaks of *heap* are sampled.

    Malloc serves the whole process, so one difference between two steps can have something else in it: the median.
    """
    program, before = Planted(), ProcessMemory().read()
    with Monitor(every=0.01, sources=[ProcessMemory()]) as watching:
        for _ in program.run(2 * STEPS):
            watching.step()
    ends, level = watching.history.ends, watching.watch
    peak = max(watching.history.peaks) - before.get(level, 0)
    grown = statistics.median(after - end for end, after in pairwise(ends))
    return Seen(level, peak, growth_bytes=grown, slowdown=program.slowdown)


def resident() -> Seen:
    """The system's RSS after each step, and its high-water mark, VmHWM, over what was resident before the first."""
    program, memory, ends = Planted(), ProcessMemory(), []
    before = memory.read()["resident"]
    with contextlib.suppress(OSError):
        memory.peaks()
    for _ in program.run(STEPS):
        ends.append(memory.read()["resident"])
    peak = memory.peaks().get("resident")
    grown = (ends[-1] - ends[0]) / (STEPS - 1)
    return Seen("resident", peak and peak - before, growth_bytes=grown, slowdown=program.slowdown)


def python_objects() -> Seen:
    """Python's tracemalloc: what Python's own allocator handed out, by line."""
    program = Planted()
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        train(program)
        changes = tracemalloc.take_snapshot().compare_to(before, "lineno")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    frame = changes[0].traceback[0]
    line = linecache.getline(frame.filename, frame.lineno).strip()
    grown = changes[0].size_diff / STEPS
    return Seen("Python", peak, growth_bytes=grown, growth_line=line, slowdown=program.slowdown)


def trainer_tracker() -> Seen:
    """What Transformers' Trainer prints with skip_memory_metrics=False: RSS, looked at without a pause in a thread."""
    from transformers.trainer_utils import TrainerMemoryTracker

    program, watching = Planted(), TrainerMemoryTracker(skip_memory_metrics=False)
    watching.derive_stage = lambda: "train"  # it goes by the name of the function that calls it
    watching.start()
    try:
        train(program)
    finally:
        watching.stop("train")
    grown, above = watching.cpu["train"]["alloc"], watching.cpu["train"]["peaked"]
    return Seen("resident", grown + above, growth_bytes=grown / STEPS, slowdown=program.slowdown)


def deepspeed_log() -> Seen:
    """DeepSpeed's see_memory_usage after each step, read from its log: on a CPU, the resident set, in GB of 2**30."""
    with _quiet():
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.utils import see_memory_usage

        level = "resident" if get_accelerator().device_name() == "cpu" else "allocated"
    program, log = Planted(), io.StringIO()
    with contextlib.redirect_stdout(log):
        see_memory_usage("before", force=True)
        for number in program.run(STEPS):
            see_memory_usage(f"step {number}", force=True)
    now = [float(figure) for figure in re.findall(r"(?m)^MA ([\d.]+) GB", log.getvalue())]
    highest = [float(figure) for figure in re.findall(r"Max_MA ([\d.]+) GB", log.getvalue())]
    peak, grown = max(highest[1:]) - now[0], (now[-1] - now[1]) / (STEPS - 1)
    return Seen(level, round(peak * GiB), growth_bytes=grown * GiB, slowdown=program.slowdown)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing below an error is logged: DeepSpeed says at its import, with the time of day, that there is no GPU."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
