"""Play a schedule without running it: when each rank does what.

A computation begins when its rank is free and what it needs is there. A message leaves when both its ends have begun
it, takes its time on the link from the one rank to the other, and messages on one link follow each other. What a rank
sends it keeps until its next computation is through, or only begins (`gone_before`). If the message is not through by
then, the rank waits for it. What a rank holds meanwhile says the page before, `line`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from memlab.pipeline_parallelism.checking import check_schedule
from memlab.pipeline_parallelism.line import Moment, StageCost, bytes_along, gone_before, moved_bytes
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


class Span(NamedTuple):
    """An action of a rank, from begin to end, in seconds."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule that was played, from second 0.

    spans: the computations, by begin.   messages: each while it is on its link, as its sender's action, by begin.
    moments: for each rank and each action in its list, when it was done; of a message, when it began.
    """

    schedule: Schedule
    costs: tuple[StageCost, ...]
    spans: tuple[Span, ...]
    messages: tuple[Span, ...]
    moments: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(span.end for span in self.spans)

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they idle."""
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / (self.schedule.ranks * self.seconds) if self.seconds else 0.0

    def in_flight(self, stage: int) -> int:
        """How many micro-batches a stage has at most between their forward and their backward."""
        return self.schedule.most_in_flight([stage])

    def line(self, rank: int) -> list[Moment]:
        """What a rank holds after each of its actions, in order: (seconds, bytes, action), at storages level.

        Of messages that begin together, each has the bytes after all of them.
        """
        after, _ = bytes_along(self.schedule, self.costs, rank)
        return list(map(Moment, self.moments[rank], after, self.schedule.actions[rank]))

    def peak_bytes(self, rank: int) -> int:
        """The most that a rank holds, also while it computes, at storages level."""
        return bytes_along(self.schedule, self.costs, rank)[1]


EQUAL = StageCost()
"""What every stage costs if nothing else is said."""


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost] | StageCost = EQUAL,
    link_seconds: float = 0.0,
    link_bytes_per_second: float = math.inf,
) -> Simulation:
    """Play a schedule. A message takes link_seconds, and its bytes over link_bytes_per_second.

    costs: of each stage, or one for all.   Raises ValueError as `check_schedule` does, for another number of costs, and
    for a link that is no link.

    >>> from memlab.pipeline_parallelism import bubble_share, one_forward_one_backward
    >>> simulate(one_forward_one_backward(4, 8)).bubble_share == bubble_share(4, 8) == 3 / 11
    True
    """
    check_schedule(schedule)
    costs = (costs,) * schedule.stages if isinstance(costs, StageCost) else tuple(costs)
    if len(costs) != schedule.stages:
        raise ValueError(f"expected a cost for each of {schedule.stages} stages, found {len(costs)}")
    if not (0 <= link_seconds < math.inf and link_bytes_per_second > 0):
        raise ValueError(
            f"expected link_seconds of at least 0 and link_bytes_per_second above 0, found {link_seconds} and "
            f"{link_bytes_per_second}"
        )

    def on_link(send: Action) -> float:
        return link_seconds + moved_bytes(send.counterpart, costs) / link_bytes_per_second

    play = _Play(schedule, costs, on_link)
    while sum(play.advance(rank) for rank in range(schedule.ranks)):
        pass
    spans, messages = (tuple(sorted(found, key=attrgetter("begin", "rank"))) for found in (play.spans, play.messages))
    return Simulation(schedule, costs, spans, messages, tuple(map(tuple, play.moments)))


class _Play:
    """Where each rank is, while it goes through its list as far as what has arrived allows."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost], on_link):
        self.schedule, self.costs, self.on_link = schedule, costs, on_link
        self.free = [0.0] * schedule.ranks  # when each rank could begin its next action
        self.under_way: list[list[Action]] = [[] for _ in schedule.actions]  # messages since the last computation
        self.moments: list[list[float]] = [[] for _ in schedule.actions]
        self.computed = [False] * schedule.ranks  # the action at which the rank stands, but for what it sent before
        self.begun: dict[Action, float] = {}
        self.arrived: dict[Action, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.spans: list[Span] = []
        self.messages: list[Span] = []

    def advance(self, rank: int) -> bool:
        """Go on with a rank until it waits for another. Returns whether it moved."""
        actions, moments = self.schedule.actions[rank], self.moments[rank]
        moved = False
        while len(moments) < len(actions):
            action = actions[len(moments)]
            if action.kind not in COMPUTATIONS:
                self._begin(rank, action)
            else:
                if not self.computed[rank]:
                    if not self._compute(rank, action):
                        break
                    moved = self.computed[rank] = True
                leaving = [message for message in self.under_way[rank] if message.kind in SENDS]
                if any(send not in self.arrived for send in leaving):
                    break
                self.free[rank] = max([self.free[rank], *(self.arrived[send] for send in leaving)])
                self.under_way[rank], self.computed[rank] = [], False
            moments.append(self.free[rank])
            moved = True
        return moved

    def _compute(self, rank: int, action: Action) -> bool:
        """Compute, if it is known when what that takes arrives. Returns whether it is."""
        near = action.stage + (1 if action.kind == BACKWARD else -1)
        ready, at = 0.0, self.schedule.ranks_of_stages
        if 0 <= near < len(at) and at[near] != rank:
            receive = RECEIVE_ACTIVATION if action.kind == FORWARD else RECEIVE_GRADIENT
            ready = self.arrived.get(Action(receive, action.stage, action.micro_batch))
            if ready is None:
                return False
        gone = gone_before(action, self.under_way[rank])
        if any(send not in self.arrived for send in gone):
            return False
        begin = max([self.free[rank], ready, *(self.arrived[send] for send in gone)])
        self.free[rank] = begin + self.costs[action.stage].seconds(action.kind)
        self.spans.append(Span(rank, action, begin, self.free[rank]))
        return True

    def _begin(self, rank: int, action: Action) -> None:
        """Begin one end of a message. With the second, it leaves, as soon as its link is free."""
        other = action.counterpart
        self.begun[action] = self.free[rank]
        self.under_way[rank].append(action)
        if other in self.begun:
            send = action if action.kind in SENDS else other
            link = (self.schedule.ranks_of_stages[send.stage], self.schedule.peer(send))
            begin = max(self.begun[action], self.begun[other], self.link_free.get(link, 0.0))
            end = self.arrived[action] = self.arrived[other] = self.link_free[link] = begin + self.on_link(send)
            self.messages.append(Span(link[0], send, begin, end))
