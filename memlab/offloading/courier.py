"""The courier: two threads between the device and the layers' homes, one that brings weights, one that takes gradients.

    model's thread    layer 1 ────────── layer 2 ────────── layer 3 ──────────
    bringing thread   weights of 2       weights of 3       weights of 4           (in backward: 3, 2, 1 …)
    taking thread                        gradients of 1     gradients of 2

Memory is made by the thread that runs the model: what a thread of its own allocated, no meter would see.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from memlab.offloading.homes import FileHome, Home
from memlab.offloading.layout import views_of
from memlab.offloading.slab import pinned_bytes


class Courier:
    """Two threads, each with a stream of its own on a GPU. A context manager; the threads end with it.

    On a GPU they begin when the computation has come to where they were asked (an event), and end when the copy has; so
    whoever waits for them need not think of streams.
    """

    def __init__(self, device: torch.device, imagined: bool):
        self.on_gpu, self.imagined = device.type == "cuda" and not imagined, imagined
        self.up, self.down = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if self.on_gpu else (None, None)
        self.bytes_up = self.bytes_down = None  # pinned, for what passes through on its way to or from a file

    def __enter__(self) -> Courier:
        self._stack = ExitStack()
        self._bringing = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="memlab-bring"))
        self._taking = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="memlab-take"))
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def run(self, function: Callable, *args) -> Any:
        """Call a function, wait, and return what it returns: in the thread, no meter takes a mapped file for memory."""
        if self.on_gpu:
            torch.cuda.synchronize(self.up.device)
        return self._submit(self._bringing, function, *args).result()

    def bring(self, home: Home, flat: Tensor) -> Future:
        """Begin to fill a layer's bytes on the device."""
        if self.on_gpu and isinstance(home, FileHome):
            self.bytes_up = at_least(len(flat), self.bytes_up)
        return self._submit(self._bringing, self._bring, home, flat, self.bytes_up, self._here())

    def take(self, place: Tensor, sent: list[Tensor], add: bool) -> Future:
        """Begin to write a gradient to its place at home, or to add it there. sent: the gradient, alone in a list."""
        if self.on_gpu:
            self.bytes_down = at_least(place.nbytes, self.bytes_down)
        return self._submit(self._taking, self._take, place, sent, add, self.bytes_down, self._here())

    def _here(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.up.device).record_event() if self.on_gpu else None

    def _submit(self, thread: ThreadPoolExecutor, function: Callable, *args) -> Future:
        if not self.imagined:
            return thread.submit(function, *args)
        done: Future = Future()  # imagined tensors belong to one thread, and nothing takes time
        done.set_result(function(*args))
        return done

    def _bring(self, home: Home, flat: Tensor, through: Tensor | None, here: torch.cuda.Event | None) -> None:
        if not self.on_gpu:
            home.read(flat)
            return
        with torch.cuda.stream(self.up):
            self.up.wait_event(here)
            if isinstance(home, FileHome):
                home.read(through[: len(flat)])
                flat.copy_(through[: len(flat)], non_blocking=True)
            else:
                home.read(flat)
        self.up.synchronize()

    def _take(
        self, place: Tensor, sent: list[Tensor], add: bool, through: Tensor | None, here: torch.cuda.Event | None
    ) -> None:
        (gradient,) = sent
        if self.on_gpu:
            (landed,) = views_of(through[: place.nbytes], [place])
            with torch.cuda.stream(self.down):
                self.down.wait_event(here)
                landed.copy_(gradient, non_blocking=True)
            self.down.synchronize()
            gradient = landed
        with torch.no_grad():
            place.add_(gradient) if add else place.copy_(gradient)


def at_least(nbytes: int, pinned: Tensor | None) -> Tensor:
    """Pinned bytes: these, if they are enough, or others."""
    return pinned if pinned is not None and len(pinned) >= nbytes else pinned_bytes(nbytes)
