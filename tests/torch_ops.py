"""PyTorch's own list of ops, with samples of what each takes: a test of all of them finds what no list of ours does."""

import pytest
import torch
from torch.utils._pytree import tree_leaves


def ops_of_torch() -> list:
    """All of them, as OpInfo. The test that asks for them is skipped where the package is missing that they need."""
    pytest.importorskip("expecttest", reason="torch's list of ops needs the package expecttest, which is not installed")
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def differentiable_ops_of_torch() -> list:
    """Those that have a gradient in FP64 on a CPU."""
    return [op for op in ops_of_torch() if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")]


def forward_and_backward(op, first, args, kwargs):
    """The op's result, after a backward from all of it that has a graph, with gradients of 1."""
    result = op(first, *args, **kwargs)
    outputs = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return result
