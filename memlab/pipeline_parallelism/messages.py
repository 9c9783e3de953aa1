"""What a rank has under way: tensors that it has sent or is about to receive.

Both begin where the schedule's list says so, and nobody waits at once. A receive is waited for by the computation that
needs it. What is sent is held until the rank's next computation is through, by when it is usually gone; outputs only
until that begins, if it is a backward whose gradient was received beside them (`gone_before`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from memlab.pipeline_parallelism.plan import PipelinePlan
from memlab.pipeline_parallelism.rehearsal import Wire
from memlab.pipeline_parallelism.schedule import RECEIVE_ACTIVATION, SEND_ACTIVATION, SENDS, Action
from memlab.ranks import Transfer, begin


class Messages:
    """The messages of one rank of a pipeline, each known by the action that receives it.

    group: the pipeline's ranks, all if None.   device: where tensors are received.
    """

    def __init__(self, plan: PipelinePlan, group=None, device: torch.device | str = "cpu"):
        self.plan, self.group, self.device = plan, group, device
        self.ready: dict[Action, Sequence[Tensor]] = {}  # made here: to be sent, or for another stage of this rank
        self.arriving: dict[Action, list[Transfer]] = {}
        self.leaving: dict[Action, list[Transfer]] = {}
        self.begun: Sequence[Action] = ()  # the last that stood side by side
        if "nccl" in distributed.get_backend(group):  # whose first talk in a group is one of all its ranks
            distributed.all_reduce(torch.zeros(1, device=device), group=group)

    def begin(self, actions: Sequence[Action]) -> None:
        """Begin the sends and receives that stand side by side in the list, all at once."""
        self.begun, asked = actions, []
        for action in actions:
            sends = action.kind in SENDS
            tensors = self.ready.pop(action.counterpart) if sends else self._room(action)
            peer = self.plan.schedule.peer(action)
            asked += [(action, ("send" if sends else "receive", tensor, peer)) for tensor in tensors]
            (self.leaving if sends else self.arriving)[action] = []
        transfers = begin([message for _, message in asked], self.group)
        for (action, _), transfer in zip(asked, transfers, strict=True):
            (self.leaving if action.kind in SENDS else self.arriving)[action].append(transfer)

    def take(self, receive: Action) -> Sequence[Tensor]:
        """What a message brought, when it is there; what another stage of this rank has made is there at once.

        Activations that need a gradient are marked so.
        """
        if receive in self.ready:
            tensors = self.ready.pop(receive)
        else:
            tensors = [transfer.wait() for transfer in self.arriving.pop(receive)]
        if receive.kind == RECEIVE_ACTIVATION:
            for tensor, wire in zip(tensors, self.wires(receive), strict=True):
                tensor.requires_grad_(wire.gradient)
        return tensors

    def settle(self, sends: Sequence[Action] | None = None) -> None:
        """Wait for what was sent, and let go of it; for all of it if None."""
        for send in list(self.leaving) if sends is None else sends:
            for transfer in self.leaving.pop(send, ()):
                transfer.wait()

    def wires(self, action: Action) -> list[Wire]:
        """What a message carries: of activations all tensors, of gradients those that have one."""
        forward = action.kind in (SEND_ACTIVATION, RECEIVE_ACTIVATION)
        return [wire for wire in self.plan.wires[min(action.stage, action.peer_stage)] if forward or wire.gradient]

    def _room(self, action: Action) -> list[Tensor]:
        return [torch.empty(wire.shape, dtype=wire.dtype, device=self.device) for wire in self.wires(action)]
