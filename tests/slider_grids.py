"""Draws every picture behind a chapter's sliders, in a kernel in which the chapter has run."""

import re

MAKERS = (
    "Interactive",
    "what_if",
    "explore_blocks",
    "explore_roofline",
    "explore_tiles",
    "explore_number",
    "gradient_histogram",
    "explore_batches",
    "explore_tradeoff",
    "explore_segments",
    "explore_overlap",
    "explore_schedule",
    "explore_rank_bytes",
    "explore_hidden",
    "explore_ring",
    "explore_tensor_ranks",
    "explore_pipeline",
    "explore_axes",
    "explore_floor",
)
SLIDERS = re.compile(rf"\b({'|'.join(MAKERS)})\(")
MOST_PICTURES = 500


def draw_the_grid(expected: int) -> str:
    """Code that draws them all, and renders each slider's two ends; it raises unless so many sets are there."""
    return f"""
import gc
from memlab.book.interactive import Interactive
sliding = [thing for thing in gc.get_objects() if type(thing) is Interactive]
for one in sliding:
    moves = [one.start | {{name: value}} for name, labels in one.choices.items() for value in labels.values()]
    ends = [one.start | {{name: [*labels.values()][end]}} for name, labels in one.choices.items() for end in (0, -1)]
    grid = list(one.grid())
    # The library's own with more pictures have their numbers tested all over. And half the time would go into pixels.
    for values in grid if len(grid) <= {MOST_PICTURES} else moves:
        picture = one.at(**values)
        assert values not in ends or picture.png().startswith(b"\\x89PNG"), values
assert len(sliding) == {expected}, f"expected {expected} sets of sliders, found {{len(sliding)}}"
"""


def sliders_in(notebook) -> int:
    """How many cells of a notebook make sliders."""
    return sum(bool(SLIDERS.search(cell.source)) for cell in notebook.cells if cell.cell_type == "code")
