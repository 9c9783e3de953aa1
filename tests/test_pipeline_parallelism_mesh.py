"""Data x tensor x pipeline: ten steps on four and eight ranks are those of one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from memlab.book.workloads import GPT, name_in_layers
from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard
from memlab.data_parallelism import full_state_dict as whole_of_shards
from memlab.pipeline_parallelism import (
    Pipeline,
    clip_grad_norm_,
    full_state_dict,
    gpipe,
    gpt_layers,
    gpt_loss,
    interleaved,
    one_forward_one_backward,
    plan_pipeline,
)
from memlab.ranks import mesh, run_ranks

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH, STEPS = 4, 16, 4, 8, 32, 8, 10
SIZES = (LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY)
TIED = [("0.token_embedding.weight", f"{LAYERS + 1}.head.weight")]
ADAM = {"lr": 1e-2, "eps": 1e-6}  # a key's bias has no gradient but rounding, which a small eps would make a step of
CLIP = 0.5
UNTIED = {"ZeRO 1", "ZeRO 2"}
LAST_STAGES = {"GPipe": 1, "1F1B": 1, "data x tensor": 4, "2 x 2 x 2": 4}  # how many ranks have one, if not 2


def text(step: int) -> Tensor:
    """(BATCH, CONTEXT + 1)"""
    return torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def plain(tied: bool, clip: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The book's GPT in one process, parameters under a pipeline's names, losses, norms."""
    torch.manual_seed(0)
    model = GPT(layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT, vocabulary=VOCABULARY)
    if tied:
        model.head.weight = model.token_embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(text(step)[:, :-1], text(step)[:, 1:])
        loss.backward()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name_in_layers(name, LAYERS): p for name, p in model.state_dict().items()}, losses, norms


def sharded(stage, group):
    """Both tables as units of their own, so that the tied copies are cut alike."""
    for name, module in stage.named_modules():
        if name.endswith(("token_embedding", "head")):
            fully_shard(module, group=group)
    return fully_shard(stage, group=group)


def trained(axes, schedule, *, kind="replicas", tied=True, sequence_parallel=False):
    """Ten steps on this rank of a mesh: the whole state dict (on one rank), losses and norms."""
    data, tensor = axes.get_group("data"), axes.get_group("tensor")
    split = {"group": tensor if tensor.size() > 1 else None}
    layers = gpt_layers(*SIZES, sequence_parallel=sequence_parallel, **split)
    rows = BATCH // data.size()
    mine = slice(data.rank() * rows, (data.rank() + 1) * rows)
    plan = plan_pipeline(layers, schedule, text(0)[mine, :-1], tied=TIED if tied else [])
    torch.manual_seed(0)
    wraps = {"replicas": functools.partial(DataParallel, group=data), "shards": functools.partial(sharded, group=data)}
    wrap = wraps.get(kind) if data.size() > 1 else None
    loss_fn = functools.partial(gpt_loss, **split)
    pipeline = Pipeline(plan, loss_fn, group=axes.get_group("pipeline"), wrap=wrap)
    if kind.startswith("zero"):
        make = functools.partial(ZeroOptimizer, optimizer_class=torch.optim.AdamW, stage=int(kind[-1]), group=data)
    else:
        make = torch.optim.AdamW
    optimizer = make(pipeline.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        loss = pipeline.step(text(step)[mine, :-1], text(step)[mine, 1:])
        if tied and not kind.startswith("zero"):
            shards = data if kind == "shards" else None
            norms.append(clip_grad_norm_(pipeline, CLIP, tensor_group=split["group"], shard_group=shards).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else loss.item())
    if kind == "shards":
        state = {name: t for stage in pipeline.modules.values() for name, t in whole_of_shards(stage).items()}
    else:
        state = full_state_dict(pipeline, split["group"])
    copies = [tie.copies[0].detach() for tie in pipeline.tied.ties] if kind != "shards" else []
    return state, losses, norms, copies


def on_four(rank):
    by = {
        "4 stages": mesh(data=1, pipeline=4, tensor=1),
        "data x pipeline": mesh(data=2, pipeline=2, tensor=1),
        "pipeline x tensor": mesh(data=1, pipeline=2, tensor=2),
        "data x tensor": mesh(data=2, pipeline=1, tensor=2),
    }
    two = one_forward_one_backward(2, 2)
    return {
        "GPipe": trained(by["4 stages"], gpipe(4, 4)),
        "1F1B": trained(by["4 stages"], one_forward_one_backward(4, 4)),
        "data x pipeline": trained(by["data x pipeline"], two),
        "data x pipeline, interleaved": trained(by["data x pipeline"], interleaved(2, 2, 2)),
        "pipeline x tensor": trained(by["pipeline x tensor"], two),
        "pipeline x tensor, sequence parallel": trained(by["pipeline x tensor"], two, sequence_parallel=True),
        "data x tensor": trained(by["data x tensor"], gpipe(1, 2)),
        "ZeRO 1": trained(by["data x pipeline"], two, kind="zero1", tied=False),
        "ZeRO 2": trained(by["data x pipeline"], two, kind="zero2", tied=False),
        "ZeRO 1, tied": trained(by["data x pipeline"], two, kind="zero1"),
        "ZeRO 3": trained(by["data x pipeline"], two, kind="shards"),
    }


def on_eight(rank):
    axes = mesh(data=2, pipeline=2, tensor=2)
    return {"2 x 2 x 2": trained(axes, one_forward_one_backward(2, 2), sequence_parallel=True)}


@pytest.fixture(scope="module")
def runs():
    """By name: of each rank (state, losses, norms, copies)."""
    with torch.random.fork_rng():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            reference = {
                "clipped": plain(tied=True, clip=True),
                "tied": plain(tied=True, clip=False),
                "untied": plain(tied=False, clip=False),
            }
        finally:
            torch.set_default_dtype(before)
    four, eight = run_ranks(in_double, 4, on_four), run_ranks(in_double, 8, on_eight)
    named = {name: [each[name] for each in found] for found in (four, eight) for name in found[0]}
    return reference, named


def in_double(rank, function):
    torch.set_default_dtype(torch.float64)
    return function(rank)


def expected_of(runs, name: str) -> tuple:
    reference, _ = runs
    return reference["untied" if name in UNTIED else "tied" if name == "ZeRO 1, tied" else "clipped"]


def far(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_ten_steps_on_every_mesh_are_those_of_one_process(runs):
    for name, ranks in runs[1].items():
        state, *_ = expected_of(runs, name)
        whole = {key: p for found, *_ in ranks for key, p in found.items()}
        assert whole.keys() == state.keys(), name
        worst = max(far(whole[key], p) for key, p in state.items())
        assert worst <= 1e-12, (name, worst)


def test_the_last_stages_have_the_losses_of_their_share_of_the_batch_and_others_none(runs):
    for name, ranks in runs[1].items():
        _, expected, _ = expected_of(runs, name)
        told = [losses for _, losses, *_ in ranks if losses[0] is not None]
        assert len(told) == LAST_STAGES.get(name, 2), name
        assert torch.tensor(told, dtype=torch.float64).mean(0).tolist() == pytest.approx(expected, rel=1e-12), name


def test_the_norm_of_all_stages_is_one_processs_on_every_rank_and_a_tied_table_counts_once(runs):
    for name, ranks in runs[1].items():
        _, _, expected = expected_of(runs, name)
        assert max(expected, default=1) > CLIP
        for _, _, norms, _ in ranks:
            assert norms == pytest.approx([] if name.startswith("ZeRO") and name != "ZeRO 3" else expected, rel=1e-12)


def test_tied_copies_are_equal_to_the_bit_after_ten_steps(runs):
    for name, ranks in runs[1].items():
        tensors = 2 if "tensor" in name or name == "2 x 2 x 2" else 1
        for tensor in range(tensors):
            copies = [copy for _, _, _, found in ranks[tensor::tensors] for copy in found]
            assert all(torch.equal(copies[0], copy) for copy in copies), name
        assert bool(copies) == (name not in {*UNTIED, "ZeRO 3", "data x tensor"}), name


def test_a_full_state_is_on_the_first_rank_of_the_pipeline_and_of_the_tensor_group_and_nowhere_else(runs):
    holders = {name: [rank for rank, (state, *_) in enumerate(ranks) if state] for name, ranks in runs[1].items()}
    assert holders["1F1B"] == holders["pipeline x tensor"] == [0]
    assert holders["data x pipeline"] == [0, 2] and holders["2 x 2 x 2"] == [0, 4]
