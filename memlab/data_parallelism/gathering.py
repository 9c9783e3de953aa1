"""Who is gathered when: the unit that is needed and those that come next, then nobody.

In the forward a unit is gathered before it runs, and while it runs the next ones are on their way; behind it it is
freed. Backward goes through the units again from the last to the first, in the order in which the forward left them
behind, and as each one's backward is through its gradients leave. The order is learned in each forward; until then it
is the order of registration, and where it is wrong a unit is waited for, and nothing else.

Autograd takes the latest nodes first. So a unit's backward is through when the gradients of all its inputs are there,
and also when that of a unit's output is there which was left before this one was entered: of an input that goes to many
units, as an encoder's output does, the gradient is there only behind the last of them.

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
    """A forward of a unit. calls: all within one forward of the root, or of what else was called, as they were entered.

    first: the units that it is the first of these to use. In backward it is the last, and completes their gradients.
    """

    unit: Unit
    calls: list[Call]
    first: set[Unit]
    before: int = 0  # how many of the calls had been entered before it
    after: int = 0  # and how many when it was left
    needed: int = -1  # the backward in which the gradient of an output has come
    passed: int = -1  # the backward that has come through


class Gathering:
    """The units of one model: which are gathered, and whose gradients are on their way."""

    def __init__(self, root: Unit, units: list[Unit]):
        self.root, self.units = root, units
        self.order = list(units)  # in which they were needed in the last forward
        self.left = [*units[1:], *units[:1]]  # in which it left them behind: a root comes first and leaves last
        self.needed_now: list[Unit] = []
        self.left_now: list[Unit] = []
        self.calls: list[Call] = []
        self.used: set[Unit] = set()  # in these calls
        self.open: list[Call] = []  # whose backward has begun, and is not through
        self.put_off: set[Unit] = set()  # those of which a call was passed that is not the first
        self.at = 0  # the place in the order of the direction
        self.depth = 0  # forwards of units, one inside the other
        self.task = -1  # the backward that is running, or that failed
        self.syncing = True
        self.reducing: deque[tuple[FlatShard, Reduction]] = deque()

    # ---- a unit is needed

    def need(self, unit: Unit) -> None:
        """Have a unit's whole parameters in its modules, and the next units on their way."""
        backward = backward_number() != -1
        if backward:
            self.when_backward_ends()
        elif not self.depth and not unit.running:
            self.clear()
            unit.refuse_others()
        ahead = self.ahead_of(unit, backward)
        together = [unit, *unit.owners]
        for other in self.units:
            if other.expected and other not in ahead and other not in together:
                other.free()
        for each in together:
            each.expected = False
            each.begin_gathering()
        for each in ahead:
            if not each.gathered:
                each.begin_gathering()
                each.expected = True
        for each in together:
            each.show()

    def ahead_of(self, unit: Unit, backward: bool) -> list[Unit]:
        """The units that are expected next."""
        order = self.left[::-1] if backward else self.order
        if backward and unit is self.root and self.at:  # what it returns is an inner unit's, whose hook came first
            unit = order[self.at]
        places = [*range(self.at, len(order)), *range(min(self.at, len(order)))]
        here = next((i for i in places if order[i] is unit), None)
        if here is None:
            return []
        self.at = here
        ahead: list[Unit] = []
        for other in order[here + 1 :]:
            if len(ahead) == unit.prefetch:
                break
            if other is not unit and other not in ahead:
                ahead.append(other)
        return ahead

    # ---- forward

    def enter(self, unit: Unit) -> Call:
        """A unit's forward begins."""
        if not unit.shown:  # its pre-hook was passed by: `forward` was called itself
            self.need(unit)
        together = [unit, *unit.owners]
        if backward_number() == -1:
            if not self.depth:
                self.needed_now, self.left_now, self.calls, self.used = [], [], [], set()
            self.needed_now.append(unit)
            unit.due = True
            call = Call(unit, self.calls, {each for each in together if each not in self.used}, len(self.calls))
            self.calls.append(call)
            if torch.is_grad_enabled():
                self.used.update(together)
        else:  # recomputed
            call = Call(unit, [], set(together))
        self.depth += 1
        for each in together:
            each.running += 1
        return call

    def leave(self, call: Call, for_backward: bool, failed: bool) -> None:
        """A unit's forward ends. for_backward: there may be a backward, for which some units are kept gathered."""
        unit, call.after = call.unit, len(call.calls)
        self.depth -= 1
        for each in (unit, *unit.owners):
            each.running -= 1
        if backward_number() != -1:
            return  # recomputed, and its backward comes next
        self.left_now.append(unit)
        for each in (unit, *unit.owners):
            if not each.running:
                each.hide()
                if not for_backward or self.resharded(each):
                    each.free()
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
            self.put_off.clear()
            self.open.clear()
            for unit in self.units:
                unit.running = 0
                unit.forget_gradients()
            while self.reducing:
                self.reducing.popleft()[1].work.wait()
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
        """The gradient of an output has come: the unit's backward is next, and those entered after it are through."""
        if call.needed != (task := backward_number()):
            call.needed = task
            for later in [one for one in self.open if one.needed == task and one.calls is call.calls]:
                if later.before >= call.after:
                    self.passed(later)
            self.open.append(call)
        self.need(call.unit)

    def passed(self, call: Call) -> None:
        """A call's backward is through. A unit stays for one around that uses its parameters, as in a checkpoint."""
        if call.passed == (task := backward_number()):
            return
        call.passed = task
        if call in self.open:
            self.open.remove(call)
        for unit in (call.unit, *call.unit.owners):
            if not unit.running and not any(other.shown and unit in other.owners for other in self.units):
                unit.free()
            if unit in call.first:
                self.reduce(unit, due=True)
            else:
                self.put_off.add(unit)

    def reduce(self, unit: Unit, due: bool) -> None:
        """Have a unit's gradients reduced, those that have come. Its weights are freed before they are put together.

        due: also if none has come here since the unit's forward: they may have come on another rank, which would wait.
        """
        for shard in unit.shards:
            for number, p in enumerate(shard.full):
                if p.grad is not None:
                    shard.take(number)
        if not self.syncing or not (due and unit.due or any(shard.arrived for shard in unit.shards)):
            return
        unit.due = False
        self.settle()
        for shard in unit.shards:
            if (reduction := shard.begin_reducing()) is not None:
                self.reducing.append((shard, reduction))
        if unit.prefetch == 0:
            self.settle()

    def settle(self) -> None:
        """Wait for the gradients that are on their way."""
        while self.reducing:
            shard, reduction = self.reducing.popleft()
            shard.finish_reducing(reduction)

    def backward_ended(self) -> None:
        """All gradients are in their parts, and nothing is gathered."""
        self.free(self.units)
        for unit in reversed(self.units):
            self.reduce(unit, due=unit is self.root or unit in self.put_off)
        self.put_off.clear()
        self.open = [call for call in self.open if call.needed != self.task]
        self.settle()
        self.task = -1
