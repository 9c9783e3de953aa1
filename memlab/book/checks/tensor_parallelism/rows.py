"""Exercise 2 of chapter 14: which rows of a stacked weight are whose, and a part that does not hold on to the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.memory_timeline import Meter
from memlab.tensor_parallelism import Cut

_LAYERS = [(4, 4, 8, 2), (12, 12, 64, 4), (8, 2, 16, 2), (32, 8, 128, 8), (8, 2, 16, 4), (32, 1, 128, 8), (6, 3, 5, 1)]


@exercise
def qkv_ranges(answer: object) -> str:
    """Exercise 2, first part: (rank, ranks, heads, kv_heads, head_size) → the rank's rows of q, of k and of v."""
    function = a_function(answer, "qkv_ranges(rank, ranks, heads, kv_heads, head_size)")
    for heads, kv_heads, head_size, ranks in _LAYERS:
        for rank in range(ranks):
            with NoTensors():
                found = function(rank, ranks, heads, kv_heads, head_size)
            _ranges(found, rank, ranks, heads, kv_heads, head_size)
    return "A cut of the stacked weight in one would give rank 0 of 4 queries only, and the last rank none."


def _ranges(found: object, rank: int, ranks: int, heads: int, kv_heads: int, head_size: int) -> None:
    where = f"qkv_ranges({rank}, {ranks}, {heads}, {kv_heads}, {head_size})"
    sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    rows = sum(sizes)
    pieces = [ranks, min(kv_heads, ranks), min(kv_heads, ranks)]
    right = Cut((rows, 1), 0, rank, ranks, tuple(zip(sizes, pieces, strict=True))).ranges()
    if not isinstance(found, (list, tuple)):
        raise Wrong(f"{where}: expected a list of pairs, found {kind_of(found)}.")
    for pair in found:
        if not isinstance(pair, (list, tuple)) or [type(n) for n in pair] != [int, int]:
            raise Wrong(f"{where}: expected pairs (begin, end) of two int, found {str(pair)[:60]}.")
    found = [tuple(pair) for pair in found]
    if found == right:
        return
    if found == [(rank * rows // ranks, (rank + 1) * rows // ranks)]:
        raise Wrong(
            f"{where}: that cuts the stacked weight in one. Then some ranks have queries only, and others keys and "
            "values; each needs the keys and values of its own queries."
        )
    if len(found) != 3:
        raise Wrong(f"{where}: expected three ranges, of q, of k and of v; found {len(found)}.")
    for name, mine, due in zip("qkv", found, right, strict=True):
        if mine == due:
            continue
        if not 0 <= mine[0] < mine[1] <= rows:
            raise Wrong(f"{where}: rows {mine[0]} to {mine[1]} of {name} are not there; the weight has {rows:,}.")
        if mine[1] - mine[0] != due[1] - due[0]:
            shared = " Several ranks share one key-value head here." if name != "q" and kv_heads < ranks else ""
            raise Wrong(
                f"{where}: of {name} expected {due[1] - due[0]} rows, found {mine[1] - mine[0]} ({mine[0]} to "
                f"{mine[1]}). A head has {head_size} rows.{shared}"
            )
        raise Wrong(
            f"{where}: of {name} there are as many rows as there should be, and they are not this rank's: "
            f"{mine[0]} to {mine[1]}. Where does {name} begin in the stacked weight, and how many ranks come before?"
        )


# ---- second part


class _Case:
    """A full tensor that nobody but the answer may hold on to, and a rank's cut of it."""

    def __init__(self, shape: tuple[int, int], cut: Cut, transposed: bool = False, dtype: torch.dtype = torch.float32):
        self.shape, self.cut, self.transposed, self.dtype = shape, cut, transposed, dtype

    def full(self) -> Tensor:
        numbers = torch.arange(self.shape[0] * self.shape[1], dtype=self.dtype)
        return numbers.view(self.shape[::-1]).t() if self.transposed else numbers.view(self.shape)

    def __str__(self) -> str:
        return f"a weight of {self.shape[0]} × {self.shape[1]}, dim {self.cut.dim}, ranges {self.cut.ranges()}"


def _cases() -> list[_Case]:
    even = lambda shape, dim, rank, ranks: _Case(shape, Cut(shape, dim, rank, ranks, ((shape[dim], ranks),)))  # noqa: E731
    qkv = (192, 64)
    return [
        even((128, 48), 0, 1, 4),
        even((128, 48), 1, 3, 4),
        _Case(qkv, Cut(qkv, 0, 2, 4, ((96, 4), (48, 4), (48, 4)))),
        _Case(qkv, Cut(qkv, 0, 2, 4, ((96, 4), (48, 4), (48, 4))), transposed=True),
        even((64, 40), 0, 0, 1),
        even((64, 40), 1, 0, 1),
        _Case(qkv, Cut(qkv, 0, 1, 4, ((96, 4), (48, 4), (48, 4))), dtype=torch.bfloat16),
    ]


@exercise
def part_of(answer: object) -> str:
    """Exercise 2, second part: (full, dim, ranges) → the ranges along dim, in a tensor that holds nothing else."""
    function = a_function(answer, "part_of(full, dim, ranges)")
    for case in _cases():
        _holds_its_part(function, case)
    return "A view is free, and holds the whole: whoever keeps one of 64 parts as a view keeps all 64."


def _holds_its_part(function, case: _Case) -> None:
    ranges, right = case.cut.ranges(), case.cut.part_of(case.full())
    with Meter(inputs=[right]) as meter:
        full = case.full()
        before, begin = meter.timeline.totals[-1], len(meter.timeline)
        part = function(full, case.cut.dim, ranges)
        peak = max(meter.timeline.totals[begin:]) - before
        if not isinstance(part, Tensor):
            raise Wrong(f"{case}: expected a tensor, found {kind_of(part)}.")
        if part.shape != right.shape:
            raise Wrong(f"{case}: expected a part of shape {tuple(right.shape)}, found {tuple(part.shape)}.")
        if part.dtype != right.dtype:
            raise Wrong(f"{case}: expected a part of the full weight's dtype, {right.dtype}, found {part.dtype}.")
        if not torch.equal(part, right):
            raise Wrong(f"{case}: the shape is right, and the values are not. Which pieces are it, and in which order?")
        if not torch.equal(full, case.full()):
            raise Wrong(f"{case}: the part is right, and the full weight has changed.")
        del full
        held = meter.timeline.totals[-1] - (before - case.full().nbytes)
    if (more := held - right.nbytes) > 0:
        look = " Is something kept? A view holds the whole storage; .contiguous() does not copy what is contiguous."
        raise Wrong(
            f"{case}: the values are right, and when the full weight is let go {more:,} B more are held than the "
            f"{right.nbytes:,} of the part.{look}"
        )
    if (more := peak - right.nbytes) > 0:
        raise Wrong(
            f"{case}: the part is right, and while it is made {more:,} B more than its {right.nbytes:,} are held. "
            "Narrowing is free; copy once."
        )
