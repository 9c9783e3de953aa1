"""Run a program to the end of its budget and note what each step held: the truth that a forecast is held against.

The budget is not known before. A leaking program runs until it has settled and then leaked for as many steps as its
seed says (and until that is as much as it needed before, times `ROOM`). Budget: its highest peak until it had settled
+ what it has leaked since. It runs on until a peak reaches that: there it would have died. So 80 % of the budget are
in use when about 60 % of the leak's steps are over: 66 at least, twice as long as anything healthy rises.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from memlab.book.watched_programs.programs import CLEAN, Program
from memlab.memory_monitoring import MeteredMemory, ProcessMemory
from memlab.memory_monitoring.sources import Source
from memlab.memory_timeline import Meter

ROOM, AT_MOST = 1.0, 4
LEVELS = {"storages": "a meter", "heap": "a process", "resident": "a process"}
PROCESS_SCALE = 3


class Watched(NamedTuple):
    """What one level of a program's run was: `ends[i]`, `peaks[i]` of step i in bytes; `start_bytes` before its model.

    budget_bytes: what it must not reach. fills_at: the steps that were begun when it did, None for never.
    """

    name: str
    kind: str
    model_name: str
    level: str
    start_bytes: int
    ends: tuple[int, ...]
    peaks: tuple[int, ...]
    settled: int
    budget_bytes: int
    fills_at: int | None


def run(program: Program, source: Source, levels: Iterable[str]) -> list[Watched]:
    """Run a program to the end of its budget at all these levels of a source, or for AT_MOST times its steps.

    A leak that a level does not see (Python's objects, for a meter) has `fills_at` None there.
    """
    start = source.read()
    source.peaks()  # each call tells the highest since the one before
    ends: dict[str, list[int]] = {level: [] for level in levels}
    peaks: dict[str, list[int]] = {level: [] for level in levels}
    budgets: dict[str, int] = {}
    with program:
        settled = max(program.settles, program.begins)
        for step in range(program.steps if program.kind == CLEAN else settled + AT_MOST * program.steps):
            program.step(step)
            highest, held = source.peaks(), source.read()
            for level in levels:
                ends[level].append(held[level])
                peaks[level].append(max(held[level], highest.get(level, 0)))
                if level not in budgets and program.kind != CLEAN and step >= settled + program.steps:
                    needed = max(peaks[level][: settled + 1])
                    leaked = held[level] - ends[level][settled]
                    if leaked >= ROOM * (needed - start[level]):
                        budgets[level] = needed + leaked
            if len(budgets) == len(ends) and all(max(peaks[level]) >= budgets[level] for level in levels):
                break
    found = []
    for level in levels:
        most = max(peaks[level])
        budget = budgets.get(level, round(start[level] + program.budget_factor * (most - start[level])))
        fills_at = next((i + 1 for i, peak in enumerate(peaks[level]) if peak >= budget), None)
        series = tuple(ends[level]), tuple(peaks[level])
        found.append(
            Watched(
                program.name, program.kind, program.model_name, level, start[level], *series, settled, budget, fills_at
            )
        )
    return found


def watch(program: Program, level: str = "storages") -> Watched:
    """Run a program to the end of its budget, and note what it held at one level.

    "storages": in this process, by a meter, exactly. "heap", "resident": in a process of its own, `PROCESS_SCALE`
    times as wide, by what the system says. Raises ValueError for another level.
    """
    return watch_levels(program, (level,))[0]


def watch_levels(program: Program, levels: tuple[str, ...]) -> list[Watched]:
    """The same for several levels of one run: ("storages",), or some of ("heap", "resident")."""
    places = {LEVELS.get(level, "unknown") for level in levels}
    if len(places) != 1 or "unknown" in places:
        raise ValueError(f"expected levels that are seen in one place, of {LEVELS}, found {levels}")
    if places == {"a meter"}:
        gc.collect()
        gc.freeze()  # what is there already is no concern of the collector's, whose looks at all of it take long
        try:
            with Meter() as meter:
                return run(program, MeteredMemory(meter), levels)
        finally:
            gc.unfreeze()
    command = [
        sys.executable,
        "-c",
        f"import sys; from {__name__} import main; main(*sys.argv[1:])",
        program.kind,
        str(program.seed),
        *levels,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"expected {program.name} to run in a process of its own, found:\n{ended.stderr}")
    return [Watched(**document) for document in json.loads(ended.stdout.splitlines()[-1])]


def main(kind: str, seed: str, *levels: str) -> None:
    """Run one program in this process and print what it held as JSON."""
    import torch

    torch.set_num_threads(1)
    with Program(kind, int(seed), PROCESS_SCALE) as first:  # libraries are loaded and workspaces made at the first use
        first.step(0)
    found = run(Program(kind, int(seed), PROCESS_SCALE), ProcessMemory(), levels)
    print(json.dumps([watched._asdict() for watched in found]))
