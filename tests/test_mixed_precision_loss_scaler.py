"""The scaler takes torch.amp.GradScaler's every step, bit for bit, and refuses what cannot work."""

import copy
import pickle
import warnings
from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jacrev, vmap
from torch.nn.functional import mse_loss

from memlab.mixed_precision.loss_scaler import LossScaler
from memlab.ranks import run_ranks
from tests.memory_timeline_helpers import one_thread  # noqa: F401

INF, NAN = float("inf"), float("nan")
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    # Without momentum: torch's fused SGD leaves its buffer as uninitialised memory if the first step is skipped.
    "fused SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "for-loop AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "foreach AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
}


class Net(nn.Module):
    """A linear layer with a transposed (non-contiguous) weight, and a parameter that never has a gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3).t())
        self.bias = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x @ self.weight.t() + self.bias


class Twin:
    """Two models, an optimizer each, and a scaler: the same at every making, whichever scaler it is."""

    def __init__(self, scaler, optimizer="SGD", net=Net):
        torch.manual_seed(0)
        self.models = [net(), net()]
        self.optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in self.models]
        self.scaler, self.scales, self.trackers = scaler, [], []

    def iteration(self, plants=(1.0, 1.0), clip=False, micro=1, skip_second=False, seed=0):
        """One iteration of both; `plants` multiply a gradient element of each model's."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(micro):
            x = torch.randn(5, 4, generator=generator)
            losses = [mse_loss(model(x), x[:, :3]) for model in self.models]
            for loss in self.scaler.scale(losses):
                loss.backward()
        for model, plant in zip(self.models, plants, strict=True):
            model.weight.grad[:1, :1].mul_(plant)
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if clip or (skip_second and number):
                self.scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if not (skip_second and number):
                self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scales.append(self.scaler.get_scale())
        self.trackers.append(self.scaler.state_dict().get("_growth_tracker"))

    def values(self):
        states = [s for o in self.optimizers for state in o.state.values() for s in state.values()]
        return [p for model in self.models for p in model.parameters()] + [s for s in states if torch.is_tensor(s)]


def assert_twins(ours, torchs):
    assert ours.scales == torchs.scales
    assert ours.trackers == torchs.trackers
    for a, b in zip(ours.values(), torchs.values(), strict=True):
        assert torch.equal(a, b)


def scalers(**options):
    return LossScaler(**options), torch.amp.GradScaler("cpu", **options)


def scaled(scaler=None, optimizer=None, gradient=1.0, **options):
    """A scaler, a parameter of 1., and its SGD(lr=1), just after a backward pass with that (unscaled) gradient."""
    scaler = scaler or LossScaler(**options)
    parameter = nn.Parameter(torch.ones(1))
    scaler.scale((parameter * gradient).sum()).backward()
    return scaler, parameter, (optimizer or torch.optim.SGD)([parameter], lr=1.0)


# ---- GradScaler's twin

PLANTS = st.sampled_from([1.0, 1.0, 1.0, INF, -INF, NAN])


@settings(max_examples=60, deadline=None)
@given(
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    interval=st.integers(1, 3),
    growth=st.sampled_from([1.5, 2.0, 1e30]),
    backoff=st.sampled_from([0.5, 0.1]),
    iterations=st.lists(
        st.tuples(st.tuples(PLANTS, PLANTS), st.booleans(), st.integers(1, 2), st.booleans()), min_size=1, max_size=10
    ),
    saved_at=st.integers(0, 9),
    crossed=st.booleans(),
)
def test_parameters_states_and_scale_follow_gradscaler_bit_for_bit(
    optimizer, interval, growth, backoff, iterations, saved_at, crossed
):
    options = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval, "init_scale": 1024.0}
    ours, torchs = (Twin(scaler, optimizer) for scaler in scalers(**options))
    for number, (plants, clip, micro, skip_second) in enumerate(iterations):
        for twin in (ours, torchs):
            twin.iteration(plants, clip, micro, skip_second, seed=number)
        if number == saved_at:
            saved = ours.scaler.state_dict(), torchs.scaler.state_dict()
            assert saved[0] == saved[1]
            ours.scaler, torchs.scaler = scalers(init_scale=8.0)
            for twin, state in zip((ours, torchs), saved[::-1] if crossed else saved, strict=True):
                twin.scaler.load_state_dict(state)
    assert_twins(ours, torchs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_only_the_optimizer_that_met_the_overflow_skips_and_the_scale_backs_off_once(optimizer):
    ours, torchs = (Twin(scaler, optimizer) for scaler in scalers(init_scale=256.0))
    for twin in (ours, torchs):
        twin.iteration()
        before = [p.clone() for p in twin.models[0].parameters()], [p.clone() for p in twin.models[1].parameters()]
        twin.iteration(plants=(1.0, INF), seed=1)
    assert not torch.equal(before[0][0], ours.models[0].weight)
    assert torch.equal(before[1][0], ours.models[1].weight)
    assert ours.scales == [256.0, 128.0]
    assert [ours.scaler.skipped(o) for o in ours.optimizers] == [False, True]
    assert_twins(ours, torchs)


@pytest.mark.parametrize(
    "optimizer, step_all", [(name, False) for name in OPTIMIZERS] + [("fused SGD", True), ("fused AdamW", True)]
)
def test_in_an_iteration_some_optimizers_may_have_no_gradients(optimizer, step_all):
    """As in a GAN, where one of two trains. Both are unscaled; or both step, as fused ones can without gradients."""
    ours, torchs = (Twin(scaler, optimizer) for scaler in scalers(init_scale=256.0, growth_interval=2))
    for twin in (ours, torchs):
        for number, plant in enumerate((1.0, 1.0, INF, 1.0, 1.0)):
            x, trains = torch.full((5, 4), number + 1.0), number % 2
            twin.scaler.scale(mse_loss(twin.models[trains](x), x[:, :3])).backward()
            twin.models[trains].weight.grad[:1, :1].mul_(plant)
            for each in twin.optimizers:
                (twin.scaler.step if step_all else twin.scaler.unscale_)(each)
            if not step_all:
                twin.scaler.step(twin.optimizers[trains])
            twin.scaler.update()
            twin.optimizers[trains].zero_grad()
            twin.scales.append(twin.scaler.get_scale())
    assert ours.scales == [256.0, 512.0, 256.0, 256.0, 512.0]
    assert_twins(ours, torchs)


@pytest.mark.parametrize("plant", [1.0, INF])
def test_sparse_gradients_of_an_embedding_follow_gradscaler(plant):
    ours, torchs = (
        Twin(scaler, net=lambda: nn.Embedding(6, 3, sparse=True), optimizer="SGD") for scaler in scalers(init_scale=8.0)
    )
    for twin in (ours, torchs):
        for _ in range(3):
            for model, optimizer in zip(twin.models, twin.optimizers, strict=True):
                optimizer.param_groups[0]["momentum"] = 0
                loss = model(torch.tensor([1, 4, 1])).square().sum() * plant
                twin.scaler.scale(loss).backward()
                twin.scaler.step(optimizer)
                optimizer.zero_grad()
            twin.scaler.update()
            twin.scales.append(twin.scaler.get_scale())
    assert ours.scales == ([8.0] * 3 if plant == 1.0 else [4.0, 2.0, 1.0])
    assert_twins(ours, torchs)


def test_an_fp16_sparse_gradient_that_overflows_when_its_duplicates_are_added_is_an_overflow():
    scaler, parameter, optimizer = scaled()
    indices = torch.tensor([[2, 2]])
    table = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    values = torch.full((2,), 4e4, dtype=torch.float16)  # 80,000 when added: FP16 ends at 65,504
    table.grad = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    optimizer.add_param_group({"params": [table]})
    scaler.step(optimizer)
    assert scaler.skipped(optimizer)
    assert parameter.item() == 1.0


def test_growth_stops_where_the_scale_would_become_inf():
    ours, torchs = (Twin(scaler) for scaler in scalers(init_scale=2.0**125, growth_interval=1))
    for twin in (ours, torchs):
        for model in twin.models:
            model.weight.data.mul_(2.0**-20)
        for _ in range(5):
            for model, optimizer in zip(twin.models, twin.optimizers, strict=True):
                twin.scaler.scale((model.bias * 2.0**-10).sum()).backward()
                twin.scaler.step(optimizer)
                optimizer.zero_grad()
            twin.scaler.update()
            twin.scales.append(twin.scaler.get_scale())
    assert ours.scales == [2.0**126, 2.0**127, 2.0**127, 2.0**127, 2.0**127]
    assert_twins(ours, torchs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_disabled_it_is_not_there(optimizer):
    ours = Twin(LossScaler(enabled=False, growth_interval=1), optimizer)
    plain = Twin(torch.amp.GradScaler("cpu", enabled=False), optimizer)
    for twin in (ours, plain):
        for seed in range(3):
            twin.iteration(plants=(1.0, 1.0), clip=True, seed=seed)
    assert_twins(ours, plain)
    loss = torch.tensor(1)
    assert ours.scaler.scale(loss) is loss
    assert ours.scaler.state_dict() == {} and ours.scaler.get_scale() == 1.0 and not ours.scaler.is_enabled()
    ours.scaler.load_state_dict({})
    assert not ours.scaler.skipped(ours.optimizers[0])
    assert ours.scaler.step(ours.optimizers[0], lambda: 3) == 3


def test_step_returns_what_the_optimizer_returned_and_none_when_skipped():
    class Answering(torch.optim.SGD):
        def step(self, closure=None, *, answer=0):
            super().step()
            return answer

    scaler, parameter, optimizer = scaled(optimizer=Answering)
    assert scaler.step(optimizer, answer=42) == 42
    scaler, parameter, optimizer = scaled(optimizer=Answering, gradient=INF)
    assert scaler.step(optimizer, answer=42) is None


def test_a_fused_optimizer_is_given_the_scale_for_one_step_only_and_never_when_it_raises():
    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            self.seen = self.grad_scale.item(), self.found_inf.item()
            raise OSError

    scaler, parameter, optimizer = scaled(optimizer=Fused, init_scale=32.0)
    with pytest.raises(OSError):
        scaler.step(optimizer)
    assert optimizer.seen == (32.0, 0.0)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    assert parameter.grad.item() == 32.0  # unscaling is left to it


def test_a_fused_step_that_raised_and_is_tried_again_unscales_the_gradients_after_all():
    def fails(*_):
        raise MemoryError

    for unscaled in (False, True):
        scaler, parameter, optimizer = scaled(optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True))
        if unscaled:
            scaler.unscale_(optimizer)
        hook = optimizer.register_step_pre_hook(fails)
        with pytest.raises(MemoryError):
            scaler.step(optimizer)
        hook.remove()
        scaler.step(optimizer)
        assert parameter.item() == 0.0


def test_a_fused_optimizer_that_was_unscaled_is_given_no_scale_and_the_users_own_is_multiplied_in():
    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            self.seen = self.grad_scale

    scaler, _, optimizer = scaled(optimizer=Fused)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.seen is None
    scaler, _, optimizer = scaled(optimizer=Fused, init_scale=32.0)
    optimizer.grad_scale = torch.tensor(3.0)
    scaler.step(optimizer)
    assert optimizer.seen.item() == 96.0


def test_the_factors_and_the_interval_are_read_and_set_as_gradscalers_are():
    ours, torchs = (Twin(scaler) for scaler in scalers(init_scale=1024.0))
    for twin in (ours, torchs):
        scaler = twin.scaler
        found = [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
        scaler.set_growth_factor(new_factor=3.0)
        scaler.set_backoff_factor(new_factor=0.25)
        scaler.set_growth_interval(new_interval=2)
        found += [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
        assert found == [2.0, 0.5, 2000, 3.0, 0.25, 2]
        for plant in (1.0, 1.0, INF):
            twin.iteration(plants=(plant, 1.0))
    assert ours.scales == [1024.0, 3072.0, 768.0]
    assert ours.scaler.state_dict() == torchs.scaler.state_dict()
    assert_twins(ours, torchs)


# ---- what is scaled


def test_outputs_come_back_in_their_own_nesting_and_dtype():
    Pair = namedtuple("Pair", "a b")
    one = torch.ones(2)
    scaler = LossScaler(init_scale=4.0)
    found = scaler.scale([one, (one, Pair(one, {"c": one.half()})), one.double()])
    assert type(found[1][1]) is Pair
    assert torch.equal(found[1][1].b["c"], torch.full((2,), 4.0, dtype=torch.float16))
    assert found[2].dtype == torch.float64
    assert [t.tolist() for t in scaler.scale(one for _ in range(2))] == [[4.0, 4.0]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_a_scaled_output_has_gradscalers_bits_and_dtype(dtype, shape):
    ours, torchs = scalers(init_scale=2.0**17)  # more than FP16 holds
    loss = torch.rand(shape).to(dtype) / 8
    a, b = ours.scale(loss), torchs.scale(loss)
    assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("output", [torch.tensor(3), torch.tensor([True, False])])
def test_whole_numbers_are_scaled_as_gradscaler_scales_them(output):
    for a, b in zip(*(scaler.scale([output, output]) for scaler in scalers()), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("outputs", [1.0, "loss", None, [1.0]])
def test_what_is_no_tensor_is_not_scaled(outputs):
    with pytest.raises(TypeError, match="expected a"):
        LossScaler().scale(outputs)


def loss_of(scaler, plus=0.0):
    """A function of a weight: (3,) and an input: (3,), and what it returns: a scaled loss."""
    return lambda weight, x: scaler.scale((weight * x + plus).sum())


TRANSFORMS = {  # each gives a gradient: (3,), by way of losses scaled inside one of torch.func's transforms
    "grad": lambda f, w, xs: grad(f)(w, xs[0]),
    "vmap of grad": lambda f, w, xs: vmap(grad(f), (None, 0))(w, xs).mean(0),
    "vmap of grad in chunks": lambda f, w, xs: vmap(grad(f), (None, 0), chunk_size=1)(w, xs).mean(0),
    "grad of vmap": lambda f, w, xs: grad(lambda w: vmap(f, (None, 0))(w, xs).sum())(w),
    "vmap of vmap of grad": lambda f, w, xs: vmap(vmap(grad(f), (None, 0)), (None, 0))(w, xs[None]).mean((0, 1)),
    "jacrev": lambda f, w, xs: jacrev(f)(w, xs[0]),
}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_loss_scaled_inside_a_transform_of_torch_func_leaves_the_scaler_as_good_as_before(transform, begun):
    found = []
    for scaler in scalers(init_scale=4.0, growth_interval=2):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        if begun:
            scaler.scale(parameter.sum())
        for _ in range(2):
            inputs = torch.arange(6.0).reshape(2, 3)
            parameter.grad = TRANSFORMS[transform](loss_of(scaler), parameter.detach(), inputs).clone()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((parameter.tolist(), scaler.state_dict(), pickle.loads(pickle.dumps(scaler)).state_dict()))
    assert found[0] == found[1]
    assert found[0][1]["scale"] == 8.0


def test_a_loss_is_scaled_and_looked_at_in_one_compiled_graph():
    scaler, parameter = LossScaler(4.0), nn.Parameter(torch.ones(3))
    optimizer, loss = torch.optim.SGD([parameter], lr=1.0), loss_of(scaler)
    scaler.scale(parameter.sum())
    try:
        for x, expected in ((1.0, 0.0), (INF, 0.0), (1.0, -1.0)):
            optimizer.zero_grad()
            torch.compile(loss, backend="eager", fullgraph=True)(parameter, torch.full((3,), x)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert parameter.tolist() == [expected] * 3
    finally:
        torch.compiler.reset()


def dtensor_ranks(rank):
    """Where one rank alone meets inf: scales and weights of both scalers with FSDP2, then what ours skipped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found, mesh = {"ours": [], "torch": [], "skipped": []}, init_device_mesh("cpu", (2,))
    bad = INF if rank == 1 else 1.0
    for name, scaler in zip(found, scalers(init_scale=8.0), strict=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for planted in (1.0, bad, 1.0):
            scaler.scale(model(torch.full((2, 4), rank + 1.0)).sum()).backward()
            model[0].weight.grad.to_local()[0] *= planted
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found[name].append((scaler.get_scale(), [p.full_tensor().tolist() for p in model.parameters()]))
    scaler = LossScaler(8.0)
    whole, split = (nn.Parameter(distribute_tensor(torch.ones(4), mesh, [way])) for way in (Replicate(), Shard(0)))
    optimizer = torch.optim.SGD([whole, split, *model.parameters()], lr=0.1)
    for in_loss, in_whole, in_both in ((1.0, 1.0, 1.0), (bad, 1.0, 1.0), (1.0, bad, 1.0), (1.0, 1.0, INF)):
        scaler.scale(model(torch.ones(2, 4)).sum() + in_loss).backward()
        scaler.scale((whole * split).sum() + in_both).backward()  # a loss that is a DTensor
        assert [p.grad.placements for p in (whole, split)] == [(Shard(0),), (Replicate(),)]  # apart, here
        whole.grad.to_local()[0] *= in_whole
        scaler.step(optimizer)
        found["skipped"].append(scaler.skipped(optimizer))
        scaler.update()
        optimizer.zero_grad()
    return found


def test_ranks_that_share_gradients_as_dtensors_skip_together():
    first, second = run_ranks(dtensor_ranks, 2)
    assert first == second
    assert first["ours"] == first["torch"] and [scale for scale, _ in first["ours"]] == [8.0, 4.0, 4.0]
    assert first["skipped"] == [False, True, True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_looks_at_the_loss_each_time_it_is_replayed():
    scaler, parameter, x = LossScaler(4.0), nn.Parameter(torch.ones(3, device="cuda")), torch.ones(3, device="cuda")
    optimizer, stream = torch.optim.SGD([parameter], lr=1.0), torch.cuda.Stream()
    backward = lambda: scaler.scale((parameter + x).sum()).backward()  # noqa: E731
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backward()  # once before, as for any capture
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    for value, expected in ((1.0, 0.0), (INF, 0.0), (1.0, -1.0)):
        x.fill_(value)
        graph.replay()
        assert parameter.grad.isfinite().all()  # only the loss tells
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [expected] * 3
    assert scaler.get_scale() == 2.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_launches_hardly_more_than_gradscalers(fused):
    def launches(scaler):
        parameter = nn.Parameter(torch.ones(3, device="cuda"))
        optimizer = torch.optim.AdamW([parameter], fused=fused)

        def step():
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        on_the_gpu = torch.autograd.DeviceType.CUDA
        return sum(event.count for event in profile.key_averages() if event.device_type == on_the_gpu)

    assert launches(LossScaler()) <= launches(torch.amp.GradScaler("cuda")) + 10


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_infinite_loss_inside_a_transform_is_an_overflow_too(transform):
    scaler, parameter = LossScaler(4.0), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for plus, expected in ((torch.tensor([0.0, 0.0, INF]), 1.0), (0.0, 0.0)):
        xs = torch.ones(1, 3)
        parameter.grad = TRANSFORMS[transform](loss_of(scaler, plus), parameter.detach(), xs).clone()
        assert parameter.grad.isfinite().all()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [expected] * 3 and scaler.get_scale() == 2.0


# ---- an infinite loss


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_an_infinite_loss_with_finite_gradients_is_an_overflow_for_every_optimizer(bad):
    ours, torchs = scalers(init_scale=64.0)
    for scaler, expected in ((ours, (1.0, 1.0, 32.0)), (torchs, (0.0, 0.0, 64.0))):
        reached, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (reached, other)]
        for loss in scaler.scale([reached.sum() + bad, other.sum()]):
            loss.backward()
        for optimizer in reversed(optimizers):
            scaler.step(optimizer)
        scaler.update()
        assert (reached.item(), other.item(), scaler.get_scale()) == expected


def test_a_square_that_overflows_fp16_is_an_overflow_though_its_gradient_is_finite():
    scaler, _, _ = scaled(init_scale=2.0)
    parameter = nn.Parameter(torch.tensor([300.0], dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    loss = parameter.square().sum()
    assert loss.isinf() and torch.autograd.grad(loss, parameter, retain_graph=True)[0].item() == 600.0
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 300.0 and scaler.get_scale() == 1.0


def test_an_infinite_loss_whose_gradients_are_dropped_on_the_way_is_an_overflow_once():
    parameter = nn.Parameter(torch.tensor([-1.0]))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0, weight_decay=0.1), LossScaler(64.0)
    for expected in (-1.0, pytest.approx(-0.9)):
        loss = (1 / parameter.relu()).sum() if expected == -1.0 else parameter.relu().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert parameter.item() == expected and scaler.get_scale() == 32.0


def test_an_infinite_loss_makes_a_fused_optimizer_without_gradients_skip_as_well():
    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            self.seen = self.found_inf.item()

    for unscale in (False, True):
        scaler, _, optimizer = scaled(init_scale=8.0)
        empty = Fused([nn.Parameter(torch.ones(1))])
        scaler.scale(torch.tensor(NAN))
        if unscale:
            scaler.unscale_(empty)
        for each in (empty, optimizer):
            scaler.step(each)
        scaler.update()
        assert empty.seen == 1.0 and scaler.skipped(empty) and scaler.get_scale() == 4.0


def test_a_scale_that_falls_for_ever_stays_one_that_it_can_come_back_from():
    scaler, parameter, optimizer = scaled(init_scale=2.0**-120)
    for _ in range(20):
        parameter.grad = torch.tensor([INF])
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == torch.finfo(torch.float32).tiny
    LossScaler().load_state_dict(scaler.state_dict())
    scaler.update(2.0)
    parameter.grad = torch.tensor([2.0])
    scaler.step(optimizer)
    assert parameter.isfinite().all()


def test_a_finite_loss_whose_scaled_value_overflows_has_right_gradients_and_is_stepped_on():
    scaler, parameter, optimizer = scaled(init_scale=2.0**127)
    optimizer.zero_grad()
    output = scaler.scale((parameter + 7).sum())
    assert output.isinf()
    output.backward()
    scaler.step(optimizer)
    assert not scaler.skipped(optimizer) and parameter.item() == 0.0


# ---- FP16 gradients


def test_fp16_gradients_are_unscaled_in_place_and_lose_what_fp16_cannot_hold():
    scaler, _, _ = scaled()
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    parameter.grad = torch.tensor([65536 * 2.0**-20, 65536 * 2.0**-26], dtype=torch.float16)
    scaler.unscale_(torch.optim.SGD([parameter]))
    assert parameter.grad.dtype == torch.float16
    assert parameter.grad.tolist() == [2.0**-20, 0.0]


def test_an_optimizer_that_widens_its_gradients_is_asked_to_before_they_are_unscaled():
    class Widening(torch.optim.SGD):
        def widen_gradients(self):
            for p in self.param_groups[0]["params"]:
                wide = p.grad.float()
                p.grad, p.grad_dtype = None, None
                p.grad = wide

    scaler, _, _ = scaled()
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    parameter.grad = torch.tensor([65536 * 2.0**-26], dtype=torch.float16)
    scaler.unscale_(Widening([parameter]))
    assert parameter.grad.item() == 2.0**-26


def test_an_fp16_overflow_is_found_among_gradients_of_several_dtypes():
    scaler, parameter, optimizer = scaled()
    half, double = (nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float16, torch.float64))
    half.grad, double.grad = torch.full_like(half, INF), torch.ones_like(double)
    optimizer.add_param_group({"params": [half, double]})
    scaler.step(optimizer)
    assert scaler.skipped(optimizer) and (half.item(), double.item(), parameter.item()) == (1.0, 1.0, 1.0)


# ---- ranks


def test_an_overflow_on_another_rank_skips_the_step_here():
    calls = []

    def agree(found_inf):
        calls.append(found_inf.clone())
        return torch.ones_like(found_inf) * 2  # a sum over two ranks: not exactly 1

    for optimizer in (torch.optim.SGD, lambda *a, **k: torch.optim.SGD(*a, fused=True, **k)):
        scaler, parameter, optimizer = scaled(agree=agree, init_scale=8.0, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 1.0 and scaler.skipped(optimizer) and scaler.get_scale() == 4.0
    assert [(c.item(), c.shape, c.dtype) for c in calls] == [(0.0, (), torch.float32)] * 2


@pytest.mark.parametrize("unscale", [False, True])
def test_a_rank_without_gradients_is_asked_once_for_each_optimizer_in_order(unscale):
    calls = []

    def agree(found_inf):
        calls.append(found_inf.item())
        return found_inf

    scaler, parameter, optimizer = scaled(agree=agree)
    parameter.grad = torch.tensor([INF])
    empty = torch.optim.SGD([nn.Parameter(torch.ones(0))], lr=1.0)
    for each in (empty, optimizer):
        if unscale:
            scaler.unscale_(each)
        scaler.step(each)
    scaler.update()
    assert calls == [0.0, 1.0]
    assert not scaler.skipped(empty) and scaler.skipped(optimizer)


def test_nothing_reads_found_inf_before_the_ranks_agree():
    def agree(found_inf):
        agree.given = found_inf
        return found_inf.fill_(1.0)  # an all_reduce works in place

    scaler, parameter, optimizer = scaled(agree=agree)
    scaler.step(optimizer)
    assert parameter.item() == 1.0


@pytest.mark.parametrize("answer", [None, True, torch.zeros(2)])
def test_an_agreement_that_is_no_tensor_of_one_element_is_refused(answer):
    scaler, _, optimizer = scaled(agree=lambda found_inf: answer)
    with pytest.raises(TypeError, match="expected agree to return the tensor"):
        scaler.step(optimizer)


# ---- schedulers


@pytest.mark.parametrize("fused", [False, True])
def test_a_scheduler_steps_when_its_optimizer_did_and_torch_has_nothing_to_warn_of(fused):
    scaler = LossScaler(init_scale=8.0)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient in (INF, NAN, 1.0, INF, 1.0):
            scaler.scale(parameter.sum() * gradient).backward()
            scaler.step(optimizer)
            scaler.update()
            scaler.step_scheduler(scheduler)
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_step_that_you_left_out_counts_as_skipped_and_one_that_never_was_is_an_error():
    scaler, _, optimizer = scaled()
    with pytest.raises(RuntimeError, match="never was"):
        scaler.skipped(optimizer)
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.skipped(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_counts_as_skipped_though_the_one_before_it_did_not(fused):
    def fails(*_):
        raise MemoryError

    scaler, parameter, optimizer = scaled(optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, fused=fused))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.skipped(optimizer)
    scaler.scale(parameter.sum()).backward()
    optimizer.register_step_pre_hook(fails)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert scaler.skipped(optimizer)


def test_a_scheduler_of_a_disabled_scaler_always_steps_and_passes_its_arguments_on():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for loss in (1.0, 2.0, 3.0):
        LossScaler(enabled=False).step_scheduler(scheduler, loss)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_scaler_keeps_no_optimizer_alive_between_iterations():
    import weakref

    scaler, _, optimizer = scaled()
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None


# ---- saving


@pytest.mark.parametrize("begun", [False, True])
def test_a_state_dict_loads_before_and_after_the_first_loss(begun):
    scaler, _, _ = scaled() if begun else (LossScaler(), None, None)
    state = {
        "scale": 96.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 5,
    }
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert scaler.scale(torch.ones(1)).item() == 96.0
    assert scaler.state_dict() == state
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == state


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_goes_on_where_the_scaler_was(copied):
    scaler, parameter, optimizer = scaled(init_scale=8.0, growth_interval=2)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="between iterations"):
        copied(scaler)
    scaler.update()
    other = copied(scaler)
    assert other.state_dict() == scaler.state_dict() and other.state_dict()["_growth_tracker"] == 1
    scaled(other)
    other.scale(parameter.sum()).backward()
    other.step(optimizer)
    other.update()
    assert (other.get_scale(), scaler.get_scale()) == (16.0, 8.0)
    assert copied(LossScaler(enabled=False)).state_dict() == {}


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_iteration_without_gradients_has_begun_as_well_and_nothing_is_copied_in_it(copied):
    for scaler, error in zip(scalers(), (RuntimeError, AssertionError), strict=True):
        scaled(scaler)
        scaler.unscale_(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        with pytest.raises(error, match="between iterations|beginning of an iteration"):
            copied(scaler)


def test_a_growth_factor_of_1_is_refused_in_a_state_dict_too_where_gradscaler_can_be_set_to_it():
    ours, torchs = scalers()
    with pytest.raises(AssertionError):
        torch.amp.GradScaler("cpu", growth_factor=1.0)
    torchs.set_growth_factor(1.0)
    with pytest.raises(ValueError, match="expected growth_factor to be a number above 1"):
        ours.load_state_dict(torchs.state_dict())


@pytest.mark.parametrize(
    "state",
    [
        {},
        torch.optim.SGD([torch.zeros(1)]).state_dict(),
        nn.Linear(1, 1).state_dict(),
        {"scale": 1.0},
        LossScaler().state_dict() | {"scale": 0.0},
        LossScaler().state_dict() | {"scale": INF},
        LossScaler().state_dict() | {"growth_interval": 2.5},
        LossScaler().state_dict() | {"_growth_tracker": -1},
        LossScaler().state_dict() | {"backoff_factor": 2.0},
    ],
)
def test_a_foreign_or_broken_state_dict_is_refused_and_changes_nothing(state):
    scaler, _, _ = scaled(init_scale=4.0)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="expected"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


def test_a_state_dict_with_words_for_numbers_is_refused():
    with pytest.raises(TypeError, match="expected scale to be a number"):
        LossScaler().load_state_dict(LossScaler().state_dict() | {"scale": "big"})


# ---- refusals


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval"])
@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN, 0, -2])
def test_settings_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match="found"):
        LossScaler(**{name: value})


@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval"])
@pytest.mark.parametrize("value", [True, "cuda", None, torch.ones(1), 1j])
def test_settings_that_are_no_numbers_are_refused(name, value):
    with pytest.raises(TypeError, match="found"):
        LossScaler(**{name: value})


@pytest.mark.parametrize(
    "setting", [{"init_scale": 1e39}, {"init_scale": 1e-39}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}]
)
def test_settings_at_the_edge_are_refused(setting):
    with pytest.raises(ValueError, match="found"):
        LossScaler(**setting)


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN, 0, True, "cuda", None, 1j])
def test_what_may_not_be_made_may_not_be_set_either(name, value):
    scaler = LossScaler()
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError)) as made:
        LossScaler(**{name: value})
    with pytest.raises(made.type) as found:
        getattr(scaler, f"set_{name}")(value)
    assert str(found.value) == str(made.value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("growth_interval", [1.0, 2000.5])
def test_a_growth_interval_is_a_whole_number(growth_interval):
    with pytest.raises(ValueError, match="whole number"):
        LossScaler(growth_interval=growth_interval)


@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN, torch.tensor(0.0), torch.tensor([INF])])
def test_a_new_scale_that_makes_no_sense_is_refused(value):
    scaler, _, _ = scaled(init_scale=4.0)
    with pytest.raises(ValueError, match="expected scale"):
        scaler.update(value)
    assert scaler.get_scale() == 4.0


def test_a_new_scale_of_several_elements_is_refused():
    scaler, _, _ = scaled(init_scale=4.0)
    with pytest.raises(ValueError, match=r"expected new_scale to be one number, found one of shape \(2,\)"):
        scaler.update(torch.ones(2))


@pytest.mark.parametrize("value", [32.0, 32, torch.tensor(32.0), torch.tensor([32.0])])
def test_a_new_scale_is_taken_and_the_iteration_ends(value):
    scaler, parameter, optimizer = scaled(init_scale=4.0)
    scaler.unscale_(optimizer)
    scaler.update(value)
    assert scaler.get_scale() == 32.0
    scaler.unscale_(optimizer)
    assert parameter.grad.item() == 1 / 32


def test_nothing_works_before_there_is_a_loss():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for method in (LossScaler().step, LossScaler().unscale_):
        with pytest.raises(RuntimeError, match=r"scale\(loss\)\.backward\(\)"):
            method(optimizer)
    with pytest.raises(RuntimeError, match="no gradient was checked"):
        LossScaler().update()


def test_an_update_without_any_step_is_refused():
    scaler, _, optimizer = scaled()
    with pytest.raises(RuntimeError, match="no gradient was checked"):
        scaler.update()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="no gradient was checked"):
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_step_without_gradients_is_refused_where_gradscaler_refuses_it(unscale):
    for scaler, error, message in zip(
        scalers(), (RuntimeError, AssertionError), ("found one without any", "No inf checks"), strict=True
    ):
        scaled(scaler)
        empty = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        if unscale:
            scaler.unscale_(empty)
        with pytest.raises(error, match=message):
            scaler.step(empty)


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_an_iteration_in_which_no_optimizer_has_gradients_cannot_end_here_nor_in_gradscaler(method):
    for scaler, error in zip(scalers(), (RuntimeError, AssertionError), strict=True):
        scaler.scale(torch.tensor(INF))
        getattr(scaler, method)(torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=True))
        with pytest.raises(error, match="no gradient was checked|No inf checks"):
            scaler.update()


@pytest.mark.parametrize("fused", [False, True])  # where GradScaler gives found_inf as an int, which has no device
def test_gradients_that_come_after_unscale_are_refused_here_and_in_gradscaler(fused):
    errors = RuntimeError, AttributeError if fused else AssertionError
    for scaler, error in zip(scalers(), errors, strict=True):
        parameter = nn.Parameter(torch.ones(1))
        optimizer, loss = torch.optim.SGD([parameter], lr=1.0, fused=fused), scaler.scale(parameter.sum())
        scaler.unscale_(optimizer)
        loss.backward()
        with pytest.raises(error, match="without any when it was unscaled|No inf checks|device"):
            scaler.step(optimizer)
        assert parameter.item() == 1.0


def test_a_step_that_was_refused_for_want_of_gradients_is_right_when_they_are_there():
    scaler, parameter, optimizer = scaled(init_scale=8.0)
    parameter.grad = None
    with pytest.raises(RuntimeError, match="found one without any"):
        scaler.step(optimizer)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter.item() == 0.0


@pytest.mark.parametrize("method", ["step", "unscale_"])
@pytest.mark.parametrize("other", [nn.Linear(1, 1), [torch.ones(1)], None])
def test_what_is_no_optimizer_is_refused(method, other):
    scaler, _, _ = scaled()
    with pytest.raises(TypeError, match="expected an optimizer, found"):
        getattr(scaler, method)(other)


def test_an_optimizer_is_unscaled_once_and_stepped_once():
    scaler, parameter, optimizer = scaled()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="found one unscaled"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="found one stepped"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="found a second"):
        scaler.step(optimizer)
    assert parameter.item() == 0.0


@pytest.mark.parametrize("number, expected", [(0, 1.0), (1, -7.0)], ids=["memlab", "torch"])
def test_a_closure_is_refused_by_position_too_where_gradscaler_steps_on_scaled_gradients(number, expected):
    scaler, parameter, optimizer = scaled(scalers(init_scale=8.0)[number])

    def closure():
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()  # a gradient of 8, which nobody divides

    with pytest.raises(RuntimeError, match="[Cc]losure"):
        scaler.step(optimizer, closure=closure)
    with pytest.raises(RuntimeError, match="closure") if number == 0 else nullcontext():
        scaler.step(optimizer, closure)
    assert parameter.item() == expected


def test_where_ranks_cannot_agree_nothing_is_divided_twice_and_the_step_is_skipped():
    def fails(found_inf):
        raise TimeoutError("a rank is gone")

    scaler = LossScaler(4.0, agree=fails)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(TimeoutError):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="found one unscaled"):
        scaler.unscale_(optimizer)
    assert parameter.grad.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.0 and scaler.get_scale() == 2.0


def test_a_rank_that_never_had_a_loss_agrees_all_the_same():
    asked = []
    scaler = LossScaler(4.0, agree=lambda found_inf: asked.append(found_inf.item()) or found_inf)
    scaler.step(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    scaler.update()
    assert asked == [0.0]


def test_a_schedule_that_looks_at_a_metric_is_given_it():
    scaler, _, optimizer = scaled()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    scaler.step(optimizer)
    for metric in (1.0, 2.0, 3.0):
        scaler.step_scheduler(scheduler, metrics=metric)
    assert optimizer.param_groups[0]["lr"] < 1.0


def test_a_complex_loss_is_scaled():
    assert LossScaler(4.0).scale(torch.tensor(1 + 2j)).item() == 4 + 8j
