"""Which saved tensors leave, what stands in the graph for one, and what of its storage it stands for.

Parameters and buffers stay, which are there anyway, and so do tensors that are more than bytes. Of the others:

    source    a storage that tensors were saved from
    piece     a part of it as it was at one version: it leaves, once
    handle    one saved tensor; several may share a piece

Autograd owns the handles, and a piece ends with its last one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import _global_forward_pre_hooks

from memlab.mixed_precision.writes import written_to
from memlab.offloading.footprint import Footprint, needed
from memlab.offloading.layout import Shape
from memlab.offloading.store import Parcel, Store


class Forward:
    """What left in one forward, in order (None once it is wanted no longer), and the storages that died for it."""

    def __init__(self):
        self.order: list[Piece | None] = []
        self.moved_bytes, self.freed = 0, []


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
    """A part of a storage at one version, that left in a parcel."""

    __slots__ = (
        "footprint",
        "handles",
        "number",
        "order",
        "parcel",
        "source",
        "store",
        "version",
        "waiting",
        "witness",
    )

    def __init__(self, source: Source, tensor: Tensor, footprint: Footprint, store: Store, forward: Forward):
        self.source, self.version, self.footprint, self.store = source, tensor._version, footprint, store
        self.witness = witness_of(tensor)
        self.parcel: Parcel = store.put(needed(tensor, footprint), footprint.nbytes)
        self.order, self.number = forward.order, len(forward.order)  # that left in the same forward, and the place
        self.handles = 0
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

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor.detach(), tensor._version

    def unchanged(self) -> Tensor:
        """The tensor. Raises RuntimeError if it was written to since it was saved."""
        if self.tensor._version != self.version:
            raise written_to(self.tensor, f"it is at version {self.tensor._version}, expected {self.version}")
        return self.tensor


class Owned:
    """A context that notes the storages of parameters and buffers, of each module whose forward begins, before it does.

    Known by their storages, also their views stay: a transposed weight, or one that needs no gradient.
    """

    def __enter__(self) -> Owned:
        self._storages: dict[int, weakref.ref] = {}
        self._walked: weakref.WeakSet[Module] = weakref.WeakSet()
        _global_forward_pre_hooks[f"memlab-owned-{id(self)}"] = self._note  # one name: torch.compile looks at it
        return self

    def __exit__(self, *_) -> None:
        del _global_forward_pre_hooks[f"memlab-owned-{id(self)}"]

    def _note(self, module: Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling() or module in self._walked:
            return
        for each in module.modules():
            self._walked.add(each)
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                if type(tensor) in (Tensor, Parameter, FakeTensor) and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    self._storages[storage._cdata] = weakref.ref(storage)

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether a module owns the tensor's bytes, or it is (a view of) a leaf that wants a gradient."""
        leaf = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        reference = self._storages.get(storage._cdata)
        return (leaf.is_leaf and leaf.requires_grad) or (reference is not None and reference() is storage)


def is_bytes(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory of a CPU or GPU and nothing more.

    So no sparse tensor, no subclass, none with a lazy sign or lazy zeros, none that torch.func wraps. A Parameter is
    more, too: somebody owns it. So is all of a function that is traced (torch.func.linearize) to be run again.
    """
    return (
        type(tensor) in (Tensor, FakeTensor)
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.device.type in ("cpu", "cuda")
        and not (
            tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor()
        )
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
    )
