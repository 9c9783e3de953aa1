"""Who is on the device: the layer that is needed now and those that are needed next, and no other.

The same rule in every direction: when a layer is needed, all that are neither it nor expected next give their bytes
back, and then those that are missing take theirs. So at no moment there are more than 1 + prefetch, whatever the model
does with its layers. Expected are the neighbours in the stack; if that is wrong, a layer is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from torch import Tensor

from memlab.backward import backward_number
from memlab.offloading.courier import Courier
from memlab.offloading.layout import views_of
from memlab.offloading.twins import StreamedLayer


def resident_bytes(layer_bytes: Sequence[int], prefetch: int = 1) -> int:
    """The most bytes of weights on the device, of layers of these bytes: the largest 1 + prefetch that are neighbours.

    While backward runs, the layers' gradients take as much again at the most.

    >>> resident_bytes([10, 30, 20, 5]), resident_bytes([10, 30, 20, 5], prefetch=0)
    (50, 30)
    """
    return max((sum(layer_bytes[i : i + 1 + prefetch]) for i in range(len(layer_bytes))), default=0)


class Residency:
    """The layers' weights on the device, and their gradients that are still there while they leave."""

    def __init__(self, courier: Courier, prefetch: int):
        self.courier, self.prefetch = courier, prefetch
        self.layers: list[StreamedLayer] = []
        self.now: tuple[StreamedLayer, str] | None = None
        self.leaving: deque[tuple[StreamedLayer, Future, list[Tensor]]] = deque()

    def need(self, layer: StreamedLayer, why: str) -> None:
        """Have the layer's weights on the device, and the next ones on their way there.

        why: "inference" (a forward without gradients), "forward", or "backward", which may run forwards again.
        """
        if self.now == (layer, why) and layer.current:
            return
        self.now = layer, why
        ahead = self.expected(layer, why)
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

    def expected(self, layer: StreamedLayer, why: str) -> list[StreamedLayer]:
        """The layers that will be needed next: up in a forward, down in backward."""
        above, below = self.layers[layer.number + 1 :], self.layers[: layer.number][::-1]
        return {"inference": above, "forward": above + below, "backward": below}[why][: self.prefetch]

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
        if self.prefetch == 0 or sum(each is layer for each, *_ in self.leaving) == layer.trained:
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
