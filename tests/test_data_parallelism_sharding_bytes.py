"""fully_shard: a unit is whole while it is used, wherever its inputs come from, and its gradients leave it once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from memlab.data_parallelism import fully_shard
from memlab.data_parallelism.arithmetic import padded_elements
from memlab.memory_timeline import Meter
from memlab.ranks import Traffic, run_ranks

RANKS, LAYERS, WIDTH = 64, 8, 32


@pytest.fixture
def rank_0_of_64():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    distributed.destroy_process_group()


class Layer(nn.Module):
    """x, memory: (n, WIDTH) → both, the memory as it came."""

    def __init__(self):
        super().__init__()
        self.of_x, self.of_memory = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return x + (self.of_x(x) + self.of_memory(memory)).tanh(), memory


class Decoder(nn.Module):
    """Layers that all look at one memory, which the encoder has made. x: (n, WIDTH) → the same.

    passed_on: each layer gets what the one before returned, as T5's do, and not the encoder's output itself. learns:
    whether the memory has a gradient.
    """

    def __init__(self, passed_on: bool, learns: bool):
        super().__init__()
        self.encoder, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.passed_on, self.learns = passed_on, learns

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        x, given = x * 1, memory if self.learns else memory.detach()
        for layer in self.layers:
            x, passed_on = layer(x, given)
            given = passed_on if self.passed_on else given
        return x + memory


def metered(passed_on: bool, learns: bool):
    """The timeline of a second step, rank 0's of 64, and the bytes that it sent."""
    model = Decoder(passed_on, learns)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(1, WIDTH, requires_grad=True)
    model(x).sum().backward()
    model.zero_grad()
    with Meter(model) as meter, Traffic() as traffic:
        model(x).sum().backward()
    return meter.timeline, traffic.by_name()


@pytest.mark.parametrize("passed_on", [False, True], ids=["shared", "passed on"])
def test_an_input_that_all_units_learn_through_keeps_none_of_them_gathered(rank_0_of_64, passed_on):
    timeline, sent = metered(passed_on, learns=True)
    other, other_sent = metered(passed_on, learns=False)
    unit = 4 * padded_elements([[p.numel() for p in Layer().parameters()]], RANKS)
    root = 4 * padded_elements([[WIDTH * WIDTH + WIDTH]], RANKS)
    pieces = (LAYERS * unit + root) // RANKS
    for one in (timeline, other):
        # Ψ/N + (1 + prefetch) · unit + the root's; gradients: of one unit as autograd makes them, and flat
        assert one.peak_bytes <= 2 * pieces + 2 * unit + root + 2 * unit + 64 * 4 * WIDTH
    assert timeline.peak_bytes <= other.peak_bytes + 4 * 4 * WIDTH
    assert sent == other_sent


def memory_that_several_units_learn_through(rank: int, passed_on: bool) -> bool:
    models = []
    for whole in (True, False):
        torch.manual_seed(0)
        models.append(model := Decoder(passed_on, learns=True).double())
        for layer in model.layers if not whole else ():
            fully_shard(layer)
        if not whole:
            fully_shard(model)
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        models[0](x).square().mean().backward()
        models[1](x.chunk(2)[rank]).square().mean().backward()
    whole, parts = (dict(model.named_parameters()) for model in models)
    for name, p in parts.items():
        expected = whole[name].grad.flatten()
        assert any(
            torch.allclose(p.grad, expected[at : at + p.numel()], atol=1e-14)
            for at in range(expected.numel() - p.numel() + 1)
        ), name
    return True


@pytest.mark.parametrize("passed_on", [False, True], ids=["shared", "passed on"])
def test_gradients_through_a_memory_of_all_units_are_those_of_the_single_process(passed_on):
    assert run_ranks(memory_that_several_units_learn_through, 2, passed_on) == [True, True]


@pytest.mark.parametrize("looked", [False, True], ids=["alone", "after a look without gradients"])
def test_a_unit_that_is_used_several_times_has_its_gradients_reduced_once(rank_0_of_64, looked):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            with torch.no_grad():
                if looked:
                    self.again(x)
            for _ in range(4):
                x = self.again(x).tanh()
            return x

    model = Loop()
    fully_shard(model.again)
    fully_shard(model)
    model(torch.ones(1, 8)).sum().backward()
    with Traffic() as traffic:
        model(torch.ones(1, 8)).sum().backward()
    reduced = [record for record in traffic.records if record.name == "reduce_scatter"]
    assert len(reduced) == 2  # of this unit and of the root
