"""The link between a GPU and main memory: two streams, one each way, and pinned memory that is allocated once.

A copy runs beside the CPU's work only if its host side is pinned (page-locked), so that the GPU's copy engine may read
and write it by itself. Pinning is slow, so two buffers each way are pinned once and take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memlab.offloading.layout import laid_out
from memlab.offloading.slab import pinned_bytes

LINKED = ("cuda",)
"""Device types with streams and pinned memory."""


class HostLinks:
    """A link to each device that can have one, made when it is first asked for."""

    def __init__(self):
        self._links: dict[torch.device, HostLink] = {}

    def to(self, tensor: Tensor) -> HostLink | None:
        """The link to the device that a tensor is on, if that device has streams."""
        if tensor.device.type not in LINKED:
            return None
        if tensor.device not in self._links:
            self._links[tensor.device] = HostLink(tensor.device)
        return self._links[tensor.device]


class HostLink:
    """Copies down from a device and up to it, each way in its own stream, through two buffers that take turns."""

    def __init__(self, device: torch.device):
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._events: dict[tuple[str, int], torch.cuda.Event] = {}
        self._turns = {"down": 0, "up": 0}

    def follow(self) -> None:
        """Let both ways wait for what the device has been told so far: it makes gradients, it reads weights."""
        current = torch.cuda.current_stream(self.device)
        self.down.wait_stream(current)
        self.up.wait_stream(current)

    def bring(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begin to copy tensors down. Returns their places in pinned memory, and the event to synchronize with."""
        key, places = self._places("down", tensors)
        with torch.cuda.stream(self.down):
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
            self._events[key] = self.down.record_event()
        return places, self._events[key]

    def fall(self, tensor: Tensor, place: Tensor) -> torch.cuda.Event:
        """Begin to copy a tensor down to a place of yours; its memory is not used again before that is over."""
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down):
            place.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.down)
            return self.down.record_event()

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy tensors of the host to those of the device, cast on the way, and don't wait."""
        key, places = self._places("up", targets)
        torch._foreach_copy_(places, list(sources))
        with torch.cuda.stream(self.up):
            for place, target in zip(places, targets, strict=True):
                target.copy_(place, non_blocking=True)
            self._events[key] = self.up.record_event()

    def finish(self) -> None:
        """Nothing is on its way down any more, and whatever the device is told next finds what is on its way up."""
        self.down.synchronize()
        torch.cuda.current_stream(self.device).wait_stream(self.up)

    def _places(self, way: str, tensors: Sequence[Tensor]) -> tuple[tuple[str, int], list[Tensor]]:
        """Pinned memory for these tensors, in the buffer whose turn it is, when its last copy is over."""
        key = way, self._turns[way]
        self._turns[way] ^= 1
        if key in self._events:
            self._events.pop(key).synchronize()
        shapes, nbytes = laid_out(tensors)
        if key not in self._buffers or self._buffers[key].nbytes < nbytes:
            self._buffers.pop(key, None)
            self._buffers[key] = pinned_bytes(nbytes)
        return key, [shape.of(self._buffers[key]) for shape in shapes]
