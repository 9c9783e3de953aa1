"""Which optimizers and parameters can be stepped chunk by chunk on masters: the others are refused, with what to do."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

HALVES = (torch.float16, torch.bfloat16)


def refuse_class(optimizer_class: object) -> None:
    """Raise TypeError or ValueError for what is no optimizer's class, or one that MasterWeights cannot step."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        found = f"an {type(optimizer_class).__name__}" if isinstance(optimizer_class, Optimizer) else optimizer_class
        raise TypeError(
            f"expected an optimizer's class, found {found}; write MasterWeights(model.parameters(), torch.optim.AdamW, "
            "lr=3e-4), with the class first and what it is made with after it"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            "expected an optimizer that updates each parameter from its own gradient, found "
            f"{optimizer_class.__name__}, whose step calls a closure several times; use it on FP32 weights"
        )


def refuse_shared(params: list[Tensor]) -> None:
    """Raise ValueError for two 16-bit parameters in the same memory: each would have a master, and one win."""
    found: dict[tuple[int, int], Tensor] = {}
    for p in params:
        if p.dtype in HALVES and p.layout is torch.strided and not is_lazy(p) and p.numel():
            other = found.setdefault((p.untyped_storage()._cdata, p.storage_offset()), p)
            if other is not p:
                raise ValueError(
                    f"expected a parameter for each memory, found two of {tuple(other.shape)} and {tuple(p.shape)} in "
                    "the same; tie weights by giving both modules one Parameter"
                )


class Counters:
    """Whether an optimizer counts beyond parameters, and so once a chunk: seen in its first step of several."""

    def __init__(self):
        self._counted: list[set[object]] | None = []  # by each chunk of a step; None: it was seen

    def begin(self) -> None:
        """A step begins."""
        if self._counted:
            self._counted.clear()

    @contextmanager
    def watch(self, inner: Optimizer) -> Iterator[None]:
        """The optimizer's own step of one chunk runs in the block."""
        if self._counted is None:
            yield
            return
        before = _numbers(inner)
        yield
        self._counted.append({name for name, now in _numbers(inner).items() if before.get(name, 0) != now})

    def refuse(self, inner: Optimizer) -> None:
        """The step is over: raise ValueError if more than one of its chunks counted the same."""
        if self._counted is None or len(self._counted) < 2:
            return
        times = Counter(name for names in self._counted for name in names)
        self._counted = None
        if twice := [name if isinstance(name, str) else name[0] for name, count in times.items() if count > 1]:
            raise ValueError(
                f"expected {type(inner).__name__} to count in a parameter's state or a group's option, found "
                f"{' and '.join(map(repr, twice))} counted once a chunk; use chunk_bytes=None"
            )


def _numbers(inner: Optimizer) -> dict[object, int | float]:
    """An optimizer's numbers that are no parameter's: attributes, and how often tensors among options were changed."""
    found = {name: value for name, value in vars(inner).items() if isinstance(value, int | float)}
    options = [option for group in inner.param_groups for option in group.items()]
    tensors = [(name, value) for name, value in [*vars(inner).items(), *options] if isinstance(value, Tensor)]
    return found | {(name, value): value._version for name, value in tensors}  # held, so that each is told apart


def keep_options(inner: Optimizer, after: list[tuple[dict, dict]]) -> None:
    """What an optimizer wrote to its groups, such as a counter: every chunk began with the same and ends so.

    after: of each chunk, its groups, each with the options that the chunk's step left. Raises ValueError if a group's
    differ from chunk to chunk.
    """
    last = {id(group): options for group, options in after}
    for group, options in after:
        its = last[id(group)]
        if others := [name for name in options | its if not _same(options.get(name), its.get(name))]:
            raise ValueError(
                f"expected {type(inner).__name__} to write a group the same options in each chunk, found another "
                f"{' and '.join(map(repr, others))}: it looks at all parameters together; use chunk_bytes=None"
            )
    for group, options in after:
        group.update(options)


def _same(a: object, b: object) -> bool:
    """Whether two options are equal: also tensors, of any shape, and nan."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())
    return bool(a == b or (a != a and b != b))
