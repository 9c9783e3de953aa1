"""What the exercises of chapter 09 share: a stand-in for the host's memory that keeps count of what it is given."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong


class Parcel:
    """A tensor's bytes elsewhere, with its shape and the order of its strides."""

    def __init__(self, tensor: Tensor):
        self._values = tensor.detach().numpy().copy(order="K")
        self.nbytes = self._values.nbytes


class Host:
    """Memory elsewhere, which no meter of tensors sees. Parcels are there for as long as somebody has them."""

    def __init__(self):
        self.moved_bytes, self.held_bytes = 0, 0

    def send(self, tensor: Tensor) -> Parcel:
        """A copy of a tensor, elsewhere. Raises Wrong for what is no tensor."""
        if not isinstance(tensor, Tensor):
            raise Wrong(f"expected host.send to get a tensor, found {type(tensor).__name__}.")
        parcel = Parcel(tensor)
        self.moved_bytes += parcel.nbytes
        self.held_bytes += parcel.nbytes
        weakref.finalize(parcel, self._gone, parcel.nbytes)
        return parcel

    def fetch(self, parcel: Parcel) -> Tensor:
        """A new tensor, of the same values, shape and strides. Raises Wrong for what is no parcel."""
        if not isinstance(parcel, Parcel):
            raise Wrong(f"expected host.fetch to get what host.send returned, found {type(parcel).__name__}.")
        return torch.from_numpy(parcel._values).clone()

    def _gone(self, nbytes: int) -> None:
        self.held_bytes -= nbytes
