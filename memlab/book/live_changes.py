"""What of a monitored run is not yet in the browser: only that is sent, as a small document and columns of numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from memlab.book.monitor_pictures import called
from memlab.memory_monitoring import Forecast, Monitor, Sample


class Changes:
    """What of a monitor has not been sent yet, as a document of small things and three columns of numbers."""

    def __init__(self, monitor: Monitor):
        self._monitor = monitor
        self._levels: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Begin again: everything is to be sent."""
        self._blocks, self._steps_in_block, self._alarms, self._history = 0, 0, 0, None

    def since(self, samples: Sequence[Sample], first: int) -> tuple[dict, list[bytes]]:
        """What was added since the last call; `samples` are those from number `first` on.

        The columns are float64: a row of (seconds, step, each level) for each sample, NaN where a level was not seen;
        the steps' ends; their peaks. They replace what comes from block `from_block` on.
        """
        for sample in samples:
            self._levels += [level for level in sample.figures if level not in self._levels]
        rows = array("d")
        for sample in samples:
            rows.extend((sample.seconds, sample.step))
            rows.extend(sample.figures.get(level, math.nan) for level in self._levels)
        history, alarms = self._monitor.history, list(self._monitor.alarms)
        width, ends, peaks = history.steps_in_block, history.ends, history.peaks
        same = history is self._history and width == self._steps_in_block  # else all of it is another
        start = max(0, self._blocks - 1) if same else 0
        columns = array("d", ends[start:]), array("d", peaks[start:])
        document = {
            "first": first,
            "levels": list(self._levels),
            "watch": self._monitor.watch,
            "steps": history.steps,
            "steps_before": self._monitor.steps - history.steps,
            "steps_in_block": width,
            "from_block": start,
            "alarms": [[alarm.kind, alarm.step, alarm.message] for alarm in alarms[self._alarms :]],
            "from_alarm": self._alarms,
            "forecast": _fan(called(alarms)),
        }
        if (
            len(columns[0]) == len(columns[1]) and width == history.steps_in_block
        ):  # else the training was just writing to it
            self._blocks, self._steps_in_block, self._history = start + len(columns[0]), width, history
        else:
            columns, document["from_block"] = (array("d"), array("d")), None
        self._alarms = len(alarms)
        return document, [rows.tobytes(), columns[0].tobytes(), columns[1].tobytes()]


def _fan(forecast: Forecast | None) -> dict | None:
    """A forecast as the browser gets it; None for never."""
    if forecast is None:
        return None
    steps = {name: getattr(forecast, name) for name in ("steps_left", "earliest", "latest")}
    finite = {name: left if math.isfinite(left) else None for name, left in steps.items()}
    return {"step": forecast.step, "peak": forecast.peak_bytes, "budget": forecast.budget_bytes} | finite
