"""Inf and nan on their way through a run: where each came from, and which ops forgave it, tested it or carried it on.

What these words mean is said in nonfinite.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves

from memlab.mixed_precision.looking import Seen, Span, bytes_of, floats_in, look, name_of, sums, writes

COPIES = ("abs", "clone")  # isfinite and isinf test an abs; backward of clamp_min_ tests a clone of what was there


@dataclass
class Value:
    """The inf or nan in a tensor: the number of its origin, and where it lies, be it between finite numbers.

    read: whether an op forgave it or carried it on. sliced: whether an op read a part that holds only finite numbers.
    tested: whether an op tested it. source: the value of which it is an `abs` or a `clone`.
    """

    origin: int
    nan: bool
    span: Span
    read: bool = False
    sliced: bool = False
    tested: bool = False
    source: Value | None = None


class Followed:
    """Takes the place of the Meter's log, to run each op: looks at what it makes, and follows what is not finite.

    judge: tells what a new origin is, or None if it is on purpose, from the op's number, the tensor that is not finite
    after the op, what it holds, the op's inputs, and what was seen in them.
    """

    def __init__(self, judge: Callable[[int, Tensor, Seen, list, list[Seen]], Any]):
        self._judge = judge
        self._origins: list[Any] = []
        self._values: list[Value] = []
        self._value_in: WeakKeyDictionary[UntypedStorage, Value] = WeakKeyDictionary()
        self._returned: list[UntypedStorage] = []

    @property
    def found(self) -> Any:
        """The earliest origin of a value that nothing read, or dropped; or None."""
        alive = [id(value) for storage, value in self._value_in.items() if storage.nbytes()]
        for value in reversed(self._values):  # a copy comes after its source
            if value.source is not None:
                part_of_a_test = value.tested and not value.read and id(value) not in alive
                value.source.tested |= part_of_a_test
                value.source.read |= not part_of_a_test
                value.read, value.source = value.read or part_of_a_test, None
        unread = [value for value in self._values if not value.read and (not value.sliced or id(value) in alive)]
        first = min((value.origin for value in unread), default=None)
        return None if first is None else self._origins[first]

    def keep(self, result: object) -> None:
        """What the run returns is no memory that it gave back."""
        self._returned = [bytes_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def run(self, number: int, op, args: tuple, kwargs: dict):
        """Run op number `number`, look at what it made, and note what it read."""
        rule = writes(op) if isinstance(op, torch._ops.OpOverload) else None
        if rule is None:
            return op(*args, **kwargs)
        written, blind = rule
        addend = args[0] if sums(op) and args[0].layout is torch.strided else None
        if addend is not None and kwargs.get("beta", 1) == 0:  # then torch reads no number of it
            addend, blind = None, blind | {0}
        given = dict(enumerate(args)) | kwargs
        inputs = list(floats_in([value for key, value in given.items() if key not in blind]))
        seen, finite = self._look(inputs, addend) if written else (None, None)  # before they are written to
        result = op(*args, **kwargs)
        statistics = any(part in str(op) for part in ("scaled_dot_product", "ctc_loss")) and "backward" not in str(op)
        made = result[:1] if statistics and isinstance(result, tuple) else result  # what follows is for backward
        made = {id(x): x for x in floats_in([made, *(given.get(key) for key in written)]) if isinstance(x, Tensor)}
        after = [(tensor, look(tensor)) for tensor in made.values()]
        if seen is None and not all(one.finite for _, one in after):
            seen, finite = self._look(inputs, addend)

        values = [self._value_in.get(bytes_of(x)) if isinstance(x, Tensor) else None for x in inputs]
        tells = isinstance(result, Tensor) and result.dtype is not torch.bool  # a number, be it an integer
        source = values[0] if seen and name_of(op) in COPIES and not all(one.finite for _, one in after) else None
        for place, (tensor, value) in enumerate(zip(inputs, values, strict=True)):
            if value is not None and not made and (value.nan or not tells):
                value.tested = True
            elif value is not None and value is not source:
                self._read(value, tensor, look(tensor) if seen is None else seen[place])
        for tensor, one in after:
            old = self._value_in.get(bytes_of(tensor))
            origin = None if one.finite else self._origin(number, tensor, one, inputs, seen, values, finite)
            if origin is not None:
                span = Span.of(tensor)
                span = span if old is None else span.hull(old.span)
                self._values.append(Value(origin, one.nan, span, source=source))
                self._value_in[bytes_of(tensor)] = self._values[-1]
            elif old is not None and Span.of(tensor).covers(old.span):
                self._value_in.pop(bytes_of(tensor), None)
        return result

    @staticmethod
    def _look(inputs: list, addend: Tensor | None) -> tuple[list[Seen], Tensor | None]:
        """What the inputs hold; and where the first, the addend of a sum, is finite, if it isn't everywhere."""
        seen = list(map(look, inputs))
        return seen, None if addend is None or seen[0].finite else addend.isfinite()

    def _read(self, value: Value, tensor: Tensor, one: Seen) -> None:
        """Note that an op read `tensor` and saw `one`: the value in its storage, or finite numbers in or beside it."""
        span = Span.of(tensor)
        if not one.finite or span.covers(value.span):  # finite in all of it after `x[0] = 0`
            value.read = True
        elif span.meets(value.span):
            value.sliced = True

    def _origin(
        self, number: int, tensor: Tensor, after: Seen, inputs: list, seen: list, values: list, finite: Tensor | None
    ) -> int | None:
        """The number of the origin of `tensor`, which is not finite after an op that saw `inputs`; None: on purpose.

        finite: where the addend of a sum was, in a shape that broadcasts to the tensor's; None: everywhere, or no sum.
        """
        if finite is not None:
            apart = tensor.masked_fill(~finite, 0)  # what is not finite in it the product made, or the sum with it
            if not (own := look(apart)).finite:
                tensor, after = apart, own
                seen = [seen[0]._replace(nan=False, plus=False, minus=False), *seen[1:]]
        from_nan = after.nan and any(one.nan for one in seen)
        bad = [one.nan if from_nan else not one.finite for one in seen]
        known = [value.origin for value, carries in zip(values, bad, strict=True) if value is not None and carries]
        if known:
            return min(known)
        origin = self._judge(number, tensor, after, inputs, seen)
        if origin is None:  # a nan on purpose, or of memory that nobody wrote, hides no inf beside it
            pairs = zip(values, seen, strict=True)
            return min((value.origin for value, one in pairs if value is not None and not one.finite), default=None)
        self._origins.append(origin)
        return len(self._origins) - 1
