"""DataParallel beside one process and beside DDP: equal numbers, exact bytes, and nothing that hangs or stays."""

import copy
import gc
import pickle
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from memlab.book.workloads import GPT, text_batch
from memlab.data_parallelism import DataParallel, mean_over_ranks, ring_all_reduce
from memlab.data_parallelism.agreement import raise_on_all
from memlab.data_parallelism.buckets import plan_buckets
from memlab.gradient_accumulation import accumulate
from memlab.memory_timeline import Meter, imagine
from memlab.mixed_precision import LossScaler
from memlab.ranks import RankError, Traffic, imagined_ranks, run_ranks
from tests.ranks_helpers import FailsInBackward

REDUCTIONS = {"library": None, "ring": ring_all_reduce}
STEPS = 10


class Odd(nn.Module):
    """Tied, frozen and unused parameters, of two dtypes, and some of one element."""

    def __init__(self):
        super().__init__()
        self.first, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.narrow = nn.Parameter(torch.ones(6, dtype=torch.float32))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x):
        x = self.frozen(torch.tanh(self.tied(torch.tanh(self.first(x)))))
        return x * self.scale * self.narrow.double()


def odd_batch(step):
    made = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=made, dtype=torch.float64), torch.randn(12, 6, generator=made).double()


def model_of(name, seed):
    torch.manual_seed(seed)
    if name == "GPT":
        return GPT(layers=2, width=16, heads=2, context=8, vocabulary=256).double()
    model = Odd().double()
    model.narrow = nn.Parameter(model.narrow.detach().float())
    return model


def trained(name, rank, ranks, wrap=lambda model: model):
    """Parameters after ten steps of AdamW on this rank's rows, and the first step's gradients."""
    model = model_of(name, seed=rank)
    replica = wrap(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, weight_decay=0.1)
    first = None
    for step in range(STEPS):
        x, y = (text_batch(12, 8, seed=step)) if name == "GPT" else odd_batch(step)
        rows = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
        optimizer.zero_grad()
        loss = replica(x[rows], y[rows]) if name == "GPT" else mse_loss(replica(x[rows]), y[rows])
        loss.backward()
        if first is None:
            first = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, first


def wrapped(name, reduction):
    bucket_bytes = {"GPT": "16 KiB", "Odd": "700 B"}[name]
    return lambda model: DataParallel(model, bucket_bytes, REDUCTIONS[reduction], find_unused_parameters=True)


def training_facts(rank):
    ranks = distributed.get_world_size()
    found = {
        (name, how): trained(name, rank, ranks, wrapped(name, how)) for name in ("GPT", "Odd") for how in REDUCTIONS
    }
    if ranks == 2:
        for name in ("GPT", "Odd"):
            found[name, "DDP"] = trained(
                name, rank, ranks, lambda model: DistributedDataParallel(model, find_unused_parameters=True)
            )
    return found


@pytest.fixture(scope="module")
def training():
    return {world: run_ranks(training_facts, world) for world in (2, 4)}


def far(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---- numbers


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("name", ["GPT", "Odd"])
@pytest.mark.parametrize("world", [2, 4])
def test_after_ten_steps_replicas_seeded_differently_are_one_process_on_the_whole_batch(training, world, name, how):
    alone, _ = trained(name, 0, 1)
    for rank in training[world]:
        parameters, _ = rank[name, how]
        for parameter, value in alone.items():
            assert far(parameters[parameter], value) <= (1e-12 if value.dtype == torch.float64 else 1e-6), parameter
            assert torch.equal(parameters[parameter], training[world][0][name, how][0][parameter])


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("name", ["GPT", "Odd"])
def test_gradients_and_parameters_of_two_ranks_are_ddps_bitwise(training, name, how):
    for rank in training[2]:
        for ours, theirs in zip(rank[name, how], rank[name, "DDP"], strict=True):
            for parameter, value in theirs.items():
                if value is None:
                    assert ours[parameter] is None
                else:
                    assert torch.equal(ours[parameter], value), parameter


# ---- many cases, one launch


class Two(nn.Module):
    """Two layers; which of them are used is said in the call."""

    def __init__(self, width=4):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *layers):
        for layer in layers:
            x = getattr(self, layer)(x)
        return x


def two(rank, **options):
    torch.manual_seed(5)
    return DataParallel(Two().double(), "200 B", **options)


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def rows_of(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).double()


def alone_of(rank, *layers, times=1.0, seed=5):
    """The gradients of one rank's rows, without ranks."""
    torch.manual_seed(seed)
    model = Two().double()
    (times * model(rows_of(rank), *layers).square().mean()).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def unused_differently(rank, **options):
    with two(rank, **options) as model:
        used = ["left"] if rank == 0 else ["right"]
        model(rows_of(rank), *used).square().mean().backward()
        return gradients(model.module)


def locally_then_together(rank, **options):
    """Three micro-batches, of which the last uses another layer; in the second step gradients are zeroed in place."""
    with two(rank, **options) as model:
        found = []
        for step in range(2):
            model.zero_grad(set_to_none=step == 0)
            with Traffic() as quiet, model.no_sync():
                for _ in range(2):
                    model(rows_of(rank), "left").square().mean().backward()
            model(rows_of(rank), "right").square().mean().backward()
            found.append((gradients(model.module), quiet.sent_bytes))
        return found


def accumulated(rank, **options):
    """Ranks with unequal rows, rank 1 with a micro-batch of none; summed losses, divided by the mean of all numbers."""
    with two(rank, **options) as model:
        rows = rows_of(rank)
        micro_batches = [rows[:2], rows[2:]] if rank == 0 else [rows[:1], rows[:0]]
        accumulate(
            lambda x: model(x, "left", "right").square().sum(), micro_batches, model=model, agree=mean_over_ranks
        )
        return gradients(model.module)


def without_rows(rank, **options):
    with two(rank, **options) as model:
        rows = rows_of(rank)[: 3 if rank == 0 else 0]
        (model(rows, "left").square().sum() / mean_over_ranks(len(rows))).backward()
        return gradients(model.module)


def two_forwards(rank, **options):
    with two(rank, **options) as model:
        first, second = model(rows_of(rank), "left"), model(rows_of(rank), "left", "right")
        (first.square().mean() + second.square().mean()).backward()
        return gradients(model.module)


def twice(rank, **options):
    """A second backward on averaged gradients that were not zeroed."""
    with two(rank, **options) as model:
        for layer in ("left", "right"):
            model(rows_of(rank), layer, "left").square().mean().backward()
        return gradients(model.module)


def after_an_error(rank, who, *layers, **options):
    """Backward raises halfway on some ranks, once; then a step as ever."""
    with two(rank, **options) as model:
        raised = False
        hidden = model(rows_of(rank), "left")
        hidden = FailsInBackward.apply(hidden) if rank in who else hidden
        try:
            model.module.right(hidden).square().mean().backward()
        except ArithmeticError:
            raised = True
        model.zero_grad()
        model(rows_of(rank), *layers).square().mean().backward()
        return raised, gradients(model.module)


def nonfinite(rank, **options):
    """Rank 1 overflows; then its loss is infinite while its gradients are not; then all is well."""
    with two(rank, **options) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def agree(bad):
            distributed.all_reduce(bad, distributed.ReduceOp.MAX)
            return bad

        scaler, found = LossScaler(1024.0, agree=agree), []
        for trouble in ("gradient", "loss", "none"):
            model.zero_grad()
            loss = model(rows_of(rank), "left").square().mean()
            if rank == 1 and trouble == "gradient":
                loss = loss * float("inf")
            if rank == 1 and trouble == "loss":
                loss = loss + float("inf")
            scaler.scale(loss).backward()
            finite = all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            scaler.step(optimizer)
            found.append((bool(finite), scaler.skipped(optimizer)))
            scaler.update()
        return found, gradients(model.module), scaler.get_scale()


def reentrant(rank, reentrance, **options):
    """A layer used in two checkpointed segments."""
    with two(rank, **options) as model:
        x = rows_of(rank).requires_grad_()
        for layer in ("left", "right", "left"):
            x = checkpoint(model, x, layer, use_reentrant=reentrance)
        x.square().mean().backward()
        return gradients(model.module)


def frozen_meanwhile(rank, **options):
    with two(rank, **options) as model:
        model.module.never.requires_grad_(False)
        model(rows_of(rank), "left", "right").square().mean().backward()
        return gradients(model.module)


def taken_by_a_hook(rank, **options):
    """The reader's own hooks, older than the wrapper's, have set gradients to None: of `left` on one rank."""
    torch.manual_seed(5)
    model = Two().double()
    for name, p in model.named_parameters():
        if name.startswith("never") or name.startswith("left") and rank == 0:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with DataParallel(model, "200 B", **options) as replica:
        replica(rows_of(rank), "left", "right", "never").square().mean().backward()
    return gradients(model)


def group_of_one_and_two(rank, **options):
    group = distributed.new_group([1, 2])
    if rank not in (1, 2):
        try:
            DataParallel(Two(), group=group)
        except ValueError as error:
            return str(error)
    torch.manual_seed(rank)
    with DataParallel(Two().double(), group=group, **options) as model:
        model(rows_of(rank), "left", "right").square().mean().backward()
        return gradients(model.module)


CASES = {
    "unused": unused_differently,
    "no_sync": locally_then_together,
    "accumulated": accumulated,
    "without rows": without_rows,
    "two forwards": two_forwards,
    "twice": twice,
    "frozen meanwhile": frozen_meanwhile,
    "taken": taken_by_a_hook,
    "nonfinite": nonfinite,
    "all raise": lambda rank, **options: after_an_error(rank, (0, 1), "left", "right", **options),
    "one raises": lambda rank, **options: after_an_error(rank, (1,), "left", "right", **options),
    "one raises, then others": lambda rank, **options: after_an_error(rank, (1,), "left", **options),
    "reentrant": lambda rank, **options: reentrant(rank, True, **options),
    "not reentrant": lambda rank, **options: reentrant(rank, False, **options),
}


def case_facts(rank):
    found = {}
    for how, all_reduce in REDUCTIONS.items():
        for find in (False, True):
            for case, run in CASES.items():
                found[case, how, find] = run(rank, all_reduce=all_reduce, find_unused_parameters=find)
    found["refused"] = refused(rank)
    found["bytes"] = {name: bytes_of(name) for name in (*REDUCTIONS, "DDP", "DDP, views")}
    found["stays"] = what_stays()
    found["buffers"] = buffers(rank)
    return found


@pytest.fixture(scope="module")
def cases():
    return run_ranks(case_facts, 2)


every_way = pytest.mark.parametrize(("how", "find"), [(how, find) for how in REDUCTIONS for find in (False, True)])


def mean(*parts):
    return {name: sum(part[name] for part in parts) / 2 for name in parts[0]}


def close(found, expected, find, unused=("never",)):
    """Equal, to rounding; parameters that nobody used have zeros, or None where they are looked for."""
    for name, value in expected.items():
        if name.split(".")[0] in unused and find:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14, msg=name)


@every_way
def test_a_parameter_that_one_rank_did_not_use_counts_as_zero_there(cases, how, find):
    for rank in cases:
        close(rank["unused", how, find], mean(alone_of(0, "left"), alone_of(1, "right")), find)


@every_way
def test_no_sync_sends_nothing_and_the_next_backward_averages_the_whole(cases, how, find):
    expected = mean(*(alone_of(rank, "left", times=2.0) for rank in (0, 1)))
    right = mean(*(alone_of(rank, "right") for rank in (0, 1)))
    expected = {name: expected[name] + right[name] for name in expected}
    for rank in cases:
        first, second = rank["no_sync", how, find]
        close(first[0], expected, find)
        close(second[0], expected, find)
        assert first[1] == second[1] == 0


@every_way
def test_unequal_ranks_and_empty_micro_batches_give_the_gradient_of_the_mean_over_all_rows(cases, how, find):
    torch.manual_seed(5)
    model = Two().double()
    rows = torch.cat([rows_of(0), rows_of(1)[:1]])
    (model(rows, "left", "right").square().sum() / 4).backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    for rank in cases:
        close(rank["accumulated", how, find], expected, find)


@every_way
def test_a_rank_without_rows_adds_nothing(cases, how, find):
    torch.manual_seed(5)
    model = Two().double()
    (model(rows_of(0), "left").square().sum() / 3).backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    for rank in cases:
        close(rank["without rows", how, find], expected, find, unused=("right", "never"))


@every_way
def test_two_forwards_before_one_backward_and_two_backwards_on_one_another_are_averaged_once(cases, how, find):
    both = (
        mean(*(alone_of(rank, "left") for rank in (0, 1))),
        mean(*(alone_of(rank, "left", "right") for rank in (0, 1))),
    )
    after = (
        mean(*(alone_of(rank, "left", "left") for rank in (0, 1))),
        mean(*(alone_of(rank, "right", "left") for rank in (0, 1))),
    )
    for rank in cases:
        close(rank["two forwards", how, find], {n: both[0][n] + both[1][n] for n in both[0]}, find)
        close(rank["twice", how, find], {n: after[0][n] + after[1][n] for n in after[0]}, find)


@every_way
@pytest.mark.parametrize("case", ["all raise", "one raises", "one raises, then others"])
def test_after_a_backward_that_raised_halfway_the_next_step_is_right_on_all_ranks(cases, how, find, case):
    layers, unused = (("left",), ("right", "never")) if "others" in case else (("left", "right"), ("never",))
    expected = mean(*(alone_of(rank, *layers) for rank in (0, 1)))
    for number, rank in enumerate(cases):
        raised, found = rank[case, how, find]
        assert raised == (number in ((0, 1) if case == "all raise" else (1,)))
        close(found, expected, find, unused)


@every_way
def test_one_ranks_overflow_is_everybodys_and_all_skip(cases, how, find):
    expected = mean(*(alone_of(rank, "left") for rank in (0, 1)))
    for rank in cases:
        steps, found, scale = rank["nonfinite", how, find]
        assert steps == [(False, True), (True, True), (True, False)]
        assert scale == 256.0
        close(found, expected, find, unused=("right", "never"))


@every_way
@pytest.mark.parametrize("case", ["reentrant", "not reentrant"])
def test_a_layer_in_two_checkpointed_segments_is_averaged_right(cases, how, find, case):
    expected = mean(*(alone_of(rank, "left", "right", "left") for rank in (0, 1)))
    for rank in cases:
        close(rank[case, how, find], expected, find)


@every_way
def test_a_parameter_frozen_after_it_was_wrapped_gets_no_gradient(cases, how, find):
    expected = mean(*(alone_of(rank, "left", "right") for rank in (0, 1)))
    for rank in cases:
        close(rank["frozen meanwhile", how, find], expected, find=True)


@every_way
def test_a_gradient_that_a_hook_took_away_counts_as_one_that_never_came(cases, how, find):
    parts = [alone_of(rank, "left", "right", "never") for rank in range(2)]
    for name in parts[0]:
        if not name.startswith("right"):
            for part in parts[: 2 if name.startswith("never") else 1]:
                part[name] = torch.zeros_like(part[name])
    for rank in cases:
        close(rank["taken", how, find], mean(*parts), find)


def test_a_group_of_some_ranks_averages_among_them():
    found = run_ranks(group_of_one_and_two, 3)
    assert found[0].startswith("expected a group that this rank is of")
    expected = mean(*(alone_of(rank, "left", "right", seed=1) for rank in (1, 2)))  # the group's first is rank 1
    for each in found[1:]:
        close(each, expected, find=False)


# ---- what is refused


def refused(rank):
    errors = {}

    def attempt(name, make, then=lambda model: None):
        try:
            then(make())
        except (TypeError, ValueError, RuntimeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"

    attempt("shape", lambda: DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4 + rank))))
    attempt("name", lambda: DataParallel(nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)})))
    attempt("dtype", lambda: DataParallel(nn.Linear(3, 3).to(torch.float64 if rank else torch.float32)))
    attempt("frozen", lambda: DataParallel(nn.Linear(3, 3).requires_grad_(rank == 0)))
    attempt("more", lambda: DataParallel(nn.Sequential(*[nn.Linear(2, 2)] * (1 + rank))))
    attempt("buckets", lambda: DataParallel(nn.Linear(3, 3), bucket_bytes=100 + rank))
    attempt("nothing", lambda: DataParallel(nn.Linear(3, 3).requires_grad_(False)))

    def thaw(model):
        model.module[0].requires_grad_(True)
        model(torch.ones(3))

    attempt("thawed", lambda: DataParallel(nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))), thaw)

    def closed(model):
        model.close()
        model.close()
        model(torch.ones(3))

    attempt("closed", lambda: DataParallel(nn.Linear(3, 3)), closed)
    attempt(
        "sparse",
        lambda: DataParallel(nn.Embedding(4, 2, sparse=True)),
        lambda model: model(torch.tensor([1])).sum().backward(),
    )
    return errors


def test_models_that_differ_are_refused_on_all_ranks_naming_rank_and_parameter(cases):
    for rank in cases:
        errors = rank["refused"]
        assert "found 1.weight on rank 1: (5, 4) of torch.float32, trained, on rank 0: (4, 4)" in errors["shape"]
        assert "found layer0.weight on rank 1: none, on rank 0: (3, 3)" in errors["name"]
        assert "found weight on rank 1: (3, 3) of torch.float64" in errors["dtype"]
        assert "frozen, on rank 0: (3, 3) of torch.float32, trained" in errors["frozen"]
        assert "found bucket_bytes on rank 1: 101, on rank 0: 100" in errors["buckets"]
        assert "more" not in errors  # one layer, twice: tied parameters come once


def test_what_cannot_be_averaged_is_refused_with_what_to_do(cases):
    for rank in cases:
        errors = rank["refused"]
        assert "with parameters to train, found none" in errors["nothing"]
        assert "expected 0.weight frozen" in errors["thawed"] and "wrap again" in errors["thawed"]
        assert "found a closed one" in errors["closed"] and "call its .module" in errors["closed"]
        assert "TypeError: expected dense gradients, found a sparse one of (4, 2); use sparse=False" in errors["sparse"]


# ---- bytes


def bytes_of(name):
    torch.manual_seed(0)
    model = GPT(layers=2, width=48, heads=3, context=16, vocabulary=64)
    buckets = []
    if name.startswith("DDP"):
        replica = DistributedDataParallel(model, gradient_as_bucket_view=name != "DDP")
        inside = lambda state, bucket: buckets.append(bucket.buffer()) or _reduced(bucket)  # noqa: E731
        replica.register_comm_hook(None, inside)
    else:
        replica = DataParallel(model, "40 KiB", REDUCTIONS[name])
    x, y = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
    optimizer = torch.optim.AdamW(replica.parameters(), fused=True)

    def step():
        optimizer.zero_grad()
        replica(x, y).backward()

    for _ in range(2):
        buckets.clear()
        step()
        optimizer.step()
    optimizer.zero_grad()
    # DDP's buckets were there before, and no dispatch mode saw them being born: say so.
    held = list(buckets)
    with Meter(replica, optimizer, inputs=(x, y, held)) as meter, Traffic() as traffic:
        step()
        storages = [t.untyped_storage() for t in (*held, *(p.grad for p in model.parameters()))]
        in_buckets = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        optimizer.step()
    timeline = meter.timeline
    ours = isinstance(replica, DataParallel)
    return {
        "gradient": max(timeline.curves["gradient"]),
        "ends_with": timeline.curves["gradient"][-1],
        "begins_with": timeline.curves["gradient"][0],
        "peak": timeline.peak_bytes,
        "model": sum(p.nbytes for p in model.parameters()),
        "buffers": len(in_buckets),
        "gradients_end": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
        "buckets": [(b.layout.numel, b.layout.padded) for b in replica.buckets] if ours else [],
        "formula": replica.gradient_bytes if ours else 0,
        "sent": traffic.sent_bytes,
        "exact": traffic.exact,
        "messages": [(record.tensor_bytes, record.event) for record in traffic.records],
        "scratch_end": sum(e.delta for e in timeline.events if timeline.storages[e.storage].dtype.endswith("uint8")),
        "scratch": [s.nbytes for s in timeline.storages.values() if s.dtype.endswith("uint8")],
        "pieces": [b.piece_bytes for b in replica.buckets] if ours else [],
    }


def _reduced(bucket):
    distributed.all_reduce(bucket.buffer().div_(distributed.get_world_size()))
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("how", REDUCTIONS)
def test_gradients_take_their_own_bytes_and_padding_and_no_copy_exists(cases, how):
    for rank in cases:
        found = rank["bytes"][how]
        padded = sum(padded for _, padded in found["buckets"])
        assert 4 * sum(numel for numel, _ in found["buckets"]) == found["model"]
        assert found["formula"] == 4 * padded
        assert found["gradient"] == found["ends_with"] == found["formula"]
        assert found["begins_with"] == 0  # zero_grad gave them back
        assert found["buffers"] == len(found["buckets"]) > 2


@pytest.mark.parametrize("how", REDUCTIONS)
def test_a_step_sends_the_rings_bytes_and_no_byte_more(cases, how):
    for rank in cases:
        found = rank["bytes"][how]
        assert found["sent"] == 2 * found["formula"] * (2 - 1) // 2
        assert found["exact"] == (how == "ring")


def test_a_bucket_is_on_its_way_while_backward_still_makes_the_next(cases):
    for rank in cases:
        found = rank["bytes"]["library"]
        assert [nbytes for nbytes, _ in found["messages"]] == [4 * padded for _, padded in found["buckets"]]
        events = [event for _, event in found["messages"]]
        assert events == sorted(set(events))


def test_the_thread_of_a_ring_is_given_scratch_for_the_largest_piece_that_the_meter_sees(cases):
    for rank in cases:
        assert rank["bytes"]["ring"]["scratch"] == [max(rank["bytes"]["ring"]["pieces"])]
        assert rank["bytes"]["library"]["scratch"] == []
        assert rank["bytes"]["ring"]["scratch_end"] == 0


def test_an_all_reduce_of_your_own_runs_in_one_thread_and_gets_scratch_if_it_has_room_for_it():
    calls = []

    def plain(flat, group=None):
        calls.append((threading.current_thread().name, flat.numel(), None))

    def with_scratch(flat, group=None, scratch=None):
        calls.append((threading.current_thread().name, flat.numel(), (scratch.shape, scratch.dtype)))

    def failing(flat, group=None):
        raise ArithmeticError("planted")

    with imagined_ranks(2):
        for mine in (plain, with_scratch):
            with DataParallel(Two(), "80 B", mine) as model:
                model(torch.ones(1, 4), "left").sum().backward()
        with DataParallel(Two(), "80 B", failing) as model:
            with pytest.raises(ArithmeticError, match="planted"):
                model(torch.ones(1, 4), "left").sum().backward()
            model.zero_grad()
            with pytest.raises(ArithmeticError, match="planted"):
                model(torch.ones(1, 4), "left").sum().backward()
    assert {name for name, *_ in calls} == {"memlab-all-reduce_0"}
    assert [numel for _, numel, _ in calls] == [20, 20, 20] * 2
    assert [scratch for *_, scratch in calls] == [None] * 3 + [((10,), torch.float32)] * 3


@pytest.mark.parametrize("how", REDUCTIONS)
def test_the_peak_is_below_ddps_with_and_without_its_views(cases, how):
    for rank in cases:
        assert rank["bytes"][how]["peak"] < rank["bytes"]["DDP, views"]["peak"] <= rank["bytes"]["DDP"]["peak"]


def test_ddp_without_views_ends_backward_with_every_gradient_twice(cases):
    for rank in cases:
        plain, views = rank["bytes"]["DDP"], rank["bytes"]["DDP, views"]
        assert plain["gradients_end"] == 2 * plain["model"]
        assert views["gradients_end"] == views["model"]
        assert rank["bytes"]["library"]["gradients_end"] == rank["bytes"]["library"]["formula"]


def test_buckets_are_in_reverse_order_of_one_dtype_and_no_larger_than_asked():
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in SIZES]
    buckets = plan_buckets(params, 100, ranks=4)
    numbers = {id(p): number for number, p in enumerate(params)}
    assert [[numbers[id(p)] for p in bucket.params] for bucket in buckets] == [[5, 4], [3], [2], [1, 0]]
    assert [bucket.nbytes for bucket in buckets] == [4 * 24, 4 * 1000, 8 * 4, 4 * 12]


SIZES = [
    (4, torch.float32),
    (5, torch.float32),
    (3, torch.float64),
    (1000, torch.float32),
    (20, torch.float32),
    (4, torch.float32),
]


@pytest.mark.parametrize("how", REDUCTIONS)
def test_on_imagined_hardware_rank_0_of_64_holds_what_the_formula_says(how):
    with imagine("H100-80GB") as gpu, imagined_ranks(64):
        model = GPT(layers=2, width=48, heads=3, context=16, vocabulary=64)
        x, y = gpu.imagined((torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)))
        with DataParallel(model, all_reduce=REDUCTIONS[how], find_unused_parameters=True) as replica:
            with Meter(replica) as meter, Traffic() as traffic:
                replica(x, y).backward()
            held = replica.gradient_bytes
    numel = sum(p.numel() for p in model.parameters())
    assert held == max(meter.timeline.curves["gradient"]) == 4 * 64 * -(-numel // 64)
    flags = -(-2 * 63 * len(list(model.parameters())) // 64)
    assert traffic.sent_bytes == 2 * 63 * held // 64 + flags


# ---- what stays, what is saved


def what_stays():
    model = Two()
    before = threading.active_count()
    hooks = lambda: sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())  # noqa: E731
    replica = DataParallel(model, all_reduce=ring_all_reduce)
    replica(torch.ones(1, 4), "left").sum().backward()
    found = {"during": (hooks(), threading.active_count() - before)}
    gone = weakref.ref(replica)
    del replica
    gc.collect()
    found["died"] = (hooks(), threading.active_count() - before, gone() is None)
    with DataParallel(model, all_reduce=ring_all_reduce) as replica:
        replica(torch.ones(1, 4), "left").sum().backward()
    found["closed"] = (hooks(), threading.active_count() - before)
    model.zero_grad()
    model(torch.ones(1, 4), "left").sum().backward()
    found["model"] = model.left.weight.grad.sum().item()
    return found


def test_hooks_and_thread_end_with_close_and_with_the_wrapper(cases):
    for rank in cases:
        stays = rank["stays"]
        assert stays["during"] == (6, 1)
        assert stays["died"] == (0, 0, True)
        assert stays["closed"] == (0, 0)
        assert stays["model"] == 16.0


def buffers(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, dtype=torch.bfloat16))
    for name, value in (("flags", [rank == 0]), ("count", [rank]), ("wave", [complex(rank, 1)])):
        model.register_buffer(name, torch.tensor(value))
    model.register_buffer("short", torch.tensor([rank], dtype=torch.int16))
    model.register_buffer("strided", torch.arange(16)[rank::2])
    model.register_buffer("expanded", torch.tensor([rank]).expand(2, 3))
    model[1].weight.data = model[1].weight.data.t()
    replica = DataParallel(model)
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    replica.module[0](torch.full((2, 4), float(rank)))
    return {"begun": begun, "running_mean": model[0].running_mean.clone(), "keys": list(replica.state_dict())}


def test_ranks_begin_with_rank_0s_parameters_and_buffers_and_statistics_are_their_own_afterwards(cases):
    first, second = (rank["buffers"] for rank in cases)
    for name, value in first["begun"].items():
        assert torch.equal(second["begun"][name], value), name
    assert first["begun"]["flags"].item() is True and first["begun"]["wave"].item() == 1j
    assert torch.equal(first["running_mean"], torch.zeros(4))
    assert torch.equal(second["running_mean"], torch.full((4,), 0.1))
    assert first["keys"] == list(first["begun"])


def test_a_state_dict_is_the_models_own_and_loads_also_inside_another_module():
    with imagined_ranks(2):
        model = Odd()
        replica = DataParallel(model)
        whole = nn.ModuleDict({"body": replica, "head": nn.Linear(2, 2)})
        assert list(replica.state_dict()) == list(model.state_dict())
        assert [name for name in whole.state_dict() if "module" in name] == []
        saved = {name: torch.zeros_like(value) for name, value in whole.state_dict().items()}
        assert str(whole.load_state_dict(saved)) == "<All keys matched successfully>"
        assert not model.first.weight.any()
        saved = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
        assert str(replica.load_state_dict(saved)) == "<All keys matched successfully>"
        assert model.first.weight.all() and "module.first.weight" not in saved
        with pytest.raises(RuntimeError, match="Missing key"):
            replica.load_state_dict({})


def test_gradients_have_the_strides_of_dense_parameters_so_fused_optimizers_take_them():
    with imagined_ranks(2):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(torch.ones(4, 2).t())
        replica = DataParallel(model)
        replica(torch.ones(1, 3, 3, 3)).sum().backward()
        for p in model.parameters():
            assert p.grad.stride() == p.stride()
            assert p.grad.untyped_storage().data_ptr() == model[0].weight.grad.untyped_storage().data_ptr()
        torch.optim.AdamW(model.parameters(), fused=True).step()


def tied_across_a_checkpoint(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    part = DataParallel(CheckpointedFirst(model))
    part(torch.randn(2, 4, requires_grad=True)).sum().backward()


class CheckpointedFirst(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers[1](checkpoint(self.layers[0], x, use_reentrant=True))


def test_a_tied_weight_across_a_reentrant_checkpoint_is_refused_and_not_averaged_wrongly():
    with pytest.raises(RankError, match="expected one gradient of a parameter .* use_reentrant=False"):
        run_ranks(tied_across_a_checkpoint, 2)


def second_gradient(rank, change, wrap=lambda replica: replica):
    """A layer's gradient of 1 on rank 0, 2 on rank 1, after its first one was changed and zeroed."""
    model = nn.Linear(3, 2, bias=False)
    replica = DataParallel(model)
    ready = wrap(replica)
    for _ in range(2):
        gradient = model.weight.grad
        if gradient is not None:
            change(replica, gradient)
            gradient.zero_()
        ready(torch.full((1, 3), rank + 1.0, dtype=model.weight.dtype)).sum().backward()
    return model.weight.grad.tolist()


def led_elsewhere(_, gradient):
    gradient.data = gradient.data.clamp(-1, 1)


CHANGES = {"data": led_elsewhere, "in place": lambda _, g: g.clamp_(-1, 1), "dtype": lambda r, _: r.double()}


def all_changes(rank):
    found = {name: second_gradient(rank, change) for name, change in CHANGES.items()}
    compiled = partial(torch.compile, backend="eager")
    return found | {"compiled": second_gradient(rank, CHANGES["in place"], compiled)}


def test_a_gradient_that_was_led_out_of_its_bucket_and_the_compiled_models_are_averaged_all_the_same():
    for rank in run_ranks(all_changes, 2):
        assert rank == dict.fromkeys([*CHANGES, "compiled"], [[1.5] * 3] * 2)


def test_a_parameter_that_came_after_the_wrapper_is_refused_since_nobody_would_average_it():
    with imagined_ranks(2):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        replica = DataParallel(model)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        with pytest.raises(RuntimeError, match="expected 0.weight as when it was wrapped, found another parameter"):
            replica(torch.ones(2))
        with torch.no_grad():
            replica(torch.ones(2))
        replica = DataParallel(model)
        model.append(nn.Linear(2, 2).requires_grad_(False))
        replica(torch.ones(2)).sum().backward()
        model[2].requires_grad_(True)
        with pytest.raises(RuntimeError, match="expected 2.weight as when it was wrapped"):
            replica(torch.ones(2))


def test_what_does_not_fit_a_state_dict_is_said_by_the_models_own_names():
    with imagined_ranks(2):
        replica = DataParallel(nn.Linear(2, 2))
        found = replica.load_state_dict({"weight": torch.ones(2, 2), "other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["bias"] and found.unexpected_keys == ["other"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_wrapper_whose_gradients_nobody_would_average_is_refused(duplicate):
    with imagined_ranks(2), pytest.raises(TypeError, match="expected state_dict.* or a copy of its .module"):
        duplicate(DataParallel(nn.Linear(2, 2)))


class DiskError(OSError):
    """One that pickle cannot make again: its constructor wants what `args` lacks."""

    def __init__(self, path, *, code):
        super().__init__(f"{path}: code {code}")
        self.code = code


def test_a_problem_that_cannot_travel_is_raised_in_its_words_on_all_ranks():
    def told(rank):
        try:
            raise_on_all(DiskError("/x", code=5) if rank == 1 else None)
        except Exception as error:
            return str(error), isinstance(error.__cause__, DiskError)

    assert run_ranks(told, 3) == [("DiskError: /x: code 5", rank == 1) for rank in range(3)]
