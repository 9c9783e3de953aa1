"""Where each rank was when time ran out, and which one the others waited for.

A rank that never comes to a collective makes all others wait there: those that wait are the victims.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memlab.ranks.failures import RankError
from memlab.ranks.stacks import PACKAGE, Frame, as_traceback, frames_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TALK = (os.path.join(_TORCH, "distributed") + os.sep, PACKAGE)
_DDP = os.path.join(_TORCH, "nn", "parallel", "distributed.py")
_PYTHON, _INSTALLED = os.path.dirname(os.__file__) + os.sep, os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
_WAITS = re.compile(r"\bwait\(\)|\.result\(\)|\.join\(\)")
_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "receive", "exchange", "begin"}


@dataclass
class Place:
    """Where a rank was when time ran out. state: "starting", "running" or "returned". frames: innermost first."""

    state: str
    frames: list[Frame]

    @property
    def talk(self) -> str | None:
        """The function that talks to other ranks, or waits, which it is in, if it is in one.

        The outermost of torch.distributed, or of this package, below the last line of the reader's.
        """
        found = None
        for file, line, name in self.frames:
            if file.startswith(_TALK):
                if name != "wrapper" and not name.startswith("_"):
                    found = name
            elif not file.startswith(_TORCH) and not _of_python(file):
                return found or ("wait" if _WAITS.search(linecache.getline(file, line)) else None)
        return found

    @property
    def in_backward(self) -> bool:
        """Whether it is in autograd's engine or DDP, which compute, or wait for other ranks: from outside one sees no
        difference.
        """
        return bool(self.frames) and (self.frames[0][2] == "_engine_run_backward" or self.frames[0][0] == _DDP)

    def __str__(self) -> str:
        if self.state == "returned":
            return "has returned"
        if self.state == "starting":
            return "has not started"
        others = (_TORCH, PACKAGE)
        place = next((f for f in self.frames if not f[0].startswith(others) and not _of_python(f[0])), None)
        if place is None:
            return "is somewhere that cannot be told"
        file, line, name = place
        inside = f"{os.path.basename(file)}, in {name}" if os.path.isfile(file) else name  # a cell is in no file
        where = f"{linecache.getline(file, line).strip() or file}   (line {line} of {inside})"
        return f"waits in {self.talk}: {where}" if self.talk else f"is at: {where}"


def place_of(state: str, stacks: str) -> Place:
    """Where a rank is. stacks: what faulthandler wrote."""
    return Place(state, frames_of(stacks))


def of_timeout(places: Sequence[Place], timeout: float) -> RankError:
    """The error of a launch that took too long. places: by rank."""
    waiting = [rank for rank, place in enumerate(places) if place.state == "running" and place.talk]
    if not waiting:
        waiting = [rank for rank, place in enumerate(places) if place.state == "running" and place.in_backward]
    others = [rank for rank in range(len(places)) if rank not in waiting]
    running = [rank for rank, place in enumerate(places) if place.state != "returned"]
    wait = f"{_ranks(waiting)} wait{'s' * (len(waiting) == 1)}" if waiting else ""
    if waiting and others and all(places[rank].talk in _MESSAGES for rank in waiting):
        blamed = [rank for rank in others if rank in running] or waiting
        text = f"{wait} for messages that did not come, or were not taken"
    elif waiting and others:
        blamed, text = others, f"{_ranks(others)} never arrived where {wait}"
    elif waiting:
        blamed, text = waiting, f"{wait} for each other"
        if len({str(places[rank]) for rank in waiting}) > 1:
            text += ", and not in the same place"
    else:
        blamed, text = running, f"{_ranks(running)} did not end"
    lines = [f"after {timeout:g} s, {text}"]
    lines += [f"  rank {rank} {place}" for rank, place in enumerate(places)]
    stack, first = None, next((rank for rank in blamed if places[rank].frames), blamed[0])
    if frames := places[first].frames:
        stack = as_traceback(frames)
        lines.append(f"\nrank {first}'s stack:\n{stack}")
    lines.append(
        "\nEvery rank must call every collective, in one order, with tensors of one size and dtype; every receive "
        "needs its send; a slow function needs a longer timeout."
    )
    return RankError("\n".join(lines), first, stack)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _of_python(file: str) -> bool:
    """Whether it is of Python's own library, where a thread or its result is waited for."""
    return file.startswith(_PYTHON) and not file.startswith(_INSTALLED)
