"""Parameters that are stepped as one: their masters lie one after another in a vector, and so does each state.

An elementwise optimizer asks nowhere where a parameter ends. Of fifty small ones it makes fifty small steps, or, with
foreach, each operation over a list of fifty; of one vector that holds them all it makes one step. Casts are what a step
on masters pays beyond FP32's; what it saves of such lists pays for them, unless parameters are few and large. DeepSpeed
and Megatron keep their FP32 copies so, too.

To everybody else a parameter has a master and states of its own, in its own shape: they are views.
"""

from __future__ import annotations

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
    """Whether a parameter fills whole vectors without a gap. Its dimensions may be in any order.

    What is left over at an end is computed one by one, and a CPU's fused kernel rounds that otherwise: if such a
    parameter were not left alone, the last bit of an element would depend on what lies beside it.
    """
    plain = type(p.detach()) in (Tensor, FakeTensor) and p.layout is torch.strided
    return plain and p.numel() > 0 and p.numel() % VECTOR == 0 and _is_dense(p)


def _is_dense(p: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def can_be_together(masters: Sequence[Tensor], states: Sequence[dict]) -> bool:
    """Whether states are one name for one the same kind: a tensor of the master's shape, or equal single numbers.

    On imagined hardware numbers are unknown, and taken for equal.
    """
    names = states[0].keys()
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

    def begin_step(self, states: Iterable[dict], chunk_bytes: object) -> None:
        """Break up groups of states that are gone, and with another chunk_bytes all, to be made anew."""
        alive, changed = {id(state) for state in states}, chunk_bytes != self._chunk_bytes
        for flat in {flat for flat in self._of.values() if flat is not None}:
            if changed or not all(id(state) in alive for state in flat.states):
                self._break_up(flat, alive)
        if changed:
            self._of, self._chunk_bytes = {}, chunk_bytes

    def _break_up(self, flat: FlatGroup, alive: set[int] | None = None) -> None:
        self._of.update((number, None) for number, other in self._of.items() if other is flat)
        flat.break_up([state for state in flat.states if alive is None or id(state) in alive])

    def places(self, chunk: Chunk) -> dict[int, Tensor]:
        """Where the masters of those that may be stepped as one are to be made, by a parameter's id. FP32."""
        fit: dict[int, dict[int, Tensor]] = {}
        for group, p in chunk:
            if id(p) not in self._of and _may_begin(p, p):
                fit.setdefault(id(group), {})[id(p)] = p
        places = {}
        for its in fit.values():
            if len(its) > 1:
                numel, device = sum(map(Tensor.numel, its.values())), next(iter(its.values())).device
                places |= zip(its, views_in(torch.empty(numel, device=device), its.values()), strict=True)
        return places

    def first(self, chunk: Chunk, masters: list[Tensor], states: list[dict], *, begin: bool) -> tuple:
        """A chunk, its masters and states in another order, flat groups first, and these, each with its options.

        begin: whether parameters that are new here may become a flat group.
        """
        if begin and not self._of.keys() >= {id(p) for _, p in chunk}:
            self._begin(chunk, masters, states)
        found: dict[FlatGroup | None, list[int]] = {}
        for i, (_, p) in enumerate(chunk):
            found.setdefault(self.of(p), []).append(i)
        alone, flats, order = found.pop(None, []), [], []
        for flat, its in found.items():
            dense = all(chunk[i][1].grad.layout is torch.strided for i in its)
            if dense and len({id(chunk[i][0]) for i in its}) == 1 and flat.holds([states[i] for i in its]):
                flats.append((chunk[its[0]][0], flat))
                order += its
            else:
                self._break_up(flat)
                alone += its
        order += alone
        chunk, states = ([its[i] for i in order] for its in (chunk, states))
        masters = [state.get("master", masters[i]) for i, state in zip(order, states, strict=True)]  # some have moved
        return chunk, masters, states, flats

    def _begin(self, chunk: Chunk, masters: list[Tensor], states: list[dict]) -> None:
        found: dict[int, list[tuple]] = {}
        for (group, p), m, state in zip(chunk, masters, states, strict=True):
            if id(p) not in self._of:
                self._of[id(p)] = None
                if m is not p and _may_begin(p, m):
                    found.setdefault(id(group), []).append((id(p), m, state))
        for members in found.values():
            numbers, masters, states = zip(*members, strict=True)
            if len(members) > 1 and can_be_together(masters, states):
                self._of |= dict.fromkeys(numbers, FlatGroup(masters, states))


def _may_begin(p: Tensor, master: Tensor) -> bool:
    return can_be_flat(master) and p.grad.layout is torch.strided


class FlatGroup:
    """What an optimizer sees instead of some parameters: one vector of masters, and its state.

    masters: of each parameter. states: of each, as `can_be_together` wants them, with "master" and the optimizer's own;
    from now on they hold views.

    master: (n,). state: what the optimizer keeps of it, (n,) or a single number, such as a counter of steps. Of those
    each parameter has one of its own, so that a saved state counts each parameter, as it would elsewhere.
    """

    def __init__(self, masters: Sequence[Tensor], states: Sequence[dict]):
        self.count, self.states = len(masters), list(states)
        self.master = _joined(masters)
        self.state = {name: _copied([s[name] for s in states], masters) for name in states[0] if name != "master"}
        self.masters = views_in(self.master, masters)
        self._share()

    def hand_out(self) -> None:
        """A step is over: the parameters' states become what the optimizer left in `state`."""
        if not _all_same(self.state.values(), self._given):
            self._share()
        for first, others in self._counters:
            others.copy_(first)
        self._versions = self._counted()

    def _share(self) -> None:
        """Give each parameter's state views of what is in `state`."""
        self._counters: list[tuple[Tensor, Tensor]] = []  # of the first parameter, and of all others
        shared = {"master": self.masters}
        for name, value in self.state.items():
            shared[name] = [value] * self.count
            if isinstance(value, Tensor) and value.shape == self.master.shape:
                shared[name] = views_in(value, self.masters)
            elif isinstance(value, Tensor) and value.dim() == 0:
                with _where(value):
                    others = value.expand(self.count - 1).clone()
                shared[name] = [value, *others.unbind()]
                self._counters.append((value, others))
        for state, values in zip(self.states, zip(*shared.values(), strict=True), strict=True):
            state.clear()
            state.update(zip(shared, values, strict=True))
        self._given = list(self.state.values())  # as long as these are the same, so are the views of them
        self._shared = [value for state in self.states for value in state.values()]
        self._places, self._versions = list(map(_place, self._shared)), self._counted()

    def break_up(self, states: Sequence[dict]) -> None:
        """Give these of the parameters' states memory of their own, one kind of state after the other."""
        names, shared = ["master", *self.state], set(map(id, self._shared))
        for its in (self.masters, self.state, self._given, self._shared, self._counters):
            its.clear()
        del self.master
        for name in names:
            for state in states:
                if id(state.get(name)) in shared and isinstance(state[name], Tensor):
                    with _where(state[name]):
                        state[name] = state[name].clone()

    def holds(self, states: Sequence[dict]) -> bool:
        """Whether the parameters' states are still those. Their values may be others, but for the counters'."""
        found = [value for state in states for value in state.values()]
        same = _all_same(states, self.states) and _all_same(found, self._shared)
        return same and list(map(_place, found)) == self._places and self._counted() == self._versions

    def _counted(self) -> list[int]:
        """How often somebody wrote to the counters."""
        return [0 if its.is_inference() else its._version for pair in self._counters for its in pair]


def _joined(masters: Sequence[Tensor]) -> Tensor:
    """One vector of all elements: the memory where they are, if they lie one after another, else a copy. (n,)."""
    first, at = masters[0], masters[0].storage_offset()
    for master in masters:
        if master.untyped_storage()._cdata != first.untyped_storage()._cdata or master.storage_offset() != at:
            return _copied(masters, masters)
        at += master.numel()
    return first.as_strided((at - first.storage_offset(),), (1,), first.storage_offset())


def _copied(values: list, masters: Sequence[Tensor]) -> object:
    """A state of all of them: a copy, since a loaded one may be somebody else's, too."""
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].dim() == 0:
        with _where(values[0]):
            return values[0].clone()
    whole = torch.empty(sum(map(Tensor.numel, masters)), dtype=values[0].dtype, device=values[0].device)
    torch._foreach_copy_(views_in(whole, masters), list(values))
    return whole


def _where(tensor: Tensor) -> AbstractContextManager:
    """What is made in this block lies where the tensor does: beside an imagined card, or on it."""
    return main_memory() if in_main_memory(tensor) else nullcontext()


def _place(value: object) -> int | None:
    """Where a tensor's elements are, which changes with its `data`. An imagined one has no address."""
    if isinstance(value, FakeTensor):
        return value.untyped_storage()._cdata
    return value.data_ptr() if isinstance(value, Tensor) else None


def _all_same(found: Iterable[object], expected: list[object]) -> bool:
    found = list(found)
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))
