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

from memlab.checking import balanced
from memlab.memory_arithmetic import gpt, llama, segments
from memlab.memory_arithmetic.head import SHARE, share_of_the_mean
from memlab.memory_arithmetic.ledger import Ledger, Piece, net
from memlab.memory_arithmetic.ops import Setting, of
from memlab.memory_arithmetic.segments import gradients_of_a_block, run_backward
from memlab.memory_arithmetic.shapes import FAMILIES, Transformer

FORWARD, LOSS, OPTIMIZER = "forward", "loss", "optimizer step"
LAST, FIRST, EMBEDDINGS = "backward of the last block", "backward of the first block", "backward of the embeddings"


def play(ledger: Ledger, c: Setting, model: Transformer, checkpointed: int | None = None) -> dict[Piece, int]:
    """Forward and backward. checkpointed: in how many segments the blocks are. Returns the activations in between."""
    family = (gpt, llama)[FAMILIES.index(model.family)]
    start, end = family.embeddings(c, model.tied), family.after(c, model.tied)
    share = [share_of_the_mean(c)] if c.accumulating else []
    bounds = None if checkpointed is None else balanced(model.layers, checkpointed)

    for op in start:
        ledger.play(FORWARD, op.name, op.forward)
    if bounds is None:
        forward_of_blocks(ledger, c, model, family)
    else:
        segments.forward(ledger, FORWARD, c, family, bounds)
    for op in end:
        ledger.play(LOSS, op.name, op.forward)
    for name in ledger.named("temporary"):
        if name != "loss":  # the model has returned it, and autocast has ended
            ledger.free(name, ledger.held[name])
    for op in share:
        ledger.play(LOSS, op.name, op.forward)
    activations = {ledger.pieces[name]: ledger.held[name] for name in ledger.named("activation")}

    run_backward(ledger, LOSS, end + share)
    if bounds is None:
        backward_of_blocks(ledger, c, model, family)
    else:
        segments.backward(ledger, c, model, family, bounds)
    run_backward(ledger, EMBEDDINGS, start)
    for name in (of(SHARE), SHARE) if c.accumulating else (of("loss"),):
        ledger.free(name)
    return activations


def left_by_a_block(c: Setting, family) -> dict[Piece, int]:
    """What a block's forward keeps, and what of it variables hold."""
    return net(row for op in family.block(c) for row in op.forward)


def forward_of_blocks(ledger: Ledger, c: Setting, model: Transformer, family) -> None:
    """The middle blocks, all alike, are not played but multiplied."""
    for piece, count in left_by_a_block(c, family).items():
        ledger.make(piece, count * (model.layers - 1))
    for op in family.block(c, last=True):
        ledger.play(FORWARD, f"{op.name}, block {model.layers}", op.forward)


def backward_of_blocks(ledger: Ledger, c: Setting, model: Transformer, family) -> None:
    """The last block, and the first; what lies between them is let go at once."""
    layers = model.layers
    blocks = [(FIRST, family.block(c, first=True, last=layers == 1), 1)]
    if model.family == "llama" and layers > 2:  # the first lets the rotary tables go: it may be less full than this one
        blocks.insert(0, (FIRST, family.block(c), 2))
    if layers > 1:
        blocks.insert(0, (LAST, family.block(c, last=True), layers))
    middle = layers - len(blocks)
    for moment, ops, number in blocks:
        run_backward(ledger, moment, ops, f", block {number}")
        gradients_of_a_block(ledger, c, model)
        if moment == LAST:
            for piece, count in left_by_a_block(c, family).items():
                if piece.category == "activation":
                    ledger.free(piece.name, count * middle)
            gradients_of_a_block(ledger, c, model, made_by_ops=False, count=middle)
