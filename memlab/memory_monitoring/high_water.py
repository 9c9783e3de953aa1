"""High-water marks that a process has only one of, shared by everyone who reads them.

Linux keeps the most pages that a process ever had (VmHWM), PyTorch the most bytes of its allocator on each GPU. Both
can be set back, so a step can have a peak of its own that no sampling misses. But there is one mark a process: whoever
sets it back takes it from all others. So nobody sets it back alone. Before that, all who read this mark are told how
high it stands, and each keeps the most that it was told since it last asked:

    the mark        ──/\\───set back──/\\/\\──set back──
    monitor A                 asks                        hears the higher of both stretches when it asks next
    monitor B       asks                   asks           has heard what stood there when A asked

The table of marks is global state because the marks are: one a process. It is empty when nobody watches.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable


class Reader:
    """One who reads a mark: `heard` is the most since it last asked, by level, in bytes."""

    def __init__(self):
        self.heard: dict[str, int] = {}


class HighWater:
    """A mark, and who reads it. look: the marks by level, in bytes. set_back: lets them begin again at the present."""

    def __init__(self, look: Callable[[], dict[str, int]], set_back: Callable[[], object]):
        self._look, self._set_back = look, set_back
        self._readers: tuple[Reader, ...] = ()  # replaced, never changed: a reader may go while another is told
        self._lock = threading.RLock()

    def join(self, reader: Reader) -> None:
        """A reader more, to whom the mark begins now. Raises what looking and setting back raise."""
        with self._lock:
            self._readers += (reader,)
            self.take(reader)

    def take(self, reader: Reader) -> dict[str, int]:
        """The most since this reader asked last, by level; the mark begins again, after all others were told."""
        with self._lock:
            marks = self.tell()
            self._set_back()
            heard, reader.heard = reader.heard, {}
        return {level: max(mark, heard.get(level, 0)) for level, mark in marks.items()}

    def tell(self) -> dict[str, int]:
        """Look, and let every reader hear it: before anybody sets the mark back."""
        with self._lock:
            marks = self._look()
            for reader in self._readers:
                for level, mark in marks.items():
                    reader.heard[level] = max(mark, reader.heard.get(level, 0))
            return marks

    def alone(self, function: Callable):
        """Call a function while nobody else looks at the mark."""
        with self._lock:
            return function()

    def leave(self, reader: Reader) -> bool:
        """One reader less. Returns whether that was the last."""
        with self._lock:
            self._readers = tuple(one for one in self._readers if one is not reader)
            return not self._readers


class _Table:
    def __init__(self):
        self.lock, self.marks = threading.RLock(), {}


_tables: dict[int, _Table] = {}  # by process: a fork has marks, and locks that nobody holds, of its own


def join_mark(name: str, make: Callable[[], HighWater], owner: object) -> tuple[HighWater, Reader, Callable[[], None]]:
    """This process's mark of that name, made if nobody reads it yet; a reader of it; and a function by which it goes.

    The reader goes with the owner at the latest. Raises what `make`, looking and setting back raise.
    """
    pid, reader = os.getpid(), Reader()
    table = _tables.setdefault(pid, _Table())

    def leave() -> None:
        if os.getpid() != pid:  # in a fork, in which the lock may be held for ever
            return
        with table.lock:
            mark = table.marks.get(name)
            if mark is not None and mark.leave(reader):
                del table.marks[name]

    weakref.finalize(owner, leave).atexit = False
    try:
        with table.lock:
            mark = table.marks.get(name) or make()
            table.marks[name] = mark
            mark.join(reader)
        return mark, reader, leave
    except BaseException:
        leave()
        raise
