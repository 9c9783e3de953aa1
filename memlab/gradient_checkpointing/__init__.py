"""Gradient checkpointing: remember less, and compute it again when backward asks.

Read the pages in this order: `hooks` (one function: `checkpoint`), `state` and `batch_norm` (what must be as it was
when it runs again); `segments` (a chain of layers in equal parts, √L); `modules` (which blocks), `costs` (what each op
is worth) and `selective` (which ops); `attention` (tiles instead of T×T, backward included); and `chain`,
`instruments`, `bench`, `plan` and `optimal` (the least recomputation under a budget of bytes).
"""

from memlab.gradient_checkpointing.attention import checkpointed_attention
from memlab.gradient_checkpointing.bench import measure_chain
from memlab.gradient_checkpointing.chain import Chain, Stage
from memlab.gradient_checkpointing.costs import LINEARS, MATMULS, OpCost, op_costs
from memlab.gradient_checkpointing.hooks import checkpoint
from memlab.gradient_checkpointing.modules import checkpointed, every
from memlab.gradient_checkpointing.optimal import plan_segments, tradeoff
from memlab.gradient_checkpointing.plan import Plan
from memlab.gradient_checkpointing.segments import (
    best_segments,
    checkpoint_sequential,
    exponent,
    segment_bounds,
    segmented_bytes,
)
from memlab.gradient_checkpointing.selective import selective_checkpoint

__all__ = [
    "LINEARS",
    "MATMULS",
    "Chain",
    "OpCost",
    "Plan",
    "Stage",
    "best_segments",
    "checkpoint",
    "checkpoint_sequential",
    "checkpointed",
    "checkpointed_attention",
    "every",
    "exponent",
    "measure_chain",
    "op_costs",
    "plan_segments",
    "segment_bounds",
    "segmented_bytes",
    "selective_checkpoint",
    "tradeoff",
]
