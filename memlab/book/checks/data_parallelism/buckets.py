"""Exercise 4 of chapter 13: gradients that are held twice, and gradients that lie side by side from the start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.book.checks.answers import Wrong, a_function, exercise, kind_of, same_bytes
from memlab.data_parallelism import FlatLayout
from memlab.memory_timeline import Meter, Timeline

_RANKS = 64
_SPARE = 64  # bytes: one or the other scalar


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 75), nn.ReLU(), nn.Linear(75, 50))
    model[0].weight.requires_grad_(False)
    return model


# ---- first part


@exercise
def twice(copied: object, room: object, padding: object) -> str:
    """Exercise 4, first part: the bytes of the copies, of room for gradients that never come, and of padding."""
    params = list(_model().parameters())
    layout = FlatLayout([p.shape for p in params], _RANKS)
    trained = sum(p.numel() for p in params if p.requires_grad)
    frozen = layout.numel - trained
    right = {"copy_bytes": 4 * trained, "room_bytes": 4 * frozen, "padding_bytes": 4 * layout.padding}
    alone = 4 * FlatLayout([p.shape for p in params if p.requires_grad], _RANKS).padding
    slips = {
        "copy_bytes": {
            4 * layout.numel: "with room for the frozen weight's",
            4 * layout.padded: "the whole buffer",
            8 * trained: "both, the gradients and their copies; the gradients themselves were expected",
            4 * (trained - 125): "without those of the biases",
        },
        "room_bytes": {
            4 * layout.padding: "the padding",
            4 * layout.numel: "the room for all parameters",
            4 * (frozen + layout.padding): "with the padding",
            4 * 32: "one row of it; the buffer does not know which rows a batch has read",
        },
        "padding_bytes": {
            alone: "what there would be without the frozen weight in the buffer",
            4 * (_RANKS - layout.padding): "what goes beyond the last multiple of 64; what is missing up to the next?",
            4 * _RANKS: "a whole element for each rank",
            4 * layout.piece: "a piece",
            4 * (layout.numel % _RANKS): "the remainder; what is missing up to the next multiple of 64?",
            layout.padding: "elements, not bytes",
        },
    }
    hints = {
        "copy_bytes": "For which gradients is there a copy, and how many numbers are they?",
        "room_bytes": "Which parameter is in the layout, and has no gradient?",
        "padding_bytes": "FlatLayout pads to a multiple of the ranks. How many numbers are in the buffer without?",
    }
    total = 4 * (layout.padded)
    for found, name in ((copied, "copy_bytes"), (room, "room_bytes"), (padding, "padding_bytes")):
        look = slips[name].get(found, "all together" if found == total else "") if type(found) is int else ""
        if look and found != right[name]:
            raise Wrong(f"{name}: {found:,} B are {look}{'.' * (look[-1] != '?')}")
        same_bytes(found, right[name], name, hints[name], secret=True)
    return (
        "PyTorch's DistributedDataParallel has no padding and no room for frozen ones, and the same copies, unless it "
        "is told gradient_as_bucket_view=True."
    )


# ---- second part


class _Net(nn.Module):
    """A frozen weight, a tied one, one that is never used. x: (rows, width) → (rows, width)."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.tied = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.unused, self.last = nn.Parameter(torch.ones(3)), nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tied(self.tied(self.frozen(x)).relu()).relu())


def _stepped(
    function, width: int, ranks: int, dtype: torch.dtype, where: str
) -> tuple[list[nn.Parameter], Tensor, Timeline, list[int]]:
    """Two backwards; the parameters that train, their buffer, the timeline, and its totals at the marks."""
    model, x = _Net(width, dtype), torch.rand(4, width).to(dtype)
    params, marks = list(model.parameters()), []
    with Meter(model, inputs=x) as meter:
        flat = function(params, ranks)
        marks.append(meter.timeline.totals[-1])
        if not isinstance(flat, Tensor):
            raise Wrong(f"{where}: expected the buffer, a tensor; found {kind_of(flat)}.")
        for _ in range(2):
            model(x).square().sum().backward()
            marks.append(meter.timeline.totals[-1])
    every = list(model.parameters())
    if len(params) != len(every) or any(mine is not p for mine, p in zip(params, every, strict=True)):
        raise Wrong(f"{where}: your function has changed the list of parameters.")
    return params, flat, meter.timeline, marks


@exercise
def side_by_side(answer: object) -> str:
    """Exercise 4, second part: (params, ranks) → a flat buffer whose views are the gradients."""
    function = a_function(answer, "side_by_side(params, ranks)")
    for width, ranks, dtype in ((24, 64, torch.float32), (16, 7, torch.float32), (5, 1, torch.float64)):
        _views(function, width, ranks, dtype)
    return "One all-reduce of the buffer, and the gradients are averaged where they lie: Ψ numbers, not 2Ψ."


def _views(function, width: int, ranks: int, dtype: torch.dtype) -> None:
    where = f"{ranks} rank{'s' * (ranks > 1)}, width {width}, {dtype}"
    params, flat, timeline, marks = _stepped(function, width, ranks, dtype, where)
    trained = [p for p in params if p.requires_grad]
    layout = FlatLayout([p.shape for p in trained], ranks)
    for number, p in enumerate(params):
        if not p.requires_grad and p.grad is not None:
            raise Wrong(f"{where}: parameter {number} is frozen, and has a gradient.")
        if p.requires_grad and p.grad is None:
            raise Wrong(f"{where}: parameter {number} trains, and has no gradient; it is a view of the buffer.")
    if flat.shape != (layout.padded,):
        every = FlatLayout([p.shape for p in params], ranks).padded
        look = " Frozen parameters need no room." if flat.shape == (every,) and every != layout.padded else ""
        raise Wrong(
            f"{where}: expected a buffer of shape ({layout.padded},), padded to a multiple of the ranks, found "
            f"{tuple(flat.shape)}.{look}"
        )
    if flat.requires_grad:
        raise Wrong(f"{where}: the buffer has a graph; gradients are plain numbers.")
    if any(p.grad.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr() for p in trained):
        raise Wrong(
            f"{where}: after backward a gradient lies elsewhere, not in the buffer. Each is to be a view of it."
        )
    right = _Net(width, dtype)
    x = _again(width, dtype)
    for _ in range(2):
        right(x).square().sum().backward()
    truths = [torch.zeros_like(p) if p.grad is None else p.grad for p in right.parameters() if p.requires_grad]
    for view, truth, p in zip(layout.views(flat), truths, trained, strict=True):
        if not torch.allclose(p.grad, truth, rtol=1e-4, atol=1e-5):
            raise Wrong(f"{where}: after two backwards a gradient of shape {tuple(p.shape)} is not their sum.")
        if not torch.equal(view, p.grad):
            raise Wrong(f"{where}: the gradients do not lie in the order of the parameters, one behind the other.")
    weights = sum(p.nbytes for p in params) + x.nbytes
    if (more := max(marks[1:]) - weights - flat.itemsize * layout.padded) > _SPARE:
        raise Wrong(f"{where}: the values are right, and {more:,} B more than the buffer are held after backward.")


def _again(width: int, dtype: torch.dtype) -> Tensor:
    """The batch that `_stepped` has drawn after its model."""
    _Net(width, dtype)
    return torch.rand(4, width).to(dtype)
