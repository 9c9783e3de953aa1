"""What every chapter must do, beyond running: each picture behind a slider can be drawn, wherever the sliders stand."""

import os
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from memlab.book.notebooks import NotebookError, execute
from tests.slider_grids import DRAW_THE_GRID, counts, sliders_in

BOOK = Path(__file__).parents[1] / "chapters"
SLIDING = [path for path in sorted(BOOK.glob("*.ipynb")) if sliders_in(nbformat.read(path, as_version=4))]


def drawn(notebook, folder: Path) -> list[int]:
    """Run a notebook, then draw the whole grid of each of its sliders; how many pictures each has."""
    notebook.cells.append(new_code_cell(DRAW_THE_GRID))
    path = folder / "grid.ipynb"
    nbformat.write(notebook, path)
    printed = "".join(output.text for output in execute(path).cells[-1].outputs if output.output_type == "stream")
    return counts(printed)


@pytest.mark.skipif(
    os.environ.get("MEMLAB_BROWSER") == "required", reason="drawn where the chapters run in a browser (test_browser)"
)
@pytest.mark.parametrize("path", SLIDING, ids=lambda path: path.stem)
def test_every_picture_behind_a_chapters_sliders_can_be_drawn(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert len(drawn(notebook, tmp_path)) == sliders_in(nbformat.read(path, as_version=4))


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
