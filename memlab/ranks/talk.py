"""Talking: who is in a group, the two halves of an all-reduce, and messages from one rank to another.

    all_gather        everyone brings one piece and leaves with the whole
    reduce_scatter    everyone brings the whole and leaves with the sum of one piece
    exchange          everyone sends one tensor while it receives another

A ring needs both at once. If every rank first sent to the right and only then listened to the left, each would wait for
a neighbour that is itself still sending. `exchange` begins both, and returns when both are done.

Two backends, one call: NCCL moves a GPU's bytes directly. gloo's sends know main memory only, so a GPU's tensor is
staged: copied to the host, sent, received there, copied up. That is what happens where several ranks share one GPU,
which NCCL refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed.nn.functional
from torch import Tensor, distributed

# PyTorch 2.13 renamed both, and warns of the older names, the only ones that 2.11 has.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class _Alone:
    """The type of ALONE. Copied and pickled, it is still the same object."""

    def __repr__(self) -> str:
        return "ALONE"

    def __reduce__(self) -> str:
        return "ALONE"


ALONE = _Alone()
"""As group=ALONE: a group of one that needs no process group. What talks in it has nobody to talk to."""


def place_in(group=None) -> tuple[int, int]:
    """This rank's number in the group, and how many ranks it has; group: all ranks if None, this one if ALONE.

    Raises RuntimeError without a process group, and ValueError where this rank is not in the group.
    """
    if group is ALONE:
        return 0, 1
    if not distributed.is_initialized():
        raise RuntimeError(
            "expected a process group, found none; call this in a function that run_ranks(fn, 4) runs, under torchrun "
            "after torch.distributed.init_process_group(), or within `with imagined_ranks(64):`"
        )
    if (rank := distributed.get_rank(group)) < 0:
        raise ValueError(
            f"expected a group that this rank is of, found one that rank {distributed.get_rank()} is not of; "
            "let only its members call"
        )
    return rank, distributed.get_world_size(group)


def all_gather(whole: Tensor, piece: Tensor, group=None, async_op: bool = False):
    """Fill `whole` with every rank's `piece`, rank 0's first.

    whole: (ranks · n,), piece: (n,), of one dtype; `piece` may be the rank's own place in `whole`. Returns None, or
    with async_op a Work whose `wait()` ends it.
    """
    return _gather(whole, piece, group=group, async_op=async_op)


def reduce_scatter(piece: Tensor, whole: Tensor, group=None, async_op: bool = False):
    """Fill `piece` with the sum over ranks of this rank's place in their `whole`.

    piece: (n,), whole: (ranks · n,), of one dtype; `piece` may be the rank's own place in `whole`. Returns None, or
    with async_op a Work whose `wait()` ends it.
    """
    return _scatter(piece, whole, group=group, async_op=async_op)


def send(tensor: Tensor, dst: int, group=None) -> None:
    """Send a tensor to rank `dst` of the group; it waits there for `receive`. tensor: any shape and dtype."""
    begin([("send", tensor, dst)], group)[0].wait()


def receive(tensor: Tensor, src: int, group=None) -> Tensor:
    """Fill `tensor`, of the shape and dtype that rank `src` of the group sends, and return it."""
    return begin([("receive", tensor, src)], group)[0].wait()


def exchange(outgoing: Tensor, dst: int, incoming: Tensor, src: int, group=None) -> Tensor:
    """Send one tensor while receiving another, and return the one received, when both are done.

        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        exchange(mine, right, theirs, left)

    dst, src: other ranks of the group, also one and the same. incoming: of the shape and dtype that `src` sends; it
    shares no memory with `outgoing`. On a GPU "done" is as of the current stream, as for every op there.
    """
    sending, receiving = begin([("send", outgoing, dst), ("receive", incoming, src)], group)
    sending.wait()
    return receiving.wait()


def staged(tensor: Tensor, group=None) -> bool:
    """Whether this tensor passes through main memory on its way: it lies on a GPU, and gloo carries it."""
    group = group or distributed.group.WORLD
    return not tensor.is_cpu and group._get_backend(tensor.device).name() == "gloo"


class Transfer:
    """A tensor on its way: `wait()` returns it once it has arrived, or has been sent. Until then leave it alone.

    It holds the tensor, whose memory a backend reads or writes meanwhile; so keep the Transfer until it is waited for.
    On a GPU only the current stream waits, as for every op: what is computed afterwards finds the tensor there, and its
    memory goes to nobody else before. Staged, a send has left the GPU when it begins; a receive gets there in `wait()`.
    """

    def __init__(self, tensor: Tensor, wire: Tensor, receives: bool):
        self.tensor, self._wire, self._receives, self._works = tensor, wire, receives, ()

    def wait(self) -> Tensor:
        """The tensor. A second call returns it at once."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._receives and self._wire is not self.tensor:
            with torch.no_grad():
                self.tensor.copy_(self._wire)
        self._wire = self.tensor
        return self.tensor


def begin(messages: Sequence[tuple[str, Tensor, int]], group=None) -> list[Transfer]:
    """Begin several messages at once, and return a Transfer for each, in their order.

        sent, received = begin([("send", mine, right), ("receive", theirs, left)])

    messages: ("send" or "receive", tensor, rank of the group); tensors of any shapes and dtypes. Between two ranks the
    order decides which receive a send meets, over all calls; sends and receives do not wait for each other within one.
    With NCCL, each call waits for the one before, and the group's first talk must be one of all its ranks.

    Raises ValueError, before anything is sent, for another word, and for a rank that is not another one of the group.
    """
    mine, ranks = place_in(group)
    operations, transfers = [], []
    for name, tensor, peer in messages:
        if name not in ("send", "receive") or not isinstance(peer, int) or not 0 <= peer < ranks:
            raise ValueError(
                f'expected "send" or "receive", a tensor, and a rank of the group, 0 to {ranks - 1}, found {name!r} '
                f"and rank {peer!r}; count ranks as the group does"
            )
        if peer == mine:
            raise ValueError(f"expected another rank than this one, found {peer}; copy the tensor instead")
        sends = name == "send"
        wire = _wire(tensor, sends, group)
        operations.append(
            distributed.P2POp(distributed.isend if sends else distributed.irecv, wire, group=group, group_peer=peer)
        )
        transfers.append(Transfer(tensor, wire, not sends))
    if not operations:
        return []
    works = distributed.batch_isend_irecv(operations)
    together = len(works) != len(operations)  # NCCL: one work for all
    for number, transfer in enumerate(transfers):
        transfer._works = works if together else (works[number],)
    return transfers


def _wire(tensor: Tensor, filled: bool, group) -> Tensor:
    """The tensor as a backend can carry it: itself, or contiguous memory of its own, filled if it is to be sent."""
    if staged(tensor, group):
        wire = _host(tensor)
    elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():  # signs that only PyTorch knows of
        return tensor
    else:
        wire = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return wire.copy_(tensor.detach()) if filled else wire


def _host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
