"""What a timeline is made of: storages, the events in which they are born, change and die, and lines of code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CATEGORIES = ("parameter", "buffer", "input", "gradient", "optimizer_state", "activation", "temporary", "workspace")
"""What a storage is for, as a plot stacks them from the bottom up."""
PHASES = ("before", "forward", "backward", "recompute", "optimizer")
"""What the code was doing: "before" is all that existed when the first op came, "forward" what is none of the others,
such as clipping gradients."""
LEVELS = ("requested", "allocated", "reserved")
"""What CUDA's caching allocator counts: bytes asked for, the blocks they got, the segments behind them."""


class Line(NamedTuple):
    """A place in the reader's code: the function and the source text. No path, no number: those change by machine."""

    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.function}: {self.source}" if self.function != "<module>" else self.source


NOWHERE = Line("", "")


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: the block of bytes that one or many tensors view. Counted once, whoever shares it.

    `nbytes` is its size at the moment asked about (see `Timeline.alive`), at birth in `Timeline.storages`.
    `op`, `phase`, `line` and `module` say where it was born; for bytes born in backward, line and module are those of
    the forward op whose gradient they are. `reason` says in words why it is there.
    """

    id: int
    nbytes: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    op: str
    phase: str
    line: Line
    module: str
    name: str
    reason: str


class Event(NamedTuple):
    """One change: `delta` bytes (positive when born or grown, negative when freed) of storage number `storage`."""

    storage: int
    delta: int
    op: str
    phase: str
    line: Line


class Span(NamedTuple):
    """A run of events in one phase: from event `start` to event `stop`, both included."""

    phase: str
    start: int
    stop: int
