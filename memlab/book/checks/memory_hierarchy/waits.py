"""Exercise 1 of chapter 03: a product's FLOPs a byte, and the rows from which on it does not wait for memory."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch

from memlab.book.checks.answers import Wrong, a_function, exercise, plain
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.memory_hierarchy import PUBLISHED, Op, OpCounter

_OF_SIZE = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_MOST_ROWS = 2**40  # a product that waits with so many waits with any number


def _counted(m: int, k: int, n: int, itemsize: int) -> Op:
    """The product as the library counts it; no element of it is ever made."""
    x, weight = (torch.empty(shape, dtype=_OF_SIZE[itemsize], device="meta") for shape in ((m, k), (k, n)))
    with OpCounter() as counter:
        torch.mm(x, weight)
    (op,) = counter.ops
    return op


# ---- first part

_PRODUCTS = (
    (64, 64, 64, 4),
    (1, 512, 512, 4),
    (8, 512, 2048, 2),
    (2048, 3, 5, 2),
    (1, 1, 1, 8),
    (7, 4096, 16, 2),
    (100, 30, 1000, 8),
    (8192, 8192, 8192, 2),
)


@exercise
def intensity(answer: object) -> str:
    """Exercise 1, first part: (m, k, n, itemsize) → FLOPs a byte of a product m × k by k × n."""
    function = a_function(answer, "intensity(m, k, n, itemsize)")
    for m, k, n, itemsize in _PRODUCTS:
        where, op = f"intensity({m}, {k}, {n}, {itemsize})", _counted(m, k, n, itemsize)
        with NoTensors():
            found = plain(function(m, k, n, itemsize))
        if type(found) not in (float, int):
            raise Wrong(f"{where}: expected FLOPs a byte, as a float; found {type(found).__name__} {str(found)[:40]}.")
        if math.isclose(found, op.intensity, rel_tol=1e-12):
            continue
        slips = {
            "as if elements had 4 bytes": op.intensity * itemsize / 4,
            "FLOPs an element; how large is one?": op.intensity * itemsize,
            "a multiply-add is two FLOPs": op.intensity / 2,
            "twice as much: four FLOPs a multiply-add, or elements of half the size": op.intensity * 2,
            "FLOPs, without the bytes": op.flops,
            "bytes, without the FLOPs": op.nbytes,
            "bytes a FLOP": 1 / op.intensity,
            "the result must be written as well": op.flops / (itemsize * (m * k + k * n)),
            "the result is written and not read": op.flops / (op.nbytes + itemsize * m * n),
            "that is the weight's bytes alone": op.flops / (itemsize * k * n),
            "FLOPs a bit": op.intensity / 8,
        }
        look = next((f": {what}" for what, slip in slips.items() if math.isclose(found, slip, rel_tol=1e-9)), "")
        raise Wrong(
            f"{where}: {op.flops:,} FLOPs and {op.nbytes:,} B, so {op.intensity:.6g} FLOPs a byte; you have "
            f"{found:.6g}{look}{'' if look.endswith('?') else '.'}"
        )
    return "As the library counts it, from 1 × 1 to 8,192 × 8,192."


# ---- second part


def _machine(card: str) -> tuple[int, int]:
    return int(PUBLISHED[card].half_flops_per_second), int(PUBLISHED[card].memory_bandwidth)


@functools.cache
def _asked() -> dict[str, tuple[int, int, int, int, int]]:
    """k, n, itemsize, FLOP/s and bytes/s."""
    return {
        "a layer of 4,096 × 4,096 in BF16 on an H100": (4096, 4096, 2, *_machine("H100-80GB")),
        "a layer of 1,024 × 4,096 in BF16 on an A100": (1024, 4096, 2, *_machine("A100-40GB")),
        "a head of 2,048 × 50,257 in BF16 on an H200": (2048, 50257, 2, *_machine("H200-141GB")),
        "a LoRA of rank 16 on an H100": (4096, 16, 2, *_machine("H100-80GB")),
        "64 × 64 in FP32 on a laptop": (64, 64, 4, 100 * 10**9, 20 * 10**9),
        "a product that meets the ridge": (256, 256, 2, 64 * 10**12, 10**12),
        "a product that comes as near to the ridge as you like": (256, 256, 2, 128 * 10**12, 10**12),
        "FP64 on a machine with fast memory": (128, 128, 8, 10**9, 100 * 10**9),
    }


@functools.cache
def _fewest(k: int, n: int, itemsize: int, flops_per_second: int, bytes_per_second: int) -> int | None:
    """By bisection over what is counted, in whole numbers."""
    waits = functools.partial(_waits, k, n, itemsize, flops_per_second, bytes_per_second)
    if waits(_MOST_ROWS):
        return None
    low, high = 0, _MOST_ROWS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high


def _waits(k: int, n: int, itemsize: int, flops_per_second: int, bytes_per_second: int, rows: int) -> bool:
    op = _counted(rows, k, n, itemsize)
    return op.flops * bytes_per_second < op.nbytes * flops_per_second


def _meets(k: int, n: int, itemsize: int, flops_per_second: int, bytes_per_second: int, rows: int) -> bool:
    op = _counted(rows, k, n, itemsize)
    return op.flops * bytes_per_second == op.nbytes * flops_per_second


def _look(found: int, sizes: tuple[int, int, int, int, int]) -> str:
    """What a number of rows looks like that was found by a well-known slip."""
    k, n, itemsize, flops_per_second, bytes_per_second = sizes
    ridge = Fraction(flops_per_second, bytes_per_second)

    def rows(flops: int, size: int, a_row: int) -> int | None:
        gain = flops * k * n - size * ridge * a_row
        return math.ceil(size * ridge * k * n / gain) if gain > 0 else None

    slips = {
        "A multiply and an add are two FLOPs.": rows(1, itemsize, k + n),
        "The ridge is in FLOPs a byte, not an element.": rows(2, 1, k + n),
        "Is the weight all that moves?": rows(2, itemsize, 0),
        "The result is written as well.": rows(2, itemsize, k),
        "The input is read as well.": rows(2, itemsize, n),
        f"As if elements had 2 bytes; here they have {itemsize}.": rows(2, 2, k + n),
    }
    return next((f" {what}" for what, slip in slips.items() if slip == found), "")


@exercise
def fewest_rows(answer: object) -> str:
    """Exercise 1, second part: (k, n, itemsize, FLOP/s, bytes/s) → the fewest rows that do not wait, or None."""
    named = "fewest_rows(k, n, itemsize, flops_per_second, bytes_per_second)"
    function = a_function(answer, named)
    for name, (k, n, itemsize, flops_per_second, bytes_per_second) in _asked().items():
        sizes = k, n, itemsize, flops_per_second, bytes_per_second
        right, ridge = _fewest(*sizes), flops_per_second / bytes_per_second
        where = f"{name} (k = {k:,}, n = {n:,}, {itemsize} B, ridge {ridge:.4g} FLOPs a byte)"
        with NoTensors():
            found = function(*sizes)
        if found is not None and type(found) is not int:
            raise Wrong(f"{where}: expected a whole number (int) or None, found {type(found).__name__} {found!r}.")
        if found == right:
            continue
        if found is None:
            raise Wrong(f"{where}: you say that every number of rows waits. {right:,} rows do not.")
        if found < 1:
            raise Wrong(f"{where}: {found} rows are no product; expected at least 1.")
        if found > _MOST_ROWS:
            raise Wrong(f"{where}: {found:,} rows? Does a product wait with fewer of them?")
        if right is None or found < right:
            look = ""
            if right is None:
                look = f" Nor do ten times as many reach it: {_counted(10 * found, k, n, itemsize).intensity:.6g}."
            raise Wrong(
                f"{where}: with {found:,} rows it has {_counted(found, k, n, itemsize).intensity:.6g} FLOPs a byte, "
                f"and so still waits.{_look(found, sizes) or look}"
            )
        look = " At the ridge itself, it does not wait." if found == right + 1 and _meets(*sizes, right) else ""
        raise Wrong(f"{where}: {found:,} rows do not wait, and neither do {found - 1:,}.{_look(found, sizes) or look}")
    return "A few hundred rows for a whole layer; for a thin one there are never enough."
