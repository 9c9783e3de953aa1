"""Which op an autograd node is of: nodes are numbered, and the op that one is made for comes right after it.

Each thread numbers the nodes that it makes by itself, from 0. On a GPU backward runs in a thread of autograd's own,
and what a reentrant checkpoint recomputes there gets numbers that nodes of the reader's thread have too. A node does
not say who made it; but whoever calls backward has, as a rule, made the graph. So a node is known here by its number
and, added to that, a large one for the thread that called the backward in which it is evaluated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType

from torch import Tensor
from torch._C import _autograd
from torch.autograd.function import BackwardCFunction

from memlab.memory_timeline.lines import ENGINE

STRETCH = 1 << 48  # more nodes than a thread ever makes


class _LastNumbers(dict):
    """thread → the number that autograd gives its next node there, when its last op was seen; -1 for none yet."""

    def __missing__(self, thread: int) -> int:
        return -1


# An in-place op on a view makes its own node, then CopySlices around it, in the base's graph, then the view's new one.
OTHER, COPY_SLICES, VIEW, FUNCTION = range(4)


class _Kinds(dict):
    """type of a node → which of the four kinds it is of; judged once a type."""

    def __missing__(self, kind: type) -> int:
        if issubclass(kind, BackwardCFunction):
            found = FUNCTION
        else:
            found = {"CopySlices": COPY_SLICES, "AsStridedBackward0": VIEW}.get(kind.__name__, OTHER)
        self[kind] = found
        return found


_KINDS = _Kinds()


class Nodes:
    """The nodes that autograd makes while a meter watches. `thread`: the meter's, whose numbers stay as they are.

    begins: is told, when a backward begins, of the gradients that it was given (None for one of 1).
    """

    def __init__(self, thread: int, begins: Callable[[Iterable[Tensor | None]], None]):
        self._forward_of: dict[int, int] = {}  # a node → the op that came next
        self.functions: dict[int, str] = {}  # the first op of a Function's forward → the Function's name
        self.next_of = _LastNumbers({thread: _autograd._get_sequence_nr()})
        self._stretches = {thread: 0}  # what is added to the numbers of each thread's nodes
        self._added: dict[int, int] = {}  # in each backward, by the number of its task
        self._passed: dict[int, int] = {}  # a node that autograd made before that one → the op, if it has any
        self._thread = self._last = thread
        self._begins = begins

    def made(self, following: int, thread: int, op: int) -> None:
        """Autograd's next node in this thread will have the number `following`: the last one is op number `op`'s."""
        added, last = self._stretch(thread), self.next_of[thread]
        self._forward_of[following - 1 + added] = op
        for passed in range(last if last >= 0 else following, following - 1):
            self._passed[passed + added] = op
        self._last, self.next_of[thread] = thread, following

    def find(self, node, task: int, caller: FrameType | None, thread: int) -> tuple[int, int]:
        """A node's number here and that of its op (-1: nobody saw it).

        It is evaluated in backward number `task`, in `thread`, in which `caller` is the nearest Python frame (or None).
        """
        added = self._added.get(task)
        if added is None:
            caller_of_backward, engine = self._who_called(caller, thread)
            added = self._added[task] = self._stretch(caller_of_backward)
            if engine is not None:
                self._begins(engine.f_locals.get("args", ((),))[0])
        self._last = thread
        return self.look_up(node, added)

    def look_up(self, node, added: int = 0) -> tuple[int, int]:
        """A node's number here and that of its op (-1: nobody saw it), if it was made in the meter's own thread.

        added: if not, the stretch of the thread that made it.
        """
        number, kind = node._sequence_nr() + added, _KINDS[type(node)]
        if kind is COPY_SLICES:
            number -= 1
        op = self._forward_of.get(number)
        if op is None or kind is VIEW:
            op = self._search(node, kind, number, added)
        elif kind is FUNCTION:
            self.functions[op] = type(node).__name__.removesuffix("Backward").strip("_")
        return number, op

    def _search(self, node, kind: int, number: int, added: int) -> int:
        """The op of a node that was not, or not surely, the last before its op; -1 if nobody saw it."""
        if kind is VIEW:
            inner = node.next_functions[0][0]
            if _KINDS[type(inner)] is COPY_SLICES:
                number = inner._sequence_nr() - 1 + added
        op = self._forward_of.get(number, -1)
        if op < 0 and kind is not FUNCTION:  # what follows a Function whose forward has no ops of its own is not its
            op = self._passed.get(number, -1)
        if op < 0 and added:  # a graph that the forward of a Function kept, and whose backward calls this one
            op = self._forward_of.get(number - added, -1)
        return op

    def _stretch(self, thread: int) -> int:
        return self._stretches.setdefault(thread, STRETCH * len(self._stretches))

    def _who_called(self, caller: FrameType | None, thread: int) -> tuple[int, FrameType | None]:
        """The thread that called the backward that evaluates its first node in `thread`, and the engine's frame there.

        No frame where nobody's is known.
        """
        if (engine := _engines(caller)) is not None:
            return thread, engine
        if (engine := _engines(sys._current_frames().get(self._last))) is not None:  # it waits for this one
            return self._last, engine
        return self._thread, None


def _engines(frame: FrameType | None) -> FrameType | None:
    """The nearest frame that runs the engine, at or above this one."""
    while frame is not None and frame.f_code is not ENGINE:
        frame = frame.f_back
    return frame
