"""One program under PyTorch's own tools: `memlab.book.planted`, run once under each, and what each says of it.

A tool is a function that makes the program, trains it for `STEPS` steps under itself, and returns what it saw. What it
cannot tell is left empty. `memory_tools` has the tools of others, and holds what was seen against the truth.
"""

from __future__ import annotations

import gc
import json
import linecache
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from memlab.book.planted import Planted

STEPS = 3
TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class Seen:
    """What a tool says of the program. Bytes are at its own `level`; None and "" for what it does not tell.

    peak_bytes: the most held at once. growth_bytes: what is more at the end of each step than of the one before.
    The lines are source text, as the tool's own file names and numbers lead to it; `function` says that it names a
    function only. why: what it says of whoever holds the most at the peak.
    slowdown: how long a step took, as a multiple of one without the tool.
    """

    level: str
    peak_bytes: int | None = None
    peak_line: str = ""
    growth_bytes: float | None = None
    growth_line: str = ""
    why: str = ""
    slowdown: float = 1.0


def profiler_table() -> Seen:
    """torch.profiler's table by op: `key_averages().table(sort_by="self_cpu_memory_usage")`, its first row."""
    profile, slowdown = _profiled()
    first = max(profile.key_averages(), key=lambda row: row.self_cpu_memory_usage)
    return Seen("storages", why=f"an op, {first.key}", slowdown=slowdown)


def profiler_trace() -> Seen:
    """torch.profiler's exported trace: its [memory] events have a running total, its frames name functions."""
    profile, slowdown = _profiled(with_stack=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    frames = [event for event in events if event.get("cat") == "python_function"]
    start = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    # The allocation of the most bytes among those held when the total is highest: its time has a stack.
    alive: dict[int, dict] = {}
    highest, largest = 0, changes[0]
    for event in changes:
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        if nbytes < 0:
            alive.pop(address, None)
            continue
        alive[address] = event
        if event["args"]["Total Allocated"] - start > highest:
            highest = event["args"]["Total Allocated"] - start
            largest = max(alive.values(), key=lambda one: one["args"]["Bytes"])
    grown = Counter()
    for event in alive.values():
        grown[_function_at(frames, event["ts"])] += event["args"]["Bytes"]
    function, nbytes = grown.most_common(1)[0]
    return Seen("storages", highest, _function_at(frames, largest["ts"]), nbytes / STEPS, function, slowdown=slowdown)


def profiler_tree() -> Seen:
    """torch.profiler's event tree, which is private: the same events, with the number of the line that called."""
    from torch._C._profiler import _EventType as Kind

    profile, slowdown = _profiled(with_stack=True)
    alive: dict[int, tuple[int, str]] = {}
    held = highest = 0
    largest = (0, "")
    stack, found = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == Kind.Allocation:
            found.append(event)
    for event in sorted(found, key=lambda one: one.start_time_ns):
        nbytes, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        held += nbytes
        if nbytes < 0:
            alive.pop(address, None)
            continue
        alive[address] = nbytes, _line_above(event, (Kind.PyCall, Kind.PyCCall))
        if held > highest:
            highest, largest = held, max(alive.values())
    grown = Counter()
    for nbytes, line in alive.values():
        grown[line] += nbytes
    line, nbytes = grown.most_common(1)[0]
    return Seen("storages", highest, largest[1], nbytes / STEPS, line, slowdown=slowdown)


def cuda_history() -> Seen:
    """The CUDA allocator's history: `torch.cuda.memory._record_memory_history()`, and its snapshot. On a GPU only.

    Its figures are the process's, with what cuBLAS took for itself: so the peak is over what was there before.
    """
    record = torch.cuda.memory._record_memory_history
    program = Planted("cuda")
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    record("all", context="all", stacks="python", clear_history=True)
    try:
        train(program)
        dump = torch.cuda.memory._snapshot()
    finally:
        record(None)
    seen = read_history(dump, torch.cuda.current_device(), program.slowdown)
    return replace(seen, peak_bytes=seen.peak_bytes - before)


def read_history(dump: dict, device: int = 0, slowdown: float = 1.0) -> Seen:
    """What a snapshot of PyTorch's says of a program. Its sizes are those that were asked for: level *storages*.

    dump: of `torch.cuda.memory._snapshot()`, or of `memlab.memory_monitoring.as_snapshot`.
    """
    events, alive, kept = dump["device_traces"][device], {}, Counter()
    blocks = [block for segment in dump["segments"] if segment["device"] == device for block in segment["blocks"]]
    at_end = sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")
    signs = {"alloc": 1, "free_completed": -1}
    held = highest = at_end - sum(signs.get(event["action"], 0) * event["size"] for event in events)
    largest: tuple[int, str] = (0, "")
    for event in events:
        held += signs.get(event["action"], 0) * event["size"]
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], _line_of(event.get("frames", []))
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
        if held > highest:
            highest, largest = held, max(alive.values())
    for nbytes, line in alive.values():
        kept[line] += nbytes
    line, nbytes = max(kept.items(), key=lambda item: item[1], default=("", 0))
    return Seen("storages", highest, largest[1], nbytes / STEPS, line, slowdown=slowdown)


@contextmanager
def tracked(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Iterable[torch.Tensor]) -> Iterator:
    """torch.distributed's MemTracker, switched on. Its end leaves a `resize_` on the class of storages, which goes too.

    The one left is what the class inherits; whoever asks the class itself, as a meter's tests do, would find it.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    before = vars(torch.UntypedStorage).get("resize_")
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch)
    try:
        with tracker:
            yield tracker
    finally:
        if before is None and "resize_" in vars(torch.UntypedStorage):
            del torch.UntypedStorage.resize_


def mem_tracker() -> Seen:
    """torch.distributed's MemTracker: exact, by kind and by module; it has to be told of each step's end."""
    program, totals = Planted(), []
    with tracked(program.model, program.optimizer, program.batch) as watching:
        for _ in program.run(STEPS):
            watching.reset_mod_stats()
            totals.append(_total(watching.get_tracker_snapshot("current")))
        peak = watching.get_tracker_snapshot("peak")
    kinds = next(iter(peak.values()))
    largest = max((kind for kind in kinds if kind != "Total"), key=kinds.get)
    grown = (totals[-1] - totals[0]) / (STEPS - 1)
    why = f"a kind, {getattr(largest, 'value', largest)}"
    return Seen("storages", _total(peak), growth_bytes=grown, why=why, slowdown=program.slowdown)


def tensor_census() -> Seen:
    """The well-known recipe: every tensor that the garbage collector knows, after each step."""
    gc.collect()  # what others left in cycles would go while this counts
    program, totals = Planted(), []
    for _ in program.run(STEPS):
        storages = {}
        for each in gc.get_objects():
            if not issubclass(type(each), torch.Tensor) or torch.nn.parameter.is_lazy(each):
                continue
            if each.layout is torch.strided and (storage := each.untyped_storage()).device.type != "meta":
                storages[storage._cdata] = storage.nbytes()  # a fake tensor's is of meta, and may be a symbol
        totals.append(sum(storages.values()))
    return Seen("storages", growth_bytes=(totals[-1] - totals[0]) / (STEPS - 1), slowdown=program.slowdown)


def train(program: Planted) -> None:
    """The steps that are watched."""
    for _ in program.run(STEPS):
        pass


def _profiled(**options):
    """The program under torch.profiler, and by how much it slowed the steps down."""
    program = Planted()
    notes = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}  # the profiler's, with the time of day
    with (
        mock.patch.dict(os.environ, notes),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True, **options
        ) as found,
    ):
        train(program)
    return found, program.slowdown


def _function_at(frames: Iterable[dict], moment: float) -> str:
    """The innermost function of the reader's own that ran at a moment of a trace, as the trace calls it."""
    inside = [one for one in frames if one["ts"] <= moment <= one["ts"] + one["dur"] and ".py(" in one["name"]]
    own = [one for one in inside if not one["name"].startswith("torch/")]
    return max(own, key=lambda one: one["ts"])["name"] if own else ""


def _line_above(event, calls: tuple) -> str:
    """The source of the line outside torch that called, above an event of a profiler's tree."""
    while event is not None:
        if event.tag in calls:
            caller = event.extra_fields.caller
            if not caller.file_name.startswith((TORCH, "torch" + os.sep)):
                return _source(caller.file_name, caller.line_number)
        event = event.parent
    return ""


def _line_of(frames: list[dict]) -> str:
    """The source of the innermost line outside torch; a frame of a Timeline's has it for a name."""
    for frame in frames:
        if frame["line"] and not frame["filename"].startswith((TORCH, "??")):
            return _source(frame["filename"], frame["line"])
    return frames[1]["name"].partition(": ")[2] if len(frames) > 1 and not frames[1]["line"] else ""


def _source(file: str, number: int) -> str:
    return linecache.getline(file, number).strip()


def _total(snapshot: dict) -> int:
    return sum(kinds["Total"] for kinds in snapshot.values())
