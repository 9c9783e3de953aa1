"""Which rank was to blame: not those that are broken off, or that wait, because of it.

A rank that dies takes its connections with it, and its peers then raise "Connection closed by peer", often before the
death itself is known. And a rank that never comes to a collective makes all others wait there. The ranks that complain,
or wait, are the victims.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_VICTIM = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|socket (closed|is closed)|failed to recv|"
    r"remote process (has )?(exited|terminated)|nccl.*(abort|remote)|timed out waiting",
    re.IGNORECASE,
)
_PACKAGE, _TORCH = os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep
_TALK = (os.path.join(_TORCH, "distributed") + os.sep, _PACKAGE)
_DDP = os.path.join(_TORCH, "nn", "parallel", "distributed.py")
_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "receive", "exchange", "begin"}
Frame = tuple[str, int, str]
"""File, line and function."""


class RankError(RuntimeError):
    """A rank failed, and the launch ended with it.

    rank: which. traceback: the rank's own, as text, or None where it left none. What the rank raised is `__cause__`,
    if it could travel.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str | None = None):
        super().__init__(message)
        self.rank, self.traceback = rank, traceback

    def __reduce__(self):
        return type(self), (str(self), self.rank, self.traceback)


# ---- a rank that failed


@dataclass
class Failure:
    """What is known of one rank's failure. at: seconds on the machine's clock."""

    rank: int
    at: float
    summary: str
    traceback: str | None = None
    cause: BaseException | None = None

    @property
    def may_be_victim(self) -> bool:
        """Whether this is what a rank says when another one's death broke its connection, or was raised from that."""
        return self.summary.startswith("raised") and bool(_VICTIM.search(self.traceback or self.summary))

    def error(self) -> RankError:
        """The error that ends the launch."""
        text = f"rank {self.rank} {self.summary}"
        if self.traceback:
            text += f"\n\nrank {self.rank}'s traceback:\n{self.traceback.rstrip()}"
        error = RankError(text, self.rank, self.traceback)
        error.__cause__ = self.cause
        return error


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure that came first, among those that cannot be another one's consequence if there are any."""
    return min(failures, key=lambda failure: (failure.may_be_victim, failure.at))


def of_death(rank: int, at: float, exit_code: int | None, stacks: str, *, returned: bool = False) -> Failure:
    """The failure of a rank whose process is gone. stacks: what faulthandler wrote, or an empty text.

    returned: whether its function had returned before.
    """
    if exit_code is None:
        return Failure(rank, at, "closed its connection to the launcher")
    summary = f"ended with exit code {exit_code} {'after' if returned else 'before'} its function returned"
    if exit_code < 0:
        known = -exit_code in {*signal.Signals}
        summary = f"was killed by {signal.Signals(-exit_code).name if known else f'signal {-exit_code}'}"
        if -exit_code == signal.SIGKILL:
            summary += ", which is also what the system does to a process when memory runs out"
    frames = frames_of(stacks, crashed=True)
    return Failure(rank, at, summary, as_traceback(frames) if frames else None)


# ---- ranks that wait


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
                found = found if name == "wrapper" or name.startswith("_") else name
            elif not file.startswith(_TORCH):
                return found or ("wait" if ".wait()" in linecache.getline(file, line) else None)
        return found

    @property
    def in_backward(self) -> bool:
        """Whether it is in autograd's engine or DDP, which compute, or wait for others: outside one cannot tell."""
        return bool(self.frames) and (self.frames[0][2] == "_engine_run_backward" or self.frames[0][0] == _DDP)

    def __str__(self) -> str:
        if self.state != "running":
            return "has returned" if self.state == "returned" else "has not started"
        others = (_TORCH, _PACKAGE)
        place = next((f for f in self.frames if not f[0].startswith(others)), None)
        if place is None:
            return "is somewhere that cannot be told"
        file, line, name = place
        inside = f"{os.path.basename(file)}, in {name}" if os.path.isfile(file) else name  # a cell is in no file
        where = f"{linecache.getline(file, line).strip() or file}   (line {line} of {inside})"
        return f"waits in {self.talk}: {where}" if self.talk else f"is at: {where}"


def of_timeout(places: Sequence[Place], timeout: float) -> RankError:
    """The error of a launch that took too long. places: by rank."""
    running = [rank for rank, place in enumerate(places) if place.state != "returned"]
    waiting = [rank for rank in running if places[rank].talk] or [rank for rank in running if places[rank].in_backward]
    others = [rank for rank in range(len(places)) if rank not in waiting]
    wait = f"{_ranks(waiting)} wait{'s' * (len(waiting) == 1)}" if waiting else ""
    if not waiting:
        blamed, text = running, f"{_ranks(running)} did not end"
    elif not others:
        apart = ", and not in the same place" * (len({str(places[rank]) for rank in waiting}) > 1)
        blamed, text = waiting, f"{wait} for each other{apart}"
    elif all(places[rank].talk in _MESSAGES for rank in waiting):  # of those that have returned it is no fault
        blamed = [rank for rank in others if rank in running] or waiting
        text = f"{wait} for messages that did not come, or were not taken"
    else:
        blamed, text = others, f"{_ranks(others)} never arrived where {wait}"
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


# ---- stacks, as Python's faulthandler writes them, even of a rank that hangs or has crashed


def frames_of(stacks: str, *, crashed: bool = False) -> list[Frame]:
    """Those of the thread that crashed, or of the main thread, the last listed. Innermost first, as far as `fn`."""
    threads = re.split(r"^(?=(?:Current t|T)hread 0x)", stacks, flags=re.MULTILINE)[1:]
    if crashed:
        threads = [thread for thread in threads if thread.startswith("Current")]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', threads[-1], re.MULTILINE) if threads else []
    frames = [(file, int(line), name) for file, line, name in found]
    outside = os.path.join(_PACKAGE, "worker.py")
    return frames[: next((n for n, frame in enumerate(frames) if frame[0] == outside), len(frames))]


def as_traceback(frames: Sequence[Frame]) -> str:
    """These frames in the words of a traceback."""
    lines = ["Traceback (most recent call last):"]
    for file, line, name in reversed(frames):
        lines.append(f'  File "{file}", line {line}, in {name}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)
