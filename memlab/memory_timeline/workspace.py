"""What kernels allocate for themselves, from the allocator's own log.

A kernel's scratch never becomes a tensor that an op returns, so watching tensors cannot show it. The allocator can. On
the CPU, torch's profiler writes down every allocation and free with its address; the meter puts a marker around each
op, and afterwards the two lists are laid over each other in order. What the meter saw placed at an address is that
storage; all else is the workspace of the op in which it was allocated. The log then *is* the timeline, to the byte.

On CUDA the caching allocator counts requested bytes and their peak; asked before and after each op, it tells how much
more than its results the op needed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from memlab.memory_timeline.events import LEVELS
from memlab.memory_timeline.history import Change, History, Rows

MARK = "memlab.memory_timeline op "
"""What the profiler calls an op's marker, before the op's number."""


Marker = tuple[str, int]
"""A place in the log: the "begin" or the "end" of an op."""
Unlogged = dict[Marker, list[Change]]
"""How storages turn out at a marker to have changed by what is not in the log."""


@dataclass(slots=True)
class Block:
    """One allocation. `op`: -1 before the first. `storage` stays -1 for scratch, `freed` false for what lives on."""

    nbytes: int
    op: int
    storage: int = -1
    logged: bool = True  # not so for what the allocator never had (NumPy's, another process's), or had before the log
    freed: bool = False


class CPULog:
    """Runs ops between markers in torch's profiler, then rewrites the history's changes from the allocator's log.

    Raises RuntimeError where it is entered within another profiler.
    """

    def __init__(self, history: History):
        self._history = history
        self._placed: dict[Marker, list[tuple[int, int, int]]] = {}  # → (storage, address, bytes), as they were there
        self._last = -1  # the last op that was run
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> CPULog:
        if torch.autograd._profiler_enabled():
            raise RuntimeError(
                "expected no profiler around Meter(workspace=True), which runs the profiler itself; "
                "leave the other one's block first, or meter without workspace"
            )
        self._history.workspace = True
        self._profile.__enter__()
        return self

    def run(self, op: int, func, args, kwargs):
        """Call `func` with a marker around it that carries the op's number."""
        self._last = max(self._last, op)
        with torch._C._profiler._RecordFunctionFast(f"{MARK}{op}"):
            return func(*args, **kwargs)

    def placed(self, storage: int, address: int, op: int) -> None:
        """Op number `op` (-1: before the first) left this storage at this address, or is to find it there."""
        marker = ("begin" if op > self._last else "end", op)
        self._placed.setdefault(marker, []).append((storage, address, self._history.sizes[storage]))

    def __exit__(self, *error) -> None:
        self._profile.__exit__(None, None, None)
        log = _flatten(self._profile.profiler.kineto_results.experimental_event_tree())
        self._rewrite(log, *self._attribute(log))

    def _attribute(self, log: list[tuple[str, int, int]]) -> tuple[list[Block | None], dict[int, Block], Unlogged]:
        """Lay the ops over the log.

        Returns for each of its rows the block that it allocates or frees (None: a marker, or a block nobody knew), for
        each storage its last block, and what storages gained and lost without a row of the log.
        """
        standing: dict[int, Block] = {}
        last: dict[int, Block] = {}
        unlogged: Unlogged = {}

        def note(marker: Marker, storage: int, delta: int) -> None:
            if delta:
                unlogged.setdefault(marker, []).append(self._change(storage, delta, marker[1]))

        def place(marker: Marker) -> None:
            for storage, address, nbytes in self._placed.pop(marker, ()):
                before, now = last.get(storage), standing.get(address)
                if now is None or now.storage not in (-1, storage):
                    now = Block(nbytes, marker[1], logged=False)
                    note(marker, storage, nbytes)
                if before is not None and before is not now and not before.logged and not before.freed:
                    note(marker, storage, -before.nbytes)
                now.storage, last[storage] = storage, now

        for storage, address, nbytes in self._placed.pop(("end", -1), ()):
            standing[address] = last[storage] = Block(nbytes, -1, storage, logged=False)
        rows: list[Block | None] = []
        on_the_way: list[Block] = []  # allocated just before an op begins: the tensor that a Python number becomes
        op, inside = -1, False
        for kind, key, nbytes in log:
            block = None
            if kind == "begin":
                op, inside = key, True
                for early in on_the_way:
                    early.op = op
                on_the_way = []
                place((kind, key))
            elif kind == "end":
                inside = False
                place((kind, key))
            elif nbytes > 0:
                standing[key] = block = Block(nbytes, op)
                if not inside:
                    on_the_way.append(block)
            elif key in standing:
                block = standing.pop(key)
                block.freed = True
            rows.append(block)
        for unmarked in list(self._placed):  # run by another thread, whose allocations are not logged
            place(unmarked)
        return rows, last, unlogged

    def _rewrite(self, log: list, rows: list[Block | None], last: dict[int, Block], unlogged: Unlogged) -> None:
        history, changes = self._history, Rows(Change)
        deaths = {change.storage: change for change in history.changes if not history.sizes[change.storage]}
        for storage, death in deaths.items():
            if storage in last and last[storage].nbytes and not last[storage].freed:
                unlogged.setdefault(("end", death.op), []).append(death._replace(delta=-last[storage].nbytes))
        for change in (*(c for c in history.changes if c.op < 0 < c.delta), *unlogged.pop(("end", -1), ())):
            changes.flat += change
        op = -1
        for (kind, key, nbytes), block in zip(log, rows, strict=True):
            if kind != "bytes":
                op = key
                for change in unlogged.pop((kind, key), ()):
                    changes.flat += change
            elif block is None or (block.op < 0 and block.storage < 0):
                continue  # a block nobody knew, or one taken where no op ever ran
            elif nbytes > 0:
                if block.storage < 0:
                    block.storage = history.scratch(block.nbytes, torch.device("cpu"), block.op)
                changes.flat += self._change(block.storage, nbytes, block.op)
            elif block is last.get(block.storage) and block.storage in deaths:
                changes.flat += deaths[block.storage]._replace(delta=-block.nbytes)
            else:
                changes.flat += self._change(block.storage, -block.nbytes, op)
        for change in itertools.chain(*unlogged.values()):
            changes.flat += change
        history.changes = changes

    def _change(self, storage: int, delta: int, op: int) -> Change:
        by = self._history.ops[op] if op >= 0 else None
        return Change(storage, delta, op, by.phase if by else "forward", by.line if by else -1)


class CUDALevels:
    """The caching allocator's own counts during the block, for the device the model is on.

    *requested* is what tensors and kernels asked for, *allocated* the blocks they got, *reserved* the segments behind
    them. Resets CUDA's peak counters, which is the only way to have a peak of one's own; blocks may stand in one
    another, and each keeps its peak.
    """

    NAMES = LEVELS

    def __init__(self, history: History, device: torch.device, statistics=None, reset_peak=None):
        self._history = history
        self._statistics = statistics or (lambda: torch.cuda.memory_stats_as_nested_dict(device))
        self._reset_peak = reset_peak or (lambda: torch.cuda.reset_peak_memory_stats(device))
        self._peaks = dict.fromkeys(self.NAMES, 0)

    def read(self, figure: str) -> dict[str, int]:
        """Each level's "current" or "peak" figure; peaks are remembered, since others may reset them."""
        statistics = self._statistics()
        for name in self.NAMES:
            self._peaks[name] = max(self._peaks[name], statistics[f"{name}_bytes"]["all"]["peak"])
        return {name: statistics[f"{name}_bytes"]["all"][figure] for name in self.NAMES}

    def reset_peak(self) -> None:
        """Let the card's peaks begin again at what is held now, once all levels that are on have read theirs."""
        for levels in list(_LEVELS_ON):
            levels.read("peak")
        self._reset_peak()

    def __enter__(self) -> CUDALevels:
        self.reset_peak()
        self._before = self.read("current")
        _LEVELS_ON.append(self)
        return self

    def __exit__(self, *error) -> None:
        _LEVELS_ON.remove(self)
        after = self.read("current")
        self._history.levels = {
            name: {"before": self._before[name], "peak": self._peaks[name], "after": after[name]} for name in self.NAMES
        }


_LEVELS_ON: list[CUDALevels] = []


class CUDACounters:
    """Asks the caching allocator, around each op, for requested bytes and their peak; adds the ops' scratch."""

    def __init__(self, history: History, device: torch.device, levels: CUDALevels):
        self._history, self._device, self._levels = history, device, levels
        self._noted: list[tuple[int, int, int, int]] = []  # (op, changes noted before it, peak and rest beyond that)

    def __enter__(self) -> CUDACounters:
        self._history.workspace = True
        return self

    def run(self, op: int, func, args, kwargs):
        """Call `func` and note by how much requested bytes rose meanwhile, at most and in the end."""
        before = self._levels.read("current")["requested"]
        self._levels.reset_peak()
        result = func(*args, **kwargs)
        peak, after = self._levels.read("peak")["requested"], self._levels.read("current")["requested"]
        self._noted.append((op, len(self._history.changes), peak - before, after - before))
        return result

    def placed(self, storage: int, address: int, op: int) -> None:
        """Nothing to do: CUDA's counters need no addresses."""

    def __exit__(self, *error) -> None:
        history = self._history
        noted, changes = list(history.changes), Rows(Change)
        position = 0
        for op, at, peak, rest in self._noted:
            results = 0
            while at < len(noted) and noted[at].op == op and noted[at].delta > 0:
                if history.births[noted[at].storage].device == self._device:
                    results += noted[at].delta
                at += 1  # the op's results: its scratch and they were there together
            for change in noted[position:at]:
                changes.flat += change
            position = at
            by = history.ops[op]
            lasting = max(0, rest - results)  # a library's workspace, which stays for the next call
            passing = max(0, peak - max(0, rest))
            if lasting:
                changes.flat += (history.scratch(lasting, self._device, op), lasting, op, by.phase, by.line)
            if passing:
                number = history.scratch(passing, self._device, op)
                changes.flat += (number, passing, op, by.phase, by.line)
                changes.flat += (number, -passing, op, by.phase, by.line)
        for change in noted[position:]:
            changes.flat += change
        history.changes = changes


def _flatten(roots) -> list[tuple[str, int, int]]:
    """The profiler's tree as one list in time: ("begin" | "end", op, 0) and ("bytes", address, ±size) on the CPU."""
    found = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.tag == torch._C._profiler._EventType.Allocation:
            if node.extra_fields.device.type == "cpu":
                found.append((node.start_time_ns, 1, "bytes", node.extra_fields.ptr, node.extra_fields.alloc_size))
        elif node.name.startswith(MARK) and (digits := node.name.removeprefix(MARK)).isdecimal():
            number = int(digits)
            found.append((node.start_time_ns, 0, "begin", number, 0))
            found.append((node.end_time_ns, 2, "end", number, 0))
    found.sort(key=lambda row: row[:2])
    return [row[2:] for row in found]
