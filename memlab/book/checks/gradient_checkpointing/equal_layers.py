"""Exercise 1 of chapter 08: bytes of a chain cut into equal segments, and how many segments hold the least."""

from __future__ import annotations

import math

from memlab.book.checks.answers import Wrong, a_function, exercise, whole_bytes
from memlab.book.checks.memory_arithmetic.sizes import NoTensors
from memlab.units import KiB, MiB, format_bytes

_CHAINS = {  # layers, saved_bytes, input_bytes
    "ten small layers": (10, 1000, 100),
    "one layer": (1, 300, 100),
    "two layers": (2, 300, 100),
    "a GPT's blocks": (24, 17 * 32 * MiB, 32 * MiB),
    "a deep GPT's blocks": (96, 17 * 4 * MiB, 4 * MiB),
    "a narrow input": (40, 800, 7),
    "sizes that divide nothing": (53, 9973, 1009),
    "a layer saves its input alone": (16, 4096, 4096),
    "one more layer than a square": (26, 512, 512),
}


def _held(layers: int, k: int, saved: int, inputs: int) -> int:
    """The worst moment, looked for segment by segment."""
    sizes = [layers // k + (i < layers % k) for i in range(k)]
    return max(before * inputs + size * saved for before, size in enumerate(sizes))


@exercise
def held_bytes(answer: object) -> str:
    """Exercise 1, first part: (layers, segments, saved_bytes, input_bytes) → the most bytes that backward finds."""
    function = a_function(answer, "held_bytes(layers, segments, saved_bytes, input_bytes)")
    for name, (layers, saved, inputs) in _CHAINS.items():
        for k in sorted({1, 2, 3, 4, 7, layers // 2, layers - 1, layers} & set(range(1, layers + 1))):
            where = f"{name}: held_bytes({layers}, {k}, {saved:,}, {inputs:,})"
            with NoTensors():
                found = whole_bytes(function(layers, k, saved, inputs), where)
            right, longest = _held(layers, k, saved, inputs), -(-layers // k)
            if found == right:
                continue
            even = layers % k == 0
            slips = {
                "all layers' bytes, as if nothing were forgotten": layers * saved,
                "an input too many: the segment that is computed again has its own among what it saves": right + inputs,
                "without the inputs that wait": longest * saved,
                "the inputs alone": k * inputs,
                "as if each segment kept what its layers save": k * saved + longest * inputs,
                "one layer beside the inputs; the whole segment is computed again": (k - 1) * inputs + saved,
                "in the shorter segments; some have a layer more": (k - 1) * inputs + layers // k * saved,
                "the longest segment with the inputs before the last; the longer ones come first": (k - 1) * inputs
                + longest * saved,
                "a quarter": right // 4,
                "in KiB": right // KiB,
            }
            if even:
                slips.pop("in the shorter segments; some have a layer more")
            look = next((f" That is {what}." for what, slip in slips.items() if slip == found), "")
            many = "too many" if found > right else "too few"
            raise Wrong(f"{where} is {right:,} B, you have {found:,} B, {abs(found - right):,} {many}.{look}")
    return "To the byte, whether the segments are of one size or not."


@exercise
def best_segments(answer: object) -> str:
    """Exercise 1, second part: (layers, saved_bytes, input_bytes) → how many segments hold the least."""
    function = a_function(answer, "best_segments(layers, saved_bytes, input_bytes)")
    for name, (layers, saved, inputs) in _CHAINS.items():
        where = f"{name}: best_segments({layers}, {saved:,}, {inputs:,})"
        with NoTensors():
            found = function(layers, saved, inputs)
        if type(found) is not int:
            raise Wrong(
                f"{where}: expected a number of segments (int), found {type(found).__name__} {str(found)[:40]}."
            )
        if not 1 <= found <= layers:
            raise Wrong(f"{where}: {layers} layers can't be cut into {found} segments; at least 1, at most {layers}.")
        held = [_held(layers, k, saved, inputs) for k in range(1, layers + 1)]
        if found == 1 + held.index(min(held)):
            continue
        best, minimum = 1 + held.index(min(held)), (layers * saved / inputs) ** 0.5
        mine = held[found - 1]
        if mine == min(held):
            raise Wrong(f"{where}: {found} segments hold as little as {best}; of several, return the fewest.")
        look = ""
        if found == round(math.sqrt(layers)) != best:
            look = " √layers is the minimum where a layer saves nothing beside its input."
        elif found == layers:
            look = " More inputs wait than what is computed again gets shorter."
        elif abs(found - minimum) <= 1:
            look = f" √(layers · saved / input) = {minimum:.2f} is near the minimum; layers can't be cut in two."
        raise Wrong(
            f"{where}: k = {found} holds {mine:,} B at the worst moment, k = {best} holds {min(held):,} B.{look}"
        )
    layers, saved, inputs = _CHAINS["a GPT's blocks"]
    few = format_bytes(_held(layers, round(math.sqrt(layers)), saved, inputs))
    least = format_bytes(_held(layers, function(layers, saved, inputs), saved, inputs))
    return f"{layers} of a GPT's blocks hold {few} in √{layers} segments, and {least} in yours."
