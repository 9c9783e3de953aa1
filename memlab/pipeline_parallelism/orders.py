"""In which order each rank takes the micro-batches' turns: the schedules of the literature, and your own.

    gpipe                       F0 F1 F2 F3 … B0 B1 B2 B3           all forwards, then all backwards
    one_forward_one_backward    F0 F1 B0 F2 B1 F3 B2 … B3           1F1B: a backward as soon as there is one
    interleaved                 each rank has several stages, far apart: the first micro-batch is through sooner

Each gives the computations' order only; `with_messages` puts the sends and receives between them.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (Megatron-LM: 1F1B and interleaved), section 2.2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memlab.checking import positive
from memlab.pipeline_parallelism.schedule import (
    BACKWARD,
    COMPUTATIONS,
    FORWARD,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Action,
    Schedule,
)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: every stage keeps every micro-batch's activations.

    >>> print(gpipe(2, 3))
    GPipe: 2 stages, 3 micro-batches
    rank 0  F0 F1 F2 B0 B1 B2
    rank 1  F0 F1 F2 B0 B1 B2
    """
    positive("stages", stages)
    positive("micro_batches", micro_batches)
    turns = [(kind, i) for kind in COMPUTATIONS for i in range(micro_batches)]
    return with_messages("GPipe", [[Action(kind, stage, i) for kind, i in turns] for stage in range(stages)])


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B: stage s begins with stages − s forwards, and from then on each is paid for by a backward.

    >>> print(one_forward_one_backward(2, 3))
    1F1B: 2 stages, 3 micro-batches
    rank 0  F0 F1 B0 F2 B1 B2
    rank 1  F0 B0 F1 B1 F2 B2
    """
    positive("stages", stages)
    positive("micro_batches", micro_batches)
    orders = []
    for stage in range(stages):
        forwards = [Action(FORWARD, stage, i) for i in range(micro_batches)]
        backwards = [Action(BACKWARD, stage, i) for i in range(micro_batches)]
        orders.append(_in_turns(forwards, backwards, stages - stage))
    return with_messages("1F1B", orders)


def interleaved(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with `chunks` stages on each rank, r, r + ranks, … on rank r: the bubble is `chunks` times shorter.

    Micro-batches go in rounds of `ranks`: a round through the rank's first stage, then the same round through its next.
    micro_batches: a multiple of ranks, else ValueError.   Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.

    >>> print(interleaved(2, 2, 2))
    interleaved 1F1B: 4 stages, 2 micro-batches
    rank 0  F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
    rank 1  F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1
    """
    positive("ranks", ranks)
    positive("chunks", chunks)
    positive("micro_batches", micro_batches)
    if micro_batches % ranks:
        raise ValueError(
            f"expected micro-batches that {ranks} ranks divide, found {micro_batches}; "
            f"pick {-(-micro_batches // ranks) * ranks}"
        )
    rounds = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(FORWARD, stage, i) for round_ in rounds for stage in stages for i in round_]
        backwards = [Action(BACKWARD, stage, i) for round_ in rounds for stage in reversed(stages) for i in round_]
        orders.append(_in_turns(forwards, backwards, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1))
    return with_messages("interleaved 1F1B", orders)


def _in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then backward and forward in turns, then the backwards that are left."""
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + number : ahead + number + 1]]
    return order


def forwards_of(schedule: Schedule) -> Schedule:
    """Each rank's forwards in their order, with the messages that they take: evaluation, and nothing to simulate."""
    orders = [[action for action in actions if action.kind == FORWARD] for actions in schedule.actions]
    return with_messages("forwards", orders)


def with_messages(name: str, orders: Sequence[Sequence[Action] | str]) -> Schedule:
    """A schedule from the order in which each rank computes: with the sends and receives that this takes.

    orders: for each rank its forwards and backwards, as actions, or as text, the way schedules print: "F0" on rank s is
    of stage s, "F0@2" of stage 2.

    All ranks are played in step, one computation a beat. What a beat has made for another rank is sent at once, and
    its receive is put into the receiver's list at the same beat. So all messages have one order that every rank's list
    keeps: no two ranks can wait for each other's messages.

    Raises ValueError for a computation that is missing or doubled, for a stage on two ranks, and when no rank can go
    on.

    >>> print(with_messages("mine", ["F0 F1 B0 B1", "F0 B0 F1 B1"]))
    mine: 2 stages, 2 micro-batches
    rank 0  F0 F1 B0 B1
    rank 1  F0 B0 F1 B1
    """
    orders = [read_order(order, rank) if isinstance(order, str) else order for rank, order in enumerate(orders)]
    ranks_of, micro_batches = _stages_in(orders)
    lists: list[list[Action]] = [[] for _ in orders]
    waiting = [list(reversed(order)) for order in orders]
    there: set[Action] = set()  # what has been computed, and on its stage's rank what has arrived
    while any(waiting):
        ready = [rank for rank, order in enumerate(waiting) if order and not _missing(order[-1], ranks_of, there)]
        if not ready:
            stuck = [
                f"rank {rank} waits with {order[-1]} for {_missing(order[-1], ranks_of, there)[0]}"
                for rank, order in enumerate(waiting)
                if order
            ]
            raise ValueError(
                f"expected orders in which every computation's turn comes, found ranks that cannot go on: "
                f"{'; '.join(stuck)}; move what is waited for forward"
            )
        beat = [(rank, waiting[rank].pop()) for rank in ready]
        for rank, action in beat:
            lists[rank].append(action)
        for rank, action in beat:
            there.add(action)
            kind = SEND_ACTIVATION if action.kind == FORWARD else SEND_GRADIENT
            send = Action(kind, action.stage, action.micro_batch)
            if send.peer_stage in ranks_of and ranks_of[send.peer_stage] != rank:
                lists[rank].append(send)
                lists[ranks_of[send.peer_stage]].append(send.counterpart)
    return Schedule(name, micro_batches, tuple(ranks_of[s] for s in range(len(ranks_of))), tuple(map(tuple, lists)))


def read_order(text: str, stage: int) -> list[Action]:
    """Computations from text: "F0 B0" of this stage, "F0@2" of stage 2. Raises ValueError for other words."""
    order = []
    for word in text.split():
        found = re.fullmatch(r"([FB])(\d+)(?:@(\d+))?", word)
        if not found:
            raise ValueError(f"expected F or B and a micro-batch, as in F0 or B3@2, found {word!r}")
        kind, micro_batch, at = found.groups()
        order.append(Action(FORWARD if kind == "F" else BACKWARD, int(at or stage), int(micro_batch)))
    return order


def _stages_in(orders: Sequence[Sequence[Action]]) -> tuple[dict[int, int], int]:
    """Stage → rank, and how many micro-batches there are, if every stage computes each of them once."""
    ranks_of: dict[int, int] = {}
    found: set[Action] = set()
    for rank, order in enumerate(orders):
        for action in order:
            if action.kind not in COMPUTATIONS:
                raise ValueError(f"expected forwards and backwards only, found {action} on rank {rank}; take it out")
            if ranks_of.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"expected stage {action.stage} on one rank, found {action} on rank {rank} and others on rank "
                    f"{ranks_of[action.stage]}; move them together"
                )
            if action in found:
                raise ValueError(f"expected each computation once, found {action} twice on rank {rank}; take one out")
            found.add(action)
    micro_batches = max((action.micro_batch for action in found), default=-1) + 1
    kinds = COMPUTATIONS if any(action.kind == BACKWARD for action in found) else (FORWARD,)
    for stage in range(max(ranks_of, default=-1) + 1):
        if stage not in ranks_of:
            raise ValueError(f"expected stages 0 to {max(ranks_of)}, found stage {stage} on no rank; give it to one")
        for wanted in (Action(kind, stage, i) for i in range(micro_batches) for kind in kinds):
            if wanted not in found:
                raise ValueError(f"expected {wanted} on rank {ranks_of[stage]}, found none; put it in")
    return ranks_of, micro_batches


def _missing(action: Action, ranks_of: dict[int, int], there: set[Action]) -> list[Action]:
    """The computations without which this one cannot begin, and that are not there."""
    needs = []
    if action.kind == BACKWARD:
        needs.append(Action(FORWARD, action.stage, action.micro_batch))
    near = action.stage + (1 if action.kind == BACKWARD else -1)
    if near in ranks_of:
        needs.append(Action(action.kind, near, action.micro_batch))
    return [need for need in needs if need not in there]
