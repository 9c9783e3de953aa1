"""PyTorch's tensor parallelism on two real ranks beside this book's: equal weights, and what each holds and sends."""

import pytest
import torch
from torch import distributed

from memlab.book.measures.tensor_parallelism import split_bytes
from memlab.book.tensor_frameworks import (
    SeparateAttention,
    parallelize_gpt,
    train_split,
    ways_to_split,
)
from memlab.book.workloads import GPT, Attention, GPTConfig, text_batch
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import Meter
from memlab.ranks import Traffic, one_rank, ring_bytes, run_ranks
from tests.nbval_policy import RECORDED_WITH

RANKS, STEPS, BATCH, ITEM = 2, 2, 4, 8
LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 1, 64, 4, 32, 256
SIZES = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT}
SHAPE = Transformer(**SIZES, vocabulary=VOCABULARY)
BATCHES = [text_batch(BATCH, CONTEXT, seed=step) for step in range(STEPS)]
STREAM = BATCH * CONTEXT * WIDTH * ITEM
TOKENS = BATCH * CONTEXT * ITEM
NORMS = 2 * (2 * LAYERS + 1)
WHOLE = NORMS * WIDTH + 2 * LAYERS * WIDTH
"""Elements that every rank has: of norms, and of the biases of layers that are cut by rows."""
as_recorded = pytest.mark.skipif(
    not torch.__version__.startswith(RECORDED_WITH["torch"]), reason="another PyTorch's DTensor may waste less"
)


def build():
    torch.manual_seed(0)
    return GPT(**SIZES).double()


def compare(rank):
    """Everything once on a rank: training, and two ways to begin."""
    found = {name: train_split(name, build, BATCHES) for name in ways_to_split()}
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    begun = {}
    for device in ("cpu", "meta"):
        with Meter() as meter, Traffic() as traffic:
            with torch.device(device):
                model = build()
            parallelize_gpt(model, mesh).to_empty(device="cpu")
        begun[device] = meter.timeline.peak_bytes, traffic.by_name()
        del model
    return found, begun


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(compare, RANKS)


@pytest.fixture(scope="module")
def truth():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in BATCHES:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def test_every_way_ends_with_one_processs_weights_by_the_same_names_and_both_ranks_have_the_same_bits(ranks, truth):
    (found, _), (other, _) = ranks
    for name, split in found.items():
        assert list(split.weights) == list(truth)
        for weight, expected in truth.items():
            assert torch.equal(split.weights[weight], other[name].weights[weight])
            assert (split.weights[weight] - expected).norm() <= 1e-12 * expected.norm(), (name, weight)


def test_every_way_holds_a_part_of_all_weights_but_norms_and_biases_after_a_sum(ranks):
    expected = ITEM * ((SHAPE.parameters - WHOLE) // RANKS + WHOLE)
    for found, _ in ranks:
        assert {split.trained.held.parameters for split in found.values()} == {expected}


@as_recorded
def test_dtensor_sends_two_sums_a_layer_each_way_and_one_for_each_table(ranks):
    streams, positions, losses = 4 * LAYERS + 2, CONTEXT * WIDTH * ITEM, 3
    expected = streams * ring_bytes("all_reduce", STREAM, RANKS) + ring_bytes("all_reduce", positions, RANKS)
    expected += losses * ring_bytes("all_reduce", TOKENS, RANKS)
    for found, _ in ranks:
        assert found["DTensor"].sent == {"all_reduce": expected}
        assert found["DTensor"].collectives == {"all_reduce": streams + 1 + losses}
        assert sum(found["memlab"].sent.values()) < expected  # both tables in one sum


def test_parallelize_module_has_the_whole_model_first_and_scatters_rank_0s_but_on_meta_only_parts_are_made(ranks):
    part = ITEM * ((SHAPE.parameters - WHOLE) // RANKS + WHOLE)
    for _, begun in ranks:
        peak, sent = begun["cpu"]
        assert peak > ITEM * SHAPE.parameters and set(sent) == {"scatter", "broadcast"}
        assert begun["meta"] == (part, {})


def test_separate_attention_is_the_books_attention():
    torch.manual_seed(0)
    attention = Attention(GPTConfig(**SIZES)).double()
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = attention(x)
        assert (SeparateAttention(attention)(x) - expected).norm() <= 1e-14 * expected.norm()


def test_dropout_is_refused_and_a_missing_group_is_named():
    with one_rank("cpu") as mesh, pytest.raises(ValueError, match=r"without dropout, found 0\.1"):
        parallelize_gpt(GPT(**SIZES, dropout=0.1), mesh)
    with pytest.raises(RuntimeError, match="expected a process group, found none"):
        train_split("DTensor", build, BATCHES)


def test_the_benchmark_finds_no_byte_between_formula_and_meter():
    ((_, figure, reach),) = split_bytes("cpu", rounds=1)
    assert figure == "parameters 0 B, activations 0 B, sent 0 B" and reach == "0 B"
