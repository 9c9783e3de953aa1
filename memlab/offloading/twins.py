"""The twins: a streamed layer's parameters at home, which an optimizer steps.

A layer's parameters are views of one range of bytes on the device, which is empty between its turns, and their twins
are views of one at home. PyTorch counts the writes to a tensor, so a layer knows whether what is on the device is old.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

import torch
from torch import Tensor, nn

from memlab.offloading.courier import Courier
from memlab.offloading.homes import Home
from memlab.offloading.layout import flat_bytes, views_of


class Twin(nn.Parameter):
    """A parameter at home. `ended` is set with the block."""

    ended = False

    def _get_data(self) -> Tensor:
        if not self.ended:
            raise RuntimeError(
                "expected nobody to take a streamed parameter's .data, to which PyTorch counts no writes (deepcopy and "
                "pickle take it, too); found somebody who did: use .detach(), under torch.no_grad()"
            )
        return super().data

    def _get_grad(self) -> Tensor | None:
        if self.ended:
            raise RuntimeError(
                "expected an optimizer over streamed.parameters() to be used inside its block, where their gradients "
                "are; found one after it, when the model's own parameters have them: make one over model.parameters()"
            )
        return super().grad

    def _set_data(self, value: Tensor) -> None:
        self._get_data()
        nn.Parameter.data.__set__(self, value)

    data = property(_get_data, _set_data)
    grad = property(_get_grad, nn.Parameter.grad.__set__, nn.Parameter.grad.__delete__)


class StreamedLayer:
    """One layer: its parameters, one range of bytes for them on the device, and their twins at home."""

    def __init__(self, number: int, module: nn.Module, parameters: list[nn.Parameter]):
        self.number, self.module, self.parameters = number, module, parameters
        self.nbytes = flat_bytes(parameters)
        self.trained = sum(p.requires_grad or p.grad is not None for p in parameters)
        self.calls = 0  # that are running
        self.home: Home | None = None
        self.gradient_home: Home | None = None
        self.arriving: Future | None = None  # None: not on the device
        self.version = -1  # of what is on the device, as `written` counts

    def move_in(self, home: Home, device: torch.device, courier: Courier) -> None:
        """Send the weights home, to twins there, and give the parameters a storage on the device that is empty."""
        self.home, self.twins = home, courier.run(twins_of, home, self.parameters)
        for p in self.parameters:
            p.data = p.data.new_empty(0)  # lets go of the bytes that are at home before others are asked for
        self.flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        for p, view in zip(self.parameters, views_of(self.flat, self.twins), strict=True):
            p.data = view
        self.flat.untyped_storage().resize_(0)

    def move_out(self, own: Callable[[Tensor], Tensor]) -> None:
        """Give the parameters memory of their own again, with the weights and gradients that are at home.

        own: makes it, a copy of its argument. What it finds no room for stays at home.
        """
        for p, twin in zip(self.parameters, self.twins, strict=True):
            gradient, twin.grad = twin.grad, None
            p.data = twin.detach()
            p.grad = gradient
            twin.ended = True
            twin.data = twin.new_empty(0)  # whoever holds the twin does not hold its home
        self.home = self.gradient_home = None
        for p in self.parameters:
            gradient, p.grad = p.grad, None
            p.data = own(p.data)
            p.grad = None if gradient is None else own(gradient)

    @property
    def written(self) -> int:
        """A count that grows with every write to the twins."""
        return sum([twin._version for twin in self.twins])

    @property
    def current(self) -> bool:
        """Whether its weights are on the device or on their way there, and nobody has written to the twins since."""
        return self.arriving is not None and self.version == self.written

    def begin_arriving(self, courier: Courier) -> None:
        """Take the device's bytes again, and have them filled."""
        self.empty()
        self.flat.untyped_storage().resize_(self.nbytes)
        self.version, self.as_brought = self.written, [p._version for p in self.parameters]
        self.arriving = courier.bring(self.home, self.flat)

    @property
    def written_here(self) -> bool:
        """Whether somebody wrote to the weights on the device."""
        return self.as_brought != [p._version for p in self.parameters]

    def empty(self) -> None:
        """Give the device's bytes back."""
        if self.arriving is not None:
            wait([self.arriving])
            self.arriving = None
            self.flat.untyped_storage().resize_(0)


def twins_of(home: Home, parameters: list[nn.Parameter]) -> list[Twin]:
    """Twins at home with the values of these parameters."""
    twins = []
    for p, place in zip(parameters, views_of(home.flat, parameters), strict=True):
        place.copy_(p.detach())
        twins.append(Twin(place, p.requires_grad))
    return twins
