"""Forward and backward of the whole model, of which only the blocks that can hold its fullest instant are played.

A step's memory rises block by block through forward and falls block by block through backward, while gradients grow.
All blocks are alike: at the same op of its backward, each holds one block's activations less and one block's gradients
more than the one after it. That is a straight line, and a straight line is highest at one of its ends: the fullest
instant lies in the last block, in the first, or outside the blocks. Those are the moments.

Where gradients accumulate, a micro-batch after the first finds all of them there. What an op's backward makes is added
to them and let go, so nothing grows: each block holds one block's activations less than the one after it, and that is
a straight line still.
"""

from __future__ import annotations

from memlab.memory_arithmetic import gpt, llama
from memlab.memory_arithmetic.head import SHARE, share_of_the_mean
from memlab.memory_arithmetic.ledger import Ledger, Op, Piece, net
from memlab.memory_arithmetic.ops import Setting, of
from memlab.memory_arithmetic.shapes import FAMILIES, Transformer, added

FORWARD, LOSS, OPTIMIZER = "forward", "loss", "optimizer step"
LAST, FIRST, EMBEDDINGS = "backward of the last block", "backward of the first block", "backward of the embeddings"


def play(ledger: Ledger, c: Setting, model: Transformer) -> dict[Piece, int]:
    """Forward and backward. The middle blocks, all alike, are not played but multiplied. Returns the activations."""
    family, layers = (gpt, llama)[FAMILIES.index(model.family)], model.layers
    start, end = family.embeddings(c, model.tied), family.after(c, model.tied)
    block, last, first = family.block(c), family.block(c, last=True), family.block(c, first=True, last=layers == 1)
    share = [share_of_the_mean(c)] if c.accumulating else []
    left_by_block = net(row for op in block for row in op.forward)
    size = added(list(model.block.values()))
    block_gradients = Piece("gradients of a block", size, c.stream, "gradient", "AccumulateGrad keeps them")

    for op in start:
        ledger.play(FORWARD, op.name, op.forward)
    for piece, count in left_by_block.items():
        ledger.make(piece, count * (layers - 1))
    for op in last:
        ledger.play(FORWARD, f"{op.name}, block {layers}", op.forward)
    for op in end:
        ledger.play(LOSS, op.name, op.forward)
    for name in ledger.named("temporary"):
        if name != "loss":  # the model has returned it, and autocast has ended
            ledger.free(name, ledger.held[name])
    for op in share:
        ledger.play(LOSS, op.name, op.forward)
    activations = {ledger.pieces[name]: ledger.held[name] for name in ledger.named("activation")}

    blocks = [(FIRST, first, 1)]
    if model.family == "llama" and layers > 2:
        blocks.insert(0, (FIRST, block, 2))  # the first lets the rotary tables go, so it may be less full than this one
    if layers > 1:
        blocks.insert(0, (LAST, last, layers))
    middle = layers - len(blocks)
    run_backward(ledger, LOSS, end + share)
    for moment, ops, number in blocks:
        run_backward(ledger, moment, ops, f", block {number}")
        if not c.accumulating:
            for name in model.block:
                ledger.free(of(name))
            ledger.make(block_gradients)
        if moment == LAST:
            for piece, count in left_by_block.items():
                if piece.category == "activation":
                    ledger.free(piece.name, count * middle)
            if not c.accumulating:
                ledger.make(block_gradients, middle)
    run_backward(ledger, EMBEDDINGS, start)
    for name in (of(SHARE), SHARE) if c.accumulating else (of("loss"),):
        ledger.free(name)
    return activations


def run_backward(ledger: Ledger, moment: str, ops: list[Op], where: str = "") -> None:
    """The backward of ops, from the last to the first."""
    for op in reversed(ops):
        ledger.play(moment, f"backward of {op.name}{where}", op.backward)
