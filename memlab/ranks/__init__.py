"""Ranks: the same function in several processes that talk to each other, real or imagined.

Read the pages in this order: `collectives` (what ranks say to each other, under one name in every PyTorch) and
`launch` (`run_ranks`).
"""

from memlab.ranks.collectives import all_gather, reduce_scatter
from memlab.ranks.launch import run_ranks

__all__ = ["all_gather", "reduce_scatter", "run_ranks"]
