"""The monitor's thread: it calls something every so often, until it is told to stop or nobody holds it any more."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

REST = 1000  # what is slow rests for 1000 times as long as it took: a thousandth of the time
SLOW_SECONDS = 20e-6


class Sample(NamedTuple):
    """One look: seconds since the start, steps done by then, and the bytes of each level that was seen."""

    seconds: float
    step: int
    figures: dict[str, int]


class Pace:
    """How long to leave something alone that was done: long where it is slow.

    The least of the last three times counts, so that one at which Python collected garbage does not.
    """

    def __init__(self):
        self._took: deque[float] = deque([0.0], maxlen=3)

    def rest(self, took_seconds: float) -> float:
        """It took so many seconds of processor time. Returns for how many seconds to leave it alone."""
        self._took.append(took_seconds)
        least = min(self._took)
        return least * REST if least > SLOW_SECONDS else 0.0


class Sampler:
    """A thread that calls `look(owner)` every `every` seconds, less often where that takes long.

    look: returns the seconds of processor time that it took; raises nothing. The thread holds the owner only while it
    looks. So an owner that nobody else holds is collected, and the thread ends.
    """

    def __init__(self, owner: object, look: Callable[[object], float], every: float):
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(owner), look, every, self._stop),
            name="memlab monitor",
            daemon=True,
        )
        weakref.finalize(owner, _end, self._stop, os.getpid())

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End the thread after what it is doing. Returns whether it ended within `timeout` seconds."""
        self._stop.set()
        if self._thread.ident is None or threading.current_thread() is self._thread:
            return True  # in the thread itself, when it collects an abandoned loop: it ends after this look
        self._thread.join(timeout)
        return not self._thread.is_alive()


def _run(owner: weakref.ref, look: Callable[[object], float], every: float, stop: threading.Event) -> None:
    pace, pause = Pace(), every
    while not stop.wait(pause):
        held = owner()
        if held is None:
            return
        pause = max(every, pace.rest(look(held)))
        del held


def _end(stop: threading.Event, pid: int) -> None:
    if os.getpid() == pid:  # in a fork the event's lock may be held for ever
        stop.set()
