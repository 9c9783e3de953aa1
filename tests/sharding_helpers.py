"""Small models, plain and sharded, and how the gradients of both are compared on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from memlab.book.workloads import GPT
from memlab.data_parallelism import fully_shard
from memlab.data_parallelism.sharding import units_of

SIZES = {"layers": 3, "width": 16, "heads": 2, "context": 8, "vocabulary": 32}


def gpt(seed=0, dtype=torch.float64, **sizes) -> GPT:
    torch.manual_seed(seed)
    return GPT(**SIZES | sizes).to(dtype)


def texts(step: int) -> tuple[Tensor, ...]:
    """Twelve rows for all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(32, (12, 8), generator=generator) for _ in "xy")


def rows(seed=0) -> tuple[Tensor]:
    """Six rows for all ranks together, (6, 8)."""
    return (torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),)


def mine(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This rank's rows."""
    return tuple(t.chunk(distributed.get_world_size())[distributed.get_rank()] for t in tensors)


class Stack(nn.Module):
    """Layers one after another. x: (batch, 8) → the same."""

    def __init__(self, layers=4, around=lambda layer, x: layer(x)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(layers))
        self.last = nn.Linear(8, 8)
        self.around = around

    def forward(self, x):
        for layer in self.layers:
            x = self.around(layer, x)
        return self.last(x)


class Attending(nn.Module):
    """x, memory: (n, 8) → both, the memory as it came."""

    def __init__(self):
        super().__init__()
        self.of_x, self.of_memory = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return x + (self.of_x(x) + self.of_memory(memory)).tanh(), memory


class Decoder(Stack):
    """Layers that all look at one memory, made by the last linear layer.

    passed_on: each gets what the one before returned, as T5's do. learns: whether the memory has a gradient.
    """

    def __init__(self, passed_on: bool, learns: bool = True):
        super().__init__()
        self.layers = nn.ModuleList(Attending() for _ in range(8))
        self.passed_on, self.learns = passed_on, learns

    def forward(self, x):
        memory = self.last(x)
        x, given = x * 1, memory if self.learns else memory.detach()
        for layer in self.layers:
            x, returned = layer(x, given)
            given = returned if self.passed_on else given
        return x + memory


def stack(seed=0, **options) -> Stack:
    torch.manual_seed(seed)
    return Stack(**options).double()


def sharded(model, **options):
    for layer in model.layers if isinstance(model, Stack) else model.blocks:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def both(make=stack, **options) -> tuple[nn.Module, nn.Module]:
    """The same model plain, and sharded."""
    return make(), sharded(make(), **options)


def gathered_bytes(model) -> int:
    return sum(shard.flat.untyped_storage().nbytes() for unit in units_of(model) for shard in unit.shards)


def apart(found: dict, expected: dict) -> float:
    """The largest distance of two tensors of the same name, by norm."""
    assert list(found) == list(expected)
    return max(float((found[key] - expected[key]).norm() / expected[key].norm().clamp_min(1e-30)) for key in expected)


def full_gradients(model) -> dict:
    """The whole gradients by name, on every rank; None where a part has none."""
    found, names = {}, {p: name for name, p in model.named_parameters()}
    for shard in (shard for unit in units_of(model) for shard in unit.shards):
        piece = torch.zeros_like(shard.piece)
        for p, view in zip(shard.parts, shard.layout.part_views(piece, shard.rank), strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        whole = piece.new_empty(shard.layout.padded)
        distributed.all_gather(list(whole.view(torch.uint8).chunk(shard.layout.ranks)), piece.view(torch.uint8))
        for p, view in zip(shard.parts, shard.layout.views(whole), strict=True):
            found[names[p]] = None if p.grad is None else view
    return {name: found[name] for name in names.values()}


def assert_same_gradients(plain, model, tolerance=1e-13) -> None:
    """A sharded model's gradients are the plain one's, and nothing is gathered. Both are cleared."""
    found = full_gradients(model)
    for name, p in plain.named_parameters():
        assert (p.grad is None) == (found[name] is None), name
        if p.grad is not None:
            distance = float((found[name] - p.grad).norm() / p.grad.norm().clamp_min(1e-9))
            assert distance <= tolerance, (name, distance)
    for each in (model, plain):
        each.zero_grad()
    assert gathered_bytes(model) == 0


def backward(model, inputs: tuple[Tensor, ...]) -> None:
    """Of what the model returns, if that is a loss, or of its mean square."""
    output = model(*inputs)
    (output if output.dim() == 0 else output.square().mean()).backward()


def assert_same_training(plain, model, inputs=rows, times=2) -> None:
    """Backwards of both models, the plain one's of all ranks' rows; after each the gradients are the same."""
    for step in range(times):
        backward(plain, inputs(step))
        backward(model, mine(inputs(step)))
        assert_same_gradients(plain, model)
