"""Checks of the exercises to chapter 06."""

from memlab.book.checks.mixed_precision.scaled_step import train_step
from memlab.book.checks.mixed_precision.sizes import held_bytes, smallest_update, unexplained
from memlab.book.checks.mixed_precision.split_join import split_and_join
from memlab.book.checks.mixed_precision.split_masters import split_masters

__all__ = ["smallest_update", "held_bytes", "train_step", "unexplained", "split_and_join", "split_masters"]
