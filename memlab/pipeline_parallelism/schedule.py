"""A schedule is data: for each rank, what it does, in order.

A model is cut by its depth into stages. A micro-batch goes forward through all stages and then backward through all; a
schedule says in which order each rank takes the micro-batches' turns:

    gpipe                       F0 F1 F2 F3 … B0 B1 B2 B3           all forwards, then all backwards
    one_forward_one_backward    F0 F1 B0 F2 B1 F3 B2 … B3           1F1B: a backward as soon as there is one
    interleaved                 each rank has several stages, far apart: the first micro-batch is through sooner

What stage s has computed, stage s + 1 needs: `with_messages` puts the sends and receives between the computations.
Nothing here runs anything. The same schedule is checked (`checking`), drawn and timed (`simulator`), and executed by real
ranks (`runtime`).

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (PipeDream-2BW's 1F1B, Megatron-LM's interleaved), section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"
SEND_ACTIVATION, RECEIVE_ACTIVATION = "send activation", "receive activation"
SEND_GRADIENT, RECEIVE_GRADIENT = "send gradient", "receive gradient"
KINDS = (FORWARD, BACKWARD, SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT)
COMPUTATIONS = (FORWARD, BACKWARD)
SENDS = (SEND_ACTIVATION, SEND_GRADIENT)
_SHORT = dict(zip(KINDS, ("F", "B", "send F", "receive F", "send B", "receive B"), strict=True))


@dataclass(frozen=True)
class Action:
    """One thing a rank does: `kind` for micro-batch `micro_batch` of stage `stage`.

    A stage's activations go to the stage after it, and come from the one before it; gradients the other way.
    """

    kind: str
    stage: int
    micro_batch: int

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"expected one of {', '.join(KINDS)}, found {self.kind!r}")

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a message."""
        return self.stage + (1 if self.kind in (SEND_ACTIVATION, RECEIVE_GRADIENT) else -1)

    @property
    def counterpart(self) -> Action:
        """Of a send the receive, of a receive the send."""
        return Action(_COUNTERPARTS[self.kind], self.peer_stage, self.micro_batch)

    def __str__(self) -> str:
        return f"{_SHORT[self.kind]}{self.micro_batch} of stage {self.stage}"


_COUNTERPARTS = {
    SEND_ACTIVATION: RECEIVE_ACTIVATION,
    RECEIVE_ACTIVATION: SEND_ACTIVATION,
    SEND_GRADIENT: RECEIVE_GRADIENT,
    RECEIVE_GRADIENT: SEND_GRADIENT,
}


@dataclass(frozen=True)
class Schedule:
    """What every rank does. actions: for each rank, in order. ranks_of_stages: which rank has stage 0, 1, …"""

    name: str
    micro_batches: int
    ranks_of_stages: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.ranks_of_stages)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank has."""
        return [stage for stage, at in enumerate(self.ranks_of_stages) if at == rank]

    def peer(self, action: Action) -> int:
        """The rank at the other end of a message."""
        return self.ranks_of_stages[action.peer_stage]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.stages} stages, {self.micro_batches} micro-batches"]
        for rank, actions in enumerate(self.actions):
            several = len(self.stages_of(rank)) > 1
            turns = [
                f"{_SHORT[a.kind]}{a.micro_batch}" + (f"@{a.stage}" if several else "")
                for a in actions
                if a.kind in COMPUTATIONS
            ]
            lines.append(f"rank {rank}  " + " ".join(turns))
        return "\n".join(lines)


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: every stage keeps every micro-batch's activations.

    >>> print(gpipe(2, 3))
    GPipe: 2 stages, 3 micro-batches
    rank 0  F0 F1 F2 B0 B1 B2
    rank 1  F0 F1 F2 B0 B1 B2
    """
    _positive(stages=stages, micro_batches=micro_batches)
    orders = [
        [Action(kind, stage, i) for kind in COMPUTATIONS for i in range(micro_batches)] for stage in range(stages)
    ]
    return with_messages("GPipe", orders)


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B: stage s begins with stages − s forwards, and from then on each is paid for by a backward.

    >>> print(one_forward_one_backward(2, 3))
    1F1B: 2 stages, 3 micro-batches
    rank 0  F0 F1 B0 F2 B1 B2
    rank 1  F0 B0 F1 B1 F2 B2
    """
    _positive(stages=stages, micro_batches=micro_batches)
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)  # how many are in flight at most
        order = [Action(FORWARD, stage, i) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(Action(BACKWARD, stage, i))
            if ahead + i < micro_batches:
                order.append(Action(FORWARD, stage, ahead + i))
        orders.append(order)
    return with_messages("1F1B", orders)


def interleaved(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with `chunks` stages on each rank: rank r has stages r, r + ranks, …, so the bubble is `chunks` times shorter.

    micro_batches: a multiple of ranks.   Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.
    """
    _positive(ranks=ranks, chunks=chunks, micro_batches=micro_batches)
    if micro_batches % ranks:
        raise ValueError(
            f"expected micro-batches that {ranks} ranks divide, found {micro_batches}; "
            f"pick {-(-micro_batches // ranks) * ranks}"
        )
    turns = micro_batches * chunks
    orders = []
    for rank in range(ranks):

        def turn(kind: str, number: int, rank: int = rank) -> Action:
            round_, place = divmod(number, ranks * chunks)
            chunk = place // ranks if kind == FORWARD else chunks - 1 - place // ranks
            return Action(kind, chunk * ranks + rank, round_ * ranks + place % ranks)

        ahead = turns if chunks == 1 and ranks == 1 else min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, turns)
        order = [turn(FORWARD, number) for number in range(ahead)]
        for number in range(turns):
            order.append(turn(BACKWARD, number))
            if ahead + number < turns:
                order.append(turn(FORWARD, ahead + number))
        orders.append(order)
    return with_messages("interleaved 1F1B", orders)


def forward_only(stages: int, micro_batches: int) -> Schedule:
    """Forwards without backwards: evaluation."""
    _positive(stages=stages, micro_batches=micro_batches)
    return with_messages(
        "forward only", [[Action(FORWARD, stage, i) for i in range(micro_batches)] for stage in range(stages)]
    )


def with_messages(name: str, orders: Sequence[Sequence[Action]]) -> Schedule:
    """A schedule from the order in which each rank computes: with the sends and receives that this takes.

    orders: for each rank its forwards and backwards. All ranks are played in step, one computation a beat. What a beat has made
    for another rank is sent at once, and its receive is put into the receiver's list at the same beat. So all messages have one
    order that every rank's list keeps: no two ranks can wait for each other's messages.

    Raises ValueError when no rank can go on, saying what each one waits for.
    """
    ranks_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    stages = max(ranks_of, default=-1) + 1
    lists: list[list[Action]] = [[] for _ in orders]
    waiting = [list(reversed(order)) for order in orders]
    there: set[Action] = set()  # what has been computed, and on its stage's rank what has arrived
    while any(waiting):
        beat = []
        for rank, order in enumerate(waiting):
            if order and _needs(order[-1], stages) <= there:
                beat.append((rank, order.pop()))
        if not beat:
            stuck = [
                f"rank {rank} waits with {order[-1]} for {next(iter(_needs(order[-1], stages) - there))}"
                for rank, order in enumerate(waiting)
                if order
            ]
            raise ValueError(
                "expected an order in which every computation's turn comes, found one that stops: " + "; ".join(stuck)
            )
        for rank, action in beat:
            lists[rank].append(action)
        for rank, action in beat:
            there.add(action)
            kind = SEND_ACTIVATION if action.kind == FORWARD else SEND_GRADIENT
            send = Action(kind, action.stage, action.micro_batch)
            if send.peer_stage in ranks_of and ranks_of[send.peer_stage] != rank:
                lists[rank].append(send)
                lists[ranks_of[send.peer_stage]].append(send.counterpart)
    micro_batches = max((action.micro_batch for order in orders for action in order), default=-1) + 1
    return Schedule(
        name, micro_batches, tuple(ranks_of.get(stage, 0) for stage in range(stages)), tuple(map(tuple, lists))
    )


def _needs(action: Action, stages: int) -> set[Action]:
    """The computations without which this one cannot begin."""
    needs = set()
    if action.kind == FORWARD and action.stage > 0:
        needs.add(Action(FORWARD, action.stage - 1, action.micro_batch))
    if action.kind == BACKWARD:
        needs.add(Action(FORWARD, action.stage, action.micro_batch))
        if action.stage < stages - 1:
            needs.add(Action(BACKWARD, action.stage + 1, action.micro_batch))
    return needs


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"expected at least one of {name}, found {number!r}")
