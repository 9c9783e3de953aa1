"""The scaler takes torch.amp.GradScaler's every step, bit for bit, and refuses what cannot work."""

import copy
import warnings

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, vmap
from torch.nn.functional import mse_loss

from memlab.mixed_precision import LossScaler
from memlab.ranks import run_ranks
from tests.harness import refusals, refused
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


PLANTS = st.sampled_from([1.0, 1.0, 1.0, INF, -INF, NAN])
RUNS = {
    "optimizer": st.sampled_from(list(OPTIMIZERS)),
    "interval": st.integers(1, 3),
    "growth": st.sampled_from([1.5, 2.0, 1e30]),
    "backoff": st.sampled_from([0.5, 0.1]),
    "iterations": st.lists(
        st.tuples(st.tuples(PLANTS, PLANTS), st.booleans(), st.integers(1, 2), st.booleans()), min_size=1, max_size=10
    ),
    "saved_at": st.integers(0, 9),
    "crossed": st.booleans(),
}


def follow(optimizer, interval, growth, backoff, iterations, saved_at, crossed):
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


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(**RUNS)
def test_parameters_states_and_scale_follow_gradscaler_bit_for_bit(**run):
    follow(**run)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(**RUNS)
def test_many_runs_follow_gradscaler_bit_for_bit(**run):
    follow(**run)


def test_an_fp16_sparse_gradient_that_overflows_when_its_duplicates_are_added_is_an_overflow():
    scaler, parameter, optimizer = scaled()
    table, double = nn.Parameter(torch.zeros(4).half()), nn.Parameter(torch.ones(1).double())
    values = torch.full((2,), 4e4, dtype=torch.float16)  # 80,000 when added: FP16 ends at 65,504
    table.grad = torch.sparse_coo_tensor([[2, 2]], values, (4,), check_invariants=True)
    double.grad = torch.ones_like(double)
    optimizer.add_param_group({"params": [table, double]})
    scaler.step(optimizer)
    assert scaler.skipped(optimizer) and parameter.item() == double.item() == 1.0


@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
def test_disabled_it_is_not_there(optimizer):
    ours, plain = (Twin(scaler, optimizer) for scaler in scalers(enabled=False, growth_interval=1))
    for twin in (ours, plain):
        for seed in range(3):
            twin.iteration(clip=True, seed=seed)
    assert_twins(ours, plain)
    loss = torch.tensor(1)
    assert ours.scaler.scale(loss) is loss
    assert ours.scaler.state_dict() == {} and ours.scaler.get_scale() == 1.0
    ours.scaler.load_state_dict({})
    assert not ours.scaler.skipped(ours.optimizers[0])
    assert ours.scaler.step(ours.optimizers[0], lambda: 3) == 3
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(ours.optimizers[0], patience=0, factor=0.5)
    before = rate.get_last_lr()[0]
    for loss in (1.0, 2.0):
        ours.scaler.step_scheduler(rate, metrics=loss)  # always, with its arguments
    assert rate.get_last_lr()[0] == before / 2


class Fused(torch.optim.SGD):
    """Notes what it is given, and unscales nothing."""

    _step_supports_amp_scaling, fails = True, False

    def step(self, closure=None, *, answer=0):
        self.seen = getattr(self.grad_scale, "item", lambda: None)(), self.found_inf.item()
        if self.fails:
            raise OSError
        return answer


def test_a_fused_optimizer_is_given_the_scale_for_one_step_only_and_never_when_it_raises():
    scaler, parameter, optimizer = scaled(optimizer=Fused, init_scale=32.0)
    optimizer.fails = True
    with pytest.raises(OSError):
        scaler.step(optimizer)
    assert optimizer.seen == (32.0, 0.0) and parameter.grad.item() == 32.0  # unscaling is left to it
    assert scaler.skipped(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    optimizer.fails, optimizer.grad_scale = False, torch.tensor(3.0)
    assert scaler.step(optimizer, answer=42) == 42
    assert optimizer.seen == (96.0, 0.0) and not scaler.skipped(optimizer)  # the user's own is multiplied in
    scaler, _, optimizer = scaled(optimizer=Fused)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.seen == (None, 0.0)


def test_outputs_come_back_in_their_own_nesting_and_dtype():
    one, scaler = torch.ones(2), LossScaler(init_scale=4.0)
    found = scaler.scale([one, (one, [one.half()]), one.double()])
    assert type(found[1]) is tuple
    assert torch.equal(found[1][1][0], torch.full((2,), 4.0, dtype=torch.float16))
    assert found[2].dtype == torch.float64
    assert [t.tolist() for t in scaler.scale(one for _ in range(2))] == [[4.0, 4.0]] * 2


@pytest.mark.parametrize(
    "loss",
    [torch.tensor(0.3, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    + [torch.tensor([[0.1, 3.0]]), torch.tensor(3), torch.tensor([True, False]), torch.tensor(1 + 2j)],
)
def test_a_scaled_output_has_gradscalers_bits_and_dtype(loss):
    ours, torchs = scalers(init_scale=2.0**17)  # more than FP16 holds
    for _ in range(2):
        a, b = ours.scale(loss), torchs.scale(loss)
        assert a.dtype == b.dtype and torch.equal(a, b)


def loss_of(scaler, plus=0.0):
    """A function of a weight: (3,) and an input: (3,), and what it returns: a scaled loss."""
    return lambda weight, x: scaler.scale((weight * x + plus).sum())


TRANSFORMS = {  # each gives a gradient: (3,), by way of losses scaled inside one of torch.func's transforms
    "grad": lambda f, w, xs: grad(f)(w, xs[0]),
    "vmap of grad": lambda f, w, xs: vmap(grad(f), (None, 0))(w, xs).mean(0),
    "grad of vmap": lambda f, w, xs: grad(lambda w: vmap(f, (None, 0))(w, xs).sum())(w),
}


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


@pytest.mark.gpu
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


@pytest.mark.parametrize("unscale", [False, True])
def test_an_infinite_loss_makes_a_fused_optimizer_without_gradients_skip_as_well(unscale):
    scaler, _, optimizer = scaled(init_scale=8.0)
    empty = Fused([nn.Parameter(torch.ones(1))])
    scaler.scale(torch.tensor(NAN))
    if unscale:
        scaler.unscale_(empty)
    for each in (empty, optimizer):
        scaler.step(each)
    scaler.update()
    assert empty.seen[1] == 1.0 and scaler.skipped(empty) and scaler.get_scale() == 4.0


def test_a_scale_that_falls_for_ever_stays_one_that_it_can_come_back_from():
    scaler, parameter, optimizer = scaled(init_scale=2.0**-120)
    for _ in range(20):
        parameter.grad = torch.tensor([INF])
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == torch.finfo(torch.float32).tiny
    LossScaler().load_state_dict(scaler.state_dict())


def test_a_finite_loss_whose_scaled_value_overflows_has_right_gradients_and_is_stepped_on():
    scaler, parameter, optimizer = scaled(init_scale=2.0**127)
    assert scaler.scale((parameter + 7).sum()).isinf()
    scaler.step(optimizer)
    assert not scaler.skipped(optimizer) and parameter.item() == 0.0


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


def test_an_overflow_on_another_rank_skips_the_step_here():
    calls = []
    agree = lambda found: calls.append(found.clone()) or torch.full_like(found, 2)  # noqa: E731, a sum over ranks
    for optimizer in (torch.optim.SGD, lambda *a, **k: torch.optim.SGD(*a, fused=True, **k)):
        scaler, parameter, optimizer = scaled(agree=agree, init_scale=8.0, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 1.0 and scaler.skipped(optimizer) and scaler.get_scale() == 4.0
    assert [(c.item(), c.shape, c.dtype) for c in calls] == [(0.0, (), torch.float32)] * 2


@pytest.mark.parametrize("unscale", [False, True])
def test_a_rank_without_gradients_and_losses_is_asked_once_for_each_optimizer_in_order(unscale):
    calls = []
    scaler = LossScaler(4.0, agree=lambda found_inf: calls.append(found_inf.item()) or found_inf)
    empty, optimizer = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([INF])
    for each in (empty, optimizer):
        if unscale:
            scaler.unscale_(each)
        scaler.step(each)
    scaler.update()
    assert calls == [0.0, 1.0]
    assert not scaler.skipped(empty) and scaler.skipped(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scheduler_steps_when_its_optimizer_did_and_torch_has_nothing_to_warn_of(fused):
    scaler, parameter, rates = LossScaler(init_scale=8.0), nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
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


@pytest.mark.parametrize("begun", [False, True])
def test_a_state_dict_loads_before_and_after_the_first_loss(begun):
    scaler, _, _ = scaled() if begun else (LossScaler(), None, None)
    state = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    state |= {"scale": 96.0, "_growth_tracker": 5}
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert (scaler.growth_factor, scaler.backoff_factor, scaler.growth_interval) == (3.0, 0.25, 7)
    assert scaler.scale(torch.ones(1)).item() == 96.0
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == state


@pytest.mark.parametrize("value", [32, torch.tensor([32.0])])
def test_a_new_scale_is_taken_and_the_iteration_ends(value):
    scaler, parameter, optimizer = scaled(init_scale=4.0)
    scaler.unscale_(optimizer)
    scaler.update(value)
    assert scaler.get_scale() == 32.0 and scaler.skipped(optimizer)  # you left the step out
    scaler.unscale_(optimizer)
    assert parameter.grad.item() == 1 / 32


NAMES = ["init_scale", "growth_factor", "backoff_factor", "growth_interval"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, INF, NAN, True, "cuda", None, torch.ones(1)])
def test_what_may_not_be_made_may_not_be_set_or_loaded_either(name, value):
    scaler = scaled()[0]
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match="found") as made:
        LossScaler(**{name: value})
    assert made.type is (ValueError if type(value) in (float, int) else TypeError)
    key, ways = {"init_scale": "scale"}.get(name, name), [lambda: scaler.load_state_dict(before | {key: value})]
    if name == "init_scale" and value is not None and not torch.is_tensor(value):
        ways.append(lambda: scaler.update(value))
    for call in ways:
        with pytest.raises(made.type) as found:
            call()
        assert str(found.value) == str(made.value)
    assert scaler.state_dict() == before


def after(*methods, optimizer=None, arguments=None, **options):
    """What the last of these methods gives, of a scaler that has had a loss; each is given the optimizer."""
    scaler, _, its = scaled(**options)
    for name in methods[:-1]:
        getattr(scaler, name)(*[optimizer or its] * (name != "update"))
    if arguments is None:
        arguments = [optimizer or its] * (methods[-1] != "update")
    return getattr(scaler, methods[-1])(*arguments)


SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))])  # without gradients
STATE = LossScaler().state_dict()
REFUSALS = {
    "the largest scale": (lambda: LossScaler(1e39), ValueError, "expected scale to be a number that FP32 holds"),
    "no growth": (lambda: LossScaler(growth_factor=1.0), ValueError, "to be a number above 1, and"),
    "no backoff": (lambda: LossScaler(backoff_factor=1.0), ValueError, "above 0 and below 1"),
    "half an iteration": (lambda: LossScaler(growth_interval=2.5), ValueError, "a whole number of iterations"),
    "a loss that is no tensor": (lambda: LossScaler().scale([1.0]), TypeError, "expected a loss: a tensor…found 1.0"),
    "a model to step": (lambda: after("step", arguments=[nn.Linear(1, 1)]), TypeError, "an optimizer, found Linear"),
    "a step before a loss": (lambda: LossScaler().step(SGD), RuntimeError, "scale(loss).backward()…no loss yet"),
    "two updates": (lambda: after("step", "update", "update"), RuntimeError, "no gradient was checked"),
    "unscaled twice": (lambda: after("unscale_", "unscale_"), RuntimeError, "found one unscaled since the last update"),
    "unscaled after a step": (lambda: after("step", "unscale_"), RuntimeError, "found one stepped since the last"),
    "stepped twice": (lambda: after("step", "step"), RuntimeError, "found a second; call update() first"),
    "a step that never was": (lambda: after("skipped", arguments=[SGD]), RuntimeError, "found one that never was"),
    "a closure": (lambda: after("step", arguments=[SGD, lambda: 1]), RuntimeError, "step() without a closure"),
    "two new scales": (lambda: after("update", arguments=[torch.ones(2)]), RuntimeError, "Tensor with 2 elements"),
    "no agreement": (lambda: after("step", agree=lambda found: True), TypeError, "expected agree to return"),
    "two agreements": (lambda: after("step", agree=lambda found: torch.zeros(2)), TypeError, "of one element"),
    "an empty dict": (lambda: LossScaler().load_state_dict({}), ValueError, "found one without…enabled=False is empty"),
    "a copy": (lambda: copy.deepcopy(LossScaler()), TypeError, "state_dict() to save a LossScaler"),
    "a negative tracker": (
        lambda: LossScaler().load_state_dict(STATE | {"_growth_tracker": -1}), ValueError, "at least 0; found -1",
    ),
}  # fmt: skip


@refusals(REFUSALS)
def test_what_cannot_work_is_refused(call, error, words):
    refused(call, error, words)


def test_an_iteration_without_gradients_has_begun_and_cannot_end():
    scaler, _, _ = scaled()
    scaler.unscale_(torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=True))
    refused(scaler.update, RuntimeError, "no gradient was checked")


def test_a_step_that_was_refused_for_want_of_gradients_is_right_when_they_are_there():
    scaler, parameter, optimizer = scaled(init_scale=8.0)
    parameter.grad = None
    refused(lambda: scaler.step(optimizer), RuntimeError, "found one without any")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter.item() == 0.0


def test_where_ranks_cannot_agree_nothing_is_divided_twice_and_the_step_is_skipped():
    def fails(found_inf):
        raise TimeoutError("a rank is gone")

    scaler, parameter, optimizer = scaled(init_scale=4.0, agree=fails)
    with pytest.raises(TimeoutError):
        scaler.unscale_(optimizer)
    refused(lambda: scaler.unscale_(optimizer), RuntimeError, "found one unscaled")
    assert parameter.grad.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 1.0 and scaler.get_scale() == 2.0
