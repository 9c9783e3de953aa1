"""The meter's notes, and what they come to: from numbers taken in passing to a Timeline in words.

While code runs, the meter only appends to the lists below. Afterwards every question has its answer in them: a storage
born in forward and still there when a backward op runs is an activation; the node in whose formula it is read is the
one that saved it; a storage that became some parameter's `.grad` was a gradient all along.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import torch

from memlab.memory_timeline.events import Event, Storage
from memlab.memory_timeline.lines import Lines
from memlab.memory_timeline.timeline import Timeline

HELD = "; a variable still holds it"
OUTSIDE = ("input", "a tensor from outside the meter")
CLONE = torch.ops.aten.clone.default
SET = {getattr(torch.ops.aten.set_, name) for name in torch.ops.aten.set_.overloads()}  # how one comes from a process
BEFORE, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "before", "forward", "backward", "recompute", "optimizer"


class Rows:
    """A table in one flat list: noting a row is `rows.flat += (a, b, c)`, the cheapest thing Python can do with it.

    Nothing is made for the garbage collector to visit; rows become NamedTuples when they are read.
    """

    def __init__(self, row: type):
        self.row, self.width = row, len(row._fields)
        self.flat: list = []

    def __len__(self) -> int:
        return len(self.flat) // self.width

    def __getitem__(self, number: int):
        start = number * self.width
        return self.row(*self.flat[start : start + self.width])

    def __iter__(self):
        return map(self.row, *(self.flat[column :: self.width] for column in range(self.width)))


class Op(NamedTuple):
    """One op. `forward_op`: in backward, the number of the op whose gradient this is (-1: unknown).
    `node`: the sequence number of the autograd node being evaluated (-1: none)."""

    func: Any
    phase: str
    line: int
    module: str
    forward_op: int
    node: int

    @property
    def name(self) -> str:
        """The op's name without the overload; PyTorch's own namespace, aten, is left out."""
        if isinstance(self.func, str):
            return self.func
        schema = getattr(self.func, "_schema", None)
        if schema is None:  # of a higher-order op, such as flex_attention
            return self.func.name()
        space, _, name = schema.name.partition("::")
        return name if space == "aten" else f"{space}::{name}"


class Birth(NamedTuple):
    """A storage seen for the first time. `op` -1: it existed before the first op."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str
    op: int


class Change(NamedTuple):
    """A storage's bytes changed by `delta`, during op number `op` (-1: before the first) or after it."""

    storage: int
    delta: int
    op: int
    phase: str
    line: int


NO_OP = Op("", BEFORE, -1, "", -1, -1)


def _shared(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.untyped_storage().is_shared()  # PyTorch says so of all that lies on a GPU


def friendly(op: str) -> str:
    """The name under which readers know an op: "addmm" is a linear layer, and every fused attention is attention."""
    if "scaled_dot_product" in op:
        return "attention"
    return {"addmm": "linear", "mm": "linear", "convolution": "conv"}.get(op, op.removeprefix("native_").strip("_"))


class History:
    """All that the meter noted, in the order in which it happened, and how to read it."""

    def __init__(self, device: str | None = None):
        self.device = device  # what to call the device of every storage (None: each its own)
        self.held = 0  # bytes, of storages that are not in `elsewhere`
        self.elsewhere: set[int] = set()  # storages in main memory, where the others are on an imagined card
        self.lines = Lines()
        self.ops = Rows(Op)
        self.births = Rows(Birth)  # one row for each storage, by its number
        self.changes = Rows(Change)
        self.sizes: list[int] = []  # bytes each storage holds now
        self.last_read: list[int] = []  # the op that read each storage last (-1: none did)
        self.owners: dict[int, tuple[str, str]] = {}  # storage → (category, name), when somebody owns it
        self.read_in_backward: list[int] = []  # pairs: a storage, and the forward op in whose backward it was read
        self.given: set[int] = set()  # storages of the gradients that a backward began with
        self.functions: dict[int, str] = {}  # the first op of a Function's forward → the Function's name
        self.workspace = False
        self.levels: dict[str, dict[str, int]] = {}

    # ---- taking notes

    def born(self, tensor: torch.Tensor, nbytes: int, op: int, phase: str, line: int) -> int:
        """A storage of `nbytes` is here since `op`. Returns the number it goes by."""
        number = len(self.sizes)
        ragged = tensor.is_nested and tensor.layout is torch.strided
        shape = (tensor.numel(),) if ragged else tuple(tensor.shape)  # a Size the garbage collector would visit
        self.births.flat += (nbytes, shape, tensor.dtype, self.device or tensor.device, op)
        self.held += nbytes
        self.sizes.append(nbytes)
        self.last_read.append(-1)
        if nbytes:
            self.changes.flat += (number, nbytes, op, phase, line)
        if op >= 0 and self.ops.flat[op * self.ops.width] in SET and _shared(tensor):
            self.owners[number] = OUTSIDE  # another process made it; copy.deepcopy and torch.load set their own
        return number

    def resized(self, storage: int, nbytes: int, op: int, phase: str, line: int) -> None:
        """A storage holds `nbytes` from now on; 0 when it is gone."""
        delta = nbytes - self.sizes[storage]
        if delta:
            self.held += delta if storage not in self.elsewhere else 0
            self.sizes[storage] = nbytes
            self.changes.flat += (storage, delta, op, phase, line)

    def moved(self, storage: int, device: str) -> None:
        """A storage turns out to lie on another device than was noted at its birth."""
        if storage not in self.elsewhere:
            self.elsewhere.add(storage)
            self.held -= self.sizes[storage]
        self.births.flat[storage * self.births.width + self.births.row._fields.index("device")] = device

    def scratch(self, nbytes: int, device: torch.device, op: int) -> int:
        """Bytes that a kernel took for itself during `op`. Returns the number they go by."""
        number = len(self.sizes)
        self.births.flat += (nbytes, (nbytes,), torch.uint8, device, op)
        self.sizes.append(0)
        self.last_read.append(-1)
        self.owners[number] = ("workspace", "")
        return number

    # ---- making sense of them

    def highest_since(self, mark: int) -> int:
        """The most bytes held since there were `mark` changes, of storages that are not in `elsewhere`."""
        held = highest = self.held
        for number in range(len(self.changes) - 1, mark - 1, -1):
            change = self.changes[number]
            if change.storage not in self.elsewhere:
                held -= change.delta
                highest = max(highest, held)
        return highest

    def timeline(self) -> Timeline:
        """The notes so far as a Timeline."""
        backward_ops = [number for number, op in enumerate(self.ops) if op.phase == BACKWARD]
        other_ops = [number for number, op in enumerate(self.ops) if op.phase in (FORWARD, OPTIMIZER)]
        died = {change.storage: change.op for change in self.changes if change.delta < 0}
        readers: dict[int, dict[int, None]] = {}
        for storage, forward_op in zip(self.read_in_backward[::2], self.read_in_backward[1::2], strict=True):
            readers.setdefault(storage, {})[forward_op] = None
        storages = []
        for number, size in enumerate(self.sizes):
            born = self.births[number].op
            until = len(self.ops) if size else died.get(number, born)
            waited = _any_between(backward_ops, born, until)
            outstayed = waited and number in readers and _any_between(other_ops, self.last_read[number], until)
            storages.append(self._storage(number, waited, outstayed, list(readers.get(number, ()))))
        names = [op.name for op in self.ops]
        events = [
            Event(c.storage, c.delta, names[c.op] if c.op >= 0 else "", c.phase, self.lines[c.line])
            for c in self.changes
        ]
        return Timeline(storages, events, workspace=self.workspace, levels=self.levels)

    def _storage(self, number: int, waited: bool, outstayed: bool, readers: list[int]) -> Storage:
        birth = self.births[number]
        op = self.ops[birth.op] if birth.op >= 0 else NO_OP
        category, name = self.owners.get(number, ("", ""))
        given = number in self.given and birth.op not in readers  # a result that its op saved may be given, too
        if not category:
            # Did it wait until a backward op ran? Then backward needed it, or somebody forgot it.
            waited = waited and op.phase in (FORWARD, RECOMPUTE)
            category = "activation" if waited and not given else "temporary"
        module, line, alive = op.module, op.line, self.sizes[number] > 0
        if line < 0 and self.last_read[number] >= 0:
            line = self.ops[self.last_read[number]].line
        outstays = HELD if outstayed and category == "activation" else ""
        return Storage(
            id=number,
            nbytes=birth.nbytes,
            category=category,
            shape=tuple(birth.shape),
            dtype=str(birth.dtype).removeprefix("torch."),
            device=str(birth.device),
            op=op.name,
            phase=op.phase,
            line=self.lines[line],
            module=module,
            name=name,
            reason=self._reason(category, name, op, readers, alive, given) + outstays,
        )

    def _reason(self, category: str, name: str, op: Op, readers: list[int], alive: bool, given: bool) -> str:
        if category in ("parameter", "buffer"):
            return f"{category} {name}"
        if category == "input":
            return f"{name}, made outside" if op.name else name
        if category == "optimizer_state":
            return name
        if category == "gradient":
            return f"gradient of {name}"
        if category == "workspace":
            return f"scratch inside {friendly(op.name)}"
        if category == "activation":
            if not readers:
                return "held by a variable, or by the graph of one: backward never read it"
            also = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
            again = "recomputed: " if op.phase == RECOMPUTE else ""
            return f"{again}saved by {self._op_of_node(readers[0])}{also} for its backward"
        if op.phase == BACKWARD and op.forward_op >= 0:
            return f"gradient passing through {self._op_of_node(op.forward_op)}"
        if given and op.phase != BACKWARD:
            return "gradient that backward began with"
        nobody = "" if alive else ", saved by nobody"  # what is still held, a graph may have saved
        return f"result of {friendly(op.name)} in {op.phase}{nobody}"

    def _op_of_node(self, number: int) -> str:
        """The op, or Function, whose node was made before op `number`: an in-place op may clone what it overwrites."""
        if number in self.functions:
            return self.functions[number]
        op = self.ops[number]
        if op.func is CLONE and number + 1 < len(self.ops):
            following = self.ops[number + 1]
            if following.line == op.line and following.name.endswith("_"):
                op = following
        return friendly(op.name)


def _any_between(ordered: list[int], after: int, until: int) -> bool:
    """Whether any of the ordered numbers is above `after` and at most `until`."""
    return bisect.bisect_right(ordered, until) > bisect.bisect_right(ordered, after)
