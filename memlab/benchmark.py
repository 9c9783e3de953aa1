"""How good the library is, in figures: `python -m memlab.benchmark [measures…]`.

Every time here is a ratio, or comes with one: the runs that are compared take turns in one process, and min, median and
max of the rounds are printed. Bytes are exact. Measures are named as in `memlab.book.measures`; without a name all run.

As soon as a measure has ended it goes into chapters/results/benchmark/<device>.json, with date, commit and versions.
One that fails is marked so, its older rows stay, and the next one is run; Ctrl-C, or a connection that is lost, keeps
all that had ended. Started again, it skips what is recorded with the same library, torch, driver, processor and rounds,
unless it is named. Then chapters/benchmark.md and README's table are made anew. `--rounds 9` is quicker, and the record
says so; `--quick` runs one round, to see that everything works, and records nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from memlab.book import benchmarks, documents
from memlab.book.machine import device, driver, processor
from memlab.book.measures import MEASURES
from memlab.book.pages import print_as_far_as_possible
from memlab.book.recorder import RECORDED, Recorder, exit_status, signals_interrupt
from memlab.book.tables import Table

ROUNDS, FEWEST, QUICK = 25, 5, 1
LIBRARY = Path(__file__).parent


def chosen(names: Sequence[str]) -> list[Callable]:
    """The measures of these names, in their order; all of them for none. Raises ValueError for a name that is none."""
    there = {measure.__name__: measure for measure in MEASURES}
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"expected measures among {', '.join(there)}; found {unknown[0]!r}")
    return [there[name] for name in dict.fromkeys(names)] or [*MEASURES]


def library_digest() -> str:
    """A digest of the library, code and data: a measure uses so much of it that to tell its part would be in vain."""
    digest = hashlib.sha256()
    for page in sorted([*LIBRARY.rglob("*.py"), *LIBRARY.rglob("*.json")]):
        digest.update(f"\0{page.relative_to(LIBRARY).as_posix()}\0{page.read_text(encoding='utf-8')}".encode())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within, PyTorch computes in one thread, and its profiler keeps its notes of itself to itself."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rows_by(measure: Callable, on: str, rounds: int, _: Callable[[int, int], None]) -> dict[str, list]:
    """What a measure comes to on "cpu" or "cuda", as a record keeps it."""
    return {"rows": [[*map(str, row)] for row in measure(on, rounds)]}


def outcome(recorder: Recorder) -> Table:
    """Every row that is in the record, and every failure, with the date of what this recorder did not measure."""
    measured = {one.name for one in recorder.outcomes if one.status == RECORDED}
    failed = benchmarks.failures(recorder.document)
    rows = []
    for name in benchmarks.in_order(recorder.document):
        found = benchmarks.rows_of(recorder.document, name)
        rows += [(row.measure, row.figure, row.must, "now" if name in measured else row.date) for row in found]
        if name in failed:
            rows.append((name, f"failed: {failed[name]['error']}", "", failed[name]["date"]))
    return Table(["measure", "figure", "must reach", "measured"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns 0, or 1 if something failed, 2 if it cannot start, 128 + a signal's number if stopped."""
    parser = argparse.ArgumentParser(prog="python -m memlab.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("measures", nargs="*", help="names; all of them without one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"{FEWEST} or more; {ROUNDS} without")
    parser.add_argument("--quick", action="store_true", help="one round: to see that it works, not to quote or record")
    parser.add_argument("--again", action="store_true", help="run also what is recorded already")
    parser.add_argument("--output", type=Path, help="the record's file, if not results/benchmark/<device>.json")
    parser.add_argument("--folder", type=Path, default=benchmarks.CHAPTERS, help="where the chapters are")
    options = parser.parse_args(arguments)
    print_as_far_as_possible()
    rounds = QUICK if options.quick else options.rounds
    try:
        if options.rounds < FEWEST:
            raise ValueError(f"expected {FEWEST} rounds or more, found {options.rounds}; --quick runs one, unrecorded")
        measures = chosen(options.measures)
        name, is_gpu = device()
        in_book = options.folder / "results" / "benchmark" / documents.file_name(name)
        path = None if options.quick else options.output or in_book
        again = options.again or bool(options.measures)
        recorder = Recorder(benchmarks.KIND, path, name, is_gpu, LIBRARY, again=again)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    same = {"rounds": rounds, "processor": processor()}
    words = f"driver {driver()}" if is_gpu else f"one thread of {same['processor']}"
    print(f"{name}, torch {torch.__version__}, {words}, {rounds} rounds; min – median – max")
    status, digest = None, library_digest()
    try:
        with signals_interrupt(), one_thread():
            for number, measure in enumerate(measures, 1):
                label = f"[{number}/{len(measures)}] {measure.__name__}"
                work = functools.partial(rows_by, measure, "cuda" if is_gpu else "cpu", rounds)
                recorder.run(measure.__name__, label, work, {"rows": []}, lambda: digest, **same)
    except KeyboardInterrupt as interrupt:
        status = exit_status(interrupt)
        print("\nstopped; what had ended is kept, and started again it goes on from there")
    recorder.finish()
    print(f"\n{outcome(recorder)}\n")
    there = recorder.document["measures"]
    if missing := [measure.__name__ for measure in measures if measure.__name__ not in there]:
        print(f"not measured: {', '.join(missing)}")
    tell_where(recorder, options.folder, path == in_book)
    return status or int(not recorder.well)


def tell_where(recorder: Recorder, folder: Path, in_book: bool) -> None:
    """Say where the record is, and make the book's pages anew if it is the book's."""
    if any(one.status.startswith("skipped") for one in recorder.outcomes):
        print("--again runs also what was skipped")
    print(f"recorded in {recorder.path}" if recorder.saved else "nothing was recorded")
    if recorder.saved and in_book:
        try:
            print("{} and {} tell of it".format(*benchmarks.write(folder)))
        except (OSError, ValueError) as error:
            print(f"{benchmarks.PAGE} and README stay as they were: {error}")


if __name__ == "__main__":
    sys.exit(main())
