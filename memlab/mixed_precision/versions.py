"""Whether somebody wrote to a weight since its step: torch counts each write to a tensor, in its version."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

from torch import Tensor


class Versions:
    """How often tensors had been written to when they were noted; what is noted of a tensor goes with it."""

    def __init__(self):
        self._of: dict[int, int] = {}  # by id: a tensor's own hash is a function in Python, and takes as long as an op
        self._alive: dict[int, weakref.ref] = {}

    def note(self, tensors: Iterable[Tensor]) -> None:
        """From now on they are unchanged."""
        for tensor in tensors:
            number = id(tensor)
            if number not in self._of:
                self._alive[number] = weakref.ref(tensor, functools.partial(self._forget, number))
            self._of[number] = tensor._version

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether nothing that torch counts has written to it since it was noted; False if it never was."""
        return self._of.get(id(tensor)) == tensor._version

    def _forget(self, number: int, _: weakref.ref) -> None:
        del self._of[number], self._alive[number]
