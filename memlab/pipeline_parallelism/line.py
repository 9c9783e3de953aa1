"""What a rank holds after each action of a schedule, to the byte: known before anything runs.

    receive activation    + the input, from the moment the receive begins
    forward               − the input, + what it saves (the input, too, if an op saves it), + the output, to be sent
    receive gradient      + the gradient of the output
    backward              − what was saved, − that gradient, + the gradient of the input, to be sent

What is sent is held until the rank's next computation is through, and some only until that begins (`gone_before`). So
a schedule decides the peak by two things: how many micro-batches are in flight, and how many messages lie there, come
too soon or not yet gone. While a computation runs, a rank holds more than before and after; how much, one micro-batch
shows (`StageCost`).

At storages level, as the meter counts. If neighbouring stages are on one rank, a tensor that both save counts twice.
Ties between stages are not known here: a parameter that is one for several stages of a rank counts on each, and room
for the others' gradients, and the sum, at a step's end counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memlab.pipeline_parallelism.checking import groups_of
from memlab.pipeline_parallelism.schedule import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SENDS,
    Action,
    Schedule,
)


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs on one stage, at storages level. By default forwards take 1 s, backwards 2 s.

    static_bytes: parameters, gradients, optimizer states, buffers.
    saved_bytes: what a forward leaves for its backward: with the input, if it is saved, and without the output.
    input_bytes: what arrives from the stage before; 0 on the first stage, whose input is the caller's.
    output_bytes: what dropping the output frees: 0 if it is saved anyway. On the last stage that is the loss, which is
      held to the end of the step.
    gradient_bytes: of the input, sent to the stage before; None: as many as input_bytes.
    received_gradient_bytes: of the same, there: gradients that are one tensor here are several; None: gradient_bytes.
    forward_extra_bytes, backward_extra_bytes: how far the peak while it computes lies above the line before.

    Raises ValueError for a negative number.
    """

    forward_seconds: float = 1.0
    backward_seconds: float = 2.0
    saved_bytes: int = 1
    static_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int | None = None
    received_gradient_bytes: int | None = None
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0

    def __post_init__(self):
        if self.gradient_bytes is None:
            object.__setattr__(self, "gradient_bytes", self.input_bytes)
        if self.received_gradient_bytes is None:
            object.__setattr__(self, "received_gradient_bytes", self.gradient_bytes)
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"expected {name} of at least 0, found {value}")

    def seconds(self, kind: str) -> float:
        """Of a forward or a backward."""
        return self.forward_seconds if kind == FORWARD else self.backward_seconds

    def extra_bytes(self, kind: str) -> int:
        """Of a forward or a backward."""
        return self.forward_extra_bytes if kind == FORWARD else self.backward_extra_bytes


class Moment(NamedTuple):
    """What a rank holds when an action is done."""

    seconds: float
    nbytes: int
    action: Action


def bytes_along(schedule: Schedule, costs: Sequence[StageCost], rank: int) -> tuple[list[int], int]:
    """What a rank holds after each of its actions, and the most that it holds, also while it computes.

    Messages that stand side by side begin together: each has the bytes after all of them.
    """
    stages = schedule.stages_of(rank)
    now = most = sum(costs[stage].static_bytes for stage in stages)
    after, leaving, begun = [], {}, []
    for group in groups_of(schedule.actions[rank]):
        action = group[0]
        if action.kind in COMPUTATIONS:
            cost = costs[action.stage]
            now -= sum(leaving.pop(send) for send in gone_before(action, begun))
            most = max(most, now + cost.extra_bytes(action.kind))
            now += _made(action, schedule, costs) - sum(leaving.values())
            leaving, begun = {}, []
        else:
            begun = group
            now += sum(moved_bytes(action, costs) for action in group if action.kind not in SENDS)
            leaving |= {action: moved_bytes(action, costs) for action in group if action.kind in SENDS}
        most = max(most, now)
        after += [now] * len(group)
    return after, most


def gone_before(computation: Action, begun: Sequence[Action]) -> list[Action]:
    """Which sends, of the messages that have begun since the last computation, are through before this one begins.

    Those of a stage's output, if the gradient of a backward of this stage is received beside them: the rank that sends
    it has begun to receive them. If the gradient has been received before, its sender may still compute.
    """
    if Action(RECEIVE_GRADIENT, computation.stage, computation.micro_batch) not in begun:
        return []
    return [a for a in begun if a.kind == SEND_ACTIVATION and a.stage == computation.stage]


def moved_bytes(message: Action, costs: Sequence[StageCost]) -> int:
    """Of a receive, what crosses the link and is held from its begin on; of a send, what is free when it is through."""
    if message.kind == SEND_ACTIVATION:
        return costs[message.stage].output_bytes
    if message.kind == RECEIVE_ACTIVATION:
        return costs[message.stage].input_bytes
    if message.kind == RECEIVE_GRADIENT:
        return costs[message.peer_stage].received_gradient_bytes
    return costs[message.stage].gradient_bytes


def _made(action: Action, schedule: Schedule, costs: Sequence[StageCost]) -> int:
    """By how much a computation changes what the rank holds: made, less consumed."""
    stage, at = action.stage, schedule.ranks_of_stages
    cost, first, last = costs[stage], stage == 0, stage == len(at) - 1
    if action.kind == BACKWARD:
        if last:
            arrived = 0
        elif at[stage + 1] == at[stage]:
            arrived = costs[stage + 1].gradient_bytes
        else:
            arrived = costs[stage + 1].received_gradient_bytes
        return (0 if first else cost.gradient_bytes) - arrived - cost.saved_bytes
    if first:
        arrived = 0
    elif at[stage - 1] == at[stage]:
        arrived = costs[stage - 1].output_bytes
    else:
        arrived = cost.input_bytes
    return cost.saved_bytes + cost.output_bytes - arrived
