"""Sizes that change without an op: `UntypedStorage.resize_` passes by every dispatch mode.

FSDP frees and refills parameters with it. So the method itself is replaced while somebody watches. Several may, in
several threads, and end in any order: a patch that another lies on only stops watching, and goes with that one.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import UntypedStorage

_ONE_AT_A_TIME = threading.Lock()

Resized = Callable[[UntypedStorage, Callable[[], UntypedStorage], FrameType], UntypedStorage]
"""Is told of a storage that is about to have another size, of what does it, and of the frame that asks for it."""


@contextmanager
def watch_resizing(resized: Resized) -> Iterator[None]:
    """In the block every `resize_` of a storage, by any thread, goes through `resized`, which does and returns it."""
    below = UntypedStorage.resize_  # another one's, or the one that is inherited

    def resize_(storage: UntypedStorage, *args) -> UntypedStorage:
        if not resize_.watching:
            return below(storage, *args)
        return resized(storage, functools.partial(below, storage, *args), sys._getframe().f_back)

    with _ONE_AT_A_TIME:
        resize_.watching, resize_.below = True, vars(UntypedStorage).get("resize_")
        UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        _stop(resize_)


def _stop(resize_) -> None:
    """Take the patch off if it lies on top, and those under it that have waited for it."""
    with _ONE_AT_A_TIME:
        resize_.watching = False
        while (top := vars(UntypedStorage).get("resize_")) is not None and not getattr(top, "watching", True):
            if top.below is None:
                del UntypedStorage.resize_
            else:
                UntypedStorage.resize_ = top.below
