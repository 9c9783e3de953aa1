"""Checkpointing through saved-tensor hooks: keep a function's inputs, run it again when backward asks for the rest.

Whatever an op saves for its backward passes two hooks: `pack` when it is saved, `unpack` when backward wants it. So
here the forward packs nothing but an empty handle for each saved tensor; the first handle that backward unpacks runs
the function once more on the same inputs, and the tensors that this second forward packs, in the same order, are what
the handles stand for.

Sources: Chen et al. 2016 (recomputation); Griewank and Walther 2000 (checkpoints).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from memlab.gradient_checkpointing.batch_norm import statistics_stand_still
from memlab.gradient_checkpointing.state import State

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""Makes two context managers for one call: one is entered around the forward, the other around each recomputation."""

_current_task = torch._C._current_graph_task_id  # -1 outside backward


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
    region = _Region(function, args, kwargs, again, preserve_rng_state)
    with forward, saved_tensors_hooks(region.pack, region.unpack):
        return function(*args, **kwargs)


class _Handle:
    """Stands in the graph for one saved tensor, which is here between its recomputation and its use."""

    __slots__ = ("__weakref__", "number", "tensor", "version")

    def __init__(self, number: int):
        self.number = number
        self.tensor: Tensor | None = None
        self.version = 0


class _Done(Exception):
    """All that backward needs has been computed again."""


class _Inputs(torch.autograd.Function):
    """Saves tensors as any op would: autograd checks that nobody writes to them, and an outer checkpoint sees them."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("the anchor is never part of a loss")


class _Region:
    """One checkpointed call. The graph that the forward built holds it, and lets go of it when backward is done."""

    def __init__(
        self, function: Callable, args: tuple, kwargs: dict, again: AbstractContextManager, preserve_rng_state: bool
    ):
        self.function, self.again = function, again
        leaves, self.structure = tree_flatten((args, kwargs))
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_inference()}
        self.others = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
        self.places = list(tensors)
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        self.inputs = _Inputs.apply(anchor, *tensors.values()).grad_fn
        self.state = State(tensors.values(), preserve_rng_state=preserve_rng_state)
        self.handles: list[weakref.ref[_Handle]] = []
        self.saved: list[tuple] = []

    def pack(self, tensor: Tensor) -> _Handle:
        """The forward saves `tensor`: hand autograd an empty handle instead."""
        handle = _Handle(len(self.handles))
        self.handles.append(weakref.ref(handle))
        self.saved.append(description(tensor))
        return handle

    def unpack(self, handle: _Handle) -> Tensor:
        """Backward wants the tensor: take it out of the handle, after filling all of them if this one is empty."""
        tensor, handle.tensor = handle.tensor, None
        if tensor is None:
            tensor = self.recompute(handle)
        if tensor._version != handle.version:
            raise RuntimeError(
                f"expected saved tensor {handle.number} of {name_of(self.function)} to stay as it was saved, found it "
                "changed in place after that; use an out-of-place operation, or save a clone"
            )
        return tensor

    def recompute(self, wanted: _Handle) -> Tensor:
        """Run the function again until it has saved all that is still wanted; fill the handles, and return one's."""
        handles = [handle() for handle in self.handles]
        if _current_task() == -1:  # someone looks at the graph: fill this handle only, since nobody would empty others
            handles = [handle if handle is wanted else None for handle in handles]
        else:
            Variable._execution_engine.queue_callback(functools.partial(empty, self.handles))
        while handles[-1] is None:
            handles.pop()
        found: list[tuple[Tensor, int] | None] = []

        def pack(tensor: Tensor) -> Tensor:
            number = len(found)
            if number == len(handles):
                raise _Done  # again, to a function that caught the first
            tensor = own_buffer(tensor)
            if handles[number] is not None and description(tensor) != self.saved[number]:
                raise self.difference(number, description(tensor))
            version = tensor._version
            tensor = tensor.detach()
            found.append(None if handles[number] is None else (tensor, version))
            if number + 1 == len(handles):
                raise _Done
            return tensor

        leaves = list(self.others)
        for i, tensor in zip(self.places, self.inputs.saved_tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        with ExitStack() as stack:
            self.state.restore(stack)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.again)
            own_buffer = stack.enter_context(statistics_stand_still())
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            try:
                self.function(*args, **kwargs)
            except _Done:
                pass
        if len(found) < len(handles):
            raise self.difference(len(found), None)
        for handle, again in zip(handles, found, strict=True):
            if handle is not None:
                handle.tensor, handle.version = again
        tensor, wanted.tensor = wanted.tensor, None
        return tensor

    def difference(self, number: int, found: tuple | None) -> RuntimeError:
        """What to say of a function that saved another tensor, or none, when it was run again."""
        instead = "no such tensor" if found is None else describe(found)
        return RuntimeError(
            f"expected {name_of(self.function)} to save the same tensors when it is run again for backward, found a "
            f"difference at number {number} of {len(self.saved)}: {describe(self.saved[number])} in the forward, "
            f"{instead} now; let nothing it depends on change in between, or don't checkpoint it"
        )


def description(tensor: Tensor) -> tuple:
    """What must be equal: shape, dtype, device, and, of a parameter, how often it was written to."""
    writes = tensor._version if tensor.requires_grad and tensor.is_leaf else 0
    return tensor.shape, tensor.dtype, tensor.device, writes


def describe(described: tuple) -> str:
    shape, dtype, device, writes = described
    return f"{tuple(shape)} of {dtype} on {device}" + f", written to {writes} times" * bool(writes)


def name_of(function: Callable) -> str:
    """A function's qualified name, a module's class."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def empty(handles: list[weakref.ref[_Handle]]) -> None:
    """Let go of what a backward that is over did not use."""
    for reference in handles:
        if (handle := reference()) is not None:
            handle.tensor = None
