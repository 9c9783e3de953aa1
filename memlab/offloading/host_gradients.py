"""Gradients that leave in backward: each goes to the host, or on to a file, as soon as it is complete.

A parameter's gradient is complete when autograd has added up all that one backward gives it, long before the others
are: a post-accumulate hook is told. It takes the gradient away, so of all gradients only those that are on their way
are ever on the device. The next backward's is added on the host, in the gradient's own dtype, as `.grad` would be.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.memory_timeline import in_main_memory, main_memory
from memlab.mixed_precision.edges import HALVES
from memlab.offloading.host_link import HostLink, HostLinks
from memlab.offloading.slab import pinned_bytes
from memlab.offloading.state_file import StateFile, StateRegion


class HostGradients:
    """Gradients on the host, by parameter: a mapping `held` to tensors, or to regions of the file.

    links: to the devices that the parameters are on. file: where gradients go on to. in_flight_bytes: how many bytes
    of them may be on their way down at once, beside the last one. clipping: a factor that the step owes them, or None.
    """

    def __init__(self, links: HostLinks, file: StateFile | None, in_flight_bytes: int | None):
        self.held = WeakTensorKeyDictionary()
        self.clipping: Tensor | None = None
        self._links, self._file = links, file
        self._in_flight_bytes = math.inf if in_flight_bytes is None else in_flight_bytes
        self._falling: deque[tuple[torch.cuda.Event, Tensor, Tensor, bool]] = deque()
        self._homes = WeakTensorKeyDictionary()  # parameter → pinned memory or a region, kept from step to step
        self._hooks = WeakTensorKeyDictionary()
        self._finalizer = weakref.finalize(self, _remove, self._hooks)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Take each gradient when it is complete. The hooks do not keep this alive, and go with it."""
        for p in params:
            if p.requires_grad and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(functools.partial(_take, weakref.ref(self)))

    def collect(self, params: Iterable[Tensor]) -> None:
        """Have all gradients of these here: those that nobody watched, and those on their way, too.

        Raises RuntimeError where ranks average what was taken: where a hook on a parameter says so (`averages_ranks`),
        or somebody put a gradient beside the one that backward made, as DistributedDataParallel does.
        """
        self.watch(params)
        for p in params:
            hooks = p._post_accumulate_grad_hooks or {}
            averaged = len(hooks) > 1 and any(getattr(hook, "averages_ranks", False) for hook in hooks.values())
            if averaged or (p.grad is not None and p in self.held):
                raise RuntimeError(
                    "expected gradients that backward alone makes, found some that are averaged over ranks, or written "
                    "to p.grad, when this optimizer has taken its own; use gradients=False, or memlab's fully_shard"
                )
            if p.grad is not None:
                self.take(p)
        while self._falling:
            self._land()

    @torch.no_grad()
    def take(self, p: Tensor) -> None:
        """Move a gradient to the host, and add it to what is there.

        Raises TypeError for a sparse one; RuntimeError if there is none, or if those before it are clipped
        and not stepped.
        """
        if p.grad is None:
            raise RuntimeError(
                "expected a gradient, found that another optimizer with gradients=True has taken it; close() that one"
            )
        if p.grad.is_sparse:
            raise TypeError("expected dense gradients, found a sparse one; use gradients=False, or sparse=False")
        if self.clipping is not None:
            raise RuntimeError(
                "expected step() or zero_grad() after clip_grad_norm_(), found another gradient; clip when all are here"
            )
        gradient, p.grad = p.grad.detach(), None
        with main_memory():
            if self._file is not None and not isinstance(gradient, FakeTensor):
                self._write(p, gradient.to("cpu"))
            elif (link := self._links.to(p)) is not None:
                self._let_fall(link, p, gradient)
            elif p in self.held:
                self.held[p].add_(gradient.to("cpu"))
            else:
                self.held[p] = gradient if in_main_memory(gradient) else gradient.to("cpu", copy=True)

    def loaded(self, p: Tensor) -> Tensor:
        """A parameter's gradient in memory; a copy, if it is in the file."""
        gradient = self.held[p]
        if isinstance(gradient, StateRegion):
            memory = torch.empty(gradient.nbytes, dtype=torch.uint8, device="cpu")
            self._file.read(gradient, memory)
            gradient = gradient.tensors(memory)["gradient"]
        return gradient

    def clip_norm(
        self, params: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """The norm of these parameters' gradients, () in FP32, or FP64 if any are; the step makes it at most max_norm.

        Raises RuntimeError with `error_if_nonfinite`, if it is inf or nan.
        """
        with main_memory():
            norms = [_norm(self.loaded(p), norm_type) for p in params if p in self.held and p.numel()]
            if not norms:
                return torch.zeros((), device="cpu")
            total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
            if error_if_nonfinite and not total.isfinite():
                raise RuntimeError(f"expected gradients of a finite norm, found {total.item()}; skip the step")
            self.clipping = (max_norm / (total + 1e-6)).clamp(max=1.0)
        return total

    def drop(self) -> None:
        """Forget them all, those on their way too."""
        while self._falling:
            self._falling.popleft()[0].synchronize()
        self.held.clear()
        self.clipping = None

    def close(self) -> None:
        """Take the hooks off, and drop what they took."""
        self._finalizer()
        self.drop()

    def _write(self, p: Tensor, gradient: Tensor) -> None:
        """A gradient, added to what the file has of it, → the file."""
        if p in self.held:
            gradient = self.loaded(p).add_(gradient)
        tensors = {"gradient": gradient}
        home = self._homes[p] = self._file.region(tensors, self._homes.get(p))
        self._file.write(home, tensors)
        self.held[p] = home

    def _let_fall(self, link: HostLink, p: Tensor, gradient: Tensor) -> None:
        """Begin to copy a gradient down; backward goes on."""
        first = p not in self.held
        if first and p in self._homes:
            place = self._homes[p]
        else:
            place = pinned_bytes(gradient.nbytes).view(gradient.dtype).view(gradient.shape)
        if first:
            self.held[p] = self._homes[p] = place
        self._falling.append((link.fall(gradient, place), p, place, first))
        while sum(place.nbytes for _, _, place, _ in self._falling) > self._in_flight_bytes:
            self._land()

    def _land(self) -> None:
        """Wait for the gradient that fell first; where there was one before, add it."""
        event, p, place, first = self._falling.popleft()
        event.synchronize()
        if not first:
            self.held[p].add_(place)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Of one gradient; of 16 bits in FP32."""
    return torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32 if gradient.dtype in HALVES else None)


def _take(gradients: weakref.ref[HostGradients], p: Tensor) -> None:
    """The hook on a parameter whose gradient is complete."""
    if (alive := gradients()) is not None:
        alive.take(p)


def _remove(hooks: WeakTensorKeyDictionary) -> None:
    """Take hooks off their parameters."""
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
