"""How pytest treats the book's notebooks (a pytest plugin, loaded by pyproject.toml).

With the torch, the Python and the kind of machine that the outputs were recorded with, and no CUDA, every output is
compared, whatever the processor's vector width. Anywhere else every cell is executed and nothing is compared, and the
report says so: other kernels allocate other bytes.
`--nbval`, `--nbval-lax` and `-p no:nbval` on the command line win over this.

With MEMLAB_COMPARE=required a run fails in which a chapter compares fewer cells than `COMPARED` says.

After a notebook's last cell the same kernel runs up to two more. One checks that the kernel kept to the peak memory
that the header promises (where outputs are compared: elsewhere PyTorch itself weighs something else), the other
draws each picture behind the sliders.

pytest's last lines set what each chapter's cells took beside the minutes that its header promises. Nothing is asserted
about times. With pytest-xdist the workers run the cells, and their reports tell the process that prints these lines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell

from tests import kernel_peaks
from tests.slider_grids import draw_the_grid, sliders_in

RECORDED_WITH = {"torch": "2.13.0", "python": "3.11"}
RECORDED_ON = "Linux x86_64"
COMPARED = {
    "00_start_here": 8,
    "01_memory_timeline": 18,
    "02_memory_arithmetic": 19,
    "03_memory_hierarchy": 13,
    "04_caching_allocator": 16,
    "05_memory_monitoring": 17,
    "06_mixed_precision": 18,
    "07_gradient_accumulation": 17,
    "08_gradient_checkpointing": 20,
    "09_offloading": 21,
    "13_data_parallelism": 21,
    "14_tensor_parallelism": 20,
    "15_pipeline_parallelism": 20,
}
"""Cells of each chapter whose outputs are compared; test_house gives a reason for each of the other cells."""
REQUIRED = "MEMLAB_COMPARE"
CELL_TIMEOUT_SECONDS = 180
NBVAL_DEFAULT_TIMEOUT_SECONDS = 2000

OUTPUTS_COMPARED = ("outputs", "compared")
"""A report's property: this cell's outputs were compared."""

_message = pytest.StashKey[str]()
_cells = pytest.StashKey["Cells"]()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def difference_from_recording() -> str:
    """What differs here from where the outputs were recorded; empty if nothing does."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch_version = importlib.metadata.version("torch")
    if torch_version.split("+")[0] != RECORDED_WITH["torch"]:
        return f"torch {torch_version}"
    if python != RECORDED_WITH["python"]:
        return f"Python {python}"
    if (machine := f"{platform.system()} {platform.machine()}") != RECORDED_ON:
        return machine
    return "CUDA" if _has_cuda() else ""


def required() -> bool:
    """Whether this run must compare every chapter."""
    return os.environ.get(REQUIRED) == "required"


class Cells:
    """What the notebooks' cells took and which were compared, told by their reports, whichever process ran them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.there: dict[str, set[str]] = defaultdict(set)
        self.compared: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, name = report.nodeid.partition("::")
        if not (path.endswith(".ipynb") and name.startswith("Cell ")):
            return
        self.seconds[path] += report.duration
        if "exercises" not in Path(path).parts:
            chapter = Path(path).stem
            self.there[chapter].add(name)
            if report.when == "call" and report.passed and OUTPUTS_COMPARED in report.user_properties:
                self.compared[chapter].add(name)

    def counted(self) -> str:
        """How many cells were compared, of how many."""
        compared, there = (sum(map(len, cells.values())) for cells in (self.compared, self.there))
        return f"{compared} of {there} cells"

    def missing(self) -> list[str]:
        """The chapters of which fewer cells were compared than `COMPARED` says, in words."""
        found = {chapter: len(self.compared[chapter]) for chapter in COMPARED}
        return [
            f"{chapter}: expected {number} cells compared, found {found[chapter]}"
            for chapter, number in COMPARED.items()
            if found[chapter] < number
        ]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_message] = _apply_policy(config)
    config.stash[_cells] = Cells()
    config.pluginmanager.register(config.stash[_cells])
    if required() and "executed and compared" not in config.stash[_message]:
        raise pytest.UsageError(f"{REQUIRED}=required, and outputs would not be compared. {config.stash[_message]}")


def _apply_policy(config: pytest.Config) -> str:
    if config.pluginmanager.is_blocked("nbval"):
        return "notebooks are not run: nbval was switched off"
    if not config.pluginmanager.hasplugin("nbval"):
        return "NOTEBOOKS ARE NOT RUN: nbval is not installed; python -m pip install -e '.[test]' brings it"
    option = config.option
    asked = option.nbval or option.nbval_lax
    recorded = "torch {torch}, Python {python} on a CPU".format(**RECORDED_WITH)
    if asked:
        message = f"notebooks: {'executed' if option.nbval_lax else 'executed and compared'} (as asked)"
    elif difference := difference_from_recording():
        option.nbval_lax = True
        message = f"notebooks: executed, NOT COMPARED (recorded with {recorded}; found {difference})"
    else:
        option.nbval = True
        message = f"notebooks: executed and compared (recorded with {recorded}, as here)"
    if not option.nbval_kernel_name:
        option.nbval_current_env = True
    if option.nbval_cell_timeout == NBVAL_DEFAULT_TIMEOUT_SECONDS:
        option.nbval_cell_timeout = CELL_TIMEOUT_SECONDS
    if option.nbval_sanitize_with is None:
        option.nbval_sanitize_with = str(Path(__file__).with_name("nbval_sanitize.cfg"))
    # With MPLBACKEND set, ipykernel leaves the backend alone and figures never reach the notebook.
    os.environ.pop("MPLBACKEND", None)
    return message


def pytest_report_header(config: pytest.Config) -> str:
    return config.stash[_message]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds = config.stash[_cells].seconds
    if not seconds and config.pluginmanager.hasplugin("nbval") and not required():
        return
    for line in _minutes(seconds, config):
        terminalreporter.write_line(line)
    cells, message = config.stash[_cells], config.stash[_message]
    for line in cells.missing() if required() else ():
        terminalreporter.write_line(f"{REQUIRED}=required: {line}")
    if "executed and compared" in message:
        message = message.removesuffix(")") + f", {cells.counted()})"
    terminalreporter.write_line(message)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """A notebook's cell notes on its report that its outputs were compared."""
    if hasattr(item, "compare_outputs"):
        compare = item.compare_outputs

        def noted(*args, **kwargs):
            item.user_properties.append(OUTPUTS_COMPARED)
            return compare(*args, **kwargs)

        item.compare_outputs = noted
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    in_worker = hasattr(session.config, "workerinput")
    if required() and not in_worker and session.config.stash[_cells].missing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _minutes(seconds: dict[str, float], config: pytest.Config) -> Iterator[str]:
    """A line for each chapter that ran: its title, the seconds its cells took, the minutes its header promises."""
    from memlab.book.map import read_header

    ran = []
    for path in sorted(seconds):
        with contextlib.suppress(ValueError):  # an exercise has no header
            ran.append((seconds[path], read_header(config.rootpath / path)))
    if ran:
        at_once = getattr(config.option, "numprocesses", None) or 1
        yield f"minutes: what the cells took here ({at_once} at once), and what the chapter's header promises"
        for took, header in ran:
            yield f"{took:6.0f} s  {header.title}: {header.minutes}"
        total = sum(took for took, _ in ran)
        yield f"{total:6.0f} s  together, which are {total / 60:.1f} minutes"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """After a notebook's own cells come those that check what is promised about it."""
    report = yield
    if report.passed and report.result and hasattr(collector, "nb"):
        last = report.result[-1]
        for number, (name, source) in enumerate(_checks(collector), start=1):
            cell, options = new_code_cell(source), last.options | {"check": False, "check_exception": False}
            number += last.cell_num
            extra = type(last).from_parent(collector, name=name, cell_num=number, cell=cell, options=options)
            report.result.append(extra)
    return report


def _checks(collector: pytest.Collector) -> Iterator[tuple[str, str]]:
    """Name and source of each cell to be run after a notebook's own. The peak comes first: pictures raise it."""
    if collector.config.option.nbval and (peak_bytes := kernel_peaks.promised(collector.path)):
        yield "Peak memory as promised", kernel_peaks.keep(peak_bytes)
    if sets := sliders_in(collector.nb):
        yield "Pictures behind the sliders", draw_the_grid(sets)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run: cells tagged `gpu` without CUDA, and `skip-execution` otherwise."""
    cells = [(item, item.cell.metadata.get("tags", [])) for item in items if hasattr(item, "cell")]
    for item, tags in cells:
        if "gpu" in tags and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="this cell needs a CUDA GPU"))
        elif "skip-execution" in tags and "gpu" not in tags:
            item.add_marker(pytest.mark.skip(reason="this cell is tagged skip-execution"))
