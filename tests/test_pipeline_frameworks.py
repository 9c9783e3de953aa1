"""PyTorch's pipeline schedules on two real ranks beside this book's: equal weights, and what each holds and sends."""

import pytest
import torch

from memlab.book.measures.pipeline_parallelism import simulated_beside_metered
from memlab.book.pipeline_frameworks import CHUNKS, MEMLAB, train_piped, ways_to_pipe
from memlab.book.workloads import GPT, GPTConfig, text_batch
from memlab.ranks import run_ranks

RANKS, STEPS, BATCH, ITEM, MICRO_BATCHES = 2, 2, 12, 8, 4
CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16)
BATCHES = [text_batch(BATCH, CONFIG.context, seed=step) for step in range(STEPS)]
STREAM = BATCH * CONFIG.context * CONFIG.width * ITEM
"""What crosses a cut in a step, one way."""
CUTS = {"GPipe": 1, "1F1B": 1, "interleaved": 2 * CHUNKS - 1}
"""Which each rank sends over, forward or back."""


def build():
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def compare(rank):
    """Every way once on a rank."""
    torch.set_num_threads(1)
    return {name: train_piped(name, build, BATCHES, micro_batches=MICRO_BATCHES) for name in ways_to_pipe()}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the ranks have: how many there are decides the order of sums, and so the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(compare, RANKS)


def truth(micro_batches):
    """One process that accumulates the same micro-batches."""
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in BATCHES:
        parts = [
            model(*part) / micro_batches for part in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
        ]
        for loss in parts:
            loss.backward()
        losses.append(sum(parts).item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.state_dict().items()}, losses


def test_every_way_ends_with_the_weights_of_one_process_that_accumulates_bit_for_bit(ranks):
    weights, losses = truth(MICRO_BATCHES)
    for found in ranks:
        for way, piped in found.items():
            assert list(piped.weights) == list(weights)
            assert all(torch.equal(piped.weights[name], weight) for name, weight in weights.items()), way
    first, last = ([piped.losses for piped in found.values()] for found in ranks)
    assert first == [[None] * STEPS] * len(ways_to_pipe())
    for said in last:
        assert [loss.item() for loss in said] == pytest.approx(losses, rel=1e-15)


def test_both_send_what_crosses_the_cuts_and_nothing_else(ranks):
    for found in ranks:
        for way, piped in found.items():
            cuts = CUTS[way.split(", ")[1]]
            assert piped.sent == {"send": cuts * STREAM}, way
            assert piped.messages == {"send": cuts * MICRO_BATCHES, "receive": cuts * MICRO_BATCHES}, way


def test_memlab_peaks_no_higher_with_any_schedule(ranks):
    for found in ranks:
        for schedule in MEMLAB:
            ours, theirs = (found[f"{who}, {schedule}"].trained.peak_bytes for who in ("memlab", "torch"))
            assert ours <= theirs, schedule


def test_an_unknown_way_and_a_missing_group_are_named():
    with pytest.raises(KeyError):
        train_piped("GPipe", build, BATCHES)
    with pytest.raises(RuntimeError, match="expected a process group, found none"):
        train_piped("memlab, 1F1B", build, BATCHES)


def test_the_benchmark_finds_no_byte_between_simulation_and_meter():
    ((_, figure, reach),) = simulated_beside_metered("cpu", rounds=1)
    assert figure == "in flight 0, bytes after an action 0, peak 0" and reach == "0"
