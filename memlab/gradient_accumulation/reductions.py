"""Is a loss a sum or a mean? Autograd's graph often knows.

A mean where a sum was asked for is divided twice, and nothing crashes: the gradient is small, and Adam hides it. But a
loss remembers how it was made: its `grad_fn` is the node of its last op, and the nodes of PyTorch's losses note their
reduction. Only names and numbers are read, no saved tensor, which a checkpoint would have to compute again.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

MEAN, SUM = 1, 2  # as autograd's nodes note the reduction of a loss
# Nodes behind which a mean is still a mean. MulBackward1 and DivBackward1 are torch's own, within one loss function:
# label smoothing, and the mean over class probabilities. A `*` or `/` in Python is another node, and may undo a mean.
SAME = ("AddBackward0", "SubBackward0", "NegBackward0", "MulBackward1", "ToCopyBackward0", "CloneBackward0")
SAME += ("ViewBackward0", "SqueezeBackward0", "UnsqueezeBackward0", "_DDPSinkBackward")
MEANS, SUMS = ("MeanBackward0", "MeanBackward1", "DivBackward1"), ("SumBackward0", "SumBackward1")
PARTS = (*MEANS, "StackBackward0")  # a sum of these is a sum of means: nobody can tell what it was summed over


def reduction_of(loss: Tensor) -> str | None:
    """The reduction that a loss ends in, "mean" or "sum", as autograd's graph shows it; None if it does not show.

    It looks through sums of losses, changes of shape and dtype and the mean or sum of one element, and no further: a
    mean times a number may be a sum.
    """
    waiting, seen, found = [loss.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, noted = _name(node), getattr(node, "_saved_reduction", None)
        if name in SAME or (name in (*MEANS, *SUMS) and math.prod(getattr(node, "_saved_self_sym_sizes", (0,))) == 1):
            waiting += _behind(node)
        elif noted == MEAN or name in MEANS:
            found.add("mean")
        elif noted == SUM or (name in SUMS and not any(each and _name(each) in PARTS for each in _behind(node))):
            found.add("sum")
    return "mean" if "mean" in found else found.pop() if found else None


def _name(node) -> str:
    """A node's name, as its Python class has it: `node.name()` works it out anew each time, for some 50 µs."""
    return type(node).__name__


def _behind(node) -> list:
    return [following for following, _ in node.next_functions]


def refuse(loss: Any, part, reduction: str) -> None:
    """Raise TypeError for a loss that is no scalar with a gradient, ValueError for the other reduction than asked for.

    part: how many examples or labels the loss is of; a mean over none is refused, too.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        kind = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        without = ", without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise TypeError(f"expected loss to return a scalar tensor that has a gradient, found {kind}{without}")
    if not isinstance(part, Tensor) and part == 1:
        return  # a sum over one is a mean over one
    if not isinstance(part, Tensor) and part == 0 and reduction == "mean":
        raise ValueError("expected a micro-batch to average over, found one with 0 examples or labels; return sums")
    found = reduction_of(loss)
    if found == "mean" and reduction == "sum":
        raise ValueError(
            "expected a loss that is summed, found a mean: it would be divided twice; use reduction='sum' in the loss "
            "function, or accumulate(…, reduction='mean') if it is a mean over what `count` counts (and for a sum of "
            "means that you want as it is, torch.stack(means).sum())"
        )
    if found == "sum" and reduction == "mean":
        raise ValueError(
            "expected a mean loss, found a sum; leave out reduction='mean', or average in the loss (and a mean that is "
            "written as a sum of terms whose weights add up to 1, as (weights * terms).sum() / weights.sum())"
        )
