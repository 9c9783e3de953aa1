"""Checks of the exercises to chapter 08."""

from memlab.book.checks.gradient_checkpointing.as_function import checkpoint_function
from memlab.book.checks.gradient_checkpointing.equal_layers import best_segments, held_bytes
from memlab.book.checks.gradient_checkpointing.ops import compute_again
from memlab.book.checks.gradient_checkpointing.reader import mended, unexplained
from memlab.book.checks.gradient_checkpointing.through_hooks import checkpoint_hooks
from memlab.book.checks.gradient_checkpointing.unequal_layers import cuts

__all__ = [
    "held_bytes",
    "best_segments",
    "unexplained",
    "mended",
    "checkpoint_function",
    "checkpoint_hooks",
    "cuts",
    "compute_again",
]
