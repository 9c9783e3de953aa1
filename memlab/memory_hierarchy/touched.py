"""Which bytes of its storage a tensor touches: those of its elements, each once, however often it shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor that lie apart in memory: an expanded dimension is one, windows share theirs.

    >>> touched_bytes(torch.zeros(3, 4)), touched_bytes(torch.zeros(3, 1).expand(3, 4))
    (48, 12)
    """
    dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size]
    extent = 1 + sum((size - 1) * stride for size, stride in dims)
    return max(0, min(math.prod(size for size, _ in dims), extent)) * tensor.element_size()


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each once: two that view the same elements, in whatever order, are the same bytes."""
    return list({(t.untyped_storage()._cdata, t.storage_offset(), _runs(t)): t for t in tensors}.values())


def _runs(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Strides and sizes, whatever the order of dimensions, and those that follow on each other as one."""
    runs: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if runs and stride == math.prod(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] * size
        elif stride and size != 1:
            runs.append((stride, size))
    return tuple(runs)
