"""One program seen by every tool: `memlab.book.planted`, run once under each, and what each tells of what is planted.

    looks = look()
    seen_by_every_tool(looks)       who names what: cells that are the same on every machine
    what_they_cost(looks)           the figures of this run, and what a step takes under each

A tool is a function that makes the program, trains it under itself, and returns what it saw, without judging. What is
true is known from the program's source and chapter 02's arithmetic.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import torch

from memlab.book.memory_tools_others import (
    deepspeed_log,
    meter,
    monitor,
    python_objects,
    resident,
    trainer_tracker,
)
from memlab.book.memory_tools_torch import (
    STEPS,
    Seen,
    cuda_history,
    mem_tracker,
    profiler_table,
    profiler_trace,
    profiler_tree,
    tensor_census,
)
from memlab.book.planted import BYTES_KEPT, GROWTH_LINE, LEAK_BYTES, LEAK_LINE, PEAK_LINE, peak_bytes
from memlab.book.tables import Table
from memlab.units import format_bytes

WITHIN = 0.05


class Tool(NamedTuple):
    """How a tool is used, what it needs, and what it is blind to. `run`: None where it is another program."""

    run: Callable[[], Seen] | None
    level: str
    how: str
    needs: str
    blind: str


PROFILE = "torch.profiler.profile(profile_memory=True, with_stack=True)"
TOOLS: dict[str, Tool] = {
    "memlab's Meter": Tool(
        meter, "storages", "with Meter(model, optimizer, inputs=...)", "any device, also an imagined one",
        "what was leaked before it began; bytes that are no tensor's; births in other threads",
    ),
    "memlab's Monitor": Tool(
        monitor, "heap, resident; allocated, reserved", "with Monitor(): ... monitor.step()", "nothing",
        "lines; on a CPU, peaks of the heap between two samples",
    ),
    "torch.profiler, its table": Tool(
        profiler_table, "storages", 'key_averages().table(sort_by="self_cpu_memory_usage")', "nothing",
        "the peak: it adds up over calls and steps; lines",
    ),
    "torch.profiler, its trace file": Tool(
        profiler_trace, "storages", f"{PROFILE}, export_chrome_trace()", "a script that reads the file",
        "what was there before; line numbers: a frame has its function's first",
    ),
    "torch.profiler, its event tree": Tool(
        profiler_tree, "storages", f"{PROFILE}, its private event tree", "an interface that may change",
        "what was there before; bytes that are no tensor's",
    ),
    "MemTracker": Tool(
        mem_tracker, "storages", "torch.distributed._tools.mem_tracker", "a call each step, or it raises in the second",
        "lines: it knows modules and kinds",
    ),
    "census of tensors by gc": Tool(
        tensor_census, "storages", "[t for t in gc.get_objects() if torch.is_tensor(t)]", "nothing",
        "peaks; lines; tensors that only autograd holds and Python never saw",
    ),
    "tracemalloc": Tool(
        python_objects, "Python", "tracemalloc.start(), compare_to(before, 'lineno')", "nothing",
        "every tensor",
    ),
    "RSS and VmHWM": Tool(
        resident, "resident", "/proc/self/status; psutil", "Linux, for the high-water mark",
        "growth into pages that malloc had kept; lines; who",
    ),
    "Transformers' memory metrics": Tool(
        trainer_tracker, "resident; allocated", "TrainingArguments(skip_memory_metrics=False)", "psutil, and a core",
        "steps: it is one figure for the whole run; lines",
    ),
    "DeepSpeed's see_memory_usage": Tool(
        deepspeed_log, "resident; allocated, reserved", 'see_memory_usage("after backward", force=True)', "psutil",
        "less than 0.01 GB; on a CPU, peaks between two calls; lines",
    ),
    "CUDA's memory history": Tool(
        cuda_history, "storages, allocated, reserved", "torch.cuda.memory._record_memory_history(), _dump_snapshot()",
        "a GPU", "stacks of what was there before, cuBLAS's workspaces among it, which is left out of the peak here; "
        "bytes outside PyTorch's allocator; main memory",
    ),
    "torch.cuda.memory_summary": Tool(
        None, "allocated, reserved", "torch.cuda.memory_summary()", "a GPU",
        "when, which line, who; bytes outside PyTorch's allocator",
    ),
    "nvidia-smi, NVML": Tool(
        None, "driver", "nvidia-smi --query-gpu=memory.used --format=csv --loop=1", "a GPU; no change to the program",
        "what is free inside reserved segments; peaks between two looks; lines",
    ),
    "Nsight Systems": Tool(
        None, "driver", "nsys profile --trace=cuda,nvtx --cuda-memory-usage=true python train.py",
        "a GPU, nsys, its viewer; it may slow the run down much",
        "tensors inside PyTorch's segments; main memory. It adds every library's calls, beside the kernels in time",
    ),
}  # fmt: skip


# ---- held against the truth


def look(rounds: int = 1) -> dict[str, list[Seen]]:
    """Run the program under each tool in turn, `rounds` times.

    A tool that is not installed, or has no GPU here, has an empty list.
    """
    looks: dict[str, list[Seen]] = {name: [] for name in TOOLS}
    for _ in range(rounds):
        for name, tool in TOOLS.items():
            if tool.run is None or (tool.run is cuda_history and not torch.cuda.is_available()):
                continue
            with contextlib.suppress(ImportError):
                looks[name].append(tool.run())
    return looks


def named(seen: Seen) -> set[str]:
    """Which of the three planted facts a tool leads to, with its line: of "peak", "leak" and "growth"."""
    facts = {"peak": seen.peak_line == PEAK_LINE}
    facts["leak"] = seen.growth_line == LEAK_LINE and _parts(seen) == "the leak"
    facts["growth"] = seen.growth_line == GROWTH_LINE and _parts(seen) == "the Python bytes"
    return {fact for fact, found in facts.items() if found}


def named_by(looks: dict[str, list[Seen]], tools: int) -> int:
    """How many of the three facts the best so many tools name together, each with its line."""
    found = {name: named(seen[-1]) for name, seen in looks.items() if seen}
    return max(len(set().union(*map(found.get, names))) for names in combinations(found, tools))


def seen_by_every_tool(looks: dict[str, list[Seen]] | None = None) -> Table:
    """For each tool: its level, its peak as a part of the true one, what of the growth it sees, which lines it names.

    Figures of the process's pages change from run to run, so their cells say no more than that.
    """
    looks = looks or look()
    rows = []
    for name, tool in TOOLS.items():
        if not looks[name]:
            why = "not run here" if tool.run is None else "needs a GPU" if "a GPU" in tool.needs else "not installed"
            rows.append((name, tool.level, why, *"––––"))
            continue
        seen = looks[name][-1]
        cells = _peak(seen), _line(seen.peak_line, seen.why), _parts(seen), _line(seen.growth_line)
        rows.append((name, seen.level, *cells, f"{len(named(seen))} of 3"))
    peak, growth = ("peak, of the true one", "names for it"), ("growth it sees", "names for it")
    return Table(["tool", "level", *peak, *growth, "lines found"], rows)


def how_to_run_each() -> Table:
    """Every tool: its level, how it is used, what it needs, and what it is blind to."""
    return Table(["tool", "level", "how", "needs", "blind to"], [(name, *tool[1:]) for name, tool in TOOLS.items()])


def what_they_cost(looks: dict[str, list[Seen]] | None = None) -> Table:
    """This run's figures: a step under each tool as a multiple of a plain one, its peak, and the growth it saw."""
    looks = looks or look()
    rows = []
    for name in (name for name in TOOLS if looks[name]):
        seen = looks[name][-1]
        times = statistics.median(one.slowdown for one in looks[name])
        peak = "–" if seen.peak_bytes is None else format_bytes(seen.peak_bytes)
        grown = "–" if seen.growth_bytes is None else format_bytes(round(seen.growth_bytes))
        rows.append((name, f"{times:.1f}×", seen.level, peak, grown))
    return Table(["tool", "a step, of a plain one", "level", "peak", "growth a step"], rows)


def _peak(seen: Seen) -> str:
    if seen.level == "storages":
        return "–" if seen.peak_bytes is None else f"{seen.peak_bytes / peak_bytes(STEPS):.1%}"
    return "no tensors" if seen.level == "Python" else "varies"


def _parts(seen: Seen) -> str:
    """Which of what grows a figure stands for."""
    if seen.growth_bytes is None:
        return "–"
    if seen.level == "resident":
        return "varies"
    truths = {"the leak": LEAK_BYTES, "the Python bytes": BYTES_KEPT, "both, as one": LEAK_BYTES + BYTES_KEPT}
    for words, truth in truths.items():
        if abs(seen.growth_bytes - truth) <= WITHIN * truth:
            return words
    return f"{seen.growth_bytes / LEAK_BYTES:.1%} of the leak"


def _line(found: str, why: str = "") -> str:
    """Whether what a tool names is a planted line, or the function that it is in; and what else it says."""
    if found in (PEAK_LINE, LEAK_LINE, GROWTH_LINE):
        found = "the line"
    elif found.endswith(("): backward", "): step")):
        found = "the function"
    return ": ".join(filter(None, (found, why))) or "–"
