"""Checkpointing through saved-tensor hooks: keep a function's inputs, run it again when backward asks for the rest.

Whatever an op saves for its backward passes two hooks: `pack` when it is saved, `unpack` when backward wants it. So
here the forward packs nothing but an empty handle for each saved tensor; the first handle that backward unpacks runs
the function once more on the same inputs, and the tensors that this second forward packs, in the same order, are what
the handles stand for. When the last of them is there, the second forward stops.

Sources: Chen et al. 2016 (recomputation); Griewank and Walther 2000 (checkpoints).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from memlab.backward import at_end_of_backward, backward_number
from memlab.gradient_checkpointing.batch_norm import statistics_stand_still
from memlab.gradient_checkpointing.state import State
from memlab.memory_timeline.lines import RECOMPUTING

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""Makes two context managers for one call: one is entered around the forward, the other around each recomputation."""

RECOMPUTING.add(__file__)  # for the meter: what this page has run in backward is forward, once more


def no_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Two that do nothing."""
    return nullcontext(), nullcontext()


def checkpoint(function: Callable, /, *args, preserve_rng_state: bool = True, **kwargs) -> Any:
    """function(*args, **kwargs), which keeps its inputs instead of all that its ops save, and runs again in backward.

        x = checkpoint(block, x)

    Gradients are the same, bit for bit. The price is a second forward of `function`, as far as its last saved tensor.

    function: any callable; a module, a lambda. It may take and return anything. Tensors among its arguments, also
      inside lists, tuples, named tuples and dicts, are saved as an op would save them: to write to one before backward
      is an error. All else (a tensor inside your own class, too) is handed over again as it is.
    preserve_rng_state: give the second run the random numbers of the first, so that dropout is the same, and leave no
      trace in the streams (those of the CPU, of the arguments' devices and of the current accelerator). False spares
      this where nothing is random. Only torch's own streams: not Python's or NumPy's, nor a torch.Generator of yours.
      All threads share the CPU's: if random functions are run again in several at once, gradients may be wrong.

    The second run also finds autocast and the default device as they were, and BatchNorm's running statistics move once
    (`batch_norm` says what else is counted twice). Everything else that the function reads must not change before
    backward; contexts of your own, such as sdpa_kernel, belong inside it. Where gradients are off it is a plain call.

    Checkpoints nest: a tensor is kept by the innermost around it, whose inputs are kept by the next. Double backward,
    retain_graph, backward of a part and backward inside the function work; each backward runs the function once, and
    again where a Function of your own reads ctx.saved_tensors twice. To look at a saved tensor
    (`y.grad_fn._saved_self`) runs it too, and keeps nothing.

    What the function does outside of itself each run does, as with torch.utils.checkpoint: a hook that it registers on
    a parameter, or another tensor from outside, takes effect twice, and so does a `.backward()` inside that adds to
    leaves (torch.autograd.grad adds to none). A cache of keys and values grows twice, too: use_cache=False.

    Raises RuntimeError in backward, naming function and tensor, if the second run saves fewer tensors or others (by
    shape, dtype, device; of a parameter that was saved, by whether it was written to in between), or if the function
    writes to a tensor after an op saved it. Other values under the same shape are not noticed, nor more tensors at the
    end. F.rrelu saves its noise before it draws it: in training its gradient is wrong if it is the last op that saves.

    Not here: torch.vmap, torch.func.jvp and their kin around it, which are refused (checkpoint the mapped function:
    checkpoint(torch.vmap(f), x)); forward-mode gradients. Around a model that checkpoints inside, functional_call takes
    its parameters away at its end: backward must be inside of it, or gradients are wrong. Inside torch.compile it is a
    graph break, and the function runs uncompiled. A compiled function may be checkpointed, but its BatchNorms are
    counted twice; a TorchScript function may not: the exception by which the second run is stopped does not pass it.
    """
    return checkpoint_within(no_contexts, function, args, kwargs, preserve_rng_state=preserve_rng_state)


def checkpoint_within(
    contexts: Contexts, function: Callable, args: tuple, kwargs: dict, *, preserve_rng_state: bool = True
) -> Any:
    """As `checkpoint`, with the forward and its recomputations each inside a context: what `selective` is built on."""
    if not torch.is_grad_enabled():
        with contexts()[0]:
            return function(*args, **kwargs)
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            f"expected a checkpoint of {name_of(function)} outside torch.vmap, torch.func.jvp and their kin, found it "
            "inside, where its second run would be given whole batches; checkpoint the mapped function instead: "
            "checkpoint(torch.vmap(function), x)"
        )
    return _run_with_hooks(contexts, function, args, kwargs, preserve_rng_state)


@torch._disable_dynamo  # traced, the hooks would be compiled with the function, and save what they find there
def _run_with_hooks(contexts: Contexts, function: Callable, args: tuple, kwargs: dict, preserve_rng_state: bool) -> Any:
    forward, again = contexts()
    region = _Region(function, args, kwargs, again, preserve_rng_state)
    with forward, saved_tensors_hooks(region.pack, region.unpack):
        return function(*args, **kwargs)


class _Handle:
    """Stands in the graph for one saved tensor, which is here between its recomputation and its use."""

    __slots__ = ("__weakref__", "again", "number")

    def __init__(self, number: int):
        self.number = number
        self.again: tuple[Tensor, int] | None = None  # the tensor, and how often it had been written to when saved


class StopRecomputation(Exception):
    """All that backward needs has been computed again."""


def remember(tensors: Iterable[Tensor]) -> Tensor:
    """An empty tensor whose node has saved these, as any op would: its `.grad_fn.saved_tensors`, as long as it lives.

    So autograd checks that nobody writes to them, and the hooks of an outer checkpoint see them.
    """
    anchor = torch.empty(0, device="cpu", requires_grad=True)  # makes a node even if none of them needs gradients
    return _Remembered.apply(anchor, *tensors)


class _Remembered(torch.autograd.Function):
    """Saves its inputs, and is no part of any loss."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("the anchor is never part of a loss")


class _Region:
    """One checkpointed call. The graph that its forward built holds it, and lets go of it as backward passes."""

    def __init__(
        self, function: Callable, args: tuple, kwargs: dict, again: AbstractContextManager, preserve_rng_state: bool
    ):
        self.function, self.again = function, again
        leaves, self.structure = tree_flatten((args, kwargs))
        kept = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        numbers = {key: number for number, key in enumerate(kept)}  # once each, as `q is k` must be true again
        self.places = {i: numbers[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in numbers}
        self.others = [None if i in self.places else leaf for i, leaf in enumerate(leaves)]
        self.inputs = remember(kept.values())
        self.state = State(kept.values(), preserve_rng_state=preserve_rng_state)
        self.handles: list[weakref.ref[_Handle]] = []
        self.saved: list[tuple] = []  # a description for each handle

    def pack(self, tensor: Tensor) -> _Handle:
        """An op of the forward saves `tensor`: give autograd an empty handle instead."""
        handle = _Handle(len(self.handles))
        self.handles.append(weakref.ref(handle))
        self.saved.append(description(tensor))
        return handle

    @torch._disable_dynamo  # a compiled backward, too, must let it run as it is
    def unpack(self, handle: _Handle) -> Tensor:
        """Backward wants the tensor. It leaves the handle at once, so that it dies when its use is over."""
        again, handle.again = handle.again, None
        tensor, version = again or self.recompute(handle)
        if tensor._version != version:
            raise RuntimeError(
                f"expected {name_of(self.function)} to leave tensor {handle.number} of the {len(self.saved)} that it "
                "saves as it is, found it written to afterwards; use an op that is not in place, or save a clone"
            )
        return tensor

    def recompute(self, wanted: _Handle) -> tuple[Tensor, int]:
        """Run the function again, until all that is waited for is saved; return one handle's part, fill the others."""
        handles = [handle() for handle in self.handles]  # None: backward has passed there
        if backward_number() == -1:  # outside backward nobody would empty the others again
            handles = [handle if handle is wanted else None for handle in handles]
        else:
            at_end_of_backward(functools.partial(empty, self.handles))
        while handles[-1] is None:
            handles.pop()
        found: list[tuple[Tensor, int] | None] = []

        def pack(tensor: Tensor) -> Tensor:
            number = len(found)
            if number == len(handles):
                raise StopRecomputation  # once more, for a function that caught the first
            tensor = own_buffer(tensor)
            if differ(description(tensor), self.saved[number]):
                raise self.difference(number, describe(description(tensor)))
            tensor = tensor.detach()
            found.append(handles[number] and (tensor, tensor._version))
            if len(found) == len(handles):
                raise StopRecomputation
            return tensor  # for a backward inside the function

        leaves = list(self.others)
        inputs = self.inputs.grad_fn.saved_tensors
        for i, number in self.places.items():
            leaves[i] = inputs[number]
        args, kwargs = tree_unflatten(leaves, self.structure)
        with ExitStack() as stack:
            self.state.restore(stack)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.again)
            own_buffer = stack.enter_context(statistics_stand_still(innermost(self.function)))
            stack.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
            with suppress(StopRecomputation):
                self.function(*args, **kwargs)
        if len(found) < len(handles):
            raise self.difference(len(found), "no such tensor")
        for handle, again in zip(handles, found, strict=True):
            if handle is not None and handle is not wanted:
                handle.again = again
        return found[wanted.number]

    def difference(self, number: int, instead: str) -> RuntimeError:
        """The error of a function that did not do the same twice; raised where it saves the tensor, if it does."""
        return RuntimeError(
            f"expected {name_of(self.function)} to save the same tensors again, found a difference at tensor {number} "
            f"of {len(self.saved)}: {describe(self.saved[number])} in the forward, {instead} in the recomputation; "
            "let what it depends on be the same in backward (its arguments, flags, weights), or don't checkpoint it"
        )


def description(tensor: Tensor) -> tuple:
    """What must be the same: shape, dtype, device and, of a parameter or its view, how often it was written to."""
    base = tensor if tensor._base is None else tensor._base
    writes = tensor._version if base.is_leaf and base.requires_grad else None
    return tensor.shape, tensor.dtype, tensor.device, writes


def differ(one: tuple, other: tuple) -> bool:
    """Whether two descriptions do. A view that comes back from outer hooks is none any more, and has no writes."""
    return one[:3] != other[:3] or (one[3] != other[3] and None not in (one[3], other[3]))


def describe(description: tuple) -> str:
    """A description in words, for an error."""
    shape, dtype, device, writes = description
    return f"{tuple(shape)} of {dtype} on {device}" + ("" if writes is None else f", at version {writes}")


def name_of(function: Callable) -> str:
    """A function's qualified name, a module's class."""
    function = innermost(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def innermost(function: Callable) -> Callable:
    """What partials are made of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def empty(handles: list[weakref.ref[_Handle]]) -> None:
    """When backward is over: let go of what it did not use, as it wanted the gradients of a part."""
    for reference in handles:
        if (handle := reference()) is not None:
            handle.again = None
