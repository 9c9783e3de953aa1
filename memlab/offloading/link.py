"""The link between a device and the host: copies that run beside the computation, waited for as late as can be.

On CUDA they run on a stream of their own. Two rules make that safe. A copy begins when the computation has come to
where it was asked for (the stream waits for the main stream), so the bytes are there, and whatever used the target's
memory before is over. And before bytes that were copied are used, or the memory they were copied from is let go, the
computation waits for the copy's end (an event). All copies of a device run in one stream, one after the other, so a
piece of host memory may be handed on at once. The source of a copy is held that long: never more than IN_FLIGHT of
them, or the copies would keep the memory that they are to free.

On a CPU a copy is done when the call returns: then its source may be freed or written to at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IN_FLIGHT = 2


class Link:
    """Copies between the host's memory and itself: the interface, and the way of CPU tensors."""

    pinned = False
    last: Any = None  # the mark of the latest copy

    def down(self, source: Tensor, target: Tensor, written_to: Callable[[], None]) -> None:
        """Copy source to target, on the host.

        written_to: called, at the latest by `settle`, if source was written to before the copy was sure to be over.
        """
        target.copy_(source)

    def up(self, source: Tensor, target: Tensor) -> Any:
        """Copy source, on the host, to target. Returns a mark of the copy's end."""
        target.copy_(source)

    def wait(self, mark: Any) -> None:
        """Let the computation wait for a copy's end."""

    def release(self, mark: Any) -> None:
        """Let whoever gets the target's memory next wait for the end of the copy to it."""
        self.wait(mark)

    def uses(self, memory: Tensor) -> None:
        """The computation uses memory that may have been allocated for another stream of the device."""

    def synchronize(self, mark: Any) -> None:
        """Let the calling thread wait for a copy's end."""

    def settle(self, keep: int = 0) -> None:
        """Let the computation wait for all copies down but the last `keep`, and let go of their sources."""


class ImaginedLink(Link):
    """The way of an imagined GPU's tensors: nothing is copied, but what a GPU would hold meanwhile is held."""

    pinned = True

    def __init__(self):
        self._in_flight: deque[Tensor] = deque()

    def down(self, source: Tensor, target: Tensor, written_to: Callable[[], None]) -> None:
        """Copy at once, and hold the source as a GPU would."""
        target.copy_(source)
        self._in_flight.append(source)
        self.settle(IN_FLIGHT)

    def settle(self, keep: int = 0) -> None:
        """Let go of the sources."""
        while len(self._in_flight) > keep:
            self._in_flight.popleft()


class CudaLink(Link):
    """The way of one GPU's tensors. A mark is an event on a stream."""

    pinned = True

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._in_flight: deque[tuple] = deque()

    def down(self, source: Tensor, target: Tensor, written_to: Callable[[], None]) -> None:
        """Copy on the link's stream, and hold the source until the computation waits for that."""
        mark, main = self._copy(source, target), torch.cuda.current_stream(self.device)
        self._in_flight.append((mark, main, source, source._version, written_to))
        self.settle(IN_FLIGHT)

    def up(self, source: Tensor, target: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Stream]:
        """Copy on the link's stream. The mark also names the stream that the target was allocated for."""
        return self._copy(source, target), torch.cuda.current_stream(self.device)

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        main = torch.cuda.current_stream(self.device)  # asked for here: inside the block below it is our own stream
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self.last = self.stream.record_event()
        return self.last

    def wait(self, mark: tuple[torch.cuda.Event, torch.cuda.Stream]) -> None:
        """Let the current stream wait."""
        torch.cuda.current_stream(self.device).wait_event(mark[0])

    def release(self, mark: tuple[torch.cuda.Event, torch.cuda.Stream]) -> None:
        """Let the stream wait to which the allocator gives the memory back."""
        event, main = mark
        main.wait_event(event)

    def uses(self, memory: Tensor) -> None:
        """Tell the allocator of the current stream."""
        memory.record_stream(torch.cuda.current_stream(self.device))

    def synchronize(self, mark: torch.cuda.Event | None) -> None:
        """Let the calling thread wait; None: there was no copy."""
        if mark is not None:
            mark.synchronize()

    def settle(self, keep: int = 0) -> None:
        """Let the streams that made the sources wait, and let go of them."""
        while len(self._in_flight) > keep:
            mark, main, source, version, written_to = self._in_flight.popleft()
            main.wait_event(mark)
            if source._version != version:
                written_to()
