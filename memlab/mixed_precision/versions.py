"""Whether somebody wrote to a weight since its step: torch counts each write to a tensor, in its version."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class Versions:
    """How often tensors had been written to when they were noted, and in which storage they were.

    Assigning to a tensor's `data` gives it another storage, and is no write that torch counts. Nothing refers to the
    tensors, not even weakly: torch refuses to swap one that is referred to so (`torch.utils.swap_tensors`).
    """

    def __init__(self):
        self._of: dict[int, tuple[int, int]] = {}  # by id: a tensor's own hash is a function in Python

    def note(self, tensors: Iterable[Tensor]) -> None:
        """From now on they are unchanged."""
        for tensor in tensors:
            self._of[id(tensor)] = tensor._version, tensor.untyped_storage()._cdata

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether nothing that torch counts has written to it since it was noted; False if it never was."""
        return self._of.get(id(tensor)) == (tensor._version, tensor.untyped_storage()._cdata)
