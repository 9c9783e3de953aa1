"""Forward and backward of blocks that are checkpointed in segments: kept are the inputs, and the rest is made twice.

In forward a segment keeps its input, and what its blocks read besides: a Llama's tables of positions. When backward
comes to it, it is run again, and now all is saved; but no further than to the last op that saves anything, the Linear
or the dropout at the end of its last block. Backward then goes through it as through any blocks, with one difference:
what was computed again is held by the op alone that reads it, and is gone when the op's formula is, before a bias's
gradient is summed. Chen et al. 2016, section 4.

In forward a block's tensors live as long as Python's variables hold them. The last block is the fullest, so it alone is
played. In backward no block stands for others, since each holds other bytes than the one before it.

Autocast keeps its 16-bit copies of all weights until the forward ends, whatever is checkpointed. A segment that is run
again makes its own.

Not counted is the state of the random numbers that a checkpoint notes, 5,056 bytes of main memory for the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memlab.memory_arithmetic.ledger import Ledger, Op, Piece, Row, net
from memlab.memory_arithmetic.ops import STREAM, Setting, kept, of, passing
from memlab.memory_arithmetic.shapes import Transformer, added

RECOMPUTATION, SEGMENTS = "recomputation of a segment", "backward of a segment"
STREAM_IN, STREAM_OUT = "input of norm1", "input of norm"
HELD_UNTIL = {
    "output of norm1": "return",
    "q, k and v": "return",
    "v": "return",
    "rotated q": "return",
    "rotated k": "return",
    "BF16 copy of rotated q": "fused attention",
    "BF16 copy of rotated k": "fused attention",
    "scaled q": "weights · v",
    "FP32 v": "weights · v",
    "causal mask": "return",
    "weights": "return",
    "dropped weights": "weights · v",
    "BF16 copy of the weights": "weights · v",
    "BF16 copy of the dropped weights": "weights · v",
    "mixed values": "return",
    "input of norm2": "residual sum",
    "output of norm2": "return",
    "input of gelu": "gelu",
    "output of gelu": "return",
    "input of silu": "silu",
    "output of silu": "product with up",
    "output of up": "product with up",
    "gated": "feed_forward.down",
}
"""Where nothing is saved: the op until whose end a variable or a call holds a tensor. What is not here goes at once."""
FREED_AFTER = {
    "raw scores": ("copy of q", "copy of k", "scaled k"),
    "weights · v": ("copy of v",),
    "FP32 weights · v": ("copy of v",),
    "FP32 output of norm1": ("normalised input of norm1",),
    "FP32 output of norm2": ("normalised input of norm2",),
}
"""Of an op that makes several tensors: those after which others go, when nothing is saved. The rest go at its end."""


def input_of_a_segment(c: Setting) -> Piece:
    """The residual stream where a segment begins."""
    return kept("input of a segment", STREAM, c.stream, "a checkpoint keeps its arguments")


def forward(ledger: Ledger, moment: str, c: Setting, family, bounds: list[tuple[int, int]]) -> None:
    """The last block, behind all inputs, the first of which the embeddings have made, and all that autocast keeps."""
    start, stop = bounds[-1]
    block = family.block(c, last=True)
    copies = [row.size for op in block for row in op.forward if isinstance(row, Piece) and cached(row.name)]
    ledger.free(STREAM_IN)
    ledger.make(input_of_a_segment(c), len(bounds))
    if copies:
        kept_by = "autocast's cache, emptied at its end"
        ledger.make(passing("BF16 copies of a block's weights", added(copies), 2, kept_by), stop - 1)
    own_input = passing("input of the last block", STREAM, c.stream)
    if stop - start > 1:
        ledger.make(own_input)
    for op in unsaved(c, block):
        ledger.play(moment, f"{op.name}, block {stop}", op.forward)
    if stop - start > 1:
        ledger.free(own_input.name)


def unsaved(c: Setting, block: list[Op]) -> Iterator[Op]:
    """A block's forward where nobody saves: all but its output goes when the last variable that holds it does."""
    until = HELD_UNTIL | ({} if c.by_hand else {"weights": "dropout of weights"})
    waiting: dict[str, str] = {}
    for op in block:
        rows: list[Row] = []
        ended = [name for name, last in waiting.items() if last == op.name]
        for row in op.forward:
            if isinstance(row, Piece) and is_kept(row) and row.name != STREAM_OUT:
                name = f"{row.name}, not saved"
                rows.append(replace(row, name=name, category="temporary", source="a variable holds it"))
                if row.name in until:
                    waiting[name] = until[row.name]
                elif not cached(row.name):
                    ended.append(name)
            elif row != STREAM_IN:
                rows.append(row)
            if isinstance(row, Piece):
                gone = [name for held in FREED_AFTER.get(row.name, ()) if (name := f"{held}, not saved") in ended]
                ended = [name for name in ended if name not in gone]
                rows += gone
        yield replace(op, forward=(*rows, *ended))
        for name in ended:
            waiting.pop(name, None)


def cached(name: str) -> bool:
    """Whether autocast keeps this copy, of a parameter, to the end."""
    return name.startswith("BF16 copy of ") and name.endswith((".weight", ".bias"))


def backward(ledger: Ledger, c: Setting, model: Transformer, family, bounds: list[tuple[int, int]]) -> None:
    """Segment by segment from the last: run again, then backward, block by block."""
    c = replace(c, recomputed=True)
    block = family.block(c)
    saved = {piece.name for piece in net(row for op in block for row in op.forward) if is_kept(piece)}
    ends = next(i for i in reversed(range(len(block))) if saved & set(block[i].backward))  # the last op that saves
    tables = [name for name in ("cos", "sin") if name in ledger.held]
    for start, stop in reversed(bounds):
        run_backward(ledger, SEGMENTS, block[ends + 1 :], f", block {stop}")
        ledger.play(RECOMPUTATION, f"blocks {start + 1} to {stop}", run_again(block, stop - start, ends))
        for number in range(stop, start, -1):
            ops = block[: ends + 1] if number == stop else block
            if number == start + 1:
                freed = [input_of_a_segment(c).name, *(tables if start == 0 else [])]
                ops = [replace(op, backward=input_freed(op.backward, freed)) for op in ops]
            run_backward(ledger, SEGMENTS, ops, f", block {number}")
            gradients_of_a_block(ledger, c, model)


def run_again(block: list[Op], blocks: int, ends: int) -> list[Row]:
    """The forward of so many blocks, up to the last thing saved; then functions are left, and their variables go."""
    whole = [row for op in block for row in op.forward]
    rows = [row for op in block[: ends + 1] for row in op.forward]
    while not (isinstance(rows[-1], Piece) and is_kept(rows[-1])):
        rows.pop()
    if blocks > 1:
        rows = [*(row for row in whole if row != STREAM_IN), *whole * (blocks - 2), *rows]
    return [*rows, *(piece.name for piece, count in net(rows).items() if not is_kept(piece) for _ in range(count))]


def is_kept(piece: Piece) -> bool:
    """Whether it is there until its backward, and not for a few ops."""
    return piece.category == "activation"


def input_freed(rows: Iterable[Row], freed: list[str]) -> tuple[Row, ...]:
    """A backward's rows where the first norm's input is the checkpoint's: when nothing needs it, all arguments go."""
    found: list[Row] = []
    for row in rows:
        found += freed if row == STREAM_IN else [row, *freed] if row == f"FP32 copy of {STREAM_IN}" else [row]
    return tuple(found)


def run_backward(ledger: Ledger, moment: str, ops: list[Op], where: str = "") -> None:
    """The backward of ops, from the last to the first."""
    for op in reversed(ops):
        ledger.play(moment, f"backward of {op.name}{where}", op.backward)


def gradients_of_a_block(
    ledger: Ledger, c: Setting, model: Transformer, *, made_by_ops: bool = True, count: int = 1
) -> None:
    """A block's gradients as one piece, in place of those that its ops have made."""
    if not c.keeps_gradients:
        return
    if made_by_ops:
        for name in model.block:
            ledger.free(of(name))
    size = added(list(model.block.values()))
    ledger.make(Piece("gradients of a block", size, c.stream, "gradient", "AccumulateGrad keeps them"), count)
