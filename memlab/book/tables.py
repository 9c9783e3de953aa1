"""Small tables that read the same in a terminal, in a notebook and in a diff."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memlab.book.markdown import literal
from memlab.memory_timeline import Storage, Timeline
from memlab.units import format_bytes


class Table:
    """Columns and rows of text and numbers; numbers are set to the right, and integers get thousands separators.

    markdown: the cells are Markdown, with links and code. Otherwise a notebook shows each sign of a text as it stands.
    Raises ValueError for a row that has not one cell per column.
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, markdown: bool = False):
        self.columns, self.markdown = list(columns), markdown
        self.rows = [list(row) for row in rows]
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"expected {len(self.columns)} cells ({', '.join(self.columns)}), found {len(row)}: {row}"
                )

    def _text(self) -> list[list[str]]:
        return [[f"{cell:,}" if type(cell) is int else str(cell) for cell in row] for row in self.rows]

    def _right(self) -> list[bool]:
        return [
            bool(self.rows) and all(isinstance(row[i], (int, float)) or _is_size(row[i]) for row in self.rows)
            for i in range(len(self.columns))
        ]

    def __repr__(self) -> str:
        text = [self.columns, *self._text()]
        widths = [max(len(row[i]) for row in text) for i in range(len(self.columns))]
        right = self._right()
        lines = [
            "  ".join(
                cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in text
        ]
        return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])

    def _repr_markdown_(self) -> str:
        cell = _one_line if self.markdown else literal
        rule = ["---:" if right else ":---" for right in self._right()]
        rows = [map(cell, self.columns), rule, *(map(cell, map(_unbroken, row)) for row in self._text())]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _one_line(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _is_size(cell: object) -> bool:
    """True for a text that begins with a number and ends in a unit; a sentence may end in "16 GiB" as well."""
    units = (" B", "KiB", "MiB", "GiB", "TiB", " GB", "×", "%")
    return isinstance(cell, str) and cell.lstrip("+-−")[:1].isdigit() and cell.endswith(units)


def _unbroken(cell: str) -> str:
    """A size stays on one line: the space before its unit does not break."""
    return cell.replace(" ", "\N{NO-BREAK SPACE}") if _is_size(cell) else cell


def by_category(timeline: Timeline, event: int | None = None) -> Table:
    """Bytes of each category at an event (the peak, unless given), the largest first, with the sum."""
    event = timeline.peak_event if event is None else event
    held = {name: nbytes for name, nbytes in timeline.bytes_by_category(event).items() if nbytes}
    rows = [(name, format_bytes(n), n) for name, n in sorted(held.items(), key=lambda item: -item[1])]
    return Table(["category", "size", "bytes"], [*rows, ("sum", format_bytes(sum(held.values())), sum(held.values()))])


def holders(timeline: Timeline, event: int | None = None, by: str = "line", top: int = 8) -> Table:
    """Who holds the bytes alive at an event (the peak, unless given), grouped `by` "line", "reason" or "module".

    Raises ValueError for another grouping.
    """
    keys = {"line": _line, "reason": lambda s: s.reason, "module": lambda s: s.module or "(outside any module)"}
    if by not in keys:
        raise ValueError(f"expected by='line', 'reason' or 'module', found {by!r}")
    groups: dict[str, list[Storage]] = {}
    for storage in timeline.alive(timeline.peak_event if event is None else event):
        groups.setdefault(keys[by](storage), []).append(storage)
    size = lambda group: sum(storage.nbytes for storage in group)  # noqa: E731
    ranked = sorted(groups.items(), key=lambda item: (-size(item[1]), item[0]))
    rows = [(format_bytes(size(group)), len(group), key) for key, group in ranked[:top]]
    if rest := [storage for _, group in ranked[top:] for storage in group]:
        rows.append((format_bytes(size(rest)), len(rest), f"… {len(ranked) - top} more"))
    return Table(["size", "storages", by], rows)


def storages(timeline: Timeline, event: int | None = None, category: str | None = None, top: int = 8) -> Table:
    """The largest storages alive at an event (the peak, unless given): shape, birthplace, and why they stay."""
    alive = timeline.alive(timeline.peak_event if event is None else event)
    rows = [
        (
            format_bytes(s.nbytes),
            f"{'×'.join(map(str, s.shape)) or 'scalar'} {s.dtype}",
            s.module,
            str(s.line),
            s.reason,
        )
        for s in alive
        if category is None or s.category == category
    ]
    return Table(["size", "shape", "module", "line", "reason"], rows[:top])


def _line(storage: Storage) -> str:
    return str(storage.line) if storage.phase != "before" else f"({storage.category}s that were there before)"
