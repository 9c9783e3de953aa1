"""A split model whose parts data ranks hold: a norm over tensor ranks, and what one group alone cannot say."""

from __future__ import annotations

import pytest
import torch

from memlab import data_parallelism as data_parallel
from memlab import tensor_parallelism as tensor_parallel
from memlab.data_parallelism import DataParallel, ZeroOptimizer, fully_shard
from memlab.ranks import ALONE, mesh, run_ranks
from memlab.tensor_parallelism import TensorParallelGPT, cut_of
from tests.tensor_parallelism_helpers import raised

MOST = 0.1
AdamW = torch.optim.AdamW
TEXT = torch.arange(36).view(4, 9) * 5 % 32


def gpt(group) -> TensorParallelGPT:
    """Keys and values are of one head, which all tensor ranks share."""
    torch.manual_seed(0)
    return TensorParallelGPT(2, 16, 4, 8, 32, kv_heads=1, group=group, dtype=torch.float64)


def on_ranks(rank: int) -> dict:
    axes = mesh(data=2, tensor=2)
    data, tensor = axes.get_group("data"), axes.get_group("tensor")
    mine = TEXT.chunk(2)[data.rank()]
    x, y = mine[:, :-1], mine[:, 1:]
    clip, found, said = tensor_parallel.clip_grad_norm_, {}, {}

    model = gpt(tensor)
    for block in model.blocks:
        fully_shard(block, group=data)
    fully_shard(model, group=data)
    model(x, y).backward()
    replica = gpt(tensor)
    wrapped = DataParallel(replica, group=data)
    wrapped(x, y).backward()
    found["norms"] = [clip(replica, MOST, group=tensor) for _ in range(2)]
    found["gradients"] = {name: (p.grad, cut_of(p)) for name, p in replica.named_parameters()}

    zero = ZeroOptimizer(gpt(tensor).parameters(), AdamW, group=data)
    for words, call in {
        "parameters that no data ranks have cut, found one": lambda: clip(model, MOST, group=tensor),
        "that no tensor ranks have split, found a part": lambda: data_parallel.clip_grad_norm_(model, MOST),
        "as they were split, found token_embed": lambda: tensor_parallel.full_state_dict(model, tensor),
        "over the parts of a split model, found a ZeroOpt": lambda: tensor_parallel.full_optimizer_state(zero, tensor),
    }.items():
        said[words] = raised(call)
    place = f"of a split model, found part {rank % 2} of 2 on rank {rank} and part {1 - rank % 2} of 2 on rank"
    for wrap in (DataParallel, fully_shard, lambda model: ZeroOptimizer(model.parameters(), AdamW)):
        found.setdefault("other parts", []).append(place in raised(lambda: wrap(gpt(tensor))))  # noqa: B023
    return found | {"said": said}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(on_ranks, 4)


def test_a_norm_is_one_processs_where_data_ranks_hold_the_same(ranks):
    plain = gpt(ALONE)
    plain(TEXT[:, :-1], TEXT[:, 1:]).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), MOST)
    for rank in ranks:
        first, again = rank["norms"]
        assert torch.allclose(first, norm)
        assert torch.allclose(again, torch.tensor(MOST, dtype=torch.float64), rtol=1e-4)
        for name, p in plain.named_parameters():
            gradient, cut = rank["gradients"][name]
            assert torch.allclose(gradient, p.grad if cut is None else cut.part_of(p.grad))


def test_what_one_group_alone_cannot_say_is_refused_on_every_rank(ranks):
    for rank in ranks:
        assert all("ValueError: expected" in told and words in told for words, told in rank["said"].items())


def test_ranks_with_other_parts_are_no_replicas_of_each_other(ranks):
    assert all(rank["other parts"] == [True] * 3 for rank in ranks)
