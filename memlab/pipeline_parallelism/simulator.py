"""Play a schedule without running it: when each rank does what, and what it holds.

A computation begins when its rank is free and what it needs is there. A message leaves when it is begun and arrives
`link_seconds` later, and nobody waits for a send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memlab.pipeline_parallelism.checking import check_schedule
from memlab.pipeline_parallelism.schedule import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SENDS,
    Action,
    Schedule,
)


@dataclass(frozen=True)
class StageCost:
    """What one micro-batch costs on one stage. saved_bytes: what its forward leaves for its backward."""

    forward_seconds: float = 1.0
    backward_seconds: float = 2.0
    saved_bytes: int = 1
    static_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """An action of a rank, from begin to end, in seconds."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule that was played. spans: the computations, by begin. seconds: of the whole step."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans)

    def busy_seconds(self, rank: int) -> float:
        return sum(span.end - span.begin for span in self.spans if span.rank == rank)

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they idle."""
        busy = sum(self.busy_seconds(rank) for rank in range(self.schedule.ranks))
        return 1 - busy / (self.schedule.ranks * self.seconds)

    def in_flight(self, stage: int) -> int:
        """How many micro-batches' activations a stage holds at most."""
        held = most = 0
        for span in self.spans:
            if span.action.stage == stage:
                held += 1 if span.action.kind == FORWARD else -1
                most = max(most, held)
        return most


def simulate(
    schedule: Schedule, costs: Sequence[StageCost] | StageCost = StageCost(), link_seconds: float = 0.0
) -> Simulation:
    """Play a schedule. costs: of each stage, or one for all. Raises ValueError as `check_schedule` does."""
    check_schedule(schedule)
    costs = (costs,) * schedule.stages if isinstance(costs, StageCost) else tuple(costs)
    if len(costs) != schedule.stages:
        raise ValueError(f"expected a cost for each of {schedule.stages} stages, found {len(costs)}")
    free = [0.0] * schedule.ranks
    at = [0] * schedule.ranks
    arrived: dict[Action, float] = {}
    spans: list[Span] = []
    while any(at[rank] < len(actions) for rank, actions in enumerate(schedule.actions)):
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind in SENDS:
                    arrived[action.counterpart] = free[rank] + link_seconds
                elif action.kind in COMPUTATIONS:
                    receive = RECEIVE_ACTIVATION if action.kind == FORWARD else RECEIVE_GRADIENT
                    message = Action(receive, action.stage, action.micro_batch)
                    if message in actions and message not in arrived:
                        break
                    begin = max(free[rank], arrived.get(message, 0.0))
                    cost = costs[action.stage]
                    seconds = cost.backward_seconds if action.kind == BACKWARD else cost.forward_seconds
                    free[rank] = begin + seconds
                    spans.append(Span(rank, action, begin, free[rank]))
                at[rank] += 1
    return Simulation(schedule, costs, tuple(sorted(spans, key=lambda span: (span.begin, span.rank))))
