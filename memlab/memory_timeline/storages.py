"""Which storages are alive: an unknown one that comes with a tensor is a birth, and a weak reference tells its death.

So whoever lets go of a storage last is noticed, nothing is kept alive, and nothing is copied.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from memlab.backward import uncompiled
from memlab.memory_timeline.history import BACKWARD, OPTIMIZER, OUTSIDE, History
from memlab.memory_timeline.lines import BACKWARD_CALLS, ENGINE
from memlab.memory_timeline.ownership import storages_of
from memlab.memory_timeline.whereabouts import Whereabouts
from memlab.memory_timeline.workspace import CPULog, CUDACounters

META = torch.device("meta")
LIFT_FRESH = torch.ops.aten.lift_fresh.default


class _Death(weakref.ref):
    """A weak reference to a storage that still knows its numbers when the storage is gone."""

    __slots__ = ("address", "number")


class Storages:
    """Notes in the history what becomes of storages, each under a number of its own.

    here: where the code is. log: of the allocator, or None. imagined: whether tensors have no real memory behind them.
    """

    def __init__(self, history: History, here: Whereabouts, log: CPULog | CUDACounters | None, *, imagined: bool):
        self.live: dict[int, int] = {}  # a storage's address → its number; addresses are used again after a free
        self._deaths: dict[int, _Death] = {}
        self.history, self.here, self._log, self._imagined = history, here, log, imagined
        self._ops, self._sizes = history.ops, history.sizes

    def forget(self) -> None:
        """What dies from here on dies after the block."""
        self._deaths.clear()

    # ---- births

    def meet(self, tensor: Tensor, op: int, phase: str, line: int) -> None:
        """An op's argument: note that it was read, and that it is there if nobody saw it being born."""
        history = self.history
        for storage in storages_of(tensor):
            number = self.live.get(storage._cdata)
            if number is None:
                fresh = self._ops[op].func is LIFT_FRESH
                if fresh and self._imagined:
                    continue  # the real tensor of which an imagined one is made
                number = self.note(storage, tensor, op, phase, line)
                if number >= 0 and not fresh:  # torch.tensor(...) makes it, and tells later
                    history.owners[number] = OUTSIDE
            else:
                history.last_read[number] = op
                if (forward_op := self._ops[op].forward_op) >= 0 and phase is BACKWARD:
                    history.read_in_backward += (number, forward_op)

    def made(self, result: Tensor, op: int, phase: str, line: int) -> None:
        """An op's result: its storages are new, have another size, or are as they were."""
        for storage in storages_of(result):
            known = self.live.get(storage._cdata)
            if known is None or storage.nbytes() != self._sizes[known]:
                self.note(storage, result, op, phase, line)

    def all_made(self, results: Iterable, op: int, phase: str, line: int) -> None:
        """An op's results, in lists of any depth: all_gather's are in three."""
        for item in results:
            if isinstance(item, Tensor):
                self.made(item, op, phase, line)
            elif isinstance(item, (list, tuple)):
                self.all_made(item, op, phase, line)

    def note(self, storage: UntypedStorage, tensor: Tensor | None, op: int, phase: str, line: int) -> int:
        """Note a storage as op number `op` (-1: before the first) left it. Returns its own number."""
        address = storage._cdata
        number = self.live.get(address)
        nbytes = storage.nbytes()
        if number is None:
            if (storage.device == META and not self._imagined) or is_lazy(tensor) or tensor._is_zerotensor():
                return -1  # a shape, and no bytes
            number = self.live[address] = self.history.born(tensor, nbytes, op, phase, line)
            if self._imagined and hasattr(storage, "in_main_memory"):
                self.history.moved(number, "cpu")
            self._deaths[number] = death = _Death(storage, self.died)
            death.address, death.number = address, number
        else:
            self.history.resized(number, nbytes, op, phase, line)
        if self._log is not None:
            self._log.placed(number, storage.data_ptr(), op)
        return number

    def birthplace(self, args: tuple) -> tuple[int, str] | None:
        """Line and module of the op that made the first argument, a gradient; None if nobody saw that."""
        if args and isinstance(args[0], Tensor):
            for storage in storages_of(args[0]):
                number = self.live.get(storage._cdata)
                if number is not None and (born := self.history.births[number].op) >= 0:
                    return (op := self._ops[born]).line, op.module
        return None

    def given(self, gradients: Iterable[Tensor | None]) -> None:
        """A backward begins with these."""
        for gradient in gradients:
            if isinstance(gradient, Tensor):
                with contextlib.suppress(NotImplementedError):  # what hides its bytes is not counted either
                    numbers = (self.live.get(storage._cdata) for storage in storages_of(gradient))
                    self.history.given.update(number for number in numbers if number is not None)

    # ---- deaths

    @uncompiled
    def died(self, death: _Death) -> None:
        """A storage is gone: note it, under what the code is doing."""
        number = death.number
        if self.live.get(death.address) == number:
            del self.live[death.address]
        caller = sys._getframe().f_back
        if caller is None or caller.f_code is ENGINE:
            phase, line = BACKWARD, self._ops.flat[-4] if len(self._ops) else -1  # by the node evaluated last
        elif self.here.in_torchs_step(caller):
            phase, line = OPTIMIZER, self.here.step_line
        else:
            phase, line = self.here.place(caller)
            if caller is not None and caller.f_code in BACKWARD_CALLS:  # the gradient that backward began with
                phase = BACKWARD
        self.history.resized(number, 0, len(self._ops) - 1, phase, line)
        self._deaths.pop(number, None)

    # ---- what happens without an op

    @uncompiled
    def resized(self, storage: UntypedStorage, resize: Callable[[], UntypedStorage], caller: FrameType):
        """Note a storage's other size under an op of its own, if it is known, or comes to have bytes only now.

        See resizing.py. `resize` does it, and gives the storage that is returned.
        """
        known = storage._cdata in self.live
        if not known and (storage.nbytes() or threading.get_ident() != self.here.thread):
            return resize()
        op, phase, line = self.op_at(caller, "resize_")
        result = resize() if self._log is None else self._log.run(op, resize, (), {})
        with _disable_current_modes():
            tensor = None if known else torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.note(storage, tensor, op, phase, line)
        return result

    def op_at(self, caller: FrameType, name: str) -> tuple[int, str, int]:
        """Note something that is no op of PyTorch's as one. Returns its number, its phase and its line."""
        phase, line = self.here.place(caller)
        self._ops.flat += (name, phase, line, "", -1, -1)
        return len(self._ops) - 1, phase, line

    def op_before(self, caller: FrameType, name: str) -> tuple[int, str, int]:
        """The same, of something that has made what is noted next: in the log, too, it is found there."""
        op, phase, line = self.op_at(caller, name)
        if self._log is not None:
            self._log.run(op, bool, (), {})  # nothing: only its marker
        return op, phase, line
