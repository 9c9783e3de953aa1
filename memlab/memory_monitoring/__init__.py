"""Watch it live: a monitor for training loops, leaks told apart from noise, and the step at which memory is full.

    with Monitor(budget="16 GiB", log="run.jsonl") as monitor:
        for x, y in batches:
            train(x, y)
            monitor.step()

Read the pages in this order: `sources` (where figures come from), `steps` (what is kept of a run), `leaks` (does it
grow?), `forecasts` (when is it full?), `log`, `monitor` (all of it around a loop), and `lines` (whose bytes grow).
"""

from memlab.memory_monitoring.forecasts import Forecast, forecast
from memlab.memory_monitoring.leaks import Growth, growth
from memlab.memory_monitoring.lines import GrowingLine, growing_lines
from memlab.memory_monitoring.log import read_log
from memlab.memory_monitoring.monitor import Alarm, MemoryWarning, Monitor, Sample
from memlab.memory_monitoring.sources import CUDAMemory, Gone, MeteredMemory, ProcessMemory
from memlab.memory_monitoring.steps import StepHistory

__all__ = [
    "Alarm",
    "CUDAMemory",
    "Forecast",
    "Gone",
    "GrowingLine",
    "Growth",
    "MemoryWarning",
    "MeteredMemory",
    "Monitor",
    "ProcessMemory",
    "Sample",
    "StepHistory",
    "forecast",
    "growing_lines",
    "growth",
    "read_log",
]
