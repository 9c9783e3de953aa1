"""Other people's data parallelism on two real ranks: equal weights, and where their bytes are."""

import os
import threading

import pytest
import torch
from torch import distributed

from memlab.book.frameworks import deepspeed_ranks, has_deepspeed
from memlab.book.parallel_frameworks import MAKERS, train_on_rank, ways_to_train
from memlab.book.workloads import GPT, text_batch
from memlab.data_parallelism import rank_bytes
from memlab.data_parallelism.arithmetic import unit_sizes
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import Meter
from memlab.ranks import run_ranks

RANKS, STEPS, LR = 2, 3, 1e-3
SIZES = {"layers": 2, "width": 64, "heads": 2, "context": 32}
SHAPE = Transformer(**SIZES, vocabulary=256)
WHOLE = 4 * SHAPE.parameters
COUNTERS = 4 * SHAPE.parameter_tensors
DEEPSPEED = [name for name in MAKERS if name.startswith("DeepSpeed")]

needs_deepspeed = pytest.mark.skipif(not has_deepspeed(), reason="DeepSpeed is not installed (memlab[frameworks])")


def build():
    torch.manual_seed(0)
    return GPT(**SIZES)


def part_of(rank, step):
    share = 4 // RANKS
    return tuple(tensor[rank * share : (rank + 1) * share] for tensor in text_batch(4, 32, seed=step))


def compare(rank):
    """Everything once on a rank, and what is left behind."""
    batches = [part_of(rank, step) for step in range(STEPS)]
    found = {"DDP": train_on_rank("DDP", build, batches, LR)}  # PyTorch's first optimizer sets a variable of its own
    environment, threads = dict(os.environ), threading.active_count()
    found |= {name: train_on_rank(name, build, batches, LR) for name in ways_to_train() if name != "DDP"}
    same = dict(os.environ) == environment, threading.active_count() - threads, distributed.is_initialized()
    return found, same


@pytest.fixture(scope="module")
def trained():
    return run_ranks(compare, RANKS)


def one_device():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*text_batch(4, 32, seed=step)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_every_framework_ends_with_the_same_weights_bit_for_bit_on_both_ranks(trained):
    expected = trained[0][0]["DDP"].weights
    assert expected.shape == (SHAPE.parameters,)
    for found, _ in trained:
        for name, result in found.items():
            assert torch.equal(result.weights, expected), name


def test_they_are_one_devices_weights_up_to_the_order_of_sums(trained):
    weights, expected = trained[0][0]["DDP"].weights, one_device()
    assert not torch.equal(weights, expected)
    # Adam divides by √v, so a gradient near zero is a step of full size either way: the norm, not the element, is held.
    assert (weights - expected).norm() <= 1e-4 * expected.norm()


def test_held_bytes_are_the_stages(trained):
    units, root = unit_sizes(SHAPE)  # all of whose first dimensions two divides: nothing is padded
    pieces = rank_bytes([*units, root], RANKS, 3, counter_bytes=4)
    for found, _ in trained:
        assert found["DDP"].held == (WHOLE, WHOLE, 2 * WHOLE + COUNTERS)
        assert WHOLE < found["DDP"].other_bytes < 1.02 * WHOLE  # the buckets, and the batches
        redundant = found["ZeroRedundancyOptimizer"]
        assert redundant.held[:2] == (WHOLE, WHOLE)
        assert redundant.other_bytes < 0.02 * WHOLE  # gradients are views of the buckets
        assert found["FSDP2"].held == pieces
    both = [found["ZeroRedundancyOptimizer"] for found, _ in trained]  # has whole parameters' states on one rank each
    assert sum(one.held.optimizer_states for one in both) == 2 * WHOLE + COUNTERS


@needs_deepspeed
def test_deepspeed_has_a_master_copy_even_in_fp32_and_divides_gradients_from_stage_1_on(trained):
    for found, _ in trained:
        one, two, three = (found[name].held for name in DEEPSPEED)
        assert one == two and one.parameters == WHOLE and three.parameters == WHOLE // RANKS
        states = 12 * SHAPE.parameters // RANKS
        assert states < one.optimizer_states < states + 2 * COUNTERS
        assert three.gradients == WHOLE // RANKS <= one.gradients < 0.65 * WHOLE


@needs_deepspeed
def test_after_deepspeed_the_ranks_environment_threads_and_group_are_as_before(trained):
    assert [same for _, same in trained] == [(True, 0, True)] * RANKS


def test_without_a_process_group_it_is_said():
    with pytest.raises(RuntimeError, match="expected a process group, found none"):
        train_on_rank("DDP", build, [part_of(0, 0)])
    if has_deepspeed():
        with pytest.raises(RuntimeError, match="expected a process group, found none"), deepspeed_ranks():
            pass


def test_the_meter_sees_into_the_nested_lists_of_all_gather():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with Meter() as meter:
            mine, pieces = torch.ones(1000), [torch.empty(1000)]  # with a name: gloo's thread may let go of it later
            distributed.all_gather(pieces, mine)
        assert meter.timeline.totals[-1] == 4000 + 4000 and bool(pieces[0].all())
    finally:
        distributed.destroy_process_group()
