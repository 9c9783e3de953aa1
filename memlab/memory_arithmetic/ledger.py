"""The ledger: tensors come and go, each with a formula, and the fullest instant of every moment is kept.

A size is written as the papers write it, `4·b·s·h`, and computed from that very text, so what a reader is shown and
what is added up cannot differ. The symbols are Korthikanti et al.'s (2022):

    b  batch          h  width             f  width of the feed-forward layer    L  layers
    s  tokens         a  heads             v  vocabulary                         P  parameters
    c  context        d  width of a head   g  key-value heads                    T  parameter tensors
    S  tokens, up to a multiple of 32      r  half of d, its pairs
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memlab.units import format_bytes


def elements(size: str, symbols: dict[str, int]) -> int:
    """The number of elements that a size such as "4·b·s·h" or "12·h·h + 13·h" stands for.

    Raises KeyError for a symbol that has no value.

    >>> elements("12·h·h + 13·h", {"h": 10})
    1330
    """
    products = (product.split("·") for product in size.split(" + "))
    return sum(math.prod(int(f) if f.isdigit() else symbols[f] for f in factors) for factors in products)


def in_numbers(size: str, symbols: dict[str, int]) -> str:
    """The same size with numbers for symbols.

    >>> in_numbers("4·b·s·h", {"b": 8, "s": 128, "h": 256})
    '4·8·128·256'
    """
    products = (product.split("·") for product in size.split(" + "))
    return " + ".join("·".join(f if f.isdigit() else str(symbols[f]) for f in factors) for factors in products)


CATEGORIES = ("parameter", "gradient", "optimizer_state", "input", "activation", "temporary")
"""Those of the Timeline's categories that a step has: no buffers, and kernels' workspace is not counted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a step: its size in symbols, bytes an element, the Timeline's category, and why it is there."""

    name: str
    size: str
    itemsize: int
    category: str
    source: str


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a breakdown: `nbytes`, the formula that gives them, and the source: a paper, or the op that keeps it.

    `category` is one of CATEGORIES.
    """

    name: str
    category: str
    nbytes: int
    formula: str
    source: str


@dataclass(frozen=True)
class Breakdown:
    """What is held at one instant: terms that add up to `nbytes` exactly. `moment` says when, `at` names the op."""

    moment: str
    at: str
    terms: tuple[Term, ...]

    @property
    def nbytes(self) -> int:
        """The sum of the terms, in bytes."""
        return sum(term.nbytes for term in self.terms)

    def by_category(self) -> dict[str, int]:
        """Bytes of each category that the terms have, the largest first."""
        found: Counter[str] = Counter()
        for term in self.terms:
            found[term.category] += term.nbytes
        return dict(found.most_common())

    def of(self, category: str) -> Breakdown:
        """The terms of one category, as a breakdown of their own. Raises ValueError for what is none of CATEGORIES."""
        if category not in CATEGORIES:
            raise ValueError(f"expected category to be one of {', '.join(map(repr, CATEGORIES))}; found {category!r}")
        return Breakdown(self.moment, self.at, tuple(t for t in self.terms if t.category == category))

    def __iter__(self) -> Iterator[Term]:
        return iter(self.terms)

    def __str__(self) -> str:
        """A table, the largest term first."""
        rows = [f"{self.moment} ({self.at}): {format_bytes(self.nbytes)}"]
        for term in sorted(self.terms, key=lambda term: -term.nbytes):
            rows.append(f"{format_bytes(term.nbytes):>10}  {term.category:15}  {term.name}: {term.formula}")
        return "\n".join(rows)

    def __len__(self) -> int:
        return len(self.terms)


Row = Piece | str
"""A line of a step's story: a Piece is made, or the piece of that name is freed."""


@dataclass(frozen=True)
class Op:
    """An op as memory sees it: what its forward makes and frees, what its backward makes and frees, in order."""

    name: str
    forward: tuple[Row, ...]
    backward: tuple[Row, ...]


def net(rows: Iterable[Row]) -> dict[Piece, int]:
    """What rows leave behind: made and not freed. (A name freed that they did not make is left out.)"""
    left: dict[str, Piece] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        if isinstance(row, Piece):
            left[row.name] = row
            counts[row.name] += 1
        else:
            counts[row] -= 1
    return {left[name]: count for name, count in counts.items() if name in left and count > 0}


class Ledger:
    """What is held, how many times; and of each moment the fullest instant. `symbols` gives the sizes their values."""

    def __init__(self, symbols: dict[str, int]):
        self.symbols = symbols
        self.held: dict[str, int] = {}
        self.pieces: dict[str, Piece] = {}
        self.nbytes = 0
        self.fullest: dict[str, tuple[int, str, dict[str, int]]] = {}

    def bytes_of(self, piece: Piece) -> int:
        """Bytes of one such tensor."""
        return elements(piece.size, self.symbols) * piece.itemsize

    def make(self, piece: Piece, count: int = 1) -> None:
        """Hold `count` tensors more of this kind. Raises ValueError for another piece under a name that is taken."""
        if count <= 0:
            return
        if self.pieces.setdefault(piece.name, piece) != piece:
            raise ValueError(f"expected one piece named {piece.name!r}, found {self.pieces[piece.name]} and {piece}")
        self.held[piece.name] = self.held.get(piece.name, 0) + count
        self.nbytes += count * self.bytes_of(piece)

    def free(self, name: str, count: int = 1) -> None:
        """Let `count` of them go. Raises KeyError for more than are held."""
        if count <= 0:
            return
        if self.held.get(name, 0) < count:
            raise KeyError(f"expected {count} held of {name!r}, found {self.held.get(name, 0)}")
        self.held[name] -= count
        if not self.held[name]:
            del self.held[name]
        self.nbytes -= count * self.bytes_of(self.pieces[name])

    def named(self, category: str) -> list[str]:
        """The names of what is held of one category."""
        return [name for name in self.held if self.pieces[name].category == category]

    def look(self, moment: str, at: str) -> None:
        """Note this instant, if it is the fullest of its moment so far."""
        if moment not in self.fullest or self.nbytes > self.fullest[moment][0]:
            self.fullest[moment] = self.nbytes, at, dict(self.held)

    def play(self, moment: str, at: str, rows: Iterable[Row]) -> None:
        """Make and free in order, and look after everything that is made."""
        for row in rows:
            if isinstance(row, Piece):
                self.make(row)
                self.look(moment, at)
            else:
                self.free(row)

    def term(self, name: str, count: int) -> Term:
        """`count` pieces of one name as a term."""
        piece = self.pieces[name]
        times = f"{count} × " if count > 1 else ""
        size, numbers = piece.size, in_numbers(piece.size, self.symbols)
        if " + " in size:
            size, numbers = f"({size})", f"({numbers})"
        nbytes = count * self.bytes_of(piece)
        plain = f"{times}{numbers} × {piece.itemsize}"
        formula = f"{times}{size} × {piece.itemsize} B = {plain}"
        return Term(name, piece.category, nbytes, formula, piece.source)

    def breakdown(self, moment: str) -> Breakdown:
        """The fullest instant of a moment."""
        _, at, held = self.fullest[moment]
        return Breakdown(moment, at, tuple(self.term(name, count) for name, count in held.items()))
