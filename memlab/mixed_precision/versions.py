"""Whether somebody wrote to a weight since its step: torch counts each write to a tensor, in its version."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor


class Versions:
    """How often tensors had been written to when they were noted, and in which storage they were.

    Assigning to a tensor's `data` gives it another storage, or another place in it, and is no write that torch counts.
    A storage is referred to weakly, since the address of one that is gone is soon another's; a tensor not even weakly:
    torch refuses to swap one that is referred to so (`torch.utils.swap_tensors`).
    """

    def __init__(self):
        self._of: dict[int, tuple] = {}  # by id: a tensor's own hash is a function in Python

    def note(self, tensors: Iterable[Tensor]) -> None:
        """From now on they are unchanged."""
        for tensor in tensors:
            place = tensor.storage_offset(), tensor.stride()
            self._of[id(tensor)] = tensor._version, place, ref(tensor.untyped_storage())

    def unchanged(self, tensors: Iterable[Tensor]) -> list[bool]:
        """Of each, whether nothing that torch counts has written to it since it was noted; False if it never was."""
        noted = self._of.get
        return [
            (its := noted(id(tensor))) is not None
            and its[0] == tensor._version
            and its[1] == (tensor.storage_offset(), tensor.stride())
            and its[2]() is tensor.untyped_storage()
            for tensor in tensors
        ]
