"""DataParallel beside one process and beside DDP: equal numbers, exact bytes, and nothing that hangs or stays."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from memlab.book.workloads import GPT
from memlab.data_parallelism import DataParallel, fully_shard, mean_over_ranks
from memlab.data_parallelism.agreement import raise_on_all
from memlab.data_parallelism.buckets import plan_buckets
from memlab.gradient_accumulation import accumulate
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks
from tests.harness import nothing_left_behind, refusals, refused
from tests.ranks_helpers import Cases, FailsInBackward

on_two_ranks, on_three_ranks = Cases(2), Cases(3)


class Odd(nn.Module):
    """Tied and frozen parameters, of two dtypes, and some of one element."""

    def __init__(self):
        super().__init__()
        self.first, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()
        self.narrow = nn.Parameter(torch.ones(6))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x):
        x = self.frozen(torch.tanh(self.tied(torch.tanh(self.first(x)))))
        return x * self.scale * self.narrow.double()


def trained(rank, ranks, wrap=lambda model: model):
    """Parameters after ten steps of AdamW on this rank's rows, and the first step's gradients."""
    torch.manual_seed(rank)
    model = Odd()
    replica = wrap(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, weight_decay=0.1)
    first = None
    for step in range(10):
        x, y = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        mse_loss(replica(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
        first = first or gradients(model)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}, first


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@on_two_ranks
@on_three_ranks
def ten_steps_of_replicas_seeded_differently_are_one_process_and_ddp_bit_for_bit():
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    ours = trained(rank, ranks, lambda model: DataParallel(model, "700 B"))
    for parameter, value in trained(0, 1)[0].items():
        found = ours[0][parameter]
        distance = (found.double() - value.double()).norm() / value.double().norm()
        assert distance <= (1e-12 if value.dtype == torch.float64 else 1e-6), parameter
        every = found.new_empty(ranks, found.numel())
        distributed.all_gather(list(every), found.flatten())
        assert all(torch.equal(other, found.flatten()) for other in every)
    if ranks > 2:
        return
    theirs = trained(rank, ranks, DistributedDataParallel)
    for mine, its in zip(ours, theirs, strict=True):
        for parameter, value in its.items():
            assert mine[parameter] is None if value is None else torch.equal(mine[parameter], value), parameter


class Two(nn.Module):
    """Two layers and one that is never used; which of them are used is said in the call."""

    def __init__(self, width=4):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *layers):
        for layer in layers:
            x = getattr(self, layer)(x)
        return x


def two_layers(seed=5):
    torch.manual_seed(seed)
    return Two().double()


def rows(rank=None):
    rank = distributed.get_rank() if rank is None else rank
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).double()


def alone(loss, seed=5):
    """A loss's gradients, without ranks; zeros where there is none."""
    model = two_layers(seed)
    loss(model).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def mean(*layers, times=1.0, ranks=(0, 1), seed=5):
    """The average of gradients. layers: those that every rank uses, or a list for each rank."""
    each = layers if isinstance(layers[0], list) else [layers] * len(ranks)
    parts = [
        alone(lambda model, r=r, used=used: times * model(rows(r), *used).square().mean(), seed)
        for r, used in zip(ranks, each, strict=True)
    ]
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}


def plus(one, other):
    return {name: one[name] + other[name] for name in one}


def assert_close(model, expected):
    """Equal, to rounding; parameters that nobody used have zeros."""
    found = gradients(model.module)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14, msg=name)


def backward(model, *layers):
    model(rows(), *layers).square().mean().backward()


@on_two_ranks
def a_parameter_that_one_rank_did_not_use_counts_as_zero_there():
    with DataParallel(two_layers(), "200 B") as model:
        backward(model, "right" if distributed.get_rank() else "left")
        assert_close(model, mean(["left"], ["right"]))


@on_two_ranks
def no_sync_sends_nothing_and_the_next_backward_averages_the_whole():
    expected = plus(mean("left", times=2.0), mean("right"))
    with DataParallel(two_layers(), "200 B") as model:
        for set_to_none in (True, False):
            model.zero_grad(set_to_none)
            with Traffic() as quiet, model.no_sync():
                backward(model, "left")
                backward(model, "left")
            backward(model, "right")
            assert quiet.sent_bytes == 0
            assert_close(model, expected)


@on_two_ranks
def unequal_ranks_and_empty_micro_batches_give_the_gradient_of_the_mean_over_all_rows():
    everyone = torch.cat([rows(0), rows(1)[:1]])
    expected = alone(lambda model: model(everyone, "left", "right").square().sum() / 4)
    with DataParallel(two_layers(), "200 B") as model:
        micro_batches = [rows()[:1], rows()[:0]] if distributed.get_rank() else [rows()[:2], rows()[2:]]
        accumulate(
            lambda x: model(x, "left", "right").square().sum(), micro_batches, model=model, agree=mean_over_ranks
        )
        assert_close(model, expected)


@on_two_ranks
def two_forwards_before_one_backward_and_two_backwards_on_one_another_are_averaged_once():
    with DataParallel(two_layers(), "200 B") as model:
        (model(rows(), "left").square().mean() + model(rows(), "left", "right").square().mean()).backward()
        assert_close(model, plus(mean("left"), mean("left", "right")))
        model.zero_grad()
        backward(model, "left", "left")
        backward(model, "right", "left")
        assert_close(model, plus(mean("left", "left"), mean("right", "left")))


@on_two_ranks
def a_layer_in_two_checkpointed_segments_is_averaged_right():
    for reentrant in (True, False):
        with DataParallel(two_layers(), "200 B") as model:
            x = rows().requires_grad_()
            for layer in ("left", "right", "left"):
                x = checkpoint(model, x, layer, use_reentrant=reentrant)
            x.square().mean().backward()
            assert_close(model, mean("left", "right", "left"))


@on_two_ranks
def a_parameter_frozen_after_it_was_wrapped_gets_no_gradient():
    with DataParallel(two_layers(), "200 B") as model:
        model.module.never.requires_grad_(False)
        backward(model, "left", "right")
        assert model.module.never.weight.grad is None and model.module.left.weight.grad is not None


@on_two_ranks
def a_gradient_that_a_hook_took_away_counts_as_one_that_never_came():
    """The reader's own hooks, older than the wrapper's: of `left` on rank 0."""
    of_one = alone(lambda model: model(rows(1), "left", "right").square().mean())
    expected = {
        name: value if name.startswith("right") else of_one[name] / 2 for name, value in mean("left", "right").items()
    }
    model = two_layers()
    for p in model.left.parameters() if distributed.get_rank() == 0 else ():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with DataParallel(model, "200 B") as replica:
        backward(replica, "left", "right")
        assert_close(replica, expected)


@on_three_ranks
def a_group_of_some_ranks_averages_among_them():
    rank = distributed.get_rank()
    group = distributed.new_group([1, 2])
    if rank == 0:
        refused(lambda: DataParallel(Two(), group=group), ValueError, "expected a group that this rank is of")
        return
    with DataParallel(two_layers(seed=rank), group=group) as model:  # the group's first is rank 1
        backward(model, "left", "right")
        assert_close(model, mean("left", "right", ranks=(1, 2), seed=1))


class DiskError(OSError):
    """One that pickle cannot make again: its constructor wants what `args` lacks."""

    def __init__(self, path, *, code):
        super().__init__(f"{path}: code {code}")


@on_three_ranks
def a_problem_that_cannot_travel_is_raised_in_its_words_on_all_ranks():
    rank = distributed.get_rank()
    with pytest.raises(RuntimeError, match="DiskError: /x: code 5") as caught:
        raise_on_all(DiskError("/x", code=5) if rank == 1 else None)
    assert isinstance(caught.value.__cause__, DiskError) == (rank == 1)


def weights_of_1() -> nn.Sequential:
    """Two layers, the last in the first bucket. Of a row of `ones`, the last one's gradient is 2, on rank 1 4."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for p in model.parameters():
        nn.init.ones_(p)
    return model


def ones():
    return torch.full((1, 2), distributed.get_rank() + 1.0)


@on_two_ranks
def a_gradient_that_is_kept_through_zero_grad_stays_as_it_was():
    """One forward, and a backward for each of two losses, the second of the last layer only."""
    for nbytes in (2**20, 1):
        for quiet in (False, True):
            model = weights_of_1()
            replica = DataParallel(model, nbytes)
            hidden, output = model[0](ones()), replica(ones())
            replica._averaging.syncing = not quiet
            output[0, 0].backward(retain_graph=True)
            first = [p.grad for p in model.parameters()]
            values = [gradient.clone() for gradient in first]
            model.zero_grad()
            model[1](hidden.detach())[0, 1].backward()
            assert all(map(torch.equal, first, values))
            expected = 2.0 * (distributed.get_rank() + 1) if quiet else 3.0
            assert model[1].weight.grad.tolist() == [[0.0, 0.0], [expected] * 2]


@on_two_ranks
def a_part_of_a_model_that_is_wrapped_again_is_averaged_once_and_the_old_wrapper_says_that_it_is_closed():
    whole = DataParallel(weights_of_1())
    part = DataParallel(whole.module[1])
    part(ones()).sum().backward()
    assert part.module.weight.grad.tolist() == [[1.5] * 2] * 2
    refused(lambda: whole(ones()), RuntimeError, "found a closed one (by close(), or by a newer wrapper")
    part(ones())


@on_two_ranks
def after_a_backward_that_raised_the_next_step_is_refused_until_all_wrap_again():
    """It raises before the first gradient, or behind it."""
    for early in (True, False):
        model = weights_of_1()
        whole = nn.ModuleDict({"body": model})
        for broken in (True, False):
            fails = [FailsInBackward.apply if broken and each else torch.clone for each in (not early, early)]
            whole.forward = lambda x, fails=fails, model=model: fails[1](model[1](fails[0](model[0](x)))).sum()
            replica = DataParallel(whole, 16)
            loss = replica(ones())
            if broken:
                refused(loss.backward, ArithmeticError, "")
                refused(lambda replica=replica: replica(ones()), RuntimeError, "found that the last one raised")
                model.zero_grad()
            else:
                loss.backward()
                assert model[1].weight.grad.tolist() == [[3.0] * 2] * 2


@on_two_ranks
def the_gradients_of_inputs_on_one_rank_begin_nothing():
    model = weights_of_1()
    replica = DataParallel(model)
    if distributed.get_rank() == 1:
        x = ones().requires_grad_()
        torch.autograd.grad(replica(x).sum(), x)
    assert [p.grad for p in model.parameters()] == [None, None]
    replica(ones()).sum().backward()
    assert model[1].weight.grad.tolist() == [[3.0] * 2] * 2


@on_two_ranks
def a_gradient_that_was_led_out_of_its_bucket_and_the_compiled_models_are_averaged_all_the_same():
    def led_elsewhere(_, gradient):
        gradient.data = gradient.data.clamp(-1, 1)

    compiled = partial(torch.compile, backend="eager")
    for change, wrap in ((led_elsewhere, compiled), (lambda replica, _: replica.double(), lambda replica: replica)):
        model = nn.Linear(3, 2, bias=False)
        replica = DataParallel(model)
        ready = wrap(replica)
        for _ in range(2):
            if model.weight.grad is not None:
                change(replica, model.weight.grad)
                model.weight.grad.zero_()
            ready(torch.full((1, 3), distributed.get_rank() + 1.0, dtype=model.weight.dtype)).sum().backward()
        assert model.weight.grad.tolist() == [[1.5] * 3] * 2


@on_two_ranks
def ranks_begin_with_rank_0s_parameters_and_buffers_and_statistics_are_their_own_afterwards():
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, dtype=torch.bfloat16))
    for name, value in (("flags", [rank == 0]), ("count", [rank]), ("wave", [complex(rank, 1)])):
        model.register_buffer(name, torch.tensor(value))
    model.register_buffer("short", torch.tensor([rank], dtype=torch.int16))
    model.register_buffer("strided", torch.arange(16)[rank::2])
    model.register_buffer("expanded", torch.tensor([rank]).expand(2, 3))
    model[1].weight.data = model[1].weight.data.t()
    replica = DataParallel(model)
    begun, every = {name: value.clone() for name, value in model.state_dict().items()}, [None, None]
    distributed.all_gather_object(every, begun)
    assert all(torch.equal(value, every[1][name]) for name, value in every[0].items())
    assert (
        begun["flags"].item() is True
        and begun["wave"].item() == 1j
        and list(replica.module.state_dict()) == list(begun)
    )
    replica.module[0](torch.full((2, 4), float(rank)))
    assert torch.equal(model[0].running_mean, torch.full((4,), 0.1 * rank))


def test_buckets_are_in_reverse_order_of_one_dtype_and_no_larger_than_asked():
    sizes = [4, 5, 3, 1000, 20, 4]
    params = [nn.Parameter(torch.zeros(n, dtype=torch.float64 if n == 3 else torch.float32)) for n in sizes]
    buckets = plan_buckets(params, 100, ranks=4)
    numbers = {id(p): number for number, p in enumerate(params)}
    assert [[numbers[id(p)] for p in bucket.params] for bucket in buckets] == [[5, 4], [3], [2], [1, 0]]
    assert [bucket.nbytes for bucket in buckets] == [4 * 24, 4 * 1000, 8 * 4, 4 * 12]


def test_rank_0_of_64_holds_and_sends_its_gradients_and_their_padding():
    with imagine("H100-80GB") as gpu, imagined_ranks(64):
        model = GPT(layers=2, width=48, heads=3, context=16, vocabulary=64)
        x, y = gpu.imagined((torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)))
        replica = DataParallel(model, "40 KiB")
        for _ in range(2):
            with Meter(replica) as meter, Traffic() as traffic:
                replica(x, y).backward()
            model.zero_grad()
    timeline, padded = meter.timeline, [4 * bucket.layout.padded for bucket in replica.buckets]
    assert sum(bucket.layout.numel for bucket in replica.buckets) == sum(p.numel() for p in model.parameters())
    curve = timeline.curves["gradient"]
    assert curve[0] == 0  # zero_grad gave them back
    assert len(padded) > 2 and max(curve) == curve[-1] == sum(padded)
    assert traffic.sent_bytes == 2 * 63 * sum(padded) // 64
    events = [record.event for record in traffic.records]  # a bucket is on its way while backward makes the next
    assert [record.tensor_bytes for record in traffic.records] == padded and events == sorted(set(events))


def test_hooks_end_with_close_and_with_the_wrapper():
    model = Two()
    with imagined_ranks(2):
        for end in ("close", "die"):
            with nothing_left_behind(model):
                replica = DataParallel(model)
                replica(torch.ones(1, 4), "left").sum().backward()
                assert sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()) == 6
                gone = weakref.ref(replica)
                if end == "close":
                    replica.close()
                    replica.close()
                    refused(partial(replica, torch.ones(1, 4)), RuntimeError, "found a closed one…call its .module")
                del replica
                gc.collect()
                assert gone() is None
    model.zero_grad()
    model(torch.ones(1, 4), "left").sum().backward()
    assert model.left.weight.grad.sum().item() == 16.0


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


def test_after_zero_grad_evaluation_gives_the_buckets_back_and_without_it_keeps_the_gradients():
    with imagined_ranks(2):
        model = weights_of_1()
        replica = DataParallel(model)
        replica(torch.ones(1, 2)).sum().backward()
        with torch.inference_mode():
            replica(torch.ones(1, 2))
            assert all(p.grad is not None for p in model.parameters()) and replica.buckets[0].flat is not None
            model.zero_grad()
            replica(torch.ones(1, 2))
        assert replica.buckets[0].flat is None
        replica(torch.ones(1, 2)).sum().backward()


@on_two_ranks
def models_that_differ_are_refused_on_all_ranks_naming_rank_and_parameter():
    rank = distributed.get_rank()
    frozen = "frozen, on rank 0: (3, 3) of torch.float32, trained"
    for make, words in (
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4 + rank)), "found 1.weight on rank 1: (5, 4) of torch"),
        (lambda: nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3)}), "layer0.weight on rank 1: none, on rank 0: (3, 3)"),
        (lambda: nn.ModuleDict({name: nn.Linear(3, 3) for name in ("ab", "ba")[rank]}), "rank 1's…in another order"),
        (lambda: nn.Linear(3, 3).requires_grad_(rank == 0), frozen),
    ):
        refused(lambda make=make: DataParallel(make()), ValueError, words)
    words = "bucket_bytes on rank 1: 101, on rank 0: 100"
    refused(lambda: DataParallel(nn.Linear(3, 3), 100 + rank), ValueError, words)
    DataParallel(nn.Sequential(*[nn.Linear(2, 2)] * (1 + rank)))  # one layer, twice: tied parameters come once


@on_two_ranks
def a_tied_weight_across_a_reentrant_checkpoint_is_refused_and_not_averaged_wrongly():
    class CheckpointedFirst(nn.Sequential):
        def forward(self, x):
            return self[1](checkpoint(self[0], x, use_reentrant=True))

    model = CheckpointedFirst(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    replica = DataParallel(model)
    loss = replica(torch.randn(2, 4, requires_grad=True)).sum()
    refused(loss.backward, RuntimeError, "expected one gradient of a parameter…use_reentrant=False")


def _sparse():
    replica = DataParallel(nn.Embedding(4, 2, sparse=True))
    replica(torch.tensor([1])).sum().backward()


def _with_buffer(value):
    model = nn.Linear(2, 2)
    model.register_buffer("table", value)
    return lambda: DataParallel(model)


NOWHERE = "with memory, found none at {}; initialise it first".format


@refusals(
    {
        "frozen": (lambda: DataParallel(nn.Linear(3, 3).requires_grad_(False)), ValueError, "to train, found none"),
        "sparse gradients": (_sparse, TypeError, "dense gradients, found a sparse one of (4, 2); use sparse=False"),
        "lazy": (lambda: DataParallel(nn.LazyLinear(3)), ValueError, NOWHERE("weight")),
        "a lazy one to shard": (lambda: fully_shard(nn.LazyLinear(3)), ValueError, NOWHERE("weight")),
        "a buffer without memory": (_with_buffer(torch.empty(3, device="meta")), ValueError, NOWHERE("table")),
        "a sparse buffer": (_with_buffer(torch.eye(3).to_sparse()), TypeError, "torch.sparse_coo and shape…to_dense"),
        "a copy": (lambda: copy.deepcopy(DataParallel(Two())), TypeError, "expected its .module…to save or copy"),
    }
)
def test_what_cannot_be_averaged_is_refused_with_what_to_do(call, error, words):
    with imagined_ranks(2):
        refused(call, error, words)


def test_a_parameter_that_came_after_the_wrapper_or_was_thawed_is_refused_since_nobody_would_average_it():
    with imagined_ranks(2):
        model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
        replica = DataParallel(model)
        model.append(nn.Linear(2, 2).requires_grad_(False))
        replica(torch.ones(2)).sum().backward()
        model[2].requires_grad_(True)
        words = "expected 2.weight as when it was wrapped, found another parameter"
        refused(lambda: replica(torch.ones(2)), RuntimeError, words)
        with torch.no_grad():
            replica(torch.ones(2))
        model[0].requires_grad_(True)
        refused(lambda: replica(torch.ones(2)), RuntimeError, "expected 0.weight frozen…close() this, and wrap again")


def test_a_gradient_with_a_graph_is_refused_since_an_average_has_none():
    with imagined_ranks(2):
        replica = DataParallel(nn.Linear(2, 1, bias=False))
        loss = replica(torch.ones(3, 2)).square().sum()
        words = "a graph…(1, 2)…torch.autograd.grad(..., create_graph=True)"
        refused(lambda: loss.backward(create_graph=True), RuntimeError, words)


@pytest.mark.parametrize("name", on_two_ranks)
def test_on_two_ranks(name):
    on_two_ranks.assert_holds(name)


@pytest.mark.parametrize("name", on_three_ranks)
def test_on_three_ranks(name):
    on_three_ranks.assert_holds(name)
