"""Parameters that are stepped as one: their masters lie one after another in a vector, and so does each state.

An elementwise optimizer asks nowhere where a parameter ends. Of fifty small ones it makes fifty small steps, or, with
foreach, each operation over a list of fifty; of one vector that holds them all it makes one step. Casts are what a step
on masters pays beyond FP32's; what it saves of such lists pays for them, unless parameters are few and large. DeepSpeed
and Megatron keep their FP32 copies so, too.

To everybody else a parameter has a master and states of its own, in its own shape: they are views.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, optim
from torch._subclasses.fake_tensor import FakeTensor

from memlab.memory_arithmetic.optimizers import VECTOR
from memlab.memory_timeline import in_main_memory, main_memory

Chunk = list[tuple[dict, Tensor]]
"""Parameters, each with its group of an optimizer's options."""
ELEMENTWISE = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}
"""Optimizers that do to an element what its gradient and states say, wherever it lies.

Adafactor and Muon look at rows and columns; a class derived from one of these may do anything.
"""


def can_be_flat(p: Tensor) -> bool:
    """Whether a parameter fills whole vectors without a gap.

    What is left over at an end is computed one by one, and a CPU's fused kernel rounds that otherwise: if such a
    parameter were not left alone, the last bit of an element would depend on what lies beside it.
    """
    return p.numel() > 0 and p.numel() % VECTOR == 0 and is_dense(p)


def is_dense(p: Tensor) -> bool:
    """Whether this is a plain tensor whose elements lie side by side. Its dimensions may be in any order."""
    if type(p.detach()) not in (Tensor, FakeTensor) or p.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def can_be_together(states: Sequence[dict]) -> bool:
    """Whether states are one name for one the same kind: a tensor of the master's shape, or equal single numbers.

    states: of each parameter, with "master". On imagined hardware numbers are unknown, and taken for equal.
    """
    names, masters = states[0].keys(), [state.get("master") for state in states]
    return all(state.keys() == names for state in states) and all(
        _fit([state[name] for state in states], masters) for name in names
    )


def _fit(values: list, masters: Sequence[Tensor]) -> bool:
    first = values[0]
    if not isinstance(first, Tensor):
        plain = type(first) in (type(None), bool, int, float)
        return plain and all(type(value) is type(first) and value == first for value in values)
    if not all(isinstance(v, Tensor) and v.dtype is first.dtype and v.device == first.device for v in values):
        return False
    if all(v.shape == m.shape and v.stride() == m.stride() for v, m in zip(values, masters, strict=True)):
        return True
    if any(value.dim() for value in values) or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return isinstance(first, FakeTensor) or bool((torch.stack(values) == first).all())


def views_in(flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """For each of these dense tensors a view of its shape and strides, one after another. flat: (n,)."""
    views, start = [], flat.storage_offset()
    for tensor in tensors:
        views.append(flat.as_strided(tensor.shape, tensor.stride(), start))
        start += tensor.numel()
    return views


class FlatGroups:
    """Which parameters of an optimizer are stepped as one.

    Those of one group of options that have their first step in one chunk, or their first after a state dict was loaded.
    If one of them is left out of a step, if somebody replaces a state, or writes to a counter other than through
    `.data`, each is stepped alone from then on, with states in memory of its own: their counters may differ.
    """

    def __init__(self):
        self._of: dict[int, FlatGroup | None] = {}  # by a parameter's id; None: it is stepped alone
        self._chunk_bytes: object = None

    def of(self, p: Tensor) -> FlatGroup | None:
        """The flat group of a parameter that has one."""
        return self._of.get(id(p))

    def begin_step(self, states: dict[Tensor, dict], chunk_bytes: object) -> None:
        """Break up groups of which a state is gone; all, to be made anew, if chunk_bytes are others."""
        changed = chunk_bytes != self._chunk_bytes
        if changed or len(self._of) > len(states):
            known, alive = set(map(id, states)), set(map(id, states.values()))
            for flat in {flat for flat in self._of.values() if flat is not None}:
                if changed or not alive.issuperset(map(id, flat.states)):
                    self._break_up(flat, states)
            self._of = {} if changed else {number: flat for number, flat in self._of.items() if number in known}
            self._chunk_bytes = chunk_bytes

    def _break_up(self, flat: FlatGroup, states: dict[Tensor, dict]) -> None:
        self._of.update([(number, None) for number, other in self._of.items() if other is flat])
        alive = set(map(id, states.values()))
        flat.break_up([state for state in flat.states if id(state) in alive])

    def places(self, chunk: Chunk) -> dict[int, Tensor]:
        """Where to make the masters of those that may be stepped as one, by a parameter's id. FP32, not yet filled."""
        fit: dict[int, dict[int, Tensor]] = {}
        for group, p in chunk:
            if id(p) not in self._of and _may_begin(p, p):
                fit.setdefault(id(group), {})[id(p)] = p
        places = {}
        for its in fit.values():
            if len(its) > 1:
                numel, device = sum(map(Tensor.numel, its.values())), next(iter(its.values())).device
                places |= zip(
                    its, views_in(torch.empty(numel, dtype=torch.float32, device=device), its.values()), strict=True
                )
        return places

    def begin(self, chunk: Chunk, states: list[dict]) -> None:
        """Make a group of those in the chunk that have never been asked, where they fit together."""
        if self._of.keys() >= {id(p) for _, p in chunk}:
            return
        found: dict[int, tuple[dict, list, list]] = {}
        for (group, p), state in zip(chunk, states, strict=True):
            if id(p) not in self._of:
                self._of[id(p)] = None
                if "master" in state and _may_begin(p, state["master"]):
                    _, numbers, members = found.setdefault(id(group), (group, [], []))
                    numbers.append(id(p))
                    members.append(state)
        for group, numbers, members in found.values():
            if len(members) > 1 and can_be_together(members):
                self._of |= dict.fromkeys(numbers, FlatGroup(group, members))

    def whole(self, chunk: Chunk, states: list[dict], of_all: dict[Tensor, dict]) -> tuple[list[FlatGroup], list[int]]:
        """The groups that can be stepped, and where in the chunk their parameters are, then where all others are.

        states: the chunk's. of_all: every parameter's.
        """
        found: dict[FlatGroup | None, list[int]] = {}
        for i, (_, p) in enumerate(chunk):
            found.setdefault(self._of.get(id(p)), []).append(i)
        alone, flats, order = found.pop(None, []), [], []
        for flat, its in found.items():
            suit = all(chunk[i][0] is flat.group and not chunk[i][1].grad.is_sparse for i in its)
            if suit and flat.holds([states[i] for i in its]):
                flats.append(flat)
                order += its
            else:
                self._break_up(flat, of_all)
                alone += its
        return flats, order + sorted(alone)


def _may_begin(p: Tensor, master: Tensor) -> bool:
    return can_be_flat(master) and not p.grad.is_sparse


class FlatGroup:
    """What an optimizer sees instead of some parameters: one vector of masters, and its state.

    group: of options, that of all of them. states: of each, as `can_be_together` wants them, with "master" and the
    optimizer's own; from now on they hold views.

    master: (n,). state: what the optimizer keeps of it, (n,) or a single number, such as a counter of steps. Of those
    each parameter has one of its own, so that a saved state counts each parameter, as it would elsewhere.
    """

    def __init__(self, group: dict, states: Sequence[dict]):
        self.group, self.states, self.count = group, list(states), len(states)
        masters = [state["master"] for state in states]
        self.master, self.state = _joined(masters), {}
        self.masters = views_in(self.master, masters)
        for state, master in zip(states, self.masters, strict=True):
            state["master"] = master
        del masters
        self._counters: dict[str, tuple[Tensor, Tensor]] = {}  # by name: the first parameter's, and all others'
        for name in [name for name in states[0] if name != "master"]:  # one after the other: the old ones go
            self.state[name] = _together([state[name] for state in states], self.masters)
            self._spread(name)
        self._note()

    def _spread(self, name: str) -> None:
        """Give each parameter's state its part of a state in `state`."""
        value, parts = self.state[name], [self.state[name]] * self.count
        if isinstance(value, Tensor) and value.shape == self.master.shape:
            parts = views_in(value, self.masters)
        elif isinstance(value, Tensor) and value.dim() == 0:
            with where_it_is(value):
                others = value.expand(self.count - 1).clone()
            parts, self._counters[name] = [value, *others.unbind()], (value, others)
        for state, part in zip(self.states, parts, strict=True):
            state[name] = part

    def _note(self) -> None:
        """What is here when a step ends: the optimizer's states, and their parts, by identity and by place."""
        self._given = list(self.state.values())
        self._parts = _values(self.states)
        self._place = _imagined_place if isinstance(self.master, FakeTensor) else Tensor.data_ptr
        self._tensors = [part for part in self._parts if isinstance(part, Tensor)]
        self._places, self._versions = list(map(self._place, self._tensors)), self._counted()

    def hand_out(self) -> None:
        """A step is over: the parameters' states become what the optimizer left in `state`."""
        if not all_same(list(self.state.values()), self._given):
            self._counters.clear()
            for state in self.states:
                for name in state.keys() - self.state.keys() - {"master"}:
                    del state[name]
            for name in self.state:
                self._spread(name)
            self._note()
        for first, others in self._counters.values():
            others.copy_(first)
        self._versions = self._counted()

    def holds(self, states: Sequence[dict]) -> bool:
        """Whether the parameters' states are still those. Their values may be others, but for the counters'."""
        return (
            all_same(states, self.states)
            and all_same(_values(states), self._parts)
            and list(map(self._place, self._tensors)) == self._places  # another since `data` was assigned to
            and self._counted() == self._versions
        )

    def _counted(self) -> list[int]:
        """How often somebody wrote to the counters."""
        return [0 if its.is_inference() else its._version for pair in self._counters.values() for its in pair]

    def break_up(self, states: Sequence[dict]) -> None:
        """Give these of the parameters' states memory of their own, one kind of state after the other."""
        names, parts = ["master", *self.state], set(map(id, self._parts))
        for its in (self.masters, self.state, self._given, self._parts, self._tensors, self._counters):
            its.clear()
        del self.master
        with torch.inference_mode(False):
            for name, state in itertools.product(names, states):
                if id(state.get(name)) in parts and isinstance(state[name], Tensor):
                    with where_it_is(state[name]):
                        state[name] = state[name].clone()


def _joined(masters: Sequence[Tensor]) -> Tensor:
    """One vector of all elements: the memory where they are, if they lie one after another, else a copy. (n,)."""
    first, at = masters[0], masters[0].storage_offset()
    for master in masters:
        if master.untyped_storage()._cdata != first.untyped_storage()._cdata or master.storage_offset() != at:
            return _vector(masters, masters)
        at += master.numel()
    return first.as_strided((at - first.storage_offset(),), (1,), first.storage_offset())


def _together(values: list, masters: Sequence[Tensor]) -> object:
    """One state of all of them: a copy, since a loaded one may be somebody else's, too."""
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].dim():
        return _vector(values, masters)
    with where_it_is(values[0]):
        return values[0].clone()


def _vector(parts: Sequence[Tensor], masters: Sequence[Tensor]) -> Tensor:
    """A copy of these, which are of the masters' shapes, one after another. (n,)."""
    whole = torch.empty(sum(map(Tensor.numel, parts)), dtype=parts[0].dtype, device=parts[0].device)
    torch._foreach_copy_(views_in(whole, masters), list(parts))
    return whole


def where_it_is(tensor: Tensor) -> AbstractContextManager:
    """What is made in this block lies where the tensor does: beside an imagined card, or on it."""
    return main_memory() if in_main_memory(tensor) else nullcontext()


def _imagined_place(tensor: Tensor) -> int:
    """Instead of an address, which an imagined tensor has not."""
    return tensor.untyped_storage()._cdata


def _values(states: Sequence[dict]) -> list[object]:
    return list(itertools.chain.from_iterable(map(dict.values, states)))


def all_same(found: Sequence[object], expected: Sequence[object]) -> bool:
    """Whether these are the same objects."""
    return len(found) == len(expected) and all(map(operator.is_, found, expected))
