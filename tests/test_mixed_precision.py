"""Mixed precision as a whole: a model trained in 16 bits learns what one trained in 32 does, here and in DeepSpeed."""

import itertools
import math
import os
import statistics

import pytest
import torch
from torch.nn import functional as F

from memlab.book.frameworks import deepspeed_alone, has_deepspeed
from memlab.book.workloads import GPT, text_batch
from memlab.mixed_precision import LossScaler, MasterWeights, StochasticRounding
from tests.memory_timeline_helpers import one_thread  # noqa: F401
from tests.tiers import some

SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 32}
SHARE = 4096  # of a large batch, so that gradients are small, as they are there


def learnt(dtype, around=None, scaler=None, steps=80, seed=0):
    """The mean loss of the last steps of a small GPT's training on real text."""
    torch.manual_seed(seed)
    model = GPT(**SIZES).to(dtype)
    parameters = model.parameters()
    optimizer = around(parameters, torch.optim.AdamW, lr=1e-3) if around else torch.optim.AdamW(parameters, lr=1e-3)
    scaler = scaler or LossScaler(enabled=False)
    losses = []
    for step in range(steps):
        loss = model(*text_batch(4, 32, seed=1000 * seed + step))
        losses.append(loss.item())
        scaler.scale(loss.float() / SHARE).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return statistics.mean(losses[-20:])


@some("seed", range(2), keep=1)
def test_fp16_learns_what_fp32_does_with_masters_and_scaling_and_with_neither_alone(seed):
    fp32 = learnt(torch.float32, seed=seed)
    scaled = learnt(torch.float16, MasterWeights, LossScaler(growth_interval=10), seed=seed)
    assert scaled == pytest.approx(fp32, rel=0.01)
    assert learnt(torch.float16, MasterWeights, seed=seed) > 1.05 * fp32  # most gradients are 0
    assert math.isnan(learnt(torch.float16, seed=seed))  # Adam's epsilon is 0, and so is its second moment
    assert math.isnan(learnt(torch.float16, None, LossScaler(growth_interval=10), seed=seed))


@some("seed", range(2), keep=1)
def test_bf16_needs_no_scaler_but_something_that_keeps_small_updates(seed):
    fp32 = learnt(torch.float32, seed=seed)
    for around in (MasterWeights, StochasticRounding):
        assert learnt(torch.bfloat16, around, seed=seed) == pytest.approx(fp32, rel=0.01)


def run_on_masters(scaler, dtype=torch.float16):
    """Scales and weights of training on masters, the logits widened before the loss, as DeepSpeed's run has them."""
    torch.manual_seed(0)
    model, scales = GPT(**SIZES).to(dtype), []
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for step in range(24):
        x, y = text_batch(4, 32, seed=step)
        model.zero_grad()
        scaler.scale(F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [parameter.detach() for parameter in model.parameters()]


def same(one, other):
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def test_pytorchs_own_scaler_drives_master_weights_bit_for_bit_as_ours_does():
    ours, theirs = run_on_masters(LossScaler(2.0**32)), run_on_masters(torch.amp.GradScaler("cpu", 2.0**32))
    assert same(ours, theirs) and ours[0][0] == 2.0**31 and ours[0][-1] == ours[0][-2] < 2.0**20


with_deepspeed = pytest.mark.skipif(not has_deepspeed(), reason="DeepSpeed is not installed (memlab[frameworks])")


@with_deepspeed
@some("precision", ["fp16", "bf16"], keep=1)
def test_deepspeed_gives_the_same_weights_bit_for_bit_and_leaves_nothing_behind(precision, capfd):
    environment, folder = dict(os.environ), set(os.listdir())
    torch.manual_seed(0)
    model, scales = GPT(**SIZES), []
    config = {"train_batch_size": 4, "gradient_clipping": 0.0, precision: {"enabled": True}}
    config["zero_optimization"] = {"stage": 1, "reduce_bucket_size": 2**16}
    if precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 32, "loss_scale_window": 1000, "hysteresis": 1}
    with deepspeed_alone() as deepspeed:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
        for step in range(24):
            x, y = text_batch(4, 32, seed=step)
            engine.backward(F.cross_entropy(engine(x).flatten(0, 1).float(), y.flatten()))
            engine.step()
            scales.append(float(optimizer.loss_scale))
        engine.destroy()
    weights = [parameter.detach() for parameter in model.parameters()]
    scaler = LossScaler(2.0**32, enabled=precision == "fp16")
    assert same(run_on_masters(scaler, {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]), (scales, weights))
    assert not torch.distributed.is_initialized()
    changed = {name for name in environment.keys() | os.environ if environment.get(name) != os.environ.get(name)}
    assert changed <= {"TORCHINDUCTOR_CACHE_DIR"}  # torch's own
    assert set(os.listdir()) == folder
    assert capfd.readouterr().err == ""


@with_deepspeed
@pytest.mark.parametrize(("options", "moved"), [({"gradient_clipping": 0.0}, {2.0, 1.0}), ({}, {1.0})])
def test_deepspeed_halves_the_step_in_which_its_scale_grows_and_clips_unless_told_otherwise(options, moved):
    model, places, scales = torch.nn.Linear(1, 1, bias=False), [], []
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1, "reduce_bucket_size": 2**16}, **options}
    config |= {"zero_allow_untested_optimizer": True}
    config["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    with deepspeed_alone() as deepspeed:
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
        for _ in range(7):
            places.append(model.weight.item())
            scales.append(float(optimizer.loss_scale))
            engine.backward(2 * engine(torch.ones(1, 1, dtype=torch.half)).float().sum())  # a gradient of 2
            engine.step()
        places.append(model.weight.item())
        scales.append(float(optimizer.loss_scale))
        engine.destroy()
    moves = [round(before - after, 1) for before, after in itertools.pairwise(places)]
    grew = [after > before for before, after in itertools.pairwise(scales)]
    assert {False, True} == set(grew) and set(moves) == moved
    if options:  # by default the gradient's norm is clipped to 1 all the same
        assert moves == [1.0 if now else 2.0 for now in grew]
