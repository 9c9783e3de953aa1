"""All-reduce by hand: its sums, its bytes on the wire and in memory."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from memlab.data_parallelism import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from memlab.memory_timeline import Meter
from memlab.ranks import Traffic, one_rank
from tests.harness import refused
from tests.ranks_helpers import Cases, checks

KINDS = [
    ((241,), torch.float32),
    ((3,), torch.float64),  # fewer than four ranks have pieces of
    ((), torch.float32),
    ((2, 0, 3), torch.float32),
    ((50,), torch.bfloat16),
    ((13,), torch.int64),
    ((9,), torch.complex64),
]
on_two_ranks, on_four_ranks = Cases(2), Cases(4)


def case(fn):
    return on_two_ranks(on_four_ranks(fn))


def brought(rank: int, number: int) -> torch.Tensor:
    """What a rank brings to the sum."""
    shape, dtype = KINDS[number]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64)
    return (values * 100).to(dtype)


@case
def the_sum_is_right_and_bitwise_the_same_on_all_ranks_and_each_sends_two_pieces_for_each_other_one():
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for number, (shape, dtype) in enumerate(KINDS):
        tensor, library = brought(rank, number), brought(rank, number)
        with Traffic() as traffic:
            assert ring_all_reduce(tensor) is tensor
        piece = -(-torch.Size(shape).numel() // ranks)
        assert traffic.exact and traffic.sent_bytes == 2 * (ranks - 1) * piece * dtype.itemsize
        every = [None] * ranks
        distributed.all_gather_object(every, tensor)
        assert all(torch.equal(other, tensor) for other in every) and tensor.dtype == dtype
        wide = torch.complex128 if dtype.is_complex else torch.float64
        parts = [brought(other, number).to(wide) for other in range(ranks)]
        if dtype.is_floating_point or dtype.is_complex:
            # one rounding for each addition
            bound = (ranks - 1) * torch.finfo(dtype).eps * sum(part.abs() for part in parts)
            assert ((tensor.to(wide) - sum(parts)).abs() <= bound).all()
        else:
            assert torch.equal(tensor, sum(parts).to(dtype))
        distributed.all_reduce(library)
        assert ranks != 2 or torch.equal(tensor, library)


@case
def memory_for_one_piece_is_all_it_takes_and_a_padded_copy_where_ranks_do_not_divide():
    ranks = distributed.get_world_size()
    whole, odd = torch.ones(12 * ranks), torch.ones(12 * ranks + 1)
    piece = 12 * 4 if ranks > 1 else 0
    for call, tensor, nbytes in (
        (ring_reduce_scatter, whole, piece),
        (ring_all_gather, whole, 0),
        (ring_all_reduce, whole, piece),
        (ring_all_reduce, odd, 0 if ranks == 1 else (13 * ranks + 13) * 4),
    ):
        with Meter(inputs=tensor) as meter:
            call(tensor)
        assert meter.timeline.peak_bytes - tensor.nbytes == nbytes


@case
def a_view_of_columns_and_a_leaf_are_summed_in_place():
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    table = torch.full((3, 4), 1.0 + rank)
    ring_all_reduce(table.t()[1:3])
    expected = torch.full((3, 4), 1.0 + rank)
    expected[:, 1:3] = ranks * (ranks + 1) / 2
    assert torch.equal(table, expected)
    leaf = torch.ones(5, requires_grad=True)
    assert torch.equal(ring_all_reduce(leaf).detach(), torch.full((5,), float(ranks)))


@case
def a_group_of_some_ranks_sums_among_them_and_refuses_the_others():
    if distributed.get_world_size() < 4:
        return
    group, mine = distributed.new_group([3, 1]), torch.tensor([10.0 ** distributed.get_rank()] * 3)
    if distributed.get_rank() in (1, 3):
        assert ring_all_reduce(mine, group).tolist() == [1010.0] * 3
    else:
        refused(lambda: ring_all_reduce(mine, group), ValueError, "expected a group that this rank is of")


@case
def what_does_not_divide_or_is_not_flat_is_refused():
    ranks = distributed.get_world_size()
    if ranks == 1:
        return
    for flat, words in (
        (torch.ones(3 * ranks + 1), f"divisible by {ranks} ranks"),
        (torch.ones(2 * ranks)[::2], f"divisible by {ranks} ranks…not contiguous"),
    ):
        refused(lambda flat=flat: ring_reduce_scatter(flat), ValueError, words)


@pytest.mark.parametrize("name", on_two_ranks)
def test_on_ranks(name):
    with one_rank("cpu"):
        assert checks(0, {name: on_two_ranks[name]}) == {name: [None]}
    on_two_ranks.assert_holds(name)
    on_four_ranks.assert_holds(name)
