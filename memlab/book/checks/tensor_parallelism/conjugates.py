"""Exercise 3 of chapter 14: the conjugate pair of functions between which a layer is split."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of
from memlab.book.checks.tensor_parallelism.played import Regions, Wire, grad_is_on, play
from memlab.memory_timeline import Meter
from memlab.ranks import ring_bytes

_ROWS, _WIDTH, _HIDDEN = 6, 8, 12


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _weights() -> tuple[Tensor, Tensor, Tensor]:
    return _drawn(1, _ROWS, _WIDTH), _drawn(2, _HIDDEN, _WIDTH), _drawn(3, _WIDTH, _HIDDEN)


def _part(x: Tensor, dim: int, wire: Wire) -> Tensor:
    return x.chunk(wire.ranks, dim)[wire.rank].clone()


def _right(wire: Wire) -> tuple[Callable, Callable]:
    """Both functions as they should be, of one argument."""
    regions = Regions(wire)
    return regions.copy_to_ranks, regions.reduce_from_ranks


@exercise
def copy_to_ranks(answer: object) -> str:
    """Exercise 3, first part: (x, all_reduce) → x, with the sum over the ranks in backward."""
    function = a_function(answer, "copy_to_ranks(x, all_reduce)")

    def run(wire: Wire) -> None:
        mine, (_, reduce) = (lambda x: function(x, wire.all_reduce)), _right(wire)
        _copied(mine, wire)
        _layer(mine, reduce, wire)
        _shared(mine, reduce, wire)

    for ranks in (2, 1, 3):
        play(run, ranks)
    return "Forward it costs nothing at all; and without it each rank would train on its own part of x's gradient."


@exercise
def reduce_from_ranks(answer: object) -> str:
    """Exercise 3, second part: (x, all_reduce) → the sum over the ranks, with nothing in backward."""
    function = a_function(answer, "reduce_from_ranks(x, all_reduce)")

    def run(wire: Wire) -> None:
        mine, (copy, _) = (lambda x: function(x, wire.all_reduce)), _right(wire)
        _summed(mine, wire)
        _layer(copy, mine, wire)
        _shared(copy, mine, wire)

    for ranks in (2, 1, 3):
        play(run, ranks)
    return (
        f"Whatever lies between the two is split: one sum of {_ROWS * _WIDTH * 8:,} B forward, and one backward, "
        "however wide the middle is."
    )


def _tensor(found: object, shape: torch.Size, name: str) -> None:
    grad_is_on()
    if not isinstance(found, Tensor):
        raise Wrong(f"{name}: expected a tensor, found {kind_of(found)}.")
    if found.shape != shape:
        raise Wrong(f"{name}: expected the shape {tuple(shape)}, found {tuple(found.shape)}.")
    if found.dtype != torch.float64:
        raise Wrong(f"{name}: expected the dtype of x, torch.float64, found {found.dtype}.")


def _ranks_own(wire: Wire) -> Tensor:
    return _drawn(5, _ROWS, _WIDTH) + wire.rank


def _copied(copy: Callable, wire: Wire) -> None:
    """Forward alone: what it returns, sends and holds."""
    where, x, before = f"rank {wire.rank} of {wire.ranks}", _ranks_own(wire).requires_grad_(), _ranks_own(wire)
    with Meter(inputs=[x, before, wire.results]) as meter:
        start = meter.timeline.totals[-1]
        y = copy(x)
        held = meter.timeline.peak_bytes - start
    _tensor(y, x.shape, where)
    if wire.sent:
        raise Wrong(f"{where}: forward calls a collective. All ranks have x already.")
    if not torch.equal(y, before) or not torch.equal(x, before):
        raise Wrong(f"{where}: forward changes values; it returns x as it is.")
    if held > 0:
        raise Wrong(f"{where}: forward makes {held:,} B. A view of x is enough.")


def _summed(reduce: Callable, wire: Wire) -> None:
    """Forward alone: what it returns and holds."""
    where, x, before = f"rank {wire.rank} of {wire.ranks}", _ranks_own(wire).requires_grad_(), _ranks_own(wire)
    total = sum(before + rank - wire.rank for rank in range(wire.ranks))
    with Meter(inputs=[x, before, total, wire.results]) as meter:
        start = meter.timeline.totals[-1]
        y = reduce(x)
        held = meter.timeline.peak_bytes - start
    _tensor(y, x.shape, where)
    if not torch.equal(x, before):
        raise Wrong(
            f"{where}: forward has changed its input. Others may need it, for their backward too: sum into a tensor of "
            "its own."
        )
    if not torch.allclose(y, total):
        look = " It is the mean; a sum is asked for." if torch.allclose(y * wire.ranks, total) else ""
        look = " It is this rank's own." if torch.equal(y, before) and wire.ranks > 1 else look
        raise Wrong(f"{where}: forward does not return the sum of all ranks' tensors.{look}")
    if (more := held - total.nbytes) > 0:
        raise Wrong(f"{where}: forward holds {more:,} B more than the sum that it returns.")


def _layer(copy: Callable, reduce: Callable, wire: Wire) -> None:
    """Two matmuls, split between the two functions, with a residual; against the same in one process."""
    x, up, down = (tensor.requires_grad_() for tensor in _weights())
    (x + (x @ up.t()).tanh() @ down.t()).square().sum().backward()
    truth = {"x": x.grad, "up": _part(up.grad, 0, wire), "down": _part(down.grad, 1, wire)}
    x, up, down = _weights()
    mine = {"x": x, "up": _part(up, 0, wire), "down": _part(down, 1, wire)}
    for tensor in mine.values():
        tensor.requires_grad_()
    before = len(wire.sent)
    y = mine["x"] + reduce((copy(mine["x"]) @ mine["up"].t()).tanh() @ mine["down"].t())
    y.square().sum().backward()
    _gradients(mine, truth, wire)
    due = ring_bytes("all_reduce", x.nbytes, wire.ranks)
    for backward, name in ((False, "forward"), (True, "backward")):
        sent = sum(one.sent_bytes for one in wire.sent[before:] if one.in_backward == backward)
        if sent != due:
            raise Wrong(
                f"the gradients are right, and in {name} of two matmuls with the two functions around them a rank of "
                f"{wire.ranks} sends {sent:,} B; one all-reduce of {x.nbytes:,} B sends {due:,}."
            )


def _gradients(mine: dict[str, Tensor], truth: dict[str, Tensor], wire: Wire) -> None:
    for name in ("down", "up", "x"):
        found, due = mine[name].grad, truth[name]
        what = {
            "down": "the second weight, whose outputs reduce_from_ranks sums",
            "up": "the first weight, between the two functions",
            "x": "x, which copy_to_ranks hands on",
        }[name]
        where = f"rank {wire.rank} of {wire.ranks}: the gradient of {what},"
        if found is None:
            raise Wrong(f"{where} is missing. Is the graph cut?")
        if torch.allclose(found, due, rtol=1e-9, atol=1e-9):
            continue
        look = "Is it what backward of the function should return, and in no tensor that is someone else's, too?"
        if torch.allclose(found, due * wire.ranks) or torch.allclose(found, due / wire.ranks):
            look = (
                f"It is wrong by the factor {wire.ranks}. Every rank has the gradient of the sum already, and it is "
                "each summand's."
            )
        elif name == "x":
            look = "Each rank has computed a summand of it; what is missing is their sum, and nothing but that."
        raise Wrong(f"{where} is not what a single process finds. {look}")


def _shared(copy: Callable, reduce: Callable, wire: Wire) -> None:
    """A gradient that goes two ways, as at a residual: whoever sums in it spoils it for the other."""
    x, factor = _drawn(4, _ROWS, _WIDTH).requires_grad_(), _drawn(6, _ROWS, _WIDTH)
    given = factor.clone()
    (x + reduce(copy(x))).backward(given)
    if not torch.allclose(x.grad, factor * (1 + wire.ranks)) or not torch.equal(given, factor):
        raise Wrong(
            f"{wire.ranks} ranks: in x + reduce_from_ranks(copy_to_ranks(x)) one gradient goes both ways, and is "
            "changed on its way: backward must not write into the gradient that it is given."
        )
