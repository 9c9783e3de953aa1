"""Stochastic rounding: every result is a neighbour, the mean is the value, and small updates arrive."""

import copy

import pytest
import torch
from torch import nn

from memlab.memory_timeline import Meter
from memlab.mixed_precision import MasterWeights, StochasticRounding, round_stochastically
from tests.harness import refused

BF16, FP32 = torch.bfloat16, torch.float32
DRAWS = 40_000


def seeded(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neighbours(x: float) -> tuple[float, float]:
    """The BF16 numbers next to x: by FP32's bits without the low 16, and one more."""
    bits = torch.tensor(x, dtype=FP32).view(torch.int32) & ~0xFFFF
    towards, away = bits.view(FP32).item(), (bits + 0x10000).view(FP32).item()
    return min(towards, away), max(towards, away)


@pytest.mark.parametrize("x", [1.001, -2.7e-20, 1e-39, 6.5e30, -(2 - 2**-20)])
def test_the_mean_is_the_value_and_up_is_as_likely_as_the_fraction(x):
    a, b = neighbours(x)
    x = torch.tensor(x, dtype=FP32).item()
    found = round_stochastically(torch.full((DRAWS,), x), generator=seeded()).double()
    assert set(found.tolist()) <= {a, b}
    fraction = (x - a) / (b - a)
    sigma = (fraction * (1 - fraction) / DRAWS) ** 0.5
    assert abs((found == b).double().mean().item() - fraction) <= 6 * sigma
    assert abs(found.mean().item() - x) <= 6 * sigma * (b - a)


def test_what_bf16_holds_stays_as_it_is():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    found = round_stochastically(every.float(), generator=seeded())
    finite = ~every.isnan()
    assert torch.equal(found[finite].view(torch.int16), every[finite].view(torch.int16))
    assert found[~finite].isnan().all()


def test_a_nan_of_any_bits_stays_one():
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    for seed in range(10):
        assert round_stochastically(bits.view(FP32), generator=seeded(seed)).isnan().all()


def test_a_generator_makes_it_repeatable_and_shapes_and_layouts_are_kept():
    x = torch.randn(3, 4, 5).transpose(0, 2)
    before = x.clone()
    first, again = (round_stochastically(x, generator=seeded(3)) for _ in range(2))
    assert torch.equal(first, again) and first.shape == x.shape and first.dtype is BF16 and torch.equal(x, before)
    assert not torch.equal(first, round_stochastically(x, generator=seeded(4)))
    for shape in ((), (0, 2)):
        assert round_stochastically(torch.ones(shape)).shape == shape
    assert not round_stochastically(torch.ones(2, requires_grad=True)).requires_grad


def test_updates_of_an_eighth_of_an_ulp_arrive_on_average_and_to_the_nearest_not_at_all():
    ulp, steps, weights = 2**-7, 400, 1000  # 50 ulp from 1 up, below 2
    nearest, stochastic = (nn.Parameter(torch.ones(weights, dtype=BF16)) for _ in range(2))
    step_nearest = torch.optim.SGD([nearest], lr=1.0)
    step_stochastic = StochasticRounding([stochastic], torch.optim.SGD, lr=1.0, generator=seeded())
    for _ in range(steps):
        nearest.grad = stochastic.grad = torch.full((weights,), -ulp / 8, dtype=BF16)
        step_nearest.step()
        step_stochastic.step()
    assert (nearest == 1).all()
    sigma = ulp * (steps * (1 / 8) * (7 / 8) / weights) ** 0.5
    assert abs(stochastic.double().mean().item() - 1 - steps * ulp / 8) <= 6 * sigma


def test_each_step_is_the_fp32_step_from_the_rounded_weights_rounded():
    p = nn.Parameter(torch.randn(50).to(BF16))
    optimizer = StochasticRounding([p], torch.optim.AdamW, lr=0.01, generator=seeded(5))
    witness = seeded(5)
    q = nn.Parameter(p.detach().float())
    reference = torch.optim.AdamW([q], lr=0.01)
    for step in range(5):
        p.grad = torch.full_like(p, step - 1.5)
        q.grad = p.grad.float()
        with torch.no_grad():
            q.copy_(p)
        optimizer.step()
        reference.step()
        assert torch.equal(p, round_stochastically(q.detach(), generator=witness))
        for name, value in reference.state[q].items():
            assert torch.equal(optimizer.state[p][name], value) and value.dtype is FP32


def test_twelve_bytes_a_parameter_and_a_chunk_of_weights_and_gradients():
    tensors, each = 10, 1000
    model = nn.ParameterList(nn.Parameter(torch.randn(each).to(BF16)) for _ in range(tensors))
    optimizer = StochasticRounding(model.parameters(), torch.optim.AdamW, chunk_bytes=4 * each, fused=True)
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with Meter(model, optimizer) as meter:
        optimizer.step()
    timeline = meter.timeline
    held = timeline.bytes_by_category(timeline.peak_event)
    assert timeline.bytes_at(len(timeline)) == 12 * tensors * each + 4 * tensors
    assert held["optimizer_state"] == 8 * tensors * each + 4 * tensors
    assert 8 * each <= held["temporary"] <= 15 * each


def test_replicas_stay_equal_whatever_the_ranks_have_drawn_themselves():
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        p = nn.Parameter(torch.ones(1000, dtype=BF16))
        optimizer = StochasticRounding([p], torch.optim.SGD, lr=1.0)
        for _ in range(3):
            p.grad = torch.full_like(p, 2**-10)
            optimizer.step()
        found.append(p)
    assert torch.equal(*found) and len(set(found[0].tolist())) > 1


def test_a_group_may_be_empty_and_be_the_first():
    p = nn.Parameter(torch.ones(2, dtype=BF16))
    optimizer = StochasticRounding([{"params": [], "lr": 0.5}, {"params": [p]}], torch.optim.SGD, lr=1.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p, torch.zeros_like(p))


@pytest.mark.parametrize("generator", [lambda: None, lambda: seeded(1)])
def test_a_resumed_run_is_the_uninterrupted_one(generator):
    def made():
        p = nn.Parameter(torch.linspace(-1, 1, 64).to(BF16))
        return p, StochasticRounding([p], torch.optim.AdamW, lr=0.01, generator=generator())

    def run(p, optimizer, steps):
        for step in steps:
            p.grad = torch.full_like(p, step - 3.5)
            optimizer.step()

    whole, first, second = made(), made(), made()
    run(*whole, range(8))
    run(*first, range(4))
    with torch.no_grad():
        second[0].copy_(first[0])
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    run(*second, range(4, 8))
    assert torch.equal(whole[0], second[0])
    assert all(value.dtype is FP32 for value in second[1].state[second[0]].values())


def test_a_dict_with_masters_and_fp16_parameters_are_refused():
    p = nn.Parameter(torch.ones(2, dtype=BF16))
    with_masters, without = MasterWeights([p], torch.optim.AdamW), StochasticRounding([p], torch.optim.AdamW)
    p.grad = torch.ones_like(p)
    with_masters.step()
    load = lambda: without.load_state_dict(with_masters.state_dict())  # noqa: E731
    refused(load, ValueError, "expected a state dict of StochasticRounding …'master'")
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="expected parameters in BF16, found FP16"):
        without.add_param_group({"params": [half]})
    assert len(without.param_groups) == 1


def test_other_types_are_refused():
    refused(lambda: round_stochastically(torch.ones(2).double()), TypeError, "torch.float32, found torch.float64")
