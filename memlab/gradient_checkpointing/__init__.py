"""Gradient checkpointing: remember less, compute again.

Read the pages in this order: `hooks` (`checkpoint`, one function), `segments` (a chain of layers cut into equal parts,
√L), `selective` (which blocks, modules or ops), `attention` (tiles instead of T×T, backward included), and `optimal`
(the least recomputation under a budget of bytes).
"""

from memlab.gradient_checkpointing.hooks import checkpoint

__all__ = ["checkpoint"]
