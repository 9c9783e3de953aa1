"""The meter's notes, and what they come to: from numbers taken in passing to a Timeline in words.

While code runs, the meter only appends to the lists below. Afterwards every question has its answer in them: a storage
born in forward and still there when a backward op runs is an activation; the node in whose formula it is read is the
one that saved it; a storage that became some parameter's `.grad` was a gradient all along.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import torch

from memlab.memory_timeline.lines import Lines
from memlab.memory_timeline.timeline import Event, Storage, Timeline

BEFORE, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "before", "forward", "backward", "recompute", "optimizer"


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
        if isinstance(self.func, str):
            return self.func
        space, _, name = self.func._schema.name.partition("::")
        return name if space == "aten" else f"{space}::{name}"


class Birth(NamedTuple):
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    op: int  # -1: it existed before


class Change(NamedTuple):
    storage: int
    delta: int
    op: int
    phase: str
    line: int


class History:
    def __init__(self):
        self.lines = Lines()
        self.ops: list[Op] = []
        self.births: list[Birth] = []  # one for each storage, by number
        self.changes: list[Change] = []
        self.sizes: list[int] = []  # bytes each storage holds now
        self.owners: dict[int, tuple[str, str]] = {}  # storage → (category, name), when somebody owns it
        self.read_in_backward: dict[int, dict[int, None]] = {}  # storage → the forward ops in whose backward it was read
        self.last_read: dict[int, int] = {}  # storage → the op that read it last
        self.workspace = False
        self.levels: dict[str, dict[str, int]] = {}

    # ---- taking notes

    def born(self, tensor: torch.Tensor, nbytes: int, op: int, phase: str, line: int) -> int:
        number = len(self.births)
        self.births.append(Birth(nbytes, tuple(tensor.shape), tensor.dtype, tensor.device, op))
        self.sizes.append(nbytes)
        if nbytes:
            self.changes.append(Change(number, nbytes, op, phase, line))
        return number

    def resized(self, storage: int, nbytes: int, op: int, phase: str, line: int) -> None:
        delta = nbytes - self.sizes[storage]
        if delta:
            self.sizes[storage] = nbytes
            self.changes.append(Change(storage, delta, op, phase, line))

    # ---- making sense of them

    def timeline(self) -> Timeline:
        """The notes so far as a Timeline."""
        backward_ops = [number for number, op in enumerate(self.ops) if op.phase == BACKWARD]
        died = {change.storage: change.op for change in self.changes if change.delta < 0}
        storages = [self._storage(number, backward_ops, died) for number in range(len(self.births))]
        names = [op.name for op in self.ops]
        events = [
            Event(c.storage, c.delta, names[c.op] if c.op >= 0 else "", c.phase, self.lines[c.line]) for c in self.changes
        ]
        return Timeline(storages, events, workspace=self.workspace, levels=self.levels)

    def _storage(self, number: int, backward_ops: list[int], died: dict[int, int]) -> Storage:
        birth = self.births[number]
        op = self.ops[birth.op] if birth.op >= 0 else Op("", BEFORE, -1, "", -1, -1)
        category, name = self.owners.get(number, ("", ""))
        if not category:
            # Did it outlive the moment a backward op ran? Then backward needed it, or somebody forgot it.
            until = len(self.ops) if self.sizes[number] else died.get(number, birth.op)
            waited = bisect.bisect_right(backward_ops, until) > bisect.bisect_right(backward_ops, birth.op)
            category = "activation" if waited and op.phase in (FORWARD, RECOMPUTE) else "temporary"
        module, line = op.module, op.line
        if line < 0 and number in self.last_read:
            line = self.ops[self.last_read[number]].line
        return Storage(
            id=number,
            nbytes=birth.nbytes,
            category=category,
            shape=birth.shape,
            dtype=str(birth.dtype).removeprefix("torch."),
            device=str(birth.device),
            op=op.name,
            phase=op.phase,
            line=self.lines[line],
            module=module,
            name=name,
            reason=self._reason(number, category, name, op),
        )

    def _reason(self, number: int, category: str, name: str, op: Op) -> str:
        if category in ("parameter", "buffer"):
            return f"{category} {name}"
        if category == "input":
            return f"{name}, made outside" if op.name else name
        if category == "optimizer_state":
            return name
        if category == "gradient":
            return f"gradient of {name}"
        if category == "workspace":
            return f"scratch inside {op.name}"
        if category == "activation":
            readers = [self.ops[reader].name for reader in self.read_in_backward.get(number, ())]
            if not readers:
                return "held by a variable, not by autograd: backward never read it"
            also = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
            again = "recomputed: " if op.phase == RECOMPUTE else ""
            return f"{again}saved by {readers[0]}{also} for its backward"
        if op.phase == BACKWARD and op.forward_op >= 0:
            return f"gradient passing through {self.ops[op.forward_op].name}"
        return f"result of {op.name} in {op.phase}, saved by nobody"
