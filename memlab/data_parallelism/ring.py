"""All-reduce by hand: every rank has a tensor and wants the sum of all, and nobody may send more than the others.

The tensor is cut into as many pieces as there are ranks, and the ranks stand in a ring: each sends to its right and
receives from its left, at the same time. First the pieces go round to be added up. Piece p leaves rank p + 1, and each
rank on its way adds its own; so after N − 1 steps rank p holds the sum of piece p (reduce-scatter). Then the finished
pieces go round once more, to be copied (all-gather).

    4 ranks, reduce-scatter         step 0     step 1     step 2
    rank 0 sends piece              3          2          1          and ends with the sum of piece 0
    rank 1                          0          3          2                                   piece 1
    rank 2                          1          0          3                                   piece 2
    rank 3                          2          1          0                                   piece 3

Both halves together, of a tensor of n bytes: each rank sends 2 · n · (N − 1) / N, less than 2 · n for however many
ranks. That is the least there can be, and no rank is a bottleneck. The price is 2 · (N − 1) steps, each as long as one
message takes at least.   Source: Patarasuk and Yuan 2009, section 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from memlab.data_parallelism.flat import FlatLayout
from memlab.ranks import exchange, place_in


class Move(NamedTuple):
    """One step of one rank: the piece that it sends to its right, while it receives another from its left."""

    send: int
    receive: int


def reduce_scatter_moves(rank: int, ranks: int) -> list[Move]:
    """What a rank sends and receives in each of the N − 1 steps; it adds its own to each piece that it receives.

    >>> reduce_scatter_moves(0, ranks=4)
    [Move(send=3, receive=2), Move(send=2, receive=1), Move(send=1, receive=0)]
    """
    return [Move((rank - step - 1) % ranks, (rank - step - 2) % ranks) for step in range(ranks - 1)]


def all_gather_moves(rank: int, ranks: int) -> list[Move]:
    """What a rank sends and receives on the way back: first its own piece, and each piece that comes is finished.

    >>> all_gather_moves(0, ranks=4)
    [Move(send=0, receive=3), Move(send=3, receive=2), Move(send=2, receive=1)]
    """
    return [Move((rank - step) % ranks, (rank - step - 1) % ranks) for step in range(ranks - 1)]


@torch.no_grad()
def ring_reduce_scatter(flat: Tensor, group=None) -> Tensor:
    """Sum `flat` over ranks, piece by piece, and return this rank's piece of the sum, (n / ranks,), a view of `flat`.

    flat: (n,), contiguous, of one size and dtype on all ranks, which n divides by. Its other pieces are then parts of
      sums, of no use. Takes the memory of one piece.

    Each rank sends n · (ranks − 1) / ranks elements. A sum is rounded after each rank's part, in flat's dtype.
    Raises ValueError for another shape, and for a rank that is not of the group.
    """
    rank, pieces = _pieces(flat, group)
    if len(pieces) > 1 and flat.numel():
        arriving = torch.empty_like(pieces[0])
        left, right = (rank - 1) % len(pieces), (rank + 1) % len(pieces)
        for send, receive in reduce_scatter_moves(rank, len(pieces)):
            exchange(pieces[send], right, arriving, left, group)
            pieces[receive].add_(arriving)
    return pieces[rank]


@torch.no_grad()
def ring_all_gather(flat: Tensor, group=None) -> Tensor:
    """Fill `flat` with every rank's own piece of it, rank 0's first, and return it. Needs no memory.

    flat: (n,), contiguous, of one size and dtype on all ranks, which n divides by. Each rank sends
    n · (ranks − 1) / ranks elements. Raises as `ring_reduce_scatter` does.
    """
    rank, pieces = _pieces(flat, group)
    if flat.numel():
        left, right = (rank - 1) % len(pieces), (rank + 1) % len(pieces)
        for send, receive in all_gather_moves(rank, len(pieces)):
            exchange(pieces[send], right, pieces[receive], left, group)
    return flat


@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group=None) -> Tensor:
    """Replace `tensor` by its sum over the ranks of the group, bitwise the same on all of them, and return it.

    tensor: of one shape, any, and one dtype on all ranks. Where the ranks do not divide its size n, or it is not
      contiguous, the ring works on a padded copy.

    Each rank sends 2 · (ranks − 1) · ⌈n / ranks⌉ elements. Each piece is summed on one path, and the sum is copied: so
    ranks agree to the last bit. Between two ranks it is the library's own sum, bitwise; among more the order of adding
    differs, and with it the last bits. Integers are exact. Raises ValueError for a rank that is not of the group.
    """
    layout = FlatLayout([tensor.shape], place_in(group)[1])
    if tensor.is_contiguous() and not layout.padding:
        flat = tensor.view(-1)
        ring_reduce_scatter(flat, group)
        ring_all_gather(flat, group)
        return tensor
    padded = tensor.new_zeros(layout.padded)
    (copy,) = layout.views(padded)
    copy.copy_(tensor)
    ring_all_reduce(padded, group)
    return tensor.copy_(copy)


def _pieces(flat: Tensor, group) -> tuple[int, list[Tensor]]:
    """This rank's number, and the pieces of `flat`, views, one for each rank."""
    rank, ranks = place_in(group)
    if flat.dim() != 1 or not flat.is_contiguous() or flat.numel() % ranks:
        raise ValueError(
            f"expected a contiguous tensor of (n,) with n divisible by {ranks} ranks, found one of {tuple(flat.shape)}"
            f"{'' if flat.is_contiguous() else ', not contiguous'}; FlatLayout(...).padded is the next such n, and "
            "ring_all_reduce takes any tensor"
        )
    layout = FlatLayout([flat.shape], ranks)
    return rank, [layout.own(flat, number) for number in range(ranks)]
