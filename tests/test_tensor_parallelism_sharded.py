"""A split model whose parts data ranks hold: norms over both groups, and what one group alone cannot say."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import clip_grad_norm_ as plain_clip

from memlab import data_parallelism as data_parallel
from memlab import tensor_parallelism as tensor_parallel
from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard
from memlab.ranks import ALONE, mesh, run_ranks
from memlab.tensor_parallelism import ColumnParallelLinear, TensorParallelGPT, cut_of, split_layers
from tests.tensor_parallelism_helpers import raised

MOST = 0.1
AdamW = torch.optim.AdamW


def gpt(group) -> TensorParallelGPT:
    """Keys and values are of one head, which all tensor ranks share."""
    torch.manual_seed(0)
    return TensorParallelGPT(2, 16, 4, 8, 32, kv_heads=1, group=group, dtype=torch.float64)


def text() -> torch.Tensor:
    return torch.arange(36).view(4, 9) * 5 % 32


def sharded(model: TensorParallelGPT, group) -> TensorParallelGPT:
    for block in model.blocks:
        fully_shard(block, group=group)
    return fully_shard(model, group=group)


def on_ranks(rank: int) -> dict:
    axes = mesh(data=2, tensor=2)
    data, tensor = axes.get_group("data"), axes.get_group("tensor")
    mine = text().chunk(2)[data.rank()]
    x, y = mine[:, :-1], mine[:, 1:]
    clip, found = tensor_parallel.clip_grad_norm_, {}

    model = sharded(gpt(tensor), data)
    optimizer = AdamW(model.parameters())
    model(x, y).backward()
    found["shards"] = clip(model, MOST, group=tensor, shard_group=data)
    found["shards again"] = clip(model, MOST, group=tensor, shard_group=data)
    optimizer.step()
    found["by its parts"] = raised(lambda: clip(model, MOST, group=tensor))
    found["by its shards"] = raised(lambda: data_parallel.clip_grad_norm_(model, MOST))
    found["state of shards"] = raised(lambda: tensor_parallel.full_state_dict(model, tensor))
    found["optimizer of shards"] = raised(lambda: tensor_parallel.full_optimizer_state(optimizer, tensor))
    plan = {"head": ColumnParallelLinear}
    found["split late"] = raised(
        lambda: split_layers(fully_shard(torch.nn.ModuleDict({"head": torch.nn.Linear(8, 8)})), plan)
    )

    model = gpt(tensor)
    replica = DataParallel(model, group=data)
    replica(x, y).backward()
    found["replicas"] = clip(model, MOST, group=tensor, shard_group=data)
    found["gradients"] = {name: (p.grad, cut_of(p)) for name, p in model.named_parameters()}

    optimizer = ZeroOptimizer(gpt(tensor).parameters(), AdamW, group=data)
    found["optimizer of ZeRO"] = raised(lambda: tensor_parallel.full_optimizer_state(optimizer, tensor))

    found["other parts"] = [
        raised(lambda: DataParallel(gpt(tensor))),
        raised(lambda: ZeroOptimizer(gpt(tensor).parameters(), AdamW)),
        raised(lambda: fully_shard(gpt(tensor))),
    ]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_ranks, 4)


def test_a_norm_is_one_processs_whether_data_ranks_have_cut_the_parts_or_hold_the_same(ranks):
    plain = gpt(ALONE)
    plain(text()[:, :-1], text()[:, 1:]).backward()
    norm = plain_clip(plain.parameters(), MOST)
    for rank in ranks:
        assert torch.allclose(rank["shards"], norm) and torch.allclose(rank["replicas"], norm)
        assert torch.allclose(rank["shards again"], torch.tensor(MOST, dtype=torch.float64), rtol=1e-4)
        for name, p in plain.named_parameters():
            gradient, cut = rank["gradients"][name]
            assert torch.allclose(gradient, p.grad if cut is None else cut.part_of(p.grad))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("by its parts", "ValueError: expected the group that fully_shard cut the parameters over, found none"),
        ("by its shards", "ValueError: expected parameters that no tensor ranks have split, found a part"),
        ("state of shards", "ValueError: expected parts as they were split, found token_embedding.weight as a piece"),
        ("optimizer of shards", "ValueError: expected parts as they were split, found a parameter as a piece"),
        ("optimizer of ZeRO", "ValueError: expected an optimizer over the parts of a split model, found a ZeroOpt"),
        ("split late", "ValueError: expected a whole weight at head, found a piece"),
    ],
)
def test_what_one_group_alone_cannot_say_is_refused_on_every_rank(ranks, what, words):
    assert all(rank[what].startswith(words) for rank in ranks)


def test_ranks_with_other_parts_are_no_replicas_of_each_other(ranks):
    for number, rank in enumerate(ranks):
        own, other = number % 2, 1 - number % 2
        words = f"of a split model, found part {own} of 2 on rank {number} and part {other} of 2 on rank {other}; give"
        assert all(words in said for said in rank["other parts"])
