"""The map of the book: what is there is read from the chapters' own headers, so it cannot go stale.

A chapter's first cell is its header: a title `# 01 · The memory timeline`, a promise `**In one sentence:** …`, and a
table of four rows (what you need to know, minutes, peak memory, GPU).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memlab.book import records
from memlab.book.tables import Table
from memlab.units import parse_bytes

CHAPTERS = (
    "memory_timeline",
    "memory_arithmetic",
    "memory_hierarchy",
    "caching_allocator",
    "memory_monitoring",
    "mixed_precision",
    "gradient_accumulation",
    "gradient_checkpointing",
    "offloading",
    "data_loading",
    "lean_optimizers",
    "lean_architectures",
    "data_parallelism",
    "tensor_parallelism",
    "pipeline_parallelism",
    "compilers",
    "inference_memory",
    "memory_planning",
    "frontier",
)
"""The chapters in order, from 01; each is also the name of its module."""

PATHS = {
    "the whole book": tuple(range(1, 20)),
    "“I have an OOM right now”": (1, 6, 7, 8, 18),
    "an instructor's term": (1, 2, 4, 6, 7, 8, 9, 11, 13, 14, 15, 17, 18),
}
"""Three ways through the book, as chapters' numbers."""

ROWS = {"needs": "You need to know", "minutes": "Minutes on two CPU cores", "peak": "Peak memory", "gpu": "GPU"}

SIZE = r"([\d.,]+ [KMGT]iB)"


class Header(NamedTuple):
    """What a chapter's first cell promises, in its own words."""

    path: Path
    title: str
    promise: str
    needs: str
    minutes: str
    peak: str
    gpu: str

    @property
    def prerequisites(self) -> tuple[int, ...]:
        """The numbers of the chapters that a reader needs to know first, as the header names them."""
        return tuple(int(number) for number in re.findall(r"\b\d\d\b", self.needs))

    @property
    def peak_bytes(self) -> int | None:
        """The promised sizes together, in bytes: the notebook's and its ranks', none that is imagined; or None."""
        return sum(self._sizes()) or None

    @property
    def notebook_bytes(self) -> int | None:
        """The first of them, which is the notebook's own process's; or None."""
        return next(iter(self._sizes()), None)

    def _sizes(self) -> list[int]:
        sizes = re.findall(SIZE + "(?! of imagined)", self.peak)
        return [parse_bytes(size.replace(",", "")) for size in sizes]

    @property
    def link(self) -> str:
        """The title as a Markdown link that works beside the chapters."""
        return f"[{self.title}]({self.path.name})"


def read_header(path: str | Path) -> Header:
    """A chapter's header. Raises ValueError that names what is missing, be it the size of its peak."""
    path = Path(path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join(cells[0]["source"]) if cells and cells[0]["cell_type"] == "markdown" else ""
    found = {
        "title": re.search(r"^# (\d\d · .+)$", text, re.MULTILINE),
        "promise": re.search(r"^\*\*In one sentence:\*\* (.+)$", text, re.MULTILINE),
    }
    for field, words in ROWS.items():
        found[field] = re.search(rf"^\| {words} \| (.+) \|$", text, re.MULTILINE)
    if missing := [field for field, match in found.items() if match is None]:
        raise ValueError(f"{path.name}: expected a header with {', '.join(found)}; found none of {', '.join(missing)}")
    header = Header(path, **{field: match[1].strip() for field, match in found.items()})
    if not re.search(SIZE, header.peak):
        raise ValueError(f"{path.name}: expected a peak with its size, such as 500 MiB; found {header.peak!r}")
    return header


def headers(folder: str | Path = ".") -> dict[int, Header]:
    """The header of each chapter in a folder (this one, unless given), by its number."""
    return {int(path.name[:2]): read_header(path) for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))}


def the_map(folder: str | Path = ".") -> Table:
    """A row for each chapter that is there: its promise, what it asks of reader and machine, and who recorded it."""
    gpus, damaged = records.survey(Path(folder, "results"))
    unreadable = [f"{path.name} is damaged: see python -m memlab" for path in damaged]
    rows = []
    for chapter in headers(folder).values():
        recorded = ", ".join([*_recorded(chapter.path, gpus), *unreadable]) or "not recorded yet"
        rows.append(
            (chapter.link, chapter.promise, chapter.needs, chapter.minutes, chapter.peak, chapter.gpu, recorded)
        )
    columns = ["chapter", "in one sentence", "you need", "minutes", "peak memory", "GPU", "recorded on"]
    return Table(columns, rows, markdown=True)


def known_before(number: int, here: dict[int, Header]) -> set[int]:
    """The chapters that a reader of chapter `number` knows: those its header names, and those that theirs name.

    `here` has the chapters' headers by number, as `headers` gives them.
    """
    named = here[number].prerequisites
    return set(named).union(*(known_before(earlier, here) for earlier in named))


def paths(folder: str | Path = ".") -> Table:
    """The three ways through the book, each chapter a link where it is there and named where it is still to come.

    A path that is a short cut leaves out, or puts later, what its chapters' headers name: that is told beside it.
    """
    here = headers(folder)
    rows = []
    for name, numbers in PATHS.items():
        steps = [here[n].link if n in here else f"{n:02} {CHAPTERS[n - 1].replace('_', ' ')}" for n in numbers]
        unread = {
            needed
            for place, n in enumerate(numbers)
            if n in here
            for needed in here[n].prerequisites
            if needed not in numbers[:place]
        }
        rows.append((name, " → ".join(steps), ", ".join(f"{n:02}" for n in sorted(unread)) or "nothing"))
    columns = ["path", "chapters, in order (those without a link are still to come)", "to look up when they ask for it"]
    return Table(columns, rows, markdown=True)


def _recorded(chapter: Path, gpus: list[dict]) -> Iterator[str]:
    """The GPUs that have recorded a chapter, each with what is wrong with its record."""
    for document in gpus:
        state = records.state_of(document, chapter.stem, chapter.parent)
        if state != records.NONE:
            yield document["device"] + (f" ({state})" if state != "recorded" else "")
