"""Exercise 3 of chapter 15: two ranks that wait for each other, mended by receiving sooner on one of them."""

from __future__ import annotations

from memlab.book.checks.answers import Wrong, exercise
from memlab.book.checks.pipeline_parallelism.orders import words
from memlab.pipeline_parallelism import Action, Schedule, check_schedule

# ---- as in the notebook

_MICRO_BATCHES, _MOST_GRADIENTS = 4, 2
_RANK_0 = "F0 >F0 F1 >F1 F2 >F2 F3 >F3 <B0 B0 <B1 B1 <B2 B2 <B3 B3"
_RANK_1 = "<F0 F0 B0 >B0 <F1 F1 B1 >B1 <F2 F2 B2 >B2 <F3 F3 B3 >B3"
_KINDS = {
    "F": "forward",
    "B": "backward",
    ">F": "send activation",
    "<F": "receive activation",
    ">B": "send gradient",
    "<B": "receive gradient",
}


@exercise
def mended(answer: object) -> str:
    """Exercise 3: rank 0's line, with the same computations in the same order, so that both ranks come to their end."""
    if answer == "":
        raise Wrong("there is no answer yet: mended is empty.")
    turns, broken = (words(text, "mended", r"[<>]?[FB]\d+") for text in (answer, _RANK_0))
    for kind, i in turns:
        if (kind, i) not in broken:
            raise Wrong(
                f"mended: rank 0 has no {kind}{i}; it sends what its forwards make, and receives for its backwards."
            )
    for kind, i in broken:
        if (count := turns.count((kind, i))) != 1:
            raise Wrong(f"mended: expected {kind}{i} once, found it {count} times.")
    computed = [turn for turn in turns if turn[0] in "FB"]
    if computed != [turn for turn in broken if turn[0] in "FB"]:
        raise Wrong(
            f"mended: rank 0 computes {' '.join(f'{kind}{i}' for kind, i in computed)}. The computations keep their "
            "order, first all forwards; it is messages that move."
        )
    lines = [turns, words(_RANK_1, "rank 1", r"[<>]?[FB]\d+")]
    actions = tuple(tuple(Action(_KINDS[kind], stage, i) for kind, i in line) for stage, line in enumerate(lines))
    try:
        check_schedule(Schedule("mended", _MICRO_BATCHES, (0, 1), actions))
    except ValueError as error:
        raise Wrong(f"mended: check_schedule refuses it: {str(error)[:400]}.") from None
    if (waiting := _gradients(turns)) > _MOST_GRADIENTS:
        raise Wrong(
            f"mended: it ends, and {waiting} gradients are held at once on rank 0, which needs one at a time; "
            f"{_MOST_GRADIENTS} are enough. Begin to receive no sooner than it takes."
        )
    return "And rank 0 still holds all four micro-batches' activations, as GPipe does: what was mended is the waiting."


def _gradients(turns: list[tuple[str, int]]) -> int:
    """How many gradients are held at most: from the moment a receive begins until backward has used it."""
    held = most = 0
    for kind, _ in turns:
        held += {"<B": 1, "B": -1}.get(kind, 0)
        most = max(most, held)
    return most
