"""Checks of the exercises to chapter 07."""

from memlab.book.checks.gradient_accumulation.group_shares import groups, share
from memlab.book.checks.gradient_accumulation.lets_go import accumulated_gradients
from memlab.book.checks.gradient_accumulation.merging import merge
from memlab.book.checks.gradient_accumulation.one_step import step
from memlab.book.checks.gradient_accumulation.sizes import fewest_micro_batches, unexplained, weights
from memlab.book.checks.gradient_accumulation.token_rows import token_batches

__all__ = [
    "weights",
    "unexplained",
    "fewest_micro_batches",
    "accumulated_gradients",
    "groups",
    "share",
    "step",
    "token_batches",
    "merge",
]
