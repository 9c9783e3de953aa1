"""Exercise 4 of chapter 05: a training loop with three leaks and two things that only look like leaks, mended."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.book.checks.answers import Wrong, a_function, a_method, exercise, hooks_on
from memlab.book.workloads import MLP
from memlab.memory_timeline import Meter, Timeline

_SIZES = (8, 24, 16)
_ROUNDS = (4, 8)  # after so many rounds through all batches it must hold as much as after so many
_RECENT = 6
_SPARE = 64  # bytes


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 32), torch.arange(rows) % 16


def _given() -> tuple[nn.Module, list, tuple]:
    torch.manual_seed(0)
    return MLP(32, 48), [_batch(rows) for rows in _SIZES], _batch(40)


@functools.cache
def _expected(steps: int) -> tuple[list[tuple[float, float, float]], list[float], list[Tensor]]:
    """What each step returns, the last losses, and the weights: a loop that keeps nothing."""
    model, batches, validation = _given()
    average, said, losses = 0.0, [], []
    for n in range(steps):
        x, y = batches[n % len(batches)]
        seen = []
        handle = model.get_submodule(_first(model)).register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        loss = model(x * torch.linspace(0.5, 1, len(x))[:, None], y)
        handle.remove()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
            average = 0.9 * average + 0.1 * model(*validation).item()
        losses.append(loss.item())
        said.append((losses[-1], seen[0].detach().norm().item(), average))
    return said, losses[-_RECENT:], [p.detach().clone() for p in model.parameters()]


def _first(model: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if isinstance(module, nn.Linear))


class _Ramps(TorchDispatchMode):
    """Counts how many ramps are made."""

    made = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # spares importing the compiler
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func is torch.ops.aten.linspace.default
        return func(*args, **(kwargs or {}))


@exercise
def mended(answer: object) -> str:
    """Exercise 4: a class like the notebook's Trainer that holds as much after 24 steps as after 12."""
    make = a_function(answer, "Trainer(model, batches, validation)")
    short, long = (rounds * len(_SIZES) for rounds in _ROUNDS)
    (first, *_), (last, ramps, hooks) = _trained(make, short), _trained(make, long)
    if (grown := last.totals[-1] - first.totals[-1]) > 0:
        raise Wrong(
            f"the values are right, and after {long} steps {grown:,} B more are alive than after {short}. "
            f"{_grown(first, last)}"
        )
    if (more := last.peak_bytes - first.peak_bytes) > _SPARE:
        raise Wrong(f"the values are right, and so are the ends, but {long} steps peak {more:,} B above {short}.")
    if hooks > 1:
        raise Wrong(f"the values are right, and after {long} steps {hooks} hooks are on the model.")
    if ramps > len(_SIZES):
        raise Wrong(
            f"{ramps} ramps were made in {long} steps; there are batches of {len(_SIZES)} sizes, and one ramp for each "
            "is enough: the cache is to be bounded, not dropped."
        )
    return f"After {short} steps and after {long}: {last.totals[-1]:,} B."


def _trained(make: Callable, steps: int) -> tuple[Timeline, int, int]:
    """The answer's loop, metered, and how many ramps it made and hooks it left. Raises Wrong if it learns otherwise."""
    model, batches, validation = _given()
    said, losses, weights = _expected(steps)
    with _Ramps() as ramps, Meter(model, inputs=(batches, validation)) as meter:
        trainer = make(model, batches, validation)
        for n in range(steps):
            found = a_method(trainer, "step", "Trainer(…)")(n)
            _same(found, said[n], n)
        del found
    if any(not torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), weights, strict=True)):
        raise Wrong(f"the values are right; the weights after {steps} steps are not those of the given Trainer.")
    recent = [float(loss) for loss in trainer.recent]
    if len(recent) != _RECENT or not all(abs(a - b) <= 1e-4 for a, b in zip(recent, losses, strict=True)):
        raise Wrong(f"trainer.recent: expected the last {_RECENT} losses, found {str(recent)[:60]}. It was no leak.")
    return meter.timeline, ramps.made, hooks_on(model)


def _same(found: object, expected: tuple[float, float, float], n: int) -> None:
    if not isinstance(found, tuple) or len(found) != 3 or any(type(value) is not float for value in found):
        raise Wrong(f"step({n}): expected (loss, norm, average), three floats, found {str(found)[:60]}.")
    for name, a, b in zip(("loss", "norm", "average"), found, expected, strict=True):
        if not abs(a - b) <= 1e-4 * max(1, abs(b)):  # of NaN no comparison holds
            raise Wrong(
                f"step({n}): the {name} is {a:.6g}; the given Trainer has {b:.6g}. Only leaks are to be mended."
            )


def _grown(first: Timeline, last: Timeline) -> str:
    """The line that made most of what has come in between."""
    then, now = ({}, {})
    for timeline, held in ((first, then), (last, now)):
        for storage in timeline.alive(len(timeline)):
            if storage.phase != "before":
                key = str(storage.line), storage.reason
                held[key] = held.get(key, 0) + storage.nbytes
    (line, reason), _ = max(now.items(), key=lambda item: item[1] - then.get(item[0], 0))
    return f"Most of them are {reason}, and were made by\n    {line}"
