"""What chapter 13's formulas say a rank holds and sends, against the meter, on imagined ranks: to the byte."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from memlab.book.steps import build, checkpoint_blocks
from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard, rank_bytes, rank_step, traffic_bytes
from memlab.data_parallelism.arithmetic import padded_elements, unit_sizes
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks

RANKS, BATCH = 7, 8
SHAPE = Transformer(layers=6, width=128, heads=4, vocabulary=256, context=64)
CARD = "H100-80GB"


def storages(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@functools.lru_cache(maxsize=16)
def metered(stage, rank=0, segments=None):
    """A model's second step on one of seven imagined ranks: what is held, the timeline, and what is sent."""
    with imagine(CARD), imagined_ranks(RANKS, rank):
        model = build(SHAPE)
        if segments:
            checkpoint_blocks(model, segments)
        x, y = (torch.zeros(BATCH, 64, dtype=torch.long) for _ in "xy")
        if stage == 3:
            for outer in model.blocks:
                for block in outer.blocks if segments else [outer]:
                    fully_shard(block)
            fully_shard(model)
        wrapped = DataParallel(model) if stage == 0 else model
        if stage in (1, 2):
            optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, stage=stage, fused=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        parts = [p for group in optimizer.param_groups for p in group["params"]]
        for _ in range(2):
            with Meter(model, optimizer, inputs=(x, y)) as meter, Traffic() as traffic:
                wrapped(x, y).backward()
                owners = list(model.parameters()) if stage == 1 else parts
                gradients = storages([p.grad for p in owners if p.grad is not None])
                optimizer.step()
                optimizer.zero_grad()
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        held = storages(model.parameters()), gradients, storages(states)
    return held, meter.timeline.on(f"imagined {CARD}"), traffic


def buckets_of(stage):
    units, root = unit_sizes(SHAPE)
    return [*units, root] if stage == 3 else [[size for unit in (*units, root) for size in unit]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_holds_and_sends_what_the_formulas_say(stage):
    for rank in (0, RANKS - 1):
        assert metered(stage, rank)[0] == rank_bytes(buckets_of(stage), RANKS, stage, rank=rank, counter_bytes=4)
    whole = 4 * padded_elements(buckets_of(stage), RANKS)
    root = 4 * padded_elements([unit_sizes(SHAPE)[1]], RANKS)
    sent = metered(stage)[2].by_name()
    assert sum(sent.values()) == traffic_bytes(whole, whole, RANKS, stage, kept_bytes=root if stage == 3 else 0)


def test_a_ranks_peak_is_the_formulas_to_the_byte_at_stage_3_and_nearly_so_at_stages_1_and_2():
    step = training_step(SHAPE, BATCH, 64, implementation="fused")
    assert rank_step(step, RANKS, 3).nbytes == metered(3)[1].peak_bytes
    apart = rank_step(step, RANKS, 1).nbytes - metered(1)[1].peak_bytes  # the formula's buckets are the units
    assert 0 <= apart <= 4 * RANKS * (SHAPE.layers + 1)
    assert rank_step(step, RANKS, 2).nbytes == pytest.approx(metered(2)[1].peak_bytes, rel=0.01)
    # with every block checkpointed backward is fullest at its beginning
    step = training_step(SHAPE, BATCH, 64, implementation="fused", segments=SHAPE.layers)
    assert rank_step(step, RANKS, 3).nbytes == metered(3, segments=SHAPE.layers)[1].peak_bytes


def test_a_root_that_returns_what_its_last_unit_does_gathers_nothing_a_third_time():
    with imagined_ranks(64):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 2, bias=False))
        for layer in (*model, model):
            fully_shard(layer)
        with Traffic() as traffic:
            model(torch.ones(1, 8)).sum().backward()
    whole = 4 * padded_elements([*[[64, 8]] * 4, [16]], 64)
    assert traffic.sent_bytes == traffic_bytes(whole, whole, 64, stage=3)


@pytest.mark.parametrize("looked", [False, True], ids=["alone", "after a look without gradients"])
def test_a_unit_that_is_used_several_times_has_its_gradients_reduced_once(looked):
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "again": nn.Linear(8, 8)})

    def forward(x):
        x = model["first"](x)
        with torch.no_grad():
            if looked:
                model["again"](x)
        for _ in range(4):
            x = model["again"](x).tanh()
        return x

    model.forward = forward
    with imagined_ranks(64):
        fully_shard(model["again"])
        fully_shard(model)
        model(torch.ones(1, 8)).sum().backward()
        with Traffic() as traffic:
            model(torch.ones(1, 8)).sum().backward()
    reduced = [record for record in traffic.records if record.name == "reduce_scatter"]
    assert len(reduced) == 2  # of this unit and of the root
