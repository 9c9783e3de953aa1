"""Selective checkpointing by op: recompute what is large and cheap, keep what is small and dear.

Checkpointing a whole block computes everything in it again, also its linear layers, whose results are small beside the
work in them (`op_costs`). Two dispatch modes spare that. They stand below autograd, where everything is an op. In the
forward, one looks at every result and remembers those that `keep` names. In the recomputation, the other hands these
back where they were made, and their ops don't run.

Keeping is a matter of speed and never of values: what was not kept, or can no longer be handed back, is made again.

Sources: Korthikanti et al. 2022, section 5 (recompute attention's core only); Jain et al. 2020 (bytes against FLOPs).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from memlab.backward import backward_number, uncompiled
from memlab.gradient_checkpointing.costs import VIEW, element_bytes, makes, tensors_in
from memlab.gradient_checkpointing.hooks import checkpoint_within, remember
from memlab.gradient_checkpointing.state import random_state, set_random_state
from memlab.memory_hierarchy.counting import flops

aten = torch.ops.aten

# Autocast copies a weight when its cache has none, so one run may copy what the other does not; and copies are cheap.
COPIES = {aten._to_copy, aten.clone}

Policy = Callable[..., bool]


def selective_checkpoint(
    function: Callable,
    /,
    *args,
    keep: Policy | Collection | float,
    **kwargs,
) -> Any:
    """function(*args, **kwargs), checkpointed but for the results of some ops, which are kept until backward.

        selective_checkpoint(block, x, keep=LINEARS)  # all but linear layers is computed again
        selective_checkpoint(block, x, keep=50)  # what takes fewer than 50 FLOPs a byte is computed again

    keep: which results. A collection of ops (`torch.ops.aten.mm`, or one overload: `torch.ops.aten.mm.default`); a
      number, the FLOPs per byte from which on a result is kept (0: every one, infinity: none); or a function
      keep(op, *args, **kwargs) → bool, which is asked once for every op of the forward, and never in backward.
    What function may be, take and return: as of `checkpoint`.

    Gradients are bitwise those of `checkpoint`, whatever is kept, but for ops that go another way where a dispatch mode
    is active, as it is here: nn.Bilinear under autocast and linalg.pinv of complex numbers round differently, and
    F.ctc_loss saves other tensors, so that a `checkpoint` of it inside is an error in backward. Whole results are kept,
    of ops that make something: no views, copies or casts; nothing that is made after the last tensor that backward
    needs; and nothing that the function writes to later. A kept result is handed back once, so with `retain_graph` a
    second backward makes all of them again. Random numbers that follow a kept random op are what they were.

    Kept tensors are saved as autograd saves any tensor: an outer checkpoint drops them, hooks that offload move them,
    and writing to one after the call is an error in backward, even to a result: don't keep its op, or clone it.

    Raises TypeError for a `keep` that is none of the three; in backward RuntimeError where `checkpoint` does (inside
    torch.vmap, too), and if a kept op is called with other shapes than in the forward, or more often.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    forward = _Keep(_policy(keep))
    noting = _Noting(function)
    noting.keep = forward
    return checkpoint_within(lambda: (forward, _HandBack(forward)), noting, args, kwargs)


def _policy(keep) -> Callable[[Any, tuple, dict, Any], bool]:
    """Any form of `keep` as a function of an op, its arguments and its result."""
    ops = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    if isinstance(keep, ops):
        keep = (keep,)
    if isinstance(keep, (int, float)) and not isinstance(keep, bool) and not math.isnan(keep):
        return lambda op, args, kwargs, result: flops(op, args, kwargs, result) >= keep * element_bytes(result)
    if callable(keep):
        return lambda op, args, kwargs, result: keep(op, *args, **kwargs)
    if isinstance(keep, Collection) and not isinstance(keep, str) and all(isinstance(op, ops) for op in keep):
        return lambda op, args, kwargs, result: op in keep or op.overloadpacket in keep
    raise TypeError(
        "expected keep to be a collection of ops (such as torch.ops.aten.mm), a number of FLOPs per byte, or a "
        f"function keep(op, *args, **kwargs) -> bool; found {keep!r}"
    )


class _Kept:
    """The result of one call of an op, and the shapes that it was called with.

    Until the forward ends this holds the result itself. It is part of the graph, and the graph will hold this: so when
    the forward ends, it is saved anew, without its history.
    """

    def __init__(self, number: int, result, shapes: list[torch.Size]):
        self.number, self.shapes = number, shapes
        self.leaves, self.form = tree_flatten(result)
        self.twins: list[Tensor] = []  # the same memory, but autograd counts what is written to it apart
        self.random_state: tuple[torch.device, Tensor] | None = None  # after the op, if it drew

    def seal(self) -> None:
        self.saved = remember([t.detach() for t in [*tensors_in(self.leaves), *self.twins]])
        self.leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.twins = []

    def result(self):
        if self.random_state is not None:
            set_random_state(*self.random_state)
        saved = iter(self.saved.grad_fn.saved_tensors)
        return tree_unflatten([next(saved).detach() if leaf is Tensor else leaf for leaf in self.leaves], self.form)


class _Keep(TorchDispatchMode):
    """Around the forward: runs every op, and remembers the results that are to be kept."""

    def __init__(self, policy: Callable):
        super().__init__()
        self.policy = policy
        self.calls: Counter = Counter()
        self.kept: dict[tuple, _Kept] = {}  # by op, and which of its calls
        self.at: dict[int, list[tuple]] = {}  # by address of a storage: what is kept there
        self.ops: set = set()  # of kept results, once they can be handed back: when the forward is over
        self.paused = 0  # above 0 while a backward inside the function has something made again: that isn't counted
        self.made = self.needed = 0  # how many results have been kept; and until a tensor was last saved for backward

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares some µs an op
        return False

    @uncompiled
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused or not _keepable(op):
            result = op(*args, **kwargs)
            if op is VIEW:
                for key in self.at.get(_address(result), ()):
                    self.kept[key].twins.append(result)
            for tensor in _written(op, args, kwargs):
                for key in self.at.pop(_address(tensor), ()):
                    self.kept.pop(key, None)
            return result
        key = op, self.calls[op]
        self.calls[op] += 1
        before = None
        if torch.Tag.nondeterministic_seeded in op.tags:
            device = next((t.device for t in tensors_in((args, kwargs))), torch.device(kwargs.get("device") or "cpu"))
            before = random_state(device)
        result = op(*args, **kwargs)
        results = tensors_in(result)
        if self.policy(op, args, kwargs, result) and all(map(_can_be_saved, results)):
            self.kept[key] = kept = _Kept(self.made, result, _shapes(args, kwargs))
            self.made += 1
            if before is not None and bytes((after := random_state(device)).numpy()) != bytes(before.numpy()):
                kept.random_state = device, after
            for tensor in results:
                self.at.setdefault(_address(tensor), []).append(key)
        return result

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.kept = {key: kept for key, kept in self.kept.items() if kept.number < self.needed and not error[0]}
        self.ops = {op for op, _ in self.kept}
        self.at.clear()
        try:
            for kept in self.kept.values():
                kept.seal()
        except BaseException:  # an outer recomputation may stop here; what is not sealed would hold the graph it is in
            self.kept, self.ops = {}, set()
            raise


class _Noting(functools.partial):
    """A function. Whenever it saves a tensor for backward, all that is kept by then may be needed to make it again."""

    keep: _Keep

    def __call__(self, *args, **kwargs):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            return super().__call__(*args, **kwargs)
        pack, unpack = hooks

        def note(tensor: Tensor):
            self.keep.needed = self.keep.made
            return pack(tensor)

        def aside(handle) -> Tensor:
            self.keep.paused += 1
            try:
                return unpack(handle)
            finally:
                self.keep.paused -= 1

        with saved_tensors_hooks(note, aside):
            return super().__call__(*args, **kwargs)


class _HandBack(TorchDispatchMode):
    """Around a recomputation: hands back what was kept, and runs the rest."""

    def __init__(self, forward: _Keep):
        super().__init__()
        self.forward = forward

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self):
        self.calls: Counter = Counter()
        return super().__enter__()

    @uncompiled
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _keepable(op):
            return op(*args, **kwargs)
        number = self.calls[op]
        self.calls[op] += 1
        if op not in self.forward.ops:
            return op(*args, **kwargs)
        if number >= self.forward.calls[op]:
            raise _difference(op, number, "no such call in the forward", "one when it was computed again")
        in_backward = backward_number() != -1  # or else someone looks at the graph
        kept = (self.forward.kept.pop if in_backward else self.forward.kept.get)((op, number), None)
        if kept is None:
            return op(*args, **kwargs)
        if (shapes := _shapes(args, kwargs)) != kept.shapes:
            raise _difference(op, number, f"shapes {_text(kept.shapes)} as in the forward", _text(shapes))
        return kept.result()


def _difference(op, number: int, expected: str, found: str) -> RuntimeError:
    return RuntimeError(
        f"expected, for call {number + 1} of {op}, {expected}, found {found}; let what the function depends on be the "
        "same in backward (its arguments, flags, weights), or don't checkpoint it"
    )


@functools.cache
def _keepable(op) -> bool:
    return makes(op) and op.overloadpacket not in COPIES


def _can_be_saved(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_inference()


def _address(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _written(op, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an op writes to."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    marked = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tensors_in([given.get(name) for name in marked])


def _shapes(args: tuple, kwargs: dict) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in((args, kwargs))]


def _text(shapes: list[torch.Size]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)
