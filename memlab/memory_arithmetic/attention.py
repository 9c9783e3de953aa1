"""Attention as memory sees it: fused, by hand, and as the CPU falls back to when dropout rules the fused kernel out.

The scores, (batch, heads, tokens, tokens), are what fused attention never stores and the other two store several times.
"""

from __future__ import annotations

from memlab.memory_arithmetic.ledger import Op, Piece, Row
from memlab.memory_arithmetic.ops import PASSED_ON, STREAM, Setting, d, dropout, kept, of, passing

SCORES = "b·a·s·s"
FACTORS = "bmm saves its factors"


def unpack(c: Setting, packed: str, parts: tuple[str, str, str]) -> Op:
    """q, k, v are views of one Linear's output. Backward stacks their gradients, then copies them into its layout."""
    stacked = passing(f"stacked {of(packed)}", "3·b·s·h", c.compute)
    whole = passing(of(packed), "3·b·s·h", c.compute, PASSED_ON)
    return Op("unpack q, k, v", (), (stacked, *map(of, reversed(parts)), whole, stacked.name))


def fused_attention(c: Setting, saved: tuple[str, ...], inputs: dict[str, str], y: str) -> Op:
    """Flash attention and its kin: saves q, k, v, its output and one number a row, never the scores.

    A GPU runs cuDNN's for BF16, with the state of its random numbers beside (flash, which Ampere, Ada and builds for
    CUDA 12 run, keeps one number more); for FP32 the memory-efficient kernel, whose rows are padded to a multiple of 32
    (S) and whose seed lies in main memory. Not counted is what a kernel takes for itself: flash's backward, an FP32
    copy of q's gradient.

    inputs: name → size of q, k and v; saved: the storages in which they lie. Dao et al. 2022, section 3.1; Rabe and
    Staats 2021.
    """
    source = "fused attention saves its output and log Σ exp of every row of scores, in FP32"
    out = kept(y, STREAM, c.compute, f"{source}; the Linear after it saves its input too")
    rows = kept("log Σ exp of the scores", "b·a·S" if c.gpu and c.compute == 4 else "b·a·s", 4, source)
    made = [out, rows]
    if c.gpu and c.compute == 2:
        made.append(kept("state of the random numbers", "2", 8, "cuDNN saves it, with dropout or without"))
    backward = [d(name, size, c.compute) for name, size in inputs.items()]
    return Op("fused attention", tuple(made), (*backward, of(y), *saved, *names(made)))


# ---- by hand


def folds(c: Setting) -> bool:
    """Whether bmm must copy q, k and v: batch and heads are folded into one dimension, and neither is 1."""
    return c.batch > 1 and c.heads > 1


def copies(c: Setting, names: str, itemsize: int) -> list[Piece]:
    """The contiguous copies of q, k or v that bmm makes and saves, where it must."""
    return [kept(f"copy of {name}", STREAM, itemsize, FACTORS) for name in names] if folds(c) else []


def names(pieces: list[Piece]) -> list[str]:
    """What frees these pieces, the youngest first."""
    return [piece.name for piece in reversed(pieces)]


def scores_passed_on(name: str, itemsize: int) -> Piece:
    """The gradient of a matrix of scores."""
    return passing(of(name), SCORES, itemsize, PASSED_ON)


def attention_by_hand(c: Setting, packed: str, y: str) -> list[Op]:
    """softmax(q kᵀ / √d, masked) v, op by op: each matrix of scores that an op saves is there in every block.

    Korthikanti et al. 2022, section 4.1, count 5·b·a·s·s bytes of them, in BF16 with a one-byte dropout mask. A GPU's
    autocast runs softmax in FP32: then the weights are saved in FP32, and once more in BF16 by the product with v.

    Not counted is the number 1 / √d, which the scaling saves as a tensor of 8 bytes, in main memory on a GPU as well.
    """
    e, wide = c.compute, c.autocast and c.gpu
    copied = copies(c, "qk", e)
    ones, mask = passing("ones", "s·s", 1), kept("causal mask", "s·s", 1, "masked_fill saves its bool mask")
    raw, masked = passing("raw scores", SCORES, e), passing("masked scores", SCORES, e)
    scaled = passing("scores", SCORES, e, "a variable holds them until the method returns")
    d_raw, d_scaled, d_masked = (scores_passed_on(piece.name, e) for piece in (raw, scaled, masked))
    weights = kept("weights", SCORES, 4 if wide else e, "softmax saves its output")
    softmax = Op("softmax", (weights, masked.name), (d_masked, of(weights.name), weights.name))
    if wide:
        cast = passing("FP32 masked scores", SCORES, 4, "autocast computes softmax in FP32")
        d_cast = scores_passed_on(cast.name, 4)
        backward = (d_cast, of(weights.name), weights.name, d_masked, d_cast.name)
        softmax = Op("softmax", (cast, weights, cast.name, masked.name), backward)
    return [
        Op("q kᵀ", (*copied, raw), (d("k", STREAM, e), d("q", STREAM, e), d_raw.name, *(names(copied) or [packed]))),
        Op("scaling", (scaled, raw.name), (d_raw, d_scaled.name)),
        Op("masked_fill", (ones, mask, ones.name, masked), (d_scaled, d_masked.name, mask.name)),
        softmax,
        *(dropped(c, 4 if wide else e, keep=passing if wide else kept)),
        *weights_times_v(c, y, e, wide),
    ]


def dropped(c: Setting, itemsize: int, keep=kept) -> list[Op]:
    """Dropout on the weights, which softmax has saved already; its output is saved by the product with v."""
    out = keep("dropped weights", SCORES, itemsize, FACTORS)
    return [dropout(c, "weights", SCORES, out, dy=of(out.name), frees_x=False)] if c.dropout else []


def weights_times_v(c: Setting, y: str, e: int, wide: bool = False) -> list[Op]:
    """The product with v, and the copy that puts the heads side by side again where there are several.

    wide: the weights come in FP32, and the product saves a BF16 copy.
    """
    copied = copies(c, "v", e)
    weights = "dropped weights" if c.dropout else "weights"
    saved, ops, variable = [weights] if c.dropout else [], [], []
    if wide:
        cast = kept(f"BF16 copy of the {weights}", SCORES, 2, FACTORS)
        ops = [Op("cast of the weights", (cast,), (scores_passed_on(weights, 4), of(cast.name)))]
        weights, saved, variable = cast.name, [cast.name], saved
    out = kept(y, STREAM, e, "the values, heads side by side; the Linear after it saves its input")
    apart = passing("weights · v", STREAM, e)
    spread = [passing("copy of its gradient", STREAM, e)] if folds(c) else []
    d_weights = scores_passed_on(weights, e)
    backward = (d("v", STREAM, e), d_weights, *(names(spread) or [of(y)]), *names(copied), *saved)
    if c.heads == 1:
        return [*ops, Op("weights · v", (*copied, out, *variable), backward)]
    return [
        *ops,
        Op("weights · v", (*copied, apart, *variable), backward),
        Op("heads side by side", (out, apart.name), (*spread, of(y)) if spread else ()),
    ]


# ---- the CPU's fallback


def attention_by_parts(c: Setting, packed: str, y: str) -> list[Op]:
    """What the CPU's scaled_dot_product_attention runs when it has dropout: no fused kernel, every matrix stored.

    q and k are scaled first, the causal mask is a matrix of 0 and −∞ that is added, and BF16 is computed in FP32.
    """
    upcast, keep = c.compute == 2, passing if folds(c) else kept
    wide = [passing(f"FP32 {n}", STREAM, 4, "this fallback computes in FP32") for n in "qk"]
    wide = [*wide, keep("FP32 v", STREAM, 4, "this fallback computes in FP32")] if upcast else []
    scaled_q, scaled_k = (keep(f"scaled {n}", STREAM, 4, FACTORS) for n in "qk")
    copied = copies(c, "qk", 4)
    ones, triangle = passing("ones", "s·s", 1), passing("lower triangle", "s·s", 1)
    scalars, mask = passing("0 and −∞", "2", 4), passing("mask of 0 and −∞", "s·s", 4)
    raw, masked = passing("raw scores", SCORES, 4), passing("masked scores", SCORES, 4)
    forward: list[Row] = [*wide, scaled_q, ones, triangle, ones.name, scalars, mask, scalars.name, triangle.name]
    forward += [scaled_k, *copied, raw, *([scaled_k.name] if folds(c) else []), masked, raw.name]

    d_masked = scores_passed_on(masked.name, 4)
    d_scaled = [passing(of(piece.name), STREAM, 4, PASSED_ON) for piece in (scaled_k, scaled_q)]
    backward: list[Row] = [*d_scaled, d_masked.name, *(names(copied) or [scaled_k.name, scaled_q.name])]
    grads = [d(n, STREAM, c.compute) for n in "vkq"]
    d_wide = [passing(f"FP32 {grad.name}", STREAM, 4, PASSED_ON) for grad in grads] if upcast else grads
    for scaled, unscaled in zip(d_scaled, d_wide[1:], strict=True):
        backward += [unscaled, scaled.name]
    for made, cast in zip(d_wide, grads, strict=True) if upcast else []:
        backward += [cast, made.name]

    weights = kept("weights", SCORES, 4, "softmax saves its output")
    return [
        Op("q kᵀ and mask", tuple(forward), tuple(backward)),
        Op("softmax", (weights, masked.name), (d_masked, of(weights.name), weights.name)),
        *dropped(c, 4),
        _values(c, y, wide, d_wide[0], [scaled_q, mask], [] if upcast or folds(c) else [packed]),
    ]


def _values(c: Setting, y: str, wide: list[Piece], d_v: Piece, variables: list[Piece], saved: list[str]) -> Op:
    """The fallback's product with v, and its way back to the type and the layout that were asked for."""
    upcast = c.compute == 2
    copied = copies(c, "v", 4)
    product = passing("FP32 weights · v" if upcast else "weights · v", STREAM, 4)
    result = passing("weights · v", STREAM, c.compute)
    unasked = passing("BF16 copy of the weights", SCORES, 2, "the fallback returns them as well")
    out = kept(y, STREAM, c.compute, "the values, heads side by side; the Linear after it saves its input")
    apart = c.heads > 1
    forward: list[Row] = [*([unasked] if upcast else []), *copied]
    forward += [product, result if apart else out, product.name] if upcast else [product if apart else out]
    released = [p.name for p in (*variables, *reversed(wide)) if p.category == "temporary"]
    forward += [*released, *([unasked.name] if upcast else []), *([out, result.name] if apart else [])]

    passed, spread = passing(f"FP32 {of(y)}", STREAM, 4, PASSED_ON), passing("copy of its gradient", STREAM, 4)
    d_weights = scores_passed_on("dropped weights", 4)
    backward: list[Row] = [passed, of(y)] if upcast else []
    dy = passed.name if upcast else of(y)
    backward += [spread, dy] if folds(c) else []
    saved = saved + [p.name for p in wide if p.category == "activation"]
    backward += [d_v, d_weights, spread.name if folds(c) else dy, *names(copied), *saved, "dropped weights"]
    return Op("weights · v", tuple(forward), tuple(backward))


# ---- rotary positions


def rotary(c: Setting, name: str, heads: str, x: str, y: str, *, tables: bool = False) -> Op:
    """y = x · cos + (−x₂, x₁) · sin, where x₁ and x₂ are the halves of a head. Su et al. 2021, section 3.4.2.

    The products save cos and sin, the same two tables in every block, and not x, since the tables need no gradient.
    Tables are of the stream's type: under autocast FP32, and so are the products and their sum.

    x, y: (batch, heads, tokens, width of a head). tables: backward lets the tables go, being the last that needs them.
    """
    size, half, e, wide = f"b·s·{heads}·d", f"b·s·{heads}·r", c.compute, c.stream
    turned = passing(f"({x}₂ negated, {x}₁)", size, e)
    negated = passing(f"{x}₂ negated", half, e)
    by_cos, by_sin = passing(f"{x} · cos", size, wide), passing(f"turned {x} · sin", size, wide)
    keep = passing if c.autocast else kept  # autocast hands attention a BF16 copy
    out = keep(y, size, wide, f"{x} with positions; fused attention saves it")
    forward = (by_cos, negated, turned, negated.name, by_sin, turned.name, out, by_cos.name, by_sin.name, x)
    cos, sin = (["cos"], ["sin"]) if tables else ([], [])
    d_sin, d_negated = passing(f"{of(y)} · sin", size, e, PASSED_ON), passing(f"{of(y)}, negated half", half, e)
    d_turned = passing(f"{of(y)}, turned back", size, e, PASSED_ON)
    d_cos = d(x, size, e)
    if c.autocast:
        wide_sin, wide_cos = (passing(f"FP32 {p.name}", size, 4, PASSED_ON) for p in (d_sin, d_cos))
        backward = [wide_sin, d_sin, wide_sin.name, *sin, d_negated, wide_cos, d_cos, wide_cos.name, of(y), *cos]
    else:
        backward = [d_sin, *sin, d_negated, d_cos, of(y), *cos]
    backward += [d_turned, d_sin.name, d_negated.name, d_turned.name]  # added to d_cos in place
    return Op(name, forward, tuple(backward))


def cast_for_attention(c: Setting, name: str, heads: str) -> Op:
    """Autocast gives fused attention BF16 copies of what positions have made FP32."""
    size = f"b·s·{heads}·d"
    copy = kept(f"BF16 copy of {name}", size, 2, "autocast computes attention in BF16, which saves its inputs")
    return Op(f"cast of {name}", (copy,), (passing(of(name), size, 4, PASSED_ON), of(copy.name)))
