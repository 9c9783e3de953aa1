"""Run the book on the GPU at hand and keep what its claims came to: `python -m memlab.record [chapters…]`.

Chapters are named by number (01), by name (memory_timeline) or by path; without a name all are run, and the benchmark
after them. Each is executed in a kernel of its own, which is gone before the next starts, and saved nowhere. As soon as
it has ended, its claims go into chapters/results/<gpu>.json, with date, commit and versions, beside what other
chapters have there. A chapter that fails is marked so, its older record stays, and the next one is run; Ctrl-C keeps
all that had ended. Then chapters/claims.md is made anew.

Without a GPU it is a dry run: the same, but into a new temporary file (or --output), which no table of the book reads.

It needs torch, matplotlib, ipykernel, nbclient and nbformat, and neither JupyterLab nor widgets.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from memlab import benchmark
from memlab.book import records, verdicts
from memlab.book.machine import driver
from memlab.book.recorder import Recorder
from memlab.book.tables import Table

NEEDS = ("matplotlib", "ipykernel", "nbclient", "nbformat")


def chosen(names: Sequence[str], folder: Path) -> list[Path]:
    """The chapters in a folder that numbers, names or paths mean; all of them for none.

    Raises ValueError for a name that is none of them, and for a folder without chapters.
    """
    there = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not there:
        raise ValueError(f"expected chapters (NN_name.ipynb) in {folder}, found none; name their folder with --folder")
    found = []
    for name in names:
        stem = Path(name).stem
        match = [path for path in there if stem in (path.stem, path.stem[3:]) or stem.zfill(2) == path.stem[:2]]
        if not match:
            raise ValueError(f"expected chapters among {', '.join(path.stem for path in there)}; found {name!r}")
        found += match
    return [*dict.fromkeys(found)] or there


def device() -> tuple[str, bool]:
    """The name of the GPU at hand and True, or "CPU" and False.

    The name is asked for in a process of its own: this one lives as long as the recording, and would hold a CUDA
    context, some hundred MiB of the very card that is measured.
    """
    if not torch.cuda.is_available():
        return "CPU", False
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), True


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is treated as Ctrl-C is."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within, SIGTERM ends the recording in good order."""

    def stop(number, frame):
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 1 if something failed, 2 for a wrong name or a damaged record, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m memlab.record", description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers, names or paths; all of them without one")
    parser.add_argument("--no-benchmark", action="store_true", help="chapters only")
    parser.add_argument("--output", type=Path, help="the record's file, if not results/<gpu>.json")
    parser.add_argument("--folder", type=Path, default=verdicts.CHAPTERS, help="where the chapters are")
    options = parser.parse_args(arguments)
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        print(f"recording needs {', '.join(missing)}: python -m pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        chapters = chosen(options.chapters, options.folder)
        name, is_gpu = device()
        in_book = options.folder / "results" / records.file_name(name)
        path = options.output or (in_book if is_gpu else Path(tempfile.mkdtemp(prefix="memlab-dry-run-"), "cpu.json"))
        recorder = Recorder(path, options.folder, name, is_gpu)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{name}, torch {torch.__version__}" + (f", driver {driver()}" if is_gpu else ": no GPU, so a DRY RUN"))
    status = None
    try:
        with sigterm_interrupts():
            for number, chapter in enumerate(chapters, 1):
                recorder.chapter(chapter, f"[{number}/{len(chapters)}] {chapter.stem}")
            if not options.no_benchmark:
                recorder.benchmark(benchmark.ROUNDS if is_gpu else benchmark.QUICK)
    except KeyboardInterrupt as interrupt:
        status = 143 if isinstance(interrupt, Terminated) else 130
        print("\nstopped; what had ended is kept")
    recorder.finish()
    print(f"\n{Table(['chapter', 'status', 'seconds', 'claims'], recorder.rows)}\n")
    print(f"{'recorded' if is_gpu else 'a dry run, which counts as no record,'} in {path}")
    if path == in_book and is_gpu:
        try:
            print(f"{verdicts.write(options.folder)} tells of it; chapters do when executed again on a CPU")
        except (OSError, ValueError) as error:
            print(f"{verdicts.PAGE} stays as it was: {error}")
    return status or int(not recorder.well)


if __name__ == "__main__":
    sys.exit(main())
