"""A static plan: with all lifetimes known beforehand, every request gets its address before the program runs.

A request is a rectangle: from the event of its malloc to that of its free, and as high as its bytes. To plan is to shift
the rectangles up and down, none over another, until the pile is low. No pile is lower than the most bytes alive at one
moment, and finding the lowest is NP-hard (Garey & Johnson 1979, dynamic storage allocation); but to place one rectangle
after the other, each as low as it goes, in the best of several orders, comes within a percent on a training step.

    arena = PlannedArena(plan(requests(meter.timeline)))   # one call to the device, of arena.reserved_bytes

Compilers plan so (XLA, TVM, torch.compile's inductor): they know the program. Its price: another program, or the same
with another batch, needs another plan.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from memlab.caching_allocator.managers import Block, Manager, Ranges, aligned
from memlab.caching_allocator.trace import FREE, Trace
from memlab.units import format_bytes


class Lifetime(NamedTuple):
    """One request: its id in the trace, its bytes, and the events of its malloc and its free (the trace's end)."""

    id: int
    nbytes: int
    start: int
    stop: int


def lifetimes(trace: Trace) -> list[Lifetime]:
    """Every request of a trace, in the order of the mallocs. Raises ValueError where `replay` does.

    >>> lifetimes([(7, 100), (8, 50), (7, FREE)])
    [Lifetime(id=7, nbytes=100, start=0, stop=2), Lifetime(id=8, nbytes=50, start=1, stop=3)]
    """
    found: list[Lifetime] = []
    live: dict[int, int] = {}
    for event, (name, nbytes) in enumerate(trace):
        if nbytes < FREE or (nbytes == FREE) != (name in live):
            raise ValueError(
                f"event {event}: expected a malloc of 0 bytes or more under a free id, or one FREE of an id in use; "
                f"found {name!r}, {nbytes}"
            )
        if nbytes == FREE:
            i = live.pop(name)
            found[i] = found[i]._replace(stop=event)
        else:
            live[name] = len(found)
            found.append(Lifetime(name, nbytes, event, len(trace)))
    return found


def most_alive(requests: Iterable[Lifetime], size: Callable[[int], int] = int) -> int:
    """The most bytes alive at one moment, each request counted as `size(nbytes)`: no arena can be smaller."""
    changes = [change for r in requests for change in ((r.stop, -size(r.nbytes)), (r.start, size(r.nbytes)))]
    return max(accumulate(delta for _, delta in sorted(changes)), default=0)


@dataclass(frozen=True)
class Plan:
    """An address for every request of a trace, in the order of the mallocs.

    `peak_bytes` is the arena's size. `lower_bound_bytes` is the most that the program had requested at one moment,
    `aligned_bound_bytes` the same with every request rounded up to 512 B: what this plan could reach at best. `order`
    names the order of placing that won.
    """

    requests: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    order: str

    @property
    def peak_bytes(self) -> int:
        return max(
            (offset + aligned(r.nbytes) for r, offset in zip(self.requests, self.offsets, strict=True)), default=0
        )

    @property
    def lower_bound_bytes(self) -> int:
        return most_alive(self.requests)

    @property
    def aligned_bound_bytes(self) -> int:
        return most_alive(self.requests, aligned)


ORDERS: dict[str, Callable[[Lifetime], tuple]] = {
    "largest first": lambda r: (-r.nbytes, r.start),
    "largest first, of equals the one freed last": lambda r: (-r.nbytes, -r.stop),
    "longest first": lambda r: (r.start - r.stop, -r.nbytes),
    "largest area first": lambda r: (r.nbytes * (r.start - r.stop), r.start),
    "as they come": lambda r: (r.start,),
    "backwards in time": lambda r: (-r.stop,),
}


def plan(trace: Trace, orders: dict[str, Callable[[Lifetime], tuple]] = ORDERS) -> Plan:
    """The lowest pile that placing in one of `orders` gives; the first of equals. Stops at one that cannot be beaten.

    Raises ValueError for a trace that `replay` refuses, and without an order.
    """
    if not orders:
        raise ValueError(f"expected at least one order, such as {next(iter(ORDERS))!r}, found none")
    requests = tuple(lifetimes(trace))
    best = None
    for name, key in orders.items():
        found = Plan(
            requests, tuple(place(requests, sorted(range(len(requests)), key=lambda i: key(requests[i])))), name
        )
        if best is None or found.peak_bytes < best.peak_bytes:
            best = found
        if best.peak_bytes == best.aligned_bound_bytes:
            break
    return best


def place(requests: tuple[Lifetime, ...], order: Iterable[int]) -> list[int]:
    """Offsets of the requests, placed in that order: each at the lowest multiple of 512 B where it overlaps nothing.

    What is in a request's way are the addresses taken at any moment of its life. They are kept in a binary tree over
    the events, in which a lifetime is O(log n) nodes: its own, that cover it without overlap.
    """
    leaves = 1 << max((r.stop for r in requests), default=1).bit_length()
    covering = [Ranges() for _ in range(2 * leaves)]  # taken during all of a node's events
    within = [Ranges() for _ in range(2 * leaves)]  # taken during some of them
    offsets = [0] * len(requests)
    for i in order:
        size = aligned(requests[i].nbytes)
        if not size:
            continue
        nodes = _nodes(requests[i].start + leaves, requests[i].stop + leaves)
        above = {node >> k for node in nodes for k in range(1, node.bit_length())}
        taken = [piece for node in nodes for piece in within[node].ranges]
        taken += [piece for node in above for piece in covering[node].ranges]
        offset = 0
        for start, stop in sorted(taken):
            if start - offset >= size:
                break
            offset = max(offset, stop)
        offsets[i] = offset
        for node in nodes:
            covering[node].add(offset, offset + size)
        for node in above.union(nodes):
            within[node].add(offset, offset + size)
    return offsets


def _nodes(left: int, right: int) -> list[int]:
    """The fewest nodes that cover the leaves left … right − 1 of a binary tree whose node n has children 2n, 2n + 1."""
    nodes = []
    while left < right:
        if left & 1:
            nodes.append(left)
            left += 1
        if right & 1:
            right -= 1
            nodes.append(right)
        left, right = left >> 1, right >> 1
    return nodes


class PlannedArena(Manager):
    """An allocator that has the plan's bytes from the start, searches nothing, and serves the planned program only.

    Every malloc and free must come as in the trace, in its order: what differs raises ValueError.
    """

    def __init__(self, plan: Plan):
        super().__init__(plan.peak_bytes)
        self.plan = plan
        self.reserved_bytes = plan.peak_bytes
        self._event = self._next = 0
        self._stops: dict[Block, int] = {}
        self._holes = Ranges()
        if plan.peak_bytes:
            self._holes.add(0, plan.peak_bytes)

    def malloc(self, nbytes: int) -> Block:
        requests = self.plan.requests
        planned = requests[self._next] if self._next < len(requests) else None
        if planned is None or (planned.start, planned.nbytes) != (self._event, nbytes):
            raise ValueError(self._other(f"a request of {nbytes:,} B"))
        block = super().malloc(nbytes)
        self._stops[block] = planned.stop
        self._next += 1
        self._event += 1
        return block

    def free(self, block: Block) -> None:
        if block in self._stops and self._stops[block] != self._event:
            raise ValueError(self._other(f"a free of {block.requested:,} B"))
        super().free(block)
        del self._stops[block]
        self._event += 1

    def _take(self, nbytes: int) -> tuple[int, int]:
        offset = self.plan.offsets[self._next]
        self._holes.remove(offset, offset + aligned(nbytes))
        return offset, aligned(nbytes)

    def _give_back(self, address: int, size: int) -> None:
        self._holes.add(address, address + size)

    def _other(self, found: str) -> str:
        for r in self.plan.requests:
            if self._event in (r.start, r.stop):
                expected = f"{'a request' if self._event == r.start else 'the free'} of {r.nbytes:,} B"
                break
        else:
            expected = "nothing more"
        return (
            f"event {self._event}: expected {expected}, as in the trace that was planned, found {found}; "
            "a static plan serves one program with one shape of batch: plan the other one too"
        )

    @property
    def largest_free_bytes(self) -> int:
        return self._holes.largest
