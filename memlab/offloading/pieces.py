"""What stands in the graph for a saved tensor, and what of its storage it stands for.

A *source* is a storage that tensors were saved from, a *piece* a part of it as it was at one version, a *handle* one
saved tensor, of which several may share a piece. Autograd owns the handles: the piece ends with its last one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from memlab.offloading.choice import Forward, Record
from memlab.offloading.footprint import Footprint
from memlab.offloading.layout import Shape
from memlab.offloading.store import Parcel, Store


class Source:
    """A storage from which one forward saves, by weak reference, and the pieces of it that are alive.

    If the storage dies before they do, it was freed because they had left, and the forward is told so.
    """

    __slots__ = ("__weakref__", "pieces", "storage")

    def __init__(self, storage: torch.UntypedStorage, forward: Forward):
        this, nbytes = weakref.ref(self), storage.nbytes()

        def died(_reference: weakref.ref) -> None:
            source = this()
            if source is not None and any(piece.handles for piece in source.pieces):
                forward.freed.append(nbytes)

        self.storage = weakref.ref(storage, died)
        self.pieces: list[Piece] = []


class Piece:
    """A part of a storage at one version: in a parcel, or, without one, where it was."""

    __slots__ = (
        "footprint",
        "handles",
        "number",
        "order",
        "parcel",
        "record",
        "source",
        "store",
        "version",
        "waiting",
        "witness",
    )

    def __init__(self, source: Source, tensor: Tensor, footprint: Footprint, record: Record):
        self.source, self.version, self.footprint, self.record = source, tensor._version, footprint, record
        self.witness = witness_of(tensor)
        self.parcel: Parcel | None = None
        self.store: Store | None = None
        self.order: list[Piece | None] = []  # that left in the same forward; this one is at place `number`
        self.number = self.handles = 0
        self.waiting = 0  # while it is on the device again: the handles that backward has not come to

    def serves(self, version: int, wanted: Footprint) -> bool:
        """Whether a tensor of this version and footprint can be made from it: nobody has written there since."""
        return self.witness._version == self.version == version and self.footprint.covers(wanted)


def witness_of(tensor: Tensor) -> Tensor:
    """A tensor without bytes, whose version goes on with this one's.

    Not a storage has a version but a tensor with its views: `x.data` counts from 0 again, whatever x has counted.
    """
    witness = tensor.detach()
    witness.data = witness.new_empty(0)
    return witness


class Handle:
    """One saved tensor that left."""

    __slots__ = ("lose", "piece", "shape")

    def __init__(self, piece: Piece, shape: Shape, lose: Callable[[Piece], None]):
        self.piece, self.shape, self.lose = piece, shape, lose

    def __del__(self):
        self.lose(self.piece)


class Kept:
    """One that stays, with its version: where there are hooks, autograd itself compares none.

    Detached: an op's own result, saved by it, would hold the graph that holds it, and neither could ever be freed.
    """

    __slots__ = ("record", "tensor", "version")

    def __init__(self, tensor: Tensor, record: Record | None = None):
        self.tensor, self.version, self.record = tensor.detach(), tensor._version, record

    def unchanged(self) -> Tensor:
        """The tensor. Raises RuntimeError if it was written to since it was saved."""
        if self.tensor._version != self.version:
            raise written_to(self.tensor, f"it is at version {self.tensor._version}, expected {self.version}")
        return self.tensor


def written_to(tensor: Tensor, found: str) -> RuntimeError:
    """What autograd raises, too, for a tensor that changed after it was saved."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"{tuple(tensor.shape)} of {tensor.dtype} was saved for backward and written to afterwards ({found}); use an "
        "op that is not in place, or save a clone"
    )
