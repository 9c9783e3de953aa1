"""Pace: how long copies take, and how long the computation works between two of them. A GPU tells only afterwards."""

from __future__ import annotations

from collections import deque
from typing import Any

from memlab.offloading.link import Link


class Pace:
    """The mean of some seconds, of which a GPU tells only later how many they were."""

    def __init__(self, link: Link):
        self.link, self.count, self.total = link, 0, 0.0
        self._begun: Any = None
        self._open: deque[tuple] = deque(maxlen=64)

    def add(self, seconds: float) -> None:
        """So long it took once more."""
        self.count, self.total = self.count + 1, self.total + seconds

    def between(self, begin: Any, end: Any) -> None:
        """As long as lies between two moments, if the link knows them."""
        if begin is not None:
            self._open.append((begin, end))

    def begin(self) -> None:
        """It begins, at this point of the computation."""
        self._begun = self.link.now()

    def end(self) -> None:
        """It ends, if it had begun."""
        self.between(self._begun, self.link.now())
        self._begun = None

    def pause(self) -> None:
        """What has begun does not count."""
        self._begun = None

    def mean(self) -> float | None:
        """Seconds, of all that is known by now; None if nothing is."""
        while self._open and (seconds := self.link.seconds(*self._open[0])) is not None:
            self._open.popleft()
            self.add(seconds)
        return self.total / self.count if self.count else None
