"""Run the book on the GPU at hand and keep what its claims came to: `python -m memlab.record [chapters…]`.

Chapters are named by number (01), by name (memory_timeline) or by path; without a name all are run, and the benchmark
after them. Each is executed in a kernel of its own, which is gone before the next starts, and saved nowhere. As soon as
it has ended, its claims go into chapters/results/<gpu>.json, with date, commit and versions, beside what other
chapters have there. A chapter that fails is marked so, its older record stays, and the next one is run; Ctrl-C, or a
connection that is lost, keeps all that had ended. Then chapters/claims.md is made anew.

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
        match = [path for path in there if _means(name, path)]
        if not match:
            raise ValueError(f"expected chapters among {', '.join(path.stem for path in there)}; found {name!r}")
        found += match
    return [*dict.fromkeys(found)] or there


def _means(name: str, chapter: Path) -> bool:
    """Whether a number, a name or a path means this chapter. A path may be of another folder, and then it does not."""
    if len(Path(name).parts) > 1:
        return Path(name).resolve() == chapter.resolve()
    stem = name.removesuffix(".ipynb")
    return stem in (chapter.stem, chapter.stem[3:]) or (stem.isdecimal() and stem.zfill(2) == chapter.stem[:2])


def device() -> tuple[str, bool]:
    """The name of the GPU at hand and True, or "CPU" and False.

    The name is asked for in a process of its own: this one lives as long as the recording, and would hold a CUDA
    context, some hundred MiB of the very card that is measured.

    Raises ValueError if the GPU does not answer.
    """
    if not torch.cuda.is_available():
        return "CPU", False
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise ValueError(f"the GPU does not tell its name ({why}); python -m memlab may say what is wrong")
    return asked.stdout.strip(), True


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 1 if something failed, 2 if it cannot start, 128 + a signal's number if stopped."""
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
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{name}, torch {torch.__version__}" + (f", driver {driver()}" if is_gpu else ": no GPU, so a DRY RUN"))
    status = None
    try:
        with signals_interrupt():
            for number, chapter in enumerate(chapters, 1):
                recorder.chapter(chapter, f"[{number}/{len(chapters)}] {chapter.stem}")
            if not options.no_benchmark:
                recorder.benchmark(benchmark.ROUNDS if is_gpu else benchmark.QUICK)
    except KeyboardInterrupt as interrupt:
        status = 128 + (interrupt.args[0] if isinstance(interrupt, Terminated) else signal.SIGINT)
        print("\nstopped; what had ended is kept")
    recorder.finish()
    print(f"\n{Table(['chapter', 'status', 'seconds', 'claims'], recorder.rows)}\n")
    if recorder.saved:
        print(f"{'recorded' if is_gpu else 'a dry run, which counts as no record,'} in {path}")
    else:
        print("nothing was recorded")
    if recorder.saved and path == in_book and is_gpu:
        try:
            print(f"{verdicts.write(options.folder)} tells of it; chapters do when executed again on a CPU")
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"{verdicts.PAGE} stays as it was: {error}")
    return status or int(not recorder.well)


if __name__ == "__main__":
    sys.exit(main())
