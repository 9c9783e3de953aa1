"""The two ways to split a matmul, drawn from real matrices: by columns, then by rows, with what each rank has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from memlab.book.style import LABEL_SIZE, SMALL_SIZE, Picture

SHADES = ("#CFE5F2", "#FBE3A6", "#F5CDB4", "#CFEBE1")
MARKS = ("", "///", "...", "\\\\\\")
PLAIN = "#FFFFFF"
MOST = 8


def small_tensors() -> tuple[Tensor, Tensor, Tensor]:
    """x (2, 3), a (3, 4) and b (4, 3) of small whole numbers, so that every sum can be checked by eye."""
    x = torch.tensor([[1, 2, -1], [0, 1, 2]])
    a = torch.tensor([[1, -1, 2, 0], [1, 1, -1, 1], [-1, 1, 1, -1]])
    b = torch.tensor([[1, 0, 2], [-1, 1, 0], [0, 2, 1], [1, 1, -2]])
    return x, a, b


def split_parts(x: Tensor, a: Tensor, b: Tensor, ranks: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What each rank has of z = relu(x·a)·b: its columns of a and of y, its rows of b, and its summand of z.

    x: (rows, width), a: (width, hidden), b: (hidden, out), as textbooks write them. Raises ValueError for shapes that
    do not follow on each other, and for a hidden width that the ranks do not divide.
    """
    if not (x.dim() == a.dim() == b.dim() == 2 and x.shape[1] == a.shape[0] and a.shape[1] == b.shape[0]):
        raise ValueError(
            f"expected x (rows, width), a (width, hidden) and b (hidden, out), found {tuple(x.shape)}, "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.shape[1] % ranks:
        raise ValueError(f"expected a hidden width that {ranks} ranks divide, found {a.shape[1]}")
    parts = []
    for own_a, own_b in zip(a.chunk(ranks, 1), b.chunk(ranks, 0), strict=True):
        y = (x @ own_a).relu()
        parts.append((own_a, y, own_b, y @ own_b))
    return parts


def draw_split(ranks: int = 2, tensors: tuple[Tensor, Tensor, Tensor] | None = None) -> Picture:
    """Column parallel, then row parallel: z = relu(x·a)·b in one process, and by ranks, each with its parts.

    Each rank has a shade and hatching of its own. tensors: x, a and b, as of `split_parts`, with at most 8 rows or
    columns; None: `small_tensors()`. Below stands what is sent.
    Raises ValueError for tensors that cannot be split, are larger, or another number than 2 to 4 ranks.
    """
    x, a, b = tensors or small_tensors()
    parts = split_parts(x, a, b, ranks)
    largest = max(*x.shape, *a.shape, *b.shape)
    if not 2 <= ranks <= len(SHADES) or largest > MOST:
        raise ValueError(
            f"expected 2 to {len(SHADES)} ranks and sizes up to {MOST} to draw, found {ranks} ranks and a size of "
            f"{largest}"
        )
    y, z = (x @ a).relu(), (x @ a).relu() @ b
    columns = [x.shape[1], a.shape[1], a.shape[1], b.shape[1], b.shape[1]]
    starts = [sum(columns[:i]) + 2.2 * i for i in range(len(columns))]
    height = max(a.shape[0], b.shape[0], x.shape[0]) + 0.4
    bands = [max(x.shape[0], a.shape[0], part[2].shape[0]) + 1.7 for part in parts]
    tall = height + 2.2 + sum(bands) + 1.0
    wide = starts[-1] + columns[-1] + 0.4
    figure = Figure(figsize=(8, 8 * (tall + 0.4) / (wide + 3.4)), dpi=90)
    axes = figure.subplots()
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set_xlim(-3, wide + 0.4)
    axes.set_ylim(tall, -0.4)
    axes.axis("off")
    owner = [rank for rank in range(ranks) for _ in range(a.shape[1] // ranks)]
    whole = {"x": (x, None, None), "A": (a, None, owner), "y = relu(x·A)": (y, None, owner)}
    whole |= {"B": (b, owner, None), "z = y·B": (z, None, None)}
    middle = 1.1 + height / 2
    for start, (name, (numbers, by_row, by_column)) in zip(starts, whole.items(), strict=True):
        _matrix(axes, numbers, start, middle, name, by_row, by_column)
    _signs(axes, starts, columns, middle, ("·", "→", "·", "="))
    axes.text(-2.8, middle, "one\nprocess", fontsize=LABEL_SIZE, va="center")
    top = height + 2.2
    for rank, (band, part) in enumerate(zip(bands, parts, strict=True)):
        middle = top + band / 2 + 0.3
        names = ("x, all of it", f"columns of A: A{rank}", f"y{rank}", f"rows of B: B{rank}", f"z{rank}, a summand")
        for place, (name, numbers) in enumerate(zip(names, (x, *part), strict=True)):
            shift = (columns[place] - numbers.shape[1]) / 2
            whose = None if place == 0 else [rank] * numbers.shape[1]
            _matrix(axes, numbers, starts[place] + shift, middle, name, None, whose)
        _signs(axes, starts, columns, middle, ("·", "→", "·", "="))
        axes.text(-2.8, middle, f"rank {rank}", fontsize=LABEL_SIZE, va="center")
        top += band
    axes.axhline(height + 1.6, color="black", linewidth=0.8)
    axes.text(starts[0] - 0.1, tall - 0.15, "forward: nothing is sent\nbackward: all-reduce", fontsize=SMALL_SIZE)
    between = starts[2] + columns[2] / 2
    axes.text(between, tall - 0.15, "nothing is sent, either way", fontsize=SMALL_SIZE, ha="center")
    total = " + ".join(f"z{rank}" for rank in range(ranks))
    end = starts[4] + columns[4]
    axes.text(
        end,
        tall - 0.15,
        f"forward: all-reduce, z = {total}\nbackward: nothing is sent",
        fontsize=SMALL_SIZE,
        ha="right",
    )
    said = "; ".join(f"rank {rank}'s summand is {part[3].tolist()}" for rank, part in enumerate(parts))
    each = a.shape[1] // ranks
    return Picture(
        figure,
        f"Matrices with their numbers: above, z = relu(x·A)·B in one process; below, on {ranks} ranks, "
        f"each with {each} of the {a.shape[1]} columns of A, which give it as many of y, and the same rows of B. "
        f"{said}; their sum is z, {z.tolist()}. Sent is, in forward, that sum alone, and in backward that of x's "
        f"gradient.",
    )


def _matrix(
    axes: Axes,
    numbers: Tensor,
    start: float,
    middle: float,
    name: str,
    by_row: Sequence[int] | None,
    by_column: Sequence[int] | None,
) -> None:
    """A grid of numbers around a height; by_row, by_column: whose rank's shade each row or column has."""
    rows, columns = numbers.shape
    top = middle - rows / 2
    for row in range(rows):
        for column in range(columns):
            rank = by_row[row] if by_row else by_column[column] if by_column else None
            shade, mark = (PLAIN, "") if rank is None else (SHADES[rank], MARKS[rank])
            corner = (start + column, top + row)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=shade, edgecolor="#888888", hatch=mark, linewidth=0))
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=0.6))
            box = {"boxstyle": "square,pad=0.15", "facecolor": shade, "linewidth": 0}
            place = {"ha": "center", "va": "center", "fontsize": LABEL_SIZE, "bbox": box}
            axes.text(start + column + 0.5, top + row + 0.5, f"{numbers[row, column].item():.3g}", **place)
    axes.text(start + columns / 2, top - 0.12, name, ha="center", va="bottom", fontsize=SMALL_SIZE)


def _signs(axes: Axes, starts: Sequence[float], columns: Sequence[int], middle: float, signs: Iterable[str]) -> None:
    """What stands between one matrix and the next."""
    for place, sign in enumerate(signs):
        at = (starts[place] + columns[place] + starts[place + 1]) / 2
        axes.text(at, middle, sign, ha="center", va="center", fontsize=14)
