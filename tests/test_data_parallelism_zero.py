"""ZeRO 1 and 2: the same step as one process's, by parts; each rank holds what is promised, to the byte."""

from __future__ import annotations

import contextlib
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import distributed, nn, optim
from torch.utils.checkpoint import checkpoint

from memlab.data_parallelism import DataParallel, FlatLayout, ZeroOptimizer
from memlab.data_parallelism.buckets import bucketed
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import LossScaler, MasterWeights
from memlab.offloading import OffloadedOptimizer
from memlab.ranks import Traffic, imagined_ranks, run_ranks
from memlab.units import parse_bytes
from tests.harness import nothing_left_behind, refusals, refused
from tests.ranks_helpers import Cases, FailsInBackward
from tests.sharding_helpers import gpt

FP64 = torch.float64
SHAPES = [(30, 4), (5,), (0,), (2, 3, 4), (), (7, 1), (1,)]
SMALL, BUCKET = "256 B", "16 KiB"
OPTIMIZERS = {
    "SGD, Nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "AdamW, AMSGrad": (optim.AdamW, {"foreach": True, "amsgrad": True}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "NAdam": (optim.NAdam, {}),
    "ASGD": (optim.ASGD, {}),
}
on_two_ranks, on_three_ranks = Cases(2), Cases(3)


def in_masters(parts, **options):
    return MasterWeights(parts, optim.AdamW, **options)


def on_host(parts, **options):
    return OffloadedOptimizer(parts, optim.AdamW, **options)


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params, seed) -> None:
    """Whole multiples of 12, of which 2 or 3 ranks' average is exact."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = 12 * torch.randint(-9, 9, p.shape, generator=generator).to(p.dtype)


def in_groups(params) -> list[dict]:
    """With weight decay for matrices, without for all else."""
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-4},
    ]


def apart(ours, theirs) -> float:
    """The largest ‖a − b‖ / ‖b‖ over pairs of tensors; nan if one is."""
    pairs = zip(ours, theirs, strict=True)
    return max([((a - b).norm() / b.norm()).item() if b.norm() else a.norm().item() for a, b in pairs])


def same(a, b) -> bool:
    """Whether two state dicts, or anything in them, are equal bit by bit, with the same keys, types and shapes."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def _ten_steps(stage, micro_batches):
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, alone = gpt(100 + rank, width=32, vocabulary=64), gpt(100, width=32, vocabulary=64)
    optimizer = ZeroOptimizer(in_groups(list(model.parameters())), optim.AdamW, stage, bucket_bytes=BUCKET)
    reference = optim.AdamW(in_groups(list(alone.parameters())))
    schedulers = [optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (optimizer, reference)]
    for step in range(10):
        x, y = torch.randint(64, (2, 12, 8), generator=torch.Generator().manual_seed(step))
        alone(x, y).backward()
        theirs = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        shares = [each.chunk(world)[rank].chunk(micro_batches) for each in (x, y)]
        for number, (share, targets) in enumerate(zip(*shares, strict=True)):
            keep = stage == 2 and step % 2 and number < micro_batches - 1  # every other step keeps gradients whole
            with optimizer.no_sync() if keep else contextlib.nullcontext():
                (model(share, targets) / micro_batches).backward()
        assert abs(optimizer.clip_grad_norm_(1.0) / theirs - 1) <= 1e-12
        for each, scheduler in zip((optimizer, reference), schedulers, strict=True):
            each.step()
            each.zero_grad()
            scheduler.step()
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    pairs = [(ours["state"][n][name], v) for n, s in theirs["state"].items() for name, v in s.items()]
    assert apart(model.parameters(), alone.parameters()) <= 1e-12 and apart(*zip(*pairs, strict=True)) <= 1e-12
    assert ours["param_groups"] == theirs["param_groups"]


for _stage in (1, 2):
    on_two_ranks[f"ten_steps_at_stage_{_stage}_of_two_micro_batches"] = partial(_ten_steps, _stage, 2)
    on_three_ranks[f"ten_steps_at_stage_{_stage}"] = partial(_ten_steps, _stage, 1)


def whole_gradients(optimizer) -> dict[int, torch.Tensor]:
    """The gradients that the collectives returned, put together from all ranks' parts, by number of the parameter."""
    own, shapes = {}, {}
    for bucket in optimizer._buckets:
        for number, p, part in zip(bucket.numbers, bucket.params, bucket.parts, strict=True):
            own[number], shapes[number] = part.grad, p.shape
    ranks = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    return {n: torch.cat([rank[n] for rank in ranks]).view(shapes[n]) for n in own if own[n] is not None}


def bit_by_bit(stage, make, options, dtype=torch.float32) -> bool:
    """Whether weights and states equal an optimizer's that is fed the very gradients the collectives returned."""
    rank = distributed.get_rank()
    params, copies = parameters(dtype, seed=rank), parameters(dtype)
    optimizer = ZeroOptimizer(in_groups(params), make, stage, bucket_bytes=SMALL, **options)
    reference = make(in_groups(copies), **options)
    order = [p for group in in_groups(params) for p in group["params"]]
    theirs = [p for group in in_groups(copies) for p in group["params"]]
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = torch.zeros((), dtype=dtype)
        for p in order:
            loss = loss + (p * torch.randn(p.shape, generator=generator).to(dtype)).sum()
        loss.backward()
        optimizer.reduce_gradients()
        for number, gradient in whole_gradients(optimizer).items():
            theirs[number].grad = gradient
        optimizer.step()
        reference.step()
        reference.zero_grad()
    return all(map(torch.equal, params, copies)) and same(optimizer.state_dict(), reference.state_dict())


@on_three_ranks
def every_elementwise_optimizer_steps_as_on_the_whole_fed_the_very_gradients_the_collectives_returned():
    for number, (name, what) in enumerate(OPTIMIZERS.items()):
        assert bit_by_bit(1 + number % 2, *what), name
    for make in (in_masters, on_host):
        for stage in (1, 2):
            assert bit_by_bit(stage, make, {}, torch.bfloat16), (make.__name__, stage)


def saved(make, seed, state, values, seeds):
    """Some steps, from a state; then the weights, and the optimizer."""
    params = parameters(seed=seed)
    with torch.no_grad():
        for p, value in zip(params, values or params, strict=True):
            p.copy_(value)
    optimizer = make(in_groups(params))
    if state is not None:
        optimizer.load_state_dict(state)
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()
    return [p.detach() for p in params], optimizer


def saved_by_ranks(state, values, seeds, to):
    make = partial(ZeroOptimizer, optimizer_class=optim.AdamW, bucket_bytes=SMALL, lr=0.1)
    values, optimizer = saved(make, distributed.get_rank(), state, values, seeds)
    states = [s for each in optimizer.state.values() for s in each.values()]
    assert state is None or all(s.untyped_storage().nbytes() == s.nbytes for s in states)
    return values, optimizer.state_dict(to)


def saved_alone(state, values, seeds):
    values, optimizer = saved(partial(optim.AdamW, lr=0.1), 0, state, values, seeds)
    return values, optimizer.state_dict()


def test_a_state_dict_is_that_of_the_optimizer_itself_and_goes_on_with_another_number_of_ranks_bit_by_bit():
    half, expected = saved_alone(None, None, range(3)), saved_alone(None, None, range(6))
    first, second, third = run_ranks(lambda rank: saved_by_ranks(None, None, range(3), 1), 3)
    assert same(second, half) and first[1] == third[1] == {}
    for found in run_ranks(lambda rank: saved_by_ranks(*second[::-1], range(3, 6), None), 2):
        assert same(found, expected)
    assert same(saved_alone(*second[::-1], range(3, 6)), expected)


def test_hooks_of_saving_and_loading_are_called_as_torch_calls_them():
    def history(make):
        said = []
        optimizer = make(nn.Linear(2, 2).parameters())
        optimizer.register_state_dict_pre_hook(lambda one: said.append("saving"))
        optimizer.register_state_dict_post_hook(lambda one, saved: saved | {"epoch": 3})
        optimizer.register_load_state_dict_pre_hook(lambda one, saved: said.append(saved.pop("epoch")))
        optimizer.register_load_state_dict_pre_hook(lambda one, saved: {**saved, "state": {}})
        optimizer.register_load_state_dict_post_hook(lambda one: said.append("loaded"))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return [*said, saved]

    with imagined_ranks(2):
        ours = history(lambda params: ZeroOptimizer(params, optim.SGD, lr=0.1))
    assert ours == history(lambda params: optim.SGD(params, lr=0.1))


def second_step(stage, micro_batches, world=64):
    """What rank 0 of many sends in a step on imagined hardware; its timeline, and the bytes of parameters."""
    with imagined_ranks(world), imagine("H100-80GB"):
        model = gpt(dtype=torch.float32, width=32, vocabulary=64)
        with Meter(model) as building:
            optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, stage, bucket_bytes=BUCKET)
        x = torch.randint(64, (2, 8))
        for _ in range(2):  # in the first, ranks agree on turns
            with Meter(model, optimizer, inputs=x) as meter, Traffic() as traffic:
                for _ in range(micro_batches):
                    model(x, x).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        state = optimizer.state_dict()
        assert state["state"][0]["exp_avg"].shape == (64, 32) and state["state"][0]["exp_avg"].device.type == "cpu"
        optimizer.load_state_dict(state)
        params = list(model.parameters())
        buckets = bucketed(params, [p.dtype for p in params], parse_bytes(BUCKET))
        padded = [4 * FlatLayout([params[n].shape for n in ns], world).padded for ns in buckets]
    assert building.timeline.peak_bytes <= sum(padded) + max(padded) + 8 * len(padded)  # one bucket is there twice
    return traffic, meter.timeline, sum(padded)


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 3), (2, 1), (2, 3)])
def test_of_64_ranks_one_sends_its_share_of_weights_and_of_gradients_at_stage_2_those_of_each_backward(
    stage, micro_batches
):
    traffic, timeline, whole = second_step(stage, micro_batches)
    share = whole // 64 * 63
    reduced = share * (micro_batches if stage == 2 else 1)
    assert traffic.by_name() == {"reduce_scatter": reduced, "all_reduce": 16, "all_gather": share}  # and of the norm
    assert timeline.curves["gradient"][-1] == 0
    filling = {number for number, each in timeline.storages.items() if str(each.line).startswith("Filling")}
    alive, most = 0, 0
    for event in timeline.events:
        alive += event.delta if event.storage in filling else 0
        most = max(most, alive)
    largest = parse_bytes(BUCKET)
    assert alive == 0 and whole / 12 < most <= 3 * largest < whole / 2
    if stage == 2:  # the whole of the gradients never exists
        assert max(timeline.curves["gradient"]) == whole / 64


class Three:
    """Three parameters of two ranks at stage 2, whose averaged gradients are 1.5 times 1, 2 and 3."""

    def __init__(self):
        self.rank = distributed.get_rank()
        self.params = parameters(FP64, [(8, 4), (8, 4), (3,)], seed=self.rank)
        self.optimizer = ZeroOptimizer(self.params, optim.SGD, 2, bucket_bytes=SMALL, lr=0.1)

    def backward(self, *numbers) -> None:
        order = numbers if self.rank else reversed(numbers)
        sum((self.params[n] * (1 + n)).sum() * (1.0 + self.rank) for n in order).backward()

    def parts(self) -> list:
        return [None if p.grad is None else p.grad.clone() for p in self.optimizer.param_groups[0]["params"]]

    def assert_gradients(self, *values) -> None:
        """Also clears them."""
        for grad, value in zip(self.parts(), values, strict=True):
            assert (grad is None) if value is None else (grad == value).all()
        self.optimizer.zero_grad()


@on_two_ranks
def every_backward_is_reduced_in_the_same_order_on_every_rank_and_added_up():
    three = Three()
    with Traffic() as traffic:
        three.backward(0, 1, 2)
        three.backward(0, 1, 2)
    calls, every = [(record.name, record.tensor_bytes) for record in traffic.records], [None, None]
    distributed.all_gather_object(every, calls)
    assert every[0] == every[1]
    scattered = [nbytes for name, nbytes in calls if name == "reduce_scatter"]
    assert len(scattered) == 2 * 3 and sum(scattered) == 2 * (2 * 8 * 4 + 4) * 8
    assert all(p.grad is None for p in three.params)
    assert all((grad == 3.0 * (1 + n)).all() for n, grad in enumerate(three.parts()))
    three.optimizer.zero_grad(set_to_none=False)
    three.assert_gradients(0, 0, 0)
    assert three.parts() == [None] * 3


@on_two_ranks
def no_sync_keeps_gradients_whole_until_the_backward_after_it():
    three = Three()
    with three.optimizer.no_sync(), Traffic() as quiet:
        three.backward(0, 2)
    assert quiet.records == [] and three.params[0].grad is not None
    three.backward(1)  # takes what was kept, too
    three.assert_gradients(1.5, 3.0, 4.5)
    three.backward(1)
    with three.optimizer.no_sync():
        three.backward(0)
    refused(three.optimizer.step, RuntimeError, "call reduce_gradients() when the last backward is through")
    three.optimizer.reduce_gradients()
    three.assert_gradients(1.5, 3.0, 0.0)


@on_two_ranks
def a_rank_without_data_counts_as_zeros():
    three = Three()
    if three.rank == 0:
        three.backward(0, 1, 2)
    three.optimizer.reduce_gradients()  # rank 1 did not run backward
    three.assert_gradients(0.5, 1.0, 1.5)
    empty = torch.ones(0 if three.rank else 4, dtype=FP64)
    (empty[:, None, None] * three.params[0]).sum().backward()
    three.assert_gradients(2.0, 0.0, 0.0)


@on_two_ranks
def reentrantly_checkpointed_parameters_have_the_gradients_they_should():
    three = Three()
    x = torch.full((1,), 1.0 + three.rank, dtype=FP64).requires_grad_()
    for p in three.params[:2]:  # a backward inside backward, whose hooks are of another graph task
        inner = checkpoint(lambda y, p=p: (p * y).sum(), x, use_reentrant=True)
        (inner + three.params[2].sum()).backward()
    three.assert_gradients(1.5, 1.5, 2.0)


@on_two_ranks
def a_parameter_that_is_frozen_or_thawed_later_is_refused_at_the_step():
    for stage in (1, 2):
        for thawed in (False, True):
            params = parameters(FP64, [(8, 4), (3,)])
            params[1].requires_grad_(not thawed)
            optimizer = ZeroOptimizer(params, optim.SGD, stage, bucket_bytes=SMALL, lr=0.1)
            params[1].requires_grad_(thawed)
            sum(p.sum() for p in params).backward()
            words = "found trained; make" if thawed else "expected parameter 1 trained…found frozen; make another"
            refused(optimizer.step, RuntimeError, words)
        never = [nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))]
        optimizer = ZeroOptimizer(never, optim.SGD, stage, lr=0.1)
        never[0].grad = torch.ones(3)
        refused(optimizer.step, RuntimeError, "expected parameter 0 frozen…found a gradient of it")


@on_two_ranks
def a_gradient_that_a_hook_took_away_counts_as_one_that_never_came():
    params = parameters(FP64, [(4,), (3,), (5,)])
    for number, p in enumerate(params[:2]):  # the second on rank 1 only
        if number <= distributed.get_rank():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    optimizer = ZeroOptimizer(params, optim.SGD, 2, bucket_bytes=8, lr=0.1)
    sum(p.sum() for p in params).backward()
    first, second, third = (part.grad for part in optimizer.param_groups[0]["params"])
    assert set(first.tolist()) == {0.0} and set(second.tolist()) == {0.5} and set(third.tolist()) == {1.0}


@on_two_ranks
def an_inf_on_one_rank_makes_all_skip_with_a_scaler_that_agrees():
    rank = distributed.get_rank()

    def agree(found):
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return found

    params = parameters(torch.float16, [(4, 4), (7,)])
    optimizer = ZeroOptimizer(params, in_masters, 2, lr=0.5)
    scaler, history = LossScaler(8.0, agree=agree), []
    for factor in (1.0, float("inf") if rank == 1 else 1.0, 1.0):
        before = [p.detach().clone() for p in params]
        scaler.scale(sum((p * factor).sum() for p in params)).backward()
        scaler.unscale_(optimizer)
        assert len(history) == 1 or optimizer.clip_grad_norm_(100.0).item() == pytest.approx(23**0.5, rel=1e-6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append((all(map(torch.equal, before, params)), scaler.get_scale()))
    assert history == [(False, 8.0), (True, 4.0), (False, 4.0)]


@on_two_ranks
def the_norm_and_the_clipped_gradients_are_torchs_of_the_average():
    params = parameters(FP64, seed=distributed.get_rank())
    optimizer = ZeroOptimizer(params, optim.SGD, bucket_bytes=SMALL, lr=0.5)
    torch.manual_seed(0)
    for kind in (1.0, 2.0, 3.5, float("inf")):
        copies = parameters(FP64)
        brought = [[torch.randn(p.shape, dtype=FP64) for p in copies] for _ in range(2)]  # of one seed on both ranks
        for number, (p, copy) in enumerate(zip(params, copies, strict=True)):
            p.grad = brought[distributed.get_rank()][number]
            copy.grad = (brought[0][number] + brought[1][number]) / 2
        theirs = nn.utils.clip_grad_norm_([p for p in copies if p.numel()], 0.1, kind)  # torch refuses empty ones
        assert abs(optimizer.clip_grad_norm_(0.1, kind) / theirs - 1) <= 1e-12
        clipped = whole_gradients(optimizer)
        assert apart([clipped[n] for n in range(len(copies))], [p.grad for p in copies]) <= 1e-12
        optimizer.zero_grad()


@on_two_ranks
def a_weight_written_to_between_steps_reaches_its_master_and_a_graph_from_before_a_step_is_refused():
    params = parameters(torch.bfloat16)
    optimizer = ZeroOptimizer(params, in_masters, lr=1e-3)
    set_gradients(params, 0)
    optimizer.step()
    parts = optimizer.param_groups[0]["params"]
    counted = [part._version for part in parts]
    set_gradients(params, 1)
    optimizer.reduce_gradients()
    assert counted == [part._version for part in parts]  # the gather after a step counts as no such write
    with torch.no_grad():
        params[0].fill_(3.0)
    optimizer.step()
    graph = (params[0] * params[0]).sum()
    set_gradients(params, 1)
    optimizer.step()
    assert ((params[0] - 3.0).abs() < 0.1).all()
    refused(graph.backward, RuntimeError, "modified by an inplace operation")


@on_two_ranks
def a_group_that_comes_later_is_refused():
    optimizer = ZeroOptimizer(parameters(FP64), optim.SGD, 2, bucket_bytes=SMALL, lr=0.5)
    late = {"params": parameters(FP64, [(5, 3)])}
    refused(lambda: optimizer.add_param_group(late), RuntimeError, "expected all parameters when ZeroOptimizer is made")


@on_two_ranks
def frozen_weights_may_be_of_dtypes_that_no_collective_knows():
    frozen = [torch.full((3,), distributed.get_rank() + 1).to(dtype) for dtype in (torch.int16, torch.float8_e4m3fn)]
    params = [*(nn.Parameter(base, requires_grad=False) for base in frozen), nn.Parameter(torch.ones(3))]
    optimizer = ZeroOptimizer(params, torch.optim.SGD, stage=2, lr=0.5)
    params[-1].sum().backward()
    optimizer.step()
    assert [p.float().tolist() for p in params] == [[1.0] * 3] * 2 + [[0.5] * 3]


def one_weight() -> nn.Linear:
    """A layer of two weights, 0; its gradient is 1 on rank 0, 2 on rank 1, where `stepped` puts rows in."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def stepped(model: nn.Linear, optimizer) -> list:
    model(torch.full((1, 2), distributed.get_rank() + 1.0)).sum().backward()
    optimizer.step()
    return model.weight.tolist()


@on_two_ranks
def a_later_optimizer_has_the_gradients_of_an_older_ones_parameters():
    for first, second in ((1, 1), (1, 2), (2, 1), (2, 2)):
        model = one_weight()
        old = optim.lr_scheduler.StepLR(ZeroOptimizer(model.parameters(), optim.SGD, first, lr=1.0), 1)  # holds it
        assert stepped(model, ZeroOptimizer(model.parameters(), optim.SGD, second, lr=1.0)) == [[-1.5, -1.5]]
        assert old.last_epoch == 0


@on_two_ranks
def an_optimizer_that_could_not_be_made_takes_no_gradients():
    model = one_weight()
    with pytest.raises(ValueError, match="learning rate") as held:  # with the optimizer, as sys.last_exc does
        ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=-1.0)
    assert held.value and not model.weight._post_accumulate_grad_hooks


@on_two_ranks
def of_a_wrapper_and_stage_2_on_one_model_the_older_is_closed():
    model = one_weight()
    zero = ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=1.0)
    replica = DataParallel(model)
    assert stepped(replica.module, optim.SGD(model.parameters(), lr=1.0)) == [[-1.5, -1.5]]
    refused(zero.step, RuntimeError, "found one that was closed")
    ZeroOptimizer(model.parameters(), optim.SGD, 2, lr=1.0)
    refused(lambda: replica(torch.ones(1, 2)), RuntimeError, "found a closed one")


@on_two_ranks
def after_a_backward_that_raised_step_and_zero_grad_are_refused_and_another_optimizer_goes_on():
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    for fail in (FailsInBackward.apply, torch.clone):
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, 2, bucket_bytes=8, lr=1.0)
        loss = model[1](fail(model[0](torch.full((1, 1), 10.0)))).sum()
        if fail is torch.clone:
            loss.backward()
            assert [p.grad.item() for p in optimizer.param_groups[0]["params"] if p.numel()] == [10.0] * 2
        else:
            refused(loss.backward, ArithmeticError, "")
            for call in (optimizer.step, optimizer.zero_grad):
                refused(call, RuntimeError, "one that raised in the middle…make another ZeroOptimizer")
            model.zero_grad()


@pytest.mark.parametrize("closed", [True, False])
def test_an_optimizer_that_dies_or_is_closed_leaves_no_hook_and_no_part(closed):
    with imagined_ranks(4):
        model = nn.Linear(3, 3)
        with nothing_left_behind(model):
            optimizer = ZeroOptimizer(model.parameters(), optim.AdamW, 2)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert all(p._post_accumulate_grad_hooks for p in model.parameters())
            part = weakref.ref(optimizer.param_groups[0]["params"][0])
            gc.disable()
            try:
                if closed:
                    optimizer.close()
                    assert part() is not None
                else:
                    del optimizer
                    assert part() is None
            finally:
                gc.enable()


@on_two_ranks
def parameters_and_settings_unlike_rank_0s_are_refused_on_all_ranks():
    rank, linear = distributed.get_rank(), nn.Linear(2, 2)
    groups = [{"params": [p]} for p in linear.parameters()] if rank else linear.parameters()
    for params, stage, words in (
        (linear.parameters(), 1 + rank, "found stage on rank 1: 2, on rank 0: 1"),
        (groups, 1, "found parameter 1 on rank 1: (2,) of torch.float32, trained, in group 1"),
    ):
        refused(partial(ZeroOptimizer, params, optim.SGD, stage, lr=0.1), ValueError, words)


def zero(params=None, make=optim.SGD, stage=1):
    return ZeroOptimizer(parameters(FP64) if params is None else params, make, stage, lr=0.1)


def _load_one_of(shapes):
    other = optim.AdamW(parameters(shapes=shapes))
    set_gradients(other.param_groups[0]["params"], 0)
    other.step()
    zero(parameters(shapes=[(3, 3), (3,)])).load_state_dict(other.state_dict())


def _of_one_memory(one, other):
    base = torch.arange(12.0)
    return lambda: zero([nn.Parameter(torch.ones(2)), nn.Parameter(one(base)), nn.Parameter(other(base))])


def _moved():
    model = nn.Linear(3, 3)
    optimizer = zero(model.parameters())
    model.double()
    optimizer.step()


def _sparse():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = zero(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


ELSEWHERE = nn.Parameter(torch.empty(2, device="meta"))
REFUSALS = {
    "stage 3": (lambda: zero(stage=3), ValueError, "use fully_shard(module)"),
    "a tensor": (lambda: zero(torch.ones(2)), TypeError, "write [tensor]"),
    "nothing": (lambda: zero([]), ValueError, "found none"),
    "a set": (lambda: zero(set(parameters())), TypeError, "parameters in order, found a set"),
    "twice": (lambda: zero([*(params := parameters()), params[0]]), ValueError, "numbers 0 and 7 given twice"),
    "strided": (_of_one_memory(lambda b: b[1:4], lambda b: b[::3]), ValueError, "numbers 1 and 2 in the same memory"),
    "a number": (lambda: zero([*parameters(), 3]), TypeError, "dense leaf tensors, found int"),
    "two devices": (lambda: zero([*parameters(), ELSEWHERE]), ValueError, "parameters on one device, found cpu, meta"),
    "no memory": (lambda: zero(nn.LazyLinear(3).parameters()), ValueError, "with memory, found none at number 0"),
    "Adafactor": (lambda: zero(make=optim.Adafactor), ValueError, "looks at a parameter's rows and columns"),
    "LBFGS": (lambda: zero(make=optim.LBFGS), ValueError, "at once and would be wrong on parts; use AdamW"),
    "no optimizer": (lambda: zero(make=lambda parts, lr: parts), TypeError, "expected an optimizer's class"),
    "sparse gradients": (_sparse, TypeError, "found one of layout torch.sparse_coo"),
    "a norm of 0": (lambda: zero().clip_grad_norm_(1.0, 0.0), ValueError, "norm_type above 0"),
    "pickle": (lambda: pickle.dumps(zero()), TypeError, "save a ZeroOptimizer"),
    "another dict": (lambda: zero().load_state_dict({"a": 1}), ValueError, "found ['a']"),
    "a state of more": (lambda: _load_one_of(SHAPES), ValueError, "2 parameters, found one of 7"),
    "a state of other shapes": (
        lambda: _load_one_of([(3, 4), (3,)]),
        ValueError,
        "found (3, 4); load the state dict into the model",
    ),
    "a model that was moved": (_moved, RuntimeError, "call model.to(...), .half() and the like before"),
}


@refusals(REFUSALS)
def test_what_cannot_be_is_refused(call, error, words):
    with imagined_ranks(4):
        refused(call, error, words)


def test_without_a_process_group_it_is_said_what_to_do():
    refused(zero, RuntimeError, "run_ranks(fn, 4)")


@pytest.mark.parametrize("name", on_two_ranks)
def test_on_two_ranks(name):
    on_two_ranks.assert_holds(name)


@pytest.mark.parametrize("name", on_three_ranks)
def test_on_three_ranks(name):
    on_three_ranks.assert_holds(name)
