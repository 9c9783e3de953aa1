"""The two families, op by op: what stands before the blocks, one block, and what comes after them.

Each function lists its ops in forward order; backward is the same list from the end.
"""

from __future__ import annotations

from memlab.memory_arithmetic.attention import (
    attention_by_hand,
    attention_by_parts,
    cast_for_attention,
    folds,
    fused_attention,
    rotary,
    unpack,
)
from memlab.memory_arithmetic.ledger import Op, Piece, Row
from memlab.memory_arithmetic.ops import (
    GRADIENT,
    STREAM,
    Setting,
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
    rms_norm,
    swiglu,
)


def stream(c: Setting, name: str, reader: str) -> Piece:
    """The residual stream at one place: kept because a norm reads it."""
    return kept(name, STREAM, c.stream, f"residual sum; {reader} saves its input")


# ---- GPT


def gpt_embeddings(c: Setting, tied: bool) -> list[Op]:
    """Token embedding plus position embedding, with dropout."""
    positions = kept("positions", "s", 8, "embedding saves its indices, int64")
    tokens, places = passing("token vectors", STREAM, c.stream), passing("position vectors", "s·h", c.stream)
    summed = stream(c, "input of norm1", "norm1") if not c.dropout else passing("embedded tokens", STREAM, c.stream)
    by_position = passing(of("position vectors"), "s·h", c.stream)
    dy = of("embedded tokens") if c.dropout else GRADIENT
    ops = [
        Op(
            "embeddings",
            (positions, tokens, places, summed, tokens.name, places.name),
            (
                by_position,
                grad(c, "position_embedding.weight", "c·h"),
                by_position.name,
                positions.name,
                *embedded(c, tied),
                dy,
            ),
        )
    ]
    if c.dropout:
        op = dropout(c, "embedded tokens", STREAM, stream(c, "input of norm1", "norm1"), frees_dy=False)
        ops.append(Op(op.name, op.forward, (op.backward[0], GRADIENT, *op.backward[1:])))
    return ops


def gpt_block(c: Setting, *, last: bool = False) -> list[Op]:
    """x + attention(norm1(x)), then x + feed_forward(norm2(x))."""
    qkv, e = "q, k and v", c.compute
    own = c.dropout or c.autocast  # the branch has a gradient of its own, not the stream's
    if c.by_hand or (c.dropout and not c.gpu):
        copied = folds(c) or (not c.by_hand and e == 2)
        packed = (passing if copied else kept)(qkv, "3·b·s·h", e, "held until attention returns, or saved by bmm")
        middle = attention_by_hand(c, qkv, "mixed values") if c.by_hand else attention_by_parts(c, qkv, "mixed values")
        mixed_freed = True
    else:
        packed = kept(qkv, "3·b·s·h", e, "fused attention saves q, k and v: views of one Linear's output")
        middle = (fused_attention(c, (qkv,), dict.fromkeys(("q", "k", "v"), STREAM), "mixed values"),)
        mixed_freed = False
    variables = [qkv] if packed.category == "temporary" else []
    variables += ["scores"] if c.by_hand else []
    ops = [
        layer_norm(c, "norm1", "input of norm1", "output of norm1"),
        linear(
            c,
            "attention.qkv",
            "3·h·h",
            "output of norm1",
            STREAM,
            packed,
            bias="3·h",
            casts_x=True,
        ),
        unpack(c, qkv, ("q", "k", "v")),
        *middle,
        *branch_end(c, "attention.out", "h·h", "mixed values", STREAM, own, frees_x=mixed_freed),
        leave(*variables, *(["output of norm1"] if c.autocast else [])),
        add_to_stream(c, "branch", stream(c, "input of norm2", "norm2")),
        layer_norm(c, "norm2", "input of norm2", "output of norm2"),
        linear(
            c,
            "feed_forward.up",
            "f·h",
            "output of norm2",
            STREAM,
            kept("input of gelu", "b·s·f", e, "gelu saves its input"),
            bias="f",
            casts_x=True,
        ),
        gelu(c, "input of gelu", "output of gelu"),
        *branch_end(c, "feed_forward.down", "f·h", "output of gelu", "b·s·f", own),
        leave(*(["output of norm2"] if c.autocast else [])),
        add_to_stream(c, "branch", following(c, last)),
    ]
    return ops


def following(c: Setting, last: bool) -> Piece:
    """What the block's last sum gives: the next block's input, or the final norm's."""
    return stream(c, "input of norm", "the final norm") if last else stream(c, "input of norm1", "norm1")


def branch_end(c: Setting, name: str, size: str, x: str, x_size: str, own: bool, *, frees_x: bool = True) -> list[Op]:
    """A branch's last Linear, and the dropout on what it adds to the stream. It ends as the piece "branch"."""
    bias = "h"
    y = passing("branch before dropout" if c.dropout else "branch", STREAM, c.compute, "added to the stream")
    op = linear(c, name, size, x, x_size, y, bias=bias, frees_x=frees_x, frees_dy=own)
    if not c.dropout:
        return [op]
    branch = passing("branch", STREAM, c.compute, "added to the stream")
    return [op, dropout(c, y.name, STREAM, branch, frees_dy=c.autocast)]


def gpt_head(c: Setting, tied: bool) -> list[Op]:
    """Final norm, head, loss."""
    return [layer_norm(c, "norm", "input of norm", "output of norm", last=True), *head(c, tied)]


# ---- Llama


def llama_embeddings(c: Setting, tied: bool) -> list[Op]:
    """Token embedding, and the tables of the rotary positions, which every block reads."""
    upcast = c.stream == 2
    summed = llama_stream(c, "input of norm1", "norm1")
    rows = [summed, passing("positions", "s", 8, "a variable holds them"), passing("frequencies", "r", 4)]
    angles = passing("angles", "s·d", 4)
    rows += [passing("angles of pairs", "s·r", 4), angles, "angles of pairs"]
    for name in ("cos", "sin"):
        table = kept(name, "s·d", c.stream, "the products of the rotary positions save it, once for all blocks")
        wide = passing(f"FP32 {name}", "s·d", 4)
        rows += [wide, table, wide.name] if upcast else [table]
    rows += [angles.name, "frequencies"]
    return [Op("embeddings", tuple(rows), (*embedded(c, tied), GRADIENT))]


def llama_stream(c: Setting, name: str, reader: str) -> Piece:
    """The residual stream; the CPU's RMSNorm saves an FP32 copy of a BF16 stream instead."""
    piece = stream(c, name, reader)
    return passing(name, STREAM, c.stream) if c.stream == 2 and not c.gpu else piece


def llama_block(c: Setting, *, first: bool = False, last: bool = False) -> list[Op]:
    """x + attention(norm1(x)), then x + feed_forward(norm2(x))."""
    e = c.compute
    copies = c.stream == 2 and not c.gpu  # the norms save FP32 copies, so the stream itself is free to go
    normed, fed = "output of norm1", "output of norm2"
    q_size, k_size = "b·s·a·d", "b·s·g·d"
    prefix = "BF16 copy of " if c.autocast else ""
    names = [f"{prefix}rotated q", f"{prefix}rotated k", "v"]
    casts = [cast_for_attention(c, "rotated k", "g"), cast_for_attention(c, "rotated q", "a")] if c.autocast else []
    variables = ["rotated q", "rotated k", normed] if c.autocast else []
    after = llama_stream(c, "input of norm", "the final norm") if last else llama_stream(c, "input of norm1", "norm1")
    into = lambda name, parts: joined(c, name, parts)  # noqa: E731
    return [
        rms_norm(c, "norm1", "input of norm1", normed),
        linear(
            c,
            "attention.q",
            "h·h",
            normed,
            STREAM,
            passing("q", q_size, e),
            casts_x=True,
            dx=f"{of(normed)} by q",
            after_dx=(f"{of(normed)} by q",),
        ),
        rotary(c, "rotation of q", "a", "q", "rotated q", tables=first),
        linear(
            c,
            "attention.k",
            "g·d·h",
            normed,
            STREAM,
            passing("k", k_size, e),
            casts_x=True,
            frees_x=False,
            dx=f"{of(normed)} by k",
            after_dx=into(of(normed), ("v", "k")),
        ),
        rotary(c, "rotation of k", "g", "k", "rotated k"),
        linear(
            c,
            "attention.v",
            "g·d·h",
            normed,
            STREAM,
            kept("v", k_size, e, "fused attention saves v"),
            casts_x=True,
            frees_x=False,
            dx=of(normed) if c.autocast else f"{of(normed)} by v",
        ),
        *casts,
        fused_attention(
            c, (names[1], names[0], names[2]), dict(zip(names, (q_size, k_size, k_size), strict=True)), "mixed values"
        ),
        linear(
            c,
            "attention.out",
            "h·h",
            "mixed values",
            STREAM,
            passing("branch", STREAM, e),
            frees_x=False,
            frees_dy=c.autocast,
        ),
        leave(*variables),
        add_to_stream(c, "branch", llama_stream(c, "input of norm2", "norm2")),
        rms_norm(c, "norm2", "input of norm2", fed),
        linear(
            c,
            "feed_forward.gate",
            "f·h",
            fed,
            STREAM,
            kept("input of silu", "b·s·f", e, "silu saves its input"),
            casts_x=True,
            dx=f"{of(fed)} by gate",
            after_dx=into(of(fed), ("up", "gate")),
        ),
        swiglu(c, "input of silu", "output of silu", "output of up", "gated")[0],
        linear(
            c,
            "feed_forward.up",
            "f·h",
            fed,
            STREAM,
            kept("output of up", "b·s·f", e, "its product with silu's output saves both"),
            casts_x=True,
            frees_x=False,
            dx=of(fed) if c.autocast else f"{of(fed)} by up",
        ),
        swiglu(c, "input of silu", "output of silu", "output of up", "gated")[1],
        linear(c, "feed_forward.down", "f·h", "gated", "b·s·f", passing("branch", STREAM, e), frees_dy=c.autocast),
        leave(*([fed] if c.autocast else [])),
        add_to_stream(c, "branch", after),
        leave(*(["input of norm2", "input of norm1"] if copies else [])),
    ]


def joined(c: Setting, whole: str, parts: tuple[str, str]) -> tuple:
    """Two gradients of one tensor meet: autograd adds them into a third, or in place when it owns the first alone.

    A matrix product's gradient comes as a view, which autograd does not add into; what a cast made it does.
    """
    first, second = (f"{whole} by {part}" for part in parts)
    if c.autocast:
        return (second,)
    return (passing(whole, STREAM, c.compute, "sum of two gradients"), first, second)


def llama_head(c: Setting, tied: bool) -> list[Op]:
    """Final norm, head, loss."""
    return [rms_norm(c, "norm", "input of norm", "output of norm", last=True), *head(c, tied)]


# ---- both


def embedded(c: Setting, tied: bool) -> list[Row]:
    """The token embedding's gradient. When the head has made it already, a second one is added to it in place."""
    if not tied:
        return [grad(c, "token_embedding.weight", "v·h")]
    second = passing("gradient of token_embedding.weight by the embedding", "v·h", c.stream)
    return [second, second.name]


def head(c: Setting, tied: bool) -> list[Op]:
    """Logits and cross-entropy: log_softmax saves its output, (tokens × vocabulary), in FP32 under autocast."""
    size, wide = "b·s·v", 4 if c.autocast else c.compute
    logits = passing("logits", size, c.compute, "a variable holds them until the model returns")
    copy = passing("FP32 logits", size, 4, "autocast computes the loss in FP32")
    given = copy.name if c.autocast else logits.name
    return [
        linear(
            c,
            "token_embedding" if tied else "head",
            "v·h",
            "output of norm",
            STREAM,
            logits,
            casts_x=True,
        ),
        *([leave("output of norm")] if c.autocast else []),
        *([Op("cast of the logits", (copy,), (passing(of("logits"), size, 2), of(copy.name)))] if c.autocast else []),
        Op(
            "log_softmax",
            (kept("log-probabilities", size, wide, "log_softmax saves its output"),),
            (
                passing(of(given), size, wide, "the gradient of the logits"),
                of("log-probabilities"),
                "log-probabilities",
            ),
        ),
        Op(
            "nll_loss",
            (
                kept("loss", "1", wide, "a variable holds it"),
                kept("weight of the targets", "1", wide, "nll_loss saves the number of targets"),
            ),
            (
                passing("gradient of the loss", "1", wide, "backward begins with 1"),
                passing(of("log-probabilities"), size, wide, "the loss's gradient, zero but at the targets"),
                "weight of the targets",
            ),
        ),
    ]
