"""Each op as memory sees it: what its forward keeps for backward, and what its backward makes before it lets that go.

Every function returns an `Op`: two short stories of tensors made and freed. Where the CPU's kernel keeps something
else than the GPU's, or autocast adds a copy, the branch stands here and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from memlab.memory_arithmetic.ledger import Op, Piece, Row

STREAM = "b·s·h"
SCORES = "b·a·s·s"
GRADIENT = "gradient of the stream"
PASSED_ON = "a gradient on its way to the op before"


@dataclass(frozen=True)
class Setting:
    """How the ops run. `compute`: bytes of what a matrix product gives; `stream`: bytes of the residual stream."""

    compute: int
    stream: int
    autocast: bool
    gpu: bool
    by_hand: bool
    dropout: bool
    folds: bool
    """Whether batch and heads are both above 1, so that folding them into one dimension copies what is not contiguous."""


def kept(name: str, size: str, itemsize: int, source: str) -> Piece:
    """A tensor made in forward that lives until its backward."""
    return Piece(name, size, itemsize, "activation", source)


def passing(name: str, size: str, itemsize: int, source: str = "lives for a few ops") -> Piece:
    """A tensor that is gone before the moment ends."""
    return Piece(name, size, itemsize, "temporary", source)


def of(name: str) -> str:
    """The name of a gradient."""
    return f"gradient of {name}"


def d(name: str, size: str, itemsize: int) -> Piece:
    """The gradient of something that is no parameter: made in backward, freed by the op before."""
    return passing(of(name), size, itemsize, PASSED_ON)


def grad(c: Setting, name: str, size: str) -> Piece:
    """A parameter's gradient: as many bytes as the parameter."""
    return Piece(of(name), size, c.stream, "gradient", "AccumulateGrad keeps it in .grad for the optimizer")


# ---- norms


def layer_norm(c: Setting, name: str, x: str, y: str, *, last: bool = False) -> Op:
    """x, y: (batch, tokens, width). Saves its input, and mean and 1/σ of every token.

    The statistics are FP32 on a GPU, of the input's type on a CPU. In backward the input's gradient is added into the
    stream's in place; that of the `last` norm, where backward begins, becomes the stream's gradient.
    """
    dx = GRADIENT if last else of(x)
    statistics = 4 if c.gpu else c.stream
    source = f"{name}: layer_norm saves its input, mean and 1/σ"
    keep = passing if c.autocast else kept  # autocast hands the Linear a BF16 copy, so nobody saves this one
    return Op(
        name,
        (
            keep(y, STREAM, c.stream, f"output of {name}; the Linear after it saves its input"),
            kept(f"mean of {name}", "b·s", statistics, source),
            kept(f"1/σ of {name}", "b·s", statistics, source),
        ),
        (
            passing(dx, STREAM, c.stream, PASSED_ON),
            grad(c, f"{name}.weight", "h"),
            grad(c, f"{name}.bias", "h"),
            of(y),
            x,
            f"mean of {name}",
            f"1/σ of {name}",
            *([] if last else [dx]),
        ),
    )


def rms_norm(c: Setting, name: str, x: str, y: str, *, last: bool = False) -> Op:
    """x, y: (batch, tokens, width). One fused op on a GPU, which saves its input and 1/rms of every token in FP32.

    The CPU has no such kernel: it squares, averages, takes a root and multiplies, each an op of its own and in FP32.
    So the normalised input is kept as well, and of a BF16 input an FP32 copy in its stead.
    """
    dx, dy = GRADIENT if last else of(x), of(y)
    keep = passing if c.autocast else kept
    out = keep(y, STREAM, c.stream, f"output of {name}; the Linears after it save their input")
    rms = kept(f"1/rms of {name}", "b·s", 4, f"{name}: rms_norm saves 1/rms")
    weight = grad(c, f"{name}.weight", "h")
    if c.gpu:
        backward = [passing(dx, STREAM, c.stream, PASSED_ON), weight, dy, x, rms.name, *([] if last else [dx])]
        return Op(name, (out, rms), tuple(backward))
    upcast = c.stream == 2
    normal = kept(f"normalised {x}", STREAM, 4, f"{name}: the product with the weight saves its other factor")
    forward: list[Row] = [
        passing(f"{x} squared", STREAM, 4),
        passing(f"mean square of {x}", "b·s", 4),
        rms,
        f"mean square of {x}",
        f"{x} squared",
        normal,
    ]
    if upcast:
        copy = kept(
            f"FP32 copy of {x}", STREAM, 4, f"{name}: computed in FP32 on a CPU, saves its input as it reads it"
        )
        x = copy.name
        forward = [copy, *forward, passing(f"FP32 {y}", STREAM, 4), out, f"FP32 {y}"]
    else:
        forward.append(out)
    by_weight, root, square = f"{dy} × normalised", of(rms.name), f"gradient of {name}'s square"
    direct = f"FP32 {dx}" if upcast else dx
    indirect = f"{dx} through the square"
    backward: list[Row] = [passing(f"FP32 {dy}", STREAM, 4, PASSED_ON), dy] if upcast else []
    backward += [passing(by_weight, STREAM, 4), passing(of(normal.name), STREAM, 4, PASSED_ON)]
    if upcast:
        backward += [passing(f"FP32 {weight.name}", "h", 4), by_weight, weight, f"FP32 {weight.name}", f"FP32 {dy}"]
    else:
        backward += [weight, by_weight, dy]
    backward += [
        normal.name,
        passing(f"{root}, by token and feature", STREAM, 4),
        passing(direct, STREAM, 4, PASSED_ON),
    ]
    backward += [passing(root, "b·s", 4), f"{root}, by token and feature", of(normal.name)]
    if not (last or upcast):
        backward.append(direct)  # autograd adds it to the stream's gradient as soon as it is there
    backward += [passing(f"{root}, step {i}", "b·s", 4) for i in (1, 2, 3)]
    backward += [f"{root}, step 2", f"{root}, step 1", root, rms.name]
    backward += [passing(square, STREAM, 4), f"{root}, step 3", passing(f"{name}: x to the power 1", STREAM, 4)]
    backward += [passing(f"{name}: 2·x", STREAM, 4), passing(indirect, STREAM, 4)]
    backward += [f"{name}: 2·x", f"{name}: x to the power 1", square, x, indirect]
    if upcast:
        backward += [passing(dx, STREAM, 2, PASSED_ON), direct, *([] if last else [dx])]
    return Op(name, tuple(forward), tuple(backward))


# ---- Linear, dropout, the sum


def linear(
    c: Setting,
    name: str,
    size: str,
    x: str,
    x_size: str,
    y: Piece,
    *,
    bias: str = "",
    casts_x: bool = False,
    frees_x: bool = True,
    frees_dy: bool = True,
    dx: str = "",
    after_dx: tuple[Row, ...] = (),
) -> Op:
    """A Linear saves its input, and needs its weight again. Backward makes three gradients, then lets go.

    Under autocast the weight is cast to BF16 once and the copy is saved; an FP32 input (`casts_x`) is cast too, by every
    Linear that reads it, for only weights are cached. The copy of the bias waits in that cache for autocast to end.
    Gradients come in BF16 and are cast to FP32.

    frees_x: this is the first op to save x, so the last to let it go. frees_dy: nobody else holds the output's gradient.
    dx: the name of the input's gradient. after_dx: what happens to it at once, such as adding it to another.
    """
    dx = dx or of(x)
    weight, biases = grad(c, f"{name}.weight", size), [grad(c, f"{name}.bias", bias)] if bias else []
    freed = [of(y.name)] if frees_dy else []
    if not c.autocast:
        backward = [weight, passing(dx, x_size, c.compute, PASSED_ON), *biases, *freed, *([x] if frees_x else [])]
        return Op(name, (y,), (*backward, *after_dx))
    source = f"{name}: autocast computes in BF16 and saves what it computed with"
    forward = [passing(f"BF16 copy of {name}.bias", bias, 2, "autocast's cache, emptied at its end")] if bias else []
    copy = kept(f"BF16 copy of {name}.weight", size, 2, source)
    forward.append(copy)
    cast = kept(f"BF16 copy of {x} for {name}", x_size, 2, source)
    if casts_x:
        forward.append(cast)
    casts = [passing(f"BF16 {p.name}", p.size, 2, PASSED_ON) for p in (weight, *biases)]
    first = passing(f"BF16 {dx}" if casts_x else dx, x_size, 2, PASSED_ON)
    backward = [*casts, first, *freed, *([cast.name] if casts_x else [x] if frees_x else []), copy.name]
    if casts_x:
        backward += [passing(dx, x_size, 4, PASSED_ON), first.name]
    backward += after_dx
    for small, whole in zip(casts, (weight, *biases), strict=True):
        backward += [whole, small.name]
    return Op(name, (*forward, y), tuple(backward))


def dropout(c: Setting, x: str, size: str, y: Piece, *, frees_x: bool = True, frees_dy: bool = True) -> Op:
    """Saves its mask: bool from the GPU's native_dropout, and on a CPU scaled and of the input's type."""
    kind = "native_dropout saves a bool mask" if c.gpu else "the CPU's dropout saves a mask of the input's type"
    mask = kept(f"dropout mask of {x}", size, 1 if c.gpu else y.itemsize, kind)
    made = (y, mask) if c.gpu else (mask, y)
    freed = [of(y.name)] if frees_dy else []
    return Op(
        f"dropout of {x}",
        (*made, *([x] if frees_x else [])),
        (passing(of(x), size, y.itemsize, PASSED_ON), *freed, mask.name),
    )


def add_to_stream(c: Setting, x: str, y: Piece) -> Op:
    """The residual sum. It saves nothing; its backward hands the stream's gradient on, cast to BF16 under autocast."""
    return Op("residual sum", (y, x), (passing(of(x), STREAM, 2, PASSED_ON),) if c.autocast else ())


def leave(*names: str) -> Op:
    """A method returns, and what only its variables held is freed."""
    return Op("return", names, ())


# ---- feed-forward


def gelu(c: Setting, x: str, y: str) -> Op:
    """Saves its input. x, y: (batch, tokens, hidden)."""
    out = kept(y, "b·s·f", c.compute, "output of gelu; the Linear after it saves its input")
    return Op("gelu", (out,), (passing(of(x), "b·s·f", c.compute, PASSED_ON), of(y), x))


def swiglu(c: Setting, gate: str, activated: str, up: str, y: str) -> tuple[Op, Op]:
    """silu(gate), which saves its input, and the product with `up`, which saves both. All: (batch, tokens, hidden)."""
    size, e = "b·s·f", c.compute
    silu = kept(activated, size, e, "output of silu; the product after it saves its factors")
    product = kept(y, size, e, "product of silu and up; the Linear after it saves its input")
    return (
        Op("silu", (silu,), (passing(of(gate), size, e, PASSED_ON), of(activated), gate)),
        Op(
            "product with up",
            (product,),
            (
                passing(of(up), size, e, PASSED_ON),
                passing(of(activated), size, e, PASSED_ON),
                of(y),
                up,
                activated,
            ),
        ),
    )


# ---- attention


def unpack(c: Setting, packed: str, parts: tuple[str, str, str]) -> Op:
    """q, k, v are views of one Linear's output. Backward stacks their gradients, then copies them into its layout."""
    stacked = passing(f"stacked {of(packed)}", "3·b·s·h", c.compute)
    whole = passing(of(packed), "3·b·s·h", c.compute, PASSED_ON)
    return Op("unpack q, k, v", (), (stacked, *map(of, reversed(parts)), whole, stacked.name))


def fused_attention(c: Setting, saved: tuple[str, ...], inputs: dict[str, str], y: str) -> Op:
    """Flash attention and its kin: saves q, k, v, its output and one number a row, never the scores.

    inputs: name → size of q, k and v; saved: the storages in which they lie. Dao et al. 2022, section 3.1.
    """
    source = "fused attention saves its output and log Σ exp of every row of scores, in FP32"
    out = kept(y, STREAM, c.compute, f"{source}; the Linear after it saves its input too")
    rows = kept("log Σ exp of the scores", "b·a·s", 4, source)
    made: list[Row] = [out, rows]
    backward: list[Row] = [d(name, size, c.compute) for name, size in inputs.items()]
    backward += [of(y), *saved, rows.name, y]
    return Op("fused attention", tuple(made), tuple(backward))


def folded(c: Setting, name: str, itemsize: int, source: str) -> list[Row]:
    """The contiguous copy of q, k or v that a batched matrix product makes and saves, where folding needs one."""
    return [kept(f"copy of {name}", STREAM, itemsize, source)] if c.folds else []


def attention_by_hand(c: Setting, packed: str, y: str) -> tuple[Op, ...]:
    """softmax(q kᵀ / √d, masked) v, op by op: every (tokens × tokens) matrix that an op saves is there L times.

    Korthikanti et al. 2022, section 4.1, has 5·b·a·s·s bytes of them in BF16 with a one-byte dropout mask.
    """
    e = c.compute
    weights = "dropped weights" if c.dropout else "weights"
    product = "bmm saves its factors"
    score_copies = [*folded(c, "q", e, product), *folded(c, "k", e, product)]
    freed = [p.name for p in reversed(score_copies)] or [packed]
    passes = lambda name: passing(of(name), SCORES, e, PASSED_ON)  # noqa: E731
    ops = [
        Op(
            "q kᵀ",
            (*score_copies, passing("raw scores", SCORES, e)),
            (d("k", STREAM, e), d("q", STREAM, e), of("raw scores"), *freed),
        ),
        Op(
            "scaling",
            (passing("scores", SCORES, e, "a variable holds them until the method returns"), "raw scores"),
            (passes("raw scores"), of("scores")),
        ),
        Op(
            "masked_fill",
            (
                passing("ones", "s·s", 1),
                kept("causal mask", "s·s", 1, "masked_fill saves its bool mask"),
                "ones",
                passing("masked scores", SCORES, e),
            ),
            (passes("scores"), of("masked scores"), "causal mask"),
        ),
        Op(
            "softmax",
            (kept("weights", SCORES, e, "softmax saves its output"), "masked scores"),
            (passes("masked scores"), of("weights"), "weights"),
        ),
    ]
    if c.dropout:
        out = kept(weights, SCORES, e, "output of dropout; the product with v saves its factors")
        ops.append(dropout(c, "weights", SCORES, out, frees_x=False))
    return (*ops, *_weights_times_v(c, weights, y, e, product))


def _weights_times_v(c: Setting, weights: str, y: str, e: int, product: str) -> list[Op]:
    """Weights times v, and the copy that puts the heads side by side again."""
    v = folded(c, "v", e, product)
    mixed = passing("weights · v", STREAM, e)
    out = kept(y, STREAM, c.compute, "heads side by side again; the Linear after it saves its input")
    spread = [passing("copy of its gradient", STREAM, e)] if c.folds else []
    dy = spread[0].name if spread else of(y)
    return [
        Op(
            "weights · v",
            (*v, mixed),
            (
                d("v", STREAM, e),
                passing(of(weights), SCORES, e, PASSED_ON),
                dy,
                *[p.name for p in v],
                *([weights] if c.dropout else []),
            ),
        ),
        Op("heads side by side", (out, mixed.name), (*spread, of(y)) if spread else ()),
    ]


def attention_by_parts(c: Setting, packed: str, y: str) -> tuple[Op, ...]:
    """What the CPU's scaled_dot_product_attention runs when it has dropout: no fused kernel, every matrix stored.

    q and k are scaled first, the causal mask is a matrix of 0 and −∞ that is added, and BF16 is computed in FP32.
    """
    upcast = c.compute == 2
    product = "bmm saves its factors"
    q, k, v = (passing(f"FP32 {n}", STREAM, 4, "math attention computes in FP32") for n in ("q", "k", "v"))
    casts = [q, k, v] if upcast else []
    scaled_q, scaled_k = passing("scaled q", STREAM, 4), passing("scaled k", STREAM, 4)
    copies = [*folded(c, "q", 4, product), *folded(c, "k", 4, product)]
    scalars = passing("0 and −∞", "2", 4)
    before: list[Row] = [*casts, scaled_q, passing("ones", "s·s", 1), passing("lower triangle", "s·s", 1), "ones"]
    before += [scalars, passing("mask of 0 and −∞", "s·s", 4), scalars.name, "lower triangle", scaled_k, *copies]
    before += [passing("raw scores", SCORES, 4), scaled_k.name]
    passed = [passing(of(n), SCORES, 4, PASSED_ON) for n in ("weights", "scores")]
    scaled = [passing(of(f"scaled {n}"), STREAM, 4, PASSED_ON) for n in ("k", "q")]
    inner = [passing(f"FP32 {of(n)}", STREAM, 4, PASSED_ON) for n in ("v", "k", "q")] if upcast else []
    grads = [d(n, STREAM, c.compute) for n in ("v", "k", "q")]
    rescaled = inner[1:] if upcast else grads[1:]
    after = [rescaled[0], scaled[0].name, rescaled[1], scaled[1].name]
    for wide, narrow in zip(inner, grads, strict=False):
        after += [narrow, wide.name]
    mixed = passing("FP32 weights · v" if upcast else "weights · v", STREAM, 4)
    narrow = passing("weights · v", STREAM, 2)
    weights_cast = passing("BF16 copy of the weights", SCORES, 2, "the kernel returns them, nobody asked")
    v_copy = folded(c, "v", 4, product)
    out = kept(y, STREAM, c.compute, "heads side by side again; the Linear after it saves its input")
    wide = passing(f"FP32 {of(y)}", STREAM, 4, PASSED_ON)
    spread = passing("copy of its gradient", STREAM, 4)
    return (
        Op("q kᵀ", tuple(before), (*scaled, of("scores"), *[p.name for p in reversed(copies)], *after)),
        Op(
            "softmax",
            (
                passing("masked scores", SCORES, 4),
                "raw scores",
                kept("weights", SCORES, 4, "softmax saves its output"),
                "masked scores",
            ),
            (passed[1], passed[0].name, "weights"),
        ),
        dropout(
            c,
            "weights",
            SCORES,
            kept("dropped weights", SCORES, 4, "output of dropout; the product with v saves its factors"),
            frees_x=False,
        ),
        Op(
            "weights · v",
            (
                *([weights_cast] if upcast else []),
                *v_copy,
                mixed,
                *([narrow, mixed.name] if upcast else []),
                scaled_q.name,
                "mask of 0 and −∞",
                *[p.name for p in reversed(casts)],
                *([weights_cast.name] if upcast else []),
                out,
                narrow.name if upcast else mixed.name,
            ),
            (
                *([wide, of(y)] if upcast else []),
                spread,
                wide.name if upcast else of(y),
                inner[0] if upcast else grads[0],
                passing(of("dropped weights"), SCORES, 4, PASSED_ON),
                spread.name,
                *[p.name for p in v_copy],
                "dropped weights",
            ),
        ),
    )


# ---- rotary positions


def rotary(c: Setting, name: str, heads: str, x: str, y: str, *, tables: bool = False) -> Op:
    """y = x · cos + (−x₂, x₁) · sin, where x₁ and x₂ are the halves of a head. Su et al. 2021, section 3.4.

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
