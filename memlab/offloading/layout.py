"""Tensors one after the other in one range of bytes, so that they travel and lie in one piece.

Each begins at a multiple of 64 bytes, as PyTorch's own tensors do, so that kernels work on them in the same steps.

Source: Zhao et al. 2023 (FSDP), section 3.2.1: a FlatParameter, here without sharding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.offloading.slab import rounded


class Shape(NamedTuple):
    """How to see a tensor in some bytes."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int

    def of(self, memory: Tensor) -> Tensor:
        """The view. memory: (bytes,) of uint8; as many bytes as a multiple of the dtype's itemsize."""
        elements = memory.view(self.dtype)
        start = elements.storage_offset() + self.offset_bytes // self.dtype.itemsize
        return elements.as_strided(self.size, self.stride, start)


def laid_out(tensors: Iterable[Tensor]) -> tuple[list[Shape], int]:
    """The shapes of tensors that lie one after the other, and the bytes they take together.

    Their strides are as they were, where those leave no holes, else those of a contiguous tensor.
    """
    shapes, end = [], 0
    for tensor in tensors:
        stride = tensor.stride()
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            stride = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim()))
        shapes.append(Shape(tensor.dtype, tuple(tensor.shape), stride, end))
        end += rounded(tensor.nbytes)
    return shapes, end


def flat_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes that tensors take one after the other.

    >>> flat_bytes([torch.zeros(16, 16), torch.zeros(3)])
    1088
    """
    return laid_out(tensors)[1]


def views_of(flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors like these in a range of bytes. flat: (flat_bytes(tensors),) of uint8."""
    return [shape.of(flat) for shape in laid_out(tensors)[0]]
