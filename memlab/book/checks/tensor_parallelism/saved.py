"""Exercise 5 of chapter 14: why activations do not shrink with the ranks, and a layer that saves its rows only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of, same_bytes
from memlab.book.checks.tensor_parallelism.played import Wire, play
from memlab.memory_timeline import Meter
from memlab.ranks import ring_bytes

# ---- first part: as in the notebook

_ROWS, _WIDTH, _RANKS = 64, 32, 8
_NUMBER_BYTES = 4
_WHOLE_BYTES = _NUMBER_BYTES * _ROWS * _WIDTH


@exercise
def whole(stream: object, statistics: object, inputs: object) -> str:
    """Exercise 5, first part: bytes that each rank has saved whole: the stream, norms' statistics, layers' inputs."""
    right = {
        "stream_bytes": _WHOLE_BYTES,  # the first half's is the model's input, and no activation
        "statistics_bytes": 2 * 2 * _NUMBER_BYTES * _ROWS,
        "inputs_bytes": 2 * _WHOLE_BYTES,
    }
    slips = {
        "stream_bytes": {
            2 * _WHOLE_BYTES: "two streams; that into the first half is the model's input, not an activation",
            3 * _WHOLE_BYTES: "with the inputs of the column parallel layers, or with a stream that nobody saves",
        },
        "statistics_bytes": {
            right["statistics_bytes"] // 2: "half of them: two halves of a block, and two numbers a row in each",
            right["statistics_bytes"] // 4: "a quarter of them: two halves of a block, and two numbers a row in each",
        },
        "inputs_bytes": {
            3 * _WHOLE_BYTES: "with the stream",
            _WHOLE_BYTES: "those of one layer; there are two",
            2 * _WHOLE_BYTES + 2 * 4 * _WHOLE_BYTES // _RANKS: "with those of the row parallel layers, which are cut",
        },
    }
    hints = {
        "stream_bytes": "What does the norm of the second half save?",
        "statistics_bytes": "A norm saves a mean and a scale for each row.",
        "inputs_bytes": "A column parallel layer needs all of its input for its weight's gradient.",
    }
    for found, name in ((stream, "stream_bytes"), (statistics, "statistics_bytes"), (inputs, "inputs_bytes")):
        if type(found) is int and found != right[name]:
            if found in (right[name] // _RANKS, right[name] * (_RANKS - 1) // _RANKS):
                raise Wrong(f"{name}: {found:,} B are a part; what a rank holds whole is asked for.")
            if look := slips[name].get(found):
                raise Wrong(f"{name}: {found:,} B are {look}.")
        same_bytes(found, right[name], name, hints[name], secret=True)
    return (
        f"Seven eighths of these {sum(right.values()):,} B are the discrepancy. With ever more ranks they are all that "
        "stays, which is why sequence parallelism cuts them by rows."
    )


# ---- second part

_SHAPES = {"rows": 24, "in": 16, "out": 40}


def _inputs() -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": ("rows", "in"), "weight": ("out", "in"), "bias": ("out",), "factor": ("rows", "out")}
    made = {
        name: torch.randn([_SHAPES[size] for size in sizes], generator=draw, dtype=torch.float64)
        for name, sizes in shapes.items()
    }
    factor = made.pop("factor")
    return made, factor


@exercise
def gathered_again(answer: object) -> str:
    """Exercise 5, second part: a column parallel layer of which backward has this rank's rows only."""
    function = a_function(answer, "column_parallel_rows(x, weight, bias, gather, reduce_scatter)")
    for ranks in (2, 4, 1):
        sent = play(lambda wire: _run(function, wire), ranks)
    sent = play(lambda wire: _run(function, wire), 4)[0]
    gather = ring_bytes("all_gather", 8 * _SHAPES["rows"] * _SHAPES["in"], 4)
    return (
        f"N ranks save an N-th each, after all. The price: {sent:,} B are sent on each of 4, where {sent - gather:,} "
        "would do if the gathered rows stayed."
    )


def _run(function: Callable, wire: Wire) -> int:
    where, part = f"rank {wire.rank} of {wire.ranks}", lambda x: x.chunk(wire.ranks)[wire.rank]
    inputs, factor = _inputs()
    truth = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    right = F.linear(truth["x"], truth["weight"], truth["bias"])
    (right * factor).sum().backward()
    right, factor = (x.detach().chunk(wire.ranks, 1)[wire.rank].clone() for x in (right, factor))
    mine = {name: part(tensor.detach()).clone().requires_grad_() for name, tensor in truth.items()}
    whole_bytes = truth["x"].nbytes
    with Meter(inputs=[truth, [tensor.grad for tensor in truth.values()], right, factor, mine, wire.results]) as meter:
        before = meter.timeline.totals[-1]
        y = function(mine["x"], mine["weight"], mine["bias"], wire.all_gather, wire.reduce_scatter)
        held, peak = meter.timeline.totals[-1] - before, meter.timeline.peak_bytes - before
        _forward(y, right, where)
        if (more := held - y.nbytes) > 0:
            look = "" if more < whole_bytes else " Is the gathered input still there?"
            raise Wrong(
                f"{where}: the output is right, and when forward has ended {more:,} B more are held than the output "
                f"and what was there before; this rank's rows, its weight and its bias are enough.{look}"
            )
        if (more := peak - y.nbytes - whole_bytes) > y.nbytes:
            raise Wrong(f"{where}: the output is right, and forward holds {more:,} B more than it and the gathered x.")
        forward_bytes = wire.sent_bytes
        if not y.requires_grad:
            raise Wrong(f"{where}: the output is right, and has no graph. Is it made by an autograd.Function?")
        (y * factor).sum().backward()
    for name, tensor in mine.items():
        _gradient(name, tensor.grad, part(truth[name].grad), wire.ranks, where)
    gather, scatter = (ring_bytes(name, whole_bytes, wire.ranks) for name in ("all_gather", "reduce_scatter"))
    for phase, sent, due in (
        ("forward", forward_bytes, gather),
        ("backward", wire.sent_bytes - forward_bytes, gather + scatter),
    ):
        if sent > due:
            raise Wrong(f"the values are right, and in {phase} a rank of {wire.ranks} sends {sent:,} B, not {due:,}.")
    return wire.sent_bytes


def _forward(y: object, right: Tensor, where: str) -> None:
    if not isinstance(y, Tensor):
        raise Wrong(f"{where}: expected a tensor, found {kind_of(y)}.")
    if y.shape != right.shape:
        raise Wrong(f"{where}: expected all rows of this rank's outputs, {tuple(right.shape)}, found {tuple(y.shape)}.")
    if not torch.allclose(y, right, rtol=1e-9, atol=1e-9):
        raise Wrong(f"{where}: the shape is right, and the output is not x Wᵀ + bias of all ranks' rows.")


def _gradient(name: str, found: Tensor | None, due: Tensor, ranks: int, where: str) -> None:
    if found is None:
        raise Wrong(f"{where}: the output is right, and {name} has no gradient.")
    if torch.allclose(found, due, rtol=1e-9, atol=1e-9):
        return
    look = {
        "x": "Each rank has a summand for all rows; what is the sum of this rank's?",
        "weight": "It needs dy of all rows, and x of all rows.",
        "bias": "It is the sum of dy over all rows.",
    }[name]
    raise Wrong(f"{where}: the output is right, and the gradient of {name} is not what one process finds. {look}")
