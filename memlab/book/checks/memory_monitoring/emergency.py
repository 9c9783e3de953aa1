"""Exercise 5 of chapter 05: a callback that halves the micro-batch, and a step that then needs less."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, exercise, hooks_on, plain
from memlab.book.checks.gradient_accumulation.lets_go import beyond
from memlab.book.workloads import MLP
from memlab.memory_monitoring import Alarm
from memlab.memory_timeline import Meter, Timeline
from memlab.units import format_bytes

# ---- first part

_HALVED = {64: 32, 7: 3, 3: 1, 2: 1, 1: 1}


@exercise
def on_alarm(answer: object) -> str:
    """Exercise 5, first part: (run, alarm) → halves run.micro_batch, and says whether that has changed it."""
    function = a_function(answer, "on_alarm(run, alarm)")
    for before, due in _HALVED.items():
        for kind in ("growth", "threshold"):
            run = SimpleNamespace(micro_batch=before, model=None)
            said = function(run, Alarm(kind, 12, "for example"))
            found, where = run.micro_batch, f'micro_batch = {before}, then an alarm of kind "{kind}"'
            if type(found) is not int:
                raise Wrong(f"{where}: expected a whole number of rows (int), found {type(found).__name__} {found!r}.")
            if found != due:
                look = "At least one row must be left." if found < 1 else ""
                raise Wrong(f"{where}: expected {due}, found {found}. {look}".rstrip())
            if vars(run).keys() != {"micro_batch", "model"}:
                raise Wrong(f"{where}: run has other attributes than before; only micro_batch is to change.")
            if said is not (before != due):
                raise Wrong(
                    f"{where}: it is {due} now, as it should be; expected {before != due} to be returned, "
                    f"found {repr(said)[:40]}. It tells the monitor whether the run has changed."
                )
    return "From 64 rows to one in six alarms; the seventh changes nothing, and says so."


# ---- second part

_ROWS, _FEATURES, _WIDTH = 160, 64, 40
_MICRO_BATCHES = (160, 200, 80, 48, 7)
_SPARE = 256  # bytes: a loss may live a little longer


def _given() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MLP(_FEATURES, _WIDTH).double()
    return model, torch.randn(_ROWS, _FEATURES, dtype=torch.float64), torch.randint(16, (_ROWS,))


@functools.cache
def _whole() -> tuple[float, list[Tensor]]:
    model, x, y = _given()
    loss = model(x, y)
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@functools.cache
def _one(rows: int, gradients: bool) -> Timeline:
    """The step of one micro-batch by itself, when the gradients are there already or not."""
    model, x, y = _given()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if gradients else None
    with Meter(model, inputs=(x, y)) as meter:
        model(x[:rows], y[:rows]).backward()
    return meter.timeline


@exercise
def step(answer: object) -> str:
    """Exercise 5, second part: (run, x, y) → the batch's mean loss, its gradient in .grad, by micro-batches."""
    function = a_function(answer, "step(run, x, y)")
    for rows in _MICRO_BATCHES:
        _stepped(function, rows)
    before, after = (_one(rows, rows < _ROWS).peak_bytes for rows in (_ROWS, _ROWS // 4))
    return f"The same gradient; the peak of {format_bytes(before)} falls to {format_bytes(after)} with a quarter of it."


def _stepped(function, rows: int) -> None:
    model, x, y = _given()
    run = SimpleNamespace(model=model, micro_batch=rows)
    given = x.clone(), y.clone(), [p.detach().clone() for p in model.parameters()]
    with Meter(model, inputs=(x, y)) as meter:
        loss = plain(function(run, x, y))
    where = f"{_ROWS} rows with micro_batch = {rows}"
    if type(loss) is not float:
        what = "a tensor, which keeps its storage" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise Wrong(f"{where}: expected the mean loss as a float, found {what}.")
    if not torch.is_grad_enabled():
        raise Wrong(f"{where}: your code left autograd switched off; put it back when the work is done.")
    if any(p.dtype != torch.float64 for p in model.parameters()):
        raise Wrong(f"{where}: the model was in FP64, and is no more.")
    right, gradients = _whole()
    for (name, p), expected in zip(model.named_parameters(), gradients, strict=True):
        if p.grad is None:
            raise Wrong(f"{where}: {name} has no gradient.")
        if not torch.allclose(p.grad, expected, rtol=1e-9, atol=1e-13):
            ratio = ((p.grad * expected).sum() / expected.square().sum()).item()
            look = " Is the last micro-batch shorter? Each counts by its rows."
            if torch.allclose(p.grad, ratio * expected, rtol=1e-9, atol=1e-13):
                look = f" It is {ratio:.6g} times what it should be."
            raise Wrong(f"{where}: the gradient of {name} is not the whole batch's.{look}")
    if not abs(loss - right) <= 1e-9:  # of NaN no comparison holds
        raise Wrong(f"{where}: the gradient is right; the mean loss is {right:.9g}, yours {loss:.9g}.")
    if run.micro_batch != rows or not torch.equal(x, given[0]) or not torch.equal(y, given[1]):
        raise Wrong(f"{where}: the values are right, and run.micro_batch or the batch was changed.")
    if any(not torch.equal(p, q) for p, q in zip(model.parameters(), given[2], strict=True)):
        raise Wrong(f"{where}: the gradient is right, and the weights were changed; a step is not asked for.")
    if hooks := hooks_on(model):
        raise Wrong(f"{where}: the values are right, and {hooks} of your hooks are left on the model; take them off.")
    _lets_go(meter.timeline, _one(min(rows, _ROWS), rows < _ROWS), where)


def _lets_go(found: Timeline, alone: Timeline, where: str) -> None:
    kept = sum(s.nbytes for s in alone.alive(len(alone)) if s.category == "gradient")
    if (left := found.totals[-1] - found.totals[0] - kept) > 0:
        raise Wrong(f"{where}: the values are right, and {left:,} B beside gradients are alive at the end.")
    if (more := found.peak_bytes - alone.peak_bytes) > _SPARE:
        raise Wrong(
            f"{where}: the values are right, and the peak is {found.peak_bytes:,} B, {more:,} B above that of one "
            f"micro-batch alone with gradients there. {beyond(found, alone)}"
        )
