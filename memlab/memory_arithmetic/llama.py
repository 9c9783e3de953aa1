"""A Llama, op by op: what stands before the blocks, one block, what comes after. Backward is the same from the end.

The module is memlab.book.workloads.Llama: rotary positions, grouped keys and values, RMSNorm, SwiGLU, no biases.
"""

from __future__ import annotations

from memlab.memory_arithmetic.attention import cast_for_attention, fused_attention, rotary
from memlab.memory_arithmetic.head import branch, embedded, head
from memlab.memory_arithmetic.head import stream as kept_stream
from memlab.memory_arithmetic.ledger import Op, Piece, Row
from memlab.memory_arithmetic.ops import (
    GRADIENT,
    STREAM,
    Setting,
    add_to_stream,
    kept,
    leave,
    linear,
    of,
    passing,
    rms_norm,
    swiglu,
)

QUERIES, KEYS = "b·s·a·d", "b·s·g·d"


def norms_copy(c: Setting) -> bool:
    """Whether the norms save FP32 copies of the stream, so that the stream itself is held by variables only."""
    return c.stream == 2 and not c.gpu


def stream(c: Setting, name: str, reader: str) -> Piece:
    """The residual stream at one place."""
    return passing(name, STREAM, c.stream) if norms_copy(c) else kept_stream(c, name, reader)


def embeddings(c: Setting, tied: bool) -> list[Op]:
    """Token embedding, and the tables of the rotary positions, which every block reads."""
    rows: list[Row] = [stream(c, "input of norm1", "norm1")]
    frequencies, angles = passing("frequencies", "r", 4), passing("angles", "s·d", 4)
    rows += [passing("positions", "s", 8, "a variable holds them"), frequencies]
    rows += [passing("angles of pairs", "s·r", 4), angles, "angles of pairs"]
    for name in ("cos", "sin"):
        table = kept(name, "s·d", c.stream, "the products of the rotary positions save it, once for all blocks")
        wide = passing(f"FP32 {name}", "s·d", 4)
        rows += [wide, table, wide.name] if c.stream == 2 else [table]
    rows += [angles.name, frequencies.name]
    return [Op("embeddings", tuple(rows), tuple(embedded(c, tied, GRADIENT)))]


def block(c: Setting, *, first: bool = False, last: bool = False) -> list[Op]:
    """x + attention(norm1(x)), then x + feed_forward(norm2(x)).

    first: the block whose backward comes last, and lets the tables go. last: its sum is read by the final norm.
    """
    x, y = "output of norm1", "output of norm2"
    after = stream(c, "input of norm", "the final norm") if last else stream(c, "input of norm1", "norm1")
    return [
        rms_norm(c, "norm1", "input of norm1", x),
        *attention(c, x, tables=first),
        add_to_stream(c, "branch", stream(c, "input of norm2", "norm2")),
        rms_norm(c, "norm2", "input of norm2", y),
        *feed_forward(c, y),
        add_to_stream(c, "branch", after),
        leave(*(["input of norm2", "input of norm1"] if norms_copy(c) else [])),
    ]


def attention(c: Setting, x: str, *, tables: bool) -> list[Op]:
    """Three projections of x, two of them turned by their positions, and fused attention on the result.

    Under autocast each projection saves a BF16 copy of x of its own.
    """
    e = c.compute
    q, k, v = passing("q", QUERIES, e), passing("k", KEYS, e), kept("v", KEYS, e, "fused attention saves v")
    inputs = {"rotated q": QUERIES, "rotated k": KEYS, "v": KEYS}
    casts, variables = [], []
    if c.autocast:
        casts = [cast_for_attention(c, "rotated k", "g"), cast_for_attention(c, "rotated q", "a")]
        inputs = {"BF16 copy of rotated q": QUERIES, "BF16 copy of rotated k": KEYS, "v": KEYS}
        variables = ["rotated q", "rotated k", x]
    q_name, k_name, v_name = inputs
    by_q, by_k, by_v = (f"{of(x)} by {name}" for name in "qkv")
    return [
        linear(c, "attention.q", "h·h", x, q, casts_x=True, dx=by_q, after_dx=(by_q,)),
        rotary(c, "rotation of q", "a", "q", "rotated q", tables=tables),
        linear(
            c, "attention.k", "g·d·h", x, k, casts_x=True, frees_x=False, dx=by_k, after_dx=joined(c, of(x), by_v, by_k)
        ),
        rotary(c, "rotation of k", "g", "k", "rotated k"),
        linear(c, "attention.v", "g·d·h", x, v, casts_x=True, frees_x=False, dx=of(x) if c.autocast else by_v),
        *casts,
        fused_attention(c, (k_name, q_name, v_name), inputs, "mixed values"),
        linear(c, "attention.out", "h·h", "mixed values", branch(c), frees_x=False, frees_dy=c.autocast),
        leave(*variables),
    ]


def feed_forward(c: Setting, x: str) -> list[Op]:
    """Two projections of x, silu of the first times the second, and one back to the stream."""
    e, size = c.compute, "b·s·f"
    gate = kept("input of silu", size, e, "silu saves its input")
    up = kept("output of up", size, e, "its product with silu's output saves both")
    silu, product = swiglu(c, gate.name, "output of silu", up.name, "gated")
    by_gate, by_up = f"{of(x)} by gate", f"{of(x)} by up"
    joins = joined(c, of(x), by_up, by_gate)
    return [
        linear(c, "feed_forward.gate", "f·h", x, gate, casts_x=True, dx=by_gate, after_dx=joins),
        silu,
        linear(c, "feed_forward.up", "f·h", x, up, casts_x=True, frees_x=False, dx=of(x) if c.autocast else by_up),
        product,
        linear(c, "feed_forward.down", "f·h", "gated", branch(c), x_size=size, frees_dy=c.autocast),
        leave(*([x] if c.autocast else [])),
    ]


def joined(c: Setting, whole: str, first: str, second: str) -> tuple[Row, ...]:
    """Two gradients of one tensor meet: autograd adds them into a third, or into the first when it alone owns that.

    What a matrix product made comes as a view, which autograd does not add into; what a cast made, it does.
    """
    return (second,) if c.autocast else (passing(whole, STREAM, c.compute, "sum of two gradients"), first, second)


def after(c: Setting, tied: bool) -> list[Op]:
    """Final norm, head, loss."""
    return [rms_norm(c, "norm", "input of norm", "output of norm", last=True), *head(c, tied)]
