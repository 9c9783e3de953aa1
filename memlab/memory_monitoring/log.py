"""The log: one JSON document a line, appended as it happens, so that a run that dies leaves what it had.

Each line goes out in one write, unbuffered: nothing is lost with the process, a fork inherits nothing unwritten, and
two monitors may append to one file. A full disk stops the log, not the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path


class Log:
    """Lines appended to the file at `path`. `lost` counts those that could not be written."""

    def __init__(self, path: str | Path):
        self.path, self.lost, self.error = Path(path), 0, None
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields) -> None:
        """Append one line. Where that fails, remember why (`error`) and count it (`lost`)."""
        line = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        try:
            os.write(self._file, line)
        except OSError as error:
            self.lost, self.error = self.lost + 1, error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_log(path: str | Path) -> Iterator[dict]:
    """The lines of a log that are whole, in order; a line that was cut off is left out."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                document = json.loads(line)
            except ValueError:
                continue
            if isinstance(document, dict):
                yield document
