"""Adam on masters as one kernel: near Adam in FP64, for every parameter that it can step, and for no other.

The kernel is Triton's on a GPU (or interpreted, with TRITON_INTERPRET=1), and else the one in C.
"""

import copy
import functools
import gc
import io
import os
import subprocess
import sys
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from memlab.memory_arithmetic.optimizers import TABLE_ROW
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import LossScaler, MasterWeights, StochasticRounding, adam_in_c, adam_kernel, fused_adam

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
IN_C = DEVICE == "cpu" and not INTERPRETED
SHAPES = [(64, 33), (16,), (3000,), (5,), (2, 3, 7)]


def rounded_options(options) -> list[float]:
    """As the kernel takes them: Triton's in FP32's precision."""
    numbers = options["lr"], options["weight_decay"], options["eps"], *options["betas"]
    return torch.tensor(numbers, dtype=torch.float64 if IN_C else FP32).double().tolist()


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """Yields how many gradients each launch of the kernel for this machine had."""
    if not IN_C:
        fused_adam._works_on(torch.zeros(1, device=DEVICE).device)  # its trial, before we count
    elif not all(adam_in_c.works(weight, gradient) for weight in (FP16, BF16) for gradient in (FP16, BF16, FP32)):
        pytest.skip("there is no C compiler, no GPU, and no interpreter of Triton")
    torch.manual_seed(0)
    launches, page = [], adam_in_c if IN_C else adam_kernel
    run = page.Launch.run

    def counted(self, options, gradients, inverse_scale):
        launches.append(len(gradients))
        run(self, options, gradients, inverse_scale)

    monkeypatch.setattr(page.Launch, "run", counted)
    return launches


def parameters(dtype=FP16, shapes=SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in shapes]


def give_gradients(params, scale=1.0) -> None:
    for p in params:
        p.grad = torch.randn_like(p) * scale


def in_fp64(kind, params, options):
    """The class itself on FP64 weights, with options as the kernel takes them."""
    wide = [nn.Parameter(p.detach().double()) for p in params]
    numbers = kind(wide, **options).param_groups[0]
    lr, weight_decay, eps, *betas = rounded_options(numbers)
    return wide, kind(wide, **options | {"lr": lr, "weight_decay": weight_decay, "eps": eps, "betas": tuple(betas)})


def assert_near(masters: MasterWeights, params, reference, wide) -> None:
    """Weights, states and counters are those in FP64, but for a few roundings a step."""
    for p, q in zip(params, wide, strict=True):
        state, expected = masters.state[p], reference.state[q] | {"master": q.detach()}
        assert state.keys() == expected.keys()
        assert torch.equal(p, state["master"].to(p.dtype))
        for name, value in expected.items():
            largest = max(value.abs().max().item(), 1e-30)
            assert state[name].dtype is FP32
            torch.testing.assert_close(state[name].double(), value.double().to(DEVICE), rtol=2e-6, atol=1e-6 * largest)


OPTIONS = [  # a decay that is a power of two: where a gradient and what it adds cancel, they do so in FP32, too
    {},
    {"weight_decay": 0.125, "maximize": True},
    {"betas": (0.0, 0.5), "eps": 1e-3, "lr": 0.1},
    {"weight_decay": 0},
]


@pytest.mark.parametrize("wide_gradients", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("dtype", [FP16] if INTERPRETED else [FP16, BF16])
def test_a_step_is_adams(dtype, kind, options, wide_gradients, kernel):
    params = parameters(dtype)
    wide, reference = in_fp64(kind, params, options)
    masters = MasterWeights(params, kind, fused=True, **options)
    for step in range(5):
        give_gradients(params, 10.0 ** -(step % 3))
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.double()
        if wide_gradients:
            masters.widen_gradients()
        masters.step()
        reference.step()
        assert_near(masters, params, reference, wide)
        for p in params:
            p.grad = None
    assert kernel == [len(params)] * 5


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95)])
def test_from_zero_a_weight_is_the_sum_of_its_updates(betas):
    """Where no weight hides the digits of an update; those of 1 − βᵗ are fewest at first."""
    params = parameters()
    with torch.no_grad():
        for p in params:
            p.zero_()
    options = {"betas": betas, "weight_decay": 0.0}
    wide, reference = in_fp64(optim.AdamW, params, options)
    masters = MasterWeights(params, optim.AdamW, fused=True, **options)
    for _ in range(3):
        for p, q in zip(params, wide, strict=True):
            p.grad = torch.rand_like(p) + 0.5
            q.grad = p.grad.double()
        masters.step()
        reference.step()
        for p, q in zip(params, wide, strict=True):
            torch.testing.assert_close(masters.state[p]["master"].double(), q.detach(), rtol=3e-5, atol=0)


@pytest.mark.skipif(DEVICE != "cuda", reason="compares two kernels on a GPU")
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_a_step_is_that_of_pytorchs_kernel_but_for_last_bits(kind):
    params = parameters(BF16, [(1000, 1024), (77,)])
    wide = [nn.Parameter(p.detach().float()) for p in params]
    masters, reference = MasterWeights(params, kind, fused=True), kind(wide, fused=True)
    for step in range(6):
        give_gradients(params, 10.0 ** -(step % 3))
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float()
        masters.step()
        reference.step()
        for p, q in zip(params, wide, strict=True):
            found, expected = masters.state[p], reference.state[q] | {"master": q.detach()}
            for name in ("master", "exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(found[name], expected[name], rtol=3e-7, atol=0)


def test_the_scale_of_a_scaler_is_divided_out_in_fp32(kernel):
    params, scale = parameters(), 2.0**12
    wide, reference = in_fp64(optim.AdamW, params, {})
    masters = MasterWeights(params, optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale)
    scaler.scale(torch.ones((), device=DEVICE))
    give_gradients(params)
    for p, q in zip(params, wide, strict=True):
        q.grad = p.grad.double() / scale
    before = [p.grad.clone() for p in params]
    scaler.step(masters)
    reference.step()
    assert_near(masters, params, reference, wide)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
    params[1].grad[0] = torch.inf
    kept = copy.deepcopy(masters.state[params[0]])
    scaler.update()
    scaler.step(masters)
    assert all(torch.equal(value, kept[name]) for name, value in masters.state[params[0]].items())
    assert kernel == [len(params)]


def test_our_scaler_too(kernel):
    model = nn.Linear(64, 32).to(DEVICE, FP16)
    masters, scaler = MasterWeights(model.parameters(), optim.AdamW, fused=True), LossScaler(init_scale=2.0**4)
    before = model.weight.detach().clone()
    for _ in range(3):
        scaler.scale(model(torch.randn(8, 64, device=DEVICE, dtype=FP16)).float().square().mean()).backward()
        scaler.step(masters)
        scaler.update()
        masters.zero_grad()
    assert kernel == [2] * 3 and not torch.equal(model.weight, before)


def others():
    """Parameters that the kernel cannot step, and a gradient of each."""
    transposed = nn.Parameter(torch.randn(8, 4).to(DEVICE, FP16))
    gapped = nn.Parameter(torch.randn(8, 8).to(DEVICE, FP16)[:, ::2])
    return {
        "of FP32": (nn.Parameter(torch.randn(16, device=DEVICE)), torch.randn(16, device=DEVICE)),
        "of another order than its gradient": (transposed, torch.randn(4, 8).to(DEVICE, FP16).t()),
        "with gaps": (gapped, torch.randn(8, 8).to(DEVICE, FP16)[:, ::2]),
        "empty": (nn.Parameter(torch.randn(0, 4).to(DEVICE, FP16)), torch.randn(0, 4).to(DEVICE, FP16)),
    }


@pytest.mark.parametrize("name", others())
def test_what_the_kernel_cannot_step_the_optimizer_does_beside_it(name, kernel):
    (other, gradient), params = others()[name], parameters(shapes=[(32,), (48,)])
    params.insert(1, other)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    masters, reference = MasterWeights(params, optim.AdamW, fused=True), optim.AdamW(wide, fused=True)
    for _ in range(4):
        give_gradients(params)
        other.grad = gradient.clone()
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.float().contiguous()
        masters.step()
        reference.step()
    for p, q in zip(params, wide, strict=True):
        torch.testing.assert_close(masters.state[p].get("master", p.detach()), q.detach(), rtol=1e-6, atol=1e-7)
    assert masters.state[other]["step"] == 4
    assert kernel == [2] * 4


@pytest.mark.skipif(INTERPRETED, reason="interpreted, Triton does not round to BF16")
def test_types_of_weights_and_gradients_have_launches_of_their_own(kernel):
    params = parameters(FP16, [(16,), (5,)]) + parameters(BF16, [(7,), (32,), (4, 4)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    give_gradients(params)
    masters.step()
    assert kernel == [2, 3]
    params[0].grad_dtype = None
    params[0].grad = torch.randn(16, device=DEVICE)
    masters.step()
    assert kernel == [2, 3, 1, 1, 3]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.AdamW, {}),
        (optim.AdamW, {"foreach": True}),
        (optim.AdamW, {"fused": True, "amsgrad": True}),
        (optim.AdamW, {"fused": True, "lr": torch.tensor(1e-3)}),
        (optim.SGD, {"fused": True, "lr": 0.1}),
        (type("Derived", (optim.AdamW,), {}), {"fused": True}),
    ],
)
def test_other_optimizers_step_by_themselves(kind, options, kernel):
    params = parameters()
    masters = MasterWeights(params, kind, **options)
    for _ in range(2):
        give_gradients(params)
        masters.step()
    assert kernel == []
    masters = StochasticRounding(parameters(BF16), optim.AdamW, fused=True)
    give_gradients(masters.param_groups[0]["params"])
    masters.step()
    assert kernel == []


def test_groups_have_options_of_their_own_and_schedules_reach_them(kernel):
    slow, fast = parameters(), parameters()
    masters = MasterWeights(
        [{"params": slow, "lr": 0.0}, {"params": fast, "betas": (0.5, 0.9)}], optim.AdamW, fused=True, lr=0.1
    )
    schedule = optim.lr_scheduler.LambdaLR(masters, lambda step: 0.0 if step else 1.0)
    for changed in (True, False):
        before = [p.detach().clone() for p in fast]
        give_gradients([*slow, *fast])
        masters.step()
        schedule.step()
        assert all((not torch.equal(p, b)) == changed for p, b in zip(fast, before, strict=True))
    assert kernel == [len(SHAPES)] * 4


# ---- what it found holds until it is another


def changes():
    """What may happen between steps to a parameter's weight, gradient and states."""

    def other_memory(masters, p):
        p.data = p.data.clone()

    def written(masters, p):
        with torch.no_grad():
            p.fill_(0.5)

    def state_replaced(masters, p):
        masters.state[p]["exp_avg"] = masters.state[p]["exp_avg"].clone()

    def state_elsewhere(masters, p):
        masters.state[p]["exp_avg"].data = masters.state[p]["exp_avg"].data.clone()

    def states_gone(masters, p):
        del masters.state[p]

    def loaded(masters, p):
        file = io.BytesIO()
        torch.save(masters.state_dict(), file)
        file.seek(0)
        masters.load_state_dict(torch.load(file))

    def without_gradient(masters, p):
        p.grad = None

    return [*locals().values()]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_a_change_is_seen(change, kernel):
    """The same as an optimizer that was made anew with the same states, and has remembered nothing."""
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
        assert torch.equal(p, twin)
        assert all(torch.equal(value, anew.state[twin][name]) for name, value in masters.state[p].items())
        assert torch.equal(p, masters.state[p]["master"].to(p.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_counters_are_of_fp32_whatever_the_default_dtype(dtype, kernel):
    """As in torch's fused Adam: a counter in BF16 would stop at 256."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        params = parameters()
        masters = MasterWeights(params, optim.AdamW, fused=True)
        plain = MasterWeights(parameters(), optim.AdamW)
        for optimizer in (masters, plain):
            give_gradients(optimizer.param_groups[0]["params"])
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert kernel == [len(params)]
    assert {value.dtype for state in masters.state.values() for value in state.values()} == {FP32}
    assert {state["master"].dtype for state in plain.state.values()} == {FP32}


def test_a_state_of_another_order_is_left_to_the_optimizer(kernel):
    params = parameters(shapes=[(8, 4), (4, 4)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    for _ in range(2):
        give_gradients(params)
        masters.step()
        masters.state[params[0]]["exp_avg"] = masters.state[params[0]]["exp_avg"].t().contiguous().t()
    assert kernel == [2, 1]


def test_weights_that_went_away_and_came_back_elsewhere_are_found(kernel):
    """A model that is moved out of a GPU's memory and in again by its storages: their tensors are the same."""
    params = parameters(shapes=[(4096,)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    give_gradients(params)
    masters.step()
    storage = params[0].untyped_storage()
    kept, nbytes = params[0].detach().clone(), storage.nbytes()
    storage.resize_(0)
    between = [torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(64)]  # one of them where it was
    storage.resize_(nbytes)
    params[0].data.copy_(kept)
    give_gradients(params)
    masters.step()
    assert torch.equal(params[0], masters.state[params[0]]["master"].to(FP16))
    assert not any(block.any() for block in between)


@pytest.mark.parametrize("gradient", ["new", "old"])
def test_rows_that_are_cut_off_are_left_alone(gradient):
    params = parameters(shapes=[(64, 16)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    give_gradients(params)
    masters.step()
    whole = params[0].data
    before = whole.clone()
    if gradient == "new":
        params[0].grad = None
    params[0].data = whole[:48]
    if gradient == "new":
        give_gradients(params)
    with pytest.raises(RuntimeError, match="size"):
        masters.step()  # masters and states have other rows
    assert torch.equal(whole[48:], before[48:])


def test_a_weight_that_is_transposed_is_its_master_still(kernel):
    params = parameters(shapes=[(16, 16)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    for _ in range(2):
        give_gradients(params)
        masters.step()
        params[0].data = params[0].data.t()
    masters.step()  # with the gradient as it was
    assert torch.equal(params[0], masters.state[params[0]]["master"].to(FP16))


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("of", ["zero", "negative"])
def test_gradients_that_are_not_where_they_say_are_left_to_the_optimizer(of, steps_before, kernel):
    params = parameters(shapes=[(16,), (32,)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    for _ in range(steps_before):
        give_gradients(params)
        params[0].grad.fill_(-1e-3)
        masters.step()
    give_gradients(params)
    zeros = torch._efficientzerotensor((16,), device=DEVICE, dtype=FP16)
    params[0].grad = zeros if of == "zero" else torch._neg_view(torch.ones(16, device=DEVICE, dtype=FP16))
    before, launches = masters.state[params[0]]["exp_avg"].clone() if steps_before else 0, len(kernel)
    masters.step()
    assert kernel[launches:] == [1]
    expected = 0.9 * before - (of == "negative") * 0.1
    torch.testing.assert_close(masters.state[params[0]]["exp_avg"], torch.zeros(16, device=DEVICE) + expected)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_real_weights_in_an_imagined_step_stay_as_they_are(steps_before, kernel):
    params = parameters()
    masters = MasterWeights(params, optim.AdamW, fused=True)
    for _ in range(steps_before):
        give_gradients(params)
        masters.step()
    give_gradients(params)
    before = [p.detach().clone() for p in params]
    with FakeTensorMode(allow_non_fake_inputs=True), suppress(DataDependentOutputException):
        masters.step()
    assert all(map(torch.equal, params, before)) and kernel == [len(params)] * steps_before


def test_what_the_kernel_no_longer_steps_it_does_not_keep():
    first, second = parameters(), parameters()
    masters = MasterWeights([{"params": first}, {"params": second}], optim.AdamW, fused=True)
    give_gradients([*first, *second])
    masters.step()
    alive = [weakref.ref(masters.state[p]["exp_avg"].untyped_storage()) for p in first]
    del masters.param_groups[0]
    for p in first:
        del masters.state[p]
    masters.step()
    gc.collect()
    assert not any(ref() for ref in alive)
    alive = [weakref.ref(masters.state[p]["exp_avg"].untyped_storage()) for p in second]
    masters.param_groups[0]["fused"] = False
    masters.step()
    masters.step()
    masters.state.clear()
    masters.step()
    gc.collect()
    assert not any(ref() for ref in alive)


def test_another_parameter_with_the_only_gradient_is_stepped():
    params = parameters(shapes=[(16,), (16,)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    for i in (0, 1, 0):
        before = [p.detach().clone() for p in params]
        params[i].grad, params[1 - i].grad = torch.ones_like(params[i]), None
        masters.step()
        assert torch.equal(params[1 - i], before[1 - i]) and not torch.equal(params[i], before[i])


def test_weights_that_were_written_to_are_noticed_by_autograd():
    params = parameters(shapes=[(16,)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    loss = (params[0] * params[0]).sum()
    give_gradients(params)
    masters.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_given_twice_is_left_to_the_optimizer(kernel):
    params = parameters(shapes=[(16,), (32,)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    masters.param_groups[0]["params"].append(params[0])
    give_gradients(params)
    masters.step()
    assert kernel == []


def test_states_go_on_in_an_optimizer_without_the_kernel_and_come_back(kernel, monkeypatch):
    params = parameters()
    wide, reference = in_fp64(optim.AdamW, params, {})
    masters, runs_at = MasterWeights(params, optim.AdamW, fused=True), fused_adam._runs_at
    for step in range(6):
        monkeypatch.setattr(fused_adam, "_runs_at", runs_at if step % 2 else lambda p: False)
        give_gradients(params)
        for p, q in zip(params, wide, strict=True):
            q.grad = p.grad.double()
        masters.step()
        reference.step()
    assert kernel == [len(params)] * 3
    for p, q in zip(params, wide, strict=True):
        assert masters.state[p]["step"] == 6
        torch.testing.assert_close(masters.state[p]["master"].double(), q.detach().to(DEVICE), rtol=2e-6, atol=2e-7)


# ---- bytes


@pytest.mark.parametrize("steps_before", [0, 1])
def test_on_an_imagined_card_a_step_makes_its_states_a_table_and_no_gradient(steps_before):
    with imagine("H100-80GB"):
        params = [nn.Parameter(torch.zeros(2**22, dtype=BF16)) for _ in range(10)]
        masters = MasterWeights(params, optim.AdamW, fused=True)
        for _ in range(steps_before + 1):
            for p in params:
                p.grad = torch.zeros_like(p)
            with Meter(nn.ParameterList(params), masters) as meter:
                masters.step()
    weights_and_gradients, states = 10 * 4 * 2**22, 10 * (12 * 2**22 + 4)
    assert meter.timeline.peak_bytes == weights_and_gradients + states + 10 * TABLE_ROW


# ---- the kernel in C

in_c = pytest.mark.skipif(not IN_C, reason="Triton's kernel is tried here, not the one in C")


@in_c
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [*OPTIONS, {"betas": (0.5, 0.5)}, {"eps": 1e-15, "lr": 1.0}])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_in_c_a_step_has_the_bits_of_pytorchs(dtype, kind, options, threads, kernel):
    """Also of what fills no vector at a tensor's end, and of tensors that threads share."""
    params = parameters(dtype, [(7,), (600, 700), (3, 5), (1024,), (1025,), ()])
    wide = [nn.Parameter(p.detach().float()) for p in params]
    masters, reference = MasterWeights(params, kind, fused=True, **options), kind(wide, fused=True, **options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(4):
            give_gradients(params, 10.0 ** -(step % 3))
            for p, q in zip(params, wide, strict=True):
                q.grad = p.grad.float()
            masters.step()
            reference.step()
    finally:
        torch.set_num_threads(before)
    assert kernel == [len(params)] * 4
    for p, q in zip(params, wide, strict=True):
        found, expected = masters.state[p], reference.state[q] | {"master": q.detach()}
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert torch.equal(p, q.to(dtype))


def some_of_every_exponent() -> torch.Tensor:
    """65,536 numbers of FP32: each sign and exponent, with halves between neighbours in 16 bits, inf and nan."""
    last = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF])
    bits = (torch.arange(512)[:, None] << 23) + torch.cat([last, torch.arange(116) * 0x11003])
    return bits.flatten().to(torch.int32).view(FP32)


@in_c
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_in_c_masters_are_rounded_as_pytorch_rounds(dtype):
    numbers = some_of_every_exponent()
    p = nn.Parameter(numbers.to(dtype))
    masters = MasterWeights([p], optim.AdamW, fused=True, weight_decay=0.0)
    p.grad = torch.zeros_like(p)
    masters.step()
    masters.state[p]["master"].copy_(numbers)
    masters.step()
    torch.testing.assert_close(p.detach(), numbers.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(p.detach().signbit() & ~p.isnan(), numbers.signbit() & ~numbers.isnan())


@in_c
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_in_c_every_gradient_of_16_bits_is_widened_as_pytorch_widens(dtype):
    gradients = torch.arange(2**16).to(torch.uint16).view(dtype)
    p = nn.Parameter(torch.zeros(2**16, dtype=dtype))
    masters = MasterWeights([p], optim.AdamW, fused=True, betas=(0.0, 0.999))
    p.grad = gradients
    masters.step()
    moments = masters.state[p]["exp_avg"]  # of beta 0: the gradients
    finite = gradients.isfinite()
    assert torch.equal(moments[finite], gradients[finite].float())
    assert finite.sum() == 2**16 - 2 * {FP16: 2**10, BF16: 2**7}[dtype] and not moments[~finite].isfinite().any()


@in_c
def test_in_c_a_step_counts_for_nothing_but_itself():
    """No tensor is made, beside the states of a first step, and chance goes on where it was."""
    params = parameters(BF16)
    masters = MasterWeights(params, optim.AdamW, fused=True)
    give_gradients(params)
    before, numel = torch.get_rng_state(), sum(p.numel() for p in params)
    adam_in_c.works.cache_clear()
    with Meter(nn.ParameterList(params), masters) as meter:
        masters.step()
        masters.step()
    assert meter.timeline.peak_bytes == (2 + 2 + 12) * numel + 4 * len(params)
    assert torch.equal(torch.get_rng_state(), before)


@in_c
@pytest.mark.parametrize("why", ["no compiler", "a compiler that fails", "another system", "other bits"])
def test_where_the_kernel_in_c_cannot_be_had_the_optimizer_steps(why, kernel, monkeypatch, tmp_path):
    if why == "no compiler":
        monkeypatch.setattr(adam_in_c.shutil, "which", lambda name: None)
    elif why == "a compiler that fails":
        fails = adam_in_c.shutil.which("false")
        monkeypatch.setattr(adam_in_c.shutil, "which", lambda name: fails)
    elif why == "another system":
        monkeypatch.setattr(adam_in_c.sys, "platform", "darwin")
    else:
        monkeypatch.setattr(adam_in_c, "KERNEL", adam_in_c.KERNEL.replace("v_share * g, g,", "v_share, g * g,"))
    compiled, works = adam_in_c._compiled.__wrapped__, adam_in_c.works.__wrapped__
    monkeypatch.setattr(adam_in_c, "_compiled", functools.cache(compiled))
    monkeypatch.setattr(adam_in_c, "works", functools.cache(works))
    params = parameters()
    wide, reference = in_fp64(optim.AdamW, params, {})
    masters = MasterWeights(params, optim.AdamW, fused=True)
    give_gradients(params)
    for p, q in zip(params, wide, strict=True):
        q.grad = p.grad.double()
    kernel.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masters.step()
    reference.step()
    assert kernel == [256] * 3 * (why == "other bits")  # of the trial alone
    assert not adam_in_c.works(FP16, FP16)
    assert_near(masters, params, reference, wide)


@in_c
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_in_c_a_decay_that_takes_a_whole_weight_leaves_what_pytorchs_leaves(kind):
    """1 − lr · decay is not 0 before it is rounded."""
    params = parameters(BF16)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    options = {"fused": True, "lr": 0.2, "weight_decay": 5.0}
    masters, reference = MasterWeights(params, kind, **options), kind(wide, **options)
    for p, q in zip(params, wide, strict=True):
        p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
    masters.step()
    reference.step()
    assert all(torch.equal(masters.state[p]["master"], q) for p, q in zip(params, wide, strict=True))
    assert any(q.any() for q in wide)


@in_c
def test_a_compiler_that_hangs_is_ended_with_all_it_started_and_the_next_one_asked(monkeypatch, tmp_path):
    hangs = tmp_path / "hangs"
    hangs.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/pid\nwait\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("CC", str(hangs))
    monkeypatch.setattr(adam_in_c, "PATIENCE_SECONDS", 2)
    assert adam_in_c._compiled.__wrapped__(BF16, BF16) is not None
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


IN_A_PROCESS_OF_ITS_OWN = """
import os, resource, torch
from torch import nn, optim
from memlab.mixed_precision import MasterWeights
torch.set_num_threads(2)
torch.ones(2000, 2000) + 1  # by PyTorch's threads
p = nn.Parameter(torch.ones(NUMEL, dtype=torch.bfloat16))
masters = MasterWeights([p], optim.AdamW, fused=True)
p.grad = torch.ones_like(p)
"""


@in_c
def test_in_c_a_forked_process_tries_and_steps_too():
    """Where PyTorch's own threads, which the parent has used, are waited for in vain."""
    fork = """
if (child := os.fork()) == 0:
    masters.step()
    (kernel,) = masters._kernels.values()
    os._exit(42 if kernel.params == [p] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-c", (IN_A_PROCESS_OF_ITS_OWN + fork).replace("NUMEL", str(2**12))]
    assert subprocess.run(command, capture_output=True, text=True, timeout=100).stdout == "42\n"


@in_c
def test_in_c_a_step_that_gets_no_thread_takes_every_share_itself():
    limit = """
torch.set_num_threads(1)
masters.step()
torch.set_num_threads(2)  # for whose stack there is no room
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 6 * 2**20, resource.RLIM_INFINITY))
masters.step()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
state = masters.state[p]
print(*[state["exp_avg"].unique().numel(), state["master"].unique().numel(), int(state["step"])])
"""
    command = [sys.executable, "-c", (IN_A_PROCESS_OF_ITS_OWN + limit).replace("NUMEL", str(2**20))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.stdout == "1 1 2\n", run.stderr


@in_c
def test_in_c_a_forked_process_steps_too():
    """Threads do not outlive a fork, and none is kept for the next step."""
    params = parameters(BF16, [(1024, 1024)])
    masters = MasterWeights(params, optim.AdamW, fused=True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        give_gradients(params)
        masters.step()
        if (child := os.fork()) == 0:
            masters.step()
            os._exit(42)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    finally:
        torch.set_num_threads(before)


# ---- without Triton


@pytest.mark.skipif(DEVICE == "cuda", reason="the trial is of a machine's own")
def test_where_triton_fails_its_trial_says_so_once_and_the_optimizer_steps(monkeypatch):
    class Broken:
        def __init__(self, *columns):
            pass

        def run(self, *_):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused_adam, "Launch", Broken)
    monkeypatch.setattr(fused_adam.importlib.util, "find_spec", lambda name: True)
    works_on = fused_adam._works_on.__wrapped__
    with pytest.warns(
        UserWarning, match="expected Triton to work on cpu, found RuntimeError: Failed to find C compiler"
    ):
        assert not works_on(torch.device("cpu"))
    monkeypatch.setattr(fused_adam.importlib.util, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not works_on(torch.device("cpu"))


def test_importing_the_pages_imports_no_triton():
    assert adam_kernel.tl is None or DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
