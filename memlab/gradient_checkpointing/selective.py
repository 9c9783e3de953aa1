"""Selective checkpointing by op: recompute what is large and cheap, keep what is small and dear.

Checkpointing a whole block computes everything in it again, also its products of matrices, whose results are small
beside the work in them. What an op's result is worth is one number, the FLOPs that making it again takes a byte:

    product of matrices, inner dimension K:  2 · K / itemsize
    one op an element (GELU, an add):        1 / itemsize

Attention's scores q kᵀ have K = head_dim, and T results a row; a linear layer has K = width, and weights @ v has K = T.
So the scores, the mask and the softmax, most of a block's bytes by far when T is long, are the cheapest to make again.

Two dispatch modes do it, below autograd, where everything is an op. In the forward one of them looks at every result
and remembers those that `keep` names. In the recomputation the other hands these back where they were made, and their
ops don't run. Keeping is only ever a matter of speed: whatever was not kept, or no longer is, runs again.

Sources: Korthikanti et al. 2022, section 5 (recompute attention's core only); Jain et al. 2020 (bytes against FLOPs).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memlab.gradient_checkpointing.hooks import checkpoint_within
from memlab.memory_hierarchy.roofline import FLOPS, flops

aten = torch.ops.aten

MATMULS = frozenset(op for op in FLOPS if isinstance(op, torch._ops.OpOverloadPacket))
"""Every op whose FLOPs grow faster than its bytes: products of matrices, convolutions, fused attention."""

LINEARS = MATMULS - {op for op in MATMULS if "attention" in str(op)} - {aten.bmm, aten.baddbmm, aten.baddbmm_}
"""Products with weights: linear layers and convolutions. Batched products, and so attention by hand, are not in it."""

# Autocast copies a weight when its cache has none, so one pass may copy what the other doesn't; and copies are cheap.
COPIES = {aten._to_copy, aten.clone}
VIEW = aten._unsafe_view.default  # doesn't say that it is one, and what is written to it isn't counted as written

Policy = Callable[..., bool]


def selective_checkpoint(
    function: Callable,
    *args,
    keep: Policy | Collection | float,
    preserve_rng_state: bool = True,
    **kwargs,
) -> Any:
    """function(*args, **kwargs), checkpointed but for the results of some ops, which are kept until backward.

        selective_checkpoint(block, x, keep=LINEARS)  # all but linear layers is computed again
        selective_checkpoint(block, x, keep=50)  # what takes fewer than 50 FLOPs a byte is computed again

    keep: which results. A collection of ops (`torch.ops.aten.mm`, or one overload: `torch.ops.aten.mm.default`); a
      number, the FLOPs per byte of the result from which on it is kept (0: every result; infinity: none); or a function
      keep(op, *args, **kwargs) → bool. It is called once for every op of the forward, with what the op was given, and
      never in the recomputation.

    Gradients are bitwise those of `checkpoint`, whatever is kept. Kept are whole results of ops that make something:
    not views, copies and casts, nor what is made after the last tensor that backward needs, nor what the function
    overwrites later: that is forgotten, and made again. A result is handed back once; a second backward (with
    `retain_graph`) makes all of them again. A kept random op leaves the random numbers after it as they were.

    Kept tensors are saved as autograd saves any tensor: an outer checkpoint drops them, hooks that offload move them,
    and writing to one after the call is autograd's error in backward.

    Raises TypeError for a `keep` that is none of the three; in backward RuntimeError if the recomputation calls a kept
    op with other shapes, or more often, than the forward did.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    forward = _Keep(_policy(keep), preserve_rng_state)

    noting = _Noting(function)
    noting.keep = forward
    return checkpoint_within(
        lambda: (forward, _HandBack(forward)), noting, args, kwargs, preserve_rng_state=preserve_rng_state
    )


def _policy(keep) -> Callable[[Any, tuple, dict, Any], bool]:
    """Any form of `keep` as a function of an op, its arguments and its result."""
    ops = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    if isinstance(keep, ops):
        keep = (keep,)
    if isinstance(keep, (int, float)) and not isinstance(keep, bool) and not math.isnan(keep):
        return lambda op, args, kwargs, result: flops(op, args, kwargs, result) >= keep * _nbytes(result)
    if callable(keep):
        return lambda op, args, kwargs, result: keep(op, *args, **kwargs)
    if isinstance(keep, Collection) and not isinstance(keep, str) and all(isinstance(op, ops) for op in keep):
        return lambda op, args, kwargs, result: op in keep or op.overloadpacket in keep
    raise TypeError(
        "expected keep to be a collection of ops (such as torch.ops.aten.mm), a number of FLOPs per byte, or a "
        f"function keep(op, *args, **kwargs) -> bool; found {keep!r}"
    )


@functools.cache
def makes(op) -> bool:
    """Whether the op's results are its own: neither views of its arguments nor these, written to."""
    return (
        isinstance(op, torch._ops.OpOverload)
        and op is not VIEW
        and not op._schema.is_mutable
        and all(result.alias_info is None for result in op._schema.returns)
    )


@functools.cache
def _keepable(op) -> bool:
    return makes(op) and op.overloadpacket not in COPIES


def tensors_in(value) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _nbytes(result) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(result))


def _shapes(args: tuple, kwargs: dict) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in((args, kwargs))]


def _written(op, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an op writes to."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    marked = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tensors_in([given.get(name) for name in marked])


def _address(tensor: Tensor) -> int | None:
    """Of its storage; None for a tensor that has none (sparse, opaque)."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None


def _can_be_saved(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_inference()


def _random_device(args: tuple, kwargs: dict) -> torch.device:
    """Whose generator a random op draws from."""
    return next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device(kwargs.get("device") or "cpu"))


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class _Saved(torch.autograd.Function):
    """Saves tensors as any op would, so autograd checks that nobody writes to them and outer hooks see them."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("the anchor is never part of a loss")


class _Kept:
    """The result of one call of an op, and the shapes that it was called with.

    Until the forward ends this holds the result itself. It is part of the graph, and the graph will hold this: so when
    the forward ends, it is saved anew, without its history.
    """

    def __init__(self, number: int, result, shapes: list[torch.Size]):
        self.number, self.shapes = number, shapes
        self.leaves, self.form = tree_flatten(result)
        self.twins: list[Tensor] = []  # the same memory, though autograd counts writes to them apart
        self.random_state: tuple[Tensor, torch.device] | None = None  # after the op, if it drew

    def seal(self, anchor: Tensor) -> None:
        self.saved = _Saved.apply(anchor, *(t.detach() for t in [*tensors_in(self.leaves), *self.twins])).grad_fn
        self.leaves = [_Saved if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.twins = []

    def result(self):
        if self.random_state is not None:
            _set_random_state(*self.random_state)
        saved = iter(self.saved.saved_tensors)
        return tree_unflatten([next(saved).detach() if leaf is _Saved else leaf for leaf in self.leaves], self.form)


class _Keep(TorchDispatchMode):
    """Around the forward: runs every op, and remembers the results that are to be kept."""

    def __init__(self, policy: Callable, preserve_rng_state: bool):
        super().__init__()
        self.policy, self.preserve_rng_state = policy, preserve_rng_state
        self.calls: Counter = Counter()
        self.kept: dict[tuple, _Kept] = {}  # by op and its how manieth call
        self.at: dict[int, list[tuple]] = {}  # address of a storage → what is kept of it
        self.made = self.needed = 0  # how many results have been kept, and how many until a tensor was last saved

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares some µs an op
        return False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _keepable(op):
            result = op(*args, **kwargs)
            if op is VIEW:
                for key in self.at.get(_address(result), ()):
                    self.kept[key].twins.append(result)
            elif isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable:
                for tensor in _written(op, args, kwargs):
                    self.forget(tensor)
            return result
        key = op, self.calls[op]
        self.calls[op] += 1
        before = None
        if self.preserve_rng_state and torch.Tag.nondeterministic_seeded in op.tags:
            before = _random_state(device := _random_device(args, kwargs))
        result = op(*args, **kwargs)
        tensors = tensors_in(result)
        if self.policy(op, args, kwargs, result) and all(map(_can_be_saved, tensors)):
            self.kept[key] = kept = _Kept(self.made, result, _shapes(args, kwargs))
            self.made += 1
            if before is not None and (after := _random_state(device)).numpy().tobytes() != before.numpy().tobytes():
                kept.random_state = after, device
            for tensor in tensors:
                self.at.setdefault(_address(tensor), []).append(key)
        return result

    def forget(self, tensor: Tensor) -> None:
        """What has been written to can't be handed back."""
        for key in self.at.pop(_address(tensor), ()):
            self.kept.pop(key, None)

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.kept = {key: kept for key, kept in self.kept.items() if kept.number < self.needed and not error[0]}
        self.chosen = {op for op, _ in self.kept}
        self.at.clear()
        anchor = torch.empty(0, requires_grad=True)
        for kept in self.kept.values():
            kept.seal(anchor)


class _Noting(functools.partial):
    """A function. When a tensor is saved in it for backward, all that is kept by then may be needed to make it again."""

    keep: _Keep

    def __call__(self, *args, **kwargs):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            return super().__call__(*args, **kwargs)
        pack, unpack = hooks

        def note(tensor: Tensor):
            self.keep.needed = self.keep.made
            return pack(tensor)

        with saved_tensors_hooks(note, unpack):
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

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _keepable(op):
            return op(*args, **kwargs)
        number = self.calls[op]
        self.calls[op] += 1
        if op in self.forward.chosen and number >= self.forward.calls[op]:
            raise RuntimeError(
                f"expected {self.forward.calls[op]} calls of {op}, as in the forward, found more when it was computed "
                "again; what a checkpointed function does must follow from its arguments alone"
            )
        kept = self.forward.kept.pop((op, number), None)
        if kept is None:
            return op(*args, **kwargs)
        if (shapes := _shapes(args, kwargs)) != kept.shapes:
            raise RuntimeError(
                f"expected call {number + 1} of {op} to be given {_text(kept.shapes)}, as in the forward, found "
                f"{_text(shapes)} when it was computed again; what a checkpointed function does must follow from its "
                "arguments alone"
            )
        return kept.result()


def _text(shapes: list[torch.Size]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)
