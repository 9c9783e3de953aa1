"""What each op of a step computes and moves: FLOPs and bytes, counted while it runs, for real or imagined.

FLOPs are PyTorch's own formulas (torch.utils.flop_counter) for products of matrices, convolutions and attention, where
a multiply and an add are two, and a causal mask saves none. Any other op that computes is given one for each element
of what it reads or of what it writes, whichever are more: a lower bound, exp and division being more than one. Ops
that only move data (those listed here), and those on whole numbers, have none.

Too low by far is that bound for products inside of other ops: fused recurrent layers (LSTM and GRU on a CPU or by
cuDNN), distances (cdist), factorisations and solvers, FFTs. Of sparse tensors neither bytes nor elements are counted; a
product of one has the FLOPs of a dense one. Ops on a jagged nested tensor are those on its values; ops on a strided
nested one are not counted.

Bytes are what an op must read and write once, if all that it reads twice comes from a cache, and nothing stays in the
cache from one op to the next. Views move nothing. A kernel that reads its input twice moves more.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memlab.backward import backward_number, uncompiled
from memlab.memory_hierarchy.touched import distinct, touched_bytes

aten = torch.ops.aten
COMPOSITE = "CompositeImplicitAutograd"


def _trilinear(i1, i2, i3, expand1, expand2, expand3, *_, **__) -> int:
    """Of F.bilinear: a multiply and an add for each element of all three, broadcast."""
    shapes = [list(tensor.shape) for tensor in (i1, i2, i3)]
    for shape, places in zip(shapes, (expand1, expand2, expand3), strict=True):
        for place in places:
            shape.insert(place, 1)
    return 2 * math.prod(torch.broadcast_shapes(*shapes))


# With vectors: two FLOPs an element, so no more than bytes.
VECTORS = {
    **dict.fromkeys([aten.mv, aten.dot, aten.vdot], lambda self, *_, **__: 2 * self.numel()),
    **dict.fromkeys([aten.addmv, aten.addmv_], lambda self, matrix, *_, **__: 2 * matrix.numel()),
}
FLOPS = {
    **flop_registry,
    **VECTORS,
    **dict.fromkeys([aten.addbmm, aten.addbmm_], lambda self, a, b, **_: 2 * a.numel() * b.shape[-1]),
    aten._trilinear: _trilinear,
    # The same ops in place, and attention's CPU kernel, for which the registry has no entry of their own.
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
# By what their names start with, less "_foreach_": ops that make room and touch none of it, ...
UNTOUCHED = ("empty", "new_empty", "set_.", "resize_.", "resize_as_.")
# ... ops that move data and compute nothing, ...
MOVES = """
    clone copy_. cat. stack repeat flip roll constant_pad masked_fill where index_select index. gather
    embedding. select_backward slice_backward tril triu zero ones full fill new_zeros new_ones new_full arange
    scalar_tensor lift_fresh _local_scalar take. index_copy scatter.src scatter.value scatter_.src scatter_.value
    nll_loss slice_scatter. select_scatter. diagonal_scatter. as_strided_scatter. pixel_shuffle pixel_unshuffle rot90
    masked_select. masked_scatter diag_embed reflection_pad1d. reflection_pad2d. reflection_pad3d. replication_pad1d.
    replication_pad2d. replication_pad3d. eye. complex. im2col. channel_shuffle. index_fill diagonal_backward
    upsample_nearest1d. upsample_nearest2d. upsample_nearest3d. max_unpool
"""
MOVES = tuple(MOVES.split())
# ... ops that overwrite their first argument without reading it, ...
OVERWRITE = ("copy_.", "copy.", "zero_.", "fill_.", "normal_.", "uniform_.", "bernoulli_.", "random_.", "exponential_.")
OVERWRITE += ("log_normal_.", "cauchy_.", "geometric_.", "index_copy_.", "scatter_.src", "scatter_.value")
# ... ops that are given their second one for its shape's sake, ...
SHAPE_OF_SECOND = re.compile(r"(nll_loss|\w+pool\dd|\w+_pad\dd)\w*_backward\.")
# ... ops that read no more of their first argument than they return, ...
GATHER = ("index_select.", "index.", "gather.", "embedding.", "take.")
# ... and ops that read or change as many elements of their first argument as the argument at this place has.
SCATTER = {"nll_loss_forward.": 1, "nll_loss2d_forward.": 1, "put_.": 1, "index_add_.": 3, "index_copy_.": 3}
SCATTER |= {"scatter_.": 2, "scatter_add_.": 2, "scatter_reduce_.": 2}  # and as many of their source
INDEX_PUT = ("index_put_.", "_index_put_impl_.")  # which adds if it accumulates, else overwrites, as put_ does
BAGS = ("_embedding_bag.", "_embedding_bag_forward_only.")  # which read a row for each index


class Op(NamedTuple):
    """All calls of one op on tensors of the same shapes, in one phase of a step: "forward", "backward", "optimizer".

    shapes: of the tensors that it was given. flops, nbytes: of all its calls together.
    """

    name: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int
    flops: int
    nbytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 for an op that only moves data, infinite for one without bytes."""
        return self.flops / self.nbytes if self.nbytes else math.inf


class OpCounter:
    """Counts FLOPs and bytes of every op in its `with` block.

        with OpCounter() as counter:
            model(x, y).backward()
            optimizer.step()
        counter.ops

    Views and ops that move no byte are left out. A block that is entered again begins anew; inside of itself it raises
    RuntimeError. Counting waits for no result and looks at no value, so it works on a GPU and inside `imagine(...)`.
    A step's closure has the phases of what it runs. After a step whose own code raised, all is "optimizer" to the end.
    """

    def __init__(self):
        self._counts: dict[tuple, list[int]] | None = None
        self._undo: ExitStack | None = None

    def __enter__(self) -> OpCounter:
        if self._undo is not None:
            raise RuntimeError("expected an OpCounter that is not counting; take another one for a block in its block")
        self._counts, self._steps = {}, 0
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
            stack.callback(register_optimizer_step_post_hook(self._step_ends).remove)
            stack.enter_context(_Dispatch(self._count))
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        undo, self._undo = self._undo, None
        undo.close()

    @property
    def ops(self) -> list[Op]:
        """What was counted, in the order of the first calls. Raises RuntimeError before the block was entered."""
        if self._counts is None:
            raise RuntimeError("expected an OpCounter that has run: `with counter: ...` first, then counter.ops")
        return [Op(*key, *counts) for key, counts in self._counts.items()]

    def _step_begins(self, _, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self._steps += 1
        outside = lambda value: functools.partial(self._closure, value) if callable(value) else value  # noqa: E731
        return (*args[:1], *map(outside, args[1:])), {name: outside(value) for name, value in kwargs.items()}

    def _closure(self, closure):
        steps, self._steps = self._steps, 0
        result = closure()
        self._steps = steps  # where it raised, the step is over as well
        return result

    def _step_ends(self, *_) -> None:
        self._steps = max(0, self._steps - 1)

    def _count(self, func, args: tuple, kwargs: dict, result) -> None:
        read, written = traffic(func, args, kwargs, result)
        if nbytes := sum(map(touched_bytes, [*read, *written])):
            phase = "forward" if backward_number() == -1 else "backward"
            phase = "optimizer" if self._steps else phase
            shapes = tuple(tuple(t.shape) for t in _tensors((args, kwargs)))
            key = (func.overloadpacket.__name__, phase, shapes)
            before = self._counts.get(key, (0, 0, 0))
            found = (1, flops(func, args, kwargs, result), nbytes)
            self._counts[key] = tuple(map(sum, zip(before, found, strict=True)))


class _Dispatch(TorchDispatchMode):
    """Calls `count` after every op."""

    def __init__(self, count):
        super().__init__()
        self._count = count

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares importing the compiler at the first op
        return False

    @uncompiled
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        nested = any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in tree_leaves((args, kwargs)))
        if nested and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # its class is asked next, whose ops on the values inside come here
        if nested or not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
            return func(*args, **kwargs)
        made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE)
        if made_of_others and func.overloadpacket not in FLOPS:  # such as linear, which arrives in inference mode
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result


def flops(func, args: tuple, kwargs: dict, result) -> int:
    """FLOPs of one call: PyTorch's formula where there is one, else one an element, or none (see the page's head)."""
    if formula := FLOPS.get(func.overloadpacket):
        return formula(*args, **kwargs, out_val=result)
    results = [result] if len(func._schema.returns) == 1 else result
    values = [_tensors(value) for value in (*args, *kwargs.values(), *(results or ()))]
    floats = any(t.is_floating_point() or t.is_complex() for tensors in values for t in tensors)
    if not floats or _name(func).startswith(MOVES) or "_copy." in _name(func) or _puts(func, args):
        return 0
    if (few := _few(func, args)) is not None:
        return few
    return max(sum(t.numel() for t in tensors) for tensors in values)  # a value may be a list, as in _foreach_add_


def traffic(func, args: tuple, kwargs: dict, result) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an op must read, and those that it writes, each once. Both empty for a view."""
    name, arguments = _name(func), func._schema.arguments
    given = {argument: _tensors(value) for argument, value in zip(arguments, args, strict=False)}
    given |= {argument: _tensors(kwargs[argument.name]) for argument in arguments if argument.name in kwargs}
    written = [t for argument, tensors in given.items() if _writes(argument, kwargs) for t in tensors]
    theirs = {t.untyped_storage()._cdata for tensors in given.values() for t in tensors}
    made = [t for t in _tensors(result) if t.untyped_storage()._cdata not in theirs]
    if name.startswith(UNTOUCHED) or (_tensors(result) and not made and not written):
        return [], []
    unread = {argument for argument in given if argument.is_out}
    unread |= set(arguments[:1]) if name.startswith(OVERWRITE) or _puts(func, args) else set()
    unread |= set(arguments[1:2]) if SHAPE_OF_SECOND.match(name) else set()
    unread |= set(arguments) if name.startswith("new_") or "_like." in name else set()
    read = distinct(t for argument, tensors in given.items() if argument not in unread for t in tensors)
    if name.startswith(GATHER) and made:
        read[0] = min(read[0], *made, key=touched_bytes)
    written = distinct([*written, *made])
    if (few := _few(func, args)) is not None:
        parts = args[:1] + (args[3:4] if name.startswith("scatter") else ())
        part = lambda t: _part(t, few) if any(t is arg for arg in parts) else t  # noqa: E731
        read, written = list(map(part, read)), list(map(part, written))
    return read, written


def _few(func, args: tuple) -> int | None:
    """How many elements of its first argument an op reads or changes; None: all, or nobody knows before it ran."""
    name = _name(func)
    if name.startswith(INDEX_PUT):
        return _indexed(args[0], args[1])
    if name.startswith(BAGS):
        return args[1].numel() * args[0].shape[1]
    return next((args[place].numel() for start, place in SCATTER.items() if name.startswith(start)), None)


def _indexed(tensor: Tensor, indices: Iterable[Tensor | None]) -> int | None:
    """How many elements `tensor[indices]` has; None with a mask, whose values alone say it."""
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return None
    whole = [size for size, index in zip_longest(tensor.shape, indices) if index is None]
    return math.prod(torch.broadcast_shapes(*(index.shape for index in given))) * math.prod(whole)


def _puts(func, args: tuple) -> bool:
    return _name(func).startswith((*INDEX_PUT, "put_.")) and not (len(args) > 3 and args[3])


def _part(tensor: Tensor, elements: int) -> Tensor:
    """So many elements of a tensor; all, where they are no more."""
    few = elements * tensor.element_size() < touched_bytes(tensor)
    return tensor.as_strided((elements,), (1,)) if few else tensor


def _name(func) -> str:
    """Such as "add_.Tensor", also for _foreach_add_.Tensor."""
    return f"{func.overloadpacket.__name__}.{func._overloadname}".removeprefix("_foreach_")


def _tensors(value) -> list[Tensor]:
    """Those in it whose elements lie in a storage at strides: no sparse ones, and no nested."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested]


def _writes(argument, kwargs: dict) -> bool:
    """Whether the op writes into this argument; a fused optimizer into gradients only when it unscales them."""
    return (
        argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.name != "grads" or kwargs.get("grad_scale") is not None)
    )
