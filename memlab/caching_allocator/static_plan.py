"""A static plan: with all lifetimes known beforehand, every request gets its address before the program runs.

A request is a rectangle: from the event of its malloc to that of its free, and as high as its bytes. To plan is to
shift the rectangles up and down, none over another, until the pile is low. No pile is lower than the most bytes alive
at one moment, and to find the lowest is NP-hard (Garey & Johnson 1979, "dynamic storage allocation"). But to place one
rectangle after the other, each as low as it goes, and to keep the best of several orders, comes close.

    arena = PlannedArena(plan(requests(meter.timeline)))   # one call to the device, of arena.reserved_bytes

Compilers plan so (XLA, TVM, torch.compile's inductor): they know the program. Its price: another program, or the same
with another batch, needs another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from memlab.caching_allocator.managers import Block, Manager, Ranges, aligned
from memlab.caching_allocator.trace import FREE, Trace


class Lifetime(NamedTuple):
    """One request: its id in the trace, its bytes, and the events of its malloc and its free (the trace's end)."""

    id: int
    nbytes: int
    start: int
    stop: int


def lifetimes(trace: Trace) -> list[Lifetime]:
    """Every request of a trace, in the order of the mallocs. Raises ValueError and TypeError where `replay` does.

    >>> lifetimes([(7, 100), (8, 50), (7, FREE)])
    [Lifetime(id=7, nbytes=100, start=0, stop=2), Lifetime(id=8, nbytes=50, start=1, stop=3)]
    """
    found: list[Lifetime] = []
    live: dict[int, int] = {}
    for event, (name, nbytes) in enumerate(trace):
        if type(nbytes) is not int:
            raise TypeError(f"event {event}: expected a request in whole bytes, as an int, or FREE; found {nbytes!r}")
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
    names the order of placing that won. `events` is how many the trace has: a request whose lifetime stops there is
    never freed.
    """

    requests: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    order: str
    events: int

    @property
    def peak_bytes(self) -> int:
        """The arena's size: where the highest request ends."""
        return max(
            (offset + aligned(r.nbytes) for r, offset in zip(self.requests, self.offsets, strict=True)), default=0
        )

    @property
    def lower_bound_bytes(self) -> int:
        """The most that the program had requested at one moment."""
        return most_alive(self.requests)

    @property
    def aligned_bound_bytes(self) -> int:
        """The same with every request rounded up to 512 B."""
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

    Raises ValueError or TypeError for a trace that `replay` refuses, and ValueError without an order.
    """
    if not orders:
        raise ValueError(f"expected at least one order, such as {next(iter(ORDERS))!r}, found none")
    requests = tuple(lifetimes(trace))
    best = None
    for name, key in orders.items():
        order = sorted(range(len(requests)), key=lambda i: key(requests[i]))
        found = Plan(requests, tuple(place(requests, order)), name, len(trace))
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
    """An allocator that takes the plan's bytes at once, searches nothing, and serves the planned program only.

    Every malloc and free must come as in the trace, in its order: what differs raises ValueError. After the last event
    what is left may be freed.
    """

    def __init__(self, plan: Plan):
        super().__init__(plan.peak_bytes)
        self.plan = plan
        self.reserved_bytes = plan.peak_bytes
        self._holes = Ranges()
        if plan.peak_bytes:
            self._holes.add(0, plan.peak_bytes)
        self._blocks: list[Block | None] = []  # in the order of the mallocs
        self._event = 0
        events = ((event, i) for i, r in enumerate(plan.requests) for event in (r.start, r.stop))
        self._due = {event: i for event, i in events if event < plan.events}  # event → request

    def malloc(self, nbytes: int) -> Block | None:
        """The block at the planned address. Raises ValueError for another request than the planned one."""
        i = self._due.get(self._event)
        if i != len(self._blocks) or nbytes != self.plan.requests[i].nbytes:
            raise ValueError(self._other(f"a request of {nbytes!r} B"))
        block = super().malloc(nbytes)
        self._blocks.append(block)
        self._event += 1
        return block

    def free(self, block: Block | None) -> None:
        """Give the planned block back. Raises ValueError for another one."""
        i = self._due.get(self._event)
        if i is not None and (i == len(self._blocks) or self._blocks[i] is not block):
            raise ValueError(self._other(f"the free of {block!r}"))
        super().free(block)
        self._event += 1

    def _take(self, nbytes: int) -> tuple[int, int]:
        offset = self.plan.offsets[len(self._blocks)]
        self._holes.remove(offset, offset + aligned(nbytes))
        return offset, aligned(nbytes)

    def _give_back(self, address: int, size: int) -> None:
        self._holes.add(address, address + size)

    def _other(self, found: str) -> str:
        i = self._due.get(self._event)
        expected = "nothing more"
        if i is not None:
            expected = f"{'a request' if i == len(self._blocks) else 'the free'} of {self.plan.requests[i].nbytes:,} B"
        return (
            f"event {self._event}: expected {expected}, as in the trace that was planned, found {found}; a static plan "
            "serves one program on one shape of batch: make another with plan(trace)"
        )

    @property
    def largest_free_bytes(self) -> int:
        """The largest part of the arena that nothing lies in."""
        return self._holes.largest
