"""A slab: host memory that is allocated once, and handed out in pieces again and again.

A GPU copies at the link's full speed, and while it computes, only to and from *pinned* memory: pages that the system
has promised not to move. Such a promise takes long, and the GPU waits for it (torchtune's issue 2076), so it is asked
for rarely and in large chunks. Which bytes of a chunk are free, a list of gaps says: a piece is cut from the first gap
that holds it, and given back it joins the gaps beside it.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.memory_timeline import main_memory
from memlab.units import MiB, format_bytes

ALIGNMENT = 64  # where PyTorch's CPU allocator begins a tensor, so that kernels work on copies in the same steps


class Gaps:
    """The free bytes of a range that begins at 0.

    >>> gaps = Gaps(256)
    >>> gaps.take(100), gaps.take(64), gaps.take(100)
    (0, 128, None)
    >>> gaps.give(0, 100)
    >>> gaps.take(60), gaps.taken_bytes
    (0, 128)
    """

    def __init__(self, nbytes: int):
        self.free = [(0, nbytes)] if nbytes else []  # (start, nbytes), by start; no two touch
        self.taken_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Where `nbytes`, rounded up to ALIGNMENT, are taken: in the first gap that holds them. None: in no gap."""
        nbytes = rounded(nbytes)
        for i, (start, gap) in enumerate(self.free):
            if gap >= nbytes:
                self.free[i : i + 1] = [(start + nbytes, gap - nbytes)] if gap > nbytes else []
                self.taken_bytes += nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Give back what `take(nbytes)` answered."""
        nbytes = rounded(nbytes)
        self.taken_bytes -= nbytes
        i = sum(other < start for other, _ in self.free)
        if i < len(self.free) and self.free[i][0] == start + nbytes:
            nbytes += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == start:
            before, gap = self.free.pop(i := i - 1)
            start, nbytes = before, gap + nbytes
        self.free.insert(i, (start, nbytes))


class Room(NamedTuple):
    """A piece of a slab. bytes: (nbytes,) of uint8, as they lie in chunk number `chunk` from `start` on."""

    bytes: Tensor
    chunk: int
    start: int


class Slab:
    """Host memory in chunks, made when the first piece is asked for and kept as long as the slab is.

    nbytes: one chunk of this size, and never more. None: one more chunk whenever no gap is large enough. Chunks are
      powers of two, since torch rounds pinned memory up to one.
    pinned: pages that a GPU can copy to and from while it computes. If the system has none left there is one warning,
      and this and all later chunks are ordinary memory: slower, and right.
    """

    CHUNK_BYTES = 64 * MiB

    def __init__(self, nbytes: int | None = None, *, pinned: bool = False):
        self.nbytes, self.pinned = nbytes, pinned
        self._chunks: list[tuple[Tensor, Gaps]] = []

    @property
    def taken_bytes(self) -> int:
        """What is handed out at present, each piece rounded up to ALIGNMENT."""
        return sum(gaps.taken_bytes for _, gaps in self._chunks)

    @property
    def allocated_bytes(self) -> int:
        """The host memory that the slab holds, handed out or not."""
        return sum(memory.numel() for memory, _ in self._chunks)

    def take(self, nbytes: int) -> Room | None:
        """A piece of `nbytes`, or None if a slab of fixed size has no gap for it."""
        for number, (memory, gaps) in enumerate(self._chunks):
            if (start := gaps.take(nbytes)) is not None:
                return Room(memory[start : start + nbytes], number, start)
        if self.nbytes is None:
            self._add(max(self.CHUNK_BYTES, 1 << (nbytes - 1).bit_length()))
        elif not self._chunks and rounded(nbytes) <= self.nbytes:
            self._add(self.nbytes)
        else:
            return None
        return self.take(nbytes)

    def give(self, room: Room) -> None:
        """Give a piece back. Its bytes must not be used any longer."""
        self._chunks[room.chunk][1].give(room.start, room.bytes.numel())

    def _add(self, nbytes: int) -> None:
        with main_memory():
            if self.pinned:
                memory = pinned_bytes(nbytes)
                self.pinned = memory.is_pinned()  # else one warning is enough
            else:
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._chunks.append((memory, Gaps(nbytes)))


def pinned_bytes(nbytes: int) -> Tensor:
    """(nbytes,) of uint8 in pinned memory; in ordinary memory, with a warning, where the system has no more to pin."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        warnings.warn(
            f"expected {format_bytes(nbytes)} of pinned memory, found none ({str(error).splitlines()[0]}); copies go "
            "through ordinary memory, which is slower: offload less, or raise the limit of locked memory (ulimit -l)",
            stacklevel=2,
        )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def rounded(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
