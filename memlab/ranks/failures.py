"""Which rank was to blame: the one that failed first, not those whose connection broke because of it.

A rank that dies takes its connections with it, and its peers then raise "Connection closed by peer", often before the
death itself is known. The ranks that complain are the victims.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from memlab.ranks.stacks import as_traceback, frames_of

_VICTIM = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|socket (closed|is closed)|failed to recv|"
    r"remote process (has )?(exited|terminated)|nccl.*(abort|remote)|timed out waiting",
    re.IGNORECASE,
)


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
    summary = (
        f"ended with exit code {exit_code} {'after its function had' if returned else 'before its function'} returned"
    )
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        summary = f"was killed by {name}"
        if name == "SIGKILL":
            summary += ", which is also what the system does to a process when memory runs out"
    frames = frames_of(stacks, crashed=True)
    return Failure(rank, at, summary, as_traceback(frames) if frames else None)
