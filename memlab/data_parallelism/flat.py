"""Tensors laid side by side in one flat buffer that is cut into equal pieces, one for each rank.

A collective wants one tensor, and equal pieces of it. So the parameters of a bucket (or of a layer) lie one after
another, with as few elements of padding behind the last that the total divides by the number of ranks. A cut falls
where it falls: in the middle of a parameter, or past the end, where a rank's piece is padding only.

    elements of a piece = ⌈Σ numel / ranks⌉

Source: Rajbhandari et al. 2020 (ZeRO), section 5; Zhao et al. 2023 (FSDP), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor


class FlatLayout:
    """Where each tensor of a list lies in a flat buffer, and which part of it lies in which rank's piece.

    Raises ValueError for less than one rank.

    >>> layout = FlatLayout([torch.Size([2, 3]), torch.Size([4])], ranks=4)
    >>> layout.numel, layout.piece, layout.padding
    (10, 3, 2)
    >>> layout.parts(1), layout.parts(3)
    ([(3, 6), (0, 0)], [(6, 6), (3, 4)])
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int):
        if ranks < 1:
            raise ValueError(f"expected at least one rank, found {ranks}")
        self.shapes, self.ranks = [torch.Size(shape) for shape in shapes], ranks
        self.numels = [shape.numel() for shape in self.shapes]
        self.starts = [0, *accumulate(self.numels)][:-1]
        self.numel = sum(self.numels)
        self.piece = -(-self.numel // ranks)
        self.padded = self.piece * ranks
        self.padding = self.padded - self.numel

    def view(self, flat: Tensor, number: int) -> Tensor:
        """One of the tensors, as a view of a flat buffer. flat: (padded,) → the tensor's shape."""
        at = self.starts[number]
        return flat[at : at + self.numels[number]].view(self.shapes[number])

    def views(self, flat: Tensor) -> list[Tensor]:
        """All of the tensors, as views of a flat buffer. flat: (padded,) → one view of each shape."""
        return [self.view(flat, number) for number in range(len(self.shapes))]

    def own(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's piece of a flat buffer. flat: (padded,) → (piece,), a view."""
        return flat[rank * self.piece : (rank + 1) * self.piece]

    def parts(self, rank: int) -> list[tuple[int, int]]:
        """Which elements of each tensor, flattened, lie in a rank's piece: (begin, end), empty where none do."""
        low = rank * self.piece
        spans = ((low - at, low + self.piece - at, n) for at, n in zip(self.starts, self.numels, strict=True))
        return [(min(max(begin, 0), n), max(min(end, n), 0)) for begin, end, n in spans]

    def part_views(self, piece: Tensor, rank: int) -> list[Tensor]:
        """The same parts as views of the piece. piece: (piece,) → one 1-dimensional view a tensor, empty where none."""
        low = rank * self.piece
        at = [max(start - low, 0) for start in self.starts]
        sizes = [end - begin for begin, end in self.parts(rank)]
        return [piece[a : a + n] for a, n in zip(at, sizes, strict=True)]


def on_the_wire(flat: Tensor) -> Tensor:
    """The same memory in a dtype that gloo and NCCL know: as bytes, if it is not floating, or FP8. flat: (n,)."""
    known = flat.is_complex() or flat.is_floating_point() and flat.itemsize > 1
    return flat if known else flat.view(torch.uint8)


def sharing(params: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """The numbers of pairs of parameters whose memory overlaps, from the first element to the last, or that are one."""
    spans = []
    for number, p in enumerate(params):
        storage = p.untyped_storage()._cdata if p.numel() else id(p)
        reach = max(0, sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)))
        begin = p.storage_offset() * p.itemsize
        spans.append((storage, begin, begin + (reach + 1) * p.itemsize, number))
    spans.sort()
    for at, (storage, _, end, number) in enumerate(spans):
        for its, begin, _, other in spans[at + 1 :]:
            if its != storage or begin >= end:
                break
            yield min(number, other), max(number, other)
