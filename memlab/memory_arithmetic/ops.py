"""Each op as memory sees it: what its forward keeps for backward, and what its backward makes before it lets that go.

Every function returns an `Op`: two short stories of tensors made and freed. Where the CPU's kernel keeps something
else than the GPU's, or autocast adds a copy, the branch stands here and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from memlab.memory_arithmetic.ledger import Op, Piece, Row

STREAM = "b·s·h"
GRADIENT = "gradient of the stream"
PASSED_ON = "a gradient on its way to the op before"


@dataclass(frozen=True)
class Setting:
    """How the ops run. `compute`: bytes of what a matrix product gives; `stream`: bytes of the residual stream.

    accumulating: every parameter has a gradient already, from the micro-batches before. leaving: each gradient goes to
    main memory when it is complete. recomputed: what backward reads was computed again by a checkpoint, and goes with
    the formula that reads it, not with its op.
    """

    compute: int
    stream: int
    autocast: bool
    gpu: bool
    by_hand: bool
    dropout: bool
    batch: int
    heads: int
    accumulating: bool = False
    leaving: bool = False
    recomputed: bool = False

    @property
    def keeps_gradients(self) -> bool:
        """Whether what backward makes for a parameter stays on the device."""
        return not (self.accumulating or self.leaving)


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
    """A parameter's gradient: as many bytes as the parameter. Where it does not stay, see `accumulated`."""
    if c.leaving:
        return passing(f"new {of(name)}", size, c.stream, "it leaves for main memory when it is complete")
    if c.accumulating:
        return passing(f"new {of(name)}", size, c.stream, "AccumulateGrad adds it to .grad in place")
    return Piece(of(name), size, c.stream, "gradient", "AccumulateGrad keeps it in .grad for the optimizer")


def accumulated(c: Setting, *gradients: Piece) -> tuple[Row, ...]:
    """What becomes of parameters' gradients when the op that made them is done: they stay, or go, added or moved."""
    return () if c.keeps_gradients else tuple(piece.name for piece in gradients)


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
    weights = grad(c, f"{name}.weight", "h"), grad(c, f"{name}.bias", "h")
    return Op(
        name,
        (
            keep(y, STREAM, c.stream, f"output of {name}; the Linear after it saves its input"),
            kept(f"mean of {name}", "b·s", statistics, source),
            kept(f"1/σ of {name}", "b·s", statistics, source),
        ),
        (
            passing(dx, STREAM, c.stream, PASSED_ON),
            *weights,
            of(y),
            x,
            f"mean of {name}",
            f"1/σ of {name}",
            *([] if last else [dx]),
            *accumulated(c, *weights),
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
        backward = [
            passing(dx, STREAM, c.stream, PASSED_ON),
            weight,
            dy,
            x,
            rms.name,
            *([] if last else [dx]),
            *accumulated(c, weight),
        ]
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
    backward += [normal.name] if c.recomputed else []
    if upcast:
        backward += [
            passing(f"FP32 {weight.name}", "h", 4),
            by_weight,
            weight,
            f"FP32 {weight.name}",
            f"FP32 {dy}",
            *accumulated(c, weight),
        ]
    else:
        backward += [weight, by_weight, dy, *accumulated(c, weight)]
    backward += [] if c.recomputed else [normal.name]
    backward += [passing(f"{root}, by token and feature", STREAM, 4), passing(direct, STREAM, 4, PASSED_ON)]
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
    y: Piece,
    *,
    x_size: str = STREAM,
    bias: str = "",
    casts_x: bool = False,
    frees_x: bool = True,
    frees_dy: bool = True,
    dx: str = "",
    after_dx: tuple[Row, ...] = (),
    d_weight: Piece | None = None,
) -> Op:
    """A Linear saves its input, and needs its weight again. Backward makes three gradients, then lets go.

    Under autocast the weight is cast to BF16 once and the copy is saved. An FP32 input (`casts_x`) is cast too, by
    every Linear that reads it, for autocast caches only weights. The copy of the bias waits in that cache until
    autocast ends. Gradients come in BF16 and are cast to FP32.

    name: of the module; size, bias: of its parameters. x: saved input, of `x_size`. y: output.
    frees_x: this is the first op to save x, so the last to let it go. frees_dy: nobody else holds y's gradient.
    dx: the name of x's gradient. after_dx: what happens to it at once, such as being added to another.
    d_weight: what the weight's gradient is, if it waits for another to become the parameter's.
    """
    dx = dx or of(x)
    weight = d_weight or grad(c, f"{name}.weight", size)
    biases = [grad(c, f"{name}.bias", bias)] if bias else []
    freed = [of(y.name)] if frees_dy else []
    if not c.autocast:
        by_formula, saved = [weight, passing(dx, x_size, c.compute, PASSED_ON)], [x] if frees_x else []
        backward = [*by_formula, *saved, *biases, *freed] if c.recomputed else [*by_formula, *biases, *freed, *saved]
        return Op(name, (y,), (*backward, *after_dx, *accumulated(c, *([] if d_weight else [weight]), *biases)))
    source = f"{name}: autocast computes in BF16 and saves what it computed with"
    forward = [passing(f"BF16 copy of {name}.bias", bias, 2, "autocast's cache, emptied at its end")] if bias else []
    copy = kept(f"BF16 copy of {name}.weight", size, 2, source)
    forward.append(copy)
    cast = kept(f"BF16 copy of {x} for {name}", x_size, 2, source)
    if casts_x:
        forward.append(cast)
    casts = [passing(f"BF16 {p.name}", p.size, 2, PASSED_ON) for p in (weight, *biases)]
    first = passing(f"BF16 {dx}" if casts_x else dx, x_size, 2, PASSED_ON)
    saved = [*([cast.name] if casts_x else [x] if frees_x else []), copy.name]
    backward = [*casts[:1], first, *(saved if c.recomputed else []), *casts[1:], *freed]
    backward += [] if c.recomputed else saved
    if casts_x:
        backward += [passing(dx, x_size, 4, PASSED_ON), first.name]
    backward += after_dx
    for small, whole in zip(casts, (weight, *biases), strict=True):
        backward += [whole, small.name, *([] if whole == d_weight else accumulated(c, whole))]
    return Op(name, (*forward, y), tuple(backward))


def dropout(c: Setting, x: str, size: str, y: Piece, *, dy: str = "", frees_x: bool = True) -> Op:
    """Saves its mask: bool from the GPU's native_dropout, and on a CPU scaled and of the input's type.

    dy: the name of the output's gradient, if backward is to free it.
    """
    kind = "native_dropout saves a bool mask" if c.gpu else "the CPU's dropout saves a mask of the input's type"
    mask = kept(f"dropout mask of {x}", size, 1 if c.gpu else y.itemsize, kind)
    made = (y, mask) if c.gpu else (mask, y)
    dx = passing(of(x), size, y.itemsize, PASSED_ON)
    return Op(
        f"dropout of {x}",
        (*made, *([x] if frees_x else [])),
        (dx, *([dy] if dy else []), mask.name),
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
