"""What both families share: the stream, the token embedding's gradient, the logits and the loss."""

from __future__ import annotations

from memlab.memory_arithmetic.ledger import Op, Piece, Row
from memlab.memory_arithmetic.ops import STREAM, Setting, accumulated, grad, kept, leave, linear, of, passing


def stream(c: Setting, name: str, reader: str) -> Piece:
    """The residual stream at one place: kept because a norm reads it."""
    return kept(name, STREAM, c.stream, f"residual sum; {reader} saves its input")


def branch(c: Setting) -> Piece:
    """What a block's attention, or its feed-forward part, adds to the stream."""
    return passing("branch", STREAM, c.compute, "added to the stream")


def by_the_head(c: Setting) -> Piece:
    """A tied embedding's gradient as the head makes it: it waits, all through backward, for the embedding's own."""
    name = "gradient of token_embedding.weight by the head"
    return passing(name, "v·h", c.stream, "autograd's sum of both uses waits for the second")


def embedded(c: Setting, tied: bool, dy: str) -> list[Row]:
    """The token embedding's gradient, made from `dy`. A tied one is summed with what the head has made.

    The head's is the transpose of a matrix product, a view, which autograd does not add into: so there are three at
    once. What autocast's cast has made it does add into.
    """
    whole = grad(c, "token_embedding.weight", "v·h")
    if not tied:
        return [whole, dy, *accumulated(c, whole)]
    second = passing("gradient of token_embedding.weight by the embedding", "v·h", c.stream)
    both = [second, dy, second.name] if c.autocast else [second, dy, whole, by_the_head(c).name, second.name]
    return [*both, *accumulated(c, whole)]


def head(c: Setting, tied: bool) -> list[Op]:
    """Logits and cross-entropy: log_softmax saves its output, (tokens × vocabulary).

    Its backward is a moment of its own: log-probabilities, their gradient and that of the logits, 3·b·s·v at once.
    Autocast computes a part in FP32: on a CPU all of cross-entropy, whose input it casts; on a GPU only its second
    half, nll_loss, so log-probabilities are there in 16 bit and, for nll_loss, which saves them too, in 32.
    """
    size, wide, late = "b·s·v", 4 if c.autocast else c.compute, c.autocast and c.gpu
    logits = passing("logits", size, c.compute, "a variable holds them until the model returns")
    log = kept("log-probabilities", size, c.compute if late else wide, "log_softmax saves its output")
    if late:
        cast = kept(f"FP32 {log.name}", size, 4, "autocast computes nll_loss in FP32, which saves its input")
    else:
        cast = passing("FP32 logits", size, 4, "autocast computes the loss in FP32")
    loss = (passing if c.accumulating else kept)("loss", "1", wide, "a variable holds it")
    total = kept("weight of the targets", "1", wide, "nll_loss saves the number of targets")
    one = passing(of(loss.name), "1", wide, "backward begins with 1")
    d_log = passing(of((cast if late else log).name), size, wide, "the loss's gradient, zero but at the targets")
    read = [cast.name, total.name] if late else [total.name]
    backward = (one, d_log, *read)  # it waits until backward ends, for backward() holds what it begins with
    if c.accumulating:
        backward = (d_log, one.name, *read)
    d_logits = passing(of(logits.name), size, c.compute, "softmax minus the targets")
    waits = grad(c, "token_embedding.weight", "v·h") if c.autocast else by_the_head(c)
    name, made = ("token_embedding", waits) if tied else ("head", None)
    if late:
        back = passing(of(log.name), size, c.compute, "cast back")
        between = [
            Op("log_softmax", (log,), (d_logits, back.name, log.name)),
            Op(f"cast of the {log.name}", (cast,), (back, d_log.name)),
        ]
    elif c.autocast:
        d_cast = passing(of(cast.name), size, 4, "softmax minus the targets")
        between = [
            leave("output of norm"),
            Op("cast of the logits", (cast,), (passing(of(logits.name), size, 2, "cast back"), d_cast.name)),
            Op("log_softmax", (log,), (d_cast, d_log.name, log.name)),
        ]
    else:
        between = [Op("log_softmax", (log,), (d_logits, d_log.name, log.name))]
    return [
        linear(c, name, "v·h", "output of norm", logits, casts_x=True, d_weight=made),
        *([leave("output of norm")] if late else []),
        *between,
        Op("nll_loss", (loss, total), backward),
    ]


SHARE = "share of the mean loss"


def share_of_the_mean(c: Setting) -> Op:
    """The loss over the number of micro-batches: a variable holds this in its stead, and backward begins here."""
    itemsize = 4 if c.autocast else c.compute
    share = kept(SHARE, "1", itemsize, "the loss over the number of micro-batches; a variable holds it")
    one = passing(of(share.name), "1", itemsize, "backward begins with 1")
    d_loss = passing(of("loss"), "1", itemsize, "1 over the number of micro-batches")
    return Op("division of the loss", (share, "loss"), (one, d_loss))


def sum_of_losses() -> Piece:
    """The running sum of the shares, which is the mean loss when the last micro-batch is done."""
    return kept("running sum of losses", "1", 4, "a variable holds it from the first micro-batch on, in FP32")
