"""Exercise 1 of chapter 13: what a rank holds in ZeRO's stages, what it sends, and how many ranks a card needs."""

from __future__ import annotations

from memlab.book.checks.answers import Wrong, exercise, same_bytes
from memlab.units import GiB

_PARAMETERS, _RANKS, _FREE = 3_000_000_000, 16, 14 * GiB
_FEWEST = -(-12 * _PARAMETERS // (_FREE - 4 * _PARAMETERS))


def _held(stage: int, ranks: int = _RANKS) -> int:
    """Bytes of weights (2), gradients (2) and states (12 a parameter) on a rank."""
    apart = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return (16 - apart) * _PARAMETERS + apart * _PARAMETERS // ranks


@exercise
def held(stage_1: object, stage_2: object, stage_3: object, sent: object, fewest: object) -> str:
    """Exercise 1: bytes on a rank in stages 1 to 3, bytes it sends in a step of stage 3, and the fewest ranks."""
    for stage, found in ((1, stage_1), (2, stage_2), (3, stage_3)):
        _stage(found, stage)
    _sent(sent)
    _ranks(fewest)
    return (
        f"Without ZeRO each of the 16 ranks holds {_held(0):,} B, and 6 bytes a parameter go where 4 would: stage 3 "
        "sends half as much again."
    )


def _stage(found: object, stage: int) -> None:
    name = f"stage_{stage}_bytes"
    slips = {_held(other): f"those of stage {other}" for other in range(4)}
    slips[_held(0) // _RANKS] = "a sixteenth of all; in this stage not all is cut"
    slips |= {
        (16 - apart) * _PARAMETERS: "without the rank's own piece of what is cut" for apart in (12, 14) if stage < 3
    }
    slips[apart * _PARAMETERS // _RANKS if (apart := {1: 12, 2: 14, 3: 16}[stage]) < 16 else 0] = (
        "the piece alone, without what every rank holds whole"
    )
    slips[_held(stage) * _RANKS] = "those of all ranks together"
    if stage == 2:
        slips[2 * _PARAMETERS + 2 * _PARAMETERS // _RANKS + 12 * _PARAMETERS] = "with gradients cut, and states not"
    slips.pop(_held(stage), None)
    slips.pop(0, None)
    if type(found) is int and found in slips:
        raise Wrong(f"{name}: {found:,} B are {slips[found]}.")
    hint = "Weights 2, gradients 2, states 12 bytes a parameter: which of them does this stage cut into 16 pieces?"
    same_bytes(found, _held(stage), name, hint, secret=True)


def _sent(found: object) -> None:
    right = 6 * _PARAMETERS * (_RANKS - 1) // _RANKS
    slips = {
        6 * _PARAMETERS: "as if a rank sent its own last piece to itself",
        4 * _PARAMETERS * (_RANKS - 1) // _RANKS: "an all-reduce's, as in stages 0 to 2; in stage 3 each unit is "
        "gathered for forward and once more for backward",
        2 * _PARAMETERS * (_RANKS - 1) // _RANKS: "one collective's; there are three",
        8 * _PARAMETERS * (_RANKS - 1) // _RANKS: "four collectives'; the gradients are scattered and stay apart",
        12 * _PARAMETERS * (_RANKS - 1) // _RANKS: "as if BF16 had 4 bytes, or twice as much as it should be",
        6 * _PARAMETERS * (_RANKS - 1): "those of all ranks together",
        6 * _PARAMETERS // _RANKS: "one piece of each; a rank passes on 15",
        3 * _PARAMETERS * (_RANKS - 1) // _RANKS: "half of what it should be: elements of 2 bytes, not bytes?",
    }
    if type(found) is int and found in slips:
        raise Wrong(f"sent_bytes: {found:,} B are {slips[found]}.")
    hint = "Each collective of n bytes has a rank send n · (N − 1)/N. How many run in a step, and on what?"
    same_bytes(found, right, "sent_bytes", hint, secret=True)


def _ranks(found: object) -> None:
    if type(found) is not int:
        kind = type(found).__name__
        raise Wrong(f"fewest_ranks: expected a whole number (int), found {kind} {str(found)[:40]}.")
    if found == 0:
        raise Wrong("there is no answer yet: fewest_ranks is 0.")
    if found == _FEWEST:
        return
    look = {
        _FEWEST - 1: "with which it does not fit, by a little",
        -(-12 * _PARAMETERS // (14 * 10**9 - 4 * _PARAMETERS)): "right for 14 GB; a GiB is 2³⁰ bytes",
        -(-16 * _PARAMETERS // _FREE): "right for stage 3; in stage 1 only states are cut",
        -(-14 * _PARAMETERS // (_FREE - 2 * _PARAMETERS)): "right for stage 2; in stage 1 only states are cut",
        -(-12 * _PARAMETERS // _FREE): "right if states were all that a rank holds",
    }.get(found, "more than need be" if found > _FEWEST else "too few to fit")
    raise Wrong(f"fewest_ranks: {found:,} is {look}. What is left of 14 GiB for the piece of the states?")
