"""Which part of a tensor a rank holds: everything here that makes, loads, saves or counts a part asks for its `Cut`.

A linear layer's weight is (out, in). Cut along dimension 0 each rank computes some of the outputs, along dimension 1 it
reads some of the inputs. Some weights are several stacked on each other, as queries, keys and values are: then every
one of these sections is cut by itself, and a rank's part is a piece of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """One rank's part of a tensor.

    shape: of the full tensor.   dim: the dimension that is cut.   rank, ranks: whose part it is, of how many.
    sections: ((size, pieces), ...): how long each section is along `dim`, and into how many equal pieces it is cut;
      with fewer pieces than ranks, ranks / pieces neighbours hold the same piece, and one piece is all of it. Together
      they are shape[dim].
    """

    shape: tuple[int, ...]
    dim: int
    rank: int
    ranks: int
    sections: tuple[tuple[int, int], ...]

    def ranges(self) -> list[tuple[int, int]]:
        """From where to where along `dim`, of the full tensor, this rank's pieces go: one of each section."""
        ranges, start = [], 0
        for size, pieces in self.sections:
            piece, number = size // pieces, self.rank * pieces // self.ranks
            ranges.append((start + number * piece, start + (number + 1) * piece))
            start += size
        return ranges

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        mine = sum(stop - start for start, stop in self.ranges())
        return (*self.shape[: self.dim], mine, *self.shape[self.dim + 1 :])

    def pieces_of(self, full: Tensor) -> list[Tensor]:
        """This rank's pieces as views of the full tensor."""
        return [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges()]

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor, as a tensor of its own."""
        return torch.cat(self.pieces_of(full), self.dim)


def cut_evenly(
    shape: Sequence[int], dim: int, rank: int, ranks: int, sections: Sequence[int] | None = None, what: str = "size"
) -> Cut:
    """The cut into one equal piece of every section for each rank. sections: sizes; None is a single one.

    Raises ValueError for a section that the ranks do not divide; `what` says there what it is.

    >>> cut_evenly((12, 5), 0, 1, 2, sections=(8, 4)).ranges()
    [(4, 8), (10, 12)]
    """
    sizes = (shape[dim],) if sections is None else tuple(sections)
    if sum(sizes) != shape[dim]:
        raise ValueError(f"expected sections that make {shape[dim]} together, found {sizes}, which make {sum(sizes)}")
    for size in sizes:
        if size % ranks:
            fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"a {what} of {size} cannot be split over {ranks} ranks; pick a number of ranks that divides it "
                f"({fits}), or a {what} such as {-(-size // ranks) * ranks}"
            )
    return Cut(tuple(shape), dim, rank, ranks, tuple((size, ranks) for size in sizes))


def cut_of(parameter: Tensor) -> Cut | None:
    """The cut that a parameter is a part by; None for one that every rank holds whole."""
    return getattr(parameter, "_cut", None)
