"""A schedule is data: for each rank, what it does, in order.

A model is cut by its depth into stages. A micro-batch goes forward through all stages and then backward through all.
What stage s has computed, stage s + 1 needs; if that is on another rank, one sends and the other receives:

    rank 0   F0    send F0       F1   send F1   receive B0   B0   …
    rank 1         receive F0    F0   B0        send B0      …

Nothing here runs anything. The same schedule is checked (`checking`), drawn and timed (`simulator`), and executed by
real ranks (`runtime`). The next page, `orders`, makes some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memlab.checking import positive

FORWARD, BACKWARD = "forward", "backward"
SEND_ACTIVATION, RECEIVE_ACTIVATION = "send activation", "receive activation"
SEND_GRADIENT, RECEIVE_GRADIENT = "send gradient", "receive gradient"
KINDS = (FORWARD, BACKWARD, SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT)
COMPUTATIONS = (FORWARD, BACKWARD)
SENDS = (SEND_ACTIVATION, SEND_GRADIENT)
COUNTERPARTS = {
    SEND_ACTIVATION: RECEIVE_ACTIVATION,
    RECEIVE_ACTIVATION: SEND_ACTIVATION,
    SEND_GRADIENT: RECEIVE_GRADIENT,
    RECEIVE_GRADIENT: SEND_GRADIENT,
}
_SHORT = dict(zip(KINDS, ("F", "B", "send F", "receive F", "send B", "receive B"), strict=True))


class Action(NamedTuple):
    """One thing a rank does: `kind`, one of KINDS, for micro-batch `micro_batch` of stage `stage`.

    A stage's activations go to the stage after it, and come from the one before it; gradients the other way.

    >>> send = Action("send gradient", 1, 5)
    >>> print(send, "and", send.counterpart)
    send B5 of stage 1 and receive B5 of stage 0
    """

    kind: str
    stage: int
    micro_batch: int

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a message."""
        return self.stage + (1 if self.kind in (SEND_ACTIVATION, RECEIVE_GRADIENT) else -1)

    @property
    def counterpart(self) -> Action:
        """Of a send the receive, of a receive the send."""
        return Action(COUNTERPARTS[self.kind], self.peer_stage, self.micro_batch)

    def __str__(self) -> str:
        return f"{_SHORT.get(self.kind, self.kind)}{self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does. actions: for each rank, in order. ranks_of_stages: which rank has stage 0, 1, …

    Raises ValueError for a rank without a stage, and a stage on a rank without a list. Whether the lists are right,
    `check_schedule` says.
    """

    name: str
    micro_batches: int
    ranks_of_stages: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self):
        positive("micro_batches", self.micro_batches)
        if set(self.ranks_of_stages) != set(range(self.ranks)) or not self.ranks:
            raise ValueError(
                f"expected a stage on each of {self.ranks} ranks, found stages on ranks {list(self.ranks_of_stages)}; "
                f"give every rank a list of actions and at least one stage"
            )

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """How many stages there are on all ranks."""
        return len(self.ranks_of_stages)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank has."""
        return [stage for stage, at in enumerate(self.ranks_of_stages) if at == rank]

    def most_in_flight(self, stages: Sequence[int]) -> int:
        """How many micro-batches some stages of one rank have at most between their forward and their backward."""
        held = most = 0
        for action in self.actions[self.ranks_of_stages[stages[0]]]:
            if action.kind in COMPUTATIONS and action.stage in stages:
                held += 1 if action.kind == FORWARD else -1
                most = max(most, held)
        return most

    def peer(self, action: Action) -> int:
        """The rank at the other end of a message."""
        return self.ranks_of_stages[action.peer_stage]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.stages} stages, {self.micro_batches} micro-batches"]
        for rank, actions in enumerate(self.actions):
            says_stage = self.stages_of(rank) != [rank]
            turns = [
                f"{_SHORT[a.kind]}{a.micro_batch}" + (f"@{a.stage}" if says_stage else "")
                for a in actions
                if a.kind in COMPUTATIONS
            ]
            lines.append(f"rank {rank}  " + " ".join(turns))
        return "\n".join(lines)
