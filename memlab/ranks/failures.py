"""Which rank was to blame: the one that failed first, not those whose connection broke because of it.

A rank that dies takes its connections with it, and its peers then raise "Connection closed by peer", often before the
death itself is known. And a rank that never comes to a collective makes all others wait there. Both times the ranks
that complain are the victims.
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
_THREAD = re.compile(r"^(?:Current t|T)hread 0x")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_PACKAGE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_TALK = (os.path.join(_TORCH, "distributed") + os.sep, _PACKAGE)


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
        """Whether this is what a rank says when another one's death broke its connection."""
        return self.summary.startswith("raised") and bool(_VICTIM.search(self.summary))

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


def of_death(rank: int, at: float, exit_code: int | None, stacks: str) -> Failure:
    """The failure of a rank whose process is gone. stacks: what faulthandler wrote, or an empty text."""
    if exit_code is None:
        return Failure(rank, at, "closed its connection to the launcher")
    summary = f"ended with exit code {exit_code} before its function returned"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        summary = f"was killed by {name}"
        if name == "SIGKILL":
            summary += ", which is also what the system does to a process when memory runs out"
    frames = _frames(stacks, crashed=True)
    return Failure(rank, at, summary, _as_traceback(frames) if frames else None)


@dataclass
class Place:
    """Where a rank was when time ran out. talk: the function that talks to other ranks it is in, if it is in one."""

    state: str
    frames: list[tuple[str, int, str]]

    @property
    def talk(self) -> str | None:
        """The outermost function of torch.distributed, or of this package, below the last line of the reader's."""
        found = None
        for file, line, name in self.frames:
            if file.startswith(_TALK):
                if name != "wrapper" and not name.startswith("_"):
                    found = name
            elif not file.startswith(_TORCH):
                return found or ("wait" if ".wait()" in linecache.getline(file, line) else None)
        return found

    def __str__(self) -> str:
        if self.state == "returned":
            return "has returned"
        if self.state == "starting":
            return "has not started"
        place = next((frame for frame in self.frames if not frame[0].startswith((_TORCH, _PACKAGE))), None)
        if place is None:
            return "is somewhere that cannot be told"
        file, line, name = place
        where = f"{linecache.getline(file, line).strip() or file}   (line {line} of {name})"
        return f"waits in {self.talk}: {where}" if self.talk else f"is at: {where}"


def place_of(state: str, stacks: str) -> Place:
    """Where a rank is. state: "starting", "running" or "returned"; stacks: what faulthandler wrote."""
    return Place(state, _frames(stacks, crashed=False))


def of_timeout(places: Sequence[Place], timeout: float) -> RankError:
    """The error of a launch that took too long. places: by rank."""
    waiting = [rank for rank, place in enumerate(places) if place.state == "running" and place.talk]
    others = [rank for rank in range(len(places)) if rank not in waiting]
    running = [rank for rank, place in enumerate(places) if place.state != "returned"]
    if waiting and others:
        blamed, text = others, f"{_ranks(others)} never arrived where {_ranks(waiting)} wait{'s' * (len(waiting) == 1)}"
    elif waiting:
        blamed, text = waiting, f"{_ranks(waiting)} wait for each other, and not in the same place"
    else:
        blamed, text = running, f"{_ranks(running)} did not end"
    lines = [f"after {timeout:g} s, {text}"]
    lines += [f"  rank {rank} {place}" for rank, place in enumerate(places)]
    stack, first = None, next((rank for rank in blamed if places[rank].frames), blamed[0])
    if frames := places[first].frames:
        stack = _as_traceback(frames)
        lines.append(f"\nrank {first}'s stack:\n{stack}")
    lines.append("\nEvery rank must call every collective, in one order; a slow function needs a longer timeout.")
    return RankError("\n".join(lines), first, stack)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _frames(stacks: str, crashed: bool) -> list[tuple[str, int, str]]:
    """File, line and function, innermost first, of the thread that crashed, or of the main thread: the last listed."""
    threads: list[tuple[str, list]] = []
    for line in stacks.splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append((match[1], int(match[2]), match[3]))
    if crashed:
        threads = [thread for thread in threads if thread[0].startswith("Current")]
    frames = threads[-1][1] if threads else []
    outside = os.path.join(_PACKAGE, "worker.py")
    return frames[: next((n for n, frame in enumerate(frames) if frame[0] == outside), len(frames))]


def _as_traceback(frames: Sequence[tuple[str, int, str]]) -> str:
    lines = ["Traceback (most recent call last):"]
    for file, line, name in reversed(frames):
        lines.append(f'  File "{file}", line {line}, in {name}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)
