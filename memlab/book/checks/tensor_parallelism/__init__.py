"""Checks of the exercises to chapter 14."""

from memlab.book.checks.tensor_parallelism.by_hand import block
from memlab.book.checks.tensor_parallelism.conjugates import copy_to_ranks, reduce_from_ranks
from memlab.book.checks.tensor_parallelism.loss import vocabulary_loss
from memlab.book.checks.tensor_parallelism.rows import part_of, qkv_ranges
from memlab.book.checks.tensor_parallelism.saved import gathered_again, whole
from memlab.book.checks.tensor_parallelism.sums import row_parallel, row_parallel_rows

__all__ = [
    "block",
    "qkv_ranges",
    "part_of",
    "copy_to_ranks",
    "reduce_from_ranks",
    "row_parallel",
    "row_parallel_rows",
    "whole",
    "gathered_again",
    "vocabulary_loss",
]
