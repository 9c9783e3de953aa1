"""Exercise 4 of chapter 14: a row parallel layer's bias, added once, where outputs are whole and where rows are cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of
from memlab.book.checks.tensor_parallelism.played import Regions, Wire, play
from memlab.ranks import ring_bytes

_ROWS, _IN, _OUT = 12, 24, 10


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _inputs() -> dict[str, Tensor]:
    return {"x": _drawn(1, _ROWS, _IN), "weight": _drawn(2, _OUT, _IN), "bias": _drawn(3, _OUT)}


@exercise
def row_parallel(answer: object) -> str:
    """Exercise 4, first part: (x, weight, bias, regions) → the layer's output, whole on every rank."""
    function = a_function(answer, "row_parallel(x, weight, bias, regions)")
    for ranks in (2, 4, 1):
        play(lambda wire: _run(function, wire, False), ranks)
    return (
        "One sum, one bias; and since all ranks have the whole gradient of the output, each has the whole bias's, too."
    )


@exercise
def row_parallel_rows(answer: object) -> str:
    """Exercise 4, second part: (x, weight, bias, regions) → this rank's rows of the layer's output."""
    function = a_function(answer, "row_parallel_rows(x, weight, bias, regions)")
    for ranks in (2, 4, 1):
        play(lambda wire: _run(function, wire, True), ranks)
    return (
        "Half an all-reduce forward, the other half backward: rows are cut, and nothing is sent twice but a small sum."
    )


def _run(function: Callable, wire: Wire, rows_cut: bool) -> None:
    """The answer on a rank, forward and backward, against F.linear in one process."""
    where = f"rank {wire.rank} of {wire.ranks}"
    own = lambda x: x.chunk(wire.ranks)[wire.rank] if rows_cut else x  # noqa: E731
    whole = {name: tensor.requires_grad_() for name, tensor in _inputs().items()}
    right, factor = (
        F.linear(whole["x"], whole["weight"], whole["bias"]),
        _drawn(4, _ROWS, _OUT),
    )
    (right * factor).sum().backward()
    cut = lambda x: x if x.ndim == 1 else x.chunk(wire.ranks, 1)[wire.rank]  # noqa: E731
    mine = {name: cut(tensor).clone().requires_grad_() for name, tensor in _inputs().items()}
    y = function(mine["x"], mine["weight"], mine["bias"], Regions(wire))
    if not isinstance(y, Tensor):
        raise Wrong(f"{where}: expected a tensor, found {kind_of(y)}.")
    if y.shape != own(right).shape:
        raise Wrong(f"{where}: expected an output of shape {tuple(own(right).shape)}, found {tuple(y.shape)}.")
    _output(y, own(right.detach()), whole["bias"].detach(), wire, where)
    forward_bytes = wire.sent_bytes
    if not y.requires_grad:
        raise Wrong(f"{where}: the output is right, and has no graph.")
    (y * own(factor)).sum().backward()
    for name in ("bias", "weight", "x"):
        due = cut(whole[name].grad)
        _gradient(name, mine[name].grad, due, where, rows_cut)
    _sent(forward_bytes, wire.sent_bytes - forward_bytes, right.nbytes, whole["bias"].nbytes, wire, rows_cut)


def _output(y: Tensor, right: Tensor, bias: Tensor, wire: Wire, where: str) -> None:
    if torch.allclose(y, right, rtol=1e-9, atol=1e-9):
        return
    for count in {0, wire.ranks}:
        if torch.allclose(y, right + (count - 1) * bias):
            raise Wrong(f"{where}: the output has the bias {count} times; it is added once.")
    raise Wrong(f"{where}: the output is not x Wᵀ + bias. What a rank computes is a summand of it.")


def _gradient(name: str, found: Tensor | None, due: Tensor, where: str, rows_cut: bool) -> None:
    if found is None:
        raise Wrong(f"{where}: the output is right, and {name} has no gradient. Ranks' {name} would drift apart.")
    if torch.allclose(found, due, rtol=1e-9, atol=1e-9):
        return
    look = ""
    if name == "bias":
        look = (
            " Every rank holds the bias, so every rank needs its whole gradient, or they drift apart."
            + " A rank adds it to its rows only: whose is the rest?" * rows_cut
        )
    raise Wrong(f"{where}: the output is right, and the gradient of {name} is not what one process finds.{look}")


def _sent(forward: int, backward: int, output: int, bias: int, wire: Wire, rows_cut: bool) -> None:
    ranks = wire.ranks
    due = {"forward": ring_bytes("reduce_scatter" if rows_cut else "all_reduce", output, ranks), "backward": 0}
    if rows_cut:
        due["backward"] = ring_bytes("all_gather", output, ranks) + ring_bytes("all_reduce", bias, ranks)
    for name, found in (("forward", forward), ("backward", backward)):
        if found > due[name]:
            raise Wrong(
                f"the values are right, and in {name} a rank of {ranks} sends {found:,} B; {due[name]:,} are enough."
            )
