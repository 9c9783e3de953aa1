"""Exercise 4 of chapter 08: checkpoint through saved-tensor hooks, for a function of several tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, exercise
from memlab.book.checks.gradient_accumulation.lets_go import beyond
from memlab.book.checks.gradient_checkpointing.witness import Witness, forgetful, hooks_come_off, same
from memlab.memory_timeline import Meter, Timeline

_SPARE = 512  # bytes: one or the other scalar
_ROWS, _WIDTH = 40, 24


def _chain(x: Tensor, first: Tensor, second: Tensor, times: int) -> Tensor:
    """A wide weight at the beginning, whose gradient comes last, and ops that save their result, or their argument."""
    x = (x @ first).tanh()
    for _ in range(times):
        x = x.sin() * x.sigmoid()
    return (x @ second).exp()


def _two(x: Tensor, scale: Tensor | None, shift: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x.exp() if scale is None else x * scale
    return hidden.tanh() + shift, hidden.square().mean(0)


def _made(name: str) -> tuple[Callable, tuple, list[Tensor]]:
    """A function, its arguments, and what gradients are asked of."""
    torch.manual_seed(1)
    if name == "a chain of products, with a number among its arguments":
        x, first = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, 20 * _WIDTH)
        second = torch.randn(20 * _WIDTH, 4) / 40
        leaves = [t.requires_grad_() for t in (x, first.div_(8), second)]
        return _chain, (*leaves, 3), leaves
    if name == "a module of an input that needs no gradient":
        module = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
        return module, (torch.randn(_ROWS, _WIDTH),), list(module.parameters())
    x, scale = torch.randn(_ROWS, _WIDTH, requires_grad=True), torch.randn(_WIDTH, requires_grad=True)
    if name == "two results":
        shift = torch.randn(_WIDTH)
        return _two, (x, scale, shift), [x, scale]
    shift = torch.randn(_WIDTH, requires_grad=True)
    return _two, (x, None, shift), [x, shift]


_TASKS = (
    "a chain of products, with a number among its arguments",
    "a module of an input that needs no gradient",
    "two results",
    "two results, and None among the arguments",
)


def _plain(function: Callable, *args) -> Any:
    return function(*args)


@dataclass
class _Run:
    results: list[Tensor]
    gradients: list[tuple[Tensor, ...]]
    calls: list[int]
    turn: int
    timeline: Timeline


def _run(checkpoint: Callable, name: str, *, watched: bool = False, backwards: int = 1) -> _Run:
    function, args, leaves = _made(name)
    witness = Witness(function, watched=watched)
    with Meter(function if isinstance(function, nn.Module) else None, inputs=[*leaves, args]) as meter:
        with hooks_come_off():
            out = checkpoint(witness, *(arg * 1 if arg is leaves[0] else arg for arg in args))
        results = list(out) if isinstance(out, tuple) else [out]
        if isinstance(out, tuple) != ("two" in name) or not all(isinstance(result, Tensor) for result in results):
            raise Wrong(f"{name}: expected what function returns, found {type(out).__name__}.")
        loss = sum(result.sum() * (i + 1) for i, result in enumerate(results))
        calls, gradients, turn = [witness.calls], [], meter.timeline.totals[-1]
        for number in range(backwards):
            gradients.append(torch.autograd.grad(loss, leaves, retain_graph=number + 1 < backwards))
            calls.append(witness.calls)
    return _Run([result.detach() for result in results], gradients, calls, turn, meter.timeline)


@functools.cache
def _reference(name: str) -> tuple[_Run, _Run]:
    return _run(_plain, name), _run(forgetful, name)


@exercise
def checkpoint_hooks(answer: object) -> str:
    """Exercise 4: (function, *args) → function(*args), by hooks that forget what is saved and run it again."""
    with hooks_come_off():
        _check(a_function(answer, "checkpoint_hooks(function, *args)"))
    kept, again = (run.turn - run.timeline.totals[0] for run in _reference(_TASKS[0]))
    return f"{kept:,} B of what autograd would keep became {again:,} B, results included, for any function."


def _check(checkpoint: Callable) -> None:
    for name in _TASKS:
        plain, least = _reference(name)
        found = _run(checkpoint, name, watched=True)
        _same_values(found, plain, name)
        _called_again(found, name)
        _lets_go(found, plain, least, name)
    name = _TASKS[0]
    twice = _run(checkpoint, name, watched=True, backwards=2)
    _same_values(twice, _run(_plain, name, backwards=2), f"{name}, with a second backward (retain_graph=True)")
    _called_again(twice, f"{name}, with a second backward (retain_graph=True)")


def _same_values(found: _Run, plain: _Run, name: str) -> None:
    for mine, right in zip(found.results, plain.results, strict=True):
        if not same(mine, right):
            raise Wrong(f"{name}: the result differs from that of function(*args).")
    for mine, right in zip(found.gradients, plain.gradients, strict=True):
        for number, (grad, expected) in enumerate(zip(mine, right, strict=True)):
            if not same(grad, expected):
                raise Wrong(
                    f"{name}: gradient {number} differs from that of function(*args). The second run saves the same "
                    "tensors in the same order; does each handle get the one that has its place?"
                )


def _called_again(found: _Run, name: str) -> None:
    for backwards, calls in enumerate(found.calls):
        if calls == backwards + 1:
            continue
        look = ""
        if backwards and calls > backwards + 1:
            look = " The first handle that is unpacked runs it again, and the others find what that has made."
        elif backwards == 2:
            look = " What the first backward has used is gone; the second one needs it anew."
        raise Wrong(
            f"{name}: expected {backwards + 1} call{'s' * bool(backwards)} of function until "
            f"{'the end of backward ' + str(backwards) if backwards else 'the end of forward'}, found {calls}.{look}"
        )


def _lets_go(found: _Run, plain: _Run, least: _Run, name: str) -> None:
    if (more := found.turn - least.turn) > _SPARE:
        look = " Nothing was forgotten." if found.turn >= plain.turn else " What does each handle hold?"
        raise Wrong(
            f"{name}: the values are right, and between forward and backward {more:,} B more are held than arguments "
            f"and results.{look}"
        )
    if (more := found.timeline.totals[-1] - plain.timeline.totals[-1]) > 0:
        raise Wrong(f"{name}: the values are right, and {more:,} B too many are alive when backward has ended.")
    if (more := found.timeline.peak_bytes - least.timeline.peak_bytes) > _SPARE:
        raise Wrong(
            f"{name}: the values are right, and the peak is {more:,} B higher than it need be. Each tensor that was "
            f"computed again should die as soon as backward has used it. {beyond(found.timeline, least.timeline)}"
        )
