"""Watch it live: a monitor for training loops, leaks told apart from noise, and the step at which memory is full.

    with Monitor(budget="16 GiB", log="run.jsonl") as monitor:
        for x, y in batches:
            train(x, y)
            monitor.step()

Read the pages in this order: `sources` (where figures come from) with `high_water`, `cuda`, and `driver` for the
driver's level; `steps` (what is kept of a run), `leaks` (does it grow?) and `forecasts` (when is it full?); `log`,
`alarms`, `readings`, `sampler`, and `monitor` (all of it around a loop). Then whose bytes grow: `lines` (tensors),
`python_lines` (all else), `holding` (who holds them), `naming` and `line_watch` (these together, for some steps of a
run). Then `polling` (what a loop around nvidia-smi sees), `viewer` (a Timeline for PyTorch's own viewer), and the
terminal's `terminal` and `__main__`.
"""

from memlab.memory_monitoring.alarms import Alarm, MemoryWarning
from memlab.memory_monitoring.cuda import CUDAMemory
from memlab.memory_monitoring.driver import GPUMemory, list_gpus
from memlab.memory_monitoring.forecasts import Forecast, Forecaster, forecast
from memlab.memory_monitoring.holding import holders
from memlab.memory_monitoring.leaks import Growth, growth
from memlab.memory_monitoring.line_watch import LineWatch
from memlab.memory_monitoring.lines import GrowingLine, growing_lines
from memlab.memory_monitoring.log import read_log
from memlab.memory_monitoring.monitor import Monitor
from memlab.memory_monitoring.polling import LeakSeen, Polled, leak_seen, polled
from memlab.memory_monitoring.sampler import Sample
from memlab.memory_monitoring.sources import Gone, MeteredMemory, ProcessMemory
from memlab.memory_monitoring.steps import StepHistory
from memlab.memory_monitoring.viewer import as_snapshot, save_snapshot

__all__ = [
    "Alarm",
    "CUDAMemory",
    "Forecast",
    "Forecaster",
    "GPUMemory",
    "Gone",
    "GrowingLine",
    "Growth",
    "LeakSeen",
    "LineWatch",
    "MemoryWarning",
    "MeteredMemory",
    "Monitor",
    "Polled",
    "ProcessMemory",
    "Sample",
    "StepHistory",
    "as_snapshot",
    "forecast",
    "growing_lines",
    "growth",
    "holders",
    "leak_seen",
    "list_gpus",
    "polled",
    "read_log",
    "save_snapshot",
]
