"""What the benchmark came to, as pages: `python -m memlab.book.benchmarks` writes benchmark.md and README's table.

Nothing is measured: `python -m memlab.benchmark` keeps its rows in chapters/results/benchmark, one JSON file for each
device, in the form of `memlab.book.documents`; an entry has the processor, the rounds and the rows of a measure, three
texts each.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memlab.book.documents import Kind
from memlab.book.pages import CHAPTERS, write_by_command
from memlab.book.reached import NO, UNSURE, YES, reached
from memlab.book.tables import Table
from memlab.files import write_whole

PAGE, NONE = "benchmark.md", "*not recorded yet*"
BEGIN, END = "<!-- benchmark: made by python -m memlab.book.benchmarks -->", "<!-- end of benchmark -->"
HEAD = """# The benchmark

Runs that are compared take turns in one process. A figure of three numbers is *min – median – max* of the rounds, and
the median is what counts. Bytes are exact. *Reached* is — where nothing is demanded, or where the text alone cannot
tell. The width of a forecast's interval is shown as 1000 where it is that or more.

This page is made by `python -m memlab.book.benchmarks`, from the records in `results/benchmark`.
"""
PRODUCTION = re.compile(
    r"GradScaler|SDPA|DDP|FSDP2|ZeroRedundancyOptimizer|DTensor|save_on_cpu|/ torch\.|MemTracker|a GPU's"
)
"""What a row names that sets ours beside the tool which people use."""
WHY = {
    "meter_time": "Between large tensors an op costs the meter more than in a tiny model's step, most likely because "
    "they push it out of the caches. Medians of repeated runs lie on both sides of the bound.",
    "split_beside_dtensor": "Of two ranks that wait for each other many times a pass, single times spread widely here, "
    "and the medians of repeated runs lie on both sides of the bound.",
    "accumulation_time": "accumulate checks what it is given, and looks in autograd's graph for the wrong reduction: "
    "Python for each micro-batch, however small. Medians of repeated runs lie on both sides of the bound.",
    "swapped_to_files": "The file lies in the system's page cache here, so a swap is a copy in memory. Another core "
    "makes it out of this core's caches; that may take longer than the wait that it saves.",
    "launches": "Nothing is imported anew: the ranks are forked from a server that has imported all, meet through a "
    "file, connect by gloo, and end. With fewer cores than ranks they wait for each other. Which part takes most was "
    "not measured.",
    "monitor_cost": "Most of step() is Python that runs after a step has filled the caches; then comes malloc's walk "
    "over its free chunks, for the heap's figure, and last the search for growth. The rounds lie on both sides of the "
    "bound.",
    "leaks_by_the_meter": "Of a hook that is registered again and again, each copy is as long as its batch; where "
    "lengths differ much, the growth is told late.",
    "leaks_of_processes": "A healthy process may grow for its first 50 steps and then stop, and resident pages come "
    "and go as the system likes. A call before the growth ends cannot know that it will.",
}
"""Of measures that have missed a target on a CPU, why: the page says it where one does."""
WHY_ON_A_GPU = {
    "meter_time": "A small model's step is hundreds of launches of kernels that are soon done. Each op costs the meter "
    "more Python than its launch does, and nothing hides it; behind the large model's kernels it is hidden.",
    "meter_cost_per_op": "It is Python, on the processor: an empty dispatch mode, too, takes several times as long as "
    "on the CPU above.",
    "imagined_card": "Transformers looks whether a batch is packed, for which an imagined one has no values; and a "
    "number that its T5 writes into a tensor, a real card has in main memory. Neither reaches a peak.",
    "replay_speed": "It is Python, on the processor, and some rounds took twice as long as others.",
    "loss_scaling": "Of a step this small most is Python and launches, and single rounds differ more than the two "
    "scalers do.",
    "accumulation_time": "Most of a step this small is Python and launches, and single rounds differ by more than "
    "accumulate adds.",
    "swapped_to_the_host": "At the smaller width what is saved takes the link several times as long as the products "
    "take, so both ways wait for the link, and there is next to nothing to hide a copy behind.",
    "monitor_cost": "step() is Python, which this processor takes longer for than the CPU above, and the card is asked "
    "for its figures, too.",
}
"""The same of a GPU."""


def _check(name: str, entry: dict) -> None:
    if not (isinstance(entry["rounds"], int) and isinstance(entry["processor"], str)):
        raise TypeError(f"{name}: rounds {entry['rounds']!r}, processor {entry['processor']!r}")
    for row in entry["rows"]:
        if not (isinstance(row, list) and len(row) == 3 and all(isinstance(cell, str) for cell in row)):
            raise TypeError(f"{name}: row {row!r}")


KIND = Kind("memlab-benchmark", "python -m memlab.benchmark", "measures", _check)


class Row(NamedTuple):
    """A row of a measure. `about` is `measure`, after the row above where it only goes on from that ("… peak")."""

    measure: str
    figure: str
    must: str
    date: str
    about: str

    @property
    def reached(self) -> str:
        """Whether the figure is what it must be, as `reached` has it; "—" where nothing is demanded."""
        return reached(self.figure, self.must)

    @property
    def in_readme(self) -> bool:
        """Whether README shows it: ours beside production's where there is a target or it loses, and every miss."""
        loses = reached(self.figure, self.must or "≤ 1×") == NO
        beside = PRODUCTION.search(self.about) is not None
        return (beside and (bool(self.must) or loses)) or self.reached == NO


def in_order(document: dict) -> list[str]:
    """The names of the measures in a device's record, chapter by chapter; last those that are gone."""
    from memlab.book.measures import MEASURES  # which takes seconds, and the health report does without

    order = {measure.__name__: number for number, measure in enumerate(MEASURES)}
    return sorted(document["measures"], key=lambda name: order.get(name, len(order)))


def rows_of(document: dict, *names: str) -> Iterator[Row]:
    """All rows of a device's record, or those of the measures that are named."""
    for name in names or in_order(document):
        entry, above = document["measures"][name], ""
        for measure, figure, must in entry["rows"]:
            above = above if measure.startswith("…") else measure
            yield Row(measure, figure, must, entry["date"], above if above == measure else f"{above} {measure}")


def origins(document: dict) -> str:
    """Dates, torch, driver and so on of a device's record, each as often as measures differ in it."""
    entries = [entry for entry in document["measures"].values() if entry["rows"]]

    def each(field: str) -> str:
        return ", ".join(sorted({str(entry[field]) for entry in entries} - {""}))

    plain = dict.fromkeys(("date", "processor"), "")
    fields = plain | {"torch": "torch ", "driver": "driver ", "commit": "commit ", "rounds": "rounds: "}
    return "; ".join(words + each(field) for field, words in fields.items() if each(field))


def failures(document: dict) -> dict[str, dict]:
    """Of each measure that failed when it was last run: date, error and so on."""
    found = {}
    for name, entry in document["measures"].items():
        if failure := entry if entry["status"] == "failed" else entry.get("failed_since"):
            found[name] = failure
    return found


def reasons(document: dict) -> list[str]:
    """A line for each measure of a device's record that missed a target: why, or that it is not known."""
    lines, known = [], WHY_ON_A_GPU if document["gpu"] else WHY
    for name in in_order(document):
        missed = [row.measure for row in rows_of(document, name) if row.reached == NO]
        if missed:
            why = known.get(name, "It is not known.")
            lines.append(f"* *{missed[0].removeprefix('… ')}*{' and so on' * (len(missed) > 1)}: {why}")
    return lines


def page(folder: str | Path = CHAPTERS) -> str:
    """The text of benchmark.md. Raises ValueError for a record that is damaged."""
    sections = []
    for document in _documents(folder):
        rows = [(row.measure, row.figure, row.must, row.reached, row.date) for row in rows_of(document)]
        failed = [f"* {name} failed on {one['date']}: {one['error']}" for name, one in failures(document).items()]
        table = Table(["measure", "figure", "must reach", "reached", "date"], rows)._repr_markdown_() if rows else NONE
        lines = "\n".join(reasons(document))
        missed = f"What missed its target, and why, as far as it is known:\n\n{lines}" if lines else ""
        parts = [f"## {document['device']}", origins(document), table, missed, "\n".join(failed)]
        sections.append("\n\n".join(filter(None, parts)) + "\n")
    return "\n".join([HEAD, *(sections or [NONE + "\n"])])


def summary(folder: str | Path = CHAPTERS) -> str:
    """README's table: ours beside production's, and whatever missed its target. Raises ValueError as `page` does."""
    parts = []
    for document in _documents(folder):
        rows = [*rows_of(document)]
        count = Counter(row.reached for row in rows if row.must)
        shown = [(row.about, row.figure, row.must, row.reached) for row in rows if row.in_readme]
        parts += [
            f"**{document['device']}** ({origins(document)}): {count.total()} targets, of which {count[YES]} are "
            f"reached, {count[NO]} are missed, and {count[UNSURE]} were not measured here, or no text can tell.",
            Table(["measure", "figure", "must reach", "reached"], shown)._repr_markdown_() if shown else "",
        ]
    return "\n\n".join(filter(None, parts or [NONE]))


def _documents(folder: str | Path) -> list[dict]:
    return [KIND.read(path) for path in sorted(Path(folder, "results", "benchmark").glob("*.json"))]


def readme(text: str, folder: str | Path = CHAPTERS) -> str:
    """README's text with its table made anew. Raises ValueError if the table's two markers are not there once each."""
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected {BEGIN} and, below it, {END} in README.md, once each; restore it from git")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{summary(folder)}\n\n{text[text.index(END) :]}"


def write(folder: str | Path = CHAPTERS) -> tuple[Path, Path]:
    """Write benchmark.md into the chapters' folder and the table into README.md beside it; says where both are."""
    path, beside = Path(folder, PAGE), Path(folder).resolve().parent / "README.md"
    text = readme(beside.read_text(encoding="utf-8"), folder)
    write_whole(path, page(folder))
    write_whole(beside, text)
    return path, beside


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both. The exit status is 2 for a damaged record, or a README that has no place for the table."""
    return write_by_command("memlab.book.benchmarks", __doc__.splitlines()[0], write, arguments)


if __name__ == "__main__":
    sys.exit(main())
