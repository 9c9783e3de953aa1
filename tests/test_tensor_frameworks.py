"""PyTorch's tensor parallelism on two real ranks beside this book's: equal weights, and what each holds and sends."""

import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from memlab.book.measures.tensor_parallelism import split_bytes
from memlab.book.tensor_frameworks import (
    SeparateAttention,
    parallelize_block,
    parallelize_gpt,
    train_split,
    ways_to_split,
)
from memlab.book.workloads import GPT, Attention, Block, GPTConfig, text_batch
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
EMBEDDINGS = (VOCABULARY + CONTEXT) * WIDTH

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
    with torch.device("meta"):
        model = build()
    parallelize_gpt(model, mesh).to_empty(device="cpu")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that on a CPU random numbers are not supported completely
        model.head.reset_parameters()
    drawn = model.head.weight.full_tensor().detach()
    local = {name: p.to_local().shape for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return found, begun, local, drawn, clipped(mesh)


def clipped(mesh):
    """What clip_grad_norm_ says, without and with sequence parallelism."""
    says = []
    for cut in (False, True):
        model = parallelize_gpt(build(), mesh, cut)
        with loss_parallel():
            model(*BATCHES[0]).backward()
        try:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            says.append(norm.full_tensor().item())
        except RuntimeError as error:
            says.append(str(error))
    return says


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


def test_every_way_ends_with_one_processs_weights_by_the_same_names(ranks, truth):
    for found, *_ in ranks:
        for name, split in found.items():
            assert list(split.weights) == list(truth)
            for weight, expected in truth.items():
                far = (split.weights[weight] - expected).norm()
                assert far <= 1e-12 * expected.norm(), (name, weight)


def test_both_ranks_bring_together_the_same_weights_bit_for_bit(ranks):
    for name in ways_to_split():
        one, two = (found[name].weights for found, *_ in ranks)
        assert all(torch.equal(one[weight], two[weight]) for weight in one), name


def test_every_way_holds_a_part_of_all_weights_but_norms_and_biases_after_a_sum(ranks):
    expected = ITEM * ((SHAPE.parameters - WHOLE) // RANKS + WHOLE)
    for found, *_ in ranks:
        assert {split.trained.held.parameters for split in found.values()} == {expected}


@as_recorded
def test_dtensor_has_the_whole_gradient_of_tables_that_are_cut_by_rows_and_memlab_a_part(ranks):
    for found, *_ in ranks:
        for name, split in found.items():
            held = split.trained.held
            lacking = ITEM * EMBEDDINGS * (RANKS - 1) // RANKS
            assert held.gradients == held.parameters + lacking * name.startswith("DTensor"), name


@as_recorded
def test_dtensor_sends_two_sums_a_layer_each_way_and_one_for_each_table(ranks):
    streams, positions, losses = 4 * LAYERS + 2, CONTEXT * WIDTH * ITEM, 3
    expected = streams * ring_bytes("all_reduce", STREAM, RANKS) + ring_bytes("all_reduce", positions, RANKS)
    expected += losses * ring_bytes("all_reduce", TOKENS, RANKS)
    for found, *_ in ranks:
        assert found["DTensor"].sent == {"all_reduce": expected}
        assert found["DTensor"].collectives == {"all_reduce": streams + 1 + losses}
        assert sum(found["memlab"].sent.values()) < expected  # both tables in one sum


@as_recorded
def test_layers_that_each_make_a_dtensor_of_their_input_send_a_gradient_each(ranks):
    for found, *_ in ranks:
        apart = found["DTensor, each layer's own input"].sent["all_reduce"] - found["DTensor"].sent["all_reduce"]
        assert apart == 2 * LAYERS * ring_bytes("all_reduce", STREAM, RANKS)


@as_recorded
def test_sequence_parallel_norms_are_summed_in_adamws_step_and_there_three_times(ranks):
    losses, uses = 3, 3
    for found, *_ in ranks:
        split = found["DTensor, sequence parallel"]
        assert split.collectives["all_reduce"] == losses + uses * NORMS
        small = uses * NORMS * ring_bytes("all_reduce", WIDTH * ITEM, RANKS)
        assert split.sent["all_reduce"] == losses * ring_bytes("all_reduce", TOKENS, RANKS) + small
        assert split.sent["all_gather"] == split.sent["reduce_scatter"]
        plain = found["DTensor"].sent["all_reduce"] - losses * ring_bytes("all_reduce", TOKENS, RANKS)
        assert split.sent["all_gather"] + split.sent["reduce_scatter"] == plain


def test_parallelize_module_has_the_whole_model_first_and_scatters_rank_0s_but_on_meta_only_parts_are_made(ranks):
    part = ITEM * ((SHAPE.parameters - WHOLE) // RANKS + WHOLE)
    for _, begun, *_ in ranks:
        peak, sent = begun["cpu"]
        assert peak > ITEM * SHAPE.parameters and set(sent) == {"scatter", "broadcast"}
        assert begun["meta"] == (part, {})


@as_recorded
def test_on_a_cpu_dtensor_draws_the_same_numbers_for_every_ranks_part(ranks):
    for _, _, _, drawn, _ in ranks:
        first, second = drawn.chunk(RANKS)
        assert torch.equal(first, second) and first.std() > 0


@as_recorded
def test_the_plain_plan_leaves_norms_plain_tensors_which_clip_grad_norm_does_not_mix_with_dtensors(ranks):
    model = build()
    model(*BATCHES[0]).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    for *_, (plain, cut) in ranks:
        assert "got mixed torch.Tensor and DTensor" in plain
        assert cut == pytest.approx(expected, rel=1e-12)


def test_queries_keys_and_values_are_cut_by_heads(ranks):
    for _, _, local, *_ in ranks:
        for i in range(LAYERS):
            assert {tuple(local[f"blocks.{i}.attention.{name}.weight"]) for name in "qkv"} == {(WIDTH // RANKS, WIDTH)}
            assert tuple(local[f"blocks.{i}.attention.out.weight"]) == (WIDTH, WIDTH // RANKS)


def test_separate_attention_is_the_books_attention():
    torch.manual_seed(0)
    attention = Attention(GPTConfig(**SIZES)).double()
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = attention(x)
        assert (SeparateAttention(attention)(x) - expected).norm() <= 1e-14 * expected.norm()


def test_a_group_of_one_needs_no_communication():
    torch.manual_seed(0)
    block = Block(GPTConfig(**SIZES))
    x = torch.randn(2, 16, WIDTH)
    expected = block(x)
    with one_rank("cpu") as mesh, Traffic() as traffic:
        found = parallelize_block(block, mesh, sequence_parallel=True)(x)
        assert traffic.sent_bytes == 0
    torch.testing.assert_close(found, expected)


def test_dropout_is_refused_and_a_missing_group_is_named():
    with one_rank("cpu") as mesh, pytest.raises(ValueError, match=r"without dropout, found 0\.1"):
        parallelize_gpt(GPT(**SIZES, dropout=0.1), mesh)
    with pytest.raises(RuntimeError, match="expected a process group, found none"):
        train_split("DTensor", build, BATCHES)


def test_the_benchmark_finds_no_byte_between_formula_and_meter():
    ((_, figure, reach),) = split_bytes("cpu", rounds=1)
    assert figure == "parameters 0 B, activations 0 B, sent 0 B" and reach == "0 B"
