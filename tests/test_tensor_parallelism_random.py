"""Random numbers on ranks: in step where they hold the same, different where each holds a part."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.gradient_checkpointing import checkpoint
from memlab.memory_timeline import imagine
from memlab.ranks import imagined_ranks, one_rank, run_ranks
from memlab.tensor_parallelism import (
    StreamDropout,
    TensorParallelAttention,
    TensorParallelBlock,
    TensorParallelGPT,
    different_on_ranks,
)
from memlab.tensor_parallelism import random as page

RANKS, P = 3, 0.25


class Caught(Exception):
    pass


def masks(rank: int) -> dict:
    torch.manual_seed(0)
    found = {"before": torch.rand(8)}
    ones = torch.ones(1000, 300)
    found["stream"] = StreamDropout(P)(ones) != 0
    found["rows"] = StreamDropout(P, sequence_parallel=True)(ones) != 0
    with different_on_ranks():
        found["inside"] = torch.rand(8)
        eye = torch.eye(100).expand(20, 1, 100, 100)
        weights = F.scaled_dot_product_attention(torch.zeros(20, 1, 100, 4), torch.zeros(20, 1, 100, 4), eye, None, P)
        found["attention"] = weights != 0
    found["between"] = torch.rand(8)
    with pytest.raises(Caught), different_on_ranks():
        torch.rand(3)
        raise Caught
    with different_on_ranks(enabled=False):
        found["switched off"] = torch.rand(8)
    with different_on_ranks(), different_on_ranks():
        found["nested"] = torch.rand(8)
    found["after"] = torch.rand(8)
    found["evaluation"] = StreamDropout(P, sequence_parallel=True).eval()(ones)
    with different_on_ranks():
        found["one stream"] = torch.rand(4096)
    return found


@pytest.fixture(scope="module")
def drawn() -> list[dict]:
    return run_ranks(masks, RANKS)


@pytest.mark.parametrize("what", ["before", "stream", "between", "switched off", "after", "evaluation"])
def test_where_ranks_hold_the_same_their_random_numbers_are_the_same_bit_by_bit(drawn, what):
    assert all(torch.equal(rank[what], drawn[0][what]) for rank in drawn)


@pytest.mark.parametrize("what", ["rows", "inside", "attention", "nested"])
def test_where_each_holds_a_part_no_two_ranks_draw_the_same(drawn, what):
    for one in range(RANKS):
        assert not any(torch.equal(drawn[one][what], drawn[other][what]) for other in range(one))


@pytest.mark.parametrize("what", ["stream", "rows", "attention"])
def test_masks_keep_the_right_share_of_numbers_and_two_ranks_agree_as_often_as_chance(drawn, what):
    flat = [rank[what].flatten() for rank in drawn]
    error = 5 * (P * (1 - P) / flat[0].numel()) ** 0.5  # five standard deviations
    assert all(abs(mask.double().mean() - (1 - P)) < error for mask in flat)
    if what != "stream":
        both = (flat[0] & flat[1]).double().mean()
        assert abs(both - (1 - P) ** 2) < 2 * error


def test_two_ranks_streams_are_not_shifted_copies_of_each_other(drawn):
    one, other = (rank["one stream"] for rank in drawn[:2])
    assert len(set(one.tolist()) & set(other.tolist())) < 8  # of 2²⁴ floats some meet by chance
    assert not any(torch.equal(one[shift : shift + 16], other[:16]) for shift in range(4096 - 16))


def test_the_streams_outside_are_as_if_the_block_had_drawn_one_number(drawn):
    torch.manual_seed(0)
    torch.rand(8)
    F.dropout(torch.ones(1000, 300), P)
    torch.randint(2**62, ())
    torch.randint(2**62, ())
    assert torch.equal(drawn[0]["between"], torch.rand(8))


def test_a_group_of_one_draws_as_if_nothing_stood_around():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with one_rank("cpu"), different_on_ranks():
        assert torch.equal(torch.rand(4), expected)


def test_imagined_tensors_have_no_values_so_nothing_is_drawn_or_seeded():
    state = torch.get_rng_state()
    with imagined_ranks(8), imagine("H100-80GB"):
        model = TensorParallelGPT(1, 64, 8, 16, 64, dropout=0.1, sequence_parallel=True)
        model(torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int64)).backward()
    assert torch.equal(torch.get_rng_state(), state)


class Streams:
    """Stands in for an accelerator's module: keeps a state, and says what was asked of it."""

    def __init__(self):
        self.state, self.asked = torch.zeros(2), []

    def get_rng_state(self, device):
        self.asked.append(("get", str(device)))
        return self.state.clone()

    def set_rng_state(self, state, device):
        self.asked.append(("set", str(device)))
        self.state = state

    def manual_seed(self, seed):
        self.asked.append("seed")
        self.state = torch.tensor([float(seed % 2**20), 0.0])


def test_the_accelerators_stream_is_seeded_and_put_back_too_and_no_other_devices(monkeypatch):
    streams, card = Streams(), torch.device("cuda", 1)
    monkeypatch.setattr(page, "devices_in_use", lambda tensors: {torch.device("cpu"), card})
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    monkeypatch.setattr(torch, "manual_seed", None)  # reaches every GPU
    with imagined_ranks(4, rank=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        with different_on_ranks():
            assert streams.state[0] != 0
    assert streams.asked == [("get", "cuda:1"), "seed", ("set", "cuda:1")]
    assert torch.equal(streams.state, torch.zeros(2))


def gradients(rank: int) -> dict:
    """Of a block in which everything is dropped now and then, plain and by two checkpoints; and inside of attention."""
    found = {}
    attention = TensorParallelAttention(16, 2, dropout=0.5)
    for p in attention.parameters():
        torch.nn.init.constant_(p, 0.5)  # so that both ranks' heads are alike
    attention.out.register_forward_pre_hook(lambda layer, args: found.setdefault("heads", args[0].detach()))
    torch.manual_seed(3)
    found["attention"] = attention(torch.randn(8, 16), 2).detach(), torch.rand(2)
    for sequence in (False, True):
        torch.manual_seed(3)
        block = TensorParallelBlock(16, 2, dropout=0.5, sequence_parallel=sequence)
        rows = torch.randn(8, 16)
        if sequence:
            rows = rows.chunk(2)[rank]
        for name, call in {
            "plain": block,
            "memlab": lambda *args: checkpoint(block, *args),  # noqa: B023
            "torch": lambda *args: torch_checkpoint(block, *args, use_reentrant=False),  # noqa: B023
        }.items():
            block.zero_grad()
            torch.manual_seed(4)
            y = call(rows, 2)
            torch.rand(5)
            y.square().sum().backward()
            found[sequence, name] = y.detach(), [p.grad.clone() for p in block.parameters()], torch.rand(2)
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("how", ["memlab", "torch"])
def test_a_checkpoint_draws_the_same_masks_again(both, sequence, how):
    for rank in both:
        (y, plain, after), (again, others, same) = rank[sequence, "plain"], rank[sequence, how]
        assert torch.equal(y, again) and torch.equal(after, same)
        assert all(torch.equal(p, q) for p, q in zip(plain, others, strict=True))


@pytest.fixture(scope="module")
def both() -> list[dict]:
    return run_ranks(gradients, 2)


def test_attention_drops_other_weights_on_each_rank_and_its_sum_is_the_same_on_all(both):
    one, other = both
    assert one["heads"].shape == other["heads"].shape == (8, 8)
    assert not torch.equal(one["heads"], other["heads"])
    assert all(torch.equal(p, q) for p, q in zip(one["attention"], other["attention"], strict=True))


def test_a_blocks_output_is_the_same_on_all_ranks_with_dropout_and_with_sequence_parallelism_each_has_rows(both):
    assert torch.equal(both[0][False, "plain"][0], both[1][False, "plain"][0])
    assert both[0][True, "plain"][0].shape == (4, 16)
