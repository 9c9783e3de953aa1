"""Exercise 1 of chapter 09: how long bytes travel, what the card waits, and from which width it waits no longer."""

from __future__ import annotations

from memlab.book.checks.answers import Wrong, exercise
from memlab.units import GiB

_FLOPS, _BANDWIDTH = 360e12, 48e9  # a second
_WIDTH, _TOKENS = 4096, 8192
_TRANSFER = 34 * _WIDTH * _TOKENS / _BANDWIDTH * 1000
_COMPUTE = 24 * _WIDTH**2 * _TOKENS / _FLOPS * 1000
_RIDGE = _FLOPS / _BANDWIDTH
_TOLERANCE = 0.004  # three digits, rounded


@exercise
def free(transfer_ms: object, waits_ms: object, free_width: object, inputs_width: object) -> str:
    """Exercise 1: a block's transfer, what the card waits for it, and the widths from which it waits no longer."""
    _milliseconds(
        transfer_ms,
        "transfer_ms",
        _TRANSFER,
        {
            "seconds, not milliseconds": _TRANSFER / 1000,
            "microseconds, not milliseconds": _TRANSFER * 1000,
            "what the arithmetic takes, not the link": _COMPUTE,
            "as if 48 GB/s were bits": _TRANSFER * 8,
            "as if a GB were 2³⁰ bytes": _TRANSFER * 1e9 / GiB,
            "one token's": _TRANSFER / _TOKENS,
            "half of what it should be": _TRANSFER / 2,
            "twice as much as it should be": _TRANSFER * 2,
            "the time of inputs alone": _TRANSFER / 17,
        },
    )
    right = _TRANSFER - _COMPUTE
    _milliseconds(
        waits_ms,
        "waits_ms",
        right,
        {
            "seconds, not milliseconds": right / 1000,
            "the whole transfer; meanwhile the card computes the next block": _TRANSFER,
            "the arithmetic; what is left of the transfer when that is done?": _COMPUTE,
            "both, one after the other; they run at once": _TRANSFER + _COMPUTE,
            "what the link would wait": -right,
            "what is left beside a backward, which takes twice as long": _TRANSFER - 2 * _COMPUTE,
            "half of what it should be": right / 2,
            "twice as much as it should be": right * 2,
        },
    )
    _width(free_width, "free_width", 34)
    _width(inputs_width, "inputs_width", 2)
    return "Bytes grow with h and FLOPs with h²: wide models send for nothing, and inputs of blocks almost any."


def _number(found: object, name: str) -> float:
    if type(found) not in (int, float):
        raise Wrong(f"{name}: expected a number, found {type(found).__name__} {str(found)[:40]}.")
    if found == 0:
        raise Wrong(f"there is no answer yet: {name} is 0.")
    return float(found)


def _near(found: float, right: float) -> bool:
    return abs(found - right) <= _TOLERANCE * abs(right)


def _milliseconds(found: object, name: str, right: float, slips: dict[str, float]) -> None:
    found = _number(found, name)
    if _near(found, right):
        return
    look = next(
        (what for what, slip in slips.items() if _near(found, slip)), "too many" if found > right else "too few"
    )
    look += "." * (look[-1] != "?")
    raise Wrong(f"{name}: {found:g} ms are {look} Bytes over bytes a second, and FLOPs over FLOPs a second.")


def _width(found: object, name: str, bytes_per_width: int) -> None:
    right = int(bytes_per_width * _RIDGE / 24)
    if type(found) is not int and _number(found, name):
        raise Wrong(f"{name}: expected a whole number (int), found the float {found!r}; a width is one.")
    if _number(found, name) == right:
        return
    look = {
        right - 1: "not free yet, by a little",
        right + 1: "free, and one less is, too: at equality nothing is waited for",
        2 * right: "twice as much as it should be",
        24 * right: "without the 24 FLOPs",
        int(_RIDGE): "FLOPs for a byte, the ridge itself; a width is asked for",
        int(_RIDGE / 24): "without the bytes that a token has for each unit of width",
        int(34 * _RIDGE / 24): "the width for all that a block saves; here only its input is sent",
        int(2 * _RIDGE / 24): "the width for inputs alone; here all is sent that a block saves",
        right // 2: "half of it; that is from where *backward* hides it",
        int(bytes_per_width * _RIDGE / 24 * 1e9 / GiB): "a GB of 2³⁰ bytes; it is 10⁹",
    }.get(found, "too wide" if found > right else "too narrow")
    raise Wrong(
        f"{name}: {found:,} is {look}. The card waits no longer when 24 · h² / (360 · 10¹²) reaches the link's."
    )
