"""max_split_size: blocks too large to be cut up, so that a large request finds a large block again.

A 200 MiB block that gives 2 MiB to a small tensor is no 200 MiB block until that tensor dies. With
`PYTORCH_ALLOC_CONF=max_split_size_mb:M` blocks of M and more are *oversize*, and two rules change:

    best fit    a request below M takes no oversize block; one of M or more takes none that is 20 MiB or more too large
    split       no block is split for a request of M or more: the rest stays unused in the request's block

The price: the rest that is not split off, and a segment of its own for each large size. Source: PyTorch's notes on CUDA
semantics, "Optimizing memory usage"; the functions get_free_block and should_split.

Not here: on a full GPU PyTorch gives back oversize blocks first, and the rest of the cache only if that is not enough;
the model gives back the whole cache at once.
"""

from __future__ import annotations

from bisect import bisect_left

from memlab.caching_allocator.allocator import LARGE_SEGMENT_BYTES, CachingAllocator
from memlab.caching_allocator.blocks import Block, Pool
from memlab.caching_allocator.device import Device
from memlab.units import format_bytes, parse_bytes

ROUNDING_BYTES = LARGE_SEGMENT_BYTES  # how much too large an oversize block must not be


class MaxSplitAllocator(CachingAllocator):
    """A CachingAllocator that cuts no free block of `max_split_bytes` and more.

    Of a new segment, which a request below that had rounded up past it, the rest is split off.

    Raises ValueError for less than 20 MiB, as PyTorch does: segments of 20 MiB are there to be cut.
    """

    def __init__(
        self, max_split_bytes: int | str, capacity_bytes: int | str | None = None, *, device: Device | None = None
    ):
        super().__init__(capacity_bytes, device=device)
        self.max_split_bytes = parse_bytes(max_split_bytes)
        if self.max_split_bytes < LARGE_SEGMENT_BYTES:
            raise ValueError(
                f"expected max_split_bytes of at least {format_bytes(LARGE_SEGMENT_BYTES)}, the segment that smaller "
                f"requests share; found {format_bytes(self.max_split_bytes)}"
            )

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        i = bisect_left(pool.free, (size,))
        if i == len(pool.free):
            return None
        found = pool.free[i][0]
        too_large = self.max_split_bytes if size < self.max_split_bytes else size + ROUNDING_BYTES
        return pool.free.pop(i)[2] if found < too_large else None

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        return size < self.max_split_bytes and super()._splits(pool, size, rest)
