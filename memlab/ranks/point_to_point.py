"""From one rank to another: send, receive, and both at once.

A ring needs both at once. If every rank first sent to the right and only then listened to the left, each would wait for
a neighbour that is itself still sending. `exchange` begins both, and returns when both are done.

Two backends, one call: NCCL moves a GPU's bytes directly. gloo's sends know main memory only, so a GPU's tensor is
staged: copied to the host, sent, received there, copied up. That is what happens where several ranks share one GPU,
which NCCL refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from memlab.ranks.traffic import counted


def send(tensor: Tensor, to: int, group=None) -> None:
    """Send a tensor to rank `to` of the group; it waits there for `receive`. tensor: any shape and dtype."""
    _run([(distributed.isend, tensor, to)], group)


def receive(tensor: Tensor, frm: int, group=None) -> Tensor:
    """Fill `tensor`, of the shape and dtype that rank `frm` of the group sends, and return it."""
    _run([(distributed.irecv, tensor, frm)], group)
    return tensor


def exchange(outgoing: Tensor, to: int, incoming: Tensor, frm: int, group=None) -> Tensor:
    """Send one tensor while receiving another, and return the one received, when both are done.

        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        exchange(mine, right, theirs, left)

    to, frm: ranks of the group, also one and the same. incoming: of the shape and dtype that `frm` sends; it shares no
    memory with `outgoing`. On a GPU "done" is as of the current stream, as for every op there.
    """
    _run([(distributed.isend, outgoing, to), (distributed.irecv, incoming, frm)], group)
    return incoming


def staged(tensor: Tensor, group=None) -> bool:
    """Whether this tensor passes through main memory on its way: it lies on a GPU, and gloo carries it."""
    group = group or distributed.group.WORLD
    return not tensor.is_cpu and group._get_backend(tensor.device).name() == "gloo"


def _run(transfers: list[tuple], group) -> None:
    """Begin every transfer, then wait for all of them."""
    operations, landings = [], []
    for begin, tensor, peer in transfers:
        wire = _wire(tensor, begin is distributed.isend, group)
        operations.append(distributed.P2POp(begin, wire, group=group, group_peer=peer))
        if wire is not tensor and begin is distributed.irecv:
            landings.append((tensor, wire))
    sent, received = (
        [t for begin, t, _ in transfers if begin is way] for way in (distributed.isend, distributed.irecv)
    )
    with counted(sent, received, group):
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
    with torch.no_grad():
        for tensor, wire in landings:
            tensor.copy_(wire)


def _wire(tensor: Tensor, filled: bool, group) -> Tensor:
    """The tensor as a backend can carry it: itself, or contiguous memory of its own, filled if it is to be sent."""
    if staged(tensor, group):
        wire = _host(tensor)
    elif tensor.is_contiguous():
        return tensor
    else:
        wire = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return wire.copy_(tensor.detach()) if filled else wire


def _host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
