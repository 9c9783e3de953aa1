"""What each op of a function costs: the bytes that backward keeps of its result, and the FLOPs to make it again.

A block's ops are not alike. What its result is worth is one number, the FLOPs that making it again takes per byte:

    product of matrices, inner dimension K:  2 · K / itemsize
    one op an element (GELU, an add):            1 / itemsize

Attention's scores q kᵀ have K = head_dim and T numbers a row, a linear layer has K = its input's width, and weights @ v
has K = T. So the scores, the mask and the softmax, most of a block's bytes by far when T is long, are also among the
cheapest to make again. In a list that is sorted by FLOPs a byte they stand at the top.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab.memory_hierarchy.counting import FLOPS, VECTORS, flops

aten = torch.ops.aten

MATMULS = frozenset(op for op in FLOPS if isinstance(op, torch._ops.OpOverloadPacket) and op not in VECTORS)
"""The ops whose FLOPs grow faster than their bytes: products of matrices, convolutions, fused attention. Not those that
`memlab.memory_hierarchy.counting` has no formula for, such as fused recurrent layers."""

BATCHED = {aten.bmm, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_}
LINEARS = MATMULS - {op for op in MATMULS if "attention" in str(op)} - BATCHED
"""Products with weights: linear layers and convolutions. Batched products, and so attention by hand, are not in it."""

VIEW = aten._unsafe_view.default  # one that does not say that it is


class OpCost(NamedTuple):
    """One call of an op. shape: of its (first) result; nbytes: of its results; saved: whether backward keeps any."""

    op: str
    shape: tuple[int, ...]
    nbytes: int
    flops: int
    saved: bool

    @property
    def flops_per_byte(self) -> float:
        """To make the result again: `selective_checkpoint(..., keep=f)` keeps it if this is at least f."""
        return self.flops / self.nbytes if self.nbytes else math.inf


def op_costs(function: Callable, /, *args, **kwargs) -> list[OpCost]:
    """Every op of function(*args, **kwargs) that makes a result of its own (no views), fewest FLOPs a byte first.

    FLOPs are counted as by `memlab.memory_hierarchy.OpCounter`. A result is saved if anything that autograd saves lies
    in its storage. Saved tensors that the function did not make (arguments, weights) are not in the list.

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

    with _Calls() as calls, saved_tensors_hooks(note, lambda tensor: tensor):
        function(*args, **kwargs)
    costs = [
        OpCost(
            op.overloadpacket.__name__,
            tuple(results[0].shape),
            element_bytes(results),
            count,
            any(tensor.untyped_storage()._cdata in saved for tensor in results),
        )
        for op, results, count in calls.found
    ]
    return sorted(costs, key=lambda cost: cost.flops_per_byte)


class _Calls(TorchDispatchMode):
    """Holds every result until its end, so that no address is used again."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares importing the compiler
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        if makes(op) and (results := [t for t in tensors_in(result) if t.layout == torch.strided]):
            self.found.append((op, results, flops(op, args, kwargs, result)))
        return result


@functools.cache
def makes(op) -> bool:
    """Whether an op's results are its own: neither views of its arguments nor these, written to."""
    return (
        isinstance(op, torch._ops.OpOverload)
        and op is not VIEW
        and not op._schema.is_mutable
        and all(result.alias_info is None for result in op._schema.returns)
    )


def tensors_in(value) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def element_bytes(result) -> int:
    """Of the elements of all tensors in it."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(result))
