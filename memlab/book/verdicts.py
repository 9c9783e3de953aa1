"""Every saying that the book puts to the proof, in one table: `python -m memlab.book.verdicts` writes claims.md.

Nothing is run: the claims are read from the chapters' saved outputs, which were made on a CPU, and what GPUs say from
the records in chapters/results, but for claims of which no card is measured (`Claim.on`).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from memlab.book import records
from memlab.book.claims import KINDS, MIME, Claim
from memlab.book.map import headers
from memlab.book.pages import CHAPTERS, write_by_command
from memlab.book.tables import Table
from memlab.files import write_whole

PAGE = "claims.md"
HEAD = """# What is said, and what holds

Each saying is met in its chapter. A formula *predicts* a figure on which it depends, the chapter *measures* the same
figure, and the *verdict* is the book's; it stands only while the two agree. There are three kinds of evidence:

{kinds}

A GPU's figure is of the day it was recorded; *code changed since* says that the chapter, or the library that it uses,
has another line of code now.

This page is made by `python -m memlab.book.verdicts`, from the chapters' saved outputs and the records in `results`.
"""


def saved_claims(chapter: str | Path) -> list[Claim]:
    """The claims in a chapter's saved outputs, in order.

    Raises ValueError, with the chapter's name, for one that is malformed, of another version's fields, or there twice.
    """
    cells = json.loads(Path(chapter).read_text(encoding="utf-8"))["cells"]
    bundles = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    try:
        found = [Claim(**bundle[MIME]) for bundle in bundles if MIME in bundle]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{Path(chapter).name}: expected claims as this version makes them, found another ({error}); execute the "
            "chapter again, or restore it from git"
        ) from None
    if twice := [id for id, times in Counter(claim.id for claim in found).items() if times > 1]:
        raise ValueError(f"{Path(chapter).name}: expected each claim once; found {', '.join(twice)} more often")
    return found


def executed_with(chapter: str | Path) -> str:
    """The torch that a chapter's saved outputs were made with, "an unknown torch" where the chapter does not say."""
    metadata = json.loads(Path(chapter).read_text(encoding="utf-8"))["metadata"]
    return f"torch {version}" if (version := metadata.get("memlab", {}).get("torch")) else "an unknown torch"


def kind_of(standing: str) -> str:
    """A verdict without its condition: "holds", "holds if …", "does not hold" or "open"."""
    return "holds if …" if standing.startswith("holds if") else standing.partition(":")[0]


def verdicts(folder: str | Path = ".") -> Table:
    """How many sayings each chapter in a folder has judged, and how, by its saved outputs."""
    columns = ["holds", "holds if …", "does not hold", "open"]
    rows = []
    for header in headers(folder).values():
        count = Counter(kind_of(found.standing) for found in saved_claims(header.path))
        if count:
            rows.append((header.link, *(count[kind] for kind in columns)))
    rows.append(("together", *(sum(row[i] for row in rows) for i in range(1, len(columns) + 1))))
    return Table(["chapter", *columns], rows, markdown=True)


def page(folder: str | Path = CHAPTERS) -> str:
    """The text of claims.md. Raises ValueError for a malformed claim, or a record that is damaged."""
    documents = [records.KIND.read(path) for path in sorted(Path(folder, "results").glob("*.json"))]
    gpus = [document for document in documents if document["gpu"]]
    sections = []
    for header in headers(folder).values():
        rows = []
        for found in saved_claims(header.path):
            recorded = [
                f"{document['device']}: {records.says_of(document, found.id, folder, chapter=header.path.stem)}"
                for document in gpus
            ]
            gpu = "; ".join(recorded) or f"GPUs: {records.NONE}"
            where = f"{found.on or 'CPU'}, {executed_with(header.path)}" + ("" if found.on else f"; {gpu}")
            says, predicted, measured, _, standing = found.row()
            rows.append((says, predicted, measured, standing, f"{found.kind}; {where}"))
        if rows:
            table = Table(["what is said", "predicted", "measured", "verdict", "evidence"], rows)
            sections.append(f"## {header.link}\n\n{table._repr_markdown_()}\n")
    kinds = "\n".join(f"* *{kind}*: {words}." for kind, words in KINDS.items())
    return "\n".join([HEAD.format(kinds=kinds), *sections])


def write(folder: str | Path = CHAPTERS) -> Path:
    """Write claims.md into the chapters' folder, and say where it is."""
    path = Path(folder, PAGE)
    write_whole(path, page(folder))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of the chapters in a folder. The exit status is 2 for a damaged record or a malformed claim."""
    return write_by_command("memlab.book.verdicts", __doc__.splitlines()[0], lambda folder: [write(folder)], arguments)


if __name__ == "__main__":
    sys.exit(main())
