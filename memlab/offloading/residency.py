"""Who is on the device: the layer that is needed now and those that are needed next, and no other.

The same rule in every direction: when a layer is needed, all that are neither it nor expected next give their bytes
back, and then those that are missing take theirs. So at no moment there are more than 1 + prefetch, whatever the model
does with its layers. What is expected is what came next the last time; if that was wrong, a layer is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

import torch
from torch import Tensor, nn

from memlab.backward import backward_number
from memlab.offloading.courier import Courier
from memlab.offloading.homes import Home
from memlab.offloading.layout import flat_bytes, views_of
from memlab.offloading.twins import Twin, sent_to


class StreamedLayer:
    """One layer: its parameters, one range of bytes for them on the device, and their twins at home."""

    def __init__(self, number: int, module: nn.Module, parameters: list[nn.Parameter]):
        self.number, self.module, self.parameters = number, module, parameters
        self.nbytes = flat_bytes(parameters)
        self.trained = sum(p.requires_grad for p in parameters)
        self.watched: set[int] = set()  # the parameters whose gradients are caught, by their places
        self.calls = 0  # that are running
        self.home: Home | None = None
        self.gradient_home: Home | None = None
        self.arriving: Future | None = None  # None: not on the device
        self.version = -1  # of what is on the device, as `written` counts
        self.stale = False  # whether somebody may have written to the twins' `.data` since

    def move_in(self, home: Home, twins: dict[nn.Parameter, Twin], device: torch.device, courier: Courier) -> None:
        """Send the weights home, to twins there, and give the parameters a storage on the device that is empty."""
        self.twins, self.counting = courier.run(sent_to, home, self.parameters, twins)
        self.home = home
        for twin in self.twins:
            twin.layer = self
        for p in self.parameters:
            p.data = p.data.new_empty(0)  # lets go of the bytes that are at home before others are asked for
        self.flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        for p, view in zip(self.parameters, views_of(self.flat, self.twins), strict=True):
            p.data = view
        self.flat.untyped_storage().resize_(0)

    def move_out(self, own: Callable[[Tensor], Tensor]) -> None:
        """Give the parameters memory of their own again, with the weights and gradients that are at home.

        own: makes it, a copy of its argument.
        """
        gradients = [twin.grad for twin in self.twins]
        for twin in self.twins:
            twin.layer = None
        try:
            for p, twin, gradient in zip(self.parameters, self.twins, gradients, strict=True):
                p.data = own(twin.data)
                p.grad = None if gradient is None else own(gradient)
                twin.grad = None
                if p.device == twin.device:
                    twin.data = p.data  # so whoever holds the twin does not hold its home
        except BaseException:
            for p, twin in zip(self.parameters, self.twins, strict=True):
                p.data = twin.data  # there is no room but at home
            raise
        self.home = self.gradient_home = None

    @property
    def written(self) -> int:
        """How often the twins were written to."""
        return sum([twin._version for twin in self.counting])

    @property
    def current(self) -> bool:
        """Whether its weights are on the device or on their way there, and nobody has written to the twins since."""
        return self.arriving is not None and not self.stale and self.version == self.written

    def send_writes(self, courier: Courier) -> None:
        """Send home what a forward wrote to weights on the device, as an Embedding with max_norm does.

        Not counted at home (hence `.data`), where nothing is newer than on the device.
        """
        for number, (p, twin) in enumerate(zip(self.parameters, self.twins, strict=True)):
            if p._version != self.writes[number]:
                courier.run(twin.detach().data.copy_, p.detach())
                self.writes[number] = p._version

    def begin_arriving(self, courier: Courier) -> None:
        """Take the device's bytes again, and have them filled."""
        self.empty()
        self.flat.untyped_storage().resize_(self.nbytes)
        self.version, self.stale = self.written, False
        self.writes = [p._version for p in self.parameters]
        self.arriving = courier.bring(self.home, self.flat)

    def empty(self) -> None:
        """Give the device's bytes back."""
        if self.arriving is not None:
            wait([self.arriving])
            self.arriving = None
            self.flat.untyped_storage().resize_(0)


def resident_bytes(layer_bytes: Sequence[int], prefetch: int = 1) -> int:
    """The most bytes of weights on the device, of layers of these bytes: the largest 1 + prefetch that are neighbours.

    While backward runs, the layers' gradients take as much again at the most.

    >>> resident_bytes([10, 30, 20, 5]), resident_bytes([10, 30, 20, 5], prefetch=0)
    (50, 30)
    """
    return max((sum(layer_bytes[i : i + 1 + prefetch]) for i in range(len(layer_bytes))), default=0)


Moment = tuple[str, StreamedLayer]
"""A layer is needed, and why: in the "forward", in "inference" (a forward without gradients), in "backward", for a
"recompute" of the forward inside backward, or for "loading" weights from outside."""


class Residency:
    """The layers' weights on the device, and their gradients that are still there while they leave."""

    def __init__(self, courier: Courier, prefetch: int):
        self.courier, self.prefetch = courier, prefetch
        self.layers: list[StreamedLayer] = []
        self.now: Moment | None = None
        self.after: dict[Moment, Moment] = {}
        self.leaving: deque[tuple[StreamedLayer, Future, list[Tensor]]] = deque()

    def need(self, layer: StreamedLayer, why: str) -> None:
        """Have the layer's weights on the device, and the next ones on their way there."""
        at = why, layer
        if at == self.now and layer.current:
            return
        if self.now is not None and self.now != at:
            self.after[self.now] = at
        self.now = at
        ahead = self.expected(at)
        for other in self.layers:
            if not other.calls and other is not layer and other not in ahead:
                other.empty()
        if backward_number() != -1:
            self.settle(self.prefetch)
        for each in (layer, *ahead):
            if not each.current:
                each.begin_arriving(self.courier)
        try:
            layer.arriving.result()
        except BaseException:
            self.empty()
            raise

    def expected(self, at: Moment) -> list[StreamedLayer]:
        """The layers that will be needed next: those that came next the last time, or else the neighbours."""
        ahead, seen, layer = [], {at}, at[1]
        while len(ahead) < self.prefetch:
            at = self.after.get(at) or self.neighbour(*at)
            if at is None or at in seen:
                break
            seen.add(at)
            if at[1] is not layer and at[1] not in ahead:
                ahead.append(at[1])
        return ahead

    def neighbour(self, why: str, layer: StreamedLayer) -> Moment | None:
        """What comes next in a stack of layers: up in the forward, then down in backward."""
        step = {"forward": 1, "inference": 1, "backward": -1}.get(why, 0)
        if 0 <= layer.number + step < len(self.layers) and step:
            return why, self.layers[layer.number + step]
        return ("backward", layer) if why in ("forward", "recompute") else None

    def empty(self) -> None:
        """Nothing is needed for a while."""
        self.now = None
        for layer in self.layers:
            layer.empty()

    def take(self, layer: StreamedLayer, number: int, gradient: Tensor) -> None:
        """Begin to add a gradient to the twin's at home. It may be on its way while the next layers are computed."""
        twin = layer.twins[number]
        add = twin.grad is not None
        if not add:
            twin.grad = self.courier.run(views_of, layer.gradient_home.flat, layer.twins)[number]
        sent = [gradient]  # the thread holds the list, and lets go of the gradient when its work is done
        self.leaving.append((layer, self.courier.take(twin.grad, sent, add), sent))
        if self.prefetch == 0 or sum(each is layer for each, *_ in self.leaving) == len(layer.watched):
            self.settle(self.prefetch)

    def settle(self, layers: int) -> None:
        """Wait for the gradients that are on their way, but for those of the last few layers. Raises what failed."""
        last = list(dict.fromkeys(layer for layer, *_ in reversed(self.leaving)))[:layers]
        while self.leaving and self.leaving[0][0] not in last:
            _, arrival, sent = self.leaving.popleft()
            error = arrival.exception()  # waits
            sent.clear()
            if error is not None:
                with suppress(Exception):
                    self.settle(0)  # the others are worth nothing without it
                raise error
