"""A GPT, op by op: what stands before the blocks, one block, what comes after. Backward is the same from the end.

The module is memlab.book.workloads.GPT. Korthikanti et al. 2022, section 4.1, count such a block's
activations in 16 bit, with attention by hand and dropout: 34·s·b·h + 5·a·s·s·b bytes. Added up from what these ops
save on a GPU it is that, and the statistics of two norms in FP32 (16·s·b) and one causal mask of bytes (s·s).
"""

from __future__ import annotations

from memlab.memory_arithmetic.attention import (
    attention_by_hand,
    attention_by_parts,
    folds,
    fused_attention,
    unpack,
)
from memlab.memory_arithmetic.head import branch, embedded, head, stream
from memlab.memory_arithmetic.ledger import Op
from memlab.memory_arithmetic.ops import (
    GRADIENT,
    STREAM,
    Setting,
    accumulated,
    add_to_stream,
    dropout,
    gelu,
    grad,
    kept,
    layer_norm,
    leave,
    linear,
    of,
    passing,
)

QKV = "q, k and v"


def embeddings(c: Setting, tied: bool) -> list[Op]:
    """Token embedding plus position embedding, then dropout."""
    positions = kept("positions", "s", 8, "embedding saves its indices, int64")
    tokens, places = passing("token vectors", STREAM, c.stream), passing("position vectors", "s·h", c.stream)
    start = stream(c, "input of norm1", "norm1")
    vectors = passing("embedded tokens", STREAM, c.stream) if c.dropout else start
    d_places = passing(of(places.name), "s·h", c.stream, "the stream's gradient, summed over the batch")
    d_vectors = of(vectors.name) if c.dropout else GRADIENT
    d_table = grad(c, "position_embedding.weight", "c·h")
    by_position = (d_places, d_table, d_places.name, positions.name, *accumulated(c, d_table))
    ops = [
        Op(
            "embeddings",
            (positions, tokens, places, vectors, tokens.name, places.name),
            (*by_position, *embedded(c, tied, d_vectors)),
        )
    ]
    return [*ops, dropout(c, vectors.name, STREAM, start, dy=GRADIENT)] if c.dropout else ops


def block(c: Setting, *, first: bool = False, last: bool = False) -> list[Op]:
    """x + attention(norm1(x)), then x + feed_forward(norm2(x)).

    last: its sum is read by the final norm. first: matters to a Llama only.
    """
    e = c.compute
    before_gelu = kept("input of gelu", "b·s·f", e, "gelu saves its input")
    after = stream(c, "input of norm", "the final norm") if last else stream(c, "input of norm1", "norm1")
    return [
        layer_norm(c, "norm1", "input of norm1", "output of norm1"),
        *attention(c, "output of norm1"),
        add_to_stream(c, "branch", stream(c, "input of norm2", "norm2")),
        layer_norm(c, "norm2", "input of norm2", "output of norm2"),
        linear(c, "feed_forward.up", "f·h", "output of norm2", before_gelu, bias="f", casts_x=True),
        gelu(c, "input of gelu", "output of gelu"),
        *branch_end(c, "feed_forward.down", "f·h", "output of gelu", "b·s·f"),
        leave(*(["output of norm2"] if c.autocast else [])),
        add_to_stream(c, "branch", after),
    ]


def attention(c: Setting, x: str) -> list[Op]:
    """Projections and what is between them, by whichever kernels the setting gives."""
    fused = not c.by_hand and (c.gpu or not c.dropout)
    copied = not fused and (folds(c) or (not c.by_hand and c.compute == 2))
    why = "a variable holds it until attention returns" if copied else "attention saves q, k and v, views of this"
    packed = (passing if copied else kept)(QKV, "3·b·s·h", c.compute, why)
    if fused:
        middle = [fused_attention(c, (QKV,), dict.fromkeys("qkv", STREAM), "mixed values")]
    else:
        middle = (attention_by_hand if c.by_hand else attention_by_parts)(c, QKV, "mixed values")
    variables = [*([QKV] if copied else []), *(["scores"] if c.by_hand else []), *([x] if c.autocast else [])]
    return [
        linear(c, "attention.qkv", "3·h·h", x, packed, bias="3·h", casts_x=True),
        unpack(c, QKV, ("q", "k", "v")),
        *middle,
        *branch_end(c, "attention.out", "h·h", "mixed values", STREAM, frees_x=not fused),
        leave(*variables),
    ]


def branch_end(c: Setting, name: str, size: str, x: str, x_size: str, *, frees_x: bool = True) -> list[Op]:
    """A branch's last Linear, and the dropout on what it adds to the stream. It ends as the piece "branch"."""
    y = passing("branch before dropout", STREAM, c.compute) if c.dropout else branch(c)
    own = c.dropout or c.autocast  # the Linear's output has a gradient of its own, not the stream's
    op = linear(c, name, size, x, y, x_size=x_size, bias="h", frees_x=frees_x, frees_dy=own)
    return [op, dropout(c, y.name, STREAM, branch(c), dy=of("branch") if c.autocast else "")] if c.dropout else [op]


def after(c: Setting, tied: bool) -> list[Op]:
    """Final norm, head, loss."""
    return [layer_norm(c, "norm", "input of norm", "output of norm", last=True), *head(c, tied)]
