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

VECTOR = 16
"""Elements that a processor's instruction takes at once, at most. A flat group's parameters consist of such vectors."""

TABLE_ROW = 64
"""Bytes a parameter tensor by which a kernel that steps many of them finds one: eight numbers of int64."""

MASTERS = "FP32 master weights"


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
    copy = piece(MASTERS, "Micikevicius et al. 2018, section 3.1")
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
    """The parameters chunk by chunk, as (first, one after last): as many as have chunk_bytes of FP32 gradients, or one,
    which is stepped in slices, if it is larger (`slice_elements`).

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


def slice_elements(count: int, chunk_bytes: float) -> int:
    """Of a parameter's elements, how many an elementwise optimizer steps at once: all, if they fit in a chunk.

    Else slices as equal as can be, in whole vectors: the last may be shorter, and end within one.

    >>> [slice_elements(count, chunk_bytes=4 * 64) for count in (64, 80, 81, 150)]
    [64, 48, 48, 64]
    """
    if 4 * count <= chunk_bytes:
        return count
    vectors, most = -(-count // VECTOR), max(1, int(chunk_bytes // (4 * VECTOR)))
    return min(count, VECTOR * -(-vectors // -(-vectors // most)))


def lanes(counts: list[int]) -> list[list[int]]:
    """A chunk's parameters as the optimizer sees them: a flat group of those that fill whole vectors, and each other.

    >>> lanes([32, 5, 16])
    [[0, 2], [1]]
    """
    flat = [i for i, count in enumerate(counts) if count % VECTOR == 0]
    if len(flat) < 2:
        return [[i] for i in range(len(counts))]
    return [flat, *([i] for i, count in enumerate(counts) if count % VECTOR)]


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
    table_row: int | None = None,
    made: Sequence[Piece] = (),
) -> None:
    """Look at the fullest instant of a step. sizes: every parameter tensor's, in order.

    chunk_bytes: of a step on master weights, which widens so many bytes of gradients to FP32 and steps, chunk by chunk,
    in one block that is as large as the largest chunk, with a flat group in each, and slice by slice, where a parameter
    is larger; inf is one such chunk without it, None a step on everything. table_row: of a step by one kernel, which
    widens none, how many bytes on the device tell it where a parameter is; None for any other. made: the states that
    the step makes, when it is the first.
    """
    counts = [elements(size, ledger.symbols) for size in sizes]
    so_far = [0, *accumulate(counts)]
    if table_row is not None:
        chunk_bytes = None
    bounds = [(0, len(sizes))] if chunk_bytes is None else chunks(counts, chunk_bytes)

    def slice_of(start: int, stop: int) -> int | None:
        """How many elements of a chunk are stepped at once, if it is one parameter that is larger."""
        each = counts[start] if chunk_bytes is None else slice_elements(counts[start], chunk_bytes)
        return each if stop - start == 1 and each < counts[start] else None

    def size(start: int, stop: int) -> str:
        return "P" if stop - start == len(sizes) else added(sizes[start:stop])

    def widened(start: int, stop: int) -> int:
        return slice_of(start, stop) or so_far[stop] - so_far[start]

    largest = max(bounds, key=lambda chunk: widened(*chunk))
    block = str(widened(*largest)) if slice_of(*largest) else size(*largest)

    def seen(start: int, stop: int) -> list[list[int]]:
        if chunk_bytes in (None, math.inf):
            return [[i] for i in range(start, stop)]
        return [[start + i for i in lane] for lane in lanes(counts[start:stop])]

    def temporaries(whole: str, texts: list[str], counts: list[int]) -> list[Piece]:
        """Of a step on tensors of these sizes, and of this one all together."""
        if optimizer == "adamw" and implementation == "foreach":
            name = "√v of every parameter" if chunk_bytes is None else "√v of a chunk"
            return [Piece(name, whole, itemsize, "temporary", "foreach_sqrt makes the whole list")]
        if optimizer == "adamw" and implementation == "for-loop":
            return loop_temporaries(texts, counts, itemsize)
        return []

    def in_chunk(start: int, stop: int) -> list[list[Piece]]:
        """What a chunk's step holds beside the states so far, at the instants that may be its fullest."""
        found = []
        if table_row:
            found.append(Piece("addresses", "T", table_row, "temporary", "by which the kernel finds each parameter"))
        if chunk_bytes is not None:
            why = "a step on master weights widens the gradients of one chunk at a time"
            found.append(Piece("FP32 gradients of a chunk", block, 4, "temporary", why))
        each = slice_of(start, stop)
        if each is None:
            its = seen(start, stop)
            texts = [sizes[lane[0]] if len(lane) == 1 else added([sizes[i] for i in lane]) for lane in its]
            return [found + temporaries(size(start, stop), texts, [sum(counts[i] for i in lane) for lane in its])]
        counter = []
        if STEP_COUNTERS in made or STEP_COUNTERS.name in ledger.held:
            why = "each slice of a parameter counts from the same number"
            counter.append(Piece("step counter of a slice", "1", STEP_COUNTERS.itemsize, "temporary", why))
        if not made:
            return [found + counter + temporaries(str(each), [str(each)], [each])]
        # the first slice's states go into whole ones, one after the other; the second's are made beside those
        kept = [piece for piece in made if piece.size == "P" and piece.name != MASTERS]
        of_a_slice = lambda pieces, count: [  # noqa: E731
            Piece(f"{p.name} of a slice", str(count), p.itemsize, "temporary", "made by its first step") for p in pieces
        ]
        second = min(each, counts[start] - each)
        return [
            found + of_a_slice(kept[-1:], each),
            found + counter + of_a_slice(kept, second) + temporaries(str(second), [str(second)], [second]),
        ]

    def counters(start: int, stop: int) -> int:
        # until its step is over a flat group has one; without temporaries the fullest instant comes after that
        return stop if implementation == "fused" else start + len(seen(start, stop))

    def nbytes(start: int, stop: int, pieces: list[Piece]) -> int:
        states = sum(p.itemsize * {"P": so_far[stop], "T": counters(start, stop)}[p.size] for p in made)
        return states + sum(map(ledger.bytes_of, pieces))

    instants = [(*chunk, pieces) for chunk in bounds for pieces in in_chunk(*chunk)]
    start, stop, pieces = max(instants, key=lambda instant: nbytes(*instant))
    all_until = {"P": size(0, stop), "T": "T" if (T := counters(start, stop)) == len(sizes) else str(T)}
    held = [replace(piece, size=all_until[piece.size]) for piece in made] + pieces
    for piece in held:
        ledger.make(piece)
    ledger.look(moment, f"{optimizer} step")
    for piece in held:
        ledger.free(piece.name)
