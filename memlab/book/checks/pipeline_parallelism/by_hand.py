"""Exercise 1 of chapter 15: how many micro-batches a pipeline needs, what a stage holds of them, and what it sends."""

from __future__ import annotations

from memlab.book.checks.answers import Wrong, exercise, same_bytes
from memlab.pipeline_parallelism import bubble_share
from memlab.ranks import ring_bytes

_STAGES, _RANK, _BLOCKS, _MOST = 8, 2, 4, 0.1
_STREAM_BYTES = 2 * 4096 * 4096  # one micro-batch's rows of the model's width, in BF16


def _enough() -> int:
    return next(m for m in range(1, 1000) if bubble_share(_STAGES, m) <= _MOST)


@exercise
def bubble(micro_batches: object, saved: object, sent: object) -> str:
    """Exercise 1: micro-batches for a bubble of a tenth; bytes a rank holds of them under 1F1B; bytes it sends."""
    count = _enough()
    _count(micro_batches, count)
    each = _BLOCKS * _STREAM_BYTES
    right = (_STAGES - _RANK) * each
    slips = {
        each: "one micro-batch's; how many are in flight?",
        _STAGES * each: "what rank 0 holds; rank 2's first gradient comes back sooner",
        (_STAGES - _RANK - 1)
        * each: "of one micro-batch too few. Is the one counted whose backward is about to begin?",
        (_STAGES - _RANK + 1) * each: "of one micro-batch too many. Ranks are counted from 0",
        right
        // 2: "half of what it should be: 2 bytes in BF16; and the last stage holds one micro-batch, not the first",
        count * each: "GPipe's. 1F1B begins with backwards as soon as there are any",
        right // _BLOCKS: "of one block; a stage has four",
        right // _BLOCKS * 32: "of all 32 blocks; a stage has four",
    }
    hint = "Under 1F1B stage s of p holds min(p − s, m) micro-batches, each with the input of every block of the stage."
    _same(saved, right, "saved_bytes", slips, hint)
    right = 2 * count * _STREAM_BYTES
    slips = {
        right // 2: "half of what it should be: activations go one way, gradients the other, 2 bytes each in BF16",
        2 * right: "twice as much as it should be: what arrives is not sent",
        right // count: "one micro-batch's",
        right // count // 2: "one micro-batch's activations",
        _BLOCKS * right: "as if each block's output were sent; between blocks of one stage nothing is",
        _STAGES * right: "as if all ranks sent as much, and all of them together were asked for",
    }
    hint = "For each micro-batch a stage in the middle sends its output onwards, and its input's gradient back."
    _same(sent, right, "sent_bytes", slips, hint)
    blocks = 4 * ring_bytes("all_reduce", _STREAM_BYTES, _STAGES) * _STAGES * _BLOCKS * count
    return (
        f"Tensor parallelism of these 32 blocks on 8 ranks would have each send {blocks // right} times as much. So "
        "pipelines go between machines, and tensor parallelism stays within one."
    )


def _count(found: object, right: int) -> None:
    if type(found) is float and found.is_integer():
        raise Wrong(f"micro_batches: expected an int, found the float {found!r}; nobody computes half a micro-batch.")
    if type(found) is not int:
        raise Wrong(f"micro_batches: expected a whole number (int), found {type(found).__name__}.")
    if found == 0:
        raise Wrong("there is no answer yet: micro_batches is 0.")
    if found == right + _STAGES - 1:
        raise Wrong(
            f"micro_batches: with {found} the bubble is a tenth of the time in which a rank computes. A tenth of the "
            "whole step was asked for, and the bubble is a part of that."
        )
    if found < 1:
        raise Wrong(f"micro_batches: expected at least 1, found {found}.")
    if found < right:
        share = f"{bubble_share(_STAGES, found):.1%}"
        raise Wrong(f"micro_batches: {found} are too few; the bubble would be {share} of the step.")
    if found > right:
        raise Wrong(f"micro_batches: {found} do, and fewer do as well. The share is (p − 1) / (m + p − 1).")


def _same(found: object, right: int, name: str, slips: dict[int, str], hint: str) -> None:
    if type(found) is int and found != right and found in slips:
        raise Wrong(f"{name}: {found:,} B are {slips[found]}{'.' * (slips[found][-1] != '?')}")
    same_bytes(found, right, name, hint, secret=True)
