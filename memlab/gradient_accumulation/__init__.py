"""Gradient accumulation: big batches in small memory, and batches cut by tokens instead of by examples.

Read the pages in this order: `reductions` (is a loss a sum or a mean?) and `accumulate` (the gradients of a large batch
from micro-batches, exactly), `batch_norm` (running statistics that move once a step), `token_batches` (a budget of
tokens instead of a number of examples), `packing` (several documents in a row) and `batch_size` (the largest batch that
fits, predicted, then proved).
"""

from memlab.gradient_accumulation.accumulate import accumulate, examples, groups, labels
from memlab.gradient_accumulation.batch_norm import deferred_batch_norm
from memlab.gradient_accumulation.batch_size import BatchSize, find_batch_size
from memlab.gradient_accumulation.packing import Packed, document_mask, pack, pack_rows, pad_rows
from memlab.gradient_accumulation.token_batches import token_batches

__all__ = [
    "BatchSize",
    "Packed",
    "accumulate",
    "deferred_batch_norm",
    "document_mask",
    "examples",
    "find_batch_size",
    "groups",
    "labels",
    "pack",
    "pack_rows",
    "pad_rows",
    "token_batches",
]
