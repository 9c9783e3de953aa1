"""Exercise 3 of chapter 08: checkpoint as an autograd.Function, with random numbers that come again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.gradient_accumulation.lets_go import beyond
from memlab.book.checks.gradient_checkpointing.witness import Witness, hooks_come_off, same
from memlab.memory_timeline import Meter, Timeline

_ROWS, _WIDTH, _BLOCKS = 48, 24, 3
_SPARE = 512  # bytes: one or the other scalar


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(4 * width, width))


def _plain(function: Callable, x: Tensor) -> Tensor:
    return function(x)


def _torchs(function: Callable, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.CheckpointFunction.apply(function, True, x)


@dataclass
class _Run:
    """A forward and backward of a stem and some blocks."""

    out: Any
    gradients: dict[str, Tensor | None]
    random: list[Tensor]
    calls: list[list[int]]
    turn: int
    timeline: Timeline


def _run(checkpoint: Callable, *, watched: bool = False, rows: int = _ROWS, width: int = _WIDTH) -> _Run:
    torch.manual_seed(0)
    stem, blocks = nn.Linear(width, width), nn.ModuleList(_block(width) for _ in range(_BLOCKS))
    functions = [Witness(block, watched=watched) for block in blocks]
    x = torch.randn(rows, width, requires_grad=True)
    model = nn.ModuleDict({"stem": stem, "blocks": blocks})
    with Meter(model, inputs=x) as meter:
        stream, first = stem(x), None
        for number, function in enumerate(functions):
            with hooks_come_off():
                stream = checkpoint(function, stream)
            if not isinstance(stream, Tensor):
                raise Wrong(f"expected function(x), a tensor; found {type(stream).__name__}.")
            if number == 0:
                first = stream.detach().clone()
        random, calls = [torch.get_rng_state()], [[function.calls for function in functions]]
        loss = stream.sum()
        node = stream.grad_fn
        del stream
        turn = meter.timeline.totals[-1] - random[0].nbytes
        loss.backward()
        random.append(torch.get_rng_state())
        calls.append([function.calls for function in functions])
    if watched and not isinstance(node, torch.autograd.function.BackwardCFunction):
        made = "nothing that has a gradient" if node is None else type(node).__name__
        raise Wrong(
            f"expected function(x) to be one node of the graph, of an autograd.Function; it was made by {made}."
        )
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    return _Run(first, gradients, random, calls, turn, meter.timeline)


@functools.cache
def _reference(rows: int, width: int) -> tuple[_Run, _Run]:
    return _run(_plain, rows=rows, width=width), _run(_torchs, rows=rows, width=width)


@exercise
def checkpoint_function(answer: object) -> str:
    """Exercise 3: (function, x) → function(x), one node of an autograd.Function that runs it again in backward."""
    with hooks_come_off():
        _check(a_function(answer, "checkpoint_function(function, x)"))
    kept, again = (run.turn - run.timeline.totals[0] for run in _reference(_ROWS, _WIDTH))
    return f"{kept:,} B would be kept until backward, {again:,} B are, and no gradient differs in a bit."


def _check(checkpoint: Callable) -> None:
    for rows, width in ((_ROWS, _WIDTH), (160, 8)):
        plain, torchs = _reference(rows, width)
        found = _run(checkpoint, watched=True, rows=rows, width=width)
        _same_values(found, plain)
        _same_random(found, plain)
        _called_again(found)
        _lets_go(found, plain, torchs)
    _notices_writing(checkpoint)


def _same_values(found: _Run, plain: _Run) -> None:
    if not same(found.out, plain.out):
        raise Wrong("the first result differs from function(x). Is function called once, with x, in forward?")
    lost = [name for name, grad in found.gradients.items() if grad is None]
    if lost:
        look = ""
        if any("blocks" in name for name in lost) and "x" not in lost:
            look = (
                " Backward must reach the parameters inside function, too: torch.autograd.backward fills their .grad."
            )
        elif "x" in lost and not any("blocks" in name for name in lost):
            look = " What does your backward return for x? And what has .grad after the second run?"
        raise Wrong(f"after backward there is no gradient of {', '.join(lost[:3])}{', …' * (len(lost) > 3)}.{look}")
    for name in reversed(found.gradients):  # those that backward comes to last are wrong by whatever was before them
        grad, right = found.gradients[name], plain.gradients[name]
        if same(grad, right):
            continue
        look = ""
        if same(grad, 2 * right):
            look = " It is twice as much as it should be. Who else has added to it?"
        elif not grad.any():
            look = " It is 0 everywhere."
        elif not same(found.random[1], plain.random[1]):
            look = " Dropout must draw the same numbers again: note torch.get_rng_state() before the first run."
        else:
            look = " Was the second run's dropout that of the first, and did it begin with the gradient given?"
        raise Wrong(f"the gradient of {name} is not that of plain function(x), to the last bit.{look}")


def _same_random(found: _Run, plain: _Run) -> None:
    when = ["after forward", "after backward"]
    for moment, mine, right in zip(when, found.random, plain.random, strict=True):
        if not same(mine, right):
            raise Wrong(
                f"the gradients are right, and {moment} torch's generator is not where it would be without "
                "checkpointing: the next random numbers are other ones. Put it back where backward found it; "
                "torch.random.fork_rng(devices=[]) does."
            )


def _called_again(found: _Run) -> None:
    for calls, right, what in zip(found.calls, (1, 2), ("in forward", "until the end of backward"), strict=True):
        if calls != [right] * _BLOCKS:
            raise Wrong(f"expected function to be called {right}× {what}, found {calls} calls of the three functions.")


def _lets_go(found: _Run, plain: _Run, torchs: _Run) -> None:
    if (more := found.turn - torchs.turn) > _SPARE:
        look = " Nothing was forgotten." if found.turn >= plain.turn else ""
        raise Wrong(
            f"the values are right, and between forward and backward {more:,} B more are held than x and the state of "
            f"the generator for each call.{look}"
        )
    if (more := found.timeline.totals[-1] - torchs.timeline.totals[-1]) > 0:
        raise Wrong(
            f"the values are right, and {more:,} B too many are alive when backward has ended. Who has them? What "
            "ctx.save_for_backward saves is gone then; an attribute of ctx stays for as long as the node."
        )
    if (more := found.timeline.peak_bytes - torchs.timeline.peak_bytes) > _SPARE:
        raise Wrong(
            f"the values are right, and the peak is {more:,} B higher than it need be. "
            f"{beyond(found.timeline, torchs.timeline)}"
        )


def _notices_writing(checkpoint: Callable) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = weight * 1
    loss = checkpoint(Witness(torch.tanh), x).sum()
    with torch.no_grad():
        x.add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return
        raise
    raise Wrong(
        "all is right so far. Then x is written to between forward and backward, function runs again on another x, and "
        "nobody notices: the gradients are wrong. What ctx.save_for_backward saves, autograd watches."
    )
