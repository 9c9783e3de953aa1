"""Every public name of the library on one page: `python -m memlab.book.library` writes library.md.

Nothing is imported: a package's `__init__` says what is public and which page has it, and the page says what it is,
in a docstring's first sentence.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memlab.book.map import CHAPTERS as NAMES
from memlab.book.map import headers
from memlab.book.pages import CHAPTERS, write_by_command
from memlab.book.tables import Table
from memlab.files import write_whole

PAGE = "library.md"
HEAD = """# The library

What each chapter builds, by name: `from memlab.memory_timeline import Meter`. A name's page has the rest of its
docstring: shapes, units, what it raises, and the source.

This page is made by `python -m memlab.book.library`, from the library's docstrings.
"""


class Public(NamedTuple):
    """A public name: the file that defines it, and what it is in a sentence."""

    name: str
    path: Path
    says: str


def public_names(package: Path) -> list[Public]:
    """The names in `__all__` of a package's folder, in its order.

    Raises ValueError for a package without `__all__`, and for a name that comes from no page or has no docstring.
    """
    body = ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body
    names = next((ast.literal_eval(value) for name, value in _assigned(body) if name == "__all__"), None)
    if names is None:
        raise ValueError(f"expected __all__ in {package.name}/__init__.py, found none; list its public names there")
    pages = {
        alias.asname or alias.name: package.parents[1].joinpath(*node.module.split("."))
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return [_found(name, package, pages.get(name)) for name in names]


def _found(name: str, package: Path, module: Path | None) -> Public:
    path = package / "__init__.py" if module is None else module.with_suffix(".py")
    if not path.is_file():
        path = module / "__init__.py"
    says = dict(_documented(path)).get(name)
    if not says:
        raise ValueError(f"expected a docstring of {name} in {path.name} ({package.name}), found none; say what it is")
    return Public(name, path, first_sentence(says))


def _assigned(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and node.value is not None:
                yield target.id, node.value


def _documented(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a page's functions, classes, and of constants with a text below them."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield from ((name, str(after.value.value)) for name, _ in _assigned([node]))


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line. An argument's name and a colon begin another.

    >>> first_sentence("Marks the end of a step\\n(of 1.5 GiB, say). Raises nothing.")
    'Marks the end of a step (of 1.5 GiB, say).'
    """
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\"*(]|\w+(?:, \w+)*:\s)", paragraph, maxsplit=1)[0]


def page(folder: str | Path = CHAPTERS) -> str:
    """The text of library.md. Raises ValueError as `public_names` does."""
    root = Path(folder).resolve().parent
    links = {header.path.stem[3:]: header.link for header in headers(folder).values()}
    sections = []
    for name in ("ranks", *NAMES):
        package = root / "memlab" / name
        if not package.is_dir():
            continue
        says = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
        rows = [
            (f"[`{one.name}`](../{one.path.relative_to(root).as_posix()})", one.says) for one in public_names(package)
        ]
        chapter = f"{links[name]}. " if name in links else ""
        table = Table(["name", "what it is"], rows, markdown=True)._repr_markdown_()
        sections.append(f"## memlab.{name}\n\n{chapter}{first_sentence(says)}\n\n{table}\n")
    return "\n".join([HEAD, *sections])


def write(folder: str | Path = CHAPTERS) -> Path:
    """Write library.md into the chapters' folder, and say where it is."""
    path = Path(folder, PAGE)
    write_whole(path, page(folder))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page into the chapters' folder. The exit status is 2 where a public name has no docstring."""
    return write_by_command("memlab.book.library", __doc__.splitlines()[0], lambda folder: [write(folder)], arguments)


if __name__ == "__main__":
    sys.exit(main())
