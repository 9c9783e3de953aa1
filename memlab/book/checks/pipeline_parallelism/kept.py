"""Exercise 5 of chapter 15: why a quarter of the layers holds more than all of them, and a stage that keeps less."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, a_method, exercise, kind_of, same_bytes
from memlab.memory_timeline import Meter

# ---- first part: as in the notebook

_ROWS, _WIDTH, _HIDDEN = 32, 64, 256
_NUMBER_BYTES = 4
_NEEDED = _NUMBER_BYTES * _ROWS * (_WIDTH + 2 * _HIDDEN)
_OUTPUT = _NUMBER_BYTES * _ROWS * _WIDTH


@exercise
def needed(needed_bytes: object, unneeded_bytes: object, rank_2_bytes: object) -> str:
    """Exercise 5, first part: bytes backward needs of a micro-batch, bytes kept beside them, and a lean rank 2's."""
    slips = {
        "needed_bytes": {
            _NEEDED + _OUTPUT: "with the output, whose values no backward reads",
            _NEEDED - _OUTPUT: "without the input; the first layer's weight needs it",
            _NUMBER_BYTES * _ROWS * _HIDDEN
            + _OUTPUT: "of one hidden activation; GELU needs what went in, and the second layer what came out",
            4 * _NEEDED: "those of four micro-batches",
            4 * (_NEEDED + _OUTPUT): "all that rank 0 holds",
        },
        "unneeded_bytes": {
            4 * _OUTPUT: "those of four micro-batches, or a hidden activation, which backward does read",
            2 * _OUTPUT: "two; the input is needed",
            8 * _OUTPUT: "those of all eight micro-batches; this asks for one",
        },
        "rank_2_bytes": {
            _NEEDED: "one micro-batch's",
            2 * (_NEEDED + _OUTPUT): "with what is kept and not needed",
            3 * _NEEDED: "of three micro-batches; ranks are counted from 0",
            4 * _NEEDED: "rank 0's",
            8 * _NEEDED: "of all micro-batches, as GPipe would have it",
        },
    }
    hints = {
        "needed_bytes": "Backward needs the stage's input, GELU's, and the second layer's; parameters do not count.",
        "unneeded_bytes": "Which tensor in `kept` does no backward read?",
        "rank_2_bytes": "How many micro-batches does rank 2 of 4 have in flight?",
    }
    right = {"needed_bytes": _NEEDED, "unneeded_bytes": _OUTPUT, "rank_2_bytes": 2 * _NEEDED}
    for name, found in zip(right, (needed_bytes, unneeded_bytes, rank_2_bytes), strict=True):
        if type(found) is int and found != right[name] and (look := slips[name].get(found)):
            raise Wrong(f"{name}: {found:,} B are {look}.")
        same_bytes(found, right[name], name, hints[name], secret=True)
    return (
        f"Four micro-batches in flight times a quarter of the layers is one whole: under 1F1B rank 0 holds as much as "
        f"one process does, {4 * _NEEDED:,} B. What a pipeline divides is parameters, gradients and states."
    )


# ---- second part


class _Counted(nn.Linear):
    """A stage's first layer, which counts its forwards, whether its stage calls it or the answer does."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x)


def _cases() -> list[tuple[str, Callable[[], nn.Sequential], int, str]]:
    """Name, layers, bytes that backward needs of a micro-batch (8 rows of 16, FP64), and an order."""
    number = 8 * 8  # rows, bytes
    wide = lambda: nn.Sequential(_Counted(16, 48), nn.GELU(), nn.Linear(48, 16))  # noqa: E731
    saved = lambda: nn.Sequential(_Counted(16, 40), nn.Tanh())  # noqa: E731
    return [
        ("stage 1 of 4 under 1F1B", wide, number * (16 + 48 + 48), "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        ("under GPipe", wide, number * (16 + 48 + 48), "F0 F1 F2 B0 B1 B2"),
        ("backwards from the last to the first", wide, number * (16 + 48 + 48), "F0 F1 F2 B2 B1 B0"),
        ("an output that backward does need", saved, number * (16 + 40), "F0 F1 B0 F2 B1 B2"),
        ("two mini-batches", wide, number * (16 + 48 + 48), "F0 F1 B0 B1 F0 F1 B0 B1"),
    ]


@exercise
def lean_stage(answer: object) -> str:
    """Exercise 5, second part: a class with forward(i, x) and backward(i, dy), which keeps what backward needs."""
    made = a_function(answer, "or a class LeanStage(module)")
    for name, layers, needed_bytes, order in _cases():
        torch.manual_seed(0)
        module = layers().double()
        _runs(made, name, module, needed_bytes, order.split())
    return "What stays of an output is the place in the graph where backward begins: an edge, of no byte."


class _Truth(NamedTuple):
    """A micro-batch's input and output gradient, and what layers that are run in one go find: all (8, width)."""

    x: Tensor
    dy: Tensor
    y: Tensor
    dx: Tensor


def _runs(
    made: Callable[[nn.Module], Any], name: str, module: nn.Sequential, needed_bytes: int, order: list[str]
) -> None:
    whole, truths = copy.deepcopy(module), {}
    for turn in order:
        if turn[0] == "F" and turn not in truths:
            truths[turn] = _truth(whole, len(truths))
        elif turn[0] == "B":
            whole(truths["F" + turn[1:]].x).backward(truths["F" + turn[1:]].dy)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    flights = 0
    with Meter(module, inputs=[list(whole.parameters()), *truths.values()]) as meter:
        stage = made(module)
        before = meter.timeline.totals[-1]
        for number, turn in enumerate(order):
            where = f"{name}, after {' '.join(order[: number + 1])}"
            flights += 1 if turn[0] == "F" else -1
            _turn(stage, turn, truths["F" + turn[1:]], where)
            held, due = meter.timeline.totals[-1] - before, flights * needed_bytes
            if held > due:
                raise Wrong(_too_many(where, held, due, flights, turn[0] == "F"))
    for mine, right in zip(module.parameters(), whole.parameters(), strict=True):
        if mine.grad is None or not torch.allclose(mine.grad, right.grad):
            raise Wrong(
                f"{name}: what backward returns is right, and a parameter's gradient is not the micro-batches' sum."
            )
    if (count := sum(turn[0] == "F" for turn in order)) != module[0].forwards:
        raise Wrong(
            f"{name}: the values are right, and the layers ran {module[0].forwards} times, not {count}. To compute "
            "again in backward is checkpointing; here the saved activations stay."
        )


def _truth(whole: nn.Module, seed: int) -> _Truth:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn((8, 16), generator=draw, dtype=torch.float64).requires_grad_()
    y = whole(x)
    dy = torch.randn(y.shape, generator=draw, dtype=torch.float64)
    (dx,) = torch.autograd.grad(y, x, dy)
    return _Truth(x.detach(), dy, y.detach(), dx)


def _turn(stage: Any, turn: str, truth: _Truth, where: str) -> None:
    """One action of the answer, whose result is sent: afterwards nobody but the answer holds anything."""
    i = int(turn[1:])
    if turn[0] == "F":
        found, right, name = a_method(stage, "forward", "LeanStage(…)")(i, truth.x.clone()), truth.y, "forward"
    else:
        found, right, name = a_method(stage, "backward", "LeanStage(…)")(i, truth.dy.clone()), truth.dx, "backward"
    if found is None and name == "backward":
        raise Wrong(
            f"{where}: backward returned None, not a tensor. Does the input require a gradient? Is a return missing?"
        )
    if not isinstance(found, Tensor):
        raise Wrong(f"{where}: {name} returned {kind_of(found)}, not a tensor.")
    if found.dtype != right.dtype:
        raise Wrong(f"{where}: {name} returned {found.dtype}; the layers' is {right.dtype}.")
    if found.shape != right.shape or not torch.allclose(found, right):
        what = "the layers' output" if turn[0] == "F" else "the gradient of this micro-batch's input"
        raise Wrong(f"{where}: what {name} returned is not {what}.")
    if found.requires_grad:
        raise Wrong(f"{where}: what {name} returned has a graph, and what is sent has none: detach it.")
    if not torch.is_grad_enabled():
        raise Wrong(f"{where}: your code left autograd switched off; put it back when the work is done.")


def _too_many(where: str, held: int, due: int, flights: int, forward: bool) -> str:
    if flights == 0:
        return (
            f"{where}: nothing is in flight, and {held:,} B are held. What has been through backward is to be let go."
        )
    look = " What has been through backward is to be let go."
    if forward:
        look = " Is the output among it? A detached tensor holds the same storage."
    return (
        f"{where}: the values are right, and {held:,} B are held for {flights} in flight; backward needs {due:,}.{look}"
    )
