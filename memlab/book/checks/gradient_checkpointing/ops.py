"""Exercise 6 of chapter 08: which ops' results to forget, where only so many FLOPs may be done again."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.memory_arithmetic.sizes import NoTensors

Op = tuple[str, int, int]  # name, bytes of what it makes, FLOPs


def block_ops(batch: int, tokens: int, width: int, heads: int) -> list[Op]:
    """The ops of a GPT's block with attention by hand, in FP32."""
    rows, scores = batch * tokens, batch * heads * tokens**2
    return [
        ("norm1", 4 * rows * width, 7 * rows * width),
        ("qkv", 12 * rows * width, 6 * rows * width**2),
        ("scores", 4 * scores, 2 * scores * width // heads),
        ("mask", 4 * scores, scores),
        ("softmax", 4 * scores, 5 * scores),
        ("mixed", 4 * rows * width, 2 * scores * width // heads),
        ("out", 4 * rows * width, 2 * rows * width**2),
        ("norm2", 4 * rows * width, 7 * rows * width),
        ("up", 16 * rows * width, 8 * rows * width**2),
        ("gelu", 16 * rows * width, 40 * rows * width),
        ("down", 4 * rows * width, 8 * rows * width**2),
    ]


def _random(seed: int) -> list[Op]:
    draw = random.Random(seed)
    return [(f"op {i}", draw.randint(1, 60) * 512, draw.randint(0, 90)) for i in range(10)]


@functools.cache
def _tasks() -> dict[str, tuple[list[Op], list[int]]]:
    wide, long = block_ops(8, 64, 256, 4), block_ops(1, 1024, 64, 4)
    greedy = [("a", 600, 51), ("b", 500, 50), ("c", 500, 50), ("d", 10, 1)]
    tasks = {
        "a wide block": wide,
        "a block of long texts": long,
        "four ops, of which the best by FLOP leaves no room for two that are better together": greedy,
        "a large one and two small ones": [("a", 90, 10), ("b", 1000, 100), ("c", 50, 20)],
        "some cost nothing": [("a", 100, 0), ("b", 300, 7), ("c", 200, 0), ("d", 100, 5)],
        "two of one name": [("exp", 100, 10), ("exp", 300, 10), ("exp", 200, 10)],
        "one op": [("a", 100, 10)],
        "no op": [],
    } | {f"ten random ops (seed {seed})": _random(seed) for seed in range(6)}
    asked = {}
    for name, ops in tasks.items():
        all_flops = sum(flops for *_, flops in ops)
        least = min((flops for *_, flops in ops), default=0)
        budgets = {
            0,
            least,
            all_flops // 100,
            all_flops // 10,
            all_flops // 3,
            all_flops // 2,
            all_flops - 1,
            all_flops,
        }
        asked[name] = ops, sorted(budget for budget in budgets if budget >= 0)
    asked["four ops, of which the best by FLOP leaves no room for two that are better together"][1].append(100)
    asked["a large one and two small ones"][1].append(100)
    return asked


def _best(ops: Sequence[Op], budget: int) -> list[int]:
    """The best choice, by trying all."""
    chosen, most = [], 0
    for mask in itertools.product((False, True), repeat=len(ops)):
        if sum(op[2] for op in itertools.compress(ops, mask)) <= budget:
            nbytes = sum(op[1] for op in itertools.compress(ops, mask))
            if nbytes > most:
                chosen, most = list(itertools.compress(range(len(ops)), mask)), nbytes
    return chosen


@functools.cache
def _right() -> dict[tuple[str, int], list[int]]:
    return {(name, budget): _best(ops, budget) for name, (ops, budgets) in _tasks().items() for budget in budgets}


@exercise
def compute_again(answer: object) -> str:
    """Exercise 6: (ops, budget_flops) → indices of the ops to compute again, which free the most bytes."""
    function = a_function(answer, "compute_again(ops, budget_flops)")
    for (name, budget), right in _right().items():
        ops = _tasks()[name][0]
        where, given = f"{name}, budget_flops = {budget:,}", list(ops)
        with NoTensors():
            found = function(given, budget)
        if given != ops:
            raise Wrong(f"{where}: your function has changed the list of ops that it was given.")
        if not isinstance(found, (list, tuple, set, frozenset)) or any(type(i) is not int for i in found):
            raise Wrong(f"{where}: expected a list of indices (int) into ops, found {str(found)[:60]}.")
        if len(set(found)) < len(found) or not set(found) <= set(range(len(ops))):
            raise Wrong(f"{where}: expected each index at most once, from 0 to {len(ops) - 1}; found {sorted(found)}.")
        flops, nbytes = (sum(ops[i][n] for i in found) for n in (2, 1))
        most = sum(ops[i][1] for i in right)
        if flops > budget:
            kept = [i for i in range(len(ops)) if i not in found]
            look = " Are these the ops to keep?" if sum(ops[i][2] for i in kept) <= budget else ""
            raise Wrong(
                f"{where}: with {_names(ops, found)} {flops:,} FLOPs are done again, {flops - budget:,} too many.{look}"
            )
        if nbytes < most:
            raise Wrong(
                f"{where}: with {_names(ops, found)} {nbytes:,} B are free, with {_names(ops, right)} {most:,} B, for "
                f"{sum(ops[i][2] for i in right):,} FLOPs. {_look(ops, budget, nbytes)}"
            )
    ops = block_ops(1, 1024, 64, 4)
    all_bytes, all_flops = (sum(op[n] for op in ops) for n in (1, 2))
    freed = sum(ops[i][1] for i in function(list(ops), all_flops // 10))
    return f"Long texts: {freed / all_bytes:.0%} of the bytes for a tenth of the FLOPs. Wide blocks give less."


def _names(ops: Sequence[Op], indices: Sequence[int]) -> str:
    named = [ops[i][0] for i in sorted(indices)]
    return ", ".join(named) if named else "no ops"


def _greedy(ops: Sequence[Op], budget: int, key) -> int:
    """The bytes that one op after the other frees, in an order, each that still fits."""
    freed = 0
    for _, nbytes, flops in sorted(ops, key=key):
        if flops <= budget:
            freed, budget = freed + nbytes, budget - flops
    return freed


def _look(ops: Sequence[Op], budget: int, nbytes: int) -> str:
    """How a choice that is not the best may have come about."""
    for key, what in (
        (lambda op: -op[1] / max(op[2], 1e-9), "the most bytes per FLOP first"),
        (lambda op: -op[1], "the largest first"),
        (lambda op: op[2], "the cheapest first"),
    ):
        if nbytes == _greedy(ops, budget, key):
            return f"Yours are what you get if you take {what}; what is taken first can keep others out."
    if budget == 0 or any(flops == 0 for *_, flops in ops):
        return "What costs nothing fits into any budget."
    return "Are there choices that you have not tried?"
