"""Run the book's notebooks, save them clean, and say what is wrong with a saved one.

    python -m memlab.book.notebooks chapters/*.ipynb            execute and save
    python -m memlab.book.notebooks --check chapters/*.ipynb    list problems, change nothing

A committed notebook holds what a reader must see without running it: source, outputs, and nothing that
differs from one run to the next (timings, widget state, the patch version of Python).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from memlab.book.pages import print_as_far_as_possible
from memlab.book.run import KERNEL, NotebookError, run
from memlab.book.style import is_sentence
from memlab.files import draft_of

MAX_CELLS = 40
MAX_CELL_LINES = 25
MAX_FILE_BYTES = 500 * 1024

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_CHURN = ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted", "vscode")


def execute(path: str | Path, timeout: float = 180) -> NotebookNode:
    """Run a notebook from top to bottom, clean it, and save it over itself.

    Raises NotebookError as `run` does, and for a file that is no notebook; nothing is written then.
    """
    path = Path(path)
    notebook = _read(path)
    run(notebook, path, timeout)
    clean(notebook)
    # Whoever reads the outputs later can tell which torch they are of; a build's suffix (+cpu) makes no difference.
    notebook.metadata["memlab"] = {"torch": importlib.metadata.version("torch").partition("+")[0]}
    _save(notebook, path)
    return notebook


def _read(path: Path) -> NotebookNode:
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook, relax_add_props=True)
    except (ValueError, LookupError, TypeError, AttributeError, nbformat.ValidationError) as error:
        words = (str(error).splitlines() or [""])[0]
        raise NotebookError(
            f"{path}: expected a notebook, found a file that is damaged ({words}); restore it from git"
        ) from None
    return notebook


def clean(notebook: NotebookNode) -> None:
    """Remove, in place, what differs between two runs of the same notebook, and name cells by their content.

    A widget lives only while its kernel does: opened later, it would read "model not found". So where a picture stands
    beside it, the picture alone is kept.

    A cell's id is a hash of its source, so executing again, or on another machine, changes no id, and
    editing one cell changes only that cell's.
    """
    nbformat.validator.normalize(notebook)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.kernelspec = NotebookNode(KERNEL)
    notebook.metadata.get("language_info", {}).pop("version", None)
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        for key in _CHURN:
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", ()):
            if any(kind.startswith("image/") for kind in output.get("data", {})):
                output.data.pop(_WIDGET_VIEW, None)
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def _save(notebook: NotebookNode, path: Path) -> None:
    nbformat.validate(notebook)
    with draft_of(path) as draft:
        draft.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8", newline="\n")
        draft.chmod(path.stat().st_mode)


def problems(path: str | Path) -> list[str]:
    """Say what keeps a saved notebook from being committed: one line per problem, none if it is fine.

    Cells are counted from 0, all kinds together, as `execute` counts them. Raises NotebookError for what is none.
    """
    path = Path(path)
    notebook = _read(path)
    return [*_notebook_problems(notebook, path.stat().st_size), *_order_problems(notebook), *_cell_problems(notebook)]


def _notebook_problems(notebook: NotebookNode, nbytes: int) -> Iterator[str]:
    if nbytes > MAX_FILE_BYTES:
        yield f"{nbytes:,} B in the file; expected at most {MAX_FILE_BYTES:,}: lower the figures' dpi or drop one"
    if len(notebook.cells) > MAX_CELLS:
        yield f"{len(notebook.cells)} cells; expected at most {MAX_CELLS}: merge or cut"
    if notebook.metadata.get("widgets"):
        yield "widget state is saved; execute it with python -m memlab.book.notebooks"


def _order_problems(notebook: NotebookNode) -> Iterator[str]:
    expected = 1
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        if "skip-execution" in _tags(cell):
            expected += cell.execution_count == expected
            continue
        if cell.execution_count is None:
            yield f"cell {index} has not been executed"
            continue
        if cell.execution_count != expected:
            yield f"cell {index} was executed as number {cell.execution_count}; expected {expected}: run from the top"
        expected = cell.execution_count + 1


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_MACHINE_PATH = re.compile(
    r"(?<![\w.:/~-])/(?:home|root|work|workspace|tmp|var|usr|opt|mnt|private|Users)/[^\s'\"<>]*"
    r"|\bfile:/{2}[^\s'\"<>]*"
    r"|\b[A-Za-z]:\\{1,2}Users\\[^\s'\"<>]*"
)


def _cell_problems(notebook: NotebookNode) -> Iterator[str]:
    for index, cell in enumerate(notebook.cells):
        lines = cell.source.count("\n") + 1
        if lines > MAX_CELL_LINES:
            yield f"cell {index} has {lines} lines; expected at most {MAX_CELL_LINES}: split it"
        if cell.cell_type != "code":
            continue
        if _has_image(cell) and not _has_alt_text(cell):
            yield f"cell {index} shows an image without alt text: print a sentence beside it, or set the output's alt"
        for output in cell.outputs:
            if _WIDGET_VIEW in output.get("data", {}):
                yield f"cell {index} shows a widget without a picture: give its mimebundle an image/png"
            if output.output_type == "error":
                yield f"cell {index} ends in an error: {output.ename}: {output.evalue}"
            for text in _texts(output):
                for what, pattern in (("an address", _ADDRESS), ("a path of this machine", _MACHINE_PATH)):
                    if found := pattern.search(text):
                        yield f"cell {index} prints {what}: {found[0]}"


def _tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def _texts(output: NotebookNode) -> Iterator[str]:
    """Every text an output holds, whatever its type; pictures are left out."""
    if output.output_type == "stream":
        yield output.text
    elif output.output_type == "error":
        yield "\n".join(output.traceback)
    else:
        for kind, value in output.data.items():
            if isinstance(value, str) and (not kind.startswith("image/") or kind == "image/svg+xml"):
                yield value


def _has_image(cell: NotebookNode) -> bool:
    return any(kind.startswith("image/") for output in cell.outputs for kind in output.get("data", {}))


def _has_alt_text(cell: NotebookNode) -> bool:
    """True if every image of the cell carries alt metadata, or the cell's text contains a sentence."""
    images = [output for output in cell.outputs if any(kind.startswith("image/") for kind in output.get("data", {}))]
    if all(_alt(output) for output in images):
        return True
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        texts += [output.text] if output.output_type == "stream" else []
        texts += [data[kind] for kind in ("text/plain", "text/markdown") if kind in data]
    return any(map(is_sentence, texts))


def _alt(output: NotebookNode) -> str:
    """The alt text of an image output, kept for the whole output or for the image's own type."""
    metadata = output.metadata
    of_type = [metadata[kind].get("alt", "") for kind in output.data if isinstance(metadata.get(kind), dict)]
    return next(filter(None, [metadata.get("alt", ""), *of_type]), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Execute (or with --check only judge) the notebooks named; the exit status is 1 if any has a problem."""
    parser = argparse.ArgumentParser(prog="python -m memlab.book.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="notebook.ipynb")
    parser.add_argument("--check", action="store_true", help="list problems and change nothing")
    parser.add_argument("--timeout", type=float, default=180, help="seconds a cell may take (default 180)")
    options = parser.parse_args(argv)
    print_as_far_as_possible()
    failed = False
    for path in options.paths:
        begun = time.perf_counter()
        try:
            if not options.check:
                execute(path, timeout=options.timeout)
                print(f"{path}: executed in {time.perf_counter() - begun:.1f} s")
            found = [f"{path}: {problem}" for problem in problems(path)]
        except (NotebookError, OSError) as error:
            found = [str(error)]
        print("\n".join(found), end="\n" if found else "")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
