"""Is a schedule right? Asked before anything runs, since ranks that wait for each other say nothing at all.

Complete: each stage has each micro-batch's forward and backward once, and each message is sent once and received once.
Ordered: nothing comes before what it needs. Matched: a rank's messages to another are received in the order in which
they are sent, for neither NCCL nor gloo looks at what is inside. Alive: every rank comes to its end, though a send may
wait until it is received, the least that a network promises.

Messages that stand side by side in a list begin together; a rank goes on when all of them are through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memlab.pipeline_parallelism.schedule import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    SENDS,
    Action,
    Schedule,
)


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError, naming rank and action, if ranks that follow a schedule would compute wrong, or never end."""
    _complete(schedule)
    _ordered(schedule)
    _matched(schedule)
    _alive(schedule)


def expected_actions(schedule: Schedule) -> list[set[Action]]:
    """For each rank, which actions its stages take, in whatever order."""
    at, wanted = schedule.ranks_of_stages, [set() for _ in schedule.actions]
    for stage, rank in enumerate(at):
        kinds = [FORWARD, BACKWARD]
        if stage > 0 and at[stage - 1] != rank:
            kinds += [RECEIVE_ACTIVATION, SEND_GRADIENT]
        if stage < len(at) - 1 and at[stage + 1] != rank:
            kinds += [SEND_ACTIVATION, RECEIVE_GRADIENT]
        wanted[rank].update(Action(kind, stage, i) for kind in kinds for i in range(schedule.micro_batches))
    return wanted


def _complete(schedule: Schedule) -> None:
    for rank, (actions, wanted) in enumerate(zip(schedule.actions, expected_actions(schedule), strict=True)):
        found = set(actions)
        if extra := found - wanted:
            raise ValueError(
                f"expected only what rank {rank} has to do with stages {schedule.stages_of(rank)}, found "
                f"{_first(extra)}; take it out"
            )
        if len(found) < len(actions):
            (twice, times), *_ = Counter(actions).most_common(1)
            raise ValueError(
                f"expected each action once, found {twice} {times} times on rank {rank}; take it out there"
            )
        if missing := wanted - found:
            raise ValueError(
                f"expected {_first(missing)} on rank {rank}, found none ({len(missing)} of its {len(wanted)} actions "
                f"are missing); put it in"
            )


def _first(actions: set[Action]) -> Action:
    return min(actions, key=lambda action: (action.micro_batch, action.stage, str(action.kind)))


def _ordered(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for action in actions:
            for need in needs(action, schedule):
                if need not in done:
                    raise ValueError(f"expected {need} before {action} on rank {rank}, found it after; swap them")
            done.add(action)


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """What must stand before an action in its rank's list: its computation, and where its input comes from."""
    stage, i, at = action.stage, action.micro_batch, schedule.ranks_of_stages
    if action.kind in SENDS:
        return [Action(FORWARD if action.kind == SEND_ACTIVATION else BACKWARD, stage, i)]
    found = []
    if action.kind == FORWARD and stage > 0:
        near = at[stage - 1] == at[stage]
        found.append(Action(FORWARD, stage - 1, i) if near else Action(RECEIVE_ACTIVATION, stage, i))
    if action.kind == BACKWARD:
        found.append(Action(FORWARD, stage, i))
        if stage < len(at) - 1:
            near = at[stage + 1] == at[stage]
            found.append(Action(BACKWARD, stage + 1, i) if near else Action(RECEIVE_GRADIENT, stage, i))
    return found


def _matched(schedule: Schedule) -> None:
    """From one rank to another: the n-th message sent is the n-th received."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                sent.setdefault((rank, schedule.peer(action)), []).append(action)
            elif action.kind not in COMPUTATIONS:
                received.setdefault((schedule.peer(action), rank), []).append(action)
    for (sender, receiver), messages in sent.items():
        for send, receive in zip(messages, received[sender, receiver], strict=True):
            if send.counterpart != receive:
                raise ValueError(
                    f"expected messages from rank {sender} to rank {receiver} in one order on both, found {send} on "
                    f"rank {sender} where rank {receiver} has {receive}; move one of them"
                )


def groups_of(actions: Sequence[Action]) -> list[list[Action]]:
    """Computations one by one, and messages that stand side by side together."""
    groups: list[list[Action]] = []
    talked = False
    for action in actions:
        talks = action.kind not in COMPUTATIONS
        if talks and talked:
            groups[-1].append(action)
        else:
            groups.append([action])
        talked = talks
    return groups


def _alive(schedule: Schedule) -> None:
    """Play the messages: a rank goes on when the other end of each one in its group has begun, too."""
    groups = [groups_of(actions) for actions in schedule.actions]
    at = [0] * schedule.ranks
    begun: set[Action] = set()

    def waits_for(rank: int) -> Action | None:
        """The first message of this rank's group whose other end has not begun."""
        for action in groups[rank][at[rank]]:
            if action.kind not in COMPUTATIONS and action.counterpart not in begun:
                return action
        return None

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            while at[rank] < len(groups[rank]):
                begun.update(groups[rank][at[rank]])
                if waits_for(rank):
                    break
                at[rank] += 1
                moved = True
    stuck = [rank for rank in range(schedule.ranks) if at[rank] < len(groups[rank])]
    if stuck:
        raise ValueError(
            f"expected ranks that all come to their end, found some that wait for each other: "
            f"{_circle(stuck[0], waits_for, schedule)}; give these messages one order on all ranks, or let them stand "
            "side by side"
        )


def _circle(rank: int, waits_for, schedule: Schedule) -> str:
    """Who waits in which message for whom, until the first is reached again: who is stuck waits for one who is, too."""
    path = []
    while rank not in path:
        path.append(rank)
        rank = schedule.peer(waits_for(rank))
    circle = path[path.index(rank) :]
    first = circle.index(min(circle))
    steps = [f"rank {rank} → {waits_for(rank)} →" for rank in circle[first:] + circle[:first]]
    return " ".join([*steps, f"rank {min(circle)}"])
