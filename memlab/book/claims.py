"""Claims are data: a saying that everybody repeats, made into a prediction, put beside a measurement, and judged.

A claim gives the saying in the book's own words, a formula's prediction, what was measured, and the book's verdict on
the saying: it holds, it holds if something, or it does not hold. The verdict rests on the formula, so it stands only
while measured agrees with predicted. Each is shown as a table's row and, in the same output, as JSON; so all claims of
the book can be read from its saved chapters (`memlab.book.verdicts`).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from fractions import Fraction

from memlab.book.tables import Table
from memlab.units import format_bytes

KINDS = {
    "bytes": "exact whole numbers of bytes, recomputed by a test",
    "values": "numbers within a reasoned tolerance, recomputed by a test",
    "time": "seconds and what follows from them: recorded, never tested",
}
VERDICT = re.compile(r"holds( if \S.*)?|does not hold")
NOT_RECORDED, DIFFERS = "open: not recorded yet", "open: measured differs from the prediction"
MIME = "application/vnd.memlab.claim+json"


@dataclass(frozen=True)
class Claim:
    """One saying put to the proof. `predicted` and `measured` are in `unit`; `measured` None means not recorded yet.

    on: what was measured instead of the card at hand ("an imagined H100", "ranks on the CPU"); "" where it was the
    card, or the CPU where there is none.

    Raises ValueError for one that is malformed, with what was expected.
    """

    id: str
    kind: str
    says: str
    verdict: str
    predicted: float
    measured: float | None
    tolerance: float
    unit: str
    on: str = ""

    def __post_init__(self):
        expect = self._expect
        if not isinstance(self.id, str) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.id):
            raise ValueError(f"expected a claim's id in small letters, such as 'adam-states'; found {self.id!r}")
        expect(self.kind in [*KINDS], f"kind among {', '.join(KINDS)}", self.kind)
        expect(_is_line(self.says), "says='…', one line with what people say, in the book's words", self.says)
        expect(
            _is_line(self.verdict) and VERDICT.fullmatch(self.verdict),
            "a verdict 'holds', 'holds if …' or 'does not hold'",
            self.verdict,
        )
        expect(_is_number(self.predicted), "a finite plain number as predicted", self.predicted)
        expect(self.measured is None or _is_number(self.measured), "a finite plain number, or None, as measured",
               self.measured)  # fmt: skip
        expect(_is_number(self.tolerance) and self.tolerance >= 0, "a tolerance of at least 0", self.tolerance)
        expect(_is_line(self.unit), "a unit, such as 'B' or '×'", self.unit)
        expect(self.on == "" or _is_line(self.on), "on='an imagined …', or nothing for this machine", self.on)
        if self.kind == "bytes":
            whole = isinstance(self.predicted, int) and isinstance(self.measured, int | None)
            found = f"{self.predicted!r} and {self.measured!r} in {self.unit!r}"
            expect(whole and self.unit == "B", "whole bytes, unit 'B', for kind 'bytes'", found)
            expect(self.tolerance == 0, "no tolerance for bytes, which are exact", self.tolerance)

    def _expect(self, met: object, what: str, found: object) -> None:
        if not met:
            raise ValueError(f"{self.id}: expected {what}; found {found!r}")

    @property
    def agrees(self) -> bool:
        """Whether measured is within the tolerance of predicted; not without a measurement."""
        if self.measured is None:
            return False
        return abs(Fraction(self.measured) - Fraction(self.predicted)) <= Fraction(self.tolerance)  # floats would round

    @property
    def standing(self) -> str:
        """The verdict on the saying, where the measurement bears it; otherwise what keeps the question open."""
        if self.measured is None:
            return NOT_RECORDED
        return self.verdict if self.agrees else DIFFERS

    @property
    def elsewhere(self) -> str:
        """What stands in place of a card's figure where no card was measured: "no card: ranks on the CPU"; else ""."""
        return f"no card: {self.on}" if self.on else ""

    def row(self) -> tuple[str, str, str, str, str]:
        """What is said, predicted, measured, difference, verdict: the cells of a table.

        Where measured disagrees, both are shown in as many digits as tell them apart.
        """
        if self.measured is None:
            return self.says, self.text(self.predicted), "—", "—", self.standing
        shown = [(self.text(self.predicted, n), self.text(self.measured, n)) for n in range(4, 18)]
        apart = [pair for pair in shown if pair[0] != pair[1]]
        predicted, measured = shown[0] if self.agrees or not apart else apart[0]
        difference, where = self.text(self.measured - self.predicted), f", on {self.on}" if self.on else ""
        return self.says, predicted, measured + where, difference, self.standing

    def text(self, value: float, digits: int = 4) -> str:
        """A value of this claim, with its unit; bytes have all their digits."""
        if self.unit == "B":
            return f"{value:,} B" if abs(value) < 1024 else f"{value:,} B ({format_bytes(value)})"
        return f"{value:,.{digits}g} {self.unit}"


def _is_line(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip()) and len(text.splitlines()) == 1


def _is_number(value: object) -> bool:
    """A finite plain number, and no larger than any size there is: what cannot be shown is not claimed."""
    return (type(value) is int or isinstance(value, float) and math.isfinite(value)) and abs(value) < 2**63


registered: dict[str, Claim] = {}


class ClaimTable(Table):
    """A claim's row. A saved notebook keeps the claim itself beside it, as JSON under `MIME`."""

    def __init__(self, found: Claim):
        super().__init__(["what is said", "predicted", "measured", "difference", "verdict"], [found.row()])
        self.claim = found

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": repr(self), "text/markdown": self._repr_markdown_(), MIME: asdict(self.claim)}


def claim(
    id: str,
    *,
    kind: str,
    says: str,
    predicted: float,
    measured: float | None,
    verdict: str = "holds",
    tolerance: float = 0,
    unit: str = "B",
    on: str = "",
) -> ClaimTable:
    """Put a saying to the proof: register it, and give its row *said · predicted · measured · difference · verdict*.

    kind: "bytes" (exact whole numbers of bytes), "values" (within a reasoned tolerance) or "time" (recorded, never
    tested). says: the saying in one line. verdict: what the prediction makes of it, "holds", "holds if …" or "does not
    hold". on: what was measured, where it is not the card at hand: imagined hardware, or the CPU in any case. A cell
    that is run again replaces its claim.

    Raises ValueError for a claim that is malformed (see `Claim`), and registers nothing then.
    """
    found = Claim(id, kind, says, verdict, predicted, measured, tolerance, unit, on)
    table = ClaimTable(found)
    registered[id] = found
    return table


def evidence(folder: str = ".") -> Table:
    """All claims registered so far: predicted, measured on this machine, verdict, and what each recorded GPU says.

    folder: where the chapters are, with their `results`.
    """
    from memlab.book import records  # which reads claims, and so imports this page

    gpus, damaged = records.survey(f"{folder}/results")
    columns = ["what is said", "predicted", "measured here", "difference", "verdict"]
    rows = [[*found.row()] for found in registered.values()]
    for document in gpus:
        columns.append(document["device"])
        for row, found in zip(rows, registered.values(), strict=True):
            row.append(found.elsewhere or records.says_of(document, found.id, folder))
    if not gpus:
        columns.append("recorded GPUs")
        for row, found in zip(rows, registered.values(), strict=True):
            row.append(found.elsewhere or records.NONE)
    for path in damaged:
        columns.append(path.name)
        rows = [[*row, "damaged: see python -m memlab"] for row in rows]
    return Table(columns, rows)
