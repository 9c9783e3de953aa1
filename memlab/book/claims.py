"""Claims are data: what was predicted, what was measured, and whether the difference is within a stated tolerance."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.book.tables import Table
from memlab.units import format_bytes

KINDS = ("bytes", "values", "time")


@dataclass(frozen=True)
class Claim:
    """One claim put to the proof. `predicted` and `measured` are in `unit`; `measured` None means not recorded yet."""

    id: str
    kind: str
    predicted: float
    measured: float | None
    tolerance: float
    unit: str

    @property
    def verdict(self) -> str:
        """ "holds", "does not hold", or "open: not recorded yet"."""
        if self.measured is None:
            return "open: not recorded yet"
        return "holds" if abs(self.measured - self.predicted) <= self.tolerance else "does not hold"

    def row(self) -> tuple[str, str, str, str, str]:
        """id, predicted, measured, difference, verdict: the cells of a table."""
        if self.measured is None:
            return self.id, self._text(self.predicted), "—", "—", self.verdict
        difference = self.measured - self.predicted
        return self.id, self._text(self.predicted), self._text(self.measured), self._text(difference), self.verdict

    def _text(self, value: float) -> str:
        if self.unit == "B":
            return f"{value:,} B" if abs(value) < 1024 else f"{value:,} B ({format_bytes(value)})"
        return f"{value:,.4g} {self.unit}"


registered: dict[str, Claim] = {}


def claim(
    id: str, *, kind: str, predicted: float, measured: float | None, tolerance: float = 0, unit: str = "B"
) -> Table:
    """Put a claim to the proof: register it, and give its row *predicted · measured · difference · verdict*.

    kind: "bytes" (exact whole numbers of bytes), "values" (within a reasoned tolerance) or "time" (recorded, never
    tested). Raises ValueError for another kind, a negative tolerance, or bytes that are not whole numbers of B.
    """
    if kind not in KINDS:
        raise ValueError(f"{id}: expected kind among {', '.join(KINDS)}; found {kind!r}")
    if tolerance < 0:
        raise ValueError(f"{id}: expected a tolerance of at least 0, found {tolerance}")
    if kind == "bytes" and not (unit == "B" and isinstance(predicted, int) and isinstance(measured, (int, type(None)))):
        raise ValueError(f"{id}: expected whole bytes, unit 'B', found {predicted!r} and {measured!r} in {unit!r}")
    registered[id] = found = Claim(id, kind, predicted, measured, tolerance, unit)
    return Table(["claim", "predicted", "measured", "difference", "verdict"], [found.row()])


def evidence() -> Table:
    """All claims registered so far: predicted, measured on this machine, verdict, and what recorded GPUs say."""
    columns = ["claim", "predicted", "measured here", "difference", "verdict", "recorded GPUs"]
    return Table(columns, [(*found.row(), "not recorded yet") for found in registered.values()])
