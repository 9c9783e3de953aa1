"""Name the lines of a leak while the loop runs: a meter for some steps, then the rows, then nothing.

A Meter costs microseconds an op, too much for every step of a long run. So a `Monitor` runs without, and when growth is
called it lets a `LineWatch` meter the steps that follow:

    watch = LineWatch()
    for x, y in batches:
        train(x, y)
        rows = watch.step_done()               # None, until enough steps were watched; then a list of GrowingLine
        if grows and not watch.started:
            watch.start()

When a process's own memory grows, and tensors do not explain it, as many steps follow under `tracemalloc`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _push_mode

from memlab.memory_monitoring.lines import GrowingLine
from memlab.memory_monitoring.naming import Unseen, live_tensors, named, unseen_by
from memlab.memory_monitoring.python_lines import PythonLineWatch, close_in_forks
from memlab.memory_timeline import Meter

STEPS, EXPLAINED = 24, 0.5  # rows that sum up to this part of the growth explain it


class _Watching(Meter):
    """A Meter that is entered in one call and left in another: modes that were entered in between stay on."""

    def __exit__(self, *error) -> None:
        stack = _get_current_dispatch_mode_stack()
        place = next((i for i, mode in enumerate(stack) if mode is self), None)
        if place is None:  # it stands in another thread, and there it does nothing any longer
            self.__torch_dispatch__ = MethodType(_pass_on, self)
            _push_mode(self)  # to be taken off here: PyTorch's note that modes are on is the whole process's
            super().__exit__(*error)
            return
        with _lifted(stack[place + 1 :]):
            super().__exit__(*error)


@contextlib.contextmanager
def _lifted(above: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Modes are off the stack for a moment; what their own entering and leaving does besides is not done."""
    for mode in reversed(above):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in above:
            TorchDispatchMode.__enter__(mode)


def _pass_on(_mode, func, types, args=(), kwargs=None):
    return func(*args, **(kwargs or {}))


class LineWatch:
    """Meters `steps` steps of a loop that runs, and names the lines whose storages pile up.

    Make it where the monitor begins: the dispatch modes that are on by then stay around it, and `start()` refuses to
    meter inside others, which would end before it does. `start()` and `step_done()` are called at a step's end, in the
    training's thread; `close()` may be called at any time, from any thread.
    The first step is a warm-up. A leak at every k-th step is found up to k = steps / 5.
    `failed` says why there is no answer, where there is none. Raises ValueError for fewer than 8 steps.
    """

    def __init__(self, steps: int = STEPS):
        self._python = PythonLineWatch(steps)
        self.steps, self.failed, self.started = steps, "", False
        self._around = _get_current_dispatch_mode_stack()
        self._meter: _Watching | None = None
        self._marks: list[int] = []
        self._unseen: Unseen = {}
        self._rows: list[GrowingLine] = []

    @property
    def running(self) -> bool:
        """Whether steps are being watched."""
        return self._meter is not None or self._python.running

    def start(self, unexplained_bytes: float = 0.0) -> None:
        """Begin to meter. Nothing that goes wrong is raised: see `failed`. It starts once; later calls do nothing.

        unexplained_bytes: a step's growth of the process's memory; where tensors explain less than half of it, what
        else Python allocates is traced afterwards. 0 where a GPU's memory grows: tensors only.
        """
        if self.started:
            return
        self.started, self._thread, self._wanted = True, threading.get_ident(), unexplained_bytes
        close_in_forks(self)
        try:
            modes = _get_current_dispatch_mode_stack()
            if [*map(id, modes)] != [*map(id, self._around)]:
                raise RuntimeError(
                    "expected the dispatch modes that were on when the monitor began, found others; enter a mode "
                    "around the monitor, or leave it before step()"
                )
            self._meter = _Watching(inputs=list(live_tensors())).__enter__()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def step_done(self) -> list[GrowingLine] | None:
        """Mark a step's end. The rows, most bytes first, once when all steps were watched; else None."""
        if not self.running or threading.get_ident() != self._thread:
            return None
        try:
            return self._done()
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
            self.close()
            return []

    def _done(self) -> list[GrowingLine] | None:
        if self._meter is None:
            found = self._python.step_done()
            return None if found is None else sorted(self._rows + found, key=lambda row: -row.bytes_per_step)
        self._marks.append(self._meter.event_count)
        if len(self._marks) == self.steps // 2 + 1:
            self._unseen = unseen_by(self._meter)
        if len(self._marks) <= self.steps:
            return None
        self._rows = named(self._meter, self._marks, self._unseen)
        self.close()
        if sum(row.bytes_per_step for row in self._rows) >= EXPLAINED * self._wanted:
            return self._rows
        self._python.start()
        return None

    def close(self) -> None:
        """Take the meter out, wherever it stands, and stop tracing."""
        meter, self._meter, self._marks, self._unseen = self._meter, None, [], {}
        try:
            if meter is not None:
                meter.__exit__(None, None, None)
        finally:
            self._python.close()


def told(rows: Iterable[GrowingLine], most: int = 8) -> str:
    """Rows as text, one a line, the first `most` of them."""
    rows = list(rows)
    if not rows:
        return "no line was found that grows"
    more = [f"  and {len(rows) - most} more"] if len(rows) > most else []
    return "\n".join(["lines that grow:", *(f"  {row}" for row in rows[:most]), *more])
