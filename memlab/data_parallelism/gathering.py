"""Who is gathered when: the unit that is needed and the one that comes next, then nobody.

In the forward a unit is gathered before it runs, and while it runs the next one is on its way; behind it it is freed.
Backward goes through the units again from the last to the first, in the order in which the forward left them behind.
The order is learned in each forward; until then it is the order of registration, and where it is wrong a unit is waited
for, and nothing else.

A unit's backward is through when the gradients of all its inputs are there. Then its weights are freed, and its
gradients leave. A unit whose inputs need no gradient is freed, and reduced, when all of backward is through. So is one
whose input feeds later units, too, as an encoder's output feeds each block of a decoder: its gradient is complete only
behind the last of them.

On a GPU all memory is taken and given back on the stream that computes. c10d's own waits for it when a collective is
called, and `wait()` makes it wait for c10d's: behind that, what is freed is free for whatever is computed next.

Every rank calls the same collectives in the same order, because all of this follows from the program alone: from no
value, no time, and not from what is in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memlab.backward import at_end_of_backward, backward_number
from memlab.data_parallelism.shard import FlatShard, Reduction
from memlab.data_parallelism.unit import Unit


@dataclass(eq=False)
class Call:
    """A forward of a unit. counted: among the unit's calls. passed: the backward that has come through it."""

    unit: Unit
    counted: bool
    passed: int = -1


class Gathering:
    """The units of one model: which are gathered, and whose gradients are on their way."""

    def __init__(self, root: Unit, units: list[Unit]):
        self.root, self.units = root, units
        self.order = list(units)  # in which they were needed in the last forward
        self.left = [*units[1:], *units[:1]]  # in which it left them behind: a root comes first and leaves last
        self.needed_now: list[Unit] = []
        self.left_now: list[Unit] = []
        self.begun: set[Unit] = set()  # whose backward has begun, and whose gradients have not left
        self.at = 0  # the place in the order of the direction
        self.depth = 0  # forwards of units, one inside the other
        self.task = -1  # the backward that is running, or that failed
        self.syncing = True
        self.reducing: deque[tuple[FlatShard, Reduction]] = deque()

    # ---- a unit is needed

    def need(self, unit: Unit) -> None:
        """Have a unit's whole parameters in its modules, and the next unit on its way."""
        backward = backward_number() != -1
        if backward:
            self.when_backward_ends()
        elif not self.depth and not unit.running:
            self.clear()
            unit.refuse_others()
        ahead = self.next_of(unit, backward)
        for other in self.units:
            if other.expected and other is not ahead and other is not unit:
                other.free()
        unit.expected = False
        unit.begin_gathering()
        if ahead is not None and not ahead.gathered:
            ahead.begin_gathering()
            ahead.expected = True
        unit.show()

    def next_of(self, unit: Unit, backward: bool) -> Unit | None:
        """The unit that is expected next."""
        order = self.left[::-1] if backward else self.order
        if backward and unit is self.root and self.at:  # what it returns is an inner unit's, whose hook came first
            unit = order[self.at]
        places = [*range(self.at, len(order)), *range(min(self.at, len(order)))]
        here = next((i for i in places if order[i] is unit), None)
        if here is None:
            return None
        self.at = here
        return next((other for other in order[here + 1 :] if other is not unit), None)

    # ---- forward

    def enter(self, unit: Unit) -> Call:
        """A unit's forward begins."""
        if not unit.shown:  # its pre-hook was passed by: `forward` was called itself
            self.need(unit)
        call = Call(unit, torch.is_grad_enabled() and backward_number() == -1)
        if backward_number() == -1:  # otherwise it is recomputed
            if not self.depth:
                self.needed_now, self.left_now = [], []
            self.needed_now.append(unit)
            unit.due = True
        unit.calls += call.counted
        unit.running += 1
        self.depth += 1
        return call

    def leave(self, unit: Unit, for_backward: bool, failed: bool) -> None:
        """A unit's forward ends. for_backward: there may be a backward, for which some units are kept gathered."""
        self.depth -= 1
        unit.running -= 1
        if backward_number() != -1:
            return  # recomputed, and its backward comes next
        self.left_now.append(unit)
        if not unit.running:
            unit.hide()
            if not for_backward or self.resharded(unit):
                unit.free()
        if self.depth:
            return
        if not failed:
            self.order, self.left = self.needed_now, self.left_now
        self.at = 0
        self.free(unit for unit in self.units if unit.expected or failed or not for_backward)

    def resharded(self, unit: Unit) -> bool:
        """Whether a unit is freed between its forward and its backward. The root is not, unless that is asked for."""
        return unit is not self.root if unit.reshard_after_forward is None else unit.reshard_after_forward

    def free(self, units: Iterable[Unit]) -> None:
        """Free those that are not running."""
        for unit in units:
            if not unit.running:
                unit.free()

    def clear(self) -> None:
        """Before a forward: nothing of an earlier one, or of a backward that failed, is left."""
        if self.task != -1:
            self.task = -1
            self.begun.clear()
            for unit in self.units:
                unit.running = 0
                unit.forget_gradients()
            while self.reducing:
                self.reducing.popleft()[1].work.wait()
        for unit in self.units:
            unit.calls = 0  # of a forward that no backward followed
        self.at = 0
        self.free(self.units)

    # ---- backward

    def when_backward_ends(self) -> None:
        """See to it that all gradients are reduced then, and everything is freed."""
        if self.task != (task := backward_number()):
            self.task, self.at = task, 0
            at_end_of_backward(self.backward_ended)

    def gradient_came(self) -> None:
        """A unit's gradients begin to come: those of the one behind it leave first, so that there is one unit's."""
        self.when_backward_ends()
        self.settle()

    def output_needed(self, call: Call) -> None:
        """The gradient of an output has come: the unit's backward is next."""
        self.begun.add(call.unit)
        self.need(call.unit)

    def passed(self, call: Call) -> None:
        """A call's backward is through. Where a unit was called several times, its gradients leave with the last."""
        if call.passed == (task := backward_number()):
            return
        call.passed, unit = task, call.unit
        self.free([unit])
        unit.calls = max(0, unit.calls - call.counted)
        if not unit.calls and (unit.due or unit in self.begun):  # a recomputed call may pass behind the first
            self.reduce(unit)

    def reduce(self, unit: Unit) -> None:
        """Have a unit's gradients reduced, those that have come: also if none has, for another rank may have some."""
        self.take(unit)
        if self.syncing:
            self.begun.discard(unit)
            unit.due = False
            self.settle()
            for shard in unit.shards:
                if (reduction := shard.begin_reducing()) is not None:
                    self.reducing.append((shard, reduction))

    def take(self, unit: Unit) -> bool:
        """Put the gradients that have come into their flat buffers. Returns whether there are any."""
        for shard in unit.shards:
            for number, p in enumerate(shard.full):
                if p.grad is not None:
                    shard.take(number)
        return any(shard.arrived for shard in unit.shards)

    def settle(self) -> None:
        """Wait for the gradients that are on their way."""
        while self.reducing:
            shard, reduction = self.reducing.popleft()
            shard.finish_reducing(reduction)

    def backward_ended(self) -> None:
        """All gradients are in their parts, and nothing is gathered."""
        self.free(self.units)
        for unit in reversed(self.units):
            if self.take(unit) or unit in self.begun or unit is self.root and unit.due:
                self.reduce(unit)
        self.settle()
        self.begun.clear()
        self.task = -1
