"""A monitor's sources, each kept apart from the others' troubles.

A source may end (`Gone`): it is left out from then on. It may fail in some other way, a driver's hiccup: it is left out
for a while, each time for twice as long, and asked again. Either is told once.

Two sources may have figures of one level, as two GPUs do. The first has the level's plain name; the second's is
followed by its source: "allocated of cuda:1".
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from memlab.memory_monitoring.cuda import CUDAMemory
from memlab.memory_monitoring.sources import Gone, ProcessMemory, Source

FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 1.0, 300.0


class Readings:
    """What sources say, together. tell: called with a kind, "gone" or "source", and a message."""

    def __init__(self, sources: Sequence[Source], tell: Callable[[str, str], None]):
        self.sources, self._tell = list(sources), tell
        self._owner: dict[str, Source] = {}
        self._silent_until = {id(source): 0.0 for source in self.sources}
        self._rest = {id(source): FIRST_REST_SECONDS for source in self.sources}

    @property
    def alive(self) -> list[Source]:
        """The sources that are not gone."""
        return [source for source in self.sources if self._silent_until[id(source)] < math.inf]

    def read(self) -> dict[str, int]:
        """Bytes now, by level."""
        return self._asked("read", self.sources)

    def end_of(self, level: str) -> Callable[[], int | None]:
        """A function that returns one level's bytes at a step's end, or None. It asks the level's source only."""
        source = self._owner[level]
        quick = getattr(source, "quick", None)

        def read() -> int | None:
            return self._asked("read", (source,)).get(level)

        def end() -> int | None:
            try:
                return quick(level)
            except Exception:
                return read()  # which tells of what fails there, too

        return read if quick is None or quick(level) is None else end

    def peaks(self, level: str | None = None) -> dict[str, int]:
        """The most bytes since it was asked last, by level, where something keeps track.

        level: ask only the source whose level that is.
        """
        return self._asked("peaks", self.sources if level is None else (self._owner[level],))

    def close(self) -> None:
        """Close what the sources opened."""
        for source in self.sources:
            close = getattr(source, "close", None)
            if close is not None:
                self._try(source, close)

    def _asked(self, what: str, sources: Sequence[Source]) -> dict[str, int]:
        figures: dict[str, int] = {}
        for source in sources:
            silent = self._silent_until[id(source)]
            if silent and time.monotonic() < silent:
                continue
            told = self._try(source, functools.partial(_figures, getattr(source, what))) or {}
            for level, nbytes in told.items():
                others = (f"{level} of {source.name} {number}".removesuffix(" 1") for number in itertools.count(1))
                names = itertools.chain([level], others)
                own = next(name for name in names if self._owner.setdefault(name, source) is source)
                figures[own] = nbytes
        return figures

    def _try(self, source: Source, ask: Callable):
        key = id(source)
        try:
            return ask()
        except Gone as gone:
            told, self._silent_until[key] = self._silent_until[key] == math.inf, math.inf
            if not told:
                self._tell("gone", f"{gone}; {'watching what is left' if self.alive else 'nothing is left to watch'}")
        except Exception as error:
            if time.monotonic() > self._silent_until[key] + LONGEST_REST_SECONDS:  # it went well for long
                self._rest[key] = FIRST_REST_SECONDS
            rest, self._rest[key] = self._rest[key], min(2 * self._rest[key], LONGEST_REST_SECONDS)
            self._silent_until[key] = max(self._silent_until[key], time.monotonic() + rest)
            if rest == FIRST_REST_SECONDS:
                self._tell("source", f"{source.name} failed: {error!r}; it is asked again later")
        return None


def _figures(ask: Callable[[], Mapping[str, int] | None]) -> dict[str, int]:
    """What a source says, as ints: a figure that is none is its source's trouble, and no other's."""
    figures = {level: int(nbytes) for level, nbytes in (ask() or {}).items()}
    if wrong := {level: nbytes for level, nbytes in figures.items() if nbytes < 0}:
        raise ValueError(f"expected bytes of at least 0, found {wrong}")
    return figures


def found_sources() -> list[Source]:
    """What there is to look at here: this process; with a GPU, PyTorch's allocator, and the driver where it tells."""
    sources: list[Source] = [ProcessMemory(paced=True)]
    if torch.cuda.is_available():
        sources.append(CUDAMemory())
        with contextlib.suppress(ImportError, RuntimeError, ValueError):  # nobody knows the driver's figure
            from memlab.memory_monitoring.gpu import GPUMemory

            sources.append(GPUMemory(torch.cuda.current_device() if torch.cuda.is_initialized() else 0))
    return sources
