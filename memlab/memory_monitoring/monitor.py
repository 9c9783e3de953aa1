"""The monitor: a thread that looks every so often, and a mark at each step's end.

    with Monitor(budget="16 GiB", log="run.jsonl") as monitor:
        for x, y in batches:
            train(x, y)
            monitor.step()

The thread sees what happens inside a step, also one that hangs, and warns at once. Whatever is to change the training
(a callback) is called by `step()`, in the training's own thread. What goes wrong here becomes an alarm and never ends
the run; only a monitor that cannot begin says so, before the training. A fork's copy of it does nothing.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from memlab.memory_monitoring.alarms import Alarm, Alarms, Threshold
from memlab.memory_monitoring.forecasts import Forecast, Outlook
from memlab.memory_monitoring.line_watch import LineWatch, told
from memlab.memory_monitoring.log import Log, described
from memlab.memory_monitoring.readings import Readings, found_sources
from memlab.memory_monitoring.sampler import Sample, Sampler
from memlab.memory_monitoring.sources import Source
from memlab.memory_monitoring.steps import StepHistory
from memlab.units import format_bytes, parse_bytes

SAMPLES = 10_000
IN_MAIN_MEMORY = ("heap", "resident")
WATCHED = ("allocated", "storages", "heap", "resident")
LOG_SECONDS, JOIN_SECONDS = 1.0, 5.0


class Monitor:
    """Watches the memory of the training loop in its `with` block.

    budget: bytes, or text such as "16 GiB", that the watched figure must not reach; None: no forecast, no threshold.
    every: seconds between two looks of the thread; it looks less often where looking is slow. log: a file to append
    JSON lines to. warn_at: the part of the budget from which to warn. sources: what to look at; by default
    this process, PyTorch's allocator where a GPU is, and the driver where it tells. watch: the level that is held
    against the budget; by default the first of *allocated*, *storages*, *heap*, *resident* that there is. The heap has
    neither shared memory nor Python's small objects (see `ProcessMemory`): where those may grow, watch "resident".
    on_alarm: called with each Alarm about memory ("threshold", "growth") by `step()`; it returns True if it changed
    the run, so that what was before no longer counts. An Exception that it raises is an alarm, too, and ends nothing:
    to end the training, let it set a flag that the loop looks at.
    name_lines: when growth is called, meter the steps that follow and name the lines whose bytes grow, once: an Alarm
    "lines", and `lines`. Those steps are slower, and where main memory is watched, not measured: in the history they
    lie on a line between their neighbours.

    exact_peaks: whether the history's peaks are a high-water mark's, which misses nothing, or the highest sample's. A
    mark is set back at each step, so what the program itself or `time` says of *resident*'s highest is the last step's.
    peaks: the last step's high-water marks, of the watched level's source. samples: the last Samples. listeners: called
    with each Sample in the thread; one that raises is called no more.

    Raises ValueError and TypeError for arguments without sense. Entering it raises OSError for a log that cannot be
    written, ValueError for a level to watch that no source has, RuntimeError the second time.
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
        name_lines: bool = False,
    ):
        self.budget_bytes = None if budget is None else parse_bytes(budget)
        if self.budget_bytes == 0:
            raise ValueError("expected a budget above 0 bytes, found 0; None watches without one")
        if not isinstance(every, (int, float)) or not 0 < every <= threading.TIMEOUT_MAX:
            raise ValueError(f"expected seconds between two looks, a number above 0, found every={every!r}")
        if on_alarm is not None and not callable(on_alarm):
            raise TypeError(f"expected on_alarm to be a function of an Alarm, found {on_alarm!r}")
        self.every, self.watch, self.on_alarm = every, watch, on_alarm
        self.steps, self.peaks, self.exact_peaks = 0, {}, False
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.listeners: list[Callable[[Sample], object]] = []
        self._alarms = Alarms()
        self.warn_at, self._threshold = warn_at, Threshold(self.budget_bytes or math.inf, warn_at)
        self._outlook = Outlook(self.budget_bytes)
        self._readings = Readings(found_sources() if sources is None else sources, self._trouble)
        self._log_path, self._log, self._logged = log, None, -math.inf
        self._sampled = (0, 0)  # a step's number, and the most that the thread saw in it
        self._pid, self._entered, self._sampler = None, False, None
        self.name_lines, self.lines, self._line_watch = name_lines, [], None

    @property
    def alarms(self) -> list[Alarm]:
        """All that was told, in order."""
        return self._alarms.told

    @property
    def history(self) -> StepHistory:
        """Ends and peaks of the watched level, step by step, since the run began or was `changed`."""
        return self._outlook.history

    @property
    def running(self) -> bool:
        """Whether its block is being run, by this process."""
        return os.getpid() == self._pid

    def __enter__(self) -> Monitor:
        if self._entered:
            raise RuntimeError("expected a Monitor that was not used before, found one that was; make another one")
        self._entered, self._pid, self._start = True, os.getpid(), time.perf_counter()
        try:
            if self._log_path is not None:
                self._alarms.log = self._log = Log(self._log_path)
            self._begin()
            self._sampler = Sampler(self, Monitor._look, self.every)
            self._sampler.start()
            return self
        except BaseException as error:
            self._finish(error)
            raise

    def __exit__(self, kind, error, trace) -> None:
        try:
            if self.running:
                self._finish(error)
        except KeyboardInterrupt:  # end tidily, then let it through
            self.__exit__(kind, error, trace)
            raise

    def step(self) -> None:
        """Mark the end of a training step, and hear what there is to say: in one thread, that of the training.

        Raises RuntimeError outside the block.
        """
        if os.getpid() != self._pid:
            if self._pid is None:
                raise RuntimeError("expected step() inside the monitor's with block, found it outside; move it inside")
            return
        try:
            self._step()
            if self._alarms.call(self.on_alarm):
                self.changed()
        except Exception as error:
            self._trouble("monitor", f"the monitor failed: {error!r}; the run goes on")

    def changed(self) -> None:
        """The run is another one from here on (a smaller batch, say): forget its history, and tell what comes."""
        self._outlook = Outlook(self.budget_bytes, self.steps)
        self._threshold.arm()
        if self._log is not None and self.running:
            self._log.write("changed", step=self.steps)

    def forecast(self) -> Forecast:
        """When the budget will be full, from the steps so far. Raises ValueError where there is no budget."""
        return self._outlook.forecast()

    def __repr__(self) -> str:
        ends = self.history.recent_ends
        now = ends[-1] if ends else self.samples[-1].figures.get(self.watch, 0) if self.samples else 0
        budget = "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)}"
        peak = f", peak {format_bytes(max(self.history.peaks))}" if self.history.peaks else ""
        return (
            f"<Monitor: step {self.steps}, {self.watch} {format_bytes(now)}{budget}{peak}, {len(self.alarms)} alarms>"
        )

    # ---- in the training's thread

    def _begin(self) -> None:
        figures = self._readings.read()
        if self.watch is None:
            self.watch = next((level for level in (*WATCHED, *figures) if level in figures), None)
        if self.watch not in figures:
            wanted = "a source with figures" if self.watch is None else f"a source with the level {self.watch!r}"
            raise ValueError(f"expected {wanted}, found {', '.join(figures) or 'none'}; choose other sources or watch")
        if self.watch != "heap":  # of which nobody keeps a mark: leave that of the resident pages to the program
            self.exact_peaks = self.watch in self._readings.peaks(self.watch)
        if self._log is not None:
            about = {"watch": self.watch, "exact_peaks": self.exact_peaks, "budget": self.budget_bytes}
            self._log.write("start", pid=self._pid, time=time.time(), **about)
        self._line_watch = LineWatch() if self.name_lines else None
        self._look()

    def _step(self) -> None:
        end, peak = self._readings.end(self.watch), None
        lines = self._line_watch
        try:
            self.peaks = self._readings.peaks(self.watch) if self.exact_peaks else {}
            if end is None or (lines is not None and lines.running and self.watch in IN_MAIN_MEMORY):
                self._outlook.skip()
            else:
                of_step, sampled = self._sampled
                peak = max(end, self.peaks.get(self.watch, sampled if of_step == self.steps else 0))
                self._outlook.history.append(end, peak)
                if self._threshold.step(peak):
                    self._tell_threshold(peak)
        finally:
            self.steps += 1
        if self._log is not None:
            seconds = round(time.perf_counter() - self._start, 4)
            self._log.write("step", step=self.steps, seconds=seconds, end=end, peak=peak)
        said = self._outlook.call()
        if said is not None:
            self._alarms.tell(Alarm("growth", self.steps, str(said), said))
        if lines is not None:
            self._name_lines(lines, said)

    def _name_lines(self, watch: LineWatch, said: Forecast | None) -> None:
        found = watch.step_done()
        if watch.failed:
            self._trouble("lines", f"the lines that grow cannot be named: {watch.failed}")
        elif found is not None:
            self.lines = found
            self._alarms.tell(Alarm("lines", self.steps, told(found)))
        elif said is not None:
            watch.start(said.growth.bytes_per_step if self.watch in IN_MAIN_MEMORY else 0.0)

    def _finish(self, error: BaseException | None) -> None:
        if self._line_watch is not None:
            self._line_watch.close()
        if self._sampler is not None and not self._sampler.stop(JOIN_SECONDS):
            self._trouble("monitor", "a source or a listener hangs, and its thread with it; it was left there")
        elif error is None:
            self._look()  # what is held at the end, however long ago the thread looked
        if self._log is not None:
            self._check_log()
            self._log.write("end", steps=self.steps, lost=self._log.lost, error=described(error))
            self._log.close()
        self._readings.close()
        self._pid = None

    # ---- in the monitor's thread

    def _look(self) -> float:
        """Take a sample. Returns the seconds of processor time that it took."""
        began, took = time.thread_time(), 0.0
        try:
            step = self.steps
            sample = Sample(time.perf_counter() - self._start, step, self._readings.read())
            took = time.thread_time() - began
            if sample.figures:
                self._seen(sample)
        except Exception as error:
            self._trouble("monitor", f"the monitor failed: {error!r}; the run goes on")
        return took

    def _seen(self, sample: Sample) -> None:
        self.samples.append(sample)
        now = sample.figures.get(self.watch)
        if now is not None:
            of_step, highest = self._sampled
            self._sampled = (sample.step, max(now, highest) if of_step == sample.step else now)
            if self._threshold.see(now):
                self._tell_threshold(now)
        if self._log is not None and sample.seconds >= self._logged + LOG_SECONDS:
            self._logged = sample.seconds
            self._log.write("sample", step=sample.step, seconds=round(sample.seconds, 3), figures=sample.figures)
            self._check_log()
        for listener in tuple(self.listeners):
            try:
                listener(sample)
            except Exception as error:
                self.listeners[:] = [one for one in self.listeners if one is not listener]
                self._trouble("listener", f"a listener raised {error!r}; it is called no more")

    # ---- in both

    def _tell_threshold(self, nbytes: int) -> None:
        used = f"{format_bytes(nbytes)} of {format_bytes(self.budget_bytes)} are in use"
        self._alarms.tell(Alarm("threshold", self.steps, f"{used} ({self.watch}): {self.warn_at:.0%} or more"))

    def _check_log(self) -> None:
        if self._log.lost:
            self._trouble("log", f"lines of the log {self._log.path} are lost: {self._log.error}; the run goes on")

    def _trouble(self, kind: str, message: str) -> None:
        """What is wrong with the watching itself is told once, not with every step."""
        once = kind if kind in ("log", "monitor") else message
        self._alarms.tell(Alarm(kind, self.steps, message), once=once)
