"""Parts of parameters as the plain layer draws them; tables and losses over a vocabulary that is cut over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memlab import tensor_parallelism as tp
from memlab.memory_timeline import Meter, imagine
from memlab.ranks import Traffic, imagined_ranks, one_rank, place_in, run_ranks
from memlab.tensor_parallelism.parameters import draw_part_
from tests.tensor_parallelism_helpers import groups, part_of, raised
from tests.tiers import pairs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DRAWS = NORMAL, _ = (lambda numbers: numbers.normal_()), (lambda numbers: numbers.uniform_(-0.3, 0.3))


@pairs("draw, chunk_bytes, dtype", DRAWS, [1, 256, 2**20], DTYPES)
def test_a_part_is_drawn_as_the_full_tensor_is_and_the_generator_left_there(draw, chunk_bytes, dtype, monkeypatch):
    monkeypatch.setattr(tp.parameters, "CHUNK_BYTES", chunk_bytes)
    cuts = [
        tp.Cut((12,), 0, 0, 4, ((12, 4),)),
        tp.Cut((20, 1), 0, 3, 4, ((20, 4),)),
        tp.Cut((12, 5), 0, 2, 4, ((12, 4),)),
        tp.Cut((12, 5), 0, 3, 4, ((4, 4), (4, 2), (4, 1))),
        tp.Cut((5, 12), 1, 3, 4, ((8, 4), (4, 2))),
        tp.Cut((3, 8, 5), 1, 2, 4, ((8, 4),)),
        tp.Cut((33, 68), 1, 3, 4, ((68, 4),)),
        tp.Cut((0, 4), 1, 0, 2, ((4, 2),)),
    ]
    for cut in [*cuts, None]:
        full, part = torch.empty(cut.shape if cut else 47, dtype=dtype), torch.empty(cut.part_shape if cut else 47)
        torch.manual_seed(1)
        draw(full)
        after = torch.get_rng_state()
        torch.manual_seed(1)
        part = part.to(dtype)
        draw_part_(part, cut, draw)
        assert torch.equal(part, cut.part_of(full) if cut else full), cut
        assert torch.equal(torch.get_rng_state(), after), cut


@pytest.mark.parametrize("numel", [2**18 - 1, 2**18 + 15, 2**18 + 16, 2**19 + 17])
def test_where_chunks_end_makes_no_difference(numel):
    torch.manual_seed(1)
    full = torch.empty(numel).normal_()
    torch.manual_seed(1)
    draw_part_(part := torch.empty(numel), None, NORMAL)
    assert torch.equal(part, full)


def test_a_part_that_is_not_contiguous_is_filled_as_one_that_is():
    torch.manual_seed(1)
    full = torch.empty(6, 8).normal_()
    torch.manual_seed(1)
    draw_part_(part := torch.empty(4, 6).t(), tp.Cut((6, 8), 1, 1, 2, ((8, 2),)), NORMAL)
    assert torch.equal(part, full[:, 4:])


@pairs("dtype, ranks", [torch.float64, torch.float32, torch.bfloat16], [1, 8])
def test_layers_begin_with_their_parts_of_what_plain_layers_begin_with(dtype, ranks):
    torch.manual_seed(3)
    plain = [nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 24, dtype=dtype), nn.Embedding(56, 24, dtype=dtype)]
    for rank in range(ranks):
        with imagined_ranks(ranks, rank):
            torch.manual_seed(3)
            parts = [
                tp.ColumnParallelLinear(24, 40, dtype=dtype),
                tp.RowParallelLinear(40, 24, dtype=dtype),
                tp.VocabularyParallelEmbedding(56, 24, dtype=dtype),
            ]
        for layer, split in zip(plain, parts, strict=True):
            for (name, full), part in zip(layer.named_parameters(), split.parameters(), strict=True):
                expected = full if tp.cut_of(part) is None else tp.cut_of(part).part_of(full)
                assert torch.equal(part, expected), (rank, layer, name)


def test_making_a_layer_takes_its_part_and_a_chunk():
    with imagined_ranks(8), Meter() as meter:
        table = tp.VocabularyParallelEmbedding(8192, 512)
    assert table.weight.nbytes == 2 * 2**20
    assert meter.timeline.peak_bytes == table.weight.nbytes + tp.parameters.CHUNK_BYTES + 15 * 4


def distance(found: Tensor, expected: Tensor) -> float:
    """By norm; nan and infinities must stand in the same places."""
    same = torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    if not same:
        return float("inf")
    found, expected = (t[t.isfinite()].double() for t in (found, expected))
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300)) if len(expected) else 0.0


def look_up(group) -> dict:
    facts = {}
    rank, _ = place_in(group)
    generator = torch.Generator().manual_seed(4)
    some = torch.randint(24, (3, 5), generator=generator)
    batches = {"some": some, "on one rank": some % 6, "none": some[:0], "one": some[0, 0], "int32": some.int()}
    for dtype in DTYPES:
        full = nn.Embedding(24, 6, dtype=dtype)
        with torch.no_grad():
            full.weight.copy_(torch.randn(24, 6, generator=generator))
        for name, tokens in batches.items():
            table = part_of(full, tp.VocabularyParallelEmbedding, 24, 6, group=group)
            expected, found = full(tokens), table(tokens)
            weights = torch.randn(expected.shape, generator=generator).to(dtype)
            (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), full.weight)
            (gradient,) = torch.autograd.grad((found * weights).sum(), table.weight)
            own = tp.cut_of(table.weight).part_of(expected_gradient)
            facts[f"{name}, {dtype}"] = torch.equal(found, expected) and torch.equal(gradient, own)
    summand = part_of(full, tp.VocabularyParallelEmbedding, 24, 6, reduce=False, group=group)
    facts["summand"] = torch.equal(summand(some), full(some) * ((some // len(summand.weight)) == rank)[..., None])
    with torch.no_grad():
        full.weight[::6] = torch.inf  # each rank's first row, which stands in for tokens that are elsewhere
    facts["infinite"] = torch.equal(part_of(full, tp.VocabularyParallelEmbedding, 24, 6, group=group)(some), full(some))
    for bad, said in ((24, "3 to 24"), (-1, "-1 to 3")):
        told = raised(lambda bad=bad: tp.VocabularyParallelEmbedding(24, 6, group=group)(torch.tensor([3, bad])))
        facts[bad] = told.startswith(f"IndexError: expected tokens from 0 to 23, found some from {said}")
    return facts


def losses(group) -> tuple[dict, dict]:
    rank, ranks = place_in(group)
    generator = torch.Generator().manual_seed(1)
    z, y = torch.randn(12, 24, dtype=torch.float64, generator=generator) * 5, torch.randint(24, (12,))
    ignored, hidden, at_target = y.clone(), z.clone(), z.clone()
    ignored[3] = ignored[7] = -100
    hidden[0, :12], hidden[1, 13:], hidden[2] = -torch.inf, -torch.inf, -torch.inf
    at_target[0, y[0]], at_target[5, 2] = -torch.inf, torch.inf
    cases = {
        "plain": (z, y),
        "some ignored": (z, ignored),
        "all ignored": (z, torch.full_like(y, -100)),
        "large": (z * 1000, y),
        "minus infinity": (hidden, y),
        "minus infinity, and all else far below zero": (hidden - 1000, y),
        "minus infinity at the target": (at_target, y),
        "empty": (z[:0], y[:0]),
        "3-dimensional": (z.view(3, 4, 24), y.view(3, 4)),
    }
    found: dict = {}
    for (name, (logits, targets)), dtype in ((case, dtype) for case in cases.items() for dtype in DTYPES):
        wide = torch.promote_types(dtype, torch.float32)
        full = logits.to(dtype).to(wide, copy=True).requires_grad_()
        expected = F.cross_entropy(full.flatten(0, -2), targets.flatten())
        expected.backward()
        for in_place in (False, True):
            part = logits.to(dtype).chunk(ranks, -1)[rank].clone().requires_grad_()
            loss = tp.vocabulary_parallel_cross_entropy(part * 1, targets, in_place=in_place, group=group)
            loss.backward()
            assert part.grad.dtype == dtype and loss.dtype == wide and loss.shape == ()
            worst = found.setdefault((name, dtype), [0.0, 0.0])
            worst[0] = max(worst[0], distance(loss.detach().flatten(), expected.detach().flatten()))
            worst[1] = max(worst[1], distance(part.grad, full.grad.chunk(ranks, -1)[rank]))
    return found, others_of_losses(z, y, group)


def others_of_losses(z: Tensor, y: Tensor, group) -> dict:
    rank, ranks = place_in(group)
    part = z.chunk(ranks, -1)[rank].clone().requires_grad_()
    facts: dict = {}
    with Traffic() as traffic:
        tp.vocabulary_parallel_cross_entropy(part, y, group=group).backward()
    facts["sent"] = [(record.name, record.sent_bytes) for record in traffic.records]
    for bad in (24, -1, 10**12):
        targets = y.clone()
        targets[4] = bad
        facts[bad] = raised(lambda targets=targets: tp.vocabulary_parallel_cross_entropy(part, targets, group=group))
    return facts


def in_rank(rank: int) -> list:
    return [(look_up(group), losses(group)) for group in groups()]


@pytest.fixture(scope="module")
def ranks_found() -> list:
    """[(group's size, what one rank of it found)]"""
    return [
        (size, found)
        for rank in run_ranks(in_rank, 4, timeout=240)
        for size, found in zip((1, 2, 4), rank, strict=True)
    ]


def test_a_split_table_looks_up_and_learns_what_the_full_one_does_bitwise_and_refuses_a_token_of_none(ranks_found):
    for size, (facts, _) in ranks_found:
        wrong = [name for name, right in facts.items() if not right]
        assert not wrong, (size, wrong)


def test_the_loss_of_split_logits_is_pytorchs_whatever_the_logits(ranks_found):
    epsilon = {torch.float64: 2e-16, torch.float32: 1.2e-7, torch.bfloat16: 7.9e-3, torch.float16: 9.8e-4}
    for size, (_, (found, _)) in ranks_found:
        for (name, dtype), (loss, gradient) in found.items():
            wide = epsilon[torch.promote_types(dtype, torch.float32)]
            assert loss <= 4 * wide, (size, name, dtype)
            assert gradient <= (8 * wide if dtype.itemsize > 2 else epsilon[dtype]), (size, name, dtype)


def test_the_loss_sends_three_numbers_a_token_in_one_message_and_refuses_a_target_that_is_nowhere(ranks_found):
    for size, (_, (_, facts)) in ranks_found:
        assert facts["sent"] == [("all_gather", (size - 1) * 3 * 12 * 8)] * (size > 1)
        for bad in (24, -1, 10**12):
            assert facts[bad].startswith(f"IndexError: expected targets from 0 to 23, or ignore_index, found {bad};")


def saved_bytes(call, but: Tensor) -> int:
    """What autograd keeps for backward, in storages, without one tensor's."""
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    kept.pop(but.untyped_storage().data_ptr(), None)
    del result
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_keeps_one_matrix_which_becomes_the_gradient(dtype):
    z, y = torch.randn(32, 100).to(dtype).requires_grad_(), torch.arange(32)
    with imagined_ranks(4):
        saved = saved_bytes(lambda: tp.vocabulary_parallel_cross_entropy(z, y), z)
        assert saved == 32 * 100 * dtype.itemsize + 8  # and the divisor
        loss = tp.vocabulary_parallel_cross_entropy(z, y)
        matrix = loss.grad_fn.saved_tensors[0].data_ptr()
        loss.backward()
    assert z.grad.data_ptr() == matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_the_loss_takes_one_matrix_less(dtype):
    n, v = 64, 5000
    peaks = {}
    for in_place in (False, True):
        with imagine("H100-80GB"), imagined_ranks(4), Meter() as meter:
            z, y = torch.randn(n, v, dtype=dtype, requires_grad=True), torch.zeros(n, dtype=torch.int64)
            loss = tp.vocabulary_parallel_cross_entropy(z * 1, y, in_place=in_place)
            peaks[in_place] = meter.timeline.peak_bytes - 2 * z.nbytes - y.nbytes
            loss.backward()
    assert peaks[False] - peaks[True] == n * v * dtype.itemsize
    scratch = 0 if dtype == torch.float32 else min(2**22, n * v * 4)
    assert 0 <= peaks[True] - scratch <= 200 * n


def test_without_a_backward_the_loss_takes_scratch_and_no_matrix():
    with one_rank("cpu"), torch.no_grad():
        z, y = torch.randn(1024, 4096), torch.randint(4096, (1024,))
        with Meter() as meter:
            tp.vocabulary_parallel_cross_entropy(z, y)
    assert meter.timeline.peak_bytes - z.nbytes - y.nbytes <= 2**22 + 200 * 1024 < z.nbytes


def test_a_graph_that_is_kept_gives_the_same_gradient_twice():
    with one_rank("cpu"):
        z, y = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.arange(5)
        loss = 3 * tp.vocabulary_parallel_cross_entropy(z, y)
        (first,) = torch.autograd.grad(loss, z, retain_graph=True)
        (second,) = torch.autograd.grad(loss, z)
        (expected,) = torch.autograd.grad(3 * F.cross_entropy(z, y), z)
    assert torch.equal(first, second) and distance(first, expected) < 1e-15


def test_logits_that_someone_reads_in_backward_are_not_overwritten_unnoticed():
    with one_rank("cpu"):
        z, y = torch.randn(5, 7, requires_grad=True), torch.arange(5)
        loss = tp.vocabulary_parallel_cross_entropy(z.tanh(), y, in_place=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
