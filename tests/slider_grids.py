"""Draws every picture behind a chapter's sliders, in a kernel in which the chapter has run."""

import re

SLIDERS = re.compile(r"\b(Interactive|what_if|explore_number|gradient_histogram|explore_batches)\(")
MOST_PICTURES = 500

DRAW_THE_GRID = f"""
import gc
from memlab.book.interactive import Interactive
for found in [thing for thing in gc.get_objects() if type(thing) is Interactive]:
    grid = list(found.grid())
    if len(grid) > {MOST_PICTURES}:  # the library's own, whose numbers are tested all over: each slider's moves
        grid = [found.start | {{name: value}} for name, labels in found.choices.items() for value in labels.values()]
    for values in grid:
        picture = found.at(**values)
        assert picture.png().startswith(b"\\x89PNG"), values
    print(len(grid), "pictures")
"""


def sliders_in(notebook) -> int:
    """How many cells of a notebook make sliders."""
    return sum(bool(SLIDERS.search(cell.source)) for cell in notebook.cells if cell.cell_type == "code")


def counts(printed: str) -> list[int]:
    """How many pictures each set of sliders has, from what DRAW_THE_GRID printed."""
    return [int(line.split()[0]) for line in printed.splitlines()]
