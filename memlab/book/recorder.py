"""What `python -m memlab.record` does for each chapter: execute it, take its claims, and merge them into the record."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from memlab import benchmark
from memlab.book import records
from memlab.book.claims import Claim
from memlab.book.machine import driver

CELL_TIMEOUT_SECONDS = 1800
TELL = """
import dataclasses, json, sys
found = getattr(sys.modules.get("memlab.book.claims"), "registered", {})
print("memlab-claims " + json.dumps({name: dataclasses.asdict(claim) for name, claim in found.items()}))
"""


def commit(folder: Path) -> str:
    """The commit that is checked out, with "+" where files differ from it; "unknown" outside a git repository."""
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    made = [f":(top,exclude)chapters/{name}" for name in ("results", "claims.md")]  # by recording itself
    status = ["status", "--porcelain", "--untracked-files=no", "--", ":/", *made]
    try:
        head, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=30).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], status)
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")


def claims_of(chapter: Path, progress: Callable[[int, int], None]) -> dict[str, dict]:
    """Execute a chapter and return its claims, as a record keeps them. Raises NotebookError if it fails."""
    import nbformat

    from memlab.book.run import run

    notebook = nbformat.read(chapter, as_version=4)
    cells = len(notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell(TELL))
    run(notebook, chapter, CELL_TIMEOUT_SECONDS, on_cell=lambda index: progress(index, cells))
    printed = "".join(output.text for output in notebook.cells[-1].outputs if output.output_type == "stream")
    told = json.loads(printed.split("memlab-claims ", 1)[1])
    return {name: records.claim_fields(Claim(**fields)) for name, fields in told.items()}


class Recorder:
    """Runs chapters and the benchmark on one device, and merges what they come to into the record at `path`.

    `rows` tells what became of each: chapter, status, seconds, claims; `well` whether nothing went wrong, and `saved`
    whether anything is in the file. Raises ValueError, before anything is run, if the file there is damaged, of another
    device or no file, and OSError if it cannot be read or written.
    """

    def __init__(self, path: Path, folder: Path, name: str, is_gpu: bool):
        self.path, self.folder, self.name, self.is_gpu = path, folder, name, is_gpu
        self.rows: list[tuple] = []
        self.well, self.saved = True, False
        self._unsaved: list[Callable[[dict], None]] = []
        self._origin = {"commit": commit(folder), "torch": torch.__version__, "driver": driver()}
        self._document()
        records.expect_writable(path)

    def chapter(self, chapter: Path, label: str) -> None:
        """Run one chapter; whatever it comes to is in the record afterwards."""
        start, bar = time.perf_counter(), Bar(label)
        origin, claims, error = self._now(), {}, ""
        try:
            origin["source"] = records.source_of(chapter)
            claims = claims_of(chapter, bar.at)
        except Exception as failure:  # whatever it was, the others go on
            error = _one_line(failure)
        seconds = round(time.perf_counter() - start, 1)
        fields = {**origin, "seconds": seconds}
        error = self._save(lambda document: _enter(document, chapter.stem, fields, claims, error)) or error
        found = [Claim(id, **fields) for id, fields in claims.items()]
        apart = sum(claim.measured is not None and not claim.agrees for claim in found)
        count = f"{len(claims)}, {apart} apart from the prediction" if apart else len(claims)
        self._told(bar, chapter.stem, error, seconds, count, f"{count} claims in {seconds} s")

    def benchmark(self, rounds: int) -> None:
        """Run the benchmark; an older one stays in the record if it fails."""
        start, bar = time.perf_counter(), Bar("benchmark")
        rows, error = [], ""
        try:
            found = benchmark.measured("cuda" if self.is_gpu else "cpu", rounds, bar.at)
            rows = [[*map(str, row)] for row in found]
        except Exception as failure:
            error = _one_line(failure)
        error = self._save(lambda document: _enter_benchmark(document, self._now(), rows, error)) or error
        seconds = round(time.perf_counter() - start, 1)
        self._told(bar, "benchmark", error, seconds, "—", f"{len(rows)} rows in {seconds} s")

    def finish(self) -> None:
        """Try once more to save what could not be saved, and say what is lost if that fails."""
        if self._unsaved:
            self._write()
        if self._unsaved:
            self.well = False
            print(f"not saved: {len(self._unsaved)} results; make room at {self.path.parent} and record again")

    def _now(self) -> dict:
        return {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "source": "", **self._origin}

    def _document(self) -> dict:
        if not self.path.is_file():
            return records.empty(self.name, self.is_gpu)
        document = records.read(self.path)
        if (document["device"], document["gpu"]) != (self.name, self.is_gpu):
            raise ValueError(
                f"{self.path}: expected a record of {self.name}, found one of {document['device']}; "
                "move it away, or name another file with --output"
            )
        return document

    def _save(self, change: Callable[[dict], None]) -> str:
        """Save a change, or keep it for later. Returns "", or why no record can hold it.

        Such a change is tried on an empty record and let go, as it would keep all later ones out.
        """
        trial = records.empty(self.name, self.is_gpu)
        try:
            change(trial)
            records.text_of(trial)
        except ValueError as error:
            return f"no record can hold it: {_one_line(error)}"
        self._unsaved.append(change)
        self._write()
        return ""

    def _write(self) -> None:
        """Read the file again before it is written: another recorder may have added a chapter meanwhile."""
        try:
            with records.locked(self.path.parent):
                document = self._document()
                for change in self._unsaved:
                    change(document)
                records.write(document, self.path)
        except (OSError, ValueError) as error:
            print(f"\n{self.path} could not be written ({error}); it will be tried again", flush=True)
        else:
            self._unsaved.clear()
            self.saved = True

    def _told(self, bar: Bar, name: str, error: str, seconds: float, count: object, words: str) -> None:
        self.well = self.well and not error
        done = "recorded" if self.is_gpu else "dry run"
        self.rows.append((name, f"failed: {error}" if error else done, f"{seconds:.1f}", count))
        bar.end(f"failed: {error}" if error else words)


def _enter(document: dict, name: str, fields: dict, claims: dict, error: str) -> None:
    """Put what a chapter came to into a record. A failure does not push out what succeeded before."""
    older = document["chapters"].get(name)
    if not error:
        document["chapters"][name] = {"status": "recorded", **fields, "claims": claims}
    elif older is None or older["status"] == "failed":
        document["chapters"][name] = {"status": "failed", "error": error, **fields, "claims": {}}
    else:
        older["failed_since"] = {"error": error, **fields}


def _enter_benchmark(document: dict, fields: dict, rows: list, error: str) -> None:
    """Put the benchmark into a record. If it failed, the older rows stay."""
    if error:
        older = document["benchmark"] or {**fields, "rows": []}
        document["benchmark"] = {**older, "failed_since": {"error": error, **fields}}
    else:
        document["benchmark"] = {**fields, "rows": rows}


def _one_line(error: Exception) -> str:
    """The first line of an error, as UTF-8 can hold it, and without its notebook's path, which is this machine's."""
    line = (str(error).encode(errors="replace").decode().splitlines() or [""])[0]
    return line[line.find(".ipynb: ") + 8 :] if ".ipynb: " in line else f"{type(error).__name__}: {line}"


class Bar:
    """A line that fills while cells run: on a terminal in place, elsewhere begun when they start and ended once."""

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
