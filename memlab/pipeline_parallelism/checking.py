"""Is a schedule right? Asked before anything runs, since ranks that wait for each other say nothing at all.

Complete: every stage has each micro-batch's forward and backward once, after what it needs, and each message is sent and
received once, in one order at both ends. And alive: played through with sends that wait until they are received, which
is the least a network may promise, every rank comes to its end. Messages that stand side by side in a list begin together.
"""

from __future__ import annotations

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
    """Raise ValueError, naming rank and action, if a schedule misses or doubles an action, or orders them so that none ends."""
    _complete(schedule)
    _ordered(schedule)
    _alive(schedule)


def expected_actions(schedule: Schedule) -> set[tuple[int, Action]]:
    """Which actions, and on which ranks, this schedule's stages and micro-batches take."""
    ranks, backward = schedule.ranks_of_stages, _has_backward(schedule)
    wanted = set()
    for stage, rank in enumerate(ranks):
        for i in range(schedule.micro_batches):
            kinds = [FORWARD, BACKWARD] if backward else [FORWARD]
            if stage > 0 and ranks[stage - 1] != rank:
                kinds += [RECEIVE_ACTIVATION, SEND_GRADIENT] if backward else [RECEIVE_ACTIVATION]
            if stage < len(ranks) - 1 and ranks[stage + 1] != rank:
                kinds += [SEND_ACTIVATION, RECEIVE_GRADIENT] if backward else [SEND_ACTIVATION]
            wanted |= {(rank, Action(kind, stage, i)) for kind in kinds}
    return wanted


def _has_backward(schedule: Schedule) -> bool:
    return any(action.kind == BACKWARD for actions in schedule.actions for action in actions)


def _complete(schedule: Schedule) -> None:
    wanted = expected_actions(schedule)
    found: set[tuple[int, Action]] = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if (rank, action) in found:
                raise ValueError(f"expected each action once, found {action} twice on rank {rank}; take one out")
            if (rank, action) not in wanted:
                raise ValueError(
                    f"expected no {action} on rank {rank}, found one; the stage or micro-batch is not its own"
                )
            found.add((rank, action))
    if missing := sorted(wanted - found, key=lambda one: (one[0], str(one[1]))):
        rank, action = missing[0]
        raise ValueError(f"expected {action} on rank {rank}, found none ({len(missing)} missing); put it in")


def _ordered(schedule: Schedule) -> None:
    """Within each rank: after what it needs. Between two ranks: messages in one order at both ends."""
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for action in actions:
            before = _before(action, schedule)
            if before is not None and before not in done:
                raise ValueError(f"expected {before} before {action} on rank {rank}, found it after; swap them")
            done.add(action)


def _before(action: Action, schedule: Schedule) -> list | Action | None:
    stage, i, ranks = action.stage, action.micro_batch, schedule.ranks_of_stages
    if action.kind == FORWARD and stage > 0:
        near = ranks[stage - 1] == ranks[stage]
        return Action(FORWARD, stage - 1, i) if near else Action(RECEIVE_ACTIVATION, stage, i)
    if action.kind == BACKWARD and stage < len(ranks) - 1:
        near = ranks[stage + 1] == ranks[stage]
        return Action(BACKWARD, stage + 1, i) if near else Action(RECEIVE_GRADIENT, stage, i)
    if action.kind == BACKWARD:
        return Action(FORWARD, stage, i)
    if action.kind in SENDS:
        return Action(FORWARD if action.kind == SEND_ACTIVATION else BACKWARD, stage, i)
    return None


def groups_of(actions: tuple[Action, ...]) -> list[list[Action]]:
    """Computations one by one, and messages that stand side by side together."""
    groups: list[list[Action]] = []
    for action in actions:
        message = action.kind not in COMPUTATIONS
        if message and groups and groups[-1][0].kind not in COMPUTATIONS:
            groups[-1].append(action)
        else:
            groups.append([action])
    return groups


def _alive(schedule: Schedule) -> None:
    lists = [groups_of(actions) for actions in schedule.actions]
    at = [0] * len(lists)
    begun: set[Action] = set()

    def waits_for(rank: int) -> Action | None:
        """The first message of this rank's group whose other end has not begun."""
        for action in lists[rank][at[rank]]:
            if action.kind not in COMPUTATIONS and action.counterpart not in begun:
                return action
        return None

    moved = True
    while moved:
        moved = False
        for rank, groups in enumerate(lists):
            while at[rank] < len(groups):
                begun.update(groups[at[rank]])
                if waits_for(rank) is not None:
                    break
                at[rank] += 1
                moved = True
    stuck = [rank for rank, groups in enumerate(lists) if at[rank] < len(groups)]
    if not stuck:
        return
    rank, path = stuck[0], []
    while rank not in path:
        path.append(rank)
        rank = schedule.peer(waits_for(rank))
    cycle = path[path.index(rank) :]
    said = "; ".join(
        f"rank {rank} waits in {waits_for(rank)} for rank {schedule.peer(waits_for(rank))}" for rank in cycle
    )
    raise ValueError(
        f"expected a schedule that ends, found ranks that wait for each other: {said}; reorder one of them"
    )
