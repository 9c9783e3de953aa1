"""The monitor: a thread that looks every so often, and a mark at each step's end.

    with Monitor(budget="16 GiB", log="run.jsonl") as monitor:
        for x, y in batches:
            train(x, y)
            monitor.step()

The thread sees what happens inside a step, also one that hangs, and warns at once. Whatever is to change the training
(a callback) is called by `step()`, in the training's own thread, between two steps. Nothing that goes wrong here may
end the run that is watched: it becomes an alarm.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from memlab.memory_monitoring.forecasts import Forecast, forecast
from memlab.memory_monitoring.log import Log
from memlab.memory_monitoring.sources import CUDAMemory, Gone, ProcessMemory, Source
from memlab.memory_monitoring.steps import StepHistory
from memlab.units import format_bytes, parse_bytes

SAMPLES = 10_000


class Sample(NamedTuple):
    """One look: seconds since the start, steps done by then, and the bytes of each level that was seen."""

    seconds: float
    step: int
    figures: dict[str, int]


class Alarm(NamedTuple):
    """Something to be told: `kind` is "threshold", "growth", "gone", "log" or "callback"."""

    kind: str
    step: int
    message: str
    forecast: Forecast | None = None


class MemoryWarning(ResourceWarning):
    """What a Monitor warns with."""


class Monitor:
    """Watches the memory of the training loop in its `with` block.

    budget: bytes, or text such as "16 GiB", that the watched figure must not reach; None: no forecast, no threshold.
    every: seconds between two looks of the thread. log: a file to append JSON lines to.
    warn_at: the part of the budget from which to warn. sources: what to look at; by default this process, and PyTorch's
    allocator where a GPU is. watch: the level that is held against the budget; by default the first of *allocated*,
    *storages*, *heap*, *resident* that there is. on_alarm: called with each Alarm by `step()`.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        every: float = 0.1,
        log: str | Path | None = None,
        warn_at: float = 0.9,
        sources: Sequence[Source] | None = None,
        watch: str | None = None,
        on_alarm: Callable[[Alarm], object] | None = None,
    ):
        self.budget_bytes = None if budget is None else parse_bytes(budget)
        self.every, self.warn_at, self.on_alarm = every, warn_at, on_alarm
        self.sources = list(sources) if sources is not None else _found()
        self.watch = watch
        self.history = StepHistory()
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.alarms: list[Alarm] = []
        self.listeners: list[Callable[[Sample], object]] = []
        self._log_path, self._log = log, None
        self._pending: deque[Alarm] = deque()
        self._warned: set[str] = set()
        self._stop, self._thread = threading.Event(), None
        self._sampled_peak = 0

    def __enter__(self) -> Monitor:
        self._pid, self._start = os.getpid(), time.perf_counter()
        if self._log_path is not None:
            self._log = Log(self._log_path)
            self._log.write("start", pid=self._pid, time=time.time(), budget=self.budget_bytes)
        for source in self.sources:
            source.reset()
        self._look()
        self._thread = threading.Thread(target=self._run, name="memlab monitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join()
        if self._log is not None:
            self._log.write("end", steps=self.history.steps, error=repr(error[1]) if error[1] else None)
            self._log.close()

    def step(self) -> None:
        """Mark the end of a training step, and hear what there is to say."""
        if os.getpid() != self._pid:
            return
        figures = self._read("read")
        peaks = self._read("peaks")
        for source in self.sources:
            source.reset()
        level = self._watched(figures)
        peak = max(peaks.get(level, 0), figures[level], self._sampled_peak)
        self._sampled_peak = 0
        self.history.append(figures[level], peak)
        if self._log is not None:
            self._log.write("step", step=self.history.steps, end=figures[level], peak=peak)
        if self.budget_bytes is not None:
            said = self.forecast()
            if said.runs_out and "growth" not in self._warned:
                self._warned.add("growth")
                self._raise_alarm(Alarm("growth", self.history.steps, str(said), said))
        while self._pending:
            alarm = self._pending.popleft()
            if self.on_alarm is not None:
                try:
                    self.on_alarm(alarm)
                except Exception as error:
                    self._note(Alarm("callback", self.history.steps, f"on_alarm raised {error!r}; the run goes on"))

    def forecast(self) -> Forecast:
        """When the budget will be full, from the steps so far. Raises ValueError where there is no budget."""
        if self.budget_bytes is None:
            raise ValueError("expected a Monitor with a budget, found none: Monitor(budget='16 GiB')")
        return forecast(self.history, self.budget_bytes)

    # ---- the thread

    def _run(self) -> None:
        while not self._stop.wait(self.every):
            self._look()

    def _look(self) -> None:
        figures = self._read("read")
        sample = Sample(time.perf_counter() - self._start, self.history.steps, figures)
        self.samples.append(sample)
        now = figures[self._watched(figures)]
        self._sampled_peak = max(self._sampled_peak, now)
        if self.budget_bytes and now >= self.warn_at * self.budget_bytes and "threshold" not in self._warned:
            self._warned.add("threshold")
            text = f"{format_bytes(now)} of {format_bytes(self.budget_bytes)} are in use"
            self._raise_alarm(Alarm("threshold", self.history.steps, text))
        for listener in self.listeners:
            listener(sample)

    def _read(self, what: str) -> dict[str, int]:
        figures: dict[str, int] = {}
        for source in list(self.sources):
            try:
                figures |= getattr(source, what)()
            except Gone as gone:
                self.sources.remove(source)
                self._note(Alarm("gone", self.history.steps, f"{gone}; watching what is left"))
        return figures

    def _watched(self, figures: dict[str, int]) -> str:
        if self.watch is None:
            self.watch = next(name for name in ("allocated", "storages", "heap", "resident") if name in figures)
        return self.watch

    def _raise_alarm(self, alarm: Alarm) -> None:
        self._pending.append(alarm)
        self._note(alarm)

    def _note(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        warnings.warn(alarm.message, MemoryWarning, stacklevel=3)
        if self._log is not None:
            self._log.write("alarm", about=alarm.kind, step=alarm.step, message=alarm.message)


def _found() -> list[Source]:
    sources: list[Source] = [ProcessMemory()]
    if torch.cuda.is_available():
        sources.append(CUDAMemory())
    return sources
