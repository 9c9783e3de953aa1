"""Checks of the exercises to chapter 13."""

from memlab.book.checks.data_parallelism.averaging import averaged
from memlab.book.checks.data_parallelism.buckets import side_by_side, twice
from memlab.book.checks.data_parallelism.by_hand import held
from memlab.book.checks.data_parallelism.pieces import moves, owner
from memlab.book.checks.data_parallelism.ring import piece_sent, ring_all_reduce
from memlab.book.checks.data_parallelism.sharded import sharded_adam

__all__ = [
    "held",
    "owner",
    "moves",
    "piece_sent",
    "ring_all_reduce",
    "twice",
    "side_by_side",
    "averaged",
    "sharded_adam",
]
