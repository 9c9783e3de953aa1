"""Adam on masters as one kernel: PyTorch's fused step in FP32, for every parameter that it can step, and no other.

The kernel is Triton's on a GPU (or interpreted, with TRITON_INTERPRET=1), and else the one in C.
"""

import os

import pytest
import torch
from torch import nn, optim

from memlab.mixed_precision import MasterWeights, adam_in_c, adam_kernel, fused_adam
from tests.tiers import pairs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
IN_C = DEVICE == "cpu" and not INTERPRETED
SHAPES = [(7,), (300, 700), (3, 5), (1024,), (1025,), ()]  # such as fill no vector, and such as threads share
OPTIONS = [
    {},
    {"weight_decay": 0.125, "maximize": True},
    {"betas": (0.0, 0.5), "eps": 1e-3, "lr": 0.1},
    {"weight_decay": 0, "eps": 1e-15},
]


@pytest.fixture
def kernel(monkeypatch):
    """Yields how many gradients each launch of the kernel for this machine had."""
    if not IN_C:
        fused_adam._works_on(torch.zeros(1, device=DEVICE).device)  # its trial, before we count
    elif not all(adam_in_c.works(weight, gradient) for weight in (FP16, BF16) for gradient in (FP16, BF16, FP32)):
        pytest.skip("no kernel in C has PyTorch's bits here, and there is no GPU and no interpreter of Triton")
    torch.manual_seed(0)
    launches, page = [], adam_in_c if IN_C else adam_kernel
    run = page.Launch.run

    def counted(self, options, gradients, inverse_scale):
        launches.append(len(gradients))
        run(self, options, gradients, inverse_scale)

    monkeypatch.setattr(page.Launch, "run", counted)
    return launches


def parameters(dtype=FP16, shapes=((32,), (5,), (48,))) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in shapes]


def beside_pytorchs(params, kind=optim.AdamW, **options):
    """Fused Adam on masters of these, and PyTorch's own on FP32 copies."""
    wide = [nn.Parameter(p.detach().float()) for p in params]
    return MasterWeights(params, kind, fused=True, **options), kind(wide, fused=True, **options), wide


def give_gradients(params, wide=(), scale=1.0) -> None:
    for p in params:
        p.grad = torch.randn_like(p) * scale
    for p, q in zip(params, wide, strict=False):
        q.grad = p.grad.float()


def assert_same(masters, params, reference, wide) -> None:
    """In C, to the bit; else but for a few roundings a step."""
    for p, q in zip(params, wide, strict=True):
        state, expected = masters.state[p], reference.state[q] | {"master": q.detach()}
        assert state.keys() == expected.keys() and torch.equal(p, state["master"].to(p.dtype))
        for name, value in expected.items():
            near = 0.0 if IN_C else 2e-6
            largest = max(value.abs().max().item(), 1e-30)
            torch.testing.assert_close(state[name], value, rtol=near, atol=near * largest / 2)


@pairs(
    "dtype, kind, options, widened, threads",
    [FP16] * INTERPRETED or [FP16, BF16], [optim.Adam, optim.AdamW], OPTIONS, [False, True], [1, 3],
)  # fmt: skip
def test_a_step_is_pytorchs(dtype, kind, options, widened, threads, kernel):
    params = parameters(dtype, SHAPES)
    masters, reference, wide = beside_pytorchs(params, kind, **options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(3):
            give_gradients(params, wide, 10.0 ** -(step % 3))
            if widened:
                masters.widen_gradients()
            masters.step()
            reference.step()
            for p in params:
                p.grad = p.grad_dtype = None
    finally:
        torch.set_num_threads(before)
    assert_same(masters, params, reference, wide)
    assert kernel == [len(params)] * 3


def test_the_scale_of_a_scaler_is_divided_out_in_fp32_and_an_overflow_skips_the_step(kernel):
    params, scale = parameters(), 2.0**12
    masters, reference, wide = beside_pytorchs(params)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale)
    scaler.scale(torch.ones((), device=DEVICE))
    give_gradients(params, wide)
    for q in wide:
        q.grad /= scale
    scaler.step(masters)
    reference.step()
    params[1].grad[0] = torch.inf
    scaler.update()
    scaler.step(masters)
    assert_same(masters, params, reference, wide)
    assert kernel == [len(params)]


CHANGES = {  # what may happen between steps to a parameter's weight, gradient and states
    "written": lambda masters, p: p.detach().fill_(0.5),
    "other memory": lambda masters, p: setattr(p, "data", p.data.clone()),
    "state replaced": lambda masters, p: masters.state[p].update(exp_avg=masters.state[p]["exp_avg"].clone()),
    "state moved": lambda masters, p: setattr(masters.state[p]["exp_avg"], "data", masters.state[p]["exp_avg"].clone()),
    "states gone": lambda masters, p: masters.state.pop(p),
    "no gradient": lambda masters, p: setattr(p, "grad", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change, kernel):
    """The step is that of an optimizer that was made anew with the same states, and has remembered nothing."""
    params = parameters()
    masters = MasterWeights(params, optim.AdamW, fused=True, lr=0.01)
    for _ in range(2):
        give_gradients(params)
        masters.step()
    give_gradients(params)
    change(masters, params[2])
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    anew = MasterWeights(twins, optim.AdamW, fused=True, lr=0.01)
    for p, twin in zip(params, twins, strict=True):
        anew.state[twin] = {name: value.clone() for name, value in masters.state.get(p, {}).items()}
        twin.grad = None if p.grad is None else p.grad.clone()
    anew.refresh()
    masters.step()
    anew.step()
    for p, twin in zip(params, twins, strict=True):
        assert torch.equal(p, twin) and torch.equal(p, masters.state[p]["master"].to(p.dtype))
        assert all(torch.equal(value, anew.state[twin][name]) for name, value in masters.state[p].items())
