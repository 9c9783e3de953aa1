"""Simulation: a step in which tensors leave the device and come back, worked out without running it.

A step is a list of tensors on one clock, the seconds of arithmetic: each is born, may be away from its last use in
forward until its first use in backward, and is freed. A link takes what was chosen away in the order in which it is let
go, another brings back, of what has left, what is needed first, both beside the arithmetic, which waits in two cases
only: for a tensor that is not back yet, and, under a limit, for room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from memlab.checking import above_0


class Held(NamedTuple):
    """One tensor of a step. Times are seconds of arithmetic since its beginning.

    leaves: its last use in forward, from which on it may be away. needed: its first use in backward. Both None: it
    always stays, such as a weight.
    """

    nbytes: int
    born: float
    freed: float
    leaves: float | None = None
    needed: float | None = None
    name: str = ""

    @property
    def idle_seconds(self) -> float:
        """For how long nobody reads it, between forward and backward; 0 for one that stays."""
        return 0.0 if self.needed is None else self.needed - self.leaves


class Transfer(NamedTuple):
    """One copy: the place of its tensor in the list, "down" (to the host) or "up" (back), and when, with all waits."""

    tensor: int
    way: str
    start: float
    stop: float


class Run(NamedTuple):
    """What a step came to. curve: (second, bytes on the device from then on); stalls: (start, stop) of every wait."""

    step_seconds: float
    stall_seconds: float
    peak_bytes: int
    sent_bytes: int
    transfers: list[Transfer]
    stalls: list[tuple[float, float]]
    curve: list[tuple[float, int]]


BORN, LEAVES, REQUEST, NEEDED, FREED = range(5)


def simulate(
    tensors: Sequence[Held],
    sent: Collection[int],
    bytes_per_second: float,
    *,
    limit_bytes: int | None = None,
) -> Run:
    """Run a step in which `sent` (places in the list) leave the device and come back; a link for each way.

    What was let go leaves, even if by then it is needed again: that is what too much offloading costs. Each is asked
    for just in time: after backward has begun, and as late as all can still be there when needed.

    limit_bytes: what is born waits while it would not fit and something is still leaving, and what comes back ahead of
      its need waits for room. It is a brake and no wall: if nothing is leaving, the peak rises above it.

    Raises ValueError for a bandwidth that is not above 0, and for tensors that may not leave.
    """
    above_0(bytes_per_second=bytes_per_second)
    sent = sorted(set(sent))
    for i in sent:
        if tensors[i].needed is None:
            raise ValueError(f"expected tensors that may leave, found {tensors[i]} at place {i}, which always stays")
    seconds = [tensor.nbytes / bytes_per_second for tensor in tensors]
    requests = _requests(tensors, sent, seconds)
    calendar = [(t.born, BORN, i) for i, t in enumerate(tensors)] + [(t.freed, FREED, i) for i, t in enumerate(tensors)]
    calendar += [(tensors[i].leaves, LEAVES, i) for i in sent] + [(tensors[i].needed, NEEDED, i) for i in sent]
    calendar += [(clock, REQUEST, i) for i, clock in requests.items()]
    device = _Device(tensors, seconds, math.inf if limit_bytes is None else limit_bytes)
    for clock, what, i in sorted(calendar, key=lambda entry: entry[:2]):  # of one moment, requests stay in their order
        device.work_until(clock)
        device.happens(what, i)
    return Run(
        device.now,
        device.waited,
        device.peak,
        sum(tensors[i].nbytes for i in sent),
        device.transfers,
        device.stalls,
        device.curve,
    )


def _requests(tensors, sent, seconds) -> dict[int, float]:
    """When each is asked for, on the clock of the arithmetic: not before backward begins, nor before it was let go."""
    order = sorted(sent, key=lambda i: (tensors[i].needed, i))
    turn = min((t.needed for t in tensors if t.needed is not None), default=0.0)
    found, latest = {}, math.inf
    for i in reversed(order):
        latest = min(latest, tensors[i].needed) - seconds[i]
        found[i] = max(turn, latest, tensors[i].leaves)
    return {i: found[i] for i in order}


class _Device:
    """What is held, what the two links do, and how long the arithmetic has waited."""

    def __init__(self, tensors, seconds, limit: float):
        self.tensors, self.seconds, self.limit = tensors, seconds, limit
        self.now = self.waited = 0.0
        self.held = self.peak = 0
        self.queues = {"down": deque(), "up": deque()}
        self.busy: dict[str, Transfer] = {}
        self.away, self.wanted = set(), None
        self.transfers, self.stalls, self.curve = [], [], []

    def happens(self, what: int, i: int) -> None:
        if what == BORN:
            self.wait(lambda: self.fits(i) or not (self.queues["down"] or "down" in self.busy))
            self.hold(self.tensors[i].nbytes)
        elif what == FREED:
            self.hold(-self.tensors[i].nbytes)
        elif what == NEEDED:
            self.wanted = i  # comes next, whether it fits or not
            self.wait(lambda: i not in self.away)
        else:
            if what == LEAVES:
                self.away.add(i)
            self.queues["down" if what == LEAVES else "up"].append(i)

    def fits(self, i: int) -> bool:
        return self.held + self.tensors[i].nbytes <= self.limit

    def hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        self.curve.append((self.now, self.held))

    def work_until(self, clock: float) -> None:
        """The arithmetic goes on, and the links with it."""
        until = max(self.now, clock + self.waited)
        while self.next_end() <= until:
            self.finish()
        self.now = until

    def wait(self, done: Callable[[], bool]) -> None:
        """The arithmetic stands still until it is done."""
        start = self.now
        while not done():
            self.next_end()
            self.finish()
        if self.now > start:
            self.waited += self.now - start
            self.stalls.append((start, self.now))

    def next_end(self) -> float:
        """Start what can start, and say when the next transfer ends."""
        if "down" not in self.busy and self.queues["down"]:
            self.start("down", self.queues["down"][0])
        asked = [self.wanted, *self.queues["up"]] if self.wanted in self.queues["up"] else self.queues["up"]
        i = next(filter(self.has_left, asked), None)
        if "up" not in self.busy and i is not None and (self.fits(i) or i == self.wanted):
            self.start("up", i)
            self.hold(self.tensors[i].nbytes)
        return min((transfer.stop for transfer in self.busy.values()), default=math.inf)

    def has_left(self, i: int) -> bool:
        return i not in self.queues["down"] and ("down" not in self.busy or self.busy["down"].tensor != i)

    def start(self, way: str, i: int) -> None:
        self.queues[way].remove(i)
        self.busy[way] = Transfer(i, way, self.now, self.now + self.seconds[i])

    def finish(self) -> None:
        """The transfer that ends next ends."""
        way = min(self.busy, key=lambda way: self.busy[way].stop)
        transfer = self.busy.pop(way)
        self.now = transfer.stop
        self.transfers.append(transfer)
        if way == "down":
            self.hold(-self.tensors[transfer.tensor].nbytes)
        else:
            self.away.discard(transfer.tensor)
