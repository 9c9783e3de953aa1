"""Ranks played in one process, for answers that are written for one rank of several.

An answer is called for rank 0, until it asks for a collective; there it is left, and called for rank 1; and so on. What
all ranks have brought makes the first collective's results. Then all are called once more from the beginning, get these
results where they asked for them, and go on to their second collective; and so on, to the end. Inputs are made anew for
each call, so each goes the same way. No process, thread or wire is needed, and ranks that do not call alike are found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from memlab.backward import backward_number
from memlab.book.checks.answers import Wrong
from memlab.ranks import ring_bytes

_MOST_COLLECTIVES = 12


class _Waits(BaseException):
    """A rank has come to a collective whose result is not known yet. No Exception, so that no answer catches it."""


class _Brought(NamedTuple):
    name: str
    op: str
    tensor: Tensor
    in_backward: bool


class Sent(NamedTuple):
    """A collective that a rank took part in: its name, the bytes it sent, and whether backward was running."""

    name: str
    sent_bytes: int
    in_backward: bool


class Wire:
    """What one played rank has of torch.distributed. rank, ranks: who it is, of how many.

    results: what its collectives deliver, as far as they are known; a Meter takes them as inputs, since no answer has
      made them. The bytes sent are those of a ring.
    """

    def __init__(self, rank: int, ranks: int, results: list[Tensor]):
        self.rank, self.ranks, self.sent = rank, ranks, []
        self.results, self.waiting = results, None

    @property
    def sent_bytes(self) -> int:
        """All that this rank has sent."""
        return sum(sent.sent_bytes for sent in self.sent)

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        """In place: the sum of all ranks' tensors, or their maximum."""
        known = [name for name in ("SUM", "MAX") if op == getattr(ReduceOp, name)]
        if not known:
            raise Wrong(f"all_reduce(tensor, op): expected ReduceOp.SUM or ReduceOp.MAX, found {str(op)[:40]}.")
        self._tensor("all_reduce(tensor)", tensor)
        result = self._exchanged("all_reduce", known[0], tensor, tensor.nbytes)
        with torch.no_grad():
            tensor.detach().copy_(result)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x below each other, as a tensor of its own."""
        self._tensor("gather(x)", x)
        return self._exchanged("all_gather", "", x, x.nbytes * self.ranks).clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' x, as a tensor of its own."""
        self._tensor("reduce_scatter(x)", x)
        if x.ndim == 0 or x.shape[0] % self.ranks:
            raise Wrong(f"reduce_scatter(x): {self.ranks} ranks cannot share the rows of {tuple(x.shape)} evenly.")
        return self._exchanged("reduce_scatter", "", x, x.nbytes).clone()

    @staticmethod
    def _tensor(name: str, x: object) -> None:
        if not isinstance(x, Tensor):
            raise Wrong(f"{name}: expected a tensor, found {type(x).__name__}.")

    def _exchanged(self, name: str, op: str, x: Tensor, whole_bytes: int) -> Tensor:
        number = len(self.sent)
        if number == _MOST_COLLECTIVES:
            raise Wrong(
                f"rank {self.rank} has called more than {_MOST_COLLECTIVES} collectives; how many does it take?"
            )
        in_backward = backward_number() != -1
        self.sent.append(Sent(name, ring_bytes(name, whole_bytes, self.ranks), in_backward))
        if number == len(self.results):
            self.waiting = _Brought(name, op, x.detach().clone(), in_backward)
            raise _Waits
        return self.results[number]


def play(run: Callable[[Wire], Any], ranks: int) -> list[Any]:
    """What `run` returns on each rank. It is called several times, and must do the same each time.

    Raises Wrong for ranks that do not call the same collectives in the same order.
    """
    results: list[list[Tensor]] = [[] for _ in range(ranks)]
    while True:
        returned, wrong, wires = [], [], [Wire(rank, ranks, results[rank]) for rank in range(ranks)]
        for wire in wires:
            try:
                returned.append(run(wire))
            except _Waits:
                pass
            except Wrong as error:
                wrong.append(error)
            grad_is_on()
        brought = [wire.waiting for wire in wires]
        if wrong and not any(mine and not mine.in_backward for mine in brought):
            raise wrong[0]
        if not any(brought):
            return returned
        for mine, result in zip(results, _collective(brought), strict=True):
            mine.append(result)


def grad_is_on() -> None:
    """Raise Wrong if the answer has switched autograd off: what a check computes next would fail without a reason."""
    if not torch.is_grad_enabled():
        raise Wrong("your code left autograd switched off; put it back when the work is done.")


def _collective(brought: list[_Brought | None]) -> list[Tensor]:
    if None in brought:
        ended, waits = brought.index(None), next(rank for rank, mine in enumerate(brought) if mine)
        raise Wrong(
            f"rank {waits} waits in {brought[waits].name} for ever, since rank {ended} does not call it. Every rank "
            "calls every collective, in the same order."
        )
    for rank, mine in enumerate(brought):
        for word, look in (("name", "collectives"), ("op", "operations")):
            if getattr(mine, word) != getattr(brought[0], word):
                raise Wrong(
                    f"ranks 0 and {rank} meet with different {look}, {getattr(brought[0], word)} and "
                    f"{getattr(mine, word)}. Every rank calls every collective, in the same order."
                )
        if mine.tensor.shape != brought[0].tensor.shape or mine.tensor.dtype != brought[0].tensor.dtype:
            raise Wrong(
                f"in {mine.name} rank 0 brings {_what(brought[0].tensor)} and rank {rank} {_what(mine.tensor)}; "
                "they must be alike."
            )
    name, op = brought[0].name, brought[0].op
    tensors = [mine.tensor for mine in brought]
    if name == "all_gather":
        return [torch.cat(tensors)] * len(tensors)
    total = torch.stack(tensors).amax(0) if op == "MAX" else torch.stack(tensors).sum(0)
    return list(total.chunk(len(tensors))) if name == "reduce_scatter" else [total] * len(tensors)


def _what(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')}"


# ---- the chapter's regions, on a played rank


class Regions:
    """The functions of memlab.tensor_parallelism.regions, by their names, on a played rank."""

    def __init__(self, wire: Wire):
        self._wire = wire

    def copy_to_ranks(self, x: Tensor, group=None) -> Tensor:
        """x as it is; in backward the sum over the ranks. (...) → the same."""
        return _Copy.apply(x, self._wire)

    def reduce_from_ranks(self, x: Tensor, group=None) -> Tensor:
        """The sum over the ranks. (...) → the same shape."""
        return _Reduce.apply(x, self._wire)

    def gather_sequence(self, x: Tensor, group=None) -> Tensor:
        """All ranks' rows. (rows / ranks, ...) → (rows, ...)."""
        return _Gather.apply(x, self._wire)

    def reduce_scatter_sequence(self, x: Tensor, group=None) -> Tensor:
        """This rank's rows of the sum over the ranks. (rows, ...) → (rows / ranks, ...)."""
        return _ReduceScatter.apply(x, self._wire)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _summed(dy, ctx.wire), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        return _summed(x, wire)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        ctx.wire = wire
        return wire.all_gather(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.wire.reduce_scatter(dy), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        ctx.wire = wire
        return wire.reduce_scatter(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.wire.all_gather(dy), None


def _summed(x: Tensor, wire: Wire) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    wire.all_reduce(total)
    return total
