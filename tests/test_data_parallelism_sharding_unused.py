"""fully_shard: a parameter that only some ranks use trains as in the single process, zeros in its gradient included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memlab.data_parallelism import full_state_dict, fully_shard
from memlab.ranks import run_ranks

RANKS = 2


class Lookup(nn.Module):
    """A linear layer, an embedding that is added where rows are asked for, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.linear, self.table, self.idle = nn.Linear(4, 6), nn.Embedding(10, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """x: (n, 4), rows: (n,) or None → a loss, ()."""
        found = self.linear(x)
        return (found if rows is None else found + self.table(rows)).square().sum()


def both(rank: int, two_units: bool):
    """The same three steps sharded, where only the last rank looks up rows, of its own piece; and in one process.

    two_units: the linear layer is a unit of its own, so on the other ranks no gradient of the outer unit ever comes.
    """
    torch.manual_seed(0)
    sharded, single = (nn.ModuleList([Lookup().double()]) for _ in range(2))
    single.load_state_dict(sharded.state_dict())
    if two_units:
        fully_shard(sharded[0].linear)
    fully_shard(sharded[0])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5) for model in (sharded, single)]
    rows = [None] * (RANKS - 1) + [torch.tensor([9, 8])]
    for _ in range(3):
        x = torch.randn(RANKS, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        sharded[0](x[rank], rows[rank]).backward()
        (sum(single[0](x[r], rows[r]) for r in range(RANKS)) / RANKS).backward()
        idle = [p.grad for p in sharded[0].idle.parameters()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return full_state_dict(sharded), single.state_dict(), idle


@pytest.fixture(scope="module", params=[False, True], ids=["one unit", "two units"])
def trained(request):
    return run_ranks(both, RANKS, request.param)


def test_where_another_rank_used_a_parameter_a_part_whose_gradient_is_zero_is_stepped_too(trained):
    found, expected, _ = trained[0]
    for name in expected:
        assert (found[name] - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_a_parameter_that_no_rank_used_still_has_no_gradient(trained):
    assert [idle for _, _, idle in trained] == [[None, None]] * RANKS
