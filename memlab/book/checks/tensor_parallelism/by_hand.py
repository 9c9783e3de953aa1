"""Exercise 1 of chapter 14: what a rank holds of a block, what it sends, and how fast a link that takes."""

from __future__ import annotations

from memlab.book.checks.answers import Wrong, exercise, same_bytes
from memlab.ranks import ring_bytes

_WIDTH, _ROWS, _RANKS, _RATE = 4096, 8192, 8, 360 * 10**12
_CUT = 12 * _WIDTH**2 + 7 * _WIDTH  # four weights; biases of the two column parallel layers
_WHOLE = 6 * _WIDTH  # biases of the two row parallel layers; two norms
_STREAM_BYTES = 2 * _ROWS * _WIDTH


@exercise
def block(parameter: object, sent: object, link: object) -> str:
    """Exercise 1: bytes of parameters on a rank, bytes it sends in a step, and bytes a second for it to keep up."""
    right = 2 * (_CUT // _RANKS + _WHOLE)
    slips = {
        2 * (_CUT + _WHOLE): "those of the whole block",
        2 * (_CUT + _WHOLE) // _RANKS: "an eighth of all; some parameters every rank holds whole",
        2 * _CUT // _RANKS: "the parts alone, without what every rank holds whole",
        2 * (12 * _WIDTH**2 // _RANKS + 13 * _WIDTH): "with all biases whole; that of a column parallel layer belongs "
        "to its outputs, and is cut with them",
        2 * ((_CUT + 2 * _WIDTH) // _RANKS + 4 * _WIDTH): "with the biases of row parallel layers cut; those are added "
        "to a sum that every rank has whole",
        2 * 12 * _WIDTH**2 // _RANKS: "those of the weights; there are biases and norms, too",
        2 * (12 * _WIDTH**2 // _RANKS + 4 * _WIDTH): "without biases",
        2 * (_CUT // _RANKS + 2 * _WIDTH): "without the norms",
        right // 2: "numbers, not bytes, or half of what it should be",
    }
    hint = "Weights and biases of the layers before the split middle, those behind it, norms: which of them are cut?"
    _same(parameter, right, "parameter_bytes", slips, hint)
    right = 4 * ring_bytes("all_reduce", _STREAM_BYTES, _RANKS)
    slips = {
        right // 2: "half of what it should be. Backward has its sums as well, and an all-reduce is two collectives "
        "of n · (N − 1)/N each",
        right // 4: "one all-reduce's: how many are there, in forward and in backward?",
        8 * _STREAM_BYTES: "as if a rank sent a piece to itself",
        4 * _STREAM_BYTES: "four times the stream; what does an all-reduce of n bytes send?",
        right * _RANKS: "those of all ranks together",
        2 * right: "twice as much as it should be: 2 bytes in BF16, one sum at the end of each half, one at its "
        "beginning in backward",
        3 * right // 2: "of six all-reduces",
    }
    hint = "Each half of a block has one all-reduce in forward and one in backward. Of which tensor?"
    _same(sent, right, "sent_bytes", slips, hint)
    seconds = 6 * 12 * _WIDTH**2 * _ROWS // _RANKS, _RATE
    right = right * seconds[1] // seconds[0]
    slips = {
        right // _RANKS: "as if one rank computed the whole block; each computes an eighth of it",
        3 * right: "as if only forward were computed, 2 FLOP a weight and row, while all of it is sent",
        right * 8: "bits a second",
        right // 10**9: "GB, not bytes, a second",
    }
    hint = "FLOP of a rank: 6 · its 12 · width² / N weights · rows. Bytes sent, divided by the seconds they take."
    _same(link, right, "link_bytes_per_second", slips, hint)
    return (
        "NVLink's 450 GB/s can do that, PCI Express 5.0's 63 GB/s cannot: so these ranks are in one machine. The batch "
        "cancels out; what helps is a wider model, or fewer ranks."
    )


def _same(found: object, right: int, name: str, slips: dict[int, str], hint: str) -> None:
    if type(found) is int and found != right and found in slips:
        raise Wrong(f"{name}: {found:,} is {slips[found]}{'.' * (slips[found][-1] != '?')}")
    same_bytes(found, right, name, hint, secret=True)
