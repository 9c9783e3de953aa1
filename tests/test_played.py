"""Ranks played in one process: what they find and send is what real ones do, and those that differ are told."""

import pytest
import torch
from torch import distributed
from torch.distributed import ReduceOp

from memlab.book.checks.answers import Wrong
from memlab.book.checks.tensor_parallelism.played import Regions, play
from memlab.ranks import Traffic, all_gather, reduce_scatter, run_ranks
from memlab.tensor_parallelism import regions

RANKS = 2
FUNCTIONS = ("copy_to_ranks", "reduce_from_ranks", "gather_sequence", "reduce_scatter_sequence")


def own(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def through(functions, rank):
    """Outputs and gradients of each region's function, one rank's."""
    found = []
    for name in FUNCTIONS:
        x = own(rank).requires_grad_()
        y = getattr(functions, name)(x)
        (y * own(9 + rank).sum()).sum().backward()
        found += [y.detach(), x.grad]
    return found


def collectives(rank, gather, scatter, reduce):
    """What each collective delivers to a rank."""
    total, largest = own(rank), own(rank)
    reduce(total)
    reduce(largest, ReduceOp.MAX)
    return [total, largest, gather(own(rank)), scatter(own(rank))]


def _real(rank):
    def gather(x):
        whole = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
        all_gather(whole, x)
        return whole

    def scatter(x):
        rows = x.new_empty(x.shape[0] // RANKS, *x.shape[1:])
        reduce_scatter(rows, x)
        return rows

    with Traffic() as traffic:
        found = through(regions, rank) + collectives(rank, gather, scatter, distributed.all_reduce)
    return found, traffic.sent_bytes


def _played(wire):
    found = through(Regions(wire), wire.rank)
    found += collectives(wire.rank, wire.all_gather, wire.reduce_scatter, wire.all_reduce)
    return found, wire.sent_bytes


def test_played_ranks_find_and_send_what_real_ones_do():
    for (mine, sent_bytes), (due, due_bytes) in zip(play(_played, RANKS), run_ranks(_real, RANKS), strict=True):
        assert len(mine) == len(due) and all(torch.equal(x, y) for x, y in zip(mine, due, strict=True))
        assert sent_bytes == due_bytes > 0


def test_a_rank_alone_needs_nobody_and_sends_nothing():
    ((found, sent_bytes),) = play(_played, 1)
    assert sent_bytes == 0 and all(torch.equal(x, own(0)) for x in found[0:8:2] + found[8:])


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (lambda wire: wire.rank == 1 or wire.all_reduce(own(0)), "rank 0 waits in all_reduce for ever, since rank 1"),
        (lambda wire: wire.all_reduce(own(0)[: 2 + wire.rank]), "rank 0 brings .2, 3. .* rank 1 .3, 3."),
        (lambda wire: (wire.all_gather if wire.rank else wire.reduce_scatter)(own(0)), "different collectives"),
        (lambda wire: [wire.all_reduce(own(0)) for _ in range(99)], "more than 12 collectives"),
        (lambda wire: torch.set_grad_enabled(False), "autograd switched off"),
    ],
)
def test_ranks_that_do_not_go_alike_are_told(calls, said):
    with torch.enable_grad(), pytest.raises(Wrong, match=said):
        play(calls, RANKS)


def test_what_is_wrong_on_one_rank_is_told_though_others_wait_in_backward():
    def run(wire):
        x = own(wire.rank).requires_grad_()
        y = Regions(wire).copy_to_ranks(x)
        if wire.rank == 1:
            raise Wrong("its output is wrong")
        y.sum().backward()

    with pytest.raises(Wrong, match="its output is wrong"):
        play(run, RANKS)
