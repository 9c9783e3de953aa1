"""Do the tests notice a broken library? Faults drawn by a seed, planted one at a time in a copy of the tree.

    python -m tests.planted_faults draw                          list the faults
    python -m tests.planted_faults run --tree /tmp/other         plant each in a clone, and run its tests there

Two faults are drawn in each package of a technique and four in memlab/book. A fault breaks one statement inside a
function: it is removed, its condition negated, a comparison or an operator exchanged, a number made larger by one, or
what it returns forgotten. Left out are `__init__`s and refusals. The places are those of this tree, found in the other
one by their text. The tests run until the first that fails: the package's own, the ones that import the broken page
first, then its chapter, or the first that imports it. Tests of how the code is written do not count.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEED = 43
FAULTS = {"book": 4}
"""More than two."""
SECONDS = 1200
EXCHANGED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
}
REFUSING = re.compile(r"refus|check|expect|misfit|explain|advice|^__init__$|^__repr__$|^__str__$")


@dataclass(frozen=True)
class Fault:
    """A part of a file's text, once, and what stands there instead."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    stop: int

    @property
    def package(self) -> str:
        return self.file.split("/")[1]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {' '.join(self.before.split())[:60]!r} → {self.after[:60]!r}"


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Simple statements and conditions inside functions, but for refusals, docstrings and declarations."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and REFUSING.search(node.name):
            continue
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.Assert, ast.Global, ast.Nonlocal)):
            continue
        if isinstance(node, ast.If) and all(isinstance(child, ast.Raise) for child in node.body):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.If, ast.While)):
            yield node
        yield from statements(node)


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not REFUSING.search(node.name):
                yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node)


def ways(text: str, node: ast.stmt) -> Iterator[tuple[str, ast.AST, str]]:
    """Each way to break a statement: its kind, the part of it that goes, and what comes."""

    def source(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    if isinstance(node, (ast.If, ast.While)):
        yield "negated", node.test, f"not ({source(node.test)})"
        inside = ast.walk(node.test)
    else:
        if isinstance(node, (ast.Expr, ast.AugAssign)):
            yield "removed", node, "pass"
        if isinstance(node, ast.Return) and node.value is not None and source(node.value) != "None":
            yield "forgotten", node.value, "None"
        inside = ast.walk(node)
    for part in inside:
        if isinstance(part, ast.Compare) and len(part.ops) == 1 and type(part.ops[0]) in EXCHANGED:
            left, right = source(part.left), source(part.comparators[0])
            yield "exchanged", part, f"{left} {EXCHANGED[type(part.ops[0])]} {right}"
        elif isinstance(part, ast.BinOp) and type(part.op) in EXCHANGED:
            yield "exchanged", part, f"({source(part.left)} {EXCHANGED[type(part.op)]} {source(part.right)})"
        elif isinstance(part, ast.Constant) and type(part.value) is int:
            yield "one more", part, str(part.value + 1)


def faults_of(path: Path, root: Path) -> list[list[Fault]]:
    """The faults of each statement of a file."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def place(line: int, column: int) -> int:
        return len(text.encode()[: starts[line - 1] + column].decode())

    found = []
    for function in functions(ast.parse(text)):
        for node in statements(function):
            each = []
            for kind, part, after in ways(text, node):
                start, stop = place(part.lineno, part.col_offset), place(part.end_lineno, part.end_col_offset)
                file = path.relative_to(root).as_posix()
                each.append(Fault(file, part.lineno, kind, text[start:stop], after, start, stop))
            if each:
                found.append(each)
    return found


def draw(root: Path = ROOT, seed: int = SEED) -> list[Fault]:
    """The faults, in the order of the packages' names."""
    chance = random.Random(seed)
    drawn = []
    for package in sorted(path for path in (root / "memlab").iterdir() if (path / "__init__.py").exists()):
        pages = sorted(path for path in package.rglob("*.py") if not path.name.startswith("__"))
        found = [each for page in pages for each in faults_of(page, root)]
        drawn += [chance.choice(each) for each in chance.sample(found, FAULTS.get(package.name, 2))]
    return drawn


def plant(fault: Fault, tree: Path) -> str:
    """Break the tree's file; what it held before. The place is looked for by the lines around it."""
    path, text = tree / fault.file, (ROOT / fault.file).read_text(encoding="utf-8")
    there = path.read_text(encoding="utf-8")
    for around in (200, 80, 20, 0):
        context = text[max(0, fault.start - around) : fault.stop + around]
        if there.count(context) == 1:
            begin = there.index(context) + min(around, fault.start)
            path.write_text(there[:begin] + fault.after + there[begin + len(fault.before) :], encoding="utf-8")
            return there
    raise LookupError(f"expected {fault} in {path}, found no place with this text")


def tests_of(fault: Fault, tree: Path) -> list[list[str]]:
    """What to run, one after the other, until something fails."""
    module = fault.file.removesuffix(".py").replace("/", ".")
    stem, name = (
        module.rpartition(".")[2],
        re.compile(rf"{re.escape(module)}\b|import .*\b{module.rpartition('.')[2]}\b"),
    )
    files = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "tests").glob("test_*.py"))}
    files.pop(tree / "tests/test_house.py")  # a formatter notices every fault
    near = [path for path, text in files.items() if name.search(text) or path.stem.endswith(stem)]
    own = [path for path, text in files.items() if path.stem.startswith(f"test_{fault.package}")]
    chapters = [
        path
        for path in sorted((tree / "chapters").glob("*.ipynb"))
        if path.stem[3:] == fault.package or f"memlab.{fault.package}.{stem} import" in path.read_text(encoding="utf-8")
    ]
    if "/checks/" in fault.file:
        return [["tests/test_exercises.py", "-k", fault.file.split("/checks/")[1].split("/")[0].removesuffix(".py")]]
    chapters = chapters[:1]  # a page of the book is imported by many
    own = [path for path in own if path not in near]
    groups = [[tree / fault.file, *(path for path in near if path.stem.startswith(f"test_{fault.package}"))]]
    groups += [[path for path in near if path not in groups[0]], own, chapters]
    return [[str(path.relative_to(tree)) for path in group] for group in groups if group]


def noticed(fault: Fault, tree: Path, arguments: list[str]) -> str:
    """The first test that fails with the fault in the tree; empty if none does."""
    before = plant(fault, tree)
    try:
        for group in tests_of(fault, tree):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments, *group]
            env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            try:
                result = subprocess.run(
                    command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                return f"no end within {SECONDS} s: {' '.join(group)[:80]}"
            if result.returncode not in (0, 5):
                lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return (lines or [f"exit status {result.returncode}"])[0][:160]
        return ""
    finally:
        (tree / fault.file).write_text(before, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("--tree", type=Path, help="a clone in which faults are planted")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults")
    arguments, passed_on = parser.parse_known_args()
    for number, fault in enumerate(draw()):
        if arguments.only is None or number in arguments.only:
            by = "" if arguments.what == "draw" else noticed(fault, arguments.tree, passed_on) or "NOT NOTICED"
            print(f"{number:2} {fault}   {by}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
