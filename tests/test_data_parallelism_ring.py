"""All-reduce by hand: its schedule played through as data, its sums, its bytes on the wire and in memory."""

import pytest
import torch
from torch import distributed

from memlab.data_parallelism import (
    all_gather_moves,
    reduce_scatter_moves,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks, run_ranks

KINDS = [
    ((240,), torch.float32),
    ((241,), torch.float32),
    ((7, 5), torch.float64),
    ((3,), torch.float64),  # fewer than four ranks have pieces of
    ((1,), torch.float32),
    ((), torch.float32),
    ((0,), torch.float32),
    ((2, 0, 3), torch.float32),
    ((50,), torch.bfloat16),
    ((50,), torch.float16),
    ((13,), torch.int64),
    ((13,), torch.int32),
    ((9,), torch.complex64),
]
WORLDS = (1, 2, 3, 4)


def brought(rank: int, number: int) -> torch.Tensor:
    """What a rank brings to the sum."""
    shape, dtype = KINDS[number]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64)
    return (values * 100).to(dtype)


def one_sum(rank, number):
    tensor, library = brought(rank, number), brought(rank, number)
    with Traffic() as traffic:
        same = ring_all_reduce(tensor) is tensor
    distributed.all_reduce(library)
    return {"sum": tensor, "library": library, "sent": traffic.sent_bytes, "exact": traffic.exact, "same": same}


def peaks(rank):
    """Bytes at the peak beyond those that were there, by what was called."""
    ranks, found = distributed.get_world_size(), {}
    whole, odd = torch.ones(12 * ranks), torch.ones(12 * ranks + 1)
    scratch = torch.empty(12)
    for name, call, tensor in (
        ("reduce_scatter", ring_reduce_scatter, whole),
        ("all_gather", ring_all_gather, whole),
        ("all_reduce", ring_all_reduce, whole),
        ("all_reduce, odd", ring_all_reduce, odd),
        ("all_reduce, scratch", lambda t: ring_all_reduce(t, scratch=scratch), whole),
    ):
        with Meter(inputs=(tensor, scratch)) as meter:
            call(tensor)
        found[name] = meter.timeline.peak_bytes - tensor.nbytes - scratch.nbytes
    return found


def halves(rank):
    ranks = distributed.get_world_size()
    flat = torch.arange(3 * ranks, dtype=torch.float64) + 100 * rank
    with Traffic() as traffic:
        piece = ring_reduce_scatter(flat)
    own = piece.clone()
    inside = piece.data_ptr() == flat[3 * rank :].data_ptr()
    gathered = ring_all_gather(flat).clone()
    return {"own": own, "inside": inside, "gathered": gathered, "sent": traffic.sent_bytes}


def odd_callers(rank):
    """Views, leaves, groups and what is refused."""
    ranks, found = distributed.get_world_size(), {}
    table = torch.full((3, 4), 1.0 + rank)
    ring_all_reduce(table.t()[1:3])
    found["columns"] = table
    leaf = torch.ones(5, requires_grad=True)
    found["leaf"] = ring_all_reduce(leaf).detach()
    errors = []
    for flat in (torch.ones(3 * ranks + 1), torch.ones(ranks, ranks), torch.ones(2 * ranks)[::2]):
        try:
            ring_reduce_scatter(flat)
        except ValueError as error:
            errors.append(str(error))
    found["errors"] = errors
    unfit = []
    for scratch in (torch.empty(2, dtype=torch.int32), torch.empty(1), torch.empty(3), torch.empty(2, 1)):
        try:
            ring_all_reduce(torch.ones(2 * ranks - 1), scratch=scratch)
        except ValueError as error:
            unfit.append(str(error))
    found["unfit"] = unfit
    if ranks == 4:
        group = distributed.new_group([3, 1])
        mine = torch.tensor([10.0**rank] * 3)
        try:
            found["group"] = ring_all_reduce(mine, group)
        except ValueError as error:
            found["group"] = str(error)
    return found


def all_facts(rank):
    torch.set_num_threads(1)
    return {
        "sums": [one_sum(rank, number) for number in range(len(KINDS))],
        "peaks": peaks(rank),
        "halves": halves(rank),
        "odd": odd_callers(rank),
    }


@pytest.fixture(scope="module")
def facts():
    return {world: run_ranks(all_facts, world) for world in WORLDS}


# ---- the schedule, as data


@pytest.mark.parametrize("ranks", range(1, 9))
def test_what_a_rank_sends_is_what_its_right_neighbour_receives(ranks):
    for moves in (reduce_scatter_moves, all_gather_moves):
        played = [moves(rank, ranks) for rank in range(ranks)]
        assert all(len(mine) == ranks - 1 for mine in played)
        for rank in range(ranks):
            right = played[(rank + 1) % ranks]
            assert [move.send for move in played[rank]] == [move.receive for move in right]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_after_the_first_half_each_rank_has_every_ranks_part_of_its_own_piece_once(ranks):
    held = [[[rank] for _ in range(ranks)] for rank in range(ranks)]  # whose parts are in each piece
    for step in range(ranks - 1):
        moves = [reduce_scatter_moves(rank, ranks)[step] for rank in range(ranks)]
        sent = [list(held[rank][moves[rank].send]) for rank in range(ranks)]
        for rank in range(ranks):
            held[rank][moves[rank].receive] += sent[rank - 1]
    for rank in range(ranks):
        assert sorted(held[rank][rank]) == list(range(ranks))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_after_the_second_half_each_rank_has_every_piece_from_its_owner(ranks):
    held = [{rank} for rank in range(ranks)]
    for step in range(ranks - 1):
        moves = [all_gather_moves(rank, ranks)[step] for rank in range(ranks)]
        assert all(moves[rank].send in held[rank] for rank in range(ranks))
        for rank in range(ranks):
            held[rank].add(moves[rank].receive)
    assert held == [set(range(ranks))] * ranks


# ---- the sums


@pytest.mark.parametrize("number", range(len(KINDS)), ids=[f"{shape} {dtype}" for shape, dtype in KINDS])
@pytest.mark.parametrize("world", WORLDS)
def test_the_sum_is_right_and_bitwise_the_same_on_all_ranks(facts, world, number):
    found = [rank["sums"][number] for rank in facts[world]]
    parts = [brought(rank, number) for rank in range(world)]
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact, scale = sum(p.to(wide) for p in parts), sum(p.to(wide).abs() for p in parts)
    for each in found:
        assert each["same"]
        assert torch.equal(each["sum"], found[0]["sum"]) and each["sum"].dtype == dtype
    if dtype.is_floating_point or dtype.is_complex:
        bound = (world - 1) * torch.finfo(dtype).eps * scale  # one rounding for each addition
        assert ((found[0]["sum"].to(wide) - exact).abs() <= bound).all()
    else:
        assert torch.equal(found[0]["sum"], exact.to(dtype))


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_between_two_ranks_it_is_the_librarys_own_sum_bitwise(facts, number):
    for rank in facts[2]:
        assert torch.equal(rank["sums"][number]["sum"], rank["sums"][number]["library"])


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_leaves_a_ranks_own_piece_in_place_and_all_gather_brings_the_rest(facts, world):
    whole = sum(torch.arange(3 * world, dtype=torch.float64) + 100 * rank for rank in range(world))
    for rank, found in enumerate(each["halves"] for each in facts[world]):
        assert found["inside"]
        assert torch.equal(found["own"], whole[3 * rank : 3 * rank + 3])
        assert torch.equal(found["gathered"], whole)


# ---- bytes


@pytest.mark.parametrize("number", range(len(KINDS)))
@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_sends_two_pieces_for_each_other_rank_and_no_byte_more(facts, world, number):
    shape, dtype = KINDS[number]
    piece_bytes = -(-torch.Size(shape).numel() // world) * dtype.itemsize
    for rank in facts[world]:
        assert rank["sums"][number]["exact"]
        assert rank["sums"][number]["sent"] == 2 * (world - 1) * piece_bytes


@pytest.mark.parametrize("world", WORLDS)
def test_a_half_sends_half(facts, world):
    assert all(rank["halves"]["sent"] == (world - 1) * 3 * 8 for rank in facts[world])


@pytest.mark.parametrize("world", WORLDS)
def test_memory_for_one_piece_is_all_it_takes_and_a_padded_copy_where_ranks_do_not_divide(facts, world):
    piece = 12 * 4 if world > 1 else 0
    odd = 0 if world == 1 else (13 * world + 13) * 4
    for rank in facts[world]:
        assert rank["peaks"] == {
            "reduce_scatter": piece,
            "all_gather": 0,
            "all_reduce": piece,
            "all_reduce, odd": odd,
            "all_reduce, scratch": 0,
        }


# ---- who may call, and with what


@pytest.mark.parametrize("world", WORLDS)
def test_a_view_of_columns_and_a_leaf_are_summed_in_place(facts, world):
    total = world * (world + 1) / 2
    for rank, found in enumerate(each["odd"] for each in facts[world]):
        expected = torch.full((3, 4), 1.0 + rank)
        expected[:, 1:3] = total
        assert torch.equal(found["columns"], expected)
        assert torch.equal(found["leaf"], torch.full((5,), float(world)))


def test_a_group_of_some_ranks_sums_among_them_and_refuses_the_others(facts):
    found = [rank["odd"]["group"] for rank in facts[4]]
    assert torch.equal(found[1], torch.tensor([1010.0] * 3)) and torch.equal(found[3], found[1])
    assert found[0].startswith("expected a group that this rank is of, found one that rank 0 is not of")


@pytest.mark.parametrize("world", WORLDS[1:])
def test_what_does_not_divide_or_is_not_flat_is_refused_with_what_to_do(facts, world):
    for rank in facts[world]:
        assert len(rank["odd"]["errors"]) == 3
        assert all(f"divisible by {world} ranks" in error for error in rank["odd"]["errors"])
        assert "not contiguous" in rank["odd"]["errors"][2]


@pytest.mark.parametrize("world", WORLDS[1:])
def test_scratch_of_another_shape_or_dtype_than_a_piece_is_refused(facts, world):
    for rank in facts[world]:
        dtype, *shapes = rank["odd"]["unfit"]
        assert "expected scratch for a piece, (2,) of torch.float32, found (2,) of torch.int32" in dtype
        for shape, said in zip(("(1,)", "(3,)", "(2, 1)"), shapes, strict=True):
            assert f"found {shape} of torch.float32; leave it out" in said


def test_on_imagined_hardware_and_ranks_bytes_are_the_same_formula():
    with imagine("H100-80GB"), imagined_ranks(64), Traffic() as traffic:
        ring_all_reduce(torch.ones(1000))
    assert traffic.sent_bytes == 2 * 63 * 16 * 4
