"""Checkpointing through saved-tensor hooks: keep a function's inputs, run it again when backward asks for the rest.

Whatever an op saves for its backward passes two hooks: `pack` when it is saved, `unpack` when backward wants it. So
here the forward packs nothing but an empty handle for each saved tensor; the first handle that backward unpacks runs
the function once more on the same inputs, and the tensors that this second forward packs, in the same order, are what
the handles stand for.

Sources: Chen et al. 2016 (recomputation); Griewank and Walther 2000 (checkpoints).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""Makes two context managers for one call: one is entered around the forward, the other around each recomputation."""


def no_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Two that do nothing."""
    return nullcontext(), nullcontext()


def checkpoint(function: Callable, *args, preserve_rng_state: bool = True, **kwargs) -> Any:
    """function(*args, **kwargs), which saves only its inputs for backward and is run again there."""
    return checkpoint_within(no_contexts, function, args, kwargs, preserve_rng_state=preserve_rng_state)


def checkpoint_within(
    contexts: Contexts, function: Callable, args: tuple, kwargs: dict, *, preserve_rng_state: bool = True
) -> Any:
    """As `checkpoint`, with the forward and its recomputations each inside a context: what `selective` is built on."""
    forward, again = contexts()
    if not torch.is_grad_enabled():
        with forward:
            return function(*args, **kwargs)
    region = _Region(function, args, kwargs, again)
    with forward, saved_tensors_hooks(region.pack, region.unpack):
        return function(*args, **kwargs)


class _Handle:
    """Stands in the graph for one saved tensor; `value` is there between its recomputation and its use."""

    __slots__ = ("__weakref__", "value")

    def __init__(self):
        self.value: Tensor | None = None


class _Done(Exception):
    """All that backward needs has been computed again."""


class _Inputs(torch.autograd.Function):
    """Saves tensors as any op would: autograd checks that nobody writes to them, and an outer checkpoint's hooks see them."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("the anchor is never part of a loss")


class _Region:
    """One checkpointed call."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, again: AbstractContextManager):
        self.function, self.kwargs, self.again = function, kwargs, again
        self.args = [None if isinstance(a, Tensor) else a for a in args]
        self.tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        anchor = torch.empty(0, requires_grad=True)
        self.inputs = _Inputs.apply(anchor, *(args[i] for i in self.tensors)).grad_fn
        self.handles: list[weakref.ref] = []

    def pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle()
        self.handles.append(weakref.ref(handle))
        return handle

    def unpack(self, handle: _Handle) -> Tensor:
        if handle.value is None:
            self.recompute()
        value, handle.value = handle.value, None
        return value

    def recompute(self) -> None:
        args = list(self.args)
        for i, tensor in zip(self.tensors, self.inputs.saved_tensors, strict=True):
            args[i] = tensor
        waiting = iter(self.handles)
        left = len(self.handles)

        def pack(tensor: Tensor) -> None:
            nonlocal left
            if handle := next(waiting)():
                handle.value = tensor.detach()
            left -= 1
            if not left:
                raise _Done

        with ExitStack() as stack:
            stack.enter_context(self.again)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, lambda _: None))
            try:
                self.function(*args, **self.kwargs)
            except _Done:
                pass
