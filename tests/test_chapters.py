"""What every chapter must do, beyond running: each picture behind a slider can be drawn, wherever the sliders stand."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from memlab.book.notebooks import NotebookError, execute

BOOK = Path(__file__).parents[1] / "chapters"
SLIDERS = re.compile(r"\b(Interactive|what_if)\(")
SLIDING = [path for path in sorted(BOOK.glob("*.ipynb")) if SLIDERS.search(path.read_text(encoding="utf-8"))]
MOST_PICTURES = 500

DRAW_THE_GRID = f"""
import gc
from memlab.book.interactive import Interactive
for found in [thing for thing in gc.get_objects() if type(thing) is Interactive]:
    grid = list(found.grid())
    if len(grid) > {MOST_PICTURES}:  # the library's own, whose numbers are tested at every place: each slider's moves
        grid = [found.start | {{name: value}} for name, labels in found.choices.items() for value in labels.values()]
    for values in grid:
        picture = found.at(**values)
        assert picture.png().startswith(b"\\x89PNG"), values
    print(len(grid), "pictures")
"""


def drawn(notebook, folder: Path) -> list[int]:
    """Run a notebook, then draw the whole grid of each of its sliders; how many pictures each has."""
    notebook.cells.append(new_code_cell(DRAW_THE_GRID))
    path = folder / "grid.ipynb"
    nbformat.write(notebook, path)
    printed = "".join(output.text for output in execute(path).cells[-1].outputs if output.output_type == "stream")
    return [int(line.split()[0]) for line in printed.splitlines()]


@pytest.mark.parametrize("path", SLIDING, ids=lambda path: path.stem)
def test_every_picture_behind_a_chapters_sliders_can_be_drawn(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    wanted = sum(bool(SLIDERS.search(cell.source)) for cell in notebook.cells if cell.cell_type == "code")
    assert len(drawn(notebook, tmp_path)) == wanted > 0


def test_a_slider_that_fails_at_one_place_is_noticed(tmp_path):
    source = """
from memlab.book.interactive import Interactive
from memlab.book.style import Picture, canvas
def draw(n=1):
    return Picture(canvas(3, 2)[0], f"A picture of {10 / (3 - n):.0f} things.")
Interactive(draw, n=[1, 2{more}])
"""
    fine = new_notebook(cells=[new_code_cell(source.replace("{more}", ""))])
    assert drawn(fine, tmp_path) == [2]
    broken = new_notebook(cells=[new_code_cell(source.replace("{more}", ", 3"))])
    with pytest.raises(NotebookError, match="ZeroDivisionError"):
        drawn(broken, tmp_path)
