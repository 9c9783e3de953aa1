"""Records: what a chapter's claims came to on a real GPU, one JSON file for each model of GPU, in chapters/results.

    {"format": "memlab-record", "version": 1, "device": "NVIDIA H100 80GB HBM3", "gpu": true,
     "chapters": {"01_memory_timeline": {"status": "recorded", "date": …, "commit": …, "source": …, "torch": …,
                  "driver": …, "seconds": …, "claims": {"second-step": {"kind": "bytes", "says": …, …}}}},
     "benchmark": {"date": …, "commit": …, "torch": …, "driver": …, "rows": [["measure", "figure", "must reach"], …]}}

A chapter that failed has status "failed" and an "error". If it had been recorded before, the older record stays, and
"failed_since" says when and how it failed; the benchmark likewise. `python -m memlab.record` writes these files; this
page is what reads them.

A record is *stale* when what it was made with has changed: the chapter's code cells, or the library pages that they
use. A commit would be a worse criterion: every unrelated one would make all records stale.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from memlab.book.claims import NOT_RECORDED, Claim

FORMAT, VERSION = "memlab-record", 1
NONE = NOT_RECORDED.removeprefix("open: ")
LIBRARY = Path(__file__).parents[1]
MEASURED_BOOK_PAGES = {"workloads", "steps", "allocator"}
"""The pages of memlab.book that decide what is measured; the others draw, tabulate or explain it."""


def empty(device: str, gpu: bool) -> dict:
    """A record of nothing yet."""
    return {"format": FORMAT, "version": VERSION, "device": device, "gpu": gpu, "chapters": {}, "benchmark": None}


def claim_fields(found: Claim) -> dict:
    """A claim as a record keeps it, under its id."""
    fields = asdict(found)
    del fields["id"]
    return fields


def read(path: str | Path) -> dict:
    """A record from its file. Raises ValueError, in one sentence, for a file that this version did not write."""
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        text_of(document)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a record as python -m memlab.record writes it (version {VERSION}), found one that is "
            f"damaged, edited or of another version ({error}); move it away, or restore it from git"
        ) from None
    return document


def text_of(document: dict) -> str:
    """The text of a record's file. Raises ValueError, which says why, for what is no record or no file can hold."""
    try:
        _check(document)
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        text.encode()  # an error's text may hold what UTF-8 has no bytes for
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {error}" if isinstance(error, KeyError) else str(error)) from None
    return text


def _no_number(name: str) -> float:
    raise ValueError(f"{name} where a number should be")


def _check(document: dict) -> None:
    if (document["format"], document["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
    _texts("the record", document, "device")
    if not isinstance(document["gpu"], bool):
        raise TypeError(f"gpu is {document['gpu']!r}")
    for name, entry in document["chapters"].items():
        if entry["status"] not in ("recorded", "failed"):
            raise ValueError(f"{name}: status {entry['status']!r}")
        _texts(name, entry, "date", "commit", "source", "torch", "driver")
        if not 0 <= entry["seconds"] < 1e9:
            raise ValueError(f"{name}: seconds is {entry['seconds']!r}")
        if entry["status"] == "failed":
            _texts(name, entry, "error")
        _check_failure(name, entry)
        for id, fields in entry["claims"].items():
            Claim(id, **fields)
    if (benchmark := document["benchmark"]) is not None:
        _texts("benchmark", benchmark, "date", "commit", "torch", "driver")
        _check_failure("benchmark", benchmark)
        for row in benchmark["rows"]:
            if not (isinstance(row, list) and len(row) == 3 and all(isinstance(cell, str) for cell in row)):
                raise TypeError(f"benchmark: row {row!r}")


def _check_failure(what: str, entry: dict) -> None:
    if "failed_since" in entry:
        _texts(f"{what}, failed_since", entry["failed_since"], "date", "commit", "torch", "error")


def _texts(what: str, fields: dict, *names: str) -> None:
    for name in names:
        if not isinstance(fields[name], str):
            raise TypeError(f"{what}: {name} is {fields[name]!r}")


def write(document: dict, path: str | Path) -> None:
    """Save a record, as `write_whole` does.

    Raises ValueError for what `read` would refuse, and OSError where the system cannot write.
    """
    write_whole(path, text_of(document))


def write_whole(path: str | Path, text: str) -> None:
    """Write a file that appears whole, or stays as it was (on a full disk, say); no draft is left. Raises OSError."""
    with _draft(Path(path)) as draft:
        with open(draft, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)


def expect_writable(path: Path) -> None:
    """Raises OSError, or ValueError for a folder or a device, where `write_whole` could not write or should not."""
    if path.exists() and not path.is_file():
        raise ValueError(f"expected a file to record in, found {path}, which is none; name one with --output")
    with _draft(path) as draft:
        draft.touch()


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A name for a file beside `path`, in a folder that is made if need be; no such file is there afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.memlab-tmp")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other recorder reads, changes and writes in this folder; it waits for its turn.

    The folder itself is locked, so no file is left, and the lock goes with its process. Windows, and a file system
    without such locks, do without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def file_name(device: str) -> str:
    """The name of a device's record.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


# ---- what a record is of


def source_of(chapter: str | Path) -> str:
    """A digest of what a chapter's figures come from: its code cells, and the library pages that they import.

    What the reader predicts (a line `my_… = …`) is left out, and of memlab.book all but `MEASURED_BOOK_PAGES`: a
    colour that changes makes no figure stale. Line ends count as one sign, as git may turn them.
    """
    cells = json.loads(Path(chapter).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = [re.sub(r"(?m)^my_\w+(, *my_\w+)* = .*$", "", text) for text in code]
    pages: set[Path] = set()
    for text in code:
        _collect(text, pages)
    digest = hashlib.sha256("\0".join(code).encode())
    for page in sorted(pages):
        name = page.relative_to(LIBRARY)
        if name.parts[0] != "book" or name.stem in MEASURED_BOOK_PAGES:
            digest.update(f"\0{name.as_posix()}\0{page.read_text(encoding='utf-8')}".encode())
    return digest.hexdigest()[:16]


def _collect(code: str, pages: set[Path]) -> None:
    """Add the library pages that some code imports, and those that they import in turn."""
    for page in _imported(code):
        if page not in pages:
            pages.add(page)
            _collect(page.read_text(encoding="utf-8"), pages)


def _imported(code: str) -> Iterator[Path]:
    try:
        tree = ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", code))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            place = LIBRARY.joinpath(*name.split(".")[1:])
            if name.startswith("memlab."):
                yield from (page for page in (place.with_suffix(".py"), place / "__init__.py") if page.is_file())


def is_stale(chapter: str, entry: dict, folder: str | Path = ".") -> bool:
    """Whether the chapter of this name in `folder`, or what it measures, has changed since it was recorded.

    One that is gone or cannot be read has.
    """
    try:
        return source_of(Path(folder, f"{chapter}.ipynb")) != entry["source"]
    except (ValueError, LookupError, TypeError, OSError, RecursionError):
        return True


def is_gone(chapter: str, folder: str | Path = ".") -> bool:
    """Whether there is no chapter of this name in `folder`: it was renamed, say."""
    return not Path(folder, f"{chapter}.ipynb").is_file()


# ---- what the records say


def survey(folder: str | Path = "results") -> tuple[list[dict], list[Path]]:
    """The records of real GPUs in a folder, and the files there that cannot be read. A dry run's is left out."""
    documents, damaged = [], []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            documents.append(read(path))
        except (ValueError, OSError):
            damaged.append(path)
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

    A chapter that is there is asked before one that is gone, under whose name the claim was recorded once. Of a
    `chapter` that failed there are no claims: with its name, that is said instead of "not recorded yet".
    """
    having = [name for name, entry in document["chapters"].items() if id in entry["claims"]]
    if not having:
        entry = document["chapters"].get(chapter)
        return f"failed ({entry['date']})" if entry and entry["status"] == "failed" else NONE
    name = min(having, key=lambda name: is_gone(name, folder))
    entry, state = document["chapters"][name], state_of(document, name, folder)
    found = Claim(id, **entry["claims"][id])
    figure = "—" if found.measured is None else found.text(found.measured)
    when = f"torch {entry['torch']}, {entry['date']}"
    return f"{figure}: {found.standing} ({when})" if state == "recorded" else f"{state}: {figure} ({when})"
