"""How `python -m memlab.record` and `python -m memlab.benchmark` run unattended: one thing after the other, each kept.

What has ended is in the record at once. What fails is marked so, and the others go on. What is recorded already with
the same code, torch and driver is skipped, so a run that was stopped goes on where it was when it is started again.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from memlab.book import documents
from memlab.book.documents import Kind
from memlab.book.machine import driver

RECORDED = "recorded"
MADE = ("README.md", "chapters/results", "chapters/claims.md", "chapters/benchmark.md")
"""What recording itself writes."""


def commit(folder: Path) -> str:
    """The commit that is checked out, with "+" where files differ from it; "unknown" outside a git repository."""
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    made = [f":(top,exclude){name}" for name in MADE]
    status = ["status", "--porcelain", "--untracked-files=no", "--", ":/", *made]
    try:
        head, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=30).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], status)
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")


class Outcome(NamedTuple):
    """What became of one thing. `status` is "recorded", why it failed, or since when it is recorded already."""

    name: str
    status: str
    seconds: str
    found: dict


class Recorder:
    """Runs what is to be recorded on one device, and merges what it comes to into the record at `path`.

    kind: of record. path: None keeps nothing but `document`, for a try. folder: of the repository, for its commit.
    again: what is recorded already is not skipped.

    `outcomes` tells what became of each; `document` is the record, with what could not be saved; `well` is whether
    nothing went wrong, and `saved` whether anything was written to the file. Raises ValueError, before anything is run,
    if the file there is damaged, of another device or no file, and OSError if it cannot be read or written.
    """

    def __init__(self, kind: Kind, path: Path | None, device: str, is_gpu: bool, folder: Path, *, again: bool = False):
        self.kind, self.path, self.again = kind, path, again
        self._empty = functools.partial(kind.empty, device, is_gpu)
        self._origin = {"torch": torch.__version__, "driver": driver()}
        self._commit = commit(folder)
        self._unsaved: list[Callable[[dict], None]] = []
        self.outcomes: list[Outcome] = []
        self.well, self.saved = True, False
        self.document = self._read()
        if path is not None:
            documents.expect_writable(path)

    def run(
        self,
        name: str,
        label: str,
        work: Callable[[Callable[[int, int], None]], dict],
        nothing: dict,
        source: Callable[[], str],
        **fields: object,
    ) -> None:
        """Do one thing, unless it is recorded already; whatever it comes to is in the record afterwards.

        work: gives what the entry is to have, as `nothing` shows it for a failure, and is given the bar to move.
        source: gives a digest of the code behind it. fields: what else must be the same for it to be skipped.
        """
        bar, start, found, error = Bar(label), time.perf_counter(), nothing, ""
        origin = {"date": _today(), "commit": self._commit, "source": "", **self._origin, **fields}
        try:
            origin["source"] = source()
            if date := self._recorded_on(name, origin):
                entry = self.document[self.kind.entries][name]
                self.outcomes.append(Outcome(name, f"skipped: recorded on {date}", "—", {k: entry[k] for k in nothing}))
                bar.end(self.outcomes[-1].status)
                return
            found = work(bar.at)
        except Exception as failure:  # whatever it was, the others go on
            error = _one_line(failure)
        origin["seconds"] = round(time.perf_counter() - start, 1)
        error = self._save(lambda document: self._enter(document, name, origin, found, error)) or error
        self.well = self.well and not error
        status = f"failed: {error}" if error else RECORDED
        self.outcomes.append(Outcome(name, status, f"{origin['seconds']:.1f}", nothing if error else found))
        words = ", ".join(_counted(len(value), word) for word, value in found.items())
        bar.end(status if error else f"{words} in {origin['seconds']} s")

    def finish(self) -> None:
        """Try once more to save what could not be saved, and say what is lost if that fails."""
        if self._unsaved:
            self._write()
        if self._unsaved:
            self.well = False
            print(f"not saved: {len(self._unsaved)} results; make room at {self.path.parent} and record again")

    def _recorded_on(self, name: str, origin: dict) -> str:
        """The date on which the same was recorded; "" if it was not, or failed since, or is to be done again."""
        entry = self.document[self.kind.entries].get(name)
        if self.again or entry is None or entry["status"] == "failed" or "failed_since" in entry:
            return ""
        return entry["date"] if all(entry.get(key) == origin[key] for key in origin.keys() - {"date", "commit"}) else ""

    def _enter(self, document: dict, *what: object) -> None:
        documents.enter(document[self.kind.entries], *what)

    def _read(self) -> dict:
        empty = self._empty()
        if self.path is None or not self.path.is_file():
            return empty
        document = self.kind.read(self.path)
        if (document["device"], document["gpu"]) != (empty["device"], empty["gpu"]):
            raise ValueError(
                f"{self.path}: expected a record of {empty['device']}, found one of {document['device']}; "
                "move it away, or name another file with --output"
            )
        return document

    def _save(self, change: Callable[[dict], None]) -> str:
        """Save a change, or keep it for later. Returns "", or why no record can hold it.

        Such a change is tried on an empty record and let go, as it would keep all later ones out.
        """
        trial = self._empty()
        try:
            change(trial)
            self.kind.text_of(trial)
        except ValueError as error:
            return f"no record can hold it: {_one_line(error)}"
        change(self.document)
        if self.path is not None:
            self._unsaved.append(change)
            self._write()
        return ""

    def _write(self) -> None:
        """Read the file again before it is written: another recorder may have added to it meanwhile."""
        try:
            with documents.locked(self.path.parent):
                document = self._read()
                for change in self._unsaved:
                    change(document)
                self.kind.write(document, self.path)
        except (OSError, ValueError) as error:
            print(f"\n{self.path} could not be written ({error}); it will be tried again", flush=True)
        else:
            self._unsaved.clear()
            self.document, self.saved = document, True


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _counted(number: int, things: str) -> str:
    return f"{number} {things.removesuffix('s') if number == 1 else things}"


def _one_line(error: Exception) -> str:
    """The first line of an error, as UTF-8 can hold it, and without its notebook's path, which is this machine's."""
    line = (str(error).encode(errors="replace").decode().splitlines() or [""])[0]
    return line[line.find(".ipynb: ") + 8 :] if ".ipynb: " in line else f"{type(error).__name__}: {line}"


class Bar:
    """A line that fills while parts run: on a terminal in place, elsewhere begun when they start and ended once."""

    def __init__(self, label: str):
        self.label, self.live = label, sys.stdout.isatty()
        print(label, end="", flush=True)

    def at(self, done: int, of: int) -> None:
        """`done` of `of` parts have ended."""
        if self.live:
            filled = 30 * done // max(of, 1)
            print(f"\r{self.label} {'█' * filled}{'·' * (30 - filled)} {done}/{of} ", end="", flush=True)

    def end(self, words: str) -> None:
        """The last word on this line."""
        print(f"\r\x1b[K{self.label}: {words}" if self.live else f": {words}", flush=True)


class Terminated(KeyboardInterrupt):
    """A signal, by its number, which is treated as Ctrl-C is."""


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP (a lost connection) end the recording in good order; one that is ignored stays so."""

    def stop(number, frame):
        raise Terminated(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """128 + the signal's number, as a shell has it."""
    return 128 + (interrupt.args[0] if isinstance(interrupt, Terminated) else signal.SIGINT)
