"""What ranks send: counted where it is sent by hand, by the algorithm's formula where a library sends it."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from memlab.memory_timeline import Meter, imagine
from memlab.ranks import (
    Message,
    Traffic,
    all_gather,
    exchange,
    imagined_ranks,
    one_rank,
    reduce_scatter,
    ring_bytes,
    run_ranks,
    send,
    talk,
)
from tests.harness import refusals, refused

RANKS = 4


@pytest.mark.parametrize("ranks_first", [False, True])
def test_fsdp_on_imagined_ranks_of_imagined_hardware_holds_one_64th(ranks_first):
    hardware, ranks = imagine("H100-80GB"), imagined_ranks(64)
    with ranks if ranks_first else hardware as first, hardware if ranks_first else ranks as second:
        mesh = first if ranks_first else second
        model = fully_shard(torch.nn.Linear(1024, 1024, bias=False), mesh=mesh)
        with Meter(model) as meter, Traffic() as traffic:
            model(torch.empty(2, 1024)).sum().backward()
    piece = 4 * 1024 * 1024 // 64
    assert meter.timeline.bytes_by_category(0)["parameter"] == piece
    assert traffic.by_name() == {"all_gather": 63 * piece, "reduce_scatter": 63 * piece}


def test_a_record_names_the_moment_at_which_the_collective_began():
    with imagined_ranks(8), Meter(torch.nn.Linear(10, 10)) as meter, Traffic() as traffic:
        kept = [torch.zeros(2)]
        distributed.all_reduce(kept[0])
        kept += [torch.zeros(4), torch.zeros(8)]
        distributed.all_reduce(kept[2])
    assert [meter.timeline.totals[record.event] for record in traffic.records] == [440 + 8, 440 + 8 + 16 + 32]


def formula(call, rank=1, ranks=RANKS) -> list[Message]:
    with imagined_ranks(ranks, rank), Traffic() as traffic:
        call()
    return traffic.records


N = 4 * 40  # bytes of forty elements
X, PIECES = torch.ones(40), [torch.ones(10)] * RANKS


def uneven_rows():
    distributed.all_to_all_single(torch.empty(12, 2), X.view(20, 2), [3, 4, 5, 0], [5, 10, 5, 0])


@pytest.mark.parametrize(
    ("call", "name", "whole", "sent", "received"),
    [
        (lambda: distributed.all_reduce(X), "all_reduce", N, 240, 240),
        (lambda: all_gather(X, X[:10]), "all_gather", N, 120, 120),
        (lambda: distributed.all_gather(PIECES, X[:10]), "all_gather", N, 120, 120),
        (lambda: reduce_scatter(X[:10], X), "reduce_scatter", N, 120, 120),
        (lambda: distributed.reduce_scatter(X[:10], PIECES), "reduce_scatter", N, 120, 120),
        (lambda: distributed.broadcast(X, 0), "broadcast", N, N, N),
        (lambda: distributed.broadcast(X, 1), "broadcast", N, N, 0),
        (lambda: distributed.broadcast(X, 2), "broadcast", N, 0, N),  # the last of the chain is the one before the root
        (lambda: distributed.reduce(X, 1), "reduce", N, 0, N),
        (lambda: distributed.reduce(X, 0), "reduce", N, N, 0),
        (lambda: distributed.reduce(X, 3), "reduce", N, N, N),
        (lambda: distributed.scatter(X[:10], PIECES, src=1), "scatter", N, 120, 0),
        (lambda: distributed.scatter(X[:10], None, src=0), "scatter", N, 0, 40),
        (lambda: distributed.gather(X[:10], PIECES, dst=1), "gather", N, 0, 120),
        (lambda: distributed.gather(X[:10], None, dst=0), "gather", N, 40, 0),
        (lambda: distributed.all_to_all_single(torch.empty(40), X), "all_to_all", N, 120, 120),
        (uneven_rows, "all_to_all", N, 8 * 10, 8 * 8),
    ],
)
def test_a_librarys_collective_is_counted_by_its_algorithms_formula(call, name, whole, sent, received):
    assert formula(call) == [Message(name, whole, sent, received, RANKS, exact=False)]


def test_alone_nothing_is_sent():
    with one_rank("cpu"), Traffic() as traffic:
        distributed.all_reduce(X)
        distributed.broadcast(X, 0)
        all_gather(X, X)
    assert [record.sent_bytes for record in traffic.records] == [0, 0, 0]


@refusals(
    {
        "a barrier": (lambda: ring_bytes("barrier", 1, 2), ValueError, "expected one of all_reduce, …found 'barrier'"),
        "no ranks": (lambda: ring_bytes("all_reduce", 1, 0), ValueError, "expected at least one rank, found 0"),
        "below 0": (lambda: ring_bytes("all_reduce", -12, 2), ValueError, "expected tensor_bytes as a whole number"),
    }
)
def test_what_no_ring_sends_is_refused(call, error, words):
    refused(call, error, words)


def test_what_dtensor_says_is_counted_and_a_barrier_is_no_traffic():
    with imagined_ranks(RANKS):
        mesh = distributed.init_device_mesh("cpu", (RANKS,))
        with Traffic() as traffic:
            distributed.barrier()
            distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None).redistribute(mesh, [Replicate()])
            torch.ops._dtensor.shard_dim_alltoall(torch.ones(4, 4), 0, 1, distributed.group.WORLD.group_name)
    assert [(record.name, record.sent_bytes) for record in traffic.records] == [("all_gather", 96), ("all_to_all", 48)]


def test_sends_are_counted_by_every_open_traffic():
    with imagined_ranks(RANKS), Meter(), Traffic() as outer:
        kept = torch.ones(10)
        with Traffic() as inner:
            send(X, 1)
            incoming = torch.empty(10)
            exchange(kept, 1, incoming, 3)
        distributed.send(X, 1)
    assert inner.records == [
        Message("send", N, N, 0, RANKS, True, 1),
        Message("send", 40, 40, 0, RANKS, True, 3),
        Message("receive", 40, 0, 40, RANKS, True, 3),
    ]
    assert outer.records == [*inner.records, Message("send", N, N, 0, RANKS, True, 3)]
    assert (outer.sent_bytes, outer.received_bytes, outer.exact) == (2 * N + 40, 40, True)


def talks(rank):
    world = distributed.get_world_size()
    with Traffic() as traffic:
        exchange(torch.ones(7), (rank + 1) % world, torch.empty(7), (rank - 1) % world)
        distributed.all_reduce(torch.ones(9))
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        before = len(traffic.records)
        model(torch.ones(2, 4)).sum().backward()
    return traffic, before


def no_rows_of_rank_0(rank):
    counts = [[0, 0, 0], [2, 1, 0], [1, 1, 1]]  # what each rank sends to each
    sends, receives = counts[rank], [counts[other][rank] for other in range(3)]
    out = torch.empty(sum(receives), 3)
    with Traffic() as traffic:
        distributed.all_to_all_single(out, torch.ones(sum(sends), 3), receives, sends)
    return traffic.sent_bytes, traffic.received_bytes


def uneven_pieces(rank):
    pieces = [torch.ones(2 * (r + 1)) for r in range(3)]
    with Traffic() as traffic:
        distributed.reduce_scatter(torch.empty_like(pieces[rank]), pieces)
    return traffic.sent_bytes, traffic.received_bytes


def sparse(rank):
    tensor = torch.eye(4).to_sparse()
    with Traffic() as traffic:
        distributed.all_reduce(tensor)
    return tensor.to_dense()[0, 0].item(), traffic.sent_bytes


@pytest.fixture(scope="module")
def real():
    every = run_ranks(lambda rank: [each(rank) for each in (talks, no_rows_of_rank_0, uneven_pieces, sparse)], 3)
    return [list(column) for column in zip(*every, strict=True)]


def test_traffic_of_real_ranks_travels_with_its_records(real):
    for traffic, before in real[0]:
        names = [record.name for record in traffic.records]
        assert names[:3] == ["send", "receive", "all_reduce"] and names[before:] == ["all_reduce"]
        assert traffic.by_name()["send"] == 28 and traffic.records[2].sent_bytes == 2 * 36 * 2 // 3
        assert traffic.records[-1].sent_bytes == math.ceil(2 * 80 * 2 / 3) and not traffic.exact
    assert pickle.loads(pickle.dumps(traffic)).records == traffic.records


def test_uneven_and_sparse_tensors_are_counted_as_the_algorithms_send_them(real):
    assert real[1] == [(0, 3 * 12), (2 * 12, 12), (2 * 12, 0)]
    assert real[2] == [(48 - 8, 48 - 24), (48 - 16, 48 - 8), (48 - 24, 48 - 16)]  # of pieces of 8, 16 and 24 bytes
    whole = 4 * 4 + 2 * 4 * 8  # values, and two indices of each
    assert real[3] == [(3.0, math.ceil(2 * whole * 2 / 3))] * 3


def test_after_an_error_nothing_is_counted_any_more():
    with imagined_ranks(2), pytest.raises(ZeroDivisionError), Traffic() as traffic:
        send(X, 1)
        1 / 0  # noqa: B018
    with imagined_ranks(2):
        send(X, 1)
    assert len(traffic.records) == 1


def test_where_gloo_meets_a_gpus_tensor_another_tensor_goes_over_the_wire(monkeypatch):
    seen = []

    def carry(operations):
        seen.extend(operations)
        outgoing, incoming = (operation.tensor for operation in operations)
        incoming.copy_(outgoing)
        return []

    monkeypatch.setattr(talk, "staged", lambda tensor, group: True)
    monkeypatch.setattr(talk, "_host", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    monkeypatch.setattr(distributed, "batch_isend_irecv", carry)
    outgoing, incoming = torch.arange(3.0), torch.zeros(3)
    with imagined_ranks(2):
        assert exchange(outgoing, 1, incoming, 1) is incoming
    assert incoming.tolist() == [0, 1, 2]
    assert seen[0].tensor is not outgoing and seen[1].tensor is not incoming


def test_main_memory_needs_no_staging_and_gloo_asks_for_it_on_a_gpu():
    class OnGPU:
        is_cpu, device = False, torch.device("cuda", 0)

    with one_rank("cpu"):
        assert not talk.staged(X) and talk.staged(OnGPU)
    with imagined_ranks(2):
        assert not talk.staged(OnGPU)


def test_a_message_that_was_not_sent_is_not_counted():
    with imagined_ranks(2), Traffic() as traffic:
        for peer, words in ((0, "expected another rank than this one, found 0; copy the tensor"), (2, "0 to 1…rank 2")):
            refused(lambda peer=peer: exchange(torch.ones(3), peer, torch.ones(3), peer), ValueError, words)
        refused(lambda: send(torch.ones(3), "one"), ValueError, "rank 'one'")
    assert traffic.records == []
