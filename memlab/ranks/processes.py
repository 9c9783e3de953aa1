"""The processes of one launch, seen from the launcher: started, listened to, ended, and their prints shown.

The launcher waits for all of them at once. It has no thread: what ranks say is a word in a pipe, and the rest is in
files that are read when the word has come.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

from memlab.ranks import worker
from memlab.ranks.failures import Failure, Place, RankError, culprit, frames_of, of_death, of_timeout
from memlab.ranks.server import fork_server, uninterrupted, without_program

START_SECONDS = 120.0  # until all ranks have formed a group, on a slow machine and a slow disk
LEAVE_SECONDS = 10.0
VICTIM_SECONDS = 1.0  # how much later a death may be known than its consequences
SHOWN_BYTES = 2**20


class _Rank:
    """A rank as its launcher sees it."""

    def __init__(self, number: int):
        self.number, self.state = number, "starting"
        self.end: connection.Connection | None = None
        self.process: multiprocessing.process.BaseProcess | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.pid is not None and self.process.exitcode is None

    def kill(self) -> None:
        """End its process, and whoever that has started."""
        pid = self.process.pid if self.process is not None else None
        if pid is None:
            return
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self.running:
            self.process.kill()


class Processes:
    """The processes of one launch; a context manager, after which they are gone and their prints shown."""

    def __init__(self, world: int, folder: Path, timeout: float):
        self.folder, self.timeout = folder, timeout
        self.ranks = [_Rank(number) for number in range(world)]
        self.failures: list[Failure] = []

    def __enter__(self) -> Processes:
        return self

    def _start(self) -> None:
        with uninterrupted():
            context = fork_server()
        for rank in self.ranks:
            with uninterrupted(), without_program():
                rank.end, theirs = context.Pipe()
                with theirs:
                    rank.process = context.Process(
                        target=worker.run,
                        args=(rank.number, self.folder, theirs),
                        name=worker.process_name(rank.number),
                    )
                    try:
                        rank.process.start()
                    except (EOFError, ConnectionError) as error:
                        raise RankError(
                            f"rank {rank.number} could not be started, since the server that forks ranks ended: launch "
                            "again, which starts another",
                            rank.number,
                        ) from error

    def __exit__(self, *error) -> None:
        with uninterrupted():
            for rank in self.ranks:
                rank.kill()
            for rank in self.ranks:
                if rank.running:
                    rank.process.join(LEAVE_SECONDS)
            self._show()
            for rank in self.ranks:
                if rank.end is not None:
                    rank.end.close()
                if rank.process is not None and not rank.running and rank.process.pid is not None:
                    rank.process.close()

    # ---- waiting

    def results(self) -> list:
        """Start the ranks, and wait until all have returned. Raises RankError if one does not."""
        self._start()
        deadline, grace, all_ready = time.monotonic() + max(START_SECONDS, self.timeout), math.inf, False
        while not all(rank.state == "returned" for rank in self.ranks):
            if self.failures and (time.monotonic() >= grace or not all(f.may_be_victim for f in self.failures)):
                raise culprit(self.failures).error()
            told = connection.wait(self._watched(), max(0.0, min(deadline, grace) - time.monotonic()))
            for rank in self.ranks:
                self._listen(rank)
            if self.failures:
                grace = min(grace, time.monotonic() + VICTIM_SECONDS)
            elif not all_ready and all(rank.state != "starting" for rank in self.ranks):
                deadline, all_ready = time.monotonic() + self.timeout, True
                self._say(worker.BEGIN)
            elif not told and time.monotonic() >= deadline:
                raise of_timeout(self._places(), self.timeout if all_ready else max(START_SECONDS, self.timeout))
        self._let_go()
        return [self._load(rank) for rank in self.ranks]

    def _watched(self) -> list:
        alive = [rank for rank in self.ranks if rank.state in ("starting", "running", "returned")]
        return [rank.process.sentinel for rank in alive] + [rank.end for rank in alive if not rank.end.closed]

    def _listen(self, rank: _Rank) -> None:
        """Take in what a rank says, and whether it lives."""
        if rank.state in ("failed", "dead"):
            return
        gone = not rank.running  # asked first: what it said before it went is in the pipe
        try:
            while rank.end.poll():
                word = rank.end.recv_bytes()
                rank.state = {worker.READY: "running", worker.RETURNED: "returned", worker.FAILED: "failed"}[word]
        except (EOFError, OSError):  # its end of the pipe is gone, and so is it, or will be
            rank.process.join(VICTIM_SECONDS)
            gone = True
        if rank.state == "failed":
            told = pickle.loads((self.folder / f"failure-{rank.number}").read_bytes())
            cause = None
            if told["cause"] is not None:
                try:
                    cause = pickle.loads(told["cause"])
                except KeyboardInterrupt:
                    raise
                except BaseException:  # of a class whose constructor does anything
                    cause = None
            self.failures.append(Failure(rank.number, told["at"], told["summary"], told["traceback"], cause))
        elif gone:
            stacks, returned, rank.state = self._read("stacks", rank), rank.state == "returned", "dead"
            death = of_death(rank.number, time.monotonic(), rank.process.exitcode, stacks, returned=returned)
            self.failures.append(death)

    def _say(self, word: bytes) -> None:
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # whoever is gone is noticed where the ranks are listened to
                rank.end.send_bytes(word)

    def _let_go(self) -> None:
        """All have returned, so nobody needs anybody's connection: let them end by themselves."""
        self._say(worker.LEAVE)
        deadline = time.monotonic() + LEAVE_SECONDS
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.running:
                raise RankError(
                    f"rank {rank.number} has returned, and its process did not end within {LEAVE_SECONDS:g} s: a "
                    "thread that its function started still runs; end it before returning",
                    rank.number,
                )

    def _load(self, rank: _Rank) -> Any:
        try:
            return pickle.loads((self.folder / f"result-{rank.number}").read_bytes())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise RankError(
                f"rank {rank.number} returned what cannot be read here: {type(error).__name__}: {error}; return "
                "numbers, tensors, Timelines, dataclasses, or lists of them",
                rank.number,
            ) from error

    # ---- what can be seen from outside

    def _places(self) -> list:
        """Where each rank is at present: asked by a signal that Python's own threads need not answer."""
        asked = [rank for rank in self.ranks if rank.state == "running" and rank.running]
        for rank in asked:
            if worker.STACK_SIGNAL is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, worker.STACK_SIGNAL)
        texts, until = {}, time.monotonic() + 2
        while worker.STACK_SIGNAL is not None and time.monotonic() < until:
            before, texts = texts, {rank.number: self._read("stacks", rank) for rank in asked}
            if texts == before and all(texts.values()):
                break
            time.sleep(0.05)
        return [Place(rank.state, frames_of(texts.get(rank.number, ""))) for rank in self.ranks]

    def _read(self, kind: str, rank: _Rank) -> str:
        try:
            with (self.folder / f"{kind}-{rank.number}").open("rb") as file:
                left_out = max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES)
                file.seek(left_out)
                if left_out:
                    left_out += len(file.readline())  # what is left of a line
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return f"… ({left_out} bytes before this are left out)\n{text}" if left_out else text

    def _show(self) -> None:
        """Print what the ranks printed."""
        for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
            for rank in self.ranks:
                text = self._read(kind, rank)
                for line in text.removesuffix("\n").split("\n") if text else ():
                    line = line.removesuffix("\r").rpartition("\r")[2]  # what a progress bar showed last
                    shown = f"rank {rank.number} │ {line}".rstrip()
                    encoding = getattr(stream, "encoding", None) or "utf-8"
                    print(shown.encode(encoding, errors="replace").decode(encoding), file=stream)
