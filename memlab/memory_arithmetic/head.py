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
    """Logits and cross-entropy: log_softmax saves its output, (tokens × vocabulary), in FP32 under autocast.

    Its backward is a moment of its own: log-probabilities, their gradient and that of the logits, 3·b·s·v at once.
    """
    size, wide = "b·s·v", 4 if c.autocast else c.compute
    logits = passing("logits", size, c.compute, "a variable holds them until the model returns")
    copy = passing("FP32 logits", size, 4, "autocast computes the loss in FP32")
    log = kept("log-probabilities", size, wide, "log_softmax saves its output")
    loss = (passing if c.accumulating else kept)("loss", "1", wide, "a variable holds it")
    total = kept("weight of the targets", "1", wide, "nll_loss saves the number of targets")
    one = passing(of(loss.name), "1", wide, "backward begins with 1")
    d_log = passing(of(log.name), size, wide, "the loss's gradient, zero but at the targets")
    d_logits = passing(of(copy.name if c.autocast else logits.name), size, wide, "softmax minus the targets")
    backward = (one, d_log, total.name)  # it waits until backward ends, for backward() holds what it begins with
    if c.accumulating:
        backward = (d_log, one.name, total.name)
    cast = [
        leave("output of norm"),
        Op("cast of the logits", (copy,), (passing(of(logits.name), size, 2, "cast back"), of(copy.name))),
    ]
    waits = grad(c, "token_embedding.weight", "v·h") if c.autocast else by_the_head(c)
    name, made = ("token_embedding", waits) if tied else ("head", None)
    return [
        linear(c, name, "v·h", "output of norm", logits, casts_x=True, d_weight=made),
        *(cast if c.autocast else []),
        Op("log_softmax", (log,), (d_logits, d_log.name, log.name)),
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
