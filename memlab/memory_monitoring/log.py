"""The log: one JSON document a line, appended as it happens, so that a run that dies leaves what it had.

Each line goes out in one write, unbuffered: nothing is lost with the process, a fork inherits nothing unwritten, and
two monitors may append to one file, for the system puts each write behind the last whole; `run` tells their lines
apart. A full disk stops the log, not the run, and lines are lost meanwhile.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe that nobody reads loses lines, and does not stop the training
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class Log:
    """Lines appended to the file at `path`. `lost` counts those that could not be written, `error` says why.

    Raises OSError, with what to do, if the file cannot be opened for writing.
    """

    def __init__(self, path: str | Path):
        self.path, self.lost, self.error = Path(path), 0, None
        self.run = os.urandom(4).hex()
        self._lock = threading.RLock()
        try:
            self._open()
        except OSError as error:
            raise type(error)(
                error.errno,
                f"expected a file that can be written to as the log, found that it cannot ({error.strerror}); "
                "make its folder, or give the log another path",
                str(self.path),
            ) from None

    def write(self, kind: str, **fields) -> None:
        """Append one line. Where that fails, remember why (`error`) and count it (`lost`)."""
        self._append(_encode({"kind": kind, "run": self.run, **fields}).encode())

    def close(self) -> None:
        """Close the file. What is written afterwards is left out."""
        with self._lock:
            self._file = None
            self._close_file()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | NONBLOCK
        self._close_file = weakref.finalize(self, os.close, file := os.open(self.path, flags, 0o644))
        self._file = file  # an interrupt before this line leaves no open file
        self._close_file.atexit = False  # the thread may still write
        size = os.fstat(self._file).st_size
        self._torn = bool(size) and os.pread(self._file, 1, size - 1) != b"\n"

    def _append(self, line: bytes) -> None:
        with self._lock:
            if self._file is None:
                return
            text = (b"\n" if self._torn else b"") + line + b"\n"
            try:
                written = os.write(self._file, text)
            except OSError as error:
                written, self.error = 0, error
            if written == len(text):
                self._torn = False
                return
            if written:  # the disk was full in the middle
                self._torn, self.error = True, self.error or OSError("the disk is full")
            self.lost += 1


def read_log(path: str | Path) -> Iterator[dict]:
    """The lines of a log that are whole, in order; one that was cut off is left out. Raises OSError without a file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(document, dict):
                yield document


def described(error: BaseException | None) -> str | None:
    """An error in a line: its repr, or its name where it has none."""
    try:
        return None if error is None else repr(error)[:500]
    except Exception:
        return type(error).__name__
