"""A checkpointed step in closed form against the meter: real ones on a CPU, imagined ones on a GPU."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch

from memlab.book.steps import Segment, build, checkpoint_blocks, metered_step
from memlab.gradient_checkpointing import best_segments
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_timeline import Timeline
from tests.harness import refused
from tests.test_gradient_accumulation_bytes import hardware
from tests.test_memory_arithmetic import BY_HAND, LARGE_VOCABULARY, LLAMA, SHORT, Case, watched_ledgers
from tests.tiers import some


@dataclass(frozen=True)
class Cut(Case):
    """A case whose blocks are checkpointed in segments."""

    segments: int = 1
    micro_batches: int = 1


SGD, GPU = {"optimizer": "sgd"}, {"hardware": "gpu"}
CASES = {
    "GPT, one block": Cut(layers=1, **SGD),
    "GPT, seven blocks in three, gradients there already": Cut(layers=7, segments=3, micro_batches=2, **SGD),
    "GPT, AdamW's loop, few tokens: the optimizer's step decides": Cut(**SHORT, segments=2),
    "GPT, first step, AdamW": Cut(layers=3, segments=2, first_step=True),
    "GPT, large vocabulary: the loss decides": Cut(**LARGE_VOCABULARY, batch=8, segments=2, **SGD),
    "GPT, large vocabulary, few tokens: the embeddings decide": Cut(**SHORT, **LARGE_VOCABULARY, segments=2, **SGD),
    "GPT, dropout, forward is fullest at the scores": Cut(dropout=0.1, tokens=12, layers=3, segments=2, **SGD),
    "GPT, BF16, dropout, forward is fullest at the values": Cut(
        width=96, heads=8, tokens=16, batch=3, precision="bf16", dropout=0.1, segments=2, **SGD
    ),
    "GPT, by hand, dropout": Cut(**BY_HAND, dropout=0.1, layers=3, segments=2, micro_batches=2, **SGD),
    "GPT, by hand, one sequence, one head": Cut(**BY_HAND, batch=1, heads=1, layers=3, segments=2, **SGD),
    "GPT, BF16, dropout": Cut(precision="bf16", dropout=0.1, layers=3, segments=2, **SGD),
    "GPT, master weights, fused": Cut(precision="mixed", implementation="fused", layers=3, segments=3, micro_batches=2),
    "Llama, the first segment lets the tables go": Cut(
        family="llama", layers=4, heads=1, hidden=16, batch=1, tokens=14, vocabulary=8, segments=4, **SGD
    ),
    "Llama, BF16: RMSNorm in FP32": Cut(**LLAMA, precision="bf16", layers=3, segments=2, **SGD),
    "Llama, BF16, every block": Cut(**LLAMA, precision="bf16", layers=3, segments=3, micro_batches=2, **SGD),
    "Llama, BF16, wide stream: RMSNorm's backward decides": Cut(
        family="llama", kv_heads=2, hidden=16, precision="bf16", vocabulary=16, layers=3, segments=2, **SGD
    ),
    "GPT on a GPU": Cut(**GPU, layers=3, segments=2, **SGD),
    "GPT on a GPU, dropout": Cut(**GPU, layers=3, segments=2, dropout=0.1, micro_batches=2, **SGD),
    "GPT on a GPU, master weights, fused": Cut(
        **GPU, layers=5, segments=4, precision="mixed", implementation="fused", micro_batches=8
    ),
    "Llama on a GPU, BF16": Cut(**GPU, **LLAMA, layers=5, segments=2, precision="bf16", **SGD),
    "Llama on a GPU, master weights, momentum": Cut(
        **GPU, **LLAMA, layers=3, segments=3, precision="mixed", optimizer="momentum", micro_batches=2
    ),
    "Llama on a GPU, FP32, AdamW": Cut(**GPU, family="llama", hidden=88, layers=3, segments=2),
}
AUTOCAST = {"precision": "autocast", "layers": 3, "segments": 2, **SGD}
WIDE = {"width": 128, "heads": 4, "layers": 8, "segments": 8, "batch": 1, "tokens": 16, "vocabulary": 16}
CASES |= {
    "GPT, autocast, dropout": Cut(**AUTOCAST, dropout=0.1),
    "GPT, autocast, few tokens: forward decides, for every weight has a copy": Cut(
        **AUTOCAST | WIDE | {"micro_batches": 2}
    ),
    "Llama, autocast": Cut(**AUTOCAST | LLAMA),
    "Llama, autocast, few tokens: the loss decides": Cut(**AUTOCAST | WIDE | LLAMA | {"micro_batches": 2}),
    "GPT on a GPU, autocast, by hand, dropout": Cut(**AUTOCAST, **GPU, **BY_HAND, dropout=0.1),
    "GPT on a GPU, autocast, few tokens: forward decides": Cut(**AUTOCAST | GPU | WIDE | {"micro_batches": 2}),
    "Llama on a GPU, autocast": Cut(**AUTOCAST | LLAMA | GPU, micro_batches=2),
}
WORDS = ("precision", "optimizer", "implementation", "first_step", "chunk_bytes", "micro_batches", "segments")


def predicted(case: Cut):
    words = (*WORDS, "attention", "dropout", "hardware")
    return training_step(case.model, case.batch, case.tokens, **{name: getattr(case, name) for name in words})


@functools.cache
def metered(case: Cut) -> Timeline:
    words = (*WORDS, *(("attention", "dropout") if case.family == "gpt" else ()))
    with hardware(case):
        return metered_step(case.model, case.batch, case.tokens, **{name: getattr(case, name) for name in words})


def by_category(nbytes: dict[str, int]) -> dict[str, int]:
    """Bytes of each category, activations and temporaries together.

    The meter tells these two by whether they wait for an op of backward, and a recomputation has such ops of its own.
    """
    both = nbytes.get("activation", 0) + nbytes.get("temporary", 0)
    others = ("parameter", "gradient", "optimizer_state", "input")
    return {name: nbytes.get(name, 0) for name in others} | {"activation or temporary": both}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_and_every_category_in_it_are_the_metered_ones(name):
    timeline, step = metered(CASES[name]), predicted(CASES[name])
    assert timeline.peak_bytes == step.peak_bytes
    found = timeline.bytes_by_category(timeline.peak_event)
    assert by_category(found) == by_category(step.peak.by_category())


@some("name", CASES, keep=22)
def test_activations_when_backward_starts_and_the_fullest_moment_of_forward_are_the_metered_ones(name):
    """Of one micro-batch: the first of several finds no running sum of losses yet. Forward without the loss."""
    case = replace(CASES[name], micro_batches=1)
    timeline, step = metered(case), predicted(case)
    backward = next(span.start for span in timeline.phases if span.phase == "backward")
    assert step.activations.nbytes == timeline.bytes_by_category(backward - 1)["activation"]
    module = lambda event: timeline.storages[event.storage].module  # noqa: E731
    made = [i for i, e in enumerate(timeline.events[:backward], 1) if e.delta > 0 and module(e).startswith("blocks.")]
    assert max(timeline.totals[: made[-1] + 1]) == step.moment("forward").nbytes


@some("name", CASES, keep=22)
def test_every_rise_of_the_metered_curve_is_an_instant_of_the_arithmetic(name, monkeypatch):
    """In backward and in what is run again there: of the only micro-batch, or of the last."""
    case = CASES[name]
    looked = watched_ledgers(monkeypatch)
    predicted(case)
    timeline = metered(case)
    end = [span for span in timeline.phases if span.phase == "backward"][-1].stop
    start = [span for span in timeline.phases if span.phase == "forward" and span.stop < end][-1].stop
    events = timeline.events[start:end]
    rises = [
        timeline.bytes_at(i)
        for i, (now, then) in enumerate(zip(events, events[1:], strict=False), start + 1)
        if now.phase in ("backward", "recompute") and now.delta > 0 > then.delta
    ]
    instants = iter(looked)
    assert len(rises) > 10
    assert [nbytes for nbytes in rises if nbytes not in instants] == []


def test_the_cases_peak_in_every_moment_that_a_checkpointed_step_can_peak_in():
    moments = {"forward", "loss", "backward of the embeddings", "optimizer step"}
    moments |= {"recomputation of a segment", "backward of a segment"}
    assert {predicted(case).peak.moment for case in CASES.values()} >= moments


@some("layers", [24, 12, 40], keep=1)
def test_the_best_number_for_the_whole_step_is_the_one_for_the_blocks_alone(layers):
    """Of a step with gradients already there. s and c come from the arithmetic itself."""
    model = Transformer(layers, 512, 8, 256, 512)
    options = {"precision": "bf16", "implementation": "fused", "micro_batches": 2}
    two, one = (training_step(replace(model, layers=n), 1, 512, **options).activations.nbytes for n in (2, 1))
    peaks = {k: training_step(model, 1, 512, segments=k, **options).peak_bytes for k in range(1, layers + 1)}
    assert min(peaks, key=peaks.get) == best_segments(layers, two - one, 512 * 512 * 2)


def test_segments_keep_the_models_parameters_in_their_order_and_its_loss():
    model = Transformer(5, 32, 4, 64, 32)
    plain, cut = build(model), build(model)
    checkpoint_blocks(cut, 2)
    assert [[len(segment.blocks) for segment in cut.blocks], list(map(type, cut.blocks))] == [[3, 2], [Segment] * 2]
    with torch.no_grad():
        for mine, theirs in zip(cut.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs)
    x, y = torch.randint(64, (2, 3, 32)).unbind()
    for network in (plain, cut):
        network(x, y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), cut.parameters(), strict=True))


MODEL = Transformer(3, 32, 4, 64, 32)
WRONG = {
    "none": (0, ValueError, "expected segments of at least 1, found 0"),
    "more than layers": (4, ValueError, "at most as many segments as layers (3), found 4; pick 1 to 3"),
    "a float": (2.0, TypeError, "expected segments as an int, found 2.0"),
}


@pytest.mark.parametrize("step", [training_step, metered_step])
@pytest.mark.parametrize(("segments", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_segments_are_refused_by_the_arithmetic_and_by_the_meter(segments, error, words, step):
    refused(lambda: step(MODEL, 1, 8, segments=segments), error, words)
