"""Whose bytes grow that no tensor holds: NumPy's arrays, lists, strings, objects; from Python's own `tracemalloc`.

A Meter sees tensors. What else Python code allocates, `tracemalloc` sees (PEP 454): for each block the lines that led
to it; NumPy tells it of its arrays, PyTorch does not of its tensors. It slows every allocation of Python's down, so it
runs for some steps only, when the process's heap grows and tensors do not explain it.

A line is named when what it has allocated and not freed is more at each mark than at the one before, the collector of
cycles having run. The line is the innermost that is neither the standard library's nor an installed package's.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import linecache
import os
import sysconfig
import tracemalloc
import weakref
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from memlab.memory_monitoring.holding import holders
from memlab.memory_monitoring.lines import GrowingLine
from memlab.memory_timeline import Line

FRAMES, INTERVALS, NAMED = 6, 4, 8
LEAST = 128  # bytes a step: below, it is caches and counters of Python and of libraries, and takes years to matter
_OURS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), name) + os.sep
    for name in ("memory_monitoring", "memory_timeline")
)
_LIBRARIES = tuple(
    {path + os.sep for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))}
) + (
    "<frozen ",
    "<string>",  # what NamedTuple and dataclass write for themselves
    "<unknown>",
)


class Place(NamedTuple):
    """A line by its file and number."""

    filename: str
    lineno: int


def python_bytes(snapshot: tracemalloc.Snapshot) -> dict[Place, tuple[int, int]]:
    """Of each of the reader's lines, the bytes and the blocks that it has allocated and that are still there."""
    held: dict[Place, tuple[int, int]] = {}
    for statistic in snapshot.statistics("traceback"):
        if (place := _place(statistic.traceback)) is not None:
            nbytes, blocks = held.get(place, (0, 0))
            held[place] = nbytes + statistic.size, blocks + statistic.count
    return held


class PythonLineWatch:
    """Traces `steps` steps of a loop that runs, and names the lines whose Python allocations pile up.

    Works like `LineWatch`: `start()` and `step_done()` at a step's end, `close()` at any time. Where tracemalloc runs
    already, it is used as it is, and goes on. Raises ValueError for fewer than 8 steps.
    """

    def __init__(self, steps: int = 24):
        if steps < 8:
            raise ValueError(
                f"expected at least 8 steps, found {steps}: fewer cannot tell a leak from what is replaced"
            )
        self.steps, self.running = steps, False
        self._marks: list[dict[Place, tuple[int, int]]] = []

    def start(self) -> None:
        """Begin to trace."""
        close_in_forks(self)
        self._mine = not tracemalloc.is_tracing()
        if self._mine:
            tracemalloc.start(FRAMES)
        self.running, self._done, self._marks = True, -1, []

    def step_done(self) -> list[GrowingLine] | None:
        """Mark a step's end. The rows, most bytes first, when `steps` of them were traced; else None."""
        if not self.running:
            return None
        self._done += 1
        if self._done >= len(self._marks) * self.steps / INTERVALS:
            gc.collect()
            self._marks.append(python_bytes(tracemalloc.take_snapshot()))
        if self._done < self.steps:
            return None
        try:
            found = _rising(self._marks, self.steps)
            objects = _objects({place for place, *_ in found[:NAMED]})
            return [_row(*one, holders(objects.pop(one[0])) if one[0] in objects else "") for one in found]
        finally:
            self.close()

    def close(self) -> None:
        """Stop tracing."""
        if self.running:
            self.running, self._marks = False, []
            if self._mine:
                tracemalloc.stop()


_watches: weakref.WeakSet | None = None  # the system's hooks at a fork are one list a process, and stay in it


def close_in_forks(watch) -> None:
    """Close a watch in what this process forks: a DataLoader's worker would be metered and traced all its life."""
    global _watches
    if _watches is None:
        _watches = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_close_all)
    _watches.add(watch)


def _close_all() -> None:
    for watch in list(_watches or ()):
        watch.close()


def _rising(marks: Sequence[dict[Place, tuple[int, int]]], steps: int) -> list[tuple[Place, float, float]]:
    found = []
    for place, (nbytes, blocks) in marks[-1].items():
        curve = [mark.get(place, (0, 0))[0] for mark in marks]
        least = curve[0] + LEAST * steps
        if nbytes >= least and all(a < b for a, b in zip(curve, curve[1:], strict=False)):
            before = marks[0].get(place, (0, 0))
            found.append((place, (nbytes - before[0]) / steps, (blocks - before[1]) / steps))
    return sorted(found, key=lambda one: -one[1])


def _row(place: Place, nbytes: float, blocks: float, holder: str = "") -> GrowingLine:
    source = linecache.getline(place.filename, place.lineno).strip()
    line = Line(_function(place.filename, place.lineno), source)
    return GrowingLine(line, "python", nbytes, blocks, "allocated by Python or NumPy, and not freed", holder)


def _place(traceback: tracemalloc.Traceback) -> Place | None:
    """The innermost line of the reader's; of a library's where there is none; None for memlab's own allocations."""
    for frame in reversed(traceback):
        if frame.filename.startswith(_OURS) or frame.filename == tracemalloc.__file__:
            return None
        if not frame.filename.startswith(_LIBRARIES):
            return Place(frame.filename, frame.lineno)
    return Place(traceback[-1].filename, traceback[-1].lineno)


def _objects(places: set[Place]) -> dict[Place, object]:
    """For each line, where it can be found, one object that was allocated there: tracked, or in a list or a dict."""
    found: dict[Place, object] = {}
    for container in gc.get_objects() if places else ():
        candidates = [container]
        kind = type(container)
        if kind is list or kind is deque:
            candidates += container[-1:] if kind is list else [container[-1]] if container else []
        elif kind is dict and container:
            candidates.append(container[next(reversed(container))])
        for one in candidates:
            traceback = tracemalloc.get_object_traceback(one)
            if traceback is not None and (place := _place(traceback)) in places:
                found.setdefault(place, one)
    return found


@functools.lru_cache(maxsize=16)
def _functions(filename: str, _length: int) -> list[tuple[int, int, str]]:
    """(first line, last line, qualified name) of each function in a file, outer ones first."""
    found = []

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{name}.{child.name}" if name else child.name
                if not isinstance(child, ast.ClassDef):
                    found.append((child.lineno, child.end_lineno, inner))
                    inner += ".<locals>"
            visit(child, inner)

    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        visit(ast.parse("".join(linecache.getlines(filename))), "")
    return found


def _function(filename: str, lineno: int) -> str:
    names = [
        name for first, last, name in _functions(filename, len(linecache.getlines(filename))) if first <= lineno <= last
    ]
    return names[-1] if names else "<module>"
