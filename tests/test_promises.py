"""What a chapter's header promises, held to what the chapter does."""

import ast
import shutil
from pathlib import Path

import nbformat
import pytest

from memlab.book.map import CHAPTERS, headers, known_before

BOOK = Path(__file__).parents[1] / "chapters"
HEADERS = headers(BOOK)


def techniques(path):
    """The numbers of the chapters whose modules a notebook's cells import."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {module.split(".")[1] for module in modules if module.startswith("memlab.")}
    return {CHAPTERS.index(name) + 1 for name in names & set(CHAPTERS)}


def unknown(number, here):
    """The chapters whose modules chapter `number` uses, and which its reader need not know."""
    return techniques(here[number].path) - known_before(number, here) - {number}


@pytest.mark.parametrize("number", HEADERS)
def test_a_chapter_asks_for_chapters_before_it_and_uses_none_that_it_does_not_ask_for(number):
    assert all(needed in HEADERS and needed < number for needed in HEADERS[number].prerequisites)
    # Chapter 00 shows the first chapter's picture, and how to read it.
    assert unknown(number, HEADERS) == ({1} if number == 0 else set())
    assert techniques(HEADERS[number].path) >= ({number} if number else set())


def test_a_chapter_that_names_too_little_is_noticed(tmp_path):
    for path in BOOK.glob("*.ipynb"):
        shutil.copy(path, tmp_path)
    path = tmp_path / HEADERS[8].path.name
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("| chapters 01, 02, 03 and 07 |", "| chapter 01 |"), encoding="utf-8")
    assert unknown(8, headers(tmp_path)) == {2, 3} and unknown(9, headers(tmp_path)) == set()


def test_what_the_named_chapters_name_is_known_too():
    assert known_before(2, HEADERS) == {1} and known_before(14, HEADERS) == {1, 2, 6, 7, 13}
    assert known_before(1, HEADERS) == set()


@pytest.mark.parametrize("number", HEADERS)
def test_a_header_says_how_long_it_takes_and_what_it_holds_at_most(number):
    header = HEADERS[number]
    assert header.minutes.split(" ", 3)[1:3] == ["to", "read,"] and header.minutes.endswith(" to run")
    assert header.peak_bytes > 0
