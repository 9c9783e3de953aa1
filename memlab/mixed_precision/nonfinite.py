"""Where the first nan came from: run the step again, look at every op's result, and name the op that made it.

A loss that is nan says nothing: one inf in one layer makes nan of all that follows, and the gradients carry it to every
parameter. The culprit is the first op whose result is not finite though what it was given was.

But not every inf is a mistake: masks hold -inf on purpose, and log(0) does no harm where `where` drops it. So

- an op **made** an inf if its result holds one, and no input of it, tensor or scalar, is inf or nan;
- an op **made** a nan if its result holds one, and no input is nan: nobody wants a nan, whatever it is made of;
- a nan or +inf **came in** with a tensor from outside the run (or -inf, with a parameter or its gradient), or a nan
  with a scalar, if the result of an op that reads it is not finite either;
- what is not finite and depends on these is no news: it has the earliest origin among the inputs that are not finite
  (that are nan, if it is nan and one of them is);
- a value is **forgiven** if an op reads it and every number that the op makes is finite. Tests (`isfinite`, `>`), ops
  that make only integers, and overwriting (`zero_`, `copy_`, `out=`) forgive nothing.

Reported is the earliest origin of a value that was neither forgiven nor carried on to another by the end: a loss, a
gradient, a weight, or whatever nobody has read, be it freed by then.

The inf of `masked_fill(mask, -inf)` and `x * inf` is a scalar's, a mask from outside may hold -inf, and `fill_` or
`where` may place even a nan. But 300 · 300 in FP16, 0 · inf and the softmax of a row that is masked throughout are
found. Views compute nothing, fresh memory (`empty`) holds anything: passed over.

Not here: a score that overflows to -inf, if softmax makes 0 of it, and a divisor that is inf, are forgiven. An inf that
is dropped because only a finite slice of its tensor is read (`x.log()[1:]`) is reported all the same. Where an op adds
a product to a mask (`baddbmm`), an inf of the product beside the mask's -inf is taken for the mask's. What BatchNorm
writes into its running statistics is looked at when it is next read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from memlab.memory_timeline import Line, Meter
from memlab.memory_timeline.ownership import Members, Owned, gradients_of, named_roots, owned_by_optimizer, storages_of
from memlab.memory_timeline.recognition import Recognition
from memlab.memory_timeline.storages import Storages
from memlab.mixed_precision.following import Followed
from memlab.mixed_precision.looking import Seen, bytes_of, numbers_of

PLACING = ("fill", "full", "where", "scalar_tensor", "pad")  # ops whose scalar is put into the result as it is


@dataclass(frozen=True)
class NonFinite:
    """The first inf or nan of a run that was not forgiven, and the op that made it; or first showed it, if it came in.

    kind: "inf" or "nan". count, shape, dtype: how many elements are, in which tensor. largest_input: the largest finite
    |input| of the op; limit: the largest number of the dtype. came_in: with what it came in, such as "parameter
    head.weight" or "a scalar"; or "". op, phase ("forward", "backward", "recompute", "optimizer"), module and line are
    the Meter's: in backward, module and line are those of the forward op `backward_of`.
    """

    kind: str
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    largest_input: float
    limit: float
    came_in: str
    op: str
    backward_of: str
    phase: str
    module: str
    line: Line

    def __str__(self) -> str:
        what = f"{self.count:,} {self.kind} of {math.prod(self.shape):,} {str(self.dtype).removeprefix('torch.')}"
        op = self.op + (f" (the backward of {self.backward_of})" if self.backward_of else "")
        place = f"in {self.phase}" + (f" of {self.module}" if self.module else "") + f", `{self.line}`"
        if self.came_in:
            return f"{what} came in with {self.came_in}, first read by {op} {place}"
        return (
            f"{op} made {what} {place}: its largest finite input is {self.largest_input:,.6g}, "
            f"the largest number of its format {self.limit:,.6g}"
        )


def first_nonfinite(fn: Callable, *args, **kwargs) -> NonFinite | None:
    """Run fn(*args, **kwargs) once, and return the origin of its inf or nan by the rule above; or None.

        print(first_nonfinite(lambda: scaler.scale(model(x, y)).backward()))

    The run is a real one: gradients are added to, an optimizer in it steps, random numbers are drawn. So to replay a
    step that failed, first put weights, gradients and seed back as they were before it. The looking itself changes
    nothing and draws no numbers; it reads every result, waits for the GPU at every op, and takes several times as
    long as the step.

    What fn raises passes through. Raises NotImplementedError for tensors that hide their numbers (nested, mkldnn).
    """
    watch = _Watch({f"argument {name}": value for name, value in [*enumerate(args), *kwargs.items()]})
    with watch:
        fn(*args, **kwargs)
    return watch.followed.found


class _Arrivals(Recognition):
    """Also what comes in only during the run is given its name before an op reads it."""

    def learn(self, model: Module) -> None:
        """The names in a model that the run turns out to use."""
        self._here.learn(model, own=type(model).__name__)
        members = Members.of(roots := named_roots([model]))
        self.names.learn(roots, members)
        self.adopt_unseen(members.owned())

    def meet_held(self, parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer holds from before came in with it: it was not made in the run."""
        self.adopt_unseen(gradients_of(parameters, self.names))
        self.adopt_unseen(owned_by_optimizer(optimizer, self.names))

    def adopt_unseen(self, owned: Iterable[Owned]) -> None:
        """Adopt those that nobody has seen yet."""
        self.adopt(
            each for each in owned if all(storage._cdata not in self._live for storage in storages_of(each.tensor))
        )


class _Watch(Meter):
    """A Meter knows every op's phase, module and line; this one also what is from outside, and by which name."""

    def __init__(self, arguments: dict[str, object]):
        super().__init__()
        self._arguments = arguments
        self.followed = Followed(self._judge)

    def _make_recognition(self, storages: Storages) -> _Arrivals:
        return _Arrivals(self._modules, storages, imagined=self._imagined)

    def _set_up(self, stack: ExitStack) -> None:
        stack.callback(register_module_forward_pre_hook(self._meet_model).remove)  # before the meter's, which names it
        super()._set_up(stack)
        self._log = self.followed
        stack.callback(setattr, self, "_log", None)
        for name, value in self._arguments.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Module):
                    self._recognition.learn(leaf)
                elif isinstance(leaf, Tensor):
                    self._recognition.adopt_unseen([Owned(leaf, "input", name)])

    def _meet_model(self, module: Module, args: tuple) -> None:
        if self._here.name(module) is None and self._here.modules == [""]:
            self._recognition.learn(module)
            for place, leaf in enumerate(tree_leaves(args)):
                if isinstance(leaf, Tensor):
                    name = f"argument {place} of {type(module).__name__}"
                    self._recognition.adopt_unseen([Owned(leaf, "input", name)])

    def _judge(self, number: int, tensor: Tensor, after: Seen, inputs: list, seen: list[Seen]) -> NonFinite | None:
        """A new origin: `tensor` is not finite after an op that saw `inputs`. None if that is on purpose."""
        largest = max((one.largest for one in seen), default=0.0)
        if all(one.finite for one in seen):
            return self._report(number, tensor, "nan" if not (after.plus or after.minus) else "inf", largest, "")
        if after.nan and not any(one.nan for one in seen):
            return self._report(number, tensor, "nan", largest, "")
        for value, one in zip(inputs, seen, strict=True):
            if isinstance(value, Tensor) and not one.finite:
                bearer, may_mask = self._bearer(value)
                if bearer and (one.nan or one.plus or not may_mask):
                    return self._report(number, value, "nan" if one.nan else "inf", largest, bearer)
            elif one.nan and not any(word in self._ops[number].name for word in PLACING):
                return self._report(number, tensor, "nan", largest, "a scalar")
        return None

    def _bearer(self, tensor: Tensor) -> tuple[str, bool]:
        """What brought a tensor in from outside ("": it was made in the run), and whether it could be a mask."""
        storage = self._live.get(bytes_of(tensor)._cdata)
        category, name = self._history.owners.get(storage, ("", ""))
        if storage is not None and self._history.births[storage].op >= 0 and category != "input":
            return "", False
        owned = {"parameter": f"parameter {name}", "gradient": f"the gradient of {name}", "optimizer_state": name}
        if isinstance(tensor, Parameter) or category in owned:
            return owned.get(category, "a parameter"), False
        return (
            f"buffer {name}" if category == "buffer" else name if "argument" in name else "a tensor from outside",
            True,
        )

    def _report(self, number: int, tensor: Tensor, kind: str, largest: float, came_in: str) -> NonFinite:
        op, numbers = self._ops[number], numbers_of(tensor)
        bad = numbers.isnan() if kind == "nan" else numbers.isinf()
        return NonFinite(
            kind=kind,
            count=int((bad.any(-1) if tensor.is_complex() else bad).sum()),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            largest_input=largest,
            limit=torch.finfo(tensor.dtype).max,
            came_in=came_in,
            op=op.name,
            backward_of=self._ops[op.forward_op].name if op.forward_op >= 0 else "",
            phase=op.phase,
            module=op.module,
            line=self._lines[op.line],
        )
