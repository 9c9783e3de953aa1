"""A GPU out of a recording: it gives the addresses that the recorded one gave, and is full when that was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memlab.caching_allocator.device import Device
from memlab.caching_allocator.records import Event

TAKES, GIVES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
NOWHERE = 2**60  # where segments lie that only the model asked for


class RecordedDevice(Device):
    """A GPU that says what the recorded one said: this address for a segment of this size, and when it was full.

    `script` are the segment events of the question at hand that are still to come. It was full when the next thing
    that happened there was a release, and after the last when the request was refused.
    """

    def __init__(self):
        super().__init__()
        self.script: deque[Event] = deque()
        self.refuses = False
        self.was_full: Callable[[], None] = lambda: None
        self.peak_bytes, self._invented = 0, NOWHERE

    def take(self, nbytes: int) -> int | None:
        """The recorded segment's address, or None where the recorded GPU was full."""
        address = self._address("segment_alloc", nbytes)
        return address if self.map(nbytes) else None

    def give_back(self, address: int, nbytes: int) -> None:
        """Take a segment back."""
        self.unmap(nbytes)

    def map(self, nbytes: int) -> bool:
        """Put bytes behind addresses; False where the recorded GPU was full."""
        if self.script[0].action in GIVES if self.script else self.refuses:
            self.was_full()
            return False
        if self.script:
            self.script.popleft()
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def unmap(self, nbytes: int) -> None:
        """Take bytes from behind addresses."""
        self.used_bytes -= nbytes
        if self.script and self.script[0].action in GIVES:
            self.script.popleft()

    def reserve(self, nbytes: int) -> int:
        """Where the recorded segment begins."""
        return self._address("segment_map", None)

    def release(self, address: int, nbytes: int) -> None:
        """Nothing to do: addresses are the recording's."""

    def _address(self, action: str, nbytes: int | None) -> int:
        for event in self.script:
            if event.action == action and nbytes in (None, event.size):
                return event.address
        self._invented += 2**44
        return self._invented
