"""What a view needs of its storage: the fewest bytes to send, so that it and its relatives can be made from them.

Autograd saves views: a tensor and its transpose, a third of a fused projection, one row expanded to a thousand. Four
rules say what is sent for one, and when two share a copy:

1. Dims of size 1 and of stride 0 say nothing about bytes: an expanded row is a row.
2. If what is left covers a stretch of the storage without holes, the stretch is sent. Every view that lies inside it
   can be made from the copy, whatever its shape, order of dims or dtype, with the strides that it had.
3. If there are holes, only the elements are sent, in the order of their strides. The same elements in another order of
   dims, such as a transpose, share the copy; they come back without the holes, their strides in the same order.
4. A stretch begins at a multiple of 64 bytes, as tensors do, so kernels find the copy aligned as the original was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from memlab.offloading.layout import Shape
from memlab.offloading.slab import ALIGNMENT


class Footprint(NamedTuple):
    """A view's bytes: those from `start` to `end` of its storage, or with `holes` only some of them.

    size, stride: of the elements, in descending order of strides; without holes the one stretch. nbytes: to be sent.
    """

    start: int
    end: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    holes: bool
    nbytes: int

    def covers(self, other: Footprint) -> bool:
        """Whether a view with the other footprint can be made from this one's bytes."""
        if self.holes:
            return self == other
        return self.start <= other.start and other.end <= self.end


def footprint(tensor: Tensor) -> Footprint:
    """The bytes that a strided tensor of at least one element needs."""
    item, offset = tensor.element_size(), tensor.storage_offset()
    dims = sorted(((st, n) for n, st in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and st), reverse=True)
    covered, holes = 1, False  # elements from the first on, as the dims with the least strides cover them
    for st, n in reversed(dims):
        holes |= st > covered
        covered += (n - 1) * st
    end = (offset + covered) * item
    start = offset * item // ALIGNMENT * ALIGNMENT
    nbytes = item * math.prod(n for _, n in dims)
    if holes and nbytes < end - start:  # elements that lie in several places of the view would be sent as often
        return Footprint(offset * item, end, tuple(n for _, n in dims), tuple(st for st, _ in dims), item, True, nbytes)
    return Footprint(start, end, ((end - start) // item,), (1,), item, False, end - start)


def needed(tensor: Tensor, found: Footprint) -> Tensor:
    """A view of just these elements, in the tensor's dtype."""
    return tensor.as_strided(found.size, found.stride, found.start // found.itemsize)


def shape_in(tensor: Tensor, sent: Footprint) -> Shape:
    """How to make the tensor from the bytes of a footprint that covers its own."""
    size, stride = tuple(tensor.shape), tensor.stride()
    offset_bytes = tensor.storage_offset() * tensor.element_size() - sent.start
    if sent.holes:  # strides of the same order, without the holes
        compact, step = {}, 1
        for i in sorted((i for i, n in enumerate(size) if n > 1 and stride[i]), key=lambda i: (stride[i], size[i])):
            compact[i], step = step, step * size[i]
        stride, offset_bytes = tuple(compact.get(i, 0) for i in range(len(size))), 0
    return Shape(tensor.dtype, size, stride, offset_bytes)
