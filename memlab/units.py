"""Bytes, and the one function that writes them down.

A byte count is an `int` everywhere in memlab. It becomes text in one place, here, in powers of 1024
(KiB, MiB, GiB, TiB). GB (10**9 bytes) is what vendors print on a box; the book writes it only where a
source says GB, because 80 GB and 80 GiB are 5.9 GB apart.
"""

from __future__ import annotations

import re
from fractions import Fraction

KiB = 1024
MiB = 1024**2
GiB = 1024**3
TiB = 1024**4

_SCALES = {
    "B": 1,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "TiB": TiB,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def format_bytes(nbytes: int, digits: int = 1) -> str:
    """Write a byte count for a person, in powers of 1024.

    Whole bytes below 1 KiB, `digits` decimals above. The unit is chosen after rounding, so
    1,048,575 B reads 1.0 MiB and never 1024.0 KiB.

    >>> format_bytes(512), format_bytes(81_634_312), format_bytes(-2048)
    ('512 B', '77.9 MiB', '-2.0 KiB')
    """
    if nbytes < 0:
        return "-" + format_bytes(-nbytes, digits)
    if nbytes < KiB:
        return f"{nbytes} B"
    for unit in ("KiB", "MiB", "GiB"):
        if round(nbytes / _SCALES[unit], digits) < 1024:
            break
    else:
        unit = "TiB"
    return f"{nbytes / _SCALES[unit]:,.{digits}f} {unit}"


def parse_bytes(size: int | str) -> int:
    """Read a size: an int is bytes already; text carries its unit, '16 GiB' or '80GB'.

    Raises TypeError for anything but int and str, ValueError for text without a known unit,
    and ValueError for a size below zero.

    >>> parse_bytes("16 GiB"), parse_bytes("80 GB"), parse_bytes(512)
    (17179869184, 80000000000, 512)
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"expected a size as int (bytes) or text such as '16 GiB', found {size!r}")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size)
        if match is None or match[2] not in _SCALES:
            raise ValueError(
                f"expected a size such as '16 GiB' or '80 GB', found {size!r}; units: {', '.join(_SCALES)}"
            )
        nbytes = Fraction(match[1]) * _SCALES[match[2]]  # exact, where a float would lose bytes from 8 PiB on
    else:
        nbytes = size
    if nbytes < 0:
        raise ValueError(f"expected a size of at least 0 bytes, found {size}")
    return round(nbytes)
