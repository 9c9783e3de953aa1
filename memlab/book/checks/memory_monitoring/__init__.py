"""Checks of the exercises to chapter 05."""

from memlab.book.checks.memory_monitoring.emergency import on_alarm, step
from memlab.book.checks.memory_monitoring.full import steps_left
from memlab.book.checks.memory_monitoring.saw import floor_growth
from memlab.book.checks.memory_monitoring.smi import silent_steps, unexplained
from memlab.book.checks.memory_monitoring.thread import sampler
from memlab.book.checks.memory_monitoring.trainer import mended

__all__ = [
    "steps_left",
    "unexplained",
    "silent_steps",
    "floor_growth",
    "mended",
    "on_alarm",
    "step",
    "sampler",
]
