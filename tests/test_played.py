"""Ranks and orders that exercises' checks play: they do what real ranks and closed forms do; what is wrong is told."""

import pytest
import torch
from torch import distributed
from torch.distributed import ReduceOp

from memlab.book.checks.answers import Wrong
from memlab.book.checks.pipeline_parallelism.orders import complete, in_flight, played, words
from memlab.book.checks.tensor_parallelism.played import Regions, play
from memlab.pipeline_parallelism import Action, gpipe, one_forward_one_backward
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


def computed(schedule):
    return [[a for a in actions if a.kind in ("forward", "backward")] for actions in schedule.actions]


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 8), (4, 2), (1, 3)])
def test_a_step_takes_as_many_turns_as_micro_batches_and_bubble(make, stages, micro_batches):
    assert played(computed(make(stages, micro_batches)), "") == 3 * (micro_batches + stages - 1)


def test_orders_that_wait_for_each_other_are_told():
    first = [Action(kind, 0, i) for kind, i in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))]
    last = [Action(kind, 1, i) for kind, i in (("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1))]
    assert played([first, last], "") == 11  # B0 is back long before its turn
    with pytest.raises(Wrong, match="together they stop. There wait rank 0 with B0 of stage 0, rank 1 with F1"):
        played([first[:1] + first[3:] + first[1:3], [last[2], *last[:2], last[3]]], "")


def test_a_text_is_read_word_by_word():
    turns = words("F0 F1\nB0  B1", "")
    assert turns == [("F", 0), ("F", 1), ("B", 0), ("B", 1)] and in_flight(turns) == 2
    complete(turns, 2, "")
    for text in ("F0B0", "F-1", "f0", "F0,", ""):
        with pytest.raises(Wrong):
            complete(words(text, ""), 1, "")
