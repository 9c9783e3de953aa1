"""Exercise 4 of chapter 03: why tiled attention in BF16 holds more than half of what it holds in FP32."""

from __future__ import annotations

import functools

import torch

from memlab.book.checks.answers import Wrong, exercise, same_bytes
from memlab.memory_hierarchy import tiled_attention
from memlab.memory_hierarchy.attention import TILE_KEYS, TILE_QUERIES
from memlab.memory_timeline import Meter, Timeline

_HEADS, _KV_HEADS, _TOKENS, _HEAD_DIM, _VALUE_DIM = 8, 2, 1024, 64, 48


@functools.cache
def in_bf16() -> Timeline:
    """Exercise 4's timeline."""
    q = torch.zeros(1, _HEADS, _TOKENS, _HEAD_DIM, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, _KV_HEADS, _TOKENS, width, dtype=torch.bfloat16) for width in (_HEAD_DIM, _VALUE_DIM))
    with Meter(inputs=(q, k, v)) as meter:
        tiled_attention(q, k, v, causal=True)
    return meter.timeline


@functools.cache
def _parts() -> dict[str, int]:
    """The right answers, from the timeline."""
    timeline = in_bf16()
    made = [s for s in timeline.alive(timeline.peak_event) if s.category == "temporary"]
    wide = [s for s in made if s.dtype == "float32"]
    copies = {
        4 * _HEADS * TILE_QUERIES * _HEAD_DIM,
        4 * _KV_HEADS * TILE_KEYS * _HEAD_DIM,
        4 * _KV_HEADS * TILE_KEYS * _VALUE_DIM,
    }
    return {
        "scores": max(s.nbytes for s in wide),
        "copies": sum(s.nbytes for s in wide if s.nbytes in copies),
        "sums": sum(s.nbytes for s in wide if s.nbytes not in copies) - max(s.nbytes for s in wide),
        "mask": sum(s.nbytes for s in made if s.dtype == "bool"),
    }


@exercise
def unexplained(scores: object, copies: object, sums: object, mask: object) -> str:
    """Exercise 4: what tiled attention holds beside its result, whatever the dtype of its inputs, in bytes."""
    right, found = _parts(), {"scores": scores, "copies": copies, "sums": sums, "mask": mask}
    for name, hint in (
        ("scores", "There is one tile of them in every head, and it is the largest of what is held beside q and out."),
        ("copies", "A tile of q, one of k and one of v are copied into FP32. In how many heads each?"),
        ("sums", "For each query of a tile, in each head: a, which is as wide as a value, and some single numbers."),
        ("mask", "Which storage is neither BF16 nor FP32, and how large is one element of it?"),
    ):
        _mixed_up(found[name], name, right)
        same_bytes(found[name], right[name], f"{name}_bytes", hint, secret=True)
    return (
        "The result alone is half as large. Sums of BF16 would lose what is small, so whatever adds up is FP32 in "
        f"both; that is {sum(right.values()):,} B, and does not grow with the tokens."
    )


def _mixed_up(found: object, name: str, right: dict[str, int]) -> None:
    """Raise Wrong for figures that belong to something else."""
    if type(found) is not int:
        return
    result = 2 * _HEADS * _TOKENS * _VALUE_DIM
    q, k, v = (
        4 * heads * tile * width
        for heads, tile, width in (
            (_HEADS, TILE_QUERIES, _HEAD_DIM),
            (_KV_HEADS, TILE_KEYS, _HEAD_DIM),
            (_KV_HEADS, TILE_KEYS, _VALUE_DIM),
        )
    )
    a, numbers = 4 * _HEADS * TILE_QUERIES * _VALUE_DIM, 16 * _HEADS * TILE_QUERIES
    anywhere = {
        sum(right.values()): "the four together",
        sum(right.values()) // 2: "what is unexplained, all of it",
        result: "the result in BF16",
        2 * result: "the result in FP32",
        result + sum(right.values()): "all that is held in BF16",
    }
    slips = {
        "scores": {
            4 * TILE_QUERIES * TILE_KEYS: "the tile of one head; all heads go over it at once",
            right["scores"] // 4: "their number, or the bytes of 2 heads; there are 8, of 4 bytes a score",
            right["scores"] // 2: "half of them: in BF16, or what of them is unexplained. They are FP32 in both",
            4 * _HEADS * _TOKENS * _TOKENS: "T × T in FP32",
            2 * _HEADS * _TOKENS * _TOKENS: "T × T in BF16",
        },
        "copies": {
            q: "the copy of q's tile alone",
            k + v: "the copies of k's and v's tiles, without q's",
            q + 2 * k: "copies of values as wide as keys",
            q + 4 * (k + v): "copies of k and v in each of 8 heads, and k and v have 2",
            right["copies"] // 2: "half of them: in BF16, or what of them is unexplained. They are FP32 in both",
        },
        "sums": {
            a: "a alone; m, z and two more numbers a query are held beside it",
            numbers: "the single numbers alone, without a",
            a + numbers // 2: "a and two numbers a query; there are four",
            q + numbers: "an a as wide as a query; it adds up values",
            right["sums"] // 2: "half of them: in BF16, or what of them is unexplained. They are FP32 in both",
        },
        "mask": {
            _TOKENS * _TOKENS: "a mask of T × T; it is made tile by tile",
            _HEADS * right["mask"]: "a mask for each head; all heads share one",
        },
    }[name]
    slips = anywhere | {value: f"{other}_bytes" for other, value in right.items() if other != name} | slips
    if found != right[name] and found in slips:
        raise Wrong(f"{name}_bytes: {found:,} B are {slips[found]}.")
