"""A part stays a part, whatever is done with it; and random numbers of ranks: in step, or different for parts."""

from __future__ import annotations

import copy
import io
import itertools
import warnings

import pytest
import torch
from torch.nn import functional as F

from memlab import tensor_parallelism as tp
from memlab.memory_timeline import imagine
from memlab.ranks import imagined_ranks, one_rank, run_ranks
from memlab.tensor_parallelism import random as page


@pytest.fixture
def layers():
    with imagined_ranks(2, 1):
        yield torch.nn.ModuleList(
            [tp.ColumnParallelLinear(4, 6), tp.RowParallelLinear(6, 4), tp.VocabularyParallelEmbedding(8, 4)]
        )


def assigned(layers):
    layers.load_state_dict({name: torch.zeros_like(value) for name, value in layers.state_dict().items()}, assign=True)
    return layers


def pickled(layers):
    file = io.BytesIO()
    torch.save(layers, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS = {
    "deepcopy of what was pickled": lambda layers: copy.deepcopy(pickled(layers)),
    "double": lambda layers: layers.double(),
    "to meta and back": lambda layers: layers.to("meta").to_empty(device="cpu"),
    "load_state_dict(assign=True)": assigned,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_part_knows_its_cut_after(layers, way):
    cuts = {name: tp.cut_of(p) for name, p in layers.named_parameters()}
    after = way(layers)
    assert {name: tp.cut_of(p) for name, p in after.named_parameters()} == cuts
    assert [name for name, cut in cuts.items() if cut is None] == ["1.bias"]
    assert all(p.requires_grad and isinstance(p, torch.nn.Parameter) for p in after.parameters())


def test_a_call_with_other_tensors_in_place_of_the_parts_is_the_call_with_these_parts():
    x = torch.arange(8).view(2, 4)
    with one_rank("cpu"):
        model, other = (tp.TensorParallelGPT(1, 8, 2, 4, 16) for _ in range(2))
        given = {name: p.detach().clone() for name, p in other.named_parameters()}
        assert torch.equal(torch.func.functional_call(model, given, (x, x)), other(x, x))
        assert all(tp.cut_of(p) == tp.cut_of(q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_layer_with_a_group_of_its_own_is_copied_with_it(layers):
    group = torch.distributed.new_group([0, 1])
    layer = tp.ColumnParallelLinear(4, 6, group=group)
    other = copy.deepcopy(layer, {id(group): group})
    assert other.group is group and other.sending.group is group
    assert tp.cut_of(other.weight) == tp.cut_of(layer.weight)


RANKS, P = 3, 0.25


class Caught(Exception):
    pass


def masks(rank: int) -> dict:
    torch.manual_seed(0)
    found = {"before": torch.rand(8)}
    ones = torch.ones(1000, 300)
    found["stream"] = tp.StreamDropout(P)(ones) != 0
    found["rows"] = tp.StreamDropout(P, sequence_parallel=True)(ones) != 0
    with tp.different_on_ranks():
        found["inside"] = torch.rand(8)
        eye = torch.eye(100).expand(20, 1, 100, 100)
        weights = F.scaled_dot_product_attention(torch.zeros(20, 1, 100, 4), torch.zeros(20, 1, 100, 4), eye, None, P)
        found["attention"] = weights != 0
    found["between"] = torch.rand(8)
    with pytest.raises(Caught), tp.different_on_ranks():
        torch.rand(3)
        raise Caught
    with tp.different_on_ranks(enabled=False):
        found["switched off"] = torch.rand(8)
    with tp.different_on_ranks(), tp.different_on_ranks():
        found["nested"] = torch.rand(8)
    found["after"] = torch.rand(8)
    found["evaluation"] = tp.StreamDropout(P, sequence_parallel=True).eval()(ones)

    attention = tp.TensorParallelAttention(12, RANKS, dropout=0.5)
    for p in attention.parameters():
        torch.nn.init.constant_(p, 0.5)  # so that all ranks' heads are alike
    attention.out.register_forward_pre_hook(lambda layer, args: found.setdefault("heads", args[0].detach()))
    found["attention's sum"] = attention(torch.randn(9, 12), 3).detach()
    found["after attention"] = torch.rand(8)
    found["a block's output"] = tp.TensorParallelBlock(12, RANKS, dropout=0.5)(torch.randn(9, 12), 3).detach()
    block = tp.TensorParallelBlock(12, RANKS, dropout=0.5, sequence_parallel=True)
    found["a block's rows"] = block(torch.ones(3, 12), 3).detach()
    return found


@pytest.fixture(scope="module")
def drawn() -> list[dict]:
    return run_ranks(masks, RANKS)


OF_PARTS = {"rows", "inside", "attention", "nested", "heads", "a block's rows"}


def test_random_numbers_are_the_same_bit_by_bit_where_ranks_hold_the_same_and_differ_where_each_holds_a_part(drawn):
    for one, other in itertools.combinations(drawn, 2):
        for what in one:
            assert one[what].shape == other[what].shape
            assert torch.equal(one[what], other[what]) == (what not in OF_PARTS), what


@pytest.mark.parametrize("what", ["stream", "rows", "attention"])
def test_masks_keep_the_right_share_of_numbers_and_two_ranks_agree_as_often_as_chance(drawn, what):
    flat = [rank[what].flatten() for rank in drawn]
    error = 5 * (P * (1 - P) / flat[0].numel()) ** 0.5  # five standard deviations
    assert all(abs(mask.double().mean() - (1 - P)) < error for mask in flat)
    if what != "stream":
        both = (flat[0] & flat[1]).double().mean()
        assert abs(both - (1 - P) ** 2) < 2 * error


def test_the_streams_outside_are_as_if_the_block_had_drawn_one_number(drawn):
    torch.manual_seed(0)
    torch.rand(8)
    F.dropout(torch.ones(1000, 300), P)
    torch.randint(2**62, ())
    torch.randint(2**62, ())
    assert torch.equal(drawn[0]["between"], torch.rand(8))


def test_a_group_of_one_draws_as_if_nothing_stood_around_and_imagined_ranks_draw_nothing():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with one_rank("cpu"), tp.different_on_ranks():
        assert torch.equal(torch.rand(4), expected)
    state = torch.get_rng_state()
    with imagined_ranks(8), imagine("H100-80GB"):
        model = tp.TensorParallelGPT(1, 64, 8, 16, 64, dropout=0.1, sequence_parallel=True)
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
        with tp.different_on_ranks():
            assert streams.state[0] != 0
    assert streams.asked == [("get", "cuda:1"), "seed", ("set", "cuda:1")]
    assert torch.equal(streams.state, torch.zeros(2))
