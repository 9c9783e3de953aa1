"""Records: what a chapter's claims came to on a real GPU, one JSON file for each model of GPU, in chapters/results.

`memlab.book.documents` has their form; an entry's claims are {"second-step": {"kind": "bytes", "says": …, …}, …}.
`python -m memlab.record` writes these files; this page is what reads them.

A record is *stale* when what it was made with has changed: the chapter's code cells, or code of the library pages that
they use. A commit would be a worse criterion: every unrelated one would make all records stale. What a stale record has
is shown as ever, with a word that the code has changed since.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from memlab.book.claims import NOT_RECORDED, Claim
from memlab.book.documents import Kind

NONE = NOT_RECORDED.removeprefix("open: ")
LIBRARY = Path(__file__).parents[1]
SHOWING = {"style", "figures", "tables", "markdown", "source", "interactive", "explorer", "live", "live_changes"}
SHOWING |= {"block_map", "gantt", "claims", "documents", "records", "verdicts", "map", "pages"}
"""The pages of memlab.book that only draw, tabulate or quote what is measured, as do *_pictures and *_sliders."""

SINCE = {"stale": "code changed since", "later failed": "later failed"}
"""What is said of a figure in a record of such a state."""


def claim_fields(found: Claim) -> dict:
    """A claim as a record keeps it, under its id."""
    fields = asdict(found)
    del fields["id"]
    return fields


def _check(name: str, entry: dict) -> None:
    for id, fields in entry["claims"].items():
        Claim(id, **fields)


KIND = Kind("memlab-record", "python -m memlab.record", "chapters", _check)


# ---- what a record is of


def source_of(chapter: str | Path) -> str:
    """A digest of what a chapter's figures come from: its code cells, and the library pages that they import.

    With a page go the JSON files beside it that its code names. What the reader predicts (a line `my_… = …`) is left
    out, comments and docstrings of the pages, and of memlab.book what only shows (`SHOWING`): a colour that changes
    makes no figure stale. Line ends count as one sign, as git may turn them.
    """
    cells = json.loads(Path(chapter).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = [re.sub(r"(?m)^my_\w+(, *my_\w+)* = .*$", "", text) for text in code]
    pages: set[Path] = set()
    for text in code:
        _collect(text, pages)
    digest = hashlib.sha256("\0".join(code).encode())
    for path, text in _measuring(pages):
        digest.update(f"\0{path.relative_to(LIBRARY).as_posix()}\0{text}".encode())
    return digest.hexdigest()[:16]


def _measuring(pages: set[Path]) -> Iterator[tuple[Path, str]]:
    """Those of the pages that decide what is measured, without prose, and the data that they read."""
    for page in sorted(pages):
        if page.parent == LIBRARY / "book" and (page.stem in SHOWING or page.stem.endswith(("_pictures", "_sliders"))):
            continue
        code = without_prose(page.read_text(encoding="utf-8"))
        yield page, code
        for data in sorted(page.parent.glob("*.json")):
            if data.name in code:
                yield data, data.read_text(encoding="utf-8")


@functools.cache
def without_prose(code: str) -> str:
    """Python code without comments, lines of strings that are statements of their own (docstrings), and empty lines.

    >>> without_prose('def f(x):\\n    "Twice."\\n\\n    return 2 * x  # of x\\n')
    'def f(x):\\n    return 2 * x'
    """
    lines = code.splitlines()
    for token in tokenize.generate_tokens(StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _collect(code: str, pages: set[Path]) -> None:
    """Add the library pages that some code imports, and those that they import in turn."""
    for page in _imported(code):
        if page not in pages:
            pages.add(page)
            _collect(page.read_text(encoding="utf-8"), pages)


def _imported(code: str) -> Iterator[Path]:
    for name in _imported_names(code):
        place = LIBRARY.joinpath(*name.split(".")[1:])
        if name.startswith("memlab."):
            yield from (page for page in (place.with_suffix(".py"), place / "__init__.py") if page.is_file())


@functools.cache  # a page of claims asks for the same pages again and again
def _imported_names(code: str) -> tuple[str, ...]:
    try:
        tree = ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", code))
    except SyntaxError:
        return ()
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return tuple(names)


def is_stale(chapter: str, entry: dict, folder: str | Path = ".") -> bool:
    """Whether the chapter of this name in `folder`, or what it measures, has changed since it was recorded.

    One that is gone or cannot be read has.
    """
    try:
        return source_of(Path(folder, f"{chapter}.ipynb")) != entry["source"]
    except (ValueError, LookupError, TypeError, OSError, RecursionError, SyntaxError, tokenize.TokenError):
        return True


def is_gone(chapter: str, folder: str | Path = ".") -> bool:
    """Whether there is no chapter of this name in `folder`: it was renamed, say."""
    return not Path(folder, f"{chapter}.ipynb").is_file()


# ---- what the records say


def survey(folder: str | Path = "results") -> tuple[list[dict], list[Path]]:
    """The records of real GPUs in a folder, and the files there that cannot be read. A dry run's is left out."""
    documents, damaged = KIND.survey(folder)
    return [document for document in documents if document["gpu"]], damaged


def state_of(document: dict, chapter: str, folder: str | Path = ".") -> str:
    """What a GPU's record knows of a chapter: "not recorded yet", "recorded", "stale", "failed" or two of them."""
    entry = document["chapters"].get(chapter)
    if entry is None:
        return NONE
    if entry["status"] == "failed":
        return "failed"
    words = "stale" if is_stale(chapter, entry, folder) else "recorded"
    return f"{words}, later failed" if "failed_since" in entry else words


def says_of(document: dict, id: str, folder: str | Path = ".", *, chapter: str = "") -> str:
    """What a GPU's record has for a claim: its figure and what that makes of it, with torch and date; or why none.

    Of several chapters under whose names the claim was recorded, `chapter` is asked first, then one that is there, then
    one whose code has not changed. Of a `chapter` that failed there are no claims: with its name, that is said instead
    of "not recorded yet". What was measured elsewhere than on the card is never its figure, whoever recorded it.
    """
    having = [name for name, entry in document["chapters"].items() if id in entry["claims"]]
    if not having:
        entry = document["chapters"].get(chapter)
        return f"failed ({entry['date']})" if entry and entry["status"] == "failed" else NONE
    entries = document["chapters"]
    name = min(having, key=lambda n: (n != chapter, is_gone(n, folder), is_stale(n, entries[n], folder)))
    entry, state = document["chapters"][name], state_of(document, name, folder)
    found = Claim(id, **entry["claims"][id])
    if found.on:
        return found.elsewhere
    figure = "—" if found.measured is None else found.text(found.measured)
    since = "".join(f"; {words}" for word, words in SINCE.items() if word in state)
    return f"{figure}: {found.standing} (torch {entry['torch']}, {entry['date']}{since})"
