"""What an optimizer keeps between steps, and what it makes inside one.

torch.optim has three implementations of the same update. The for-loop goes from parameter to parameter and holds the
temporaries of one or two; foreach runs each operation over all parameters at once, so AdamW's √v exists for all of
them; fused does everything in registers. CUDA tensors get foreach unless you ask otherwise, CPU tensors the for-loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from memlab.memory_arithmetic.ledger import Ledger, Piece, elements
from memlab.memory_arithmetic.shapes import added
from memlab.units import parse_bytes

OPTIMIZERS = ("sgd", "momentum", "adamw")
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
CHUNK_BYTES = {"gpu": 64 * 2**20, "cpu": 2 * 2**20}
"""Bytes of FP32 gradients that a step on master weights makes at once, unless told otherwise, by hardware.

Small chunks cost a GPU launches; large ones leave a CPU's caches before they are used.
"""


def states(optimizer: str, itemsize: int, *, master: bool = False) -> list[Piece]:
    """What the optimizer keeps a parameter, in elements of `itemsize` bytes, without AdamW's step counters.

    master: also an FP32 copy of the weights, which is what the update is computed on. Micikevicius et al. 2018.
    """
    piece = lambda name, source: Piece(name, "P", itemsize, "optimizer_state", source)  # noqa: E731
    found = {
        "sgd": [],
        "momentum": [piece("momentum buffer", "SGD with momentum: one running sum of gradients")],
        "adamw": [
            piece("first moment m", "Loshchilov and Hutter 2019, algorithm 2: exp_avg"),
            piece("second moment v", "Loshchilov and Hutter 2019, algorithm 2: exp_avg_sq"),
        ],
    }[optimizer]
    copy = piece("FP32 master weights", "Micikevicius et al. 2018, section 3.1")
    return [*([copy] if master else []), *found]


STEP_COUNTERS = Piece("step counters", "T", 4, "optimizer_state", "AdamW: one FP32 number for each parameter tensor")


def chunk_limit(chunk_bytes: int | str | None, hardware: str) -> float:
    """Of FP32 gradients, how many bytes may exist at once: "auto" is CHUNK_BYTES, None no limit, text such as "64 MiB".

    Raises TypeError or ValueError for what is none of these, and below 1.
    """
    if chunk_bytes in ("auto", None):
        return CHUNK_BYTES[hardware] if chunk_bytes == "auto" else math.inf
    try:
        limit = parse_bytes(chunk_bytes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"chunk_bytes: {error}; or pass 'auto', or None for no limit") from None
    if limit < 1:
        raise ValueError("expected chunk_bytes of at least 1, 'auto', or None for no limit; found 0")
    return limit


def chunks(counts: list[int], chunk_bytes: float) -> list[tuple[int, int]]:
    """The parameters chunk by chunk, as (first, one after last): as many as have chunk_bytes of FP32 gradients, or one.

    >>> chunks([10, 20, 5, 100, 1], chunk_bytes=140)
    [(0, 3), (3, 4), (4, 5)]
    """
    bounds, start, nbytes = [], 0, 0
    for i, count in enumerate(counts):
        if i > start and nbytes + 4 * count > chunk_bytes:
            bounds.append((start, i))
            start, nbytes = i, 0
        nbytes += 4 * count
    return [*bounds, (start, len(counts))]


def loop_temporaries(sizes: list[str], counts: list[int], itemsize: int) -> list[Piece]:
    """What AdamW's loop over these parameters holds at its fullest. sizes, counts: of each, as text and as a number.

    √v, and √v divided by the bias correction, at once; and still the latter of the previous parameter.
    """
    held = [(before + 2 * now, i) for i, (before, now) in enumerate(zip([0, *counts], counts, strict=False))]
    largest = max(held, key=lambda pair: pair[0])[1]
    root, divided = "√v of a parameter", "√v / √(1 − β₂ᵗ)"
    until = "the loop's variable holds it until the next division"
    return [
        *(Piece(f"{divided} of the parameter before", s, itemsize, "temporary", until) for s in sizes[:largest][-1:]),
        Piece(root, sizes[largest], itemsize, "temporary", "sqrt in AdamW's loop"),
        Piece(divided, sizes[largest], itemsize, "temporary", "the division after it"),
    ]


def play_step(
    ledger: Ledger,
    moment: str,
    sizes: list[str],
    optimizer: str,
    implementation: str,
    itemsize: int,
    *,
    chunk_bytes: float | None = None,
    made: Sequence[Piece] = (),
) -> None:
    """Look at the fullest instant of a step. sizes: every parameter tensor's, in order.

    chunk_bytes: of a step on master weights, which widens so many bytes of gradients to FP32 and steps, chunk by chunk;
    None: a step on everything. made: the states that the step makes, when it is the first.
    """
    counts = [elements(size, ledger.symbols) for size in sizes]
    so_far = [0, *accumulate(counts)]

    def size(start: int, stop: int) -> str:
        return "P" if stop - start == len(sizes) else added(sizes[start:stop])

    def pieces(start: int, stop: int) -> list[Piece]:
        """What a chunk's step holds at its fullest, beside the states so far."""
        found, whole = [], size(start, stop)
        if chunk_bytes is not None:
            why = "a step on master weights widens the gradients of one chunk at a time"
            found.append(Piece("FP32 gradients of a chunk", whole, 4, "temporary", why))
        if optimizer == "adamw" and implementation == "foreach":
            name = "√v of every parameter" if chunk_bytes is None else "√v of a chunk"
            found.append(Piece(name, whole, itemsize, "temporary", "foreach_sqrt makes the whole list"))
        if optimizer == "adamw" and implementation == "for-loop":
            found += loop_temporaries(sizes[start:stop], counts[start:stop], itemsize)
        return found

    def nbytes(start: int, stop: int) -> int:
        states = sum(piece.itemsize * {"P": so_far[stop], "T": stop}[piece.size] for piece in made)
        return states + sum(map(ledger.bytes_of, pieces(start, stop)))

    bounds = [(0, len(sizes))] if chunk_bytes is None else chunks(counts, chunk_bytes)
    start, stop = max(bounds, key=lambda chunk: nbytes(*chunk))
    all_until = {"P": size(0, stop), "T": "T" if stop == len(sizes) else str(stop)}
    held = [replace(piece, size=all_until[piece.size]) for piece in made] + pieces(start, stop)
    for piece in held:
        ledger.make(piece)
    ledger.look(moment, f"{optimizer} step")
    for piece in held:
        ledger.free(piece.name)
