"""The health report of `python -m memlab`: machine, chapters, records, and for each thing that is wrong what to do.

It looks and starts nothing, and whatever is missing is told, not raised.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from memlab import __version__
from memlab.book import benchmarks, documents, records
from memlab.book import map as the_book
from memlab.book.machine import driver, free_memory_bytes, gpu_memory, machine, version
from memlab.book.tables import Table
from memlab.units import MiB, format_bytes

CHAPTERS = Path(__file__).parents[2] / "chapters"
LAB = "python -m pip install -e '.[lab]' in the book's folder"
PACKAGES = {"matplotlib": "pictures", "ipykernel": "running chapters", "jupyterlab": "reading chapters"}
PACKAGES |= {"nbclient": "recording chapters", "nbformat": "recording chapters"}
PACKAGES |= {"ipywidgets": "sliders", "anywidget": "the explorer"}
LEAST_DISK_BYTES = 100 * MiB


class Health:
    """What was found. `problems` are sentences, each with what to do."""

    def __init__(self, folder: str | Path = CHAPTERS):
        self.folder = Path(folder)
        self.problems: list[str] = []
        self.free_bytes, self.gpus = free_memory_bytes(), gpu_memory()

    def machine(self) -> Table:
        """Versions, memory and disk."""
        table = machine()
        disk = shutil.disk_usage(self.folder if self.folder.is_dir() else Path.cwd()).free
        installed = {name: version(name) for name in PACKAGES}
        table.rows += [["memlab", __version__], ["free main memory", _size(self.free_bytes)]]
        for number, (_, free, total) in enumerate(self.gpus):
            words = "does not answer" if free < 0 else f"{format_bytes(free)} of {format_bytes(total)}"
            table.rows.append([f"free on GPU {number}", words])
            if free < total // 2:
                self.problems.append(
                    f"GPU {number}: expected most of its memory free, found {words}: see nvidia-smi for who holds it"
                )
        table.rows += [
            ["NVIDIA driver", driver() or "none"],
            ["free disk", format_bytes(disk)],
            ["packages", ", ".join(f"{name} {found or 'missing'}" for name, found in installed.items())],
            ["browser, for tests", _browser() or "none found"],
        ]
        for name, found in installed.items():
            if found is None:
                self.problems.append(f"{name} is missing, which is needed for {PACKAGES[name]}: {LAB}")
        if disk < LEAST_DISK_BYTES:
            self.problems.append(f"{format_bytes(disk)} free on disk: chapters may not be saved; make room")
        self.problems += _torch_problems(bool(self.gpus))
        return table

    def chapters(self) -> Table:
        """What each chapter needs, and whether this machine has it."""
        rows = []
        for path in sorted(self.folder.glob("[0-9][0-9]_*.ipynb")):
            try:
                header = the_book.read_header(path)
            except (ValueError, OSError, LookupError, TypeError) as error:
                again = f"git -C {path.parent} checkout -- {path.name}"
                self.problems.append(f"{path.name} cannot be read ({error}): restore it, {again}")
                continue
            lacks = dict(self._lacks(header))
            rows.append((header.title, header.minutes, header.peak, header.gpu, "; ".join(lacks) or "enough"))
            self.problems += [f"chapter {path.stem}: {lack}: {advice}" for lack, advice in lacks.items()]
        if not rows:
            self.problems.append(f"no chapters in {self.folder}: this memlab came without the book; get its repository")
        return Table(["chapter", "minutes on two CPU cores", "peak memory", "GPU", "this machine"], rows)

    def _lacks(self, header: the_book.Header) -> Iterator[tuple[str, str]]:
        """What a chapter needs that is not here, each with what to do."""
        if header.peak_bytes is not None and self.free_bytes is not None and header.peak_bytes > self.free_bytes:
            lack = f"needs {format_bytes(header.peak_bytes)}, {format_bytes(self.free_bytes)} are free"
            yield lack, "close other programs, or use a machine with more memory"
        if not header.gpu.startswith(("optional", "none")) and not self.gpus:
            yield f"no GPU ({header.gpu})", "use a machine that has what it needs, or read its saved outputs"

    def records(self) -> Table:
        """What each GPU has recorded, and each device's benchmark. A stale record is a problem where its GPU is."""
        here = {name for name, *_ in self.gpus}
        gpus, damaged = records.survey(self.folder / "results")
        devices, also_damaged = benchmarks.KIND.survey(self.folder / "results" / "benchmark")
        for kind, path in [(records.KIND, path) for path in damaged] + [(benchmarks.KIND, p) for p in also_damaged]:
            try:
                kind.read(path)
            except (ValueError, OSError) as error:
                self.problems.append(str(error))
        rows = []
        for document in gpus:
            for name, entry in document["chapters"].items():
                gone = records.is_gone(name, self.folder)
                state = "gone" if gone else records.state_of(document, name, self.folder)
                rows.append((document["device"], name, state, entry["date"], entry["torch"]))
                if state != "recorded" and (state != "stale" or document["device"] in here):
                    file = documents.file_name(document["device"])
                    again = f"on that GPU, python -m memlab.record {name[:2]}"
                    what = f"no such chapter is here; remove it from results/{file}" if gone else again
                    self.problems.append(f"{document['device']}, {name}: {state}: {what}")
        for document in devices:
            failed = benchmarks.failures(document)
            for name, failure in failed.items():
                again = f"on that device, python -m memlab.benchmark {name}"
                self.problems.append(f"{document['device']}, benchmark: {name}: {failure['error']}: {again}")
            found = [entry for entry in document["measures"].values() if entry["status"] == "recorded"]
            dates, torches = (", ".join(sorted({entry[key] for entry in found})) for key in ("date", "torch"))
            state = f"{len(found)} measures recorded" + (f", {len(failed)} failed" if failed else "")
            rows.append((document["device"], "benchmark", state, dates, torches))
        return Table(["recorded on", "what", "state", "date", "torch"], sorted(rows))


def report(folder: str | Path = CHAPTERS) -> str:
    """The whole report as text."""
    health = Health(folder)
    tables = [health.machine(), health.chapters(), health.records()]
    parts = [repr(table) if table.rows else f"{table.columns[0]}: nothing" for table in tables]
    wrong = "\n".join(f"* {problem}" for problem in health.problems)
    return "\n\n".join([*parts, f"what is wrong, and what to do:\n{wrong}" if wrong else "nothing is wrong"])


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _browser() -> str | None:
    from memlab.book.browser import chromium

    found = chromium()
    if found and version("playwright") is None:
        return f"{Path(found).name}, but no playwright"
    return found and Path(found).name


def _torch_problems(gpu: bool) -> Iterator[str]:
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if release < (2, 11):
        yield f"expected torch 2.11 or newer, found {torch.__version__}: python -m pip install -U torch"
    if not gpu and driver():
        if torch.version.cuda is None:
            yield "an NVIDIA driver is here, and a torch built for the CPU: to use the GPU, install one built for CUDA"
        else:
            yield (
                f"torch is built for CUDA {torch.version.cuda} and sees no GPU: nvidia-smi tells whether the driver "
                f"(found {driver()}) is too old, or CUDA_VISIBLE_DEVICES hides the GPU"
            )
