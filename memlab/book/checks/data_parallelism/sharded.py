"""Exercise 6 of chapter 13: an optimizer step on a rank's piece of all parameters (ZeRO, stage 1)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, a_method, exercise
from memlab.data_parallelism import FlatLayout
from memlab.memory_timeline import Meter

_LR, _STEPS = 1e-2, 5
_SPARE = 96  # bytes: Adam's counts of steps
_SHAPES = ((30, 31), (31,), (4, 5, 6), (7,), (40, 25))
_UNUSED = 3  # the parameter that never has a gradient


def _params() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in _SHAPES]


def _give_gradients(params: list[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(step + 1)
    made = [torch.randn(shape, generator=draw) for shape in _SHAPES]
    for number, (p, grad) in enumerate(zip(params, made, strict=True)):
        p.grad = None if number == _UNUSED else grad


@functools.cache
def _adamw() -> list[list[Tensor]]:
    """All parameters after each step, by AdamW in a single process."""
    params = _params()
    optimizer, found = torch.optim.AdamW(params, lr=_LR, foreach=False), []
    for step in range(_STEPS):
        _give_gradients(params, step)
        optimizer.step()
        found.append([p.detach().clone() for p in params])
    return found


class _Run:
    """One rank's optimizer from its making on; the other ranks' pieces come as if gathered, from the truth."""

    def __init__(self, make: Any, rank: int, ranks: int):
        self.rank, self.where, self.exact = rank, f"rank {rank} of {ranks}", True
        self.params, self.layout = _params(), FlatLayout([torch.Size(shape) for shape in _SHAPES], ranks)
        self.own = slice(rank * self.layout.piece, (rank + 1) * self.layout.piece)
        before = [p.detach().clone() for p in self.params]
        with Meter(nn.ParameterList(self.params), inputs=[before, _adamw()]) as meter:
            self.timeline = meter.timeline
            start = self._held(meter) - sum(p.nbytes for p in self.params)
            self.optimizer = make(iter(self.params), rank, ranks, _LR)
            self._laid_out(before, self._held(meter) - start)
            for number in range(_STEPS):
                self._step(meter, number, start)
            self.states_bytes = self._held(meter) - start - self.flat.nbytes

    @staticmethod
    def _held(meter: Meter) -> int:
        return meter.timeline.totals[-1]

    def _laid_out(self, before: list[Tensor], held_bytes: int) -> None:
        a_method(self.optimizer, "step", "ShardedAdam(…)")
        flat = self.flat = getattr(self.optimizer, "flat", None)
        if not isinstance(flat, Tensor) or flat.shape != (self.layout.padded,):
            found = f"one of shape {tuple(flat.shape)}" if isinstance(flat, Tensor) else type(flat).__name__
            raise Wrong(f"{self.where}: expected .flat to be a tensor of shape ({self.layout.padded},), found {found}.")
        for p, view, due in zip(self.params, self.layout.views(flat), before, strict=True):
            if p.shape != due.shape or not torch.equal(p, due):
                raise Wrong(
                    f"{self.where}: ShardedAdam(…) has changed the values of a parameter of {tuple(due.shape)}."
                )
            if p.data_ptr() != view.data_ptr():
                raise Wrong(
                    f"{self.where}: a parameter of shape {tuple(due.shape)} does not lie at its place in .flat. What "
                    "is gathered there must be what forward reads: p.data becomes a view of it. (And who goes through "
                    "params, an iterator, twice, finds nothing the second time.)"
                )
        if (more := held_bytes - flat.nbytes) > _SPARE:
            raise Wrong(
                f"{self.where}: after ShardedAdam(…) {more:,} B more than the flat buffer are held. No copy of the "
                "parameters is to stay, and Adam makes its states in its first step."
            )

    def _step(self, meter: Meter, number: int, start: int) -> None:
        _give_gradients(self.params, number)
        before, held, begin = self.flat.clone(), self._held(meter), len(meter.timeline)
        self.optimizer.step()
        peak = max(meter.timeline.totals[begin:], default=held)
        for p in self.params:
            p.grad = None
        self._values(before, number)
        del before
        piece_bytes = 4 * self.layout.piece
        if (states := self._held(meter) - start - self.flat.nbytes) > 2 * piece_bytes + _SPARE:
            look = (
                " Is a gradient still held, by a part's .grad?"
                if states < 3 * piece_bytes
                else " Whose states are they?"
            )
            raise Wrong(
                f"{self.where}: the values are right, and after step {number + 1} {states:,} B are held beside the "
                f"flat buffer; two moments of a piece of {self.layout.piece:,} elements have {2 * piece_bytes:,}.{look}"
            )
        if number and (more := peak - held) > 2 * piece_bytes + _SPARE:
            raise Wrong(
                f"{self.where}: the values are right, and while step() runs, {more:,} B more are held; AdamW itself "
                f"needs at most {2 * piece_bytes:,} for a piece. Is a gradient copied that could be a view?"
            )

    def _values(self, before: Tensor, number: int) -> None:
        where = f"{self.where}, step {number + 1}"
        if self.flat is not getattr(self.optimizer, "flat", None):
            raise Wrong(f"{where}: .flat is another tensor; the parameters are views of the first.")
        others = self.flat.clone()
        others[self.own] = before[self.own]
        if not torch.equal(others, before):
            raise Wrong(
                f"{where}: elements of other ranks' pieces have changed. Those come by the gather, not by steps."
            )
        truth = torch.cat([due.flatten() for due in _adamw()[number]] + [torch.zeros(self.layout.padding)])
        own, due = self.flat[self.own], truth[self.own]
        count = min(own.numel(), max(self.layout.numel - self.rank * self.layout.piece, 0))
        own, due = own[:count], due[:count]
        self.exact &= torch.equal(own, due)
        if not torch.allclose(own, due, rtol=1e-5, atol=1e-7):
            raise Wrong(f"{where}: the piece is not what AdamW makes of it.{self._look(own, before, count, number)}")
        self.flat.copy_(truth)

    def _look(self, own: Tensor, before: Tensor, count: int, number: int) -> str:
        if torch.equal(own, before[self.own][:count]):
            return " It has not changed at all."
        layout = self.layout
        for n, (begin, end) in enumerate(layout.parts(self.rank)):
            at = layout.starts[n] + begin - self.rank * layout.piece
            mine, old = own[at : at + end - begin], before[self.own][at : at + end - begin]
            due = _adamw()[number][n].flatten()[begin:end]
            if not torch.allclose(mine, due, rtol=1e-5, atol=1e-7):
                if n == _UNUSED:
                    return f" Parameter {n} has no gradient, and has been stepped; AdamW leaves it alone."
                if torch.equal(mine, old):
                    return f" The part of parameter {n} has not changed. Does its gradient reach it?"
                return (
                    f" Parameter {n} lies in this piece with its elements {begin} to {end - 1}; is the gradient's part "
                    "the same, and does each step keep the moments of the one before?"
                )
        return ""


@exercise
def sharded_adam(answer: object) -> str:
    """Exercise 6: (params, rank, ranks, lr) → an optimizer whose states are those of one piece."""
    make = a_function(answer, "ShardedAdam(params, rank, ranks, lr)")
    exact = True
    for ranks in (4, 1, 7):
        runs = [_Run(make, rank, ranks) for rank in range(ranks)]
        exact &= all(run.exact for run in runs)
        if ranks == 4:
            held = max(run.states_bytes for run in runs)
    return (
        f"Each of 4 ranks holds {held:,} B of states, where one alone would hold {8 * runs[0].layout.numel:,}, and "
        f"{'every bit is' if exact else 'all values are'} AdamW's."
    )
