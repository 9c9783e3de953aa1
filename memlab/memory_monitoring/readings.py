"""A monitor's sources, each kept apart from the others' troubles.

A source may end (`Gone`), or fail in some other way. Either is told once, and the source is asked no more. Each level
is one source's: a second source of a level is left out, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from memlab.memory_monitoring.cuda import CUDAMemory
from memlab.memory_monitoring.driver import GPUMemory
from memlab.memory_monitoring.sources import Gone, ProcessMemory, Source


class Readings:
    """What sources say, together. tell: called with a kind, "gone" or "source", and a message."""

    def __init__(self, sources: Sequence[Source], tell: Callable[[str, str], None]):
        self.sources, self._opened, self._tell = list(sources), list(sources), tell
        self._owner: dict[str, Source] = {}

    def read(self) -> dict[str, int]:
        """Bytes now, by level."""
        return self._asked("read", self.sources)

    def end(self, level: str) -> int | None:
        """One level's bytes now, or None. It asks the level's source only."""
        return self._asked("read", (self._owner[level],)).get(level)

    def peaks(self, level: str) -> dict[str, int]:
        """The most bytes since it was asked last, by level, where the level's source keeps track."""
        return self._asked("peaks", (self._owner[level],))

    def close(self) -> None:
        """Close what the sources opened."""
        for source in self._opened:
            close = getattr(source, "close", None)
            if close is not None:
                self._try(source, close)

    def _asked(self, what: str, sources: Sequence[Source]) -> dict[str, int]:
        figures: dict[str, int] = {}
        for source in tuple(sources):
            if source in self.sources:
                figures |= self._try(source, functools.partial(self._figures, source, what)) or {}
        return figures

    def _figures(self, source: Source, what: str) -> dict[str, int]:
        """What a source says, as ints: a figure that is none is its source's trouble, and no other's."""
        figures = {level: int(nbytes) for level, nbytes in _told(source, what).items()}
        if wrong := {level: nbytes for level, nbytes in figures.items() if nbytes < 0}:
            raise ValueError(f"expected bytes of at least 0, found {wrong}")
        for level in figures:
            if (owner := self._owner.setdefault(level, source)) is not source:
                raise ValueError(f"expected a level of one source alone, found {level} of {owner.name}, too")
        return figures

    def _try(self, source: Source, ask: Callable):
        try:
            return ask()
        except Gone as gone:
            self._leave_out(source, "gone", str(gone))
        except Exception as error:
            self._leave_out(source, "source", f"{source.name} failed: {error!r}")
        return None

    def _leave_out(self, source: Source, kind: str, reason: str) -> None:
        if source in self.sources:
            self.sources.remove(source)
            self._tell(kind, f"{reason}; {'watching what is left' if self.sources else 'nothing is left to watch'}")


def _told(source: Source, what: str) -> Mapping[str, int]:
    return getattr(source, what)() or {}


def found_sources() -> list[Source]:
    """What there is to look at here: this process; with a GPU, PyTorch's allocator, and the driver where it tells."""
    sources: list[Source] = [ProcessMemory(paced=True)]
    if torch.cuda.is_available():
        sources.append(CUDAMemory())
        with contextlib.suppress(RuntimeError, ValueError):  # nobody knows the driver's figure
            sources.append(GPUMemory(torch.cuda.current_device() if torch.cuda.is_initialized() else 0))
    return sources
