"""Swapping activations: what the forward saves leaves for the host or a file, and comes back before backward needs it.

Saved-tensor hooks are the place. Autograd hands `pack` each tensor that an op saves, and gets a handle in its stead; so
nothing keeps the tensor on the device. Backward hands the handle to `unpack`. Between the two stand two questions.

What leaves? The same bytes only once: of a (storage, version) one copy serves all views that lie in it (`footprint`),
so a storage that eight ops save is sent once. Parameters and buffers stay. What is written to after it was saved has
left already, as it was: gradients are right where autograd alone would refuse. (Hooks switch its check off, so for a
tensor that stays it is made here; and for one whose copy a GPU makes beside the computation, until that is awaited.)

When does it come back? Backward asks in the reverse order of saving, so with each tensor that it takes the next ones
are on their way.

Source: Rhu et al. 2016 (vDNN: offload and prefetch in reverse order).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlab.backward import at_end_of_backward, backward_number
from memlab.memory_timeline import in_main_memory
from memlab.mixed_precision.writes import written_to
from memlab.offloading.footprint import footprint, shape_in
from memlab.offloading.pieces import Forward, Handle, Kept, Owned, Piece, Source, is_bytes
from memlab.offloading.store import Store, store_for
from memlab.offloading.unnamed import UnnamedFile
from memlab.units import parse_bytes


def swap_activations(
    to: str | os.PathLike = "cpu",
    *,
    prefetch: int = 2,
    min_bytes: int | str = "4 KiB",
    ram_bytes: int | str = "64 MiB",
) -> Swap:
    """A context for the forward: what it saves for backward leaves the device, and comes back ahead of need.

        swap = swap_activations(to="/fast/disk")
        for x, y in batches:
            with swap:
                loss = model(x, y)
            loss.backward()

    Gradients are the same, bit for bit, as long as each write to a saved tensor is one that its version counts (through
    `.data`, NumPy or a kernel of one's own it is not; nor is F.rrelu's, which saves its noise before it draws it). A
    view with holes, such as x[:, :-1], comes back without them: a kernel may round otherwise then, and a `checkpoint`
    of which it is an argument may save other tensors; give it x[:, :-1].contiguous(). Around `checkpoint`, only inputs
    of checkpointed blocks leave.

    to: "cpu", the host's memory; tensors that are there already stay. Or a folder: bytes go through the host's memory,
      and those that backward wants last spill to an unnamed file there, which is gone when nothing is swapped any more.
    prefetch: how many tensors come back ahead of need. 0: each write and each read is waited for.
    min_bytes: storages below it stay. (A small view of a large storage leaves, alone: so the storage can be freed.)
    ram_bytes: with a folder, the host memory for each device that all goes through, and that is filled first. It is
      made at the first need and kept as long as the swap; with "cpu" it grows by chunks, and is pinned for CUDA.

    Where the file cannot grow, OSError is raised in the forward that saves, at the latest as the context ends. In
    imagined hardware the same tensors leave, to the host's memory, which is imagined too; there is no file.

    Not here: a backward in a fork of the process that ran the forward; it would wait for a thread that is not there.

    Raises ValueError for a prefetch below 0 or no int, OSError if the folder is missing or cannot be written to.
    """
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(f"expected prefetch as a number of tensors, 0 or more; found {prefetch!r}")
    folder = None if to == "cpu" else Path(to)
    if folder is not None:
        UnnamedFile(folder).close()
    return Swap(folder, prefetch, parse_bytes(min_bytes), parse_bytes(ram_bytes))


class Swap:
    """What `swap_activations` returns: a context manager that can be entered for each forward, one after the other.

    Raises RuntimeError where it is entered within itself.
    """

    def __init__(self, folder: Path | None, prefetch: int, min_bytes: int, ram_bytes: int):
        self.folder, self.prefetch, self.min_bytes, self.ram_bytes = folder, prefetch, min_bytes, ram_bytes
        self.elsewhere_bytes = 0  # what is away at present
        self._stores: dict[tuple, Store] = {}  # by device, and by the mode of imagined tensors
        self._known: dict[int, Source] = {}  # by the storage's address, which another may have once it died
        self._owned = Owned()
        self._present: dict[Piece, None] = {}  # pieces that are on the device again, or on their way
        self._forward = Forward()
        self._stack: ExitStack | None = None
        self._task = -1  # the latest backward
        self._lock, self._lost = threading.Lock(), deque()

    @property
    def moved_bytes(self) -> int:
        """What left since the context was last entered."""
        return self._forward.moved_bytes

    @property
    def freed_bytes(self) -> int:
        """What of the device's memory died since then because it had left: storages that backward still wants.

        Less than `moved_bytes` if somebody else holds what left; more if a small view left for a large storage.
        """
        return sum(self._forward.freed)

    def __enter__(self) -> Swap:
        with self._locked():
            if self._stack is not None:
                raise RuntimeError("expected one forward at a time in a swap, found it entered twice; make another")
            self._forget_present()
            self._forward = Forward()
        with ExitStack() as stack:
            stack.enter_context(self._owned)
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind, *_) -> None:
        stack, self._stack = self._stack, None
        stack.close()
        with self._locked():
            self._known.clear()
            try:
                for store in self._stores.values():
                    store.settle()
            except OSError:
                if kind is None:
                    raise
            finally:
                self._close_if_empty()

    # ---- the hooks

    @torch._disable_dynamo
    def _pack(self, tensor: Tensor) -> Kept | Handle:
        """An op saves a tensor: give autograd something to hold instead."""
        if not is_bytes(tensor) or tensor in self._owned or (self.folder is None and in_main_memory(tensor)):
            return Kept(tensor)
        if tensor.untyped_storage().nbytes() < self.min_bytes:
            return Kept(tensor)
        with self._locked():
            piece = self._piece(tensor)
            piece.handles += 1
            return Handle(piece, shape_in(tensor, piece.footprint), self._lose)

    def _piece(self, tensor: Tensor) -> Piece:
        """The piece that covers the tensor: one that left before, or else one of its own, which leaves."""
        storage, wanted = tensor.untyped_storage(), footprint(tensor)
        source = self._known.get(storage._cdata)
        if source is None or source.storage() is not storage:
            source = self._known[storage._cdata] = Source(storage, self._forward)
        for piece in source.pieces:
            if piece.serves(tensor._version, wanted):
                return piece
        piece = Piece(source, tensor, wanted, self._store(tensor), self._forward)
        self._forward.order.append(piece)
        self._forward.moved_bytes += wanted.nbytes
        self.elsewhere_bytes += wanted.nbytes
        source.pieces.append(piece)
        return piece

    @torch._disable_dynamo
    @torch.inference_mode(False)  # backward may be inside one, and versions must count
    def _unpack(self, handle: Kept | Handle) -> Tensor:
        """Backward wants the tensor."""
        if isinstance(handle, Kept):
            return handle.unchanged()
        inside = backward_number() != -1
        with self._locked():
            piece = handle.piece
            if inside:
                self._enter_backward()
            tensor = handle.shape.of(piece.store.take(piece.parcel))
            if piece.parcel.spoilt:
                raise written_to(tensor, "it was while its copy to the host ran")
            if tensor._version != piece.parcel.taken_at:
                raise written_to(tensor, "backward wrote to it, and wants it as it was again")
            piece.waiting = (piece.waiting or piece.handles) - 1
            if inside and piece.waiting and piece.handles > 1:
                self._present[piece] = None
            else:
                self._forget(piece)
            if inside:
                self._bring_ahead(piece)
            return tensor

    def _bring_ahead(self, piece: Piece) -> None:
        """Begin to bring what was saved just before this piece: backward wants it next."""
        ahead = self.prefetch
        for i in range(piece.number - 1, -1, -1):
            if not ahead:
                break
            if (near := piece.order[i]) is not None:
                near.store.bring(near.parcel)
                self._present[near] = None
                ahead -= 1

    def _enter_backward(self) -> None:
        """Once a backward: see to it that its end lets go of what it brought and did not use up."""
        if (task := backward_number()) != self._task:
            self._task = task
            self._forget_present()
            at_end_of_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        with self._locked():
            self._forget_present()

    def _forget_present(self) -> None:
        for piece in list(self._present):
            self._forget(piece)

    def _forget(self, piece: Piece) -> None:
        self._present.pop(piece, None)
        piece.store.forget(piece.parcel)
        piece.waiting = 0

    # ---- keeping house

    def _store(self, tensor: Tensor) -> Store:
        """The store of the tensor's device."""
        key = tensor.device, getattr(tensor, "fake_mode", None)
        if key not in self._stores:
            self._stores[key] = store_for(tensor, self.folder, self.ram_bytes, synchronous=self.prefetch == 0)
        return self._stores[key]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread at a time. A handle may die at any moment, in any thread, so it only says so: see `_lose`."""
        try:
            with self._lock:
                yield
        finally:
            self._end_lost()

    def _lose(self, piece: Piece) -> None:
        """A handle of the piece died: its part of the graph is gone."""
        self._lost.append(piece)
        self._end_lost()

    def _end_lost(self) -> None:
        """End the pieces whose last handle died; if this is not the moment, who holds the lock does it afterwards."""
        while self._lost and self._lock.acquire(blocking=False):
            try:
                while self._lost:
                    piece = self._lost.popleft()
                    piece.handles -= 1
                    if not piece.handles:
                        self._end(piece)
                self._close_if_empty()
            finally:
                self._lock.release()

    def _end(self, piece: Piece) -> None:
        piece.store.drop(piece.parcel)
        self._present.pop(piece, None)
        piece.source.pieces.remove(piece)
        piece.order[piece.number] = None
        self.elsewhere_bytes -= piece.footprint.nbytes

    def _close_if_empty(self) -> None:
        """Outside the context and with nothing elsewhere: no file and no thread."""
        if self._stack is None and not self.elsewhere_bytes:
            for store in self._stores.values():
                store.close()
