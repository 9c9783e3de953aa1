"""Checks of the exercises to chapter 15."""

from memlab.book.checks.pipeline_parallelism.balanced import cuts
from memlab.book.checks.pipeline_parallelism.by_hand import bubble
from memlab.book.checks.pipeline_parallelism.deadlock import mended
from memlab.book.checks.pipeline_parallelism.kept import lean_stage, needed
from memlab.book.checks.pipeline_parallelism.orders import order, order_in_groups
from memlab.book.checks.pipeline_parallelism.turns import ahead, forwards

__all__ = [
    "bubble",
    "order",
    "order_in_groups",
    "mended",
    "forwards",
    "ahead",
    "needed",
    "lean_stage",
    "cuts",
]
