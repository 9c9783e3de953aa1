"""Whether a benchmark's figure is what it must be, as far as the two texts tell.

Most demands are a bound, "≤ 1.05×", and most figures "min – median – max", of which the median is held to it.
"""

from __future__ import annotations

import operator
import re

YES, NO, UNSURE = "yes", "no", "—"
SCALES = {"×": 1, "%": 1, "": 1, "s": 1, "ms": 1e-3, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BOUNDS = {"≤": operator.le, "at most": operator.le, "<": operator.lt, "≥": operator.ge, "": operator.eq}
BOUNDS["within"] = lambda apart, limit: abs(apart) <= limit
NUMBER = r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
UNIT = r"\s?(×|%|ms|s|[KMG]iB|B)?"
DEMAND = re.compile(rf"(≤|at most|<|≥|within|)\s?({NUMBER}){UNIT}(?: or ({NUMBER}) %)?")
FIGURE = re.compile(rf"(?:(?<=\s)|^)(?:{NUMBER} – )?({NUMBER})(?: – {NUMBER})?{UNIT}(?: at most)?(?=[;:,]|$)")
COUNT = re.compile(r"([\d,]+) of ([\d,]+)")
WHOLE = re.compile(r" of ([\d,]+)")


def reached(figure: str, must: str) -> str:
    """Whether a figure is what it must be: "yes", "no", or "—" where that cannot be told from the texts.

    A figure of several parts must reach the bound with each: those figures count that end a part. What stands in
    brackets is a remark. "3 B of 7 B" are 3 B, of which a demand may allow so many % of the 7.
    Words after a demand's comma must stand in the figure, without a "not" before them. Of "0 of 0" nothing is known.

    >>> reached("0.98 – 1.02 – 1.10× (fastest / fastest 0.99×)", "≤ 1.05×")
    'yes'
    >>> reached("ours 0.25×, theirs 0.41×; bitwise", "≤ 0.35×, bitwise")
    'no'
    >>> reached("-70 B of 100,000 B", "within 64 B or 0.1 %")
    'yes'
    >>> reached("needs a GPU", "≤ 1×")
    '—'
    """
    count = COUNT.fullmatch(figure)
    if count and not _number(count[2]):
        return UNSURE
    if count and (must == "all" or COUNT.fullmatch(must)):
        return YES if figure == must or (must == "all" and count[1] == count[2]) else NO
    bound, *words = must.split(", ")
    demand = DEMAND.fullmatch(bound)
    if demand is None:
        return UNSURE
    unit = demand[3] or ""
    found = _figures(f"{100 * _number(count[1]) / _number(count[2])}%" if count and unit == "%" else figure)
    if not found or any(_is_of(one[1]) != _is_of(unit) for one in found):
        return UNSURE
    limit = _number(demand[2]) * SCALES[unit]
    if demand[4] and (whole := WHOLE.search(figure)):
        limit = max(limit, _number(demand[4]) / 100 * _number(whole[1]) * SCALES[unit])
    well = all(BOUNDS[demand[1]](number * SCALES[of], limit) for number, of in found)
    return YES if well and all(re.search(rf"(?<!not )\b{re.escape(word)}\b", figure) for word in words) else NO


def _figures(text: str) -> list[tuple[float, str]]:
    """(number, unit) of each figure that ends a part of a text."""
    plain = re.sub(r" \([^)]*\)", "", text)
    plain = re.sub(r" of [\d,]+(?: B)?(?=[;,]|$)", "", plain).split(": ")[0]
    return [(_number(match[1]), match[2] or "") for match in FIGURE.finditer(plain)]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _is_of(unit: str) -> str:
    """What a unit measures: units of time are of one kind, and so are those of bytes."""
    return "bytes" if unit.endswith("B") else "time" if unit.endswith("s") else unit
