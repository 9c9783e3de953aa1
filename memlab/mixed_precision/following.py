"""Inf and nan on their way through a run: where each came from, and which ops forgave it or carried it on.

What these words mean is said in nonfinite.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage

from memlab.mixed_precision.looking import Seen, bytes_of, floats_in, look, name_of, writes

COPIES = ("abs", "clone")  # isfinite and isinf test an abs; backward of clamp_min_ tests a clone of what was there


@dataclass
class Value:
    """The inf or nan in some memory: the number of its origin. read: whether an op forgave it or carried it on."""

    origin: int
    read: bool = False


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

    @property
    def found(self) -> Any:
        """The earliest origin of a value that no op has read; or None."""
        first = min((value.origin for value in self._values if not value.read), default=None)
        return None if first is None else self._origins[first]

    def run(self, number: int, op, args: tuple, kwargs: dict):
        """Run op number `number`, look at what it made, and note what it read."""
        rule = writes(op) if isinstance(op, torch._ops.OpOverload) else None
        if rule is None:
            return op(*args, **kwargs)
        written, blind = rule
        given = dict(enumerate(args)) | kwargs
        inputs = list(floats_in([value for key, value in given.items() if key not in blind]))
        seen = list(map(look, inputs)) if written else None  # before they are written to
        result = op(*args, **kwargs)
        statistics = any(part in str(op) for part in ("scaled_dot_product", "ctc_loss")) and "backward" not in str(op)
        made = result[:1] if statistics and isinstance(result, tuple) else result  # what follows is for backward
        made = {id(x): x for x in floats_in([made, *(given.get(key) for key in written)]) if isinstance(x, Tensor)}
        after = [(tensor, look(tensor)) for tensor in made.values()]
        if seen is None and not all(one.finite for _, one in after):
            seen = list(map(look, inputs))

        values = [self._value_in.get(bytes_of(x)) if isinstance(x, Tensor) else None for x in inputs]
        copied = values[0] if values and name_of(op) in COPIES else None
        for place, (tensor, value) in enumerate(zip(inputs, values, strict=True)):
            if value is not None and made and value is not copied:
                one = look(tensor) if seen is None else seen[place]
                value.read = value.read or not one.finite or is_whole(tensor)
        for tensor, one in after:
            if one.finite and is_whole(tensor):
                self._value_in.pop(bytes_of(tensor), None)
            elif not one.finite and copied is not None:
                self._value_in[bytes_of(tensor)] = copied
            elif not one.finite and (origin := self._origin(number, tensor, one, inputs, seen, values)) is not None:
                self._values.append(Value(origin))
                self._value_in[bytes_of(tensor)] = self._values[-1]
        return result

    def _origin(self, number: int, tensor: Tensor, after: Seen, inputs: list, seen: list, values: list) -> int | None:
        """The number of the origin of `tensor`, not finite after an op that saw `inputs`; None: it is on purpose."""
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


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor has all of its memory, so that nothing which is not finite can lie beside it."""
    if tensor.layout is not torch.strided:
        return True
    return 0 not in tensor.stride() and tensor.numel() * tensor.itemsize >= bytes_of(tensor).nbytes()
