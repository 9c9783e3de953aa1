"""Which part of a tensor a rank holds: everything here that makes, loads, saves or counts a part asks for its `Cut`.

A linear layer's weight is (out, in). Cut along dimension 0 each rank computes some of the outputs, along dimension 1 it
reads some of the inputs. Some weights are several stacked on each other, as queries, keys and values are: then every
one of these sections is cut by itself, and a rank's part is a piece of each.

    8 ranks, sections (8, 8), (2, 2)       rank    0    1    2    3    4    5    6    7
                                           piece   0    1    2    3    4    5    6    7     of the first, one row each
                                           piece   0    0    0    0    1    1    1    1     of the second: 4 hold a copy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memlab.checking import divisors


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

    def pieces_in(self, part: Tensor) -> list[Tensor]:
        """This rank's pieces as views of its part."""
        return list(part.split([stop - start for start, stop in self.ranges()], self.dim))

    def firsts(self) -> list[bool]:
        """Of each piece, whether this is the first rank that has it: the one to write it, or to count it."""
        return [self.rank % (self.ranks // pieces) == 0 for _, pieces in self.sections]

    def write(self, part: Tensor, full: Tensor) -> None:
        """Copy those pieces of this rank's part into the full tensor that no rank before it has."""
        for piece, place, first in zip(self.pieces_in(part), self.pieces_of(full), self.firsts(), strict=True):
            if first:
                place.copy_(piece)

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor, as a tensor of its own."""
        return torch.cat(self.pieces_of(full), self.dim)

    def shared(self) -> list[tuple[int, int, int]]:
        """What of this rank's part others hold, too: (start, stop, copies), along `dim` of the part.

        Each such range lies on `copies` ranks, which stand beside each other, and on none besides.

        >>> cut_evenly((12, 5), 0, 1, 4, sections=(8, (2, 2), (2, 2))).shared()
        [(2, 4, 2)]
        """
        found: list[tuple[int, int, int]] = []
        start = 0
        for size, pieces in self.sections:
            stop, copies = start + size // pieces, self.ranks // pieces
            if copies > 1:
                joined = found and found[-1][1:] == (start, copies)
                found.append((found.pop()[0] if joined else start, stop, copies))
            start = stop
        return found


def cut_evenly(
    shape: Sequence[int],
    dim: int,
    rank: int,
    ranks: int,
    sections: Sequence[int | tuple[int, int]] | None = None,
    what: str = "size",
) -> Cut:
    """The cut into equal pieces, one of every section for each rank.

    dim: which one is cut; a negative one counts from the end.   sections: sizes along `dim`, None a single one. A pair
      (size, pieces) makes fewer pieces than there are ranks, which neighbours share.

    Raises ValueError for a dimension or a rank that is not there, sections that do not add up, and for one that cannot
    be cut so; `what` says there what it is.

    >>> cut_evenly((12, 5), 0, 1, 2, sections=(8, 4)).ranges()
    [(4, 8), (10, 12)]
    """
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"expected a dimension of {tuple(shape)}, from {-len(shape)} to {len(shape) - 1}, found {dim}")
    if not 0 <= rank < ranks:
        raise ValueError(f"expected a rank from 0 to {ranks - 1}, found {rank}; count ranks as their group does")
    dim %= len(shape)
    pairs = [(size, ranks) if isinstance(size, int) else tuple(size) for size in sections or (shape[dim],)]
    total = sum(size for size, _ in pairs)
    if total != shape[dim]:
        sizes = " + ".join(str(size) for size, _ in pairs)
        raise ValueError(f"expected sections that make {shape[dim]} together, found {sizes} = {total}")
    for size, pieces in pairs:
        if not 1 <= pieces <= ranks or ranks % pieces:
            raise ValueError(
                f"{pieces} pieces of a {what} of {size} cannot be shared evenly by {ranks} ranks; make as many pieces "
                f"as divide them ({divisors(ranks)})"
            )
        if size % pieces:
            near = [str(n) for n in (size // pieces * pieces, -(-size // pieces) * pieces) if n]
            over = f"over {ranks} ranks" if pieces == ranks else f"into {pieces} pieces"
            raise ValueError(
                f"a {what} of {size} cannot be split {over}; pick a number that divides it ({divisors(size)}), or a "
                f"{what} of {' or '.join(near)}"
            )
    return Cut(tuple(shape), dim, rank, ranks, tuple(pairs))


def share(number: int, what: str, ranks: int) -> int:
    """How many of so many each rank has. Raises ValueError where the ranks do not divide it, saying which would."""
    if number % ranks:
        raise ValueError(
            f"{number} {what} cannot be split over {ranks} ranks; pick a tensor-parallel size that divides {number} "
            f"({divisors(number)}), or for {ranks} ranks {-(-number // ranks) * ranks} {what}"
        )
    return number // ranks


def cut_of(parameter: Tensor) -> Cut | None:
    """The cut that a parameter is a part by; None for one that every rank holds whole."""
    return getattr(parameter, "_cut", None)


def refuse_other_group(parameter: Tensor, name: str, ranks: int) -> None:
    """Raise ValueError for a part that was cut for another number of ranks than a group has."""
    cut = cut_of(parameter)
    if cut is not None and cut.ranks != ranks:
        raise ValueError(
            f"expected the group that the model was made with, found {name} cut for {cut.ranks} ranks and a group of "
            f"{ranks}; give that group"
        )
