"""Gradient accumulation: big batches in small memory, and batches cut by tokens instead of by examples.

accumulate: the gradients of a large batch from micro-batches, exactly.
"""

from memlab.gradient_accumulation.accumulate import accumulate, examples, groups, labels

__all__ = ["accumulate", "examples", "groups", "labels"]
