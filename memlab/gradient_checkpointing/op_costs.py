"""What each op of a function costs twice: the bytes that backward keeps of its result, and the FLOPs to make it again.

Their quotient, FLOPs a byte, sorts the ops: at the top of the list stands what should be recomputed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.gradient_checkpointing.selective import makes, tensors_in
from memlab.memory_hierarchy.roofline import flops


class OpCost(NamedTuple):
    """One call of an op. shape: of its (first) result; nbytes: of its results; saved: whether backward keeps one."""

    op: str
    shape: tuple[int, ...]
    nbytes: int
    flops: int
    saved: bool

    @property
    def flops_per_byte(self) -> float:
        """To make the result again; `selective_checkpoint(..., keep=f)` keeps it if this is at least f."""
        return self.flops / self.nbytes if self.nbytes else math.inf


def op_costs(function: Callable, *args, **kwargs) -> list[OpCost]:
    """Every op in function(*args, **kwargs) that makes a result of its own (no views), fewest FLOPs a byte first.

    FLOPs are counted as by `memlab.memory_hierarchy.OpCounter`. A result counts as saved if anything that autograd
    saves lies in its storage; what it saves of the function's arguments is not in the list.

    >>> a = torch.ones(2, 3, requires_grad=True)
    >>> for cost in op_costs(lambda: (a @ a.T).exp()):
    ...     print(cost.op, cost.shape, cost.nbytes, cost.flops, cost.saved)
    exp (2, 2) 16 4 True
    mm (2, 2) 16 24 False
    """
    saved = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            saved.add(tensor.untyped_storage()._cdata)
        return tensor

    with _Watch() as watch, saved_tensors_hooks(note, lambda tensor: tensor):
        function(*args, **kwargs)
    costs = [
        OpCost(
            op.overloadpacket.__name__,
            tuple(results[0].shape),
            sum(tensor.numel() * tensor.element_size() for tensor in results),
            count,
            any(tensor.untyped_storage()._cdata in saved for tensor in results),
        )
        for op, results, count in watch.calls
    ]
    return sorted(costs, key=lambda cost: cost.flops_per_byte)


class _Watch(TorchDispatchMode):
    """Holds every result until its end, so that no address is used again."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares importing the compiler
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if makes(op) and (results := [t for t in tensors_in(result) if t.layout == torch.strided]):
            self.calls.append((op, results, flops(op, args, kwargs, result)))
        return result
