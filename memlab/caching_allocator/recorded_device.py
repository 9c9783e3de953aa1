"""A GPU out of a recording: it gives the addresses that the recorded one gave, and is full when that was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memlab.caching_allocator.device import Device
from memlab.caching_allocator.records import Event
from memlab.caching_allocator.start import kind_of_pages

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
        self.held: dict[int, tuple[int, tuple | None]] = {}  # the models' segments: where each ends, and whose alone

    def take(self, nbytes: int) -> int | None:
        """The recorded segment's address, or None where the recorded GPU was full."""
        event = self._next("segment_alloc", nbytes)
        return self._hold(event, nbytes, None) if self.map(nbytes) else None

    def give_back(self, address: int, nbytes: int) -> None:
        """Take a segment back."""
        self.held.pop(address, None)
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
        event = self._next("segment_map", None)
        return self._hold(event, nbytes, event and _pool_of(event))

    def release(self, address: int, nbytes: int) -> None:
        """Take addresses back."""
        self.held.pop(address, None)

    def _next(self, action: str, nbytes: int | None) -> Event | None:
        for event in self.script:
            if event.action == action and nbytes in (None, event.size) and not self._is_held(event):
                return event
        return None

    def _hold(self, event: Event | None, nbytes: int, pool: tuple | None) -> int:
        self._invented += 2**44 * (event is None)
        address = self._invented if event is None else event.address
        self.held[address] = address + nbytes, pool
        return address

    def _is_held(self, event: Event) -> bool:
        """Whether a model, having decided otherwise than the recorded allocator before, still has the addresses.

        Reserved ones count for their own pool alone: how many the recorded allocator reserved, no event says.
        """
        start, stop = event.address, event.address + event.size
        return any(
            at < stop and start < end and pool in (None, _pool_of(event)) for at, (end, pool) in self.held.items()
        )


def _pool_of(event: Event) -> tuple[int, int, str]:
    return event.stream, event.pool, kind_of_pages(event.size)
