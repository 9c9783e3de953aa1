"""Chapter 14's formulas against the meter: what a rank holds, keeps for backward and sends, to the byte."""

import collections
import functools
import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from memlab.book.steps import metered_step
from memlab.memory_arithmetic import Transformer
from memlab.memory_timeline import Meter, imagine
from memlab.offloading.links import RANK_LINKS
from memlab.ranks import Traffic, imagined_ranks
from memlab.tensor_parallelism import (
    TensorParallelGPT,
    block_activations,
    block_seconds,
    cut_of,
    rank_parameters,
    rank_states,
    sent_bytes,
    step_activations,
    step_traffic,
)
from memlab.tensor_parallelism.arithmetic import by_collective
from tests.tiers import pairs

SHAPE = Transformer(layers=2, width=64, heads=8, vocabulary=32, context=48, hidden=160)
BATCH, TOKENS = 2, 40
CARD = "H100-80GB"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def on_hardware(hardware):
    return imagine(CARD) if hardware == "gpu" else nullcontext()


def metered(ranks, *, hardware="cpu", precision="fp32", **options):
    """A rank's model: its parameters, cut and whole; its timeline of forward and backward; and what it sent."""
    sizes = {name: getattr(SHAPE, name) for name in ("layers", "width", "heads", "context", "vocabulary", "hidden")}
    with on_hardware(hardware), imagined_ranks(ranks):
        model = TensorParallelGPT(**sizes, dtype=DTYPES[precision], **options)
        x, y = (torch.zeros(BATCH, TOKENS, dtype=torch.long) for _ in "xy")
        with Meter(model, inputs=(x, y)) as meter, Traffic() as traffic:
            model(x, y).backward()
    counts = collections.Counter()
    for p in model.parameters():
        counts["cut" if cut_of(p) is not None else "whole"] += p.numel()
    timeline = meter.timeline.on(f"imagined {CARD}" if hardware == "gpu" else "cpu")
    return (counts["cut"], counts["whole"]), timeline, traffic


def kept(timeline):
    """Bytes of activations when backward begins."""
    begins = next(span.start for span in timeline.phases if span.phase == "backward") - 1
    return timeline.bytes_by_category(begins)["activation"]


NAMES = ("ranks", "hardware", "precision", "sequence_parallel")
PRODUCT = pairs(",".join(NAMES), (1, 2, 4, 8), ("cpu", "gpu"), DTYPES, (False, True)).args[1]
WAYS = [
    *(pytest.param(dict(zip(NAMES, case.values, strict=True)), marks=case.marks) for case in PRODUCT),
    {"ranks": 4, "hardware": "cpu", "precision": "fp32", "sequence_parallel": True, "keep_gathered": True},
    {"ranks": 8, "hardware": "gpu", "precision": "bf16", "sequence_parallel": True, "keep_gathered": True},
    {"ranks": 4, "hardware": "cpu", "precision": "bf16", "dropout": 0.1, "sequence_parallel": True},
    {"ranks": 8, "hardware": "gpu", "precision": "bf16", "dropout": 0.1},
    {"ranks": 8, "hardware": "gpu", "precision": "fp32", "dropout": 0.1, "sequence_parallel": True},
]


def only(way, *names):
    return {name: value for name, value in way.items() if name in names}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_parameters_what_forward_keeps_and_what_a_step_sends_are_the_formulas_to_the_byte(way):
    parameters, timeline, traffic = metered(**way)
    assert parameters == rank_parameters(SHAPE, way["ranks"])
    breakdown = step_activations(SHAPE, BATCH, TOKENS, **way)
    assert breakdown.nbytes == kept(timeline)
    for term in breakdown:
        numbers = term.formula.split(" = ")[-1]
        assert eval(numbers.replace("·", "*").replace("×", "*").replace("/", "//")) == term.nbytes > 0
        assert term.source
    assert len({term.name for term in breakdown}) == len(breakdown)
    names = ("ranks", "precision", "sequence_parallel", "keep_gathered")
    sent = step_traffic(SHAPE, BATCH, TOKENS, **only(way, *names))
    assert by_collective(sent) == traffic.by_name()
    assert sent_bytes(sent) == traffic.sent_bytes
    assert messages(sent) == messages_of(traffic)


def messages(sent):
    found = collections.Counter()
    for one in sent:
        found[one.collective, one.tensor_bytes, one.ranks] += one.times
    return +found


def messages_of(traffic):
    return collections.Counter((r.name, r.tensor_bytes, r.ranks) for r in traffic.records)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_a_block_alone_keeps_what_a_block_of_many_adds(hardware, cut):
    options = {"hardware": hardware, "sequence_parallel": cut, "precision": "fp32"}
    one = block_activations(SHAPE, BATCH, TOKENS, 4, **options).nbytes
    two, three = (step_activations(replace(SHAPE, layers=n), BATCH, TOKENS, 4, **options).nbytes for n in (2, 3))
    assert three - two == one


def test_without_its_numbers_a_token_a_block_keeps_what_korthikanti_and_others_count():
    model, b, s, h, a = SHAPE, 3, 48, 64, 8
    model = replace(model, hidden=256)
    for t in (1, 2, 4, 8):
        fused, norms = 4 * a * s * b // t + 16, 16 * s * b
        of = functools.partial(block_activations, model, b, s, t, precision="bf16")
        sequence = {"sequence_parallel": True}
        assert of(dropout=0.1).nbytes == s * b * h * 10 + s * b * h * 24 // t + fused + norms
        assert of(dropout=0.1, **sequence).nbytes == s * b * h * 34 // t + fused + norms // t
        assert of().nbytes == s * b * h * 8 + s * b * h * 24 // t + fused + norms
        assert of(**sequence).nbytes == s * b * h * 32 // t + fused + norms // t
        if t > 1:
            assert of(**sequence, keep_gathered=True).nbytes == s * b * h * 4 + s * b * h * 28 // t + fused + norms // t


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mixed"])
@pytest.mark.parametrize("cut", [False, True])
def test_parameters_and_states_between_steps_are_the_formulas(precision, cut):
    options = {"tensor_ranks": 4, "sequence_parallel": cut, "precision": precision, "implementation": "fused"}
    with imagine(CARD):
        timeline = metered_step(SHAPE, BATCH, TOKENS, **options).on(f"imagined {CARD}")
    held, expected = timeline.bytes_by_category(0), rank_states(SHAPE, 4, precision=precision, counter_bytes=4)
    assert (held["parameter"], held["optimizer_state"]) == (expected.parameters, expected.optimizer_states)
    assert max(timeline.curves["gradient"]) == expected.gradients


@pytest.mark.parametrize(("ranks", "width"), list(itertools.product((1, 2, 8), (256, 4096))))
def test_computing_is_a_block_s_matrix_products_and_sending_over_it_the_page_s_formula(ranks, width):
    h, s, flops = width, 512, 300e12
    for b, speed in itertools.product((1, 64), RANK_LINKS.values()):
        took = block_seconds(b, s, h, ranks, flops, speed)
        products = [(b * s, h, 3 * h), (b * s, h, h), (b * s, h, 4 * h), (b * s, 4 * h, h)]
        products += [(b * s, h, s), (b * s, s, h)]  # scores and values, of all heads together
        assert took.computing == pytest.approx(3 * sum(2 * m * k * n for m, k, n in products) / ranks / flops)
        ratio = (ranks - 1) * 2 * flops / (9 * speed * (h + s / 6))
        assert took.sending / took.computing == pytest.approx(ratio, rel=1e-12)
        assert took.waiting_share == pytest.approx(ratio / (1 + ratio))
