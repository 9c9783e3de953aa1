"""Checks of the exercises to chapter 03."""

from memlab.book.checks.memory_hierarchy.halves import merge
from memlab.book.checks.memory_hierarchy.pieces import loss_in_pieces
from memlab.book.checks.memory_hierarchy.tiles import best_tiles, moved_bytes
from memlab.book.checks.memory_hierarchy.waits import fewest_rows, intensity
from memlab.book.checks.memory_hierarchy.wide import unexplained
from memlab.book.checks.memory_hierarchy.window import window_attention

__all__ = [
    "intensity",
    "fewest_rows",
    "loss_in_pieces",
    "merge",
    "unexplained",
    "best_tiles",
    "moved_bytes",
    "window_attention",
]
