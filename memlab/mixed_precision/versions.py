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
        self._of: dict[int, list] = {}  # by id: a tensor's own hash is a function in Python

    def note(self, tensor: Tensor) -> None:
        """From now on it is unchanged."""
        place = tensor.storage_offset(), tensor.stride()
        self._of[id(tensor)] = [tensor._version, *place, ref(tensor.untyped_storage())]

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """What was just written to these, which were unchanged or have been noted, is no change."""
        for tensor in tensors:
            self._of[id(tensor)][0] = tensor._version

    def unchanged(self, tensors: Iterable[Tensor]) -> list[bool]:
        """Of each, whether nothing that torch counts has written to it since it was noted; False if it never was."""
        noted = self._of.get
        return [
            (its := noted(id(tensor))) is not None
            and its[0] == tensor._version
            and its[1] == tensor.storage_offset()
            and its[2] == tensor.stride()
            and its[3]() is tensor.untyped_storage()
            for tensor in tensors
        ]
