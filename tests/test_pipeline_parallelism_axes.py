"""Bytes and traffic of data x tensor x pipeline, in closed form, against ranks of the mesh that are metered."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from memlab import pipeline_parallelism as pp
from memlab.data_parallelism import DataParallel
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import imagine
from memlab.pipeline_parallelism.axes import AXES
from memlab.ranks import Traffic, imagined_ranks, mesh, mesh_groups
from tests.tiers import some

SHAPE = Transformer(layers=4, width=32, heads=4, vocabulary=34, context=12)
BATCH, TOKENS, MICRO_BATCHES = 8, 12, 2
CARD = "H100-80GB"
MESHES = [(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
SCHEDULES = {"1F1B": pp.one_forward_one_backward, "GPipe": pp.gpipe}


def one_rank_of(data, tensor, pipeline, rank, *, hardware="cpu", precision="fp32", schedule="1F1B", tied=(), **options):
    """Stage, static and saved bytes, and what was sent along each axis, of a rank that trains."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with imagine(CARD) if hardware == "gpu" else nullcontext(), imagined_ranks(data * tensor * pipeline, rank):
        m = mesh(device="cpu", data=data, pipeline=pipeline, tensor=tensor)
        group = m.get_group("tensor")
        sizes = (SHAPE.layers, SHAPE.width, SHAPE.heads, SHAPE.context, SHAPE.vocabulary)
        layers = pp.gpt_layers(*sizes, group=group, dtype=dtype, **options)
        x, y = (torch.zeros(BATCH // data, TOKENS, dtype=torch.int64) for _ in "xy")
        plan = pp.plan_pipeline(layers, SCHEDULES[schedule](pipeline, MICRO_BATCHES), x, tied=tied)
        loss_fn = functools.partial(pp.gpt_loss, group=group)
        wrap = (lambda stage: DataParallel(stage, group=m.get_group("data"))) if data > 1 else None
        adam = functools.partial(torch.optim.AdamW, foreach=True)
        stage = m.get_local_rank("pipeline")
        cost = pp.measure_stages(plan, x, y, loss_fn, optimizer=adam, wrap=wrap, repeats=1)[stage]
        pipe = pp.Pipeline(plan, loss_fn, group=m.get_group("pipeline"), wrap=wrap)
        pipe.step(x, y)
        with Traffic() as traffic:
            pipe.step(x, y)
    return stage, cost, traffic.by_name()


def by_axis(sent):
    """Bytes by axis, of a mesh in which no more than one of data and tensor is longer than 1."""
    return sent.get("send", 0), sum(nbytes for name, nbytes in sent.items() if name not in ("send", "receive"))


def agree(data, tensor, pipeline, *, shape=SHAPE, **options):
    sizes = {"data": data, "tensor": tensor, "pipeline": pipeline, "micro_batches": MICRO_BATCHES}
    counters = 4 if options.get("hardware", "cpu") == "cpu" else 0  # of Adam, which lie in main memory
    given = {"hardware": "cpu", "precision": "fp32"} | options
    shares = pp.stage_shares(shape, BATCH, TOKENS, counter_bytes=counters, **sizes, **given)
    tied = [("0.token_embedding.weight", f"{shape.layers + 1}.head.weight")] if shape.tied else ()
    for rank in range(tensor - 1, tensor * pipeline, tensor):  # of each stage one; data ranks do the same
        stage, cost, sent = one_rank_of(data, tensor, pipeline, rank, tied=tied, **options)
        share = shares[stage]
        assert cost.static_bytes == share.parameters + share.gradients + share.optimizer_states
        assert share.in_flight * cost.saved_bytes == share.saved
        assert by_axis(sent) == (share.sent["pipeline"], share.sent["data"] + share.sent["tensor"])


@some("data,tensor,pipeline", MESHES, keep=4)
def test_what_is_counted_is_what_a_rank_of_the_mesh_holds_and_sends(data, tensor, pipeline):
    agree(data, tensor, pipeline)


@pytest.mark.parametrize(
    "options",
    [
        {"hardware": "gpu", "precision": "bf16"},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "keep_gathered": True, "hardware": "gpu", "precision": "bf16"},
        {"schedule": "GPipe"},
    ],
    ids=str,
)
def test_so_it_is_on_an_imagined_card_in_16_bits_and_with_sequence_parallelism(options):
    agree(1, 2, 2, **options)


@some("data,tensor,pipeline", [(1, 1, 1), (1, 1, 2), (1, 2, 3), (2, 1, 2), (2, 2, 1)], keep=3)
def test_so_it_is_of_a_tied_model_whose_table_is_on_the_first_stage_and_the_last(data, tensor, pipeline):
    agree(data, tensor, pipeline, shape=replace(SHAPE, tied=True))


def test_stages_may_be_cut_unevenly_and_one_may_have_more_layers_than_all_others():
    uneven = pp.stage_shares(SHAPE, BATCH, TOKENS, pipeline=2, parts=[range(5), range(5, 6)], precision="fp32")
    assert uneven[1].parameters == 4 * (SHAPE.vocabulary * SHAPE.width + 2 * SHAPE.width)
    assert sum(share.parameters for share in uneven) == 4 * SHAPE.parameters


def test_every_way_writes_the_number_of_ranks_and_pipelines_do_not_divide_activations():
    found = pp.ways(8, SHAPE, BATCH, TOKENS)
    assert {(w.data, w.tensor, w.pipeline) for w in found} == {
        (d, t, p) for d in (1, 2, 4, 8) for t in (1, 2) for p in (1, 2, 4) if d * t * p == 8
    }
    assert {w.bubble for w in found if w.pipeline == 1} == {0}
    for way in found:
        sizes = {"data": way.data, "tensor": way.tensor, "pipeline": way.pipeline, "micro_batches": way.micro_batches}
        shares = pp.stage_shares(SHAPE, BATCH, TOKENS, **sizes)
        assert way.sent == {axis: max(share.sent[axis] for share in shares) for axis in AXES}
        assert way.nbytes == max(share.nbytes for share in shares)
    one, four = (pp.stage_shares(SHAPE, BATCH, TOKENS, pipeline=p, micro_batches=8)[0] for p in (1, 3))
    assert four.in_flight == 3 and four.saved > one.saved / 2  # a third of the layers, three times


def test_a_micro_batch_has_as_many_texts_as_were_said_or_the_way_is_none():
    for batch, at_once in itertools.product((7, 8, 10, 12), (1, 2, 3, 4)):
        found = pp.ways(4, SHAPE, batch, TOKENS, texts_at_once=at_once)
        assert all(way.data * way.micro_batches * at_once == batch for way in found)
        assert {way.data for way in found} == {data for data in (1, 2, 4) if batch % (data * at_once) == 0}


@some("node", [1, 2, 3, 4, 5, 8, 12], keep=3)
def test_an_axis_is_fast_exactly_if_none_of_its_groups_has_ranks_in_two_nodes(node):
    shape = Transformer(layers=4, width=48, heads=6, vocabulary=36, context=12)
    for way in pp.ways(12, shape, 12, TOKENS):
        for order in itertools.permutations(AXES):
            seconds = pp.axis_seconds(way, order, node, inside=4.0, between=1.0)
            for axis, groups in mesh_groups({axis: getattr(way, axis) for axis in order}).items():
                crosses = any(rank // node != group[0] // node for group in groups for rank in group)
                assert seconds[axis] == way.sent[axis] / (1.0 if crosses else 4.0), (way, order, axis)
