"""Run the book on the GPU at hand and keep what its claims came to: `python -m memlab.record [chapters…]`.

Chapters are named by number (01), by name (memory_timeline) or by path; without a name all are run, and the benchmark
after them. Each is executed in a kernel of its own, which is gone before the next starts, and saved nowhere. As soon as
it has ended, its claims go into chapters/results/<gpu>.json, with date, commit and versions, beside what other
chapters have there. A chapter that fails is marked so, its older record stays, and the next one is run; Ctrl-C, or a
connection that is lost, keeps all that had ended. Started again, it skips chapters that are recorded with the same
code, torch and driver, unless they are named. Then chapters/claims.md is made anew.

Without a GPU it is a dry run: the same, but into a new temporary file (or --output), which no table of the book reads.

It needs torch, matplotlib, ipykernel, nbclient and nbformat, and neither JupyterLab nor widgets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from memlab import benchmark
from memlab.book import documents, records, verdicts
from memlab.book.claims import Claim
from memlab.book.machine import device, driver
from memlab.book.pages import CHAPTERS, chapters_in, print_as_far_as_possible
from memlab.book.recorder import RECORDED, Recorder, exit_status, signals_interrupt
from memlab.book.tables import Table

NEEDS = ("matplotlib", "ipykernel", "nbclient", "nbformat")
CELL_TIMEOUT_SECONDS = 1800
TELL = """
import dataclasses, json, sys
found = getattr(sys.modules.get("memlab.book.claims"), "registered", {})
print("memlab-claims " + json.dumps({name: dataclasses.asdict(claim) for name, claim in found.items()}))
"""


def chosen(names: Sequence[str], folder: Path) -> list[Path]:
    """The chapters in a folder that numbers, names or paths mean; all of them for none.

    Raises ValueError for a name that is none of them, and for a folder without chapters.
    """
    there, found = chapters_in(folder), []
    for name in names:
        match = [path for path in there if _means(name, path)]
        if not match:
            raise ValueError(f"expected chapters among {', '.join(path.stem for path in there)}; found {name!r}")
        found += match
    return [*dict.fromkeys(found)] or there


def _means(name: str, chapter: Path) -> bool:
    """Whether a number, a name or a path means this chapter. A path may be of another folder, and then it does not."""
    if Path(name).name != name:
        return Path(name).resolve() == chapter.resolve()
    stem = name.removesuffix(".ipynb")
    return stem in (chapter.stem, chapter.stem[3:]) or (stem.isdecimal() and stem.zfill(2) == chapter.stem[:2])


def claims_of(chapter: Path, progress: Callable[[int, int], None]) -> dict[str, dict]:
    """Execute a chapter and return its claims, as a record keeps them. Raises NotebookError if it fails."""
    import nbformat

    from memlab.book.run import run

    notebook = nbformat.read(chapter, as_version=4)
    cells = len(notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell(TELL))
    run(notebook, chapter, CELL_TIMEOUT_SECONDS, on_cell=lambda index: progress(index, cells))
    printed = "".join(output.text for output in notebook.cells[-1].outputs if output.output_type == "stream")
    told, _ = json.JSONDecoder().raw_decode(printed.split("memlab-claims ", 1)[1])  # a thread may print meanwhile, too
    return {name: records.claim_fields(Claim(**fields)) for name, fields in told.items()}


def record(recorder: Recorder, chapter: Path, label: str) -> None:
    """Run one chapter; whatever it comes to is in the record afterwards."""
    recorder.run(
        chapter.stem,
        label,
        lambda progress: {"claims": claims_of(chapter, progress)},
        {"claims": {}},
        lambda: records.source_of(chapter),
    )


def count(claims: dict[str, dict]) -> str:
    """How many claims, and how many of them are not what was predicted."""
    found = [Claim(id, **fields) for id, fields in claims.items()]
    apart = sum(claim.measured is not None and not claim.agrees for claim in found)
    return f"{len(found)}, {apart} apart from the prediction" if apart else str(len(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 1 if something failed, 2 if it cannot start, 128 + a signal's number if stopped."""
    parser = argparse.ArgumentParser(prog="python -m memlab.record", description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers, names or paths; all of them without one")
    parser.add_argument("--again", action="store_true", help="run also what is recorded already")
    parser.add_argument("--no-benchmark", action="store_true", help="chapters only")
    parser.add_argument("--output", type=Path, help="the record's file, if not results/<gpu>.json")
    parser.add_argument("--folder", type=Path, default=CHAPTERS, help="where the chapters are")
    options = parser.parse_args(arguments)
    print_as_far_as_possible()
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        print(f"recording needs {', '.join(missing)}: python -m pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        chapters = chosen(options.chapters, options.folder)
        name, is_gpu = device()
        in_book = options.folder / "results" / documents.file_name(name)
        path = options.output or (in_book if is_gpu else Path(tempfile.mkdtemp(prefix="memlab-dry-run-"), "cpu.json"))
        again = options.again or bool(options.chapters)
        recorder = Recorder(records.KIND, path, name, is_gpu, options.folder, again=again)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{name}, torch {torch.__version__}" + (f", driver {driver()}" if is_gpu else ": no GPU, so a DRY RUN"))
    status = None
    try:
        with signals_interrupt():
            for number, chapter in enumerate(chapters, 1):
                record(recorder, chapter, f"[{number}/{len(chapters)}] {chapter.stem}")
    except KeyboardInterrupt as interrupt:
        status = exit_status(interrupt)
        print("\nstopped; what had ended is kept, and started again it goes on from there")
    recorder.finish()
    done = {RECORDED: RECORDED if is_gpu else "dry run"}
    rows = [
        (one.name, done.get(one.status, one.status), one.seconds, count(one.found["claims"]))
        for one in recorder.outcomes
    ]
    if status is None and not options.chapters and not options.no_benchmark:
        print("\nthe benchmark:")
        status = benchmark.main(benchmark_words(options, is_gpu)) or None
        rows.append(("benchmark", f"exit status {status}, see above" if status else "see above", "—", "—"))
    print(f"\n{Table(['chapter', 'status', 'seconds', 'claims'], rows)}\n")
    if any(one.status.startswith("skipped") for one in recorder.outcomes):
        print("--again runs also what was skipped")
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


def benchmark_words(options: argparse.Namespace, is_gpu: bool) -> list[str]:
    """The benchmark's arguments: in a dry run it only shows that it works; its record is kept beside the chapters'."""
    output = options.output and options.output.parent / "benchmark" / options.output.name
    words = [*(["--again"] if options.again else []), *(["--output", str(output)] if output else [])]
    return ["--folder", str(options.folder), *(words if is_gpu else ["--quick"])]


if __name__ == "__main__":
    sys.exit(main())
