"""Gradient accumulation's bytes: what a step of several micro-batches holds, in closed form and metered."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch

from memlab.book.predictions import stretches
from memlab.book.steps import metered_step
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_timeline import Meter, Timeline, imagine
from tests.harness import refusals, refused
from tests.memory_timeline_helpers import one_thread  # noqa: F401
from tests.test_memory_arithmetic import (
    BY_HAND,
    CASES,
    LLAMA,
    SHORT,
    Case,
    Run,
    rises_in_backward,
    watched_ledgers,
)
from tests.tiers import some

MANY_BIASES = {"layers": 30, "width": 8, "heads": 1, "vocabulary": 400, "context": 8, "precision": "autocast"}
DEEP_LLAMA = {**LLAMA, **SHORT, "layers": 4, "optimizer": "sgd"}
MORE = {
    "GPT, autocast, many blocks: the loss's forward decides": Case(**SHORT, **MANY_BIASES, optimizer="sgd"),
    "GPT, three blocks, FP32": Case(layers=3, implementation="foreach"),
    "GPT, three blocks, one of few tokens, BF16": Case(**SHORT, layers=3, precision="bf16", optimizer="sgd"),
    "GPT, master weights, fused, by hand": Case(**BY_HAND, layers=3, precision="mixed", implementation="fused"),
    "GPT on a GPU, master weights, fused, first step": Case(
        layers=3, precision="mixed", implementation="fused", first_step=True, hardware="gpu"
    ),
    "GPT on a GPU, autocast, fused, three blocks": Case(
        layers=3, precision="autocast", implementation="fused", hardware="gpu"
    ),
    "GPT on a GPU, few tokens, SGD: new gradients decide": Case(**SHORT, optimizer="sgd", hardware="gpu"),
    "Llama on a GPU, autocast, few tokens, SGD, four blocks": Case(**DEEP_LLAMA, precision="autocast", hardware="gpu"),
    "Llama on a GPU, BF16, few tokens, SGD, four blocks": Case(**DEEP_LLAMA, precision="bf16", hardware="gpu"),
    "Llama, few tokens, SGD, four blocks": Case(**DEEP_LLAMA),
}
CASES = CASES | MORE
UNTIED = {name: case for name, case in CASES.items() if not case.tied}  # what the book's own models are
PLAIN = list(MORE)[1:]
WAYS = list(  # the name of one case for every way in which the ops run
    {
        (c.family, c.precision, c.hardware, c.attention, c.dropout, c.tied, c.batch > 1 and c.heads > 1): name
        for name, c in CASES.items()
    }.values()
)


def hardware(case: Case):
    return imagine("H100-80GB") if case.hardware == "gpu" else contextlib.nullcontext()


@functools.cache
def predicted(case: Case, micro_batches: int = 2):
    options = ("precision", "optimizer", "implementation", "attention", "dropout", "hardware", "first_step")
    options += ("chunk_bytes",)
    options = {name: getattr(case, name) for name in options} | {"micro_batches": micro_batches}
    return training_step(case.model, case.batch, case.tokens, **options)


@functools.cache
def metered(case: Case, micro_batches: int = 2) -> Timeline:
    options = ("precision", "optimizer", "implementation", "first_step", "chunk_bytes")
    options += ("attention", "dropout") if case.family == "gpt" else ()
    options = {name: getattr(case, name) for name in options} | {"micro_batches": micro_batches}
    with hardware(case):
        return metered_step(case.model, case.batch, case.tokens, **options)


def categories_at_the_peak(timeline: Timeline) -> dict[str, int]:
    return {name: nbytes for name, nbytes in timeline.bytes_by_category(timeline.peak_event).items() if nbytes}


@functools.cache
def with_gradients_already_allocated(case: Case) -> Timeline:
    """The reference: one micro-batch has been run, nobody watching. Metered are a second one and the step."""
    with hardware(case):
        run = Run(case)
        x, y = run.inputs
        group = [(x, y), (x.clone(), y.clone())]
        mean = backward(run, *group[0])
        with Meter(run.model, run.optimizer, [*group, mean]) as meter:
            mean.add_(backward(run, *group[1]))
            run.optimizer.step()
            run.optimizer.zero_grad()
    return meter.timeline


def backward(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    share = loss_of(run, x, y) / 2
    share.backward()
    return share.detach().float()


def loss_of(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with run.autocast():
        return run.model(x, y)


SEVERAL = [(name, 2) for name in UNTIED] + [(name, k) for name in PLAIN for k in (3, 4)]


@some("name, micro_batches", SEVERAL, keep=21)
def test_the_peak_of_several_micro_batches_is_the_metered_one_in_every_category(name, micro_batches):
    timeline, step = metered(CASES[name], micro_batches), predicted(CASES[name], micro_batches)
    assert timeline.peak_bytes == step.peak_bytes
    assert categories_at_the_peak(timeline) == step.peak.by_category()


@some("name", WAYS, keep=8)
def test_a_later_micro_batch_is_one_with_gradients_already_allocated_at_every_moment(name):
    """What is the running sum of losses there is an input to the reference: 4 bytes."""
    case = CASES[name]
    timeline = with_gradients_already_allocated(case)
    assert timeline.peak_bytes == predicted(case).peak_bytes
    found = categories_at_the_peak(timeline)
    found |= {"input": found["input"] - 4, "activation": found.get("activation", 0) + 4}
    assert found == predicted(case).peak.by_category()
    for moment, (start, stop) in stretches(timeline, case.model).items():
        made = [i for i in range(max(start, 1), stop + 1) if timeline.events[i - 1].delta > 0]
        fullest = max(timeline.bytes_at(i) for i in made or [start - 1])  # SGD's step makes nothing
        assert fullest == predicted(case).moment(moment).nbytes, moment


@some("name", WAYS, keep=5)
def test_every_rise_of_a_later_backward_is_an_instant_of_the_arithmetic(name, monkeypatch):
    case = replace(CASES[name], layers=1)
    looked = watched_ledgers(monkeypatch)
    predicted.__wrapped__(case)
    timeline = with_gradients_already_allocated(case)
    rises, instants = rises_in_backward(timeline), iter(looked)
    assert len(rises) > 10
    assert [nbytes for nbytes in rises if nbytes not in instants] == []


@some("name", CASES, keep=12)
def test_from_two_on_the_number_of_micro_batches_costs_inputs_and_nothing_else(name):
    case = CASES[name]
    a_micro_batch = 2 * 8 * case.batch * case.tokens
    for k in (3, 1000):
        for moment, later in zip(predicted(case).moments, predicted(case, k).moments, strict=True):
            assert later.nbytes - moment.nbytes == (k - 2) * a_micro_batch
            assert later.of("input").nbytes == k * a_micro_batch


@some("name", PLAIN, keep=3)
def test_one_micro_batch_is_a_step_as_ever(name):
    case = CASES[name]
    assert predicted(case, 1) == case.predicted()
    assert metered(case, 1).peak_bytes == case.predicted().peak_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mixed", "autocast"])
def test_at_the_loss_a_second_micro_batch_costs_all_gradients_and_the_running_sum(precision):
    options = {"precision": precision, "implementation": "fused"}
    one, two = (training_step(Transformer(4, 64, 4, 500, 64), 2, 64, **options, micro_batches=k) for k in (1, 2))
    a_micro_batch = 2 * 8 * 2 * 64
    # under a GPU's autocast nll_loss's backward is the fullest op, when the gradient of the loss's share is there, too
    sums = 8 if precision == "autocast" else 4
    assert two.moment("loss").nbytes - one.moment("loss").nbytes == one.gradients.nbytes + sums + a_micro_batch


def test_where_tokens_are_few_and_the_vocabulary_large_accumulating_is_fuller_than_the_full_batch():
    """A later micro-batch makes the head's gradient a second time, beside the first; the full batch has one."""
    model, options = Transformer(2, 32, 4, 5000, 32), {"tokens": 2, "optimizer": "sgd"}
    full, accumulated = {"batch": 4}, {"batch": 1, "micro_batches": 4}
    costs = metered_step(model, **options, **accumulated).peak_bytes - metered_step(model, **options, **full).peak_bytes
    options["hardware"] = "cpu"
    step = training_step(model, **options, **accumulated)
    assert costs == step.peak_bytes - training_step(model, **options, **full).peak_bytes
    assert "new gradient of head.weight" in {term.name for term in step.peak}
    assert costs > 4 * 5000 * 32


def in_micro_batches(micro_batches, step=training_step):
    return lambda: step(Transformer(1, 8, 1, 5, 4), 1, 4, micro_batches=micro_batches)


REFUSALS = {
    "none": (in_micro_batches(0), ValueError, "expected micro_batches of at least 1, found 0"),
    "half of one": (in_micro_batches(2.5), TypeError, "expected micro_batches as an int, found 2.5"),
}


@refusals(REFUSALS)
def test_what_is_no_number_of_micro_batches_is_refused(call, error, words):
    refused(call, error, words)
