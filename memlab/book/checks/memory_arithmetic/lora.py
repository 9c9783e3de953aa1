"""Exercise 5 of chapter 02: a LoRA layer that keeps no more than it needs, and its bytes from sizes alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.book.checks.answers import Wrong, a_function, a_mapping, exercise, same_bytes
from memlab.book.checks.memory_arithmetic.sizes import NoTensors, saved
from memlab.memory_timeline import Meter


def held(layer: nn.Module, n_in: int, rows: int) -> tuple[dict[str, int], int]:
    """What a layer holds of a training step on (rows, n_in), in bytes; and what it still holds when all is let go."""
    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], foreach=False)
    source = torch.ones(rows, n_in, requires_grad=True)
    with Meter(layer, optimizer, inputs=source) as meter:
        y = layer(source * 1)  # as if a layer before had made it
        y.sum().backward()
        gradients = sum(p.grad.nbytes for p in layer.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        source.grad = None
        del y
    timeline = meter.timeline
    before, end = (timeline.bytes_by_category(event) for event in (0, len(timeline)))
    found = {
        "parameters": before["parameter"] + before["buffer"],
        "gradients": gradients,
        "optimizer states": end["optimizer_state"],
        "activations": sum(storage.nbytes for storage in saved(timeline)),
    }
    return found, timeline.totals[-1] - timeline.totals[0] - end["optimizer_state"]


class _Sparing(nn.Module):
    """What exercise 5 asks for."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


@functools.cache
def _sparing(n_in: int, n_out: int, rank: int, rows: int, bias: bool) -> dict[str, int]:
    return held(_Sparing(nn.Linear(n_in, n_out, bias=bias), rank), n_in, rows)[0]


_LAYERS = ((48, 20, 3, 7, True), (20, 52, 6, 11, False), (36, 28, 30, 5, True))
_WHY = {
    "parameters": "All of them, the frozen ones too.",
    "gradients": "Whatever learns has a gradient of its own size, and nothing else has one.",
    "optimizer states": "For each tensor that learns: two averages, and a counter. For a frozen tensor: nothing.",
    "activations": (
        "Who needs what for backward? A matrix product that learns its weight needs its input; the product with the "
        "frozen weight needs only that weight. Two matrices learn."
    ),
}


@exercise
def lora_linear(answer: object) -> str:
    """Exercise 5, first part: LoRALinear(linear, rank), as sparing as the formula allows."""
    make = a_function(answer, "or class LoRALinear(linear, rank)")
    for n_in, n_out, rank, rows, bias in _LAYERS:
        where = f"n_in={n_in}, n_out={n_out}, rank={rank}, rows={rows}, bias={bias}"
        torch.manual_seed(0)
        _same_values(make, n_in, n_out, rank, rows, bias, where)
        expected = _sparing(n_in, n_out, rank, rows, bias)
        found, left = held(make(nn.Linear(n_in, n_out, bias=bias), rank), n_in, rows)
        for name, nbytes in expected.items():
            same_bytes(found[name], nbytes, f"{where}: what this layer needs of {name}", _CODE[name])
        if left > 0:
            raise Wrong(f"{where}: after the step {left:,} B more are held than before. Does the layer keep a tensor?")
    return "The values of the formula, and not a byte more than they need."


@exercise
def lora_bytes(answer: object) -> str:
    """Exercise 5, second part: (n_in, n_out, rank, rows, bias) → bytes of a LoRA layer, by what they are."""
    function = a_function(answer, "lora_bytes(n_in, n_out, rank, rows, bias)")
    for n_in, n_out, rank, rows, bias in _LAYERS:
        where = f"n_in={n_in}, n_out={n_out}, rank={rank}, rows={rows}, bias={bias}"
        expected = _sparing(n_in, n_out, rank, rows, bias)
        with NoTensors():
            found = a_mapping(function(n_in, n_out, rank, rows, bias), "lora_bytes(…)")
        if set(map(str, found)) != expected.keys():
            raise Wrong(f"lora_bytes(…): expected the keys {', '.join(expected)}; found {', '.join(map(str, found))}.")
        for name, nbytes in expected.items():
            same_bytes(found[name], nbytes, f"{where}: the sum of {name}", _WHY[name])
    full, _ = held(nn.Linear(48, 20), 48, 7)
    lean, _ = held(_Sparing(nn.Linear(48, 20), 3), 48, 7)
    return (
        f"LoRA of rank 3 spares the layer above {full['gradients'] - lean['gradients']:,} B of gradients and "
        f"{full['optimizer states'] - lean['optimizer states']:,} B of states. Of activations it keeps "
        f"{lean['activations'] - full['activations']:,} B more."
    )


_CODE = {
    "parameters": "Is a weight there twice, or one of the two new matrices of another size?",
    "gradients": "Which tensors have requires_grad? The linear layer's own weight and bias learn nothing.",
    "optimizer states": "Which tensors have requires_grad?",
    "activations": "Look at the shapes: is a matrix of n_out × n_in made in forward, or a tensor kept that none needs?",
}


def _same_values(make: Callable, n_in: int, n_out: int, rank: int, rows: int, bias: bool, where: str) -> None:
    """Raise Wrong unless the layer is x·Wᵀ + bias + (x·Aᵀ)·Bᵀ, B begins as zeros, and W stays where it was."""
    linear = nn.Linear(n_in, n_out, bias=bias)
    weight, offset = linear.weight.detach().clone(), None if linear.bias is None else linear.bias.detach().clone()
    address, linear_bias = linear.weight.data_ptr(), linear.bias.data_ptr() if bias else None
    layer = make(linear, rank)
    if not isinstance(layer, nn.Module):
        raise Wrong(f"LoRALinear(linear, rank) is to be an nn.Module, found {type(layer).__name__}.")
    x = torch.randn(rows, n_in, requires_grad=True)
    y = layer(x)
    if not isinstance(y, Tensor) or y.shape != (rows, n_out):
        raise Wrong(f"{where}: expected an output of {rows} × {n_out}, found {getattr(y, 'shape', y)}.")
    _close(y, F.linear(x, weight, offset), f"{where}: a new layer's output is not yet the linear layer's; is B zero?")
    learned = [p for p in layer.parameters() if p.requires_grad]
    shapes = sorted(tuple(p.shape) for p in learned)
    a = [p for p in learned if p.shape in ((rank, n_in), (n_in, rank))]
    b = [p for p in learned if p.shape in ((n_out, rank), (rank, n_out))]
    if len(learned) != 2 or len(a) != 1 or len(b) != 1:
        raise Wrong(
            f"{where}: expected two matrices that learn, A of {rank} × {n_in} and B of {n_out} × {rank}; found "
            f"{', '.join('×'.join(map(str, shape)) for shape in shapes) or 'none'}."
        )
    if all(p.data_ptr() != address for p in (*layer.parameters(), *layer.buffers())):
        raise Wrong(
            "no parameter or buffer of the layer is the linear layer's own weight: a copy takes its bytes twice, and "
            "what is a mere attribute, no state_dict finds. Take over the weight itself, or the whole layer."
        )
    a, b = a[0], b[0]
    if not a.detach().any():
        raise Wrong(f"{where}: A begins as zeros, as B does, and then neither ever gets a gradient; draw A at random.")
    if a.detach().unique().numel() < a.numel() // 2:
        raise Wrong(f"{where}: A's numbers are all alike, so its {rank} rows learn the same; draw A at random.")
    if b.detach().any():
        raise Wrong(f"{where}: B is to begin with zeros exactly, so that a new layer gives what the old one gave.")
    if bias and all(p.data_ptr() != linear_bias for p in (*layer.parameters(), *layer.buffers())):
        raise Wrong(
            "no parameter or buffer of the layer is the linear layer's own bias: a copy takes its bytes twice, and "
            "what is a mere attribute, no state_dict finds. Take over the bias itself, or the whole layer."
        )
    with torch.no_grad():
        a.normal_()
        b.normal_()
    merged = weight + (b if b.shape == (n_out, rank) else b.T) @ (a if a.shape == (rank, n_in) else a.T)
    y = layer(x)
    _close(y, F.linear(x, merged, offset), f"{where}: expected x·Wᵀ + bias + (x·Aᵀ)·Bᵀ.")
    y.sum().backward()
    _close(
        x.grad, torch.ones(rows, n_out) @ merged, f"{where}: x's gradient is wrong; is x cut off on one of the ways?"
    )


def _close(found: Tensor, expected: Tensor, otherwise: str) -> None:
    if found is None or not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
        raise Wrong(otherwise)
