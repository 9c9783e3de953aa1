"""Memory arithmetic against the meter: real steps on a CPU, imagined ones on a GPU, and published models."""

import contextlib
import functools
import re
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from memlab.book.steps import build, metered_step
from memlab.book.steps import made as optimizer_made
from memlab.memory_arithmetic import PRESETS, Transformer, preset, training_step
from memlab.memory_arithmetic.ledger import CATEGORIES, Ledger, elements
from memlab.memory_timeline import Meter, Timeline, imagine
from memlab.units import format_bytes
from tests.harness import refusals, refused
from tests.memory_timeline_helpers import allocations, blocks, event_tree, one_thread, peak  # noqa: F401
from tests.tiers import some

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A training step that is both predicted and metered."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    context: int = 32
    vocabulary: int = 64
    batch: int = 4
    tokens: int = 32
    family: str = "gpt"
    kv_heads: int | None = None
    hidden: int | None = None
    tied: bool = False
    precision: str = "fp32"
    optimizer: str = "adamw"
    implementation: str | None = None
    attention: str = "fused"
    dropout: float = 0.0
    first_step: bool = False
    hardware: str = "cpu"
    chunk_bytes: int | str | None = "auto"

    @property
    def model(self) -> Transformer:
        return Transformer(
            self.layers,
            self.width,
            self.heads,
            self.vocabulary,
            self.context,
            self.kv_heads,
            self.hidden if self.family == "llama" else None,
            self.family,
            self.tied,
        )

    def predicted(self):
        options = ("precision", "optimizer", "implementation", "attention", "dropout", "hardware", "first_step")
        options = (*options, "chunk_bytes")
        return training_step(self.model, self.batch, self.tokens, **{name: getattr(self, name) for name in options})


LLAMA = {"family": "llama", "kv_heads": 2, "hidden": 88}
BY_HAND = {"attention": "by hand", "tokens": 32}
SHORT, LARGE_VOCABULARY = {"batch": 1, "tokens": 4}, {"vocabulary": 999}

CPU = {
    "GPT, fused attention, AdamW's default loop": Case(),
    "GPT, five blocks, so that gradients grow large": Case(layers=5, batch=1, tokens=8, optimizer="sgd"),
    "GPT, first step, a batch so small that the states decide": Case(**SHORT, first_step=True),
    "GPT, many tokens and a large vocabulary: the loss decides": Case(**LARGE_VOCABULARY, layers=1, batch=8),
    "GPT, large vocabulary, few tokens: the embedding's gradient decides": Case(
        **SHORT, **LARGE_VOCABULARY, optimizer="sgd"
    ),
    "GPT, few tokens: the for-loop's √v decides": Case(**SHORT, implementation="for-loop"),
    "GPT, few tokens: foreach's √v of all decide": Case(**SHORT, implementation="foreach"),
    "GPT, attention by hand, one sequence: bmm copies nothing": Case(**BY_HAND, dropout=0.1, batch=1, heads=8),
    "GPT, attention by hand, one head": Case(**BY_HAND, heads=1, dropout=0.1),
    "GPT, attention by hand of narrow heads: forward decides, where variables hold the scores": Case(
        **BY_HAND, width=8, batch=8, optimizer="sgd", vocabulary=16
    ),
    "GPT, the head is the token embedding": Case(tied=True, **LARGE_VOCABULARY),
    "GPT, the head is the token embedding, few tokens: three gradients of it at once": Case(
        **SHORT, **LARGE_VOCABULARY, tied=True, optimizer="sgd", dropout=0.1
    ),
    "GPT, BF16": Case(precision="bf16"),
    "GPT, BF16, dropout: attention in FP32": Case(precision="bf16", dropout=0.1),
    "GPT, BF16, foreach, few tokens": Case(**SHORT, precision="bf16", implementation="foreach"),
    "Llama, grouped keys": Case(**LLAMA),
    "Llama, as many keys as queries, one block": Case(family="llama", layers=1, hidden=None, optimizer="sgd"),
    "Llama, BF16: the CPU's RMSNorm works in FP32": Case(**LLAMA, precision="bf16"),
    "Llama, BF16, wide stream: RMSNorm's backward decides": Case(
        family="llama", kv_heads=2, hidden=16, precision="bf16", optimizer="sgd", vocabulary=16
    ),
    "Llama, the second block decides, for the first lets the rotary tables go": Case(
        family="llama", layers=4, width=32, heads=1, hidden=16, batch=1, tokens=14, vocabulary=8, optimizer="sgd"
    ),
    "GPT, master weights": Case(precision="mixed"),
    "GPT, master weights, small chunks in words, few tokens": Case(**SHORT, precision="mixed", chunk_bytes="4000 B"),
    "GPT, master weights, fused, first step": Case(**SHORT, precision="mixed", implementation="fused", first_step=True),
    "GPT, master weights, one chunk whatever its size": Case(**SHORT, width=256, precision="mixed", chunk_bytes=None),
    "GPT, master weights, SGD": Case(**SHORT, precision="mixed", optimizer="sgd", chunk_bytes=16_000),
    "GPT, master weights, the head is the token embedding, first step: the last chunk is not the fullest": Case(
        **SHORT, **LARGE_VOCABULARY, precision="mixed", tied=True, layers=1, first_step=True, chunk_bytes=130_000
    ),
    "GPT, master weights, the head is a chunk by itself, first step": Case(
        **SHORT, **LARGE_VOCABULARY, precision="mixed", first_step=True, chunk_bytes=10_000
    ),
    "GPT, master weights, momentum, a large head, first step": Case(
        **SHORT,
        width=16,
        heads=2,
        vocabulary=1001,
        precision="mixed",
        optimizer="momentum",
        first_step=True,
        chunk_bytes=4 * 16 * 600,
    ),
    "Llama, master weights, fused": Case(**LLAMA, **SHORT, precision="mixed", implementation="fused"),
    "GPT, autocast": Case(precision="autocast"),
    "GPT, autocast, by hand, dropout, many tokens": Case(**BY_HAND, precision="autocast", dropout=0.1, batch=8),
    "GPT, autocast, dropout: attention in FP32": Case(precision="autocast", dropout=0.1),
    "GPT, autocast, the head is the token embedding": Case(**LARGE_VOCABULARY, precision="autocast", tied=True),
    "Llama, autocast": Case(**LLAMA, precision="autocast"),
}

GPU = {
    "GPT on a GPU, FP32": Case(heads=2, batch=8),
    "GPT on a GPU, FP32, heads wider than flash attention takes": Case(layers=1, width=528, heads=2),
    "GPT on a GPU, master weights, the head is a chunk by itself": Case(
        **SHORT, **LARGE_VOCABULARY, precision="mixed", chunk_bytes=10_000
    ),
    "GPT on a GPU, master weights, the head is a chunk by itself, first step": Case(
        **SHORT, **LARGE_VOCABULARY, precision="mixed", first_step=True, chunk_bytes=60_000
    ),
    "GPT on a GPU, master weights, fused, first step in small chunks": Case(
        **SHORT, precision="mixed", implementation="fused", first_step=True, chunk_bytes=16_000
    ),
    "Llama on a GPU, master weights, momentum": Case(**LLAMA, **SHORT, precision="mixed", optimizer="momentum"),
    "GPT on a GPU, autocast, by hand: softmax in FP32": Case(**BY_HAND, precision="autocast", batch=8),
    "GPT on a GPU, autocast, the head is the token embedding": Case(
        **LARGE_VOCABULARY, precision="autocast", tied=True, optimizer="sgd"
    ),
    "Llama on a GPU, FP32, first step": Case(family="llama", hidden=88, batch=8, first_step=True, optimizer="sgd"),
    "Llama on a GPU, autocast": Case(**LLAMA, precision="autocast", batch=8, optimizer="momentum"),
}
GPU = {name: replace(case, hardware="gpu") for name, case in GPU.items()}
CASES = CPU | GPU

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(case: Case) -> torch.nn.Module:
    options = {"attention": case.attention, "dropout": case.dropout} if case.family == "gpt" else {}
    model = build(replace(case.model, tied=False), **options)
    if case.tied:
        model.head.weight = model.token_embedding.weight
    return model


class Run:
    """A case's model, optimizer and batch. `step()` is one training step, gradients are freed at its end."""

    def __init__(self, case: Case):
        torch.set_default_dtype(BF16 if case.precision in ("bf16", "mixed") else torch.float32)
        try:
            self.model = made(case)
        finally:
            torch.set_default_dtype(torch.float32)
        self.optimizer = optimizer_made(
            self.model.parameters(), case.optimizer, case.implementation, case.precision, case.chunk_bytes
        )
        x, y = torch.randint(case.vocabulary, (2, case.batch, case.tokens)).unbind()
        self.inputs = x.clone(), y.clone()
        device = "cuda" if case.hardware == "gpu" else "cpu"
        self.autocast = lambda: torch.autocast(device, dtype=BF16, enabled=case.precision == "autocast")
        if not case.first_step:
            self.step()

    def step(self) -> None:
        with self.autocast():
            loss = self.model(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@functools.cache
def metered(case: Case):
    """The timeline of the case's second step, or of its first."""
    with imagine("H100-80GB") if case.hardware == "gpu" else contextlib.nullcontext():
        run = Run(case)
        with Meter(run.model, run.optimizer, run.inputs) as meter:
            run.step()
    return meter.timeline


@each_case
def test_the_peak_and_every_category_in_it_and_activations_are_the_metered_ones(case):
    timeline, step = metered(case), case.predicted()
    assert timeline.peak_bytes == step.peak_bytes
    found = {name: nbytes for name, nbytes in timeline.bytes_by_category(timeline.peak_event).items() if nbytes}
    assert {"activation": 0} | step.peak.by_category() == found
    backward = next(span.start for span in timeline.phases if span.phase == "backward") - 1
    assert step.activations.nbytes == timeline.bytes_by_category(backward)["activation"]


def watched_ledgers(monkeypatch) -> list[int]:
    """A list that gets what a ledger holds at each instant that the arithmetic looks at."""
    looked = []
    look = Ledger.look
    monkeypatch.setattr(Ledger, "look", lambda self, *where: (looked.append(self.nbytes), look(self, *where)))
    return looked


def rises_in_backward(timeline: Timeline) -> list[int]:
    """What is held wherever backward's curve has a local top."""
    return [
        timeline.bytes_at(i)
        for i, (now, then) in enumerate(zip(timeline.events, timeline.events[1:], strict=False), 1)
        if now.phase == "backward" and now.delta > 0 > then.delta
    ]


@some("name", CASES, keep=30)
def test_every_rise_of_the_metered_curve_is_an_instant_of_the_arithmetic(name, monkeypatch):
    case = replace(CASES[name], layers=1)
    looked = watched_ledgers(monkeypatch)
    case.predicted()
    timeline = metered(case)
    rises, instants = rises_in_backward(timeline), iter(looked)
    assert len(rises) > 10
    assert [nbytes for nbytes in rises if nbytes not in instants] == []


IN_THE_ALLOCATORS_LOG = [
    name for name, case in CPU.items() if not case.first_step and case.predicted().peak.moment != "optimizer step"
]


@some("name", IN_THE_ALLOCATORS_LOG, keep=6)
def test_the_peak_is_the_one_in_the_allocators_own_log_with_nobody_watching(name):
    """Attention by hand has 8 bytes more a block: scores · d^-½ saves the number, as a tensor that no op returned."""
    case = CPU[name]
    run = Run(case)
    states = [value for state in run.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    before = sum(t.nbytes for t in [*run.model.parameters(), *states, *run.inputs])
    allocated = before + peak(blocks(allocations(event_tree(run.step)), without_scratch=True))
    assert allocated - case.predicted().peak_bytes == (8 * case.layers if case.attention == "by hand" else 0)


@some("name", PRESETS, keep=3)
def test_two_blocks_of_a_published_model_imagined_on_a_gpu_have_the_predicted_peak(name):
    sizes = replace(preset(name), layers=2)
    fields = ("layers", "width", "heads", "context", "vocabulary", "kv_heads", "hidden", "family", "tied")
    case = Case(
        **{name: getattr(sizes, name) for name in fields}, batch=2, tokens=1024, precision="bf16", hardware="gpu"
    )
    assert metered(case).peak_bytes == case.predicted().peak_bytes


def test_the_cases_peak_in_every_moment():
    backward = {f"backward of the {part}" for part in ("last block", "first block", "embeddings")}
    moments = {case.predicted().peak.moment for case in CASES.values()}
    assert moments == {"forward", "loss", "optimizer step"} | backward


def evaluated(formula: str) -> int:
    """The bytes that a formula's numbers give: "2·b·s·h × 4 B = 2·8·128·256 × 4"."""
    numbers = formula.partition(" = ")[2].replace("·", "*").replace("×", "*")
    assert re.fullmatch(r"[\d*+() ]+", numbers)
    return eval(numbers)


@each_case
def test_breakdowns_sum_to_their_terms_and_the_peak_is_the_largest(case):
    step = case.predicted()
    everything = [*step.moments, step.parameters, step.gradients, step.optimizer_states, step.activations]
    for breakdown in everything:
        assert breakdown.nbytes == sum(evaluated(term.formula) for term in breakdown)
        assert breakdown.nbytes == sum(breakdown.by_category().values())
        assert all(term.source and term.nbytes > 0 for term in breakdown)
        assert len({term.name for term in breakdown}) == len(breakdown)
    assert step.peak_bytes == step.peak.nbytes == max(moment.nbytes for moment in step.moments)
    assert step.moment(step.peak.moment) is step.peak
    assert step.gradients.nbytes == step.parameters.nbytes


def test_a_breakdown_prints_as_a_table_with_the_largest_term_first():
    peak_of_step = Case().predicted().peak
    title, first, *others = str(peak_of_step).splitlines()
    largest = max(peak_of_step, key=lambda term: term.nbytes)
    assert title == f"{peak_of_step.moment} ({peak_of_step.at}): {format_bytes(peak_of_step.nbytes)}"
    assert first.split(None, 2)[:2] == format_bytes(largest.nbytes).split() and largest.formula in first
    assert len(others) == len(peak_of_step) - 1


@some("case", CASES.values(), keep=20)
def test_every_block_adds_the_same(case):
    peaks, activations = [], []
    for layers in (10, 20, 30, 1000):
        step = replace(case, layers=layers).predicted()
        activations.append(step.activations.nbytes)
        peaks.append(step.peak_bytes)
    assert activations[2] - activations[1] == activations[1] - activations[0]
    assert activations[3] - activations[2] == 97 * (activations[1] - activations[0])
    assert peaks == sorted(peaks)


def test_a_gpt_blocks_activations_are_those_of_korthikanti_and_others():
    def of_a_block(**options):
        sizes = {"width": 64, "heads": 4, "vocabulary": 128, "context": 96}
        two, one = (
            training_step(Transformer(layers, **sizes), 3, 96, precision="bf16", **options) for layers in (2, 1)
        )
        return two.activations.nbytes - one.activations.nbytes

    s, b, h, a = 96, 3, 64, 4
    statistics, causal_mask, fused = 16 * s * b, s * s, 4 * a * s * b + 16
    by_hand = of_a_block(attention="by hand", dropout=0.1)
    assert by_hand == 34 * s * b * h + 5 * a * s * s * b + statistics + causal_mask
    assert of_a_block() == 32 * s * b * h + statistics + fused
    assert of_a_block(dropout=0.1) == 34 * s * b * h + statistics + fused


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [
        ({"optimizer": "momentum"}, 4 + 4 + 4),
        ({}, 4 + 4 + 8),
        ({"precision": "bf16", "optimizer": "sgd"}, 2 + 2),
        ({"precision": "mixed"}, 2 + 2 + 4 + 8),
        ({"precision": "autocast"}, 4 + 4 + 8),
    ],
)
def test_weights_gradients_and_states_take_the_published_bytes_a_parameter(options, bytes_a_parameter):
    model = preset("Llama-2 7B")
    step = training_step(model, 1, 128, implementation="fused", **options)
    counters = 4 * model.parameter_tensors if options.get("optimizer", "adamw") == "adamw" else 0
    static = step.parameters.nbytes + step.gradients.nbytes + step.optimizer_states.nbytes
    assert static == bytes_a_parameter * model.parameters + counters


@pytest.mark.parametrize(("implementation", "bytes_a_parameter"), [("foreach", 10), ("fused", 8)])
def test_a_bf16_adamw_step_on_a_gpu_peaks_at_ten_bytes_a_parameter_or_eight(implementation, bytes_a_parameter):
    model = preset("Llama-3 8B")
    step = training_step(model, 1, 16, precision="bf16", implementation=implementation)
    optimizer_step = step.moment("optimizer step")
    rest = optimizer_step.nbytes - bytes_a_parameter * model.parameters
    assert rest == 2 * 16 * 8 + 2 + (4 * model.parameter_tensors if implementation == "fused" else 0)


def test_adamws_step_counters_lie_in_main_memory_unless_it_is_fused():
    model = preset("GPT-2 small")
    for implementation, nbytes in (("foreach", 4 * 148), ("for-loop", 4 * 148), ("fused", 0)):
        assert training_step(model, 1, 8, implementation=implementation).in_main_memory.nbytes == nbytes
    assert training_step(model, 1, 8, hardware="cpu").in_main_memory.nbytes == 0


PUBLISHED = {
    "GPT-2 small": 124_439_808,
    "GPT-2 medium": 354_823_168,
    "GPT-2 large": 774_030_080,
    "GPT-2 XL": 1_557_611_200,
    "Llama-2 7B": 6_738_415_616,
    "Llama-2 70B": 68_976_648_192,
    "Llama-3 8B": 8_030_261_248,
    "Llama-3 70B": 70_553_706_496,
    "GPT-3 175B": 96 * (12 * 12_288**2 + 13 * 12_288) + (50_257 + 2048) * 12_288 + 2 * 12_288,  # sizes of its paper
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_preset_has_the_published_number_of_parameters(name, parameters):
    assert preset(name).parameters == parameters


@pytest.mark.parametrize("case", [Case(), Case(layers=3, tied=True), Case(**LLAMA)], ids=["GPT", "tied GPT", "Llama"])
def test_every_parameter_tensor_has_the_size_and_the_place_of_the_models_own(case):
    expected = [(name, p.numel()) for name, p in made(case).named_parameters()]
    found = [(name, elements(size, case.model.symbols)) for name, size in case.model.tensors.items()]
    assert found == expected
    assert case.model.parameters == sum(numel for _, numel in expected)


def step_of(of=training_step, *, sizes=None, **options):
    """A step of a small model of these sizes, with these options."""
    return lambda: of(**{"model": Transformer(**SIZES | (sizes or {})), "batch": 1, "tokens": 8} | options)


LLAMA_SIZES = {"family": "llama"}
SIZES = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 64, "context": 32}


WRONG = {
    "no layers": ({"sizes": {"layers": 0}}, ValueError, "expected layers of at least 1, found 0"),
    "a true vocabulary": ({"sizes": {"vocabulary": True}}, TypeError, "expected vocabulary as an int, found True"),
    "five heads": ({"sizes": {"heads": 5}}, ValueError, "5 heads cannot share a width of 32; …(1, 2, 4, 8, 16, 32)"),
    "BERT": ({"sizes": {"family": "bert"}}, ValueError, "family to be one of 'gpt', 'llama'; found 'bert'"),
    "three keys": (
        {"sizes": LLAMA_SIZES | {"kv_heads": 3}}, ValueError, "3 key-value heads cannot serve 4 heads; …(1, 2, 4)",
    ),
    "a GPT's grouped keys": ({"sizes": {"kv_heads": 2}}, ValueError, "grouped keys are for family='llama'"),
    "odd rotations": ({"sizes": LLAMA_SIZES | {"heads": 32}}, ValueError, "rotary positions turn pairs of features"),
    "no token": ({"tokens": 0}, ValueError, "expected tokens of at least 1, found 0"),
    "beyond the context": ({"tokens": 33}, ValueError, "expected at most 32 tokens (the context), found 33"),
    "FP8": ({"precision": "fp8"}, ValueError, "one of 'fp32', 'bf16', 'mixed', 'autocast'; found 'fp8'"),
    "plain Adam": ({"optimizer": "adam"}, ValueError, "one of 'sgd', 'momentum', 'adamw'; found 'adam'"),
    "a loop": ({"implementation": "loop"}, ValueError, "implementation to be one of …'for-loop', …; found 'loop'"),
    "half a byte": ({"chunk_bytes": 0.5}, TypeError, "a size as int …found 0.5; or pass 'auto', or None for no limit"),
    "no byte": ({"chunk_bytes": 0}, ValueError, "chunk_bytes of at least 1, 'auto', or None for no limit; found 0"),
    "flash": ({"attention": "flash"}, ValueError, "attention to be one of 'fused', 'by hand'; found 'flash'"),
    "a TPU": ({"hardware": "tpu"}, ValueError, "hardware to be one of 'gpu', 'cpu'; found 'tpu'"),
    "all dropped": ({"dropout": 1.0}, ValueError, "as a probability from 0 up to, not including, 1; found 1.0"),
    "a name": ({"model": "GPT-2 small"}, TypeError, "expected model as a Transformer, found 'GPT-2 small'; preset("),
    "perhaps the first": ({"first_step": 1}, TypeError, "expected first_step as True or False, found 1"),
    "a Llama's dropout": ({"sizes": LLAMA_SIZES, "dropout": 0.1}, ValueError, "no dropout"),
    "a Llama by hand": ({"sizes": LLAMA_SIZES, "attention": "by hand"}, ValueError, "use family='gpt'"),
    "unread grouped keys": ({"sizes": LLAMA_SIZES | {"kv_heads": 2}}, ValueError, "reads no grouped keys"),
    "heads of 4": (
        {"sizes": {"heads": 8}, "precision": "bf16"}, ValueError, "a multiple of 8 wide, 256 at most; found 4",
    ),
    "heads of 2": ({"sizes": {"heads": 16}}, ValueError, "heads of a multiple of 4 wide; found 2"),
    "heads of 1 by hand": (
        {"sizes": {"heads": 32}, "attention": "by hand"}, ValueError, "heads of 2 features or more, found 32 heads",
    ),
    "one token by hand": ({"tokens": 1, "attention": "by hand"}, ValueError, "counted for 2 tokens or more, found 1"),
    "one token in BF16": (
        {"tokens": 1, "precision": "bf16"}, ValueError, "fused attention in bf16 is counted for 2 tokens or more",
    ),
}  # fmt: skip
METERED_TOO = ("no token", "a name", "all dropped", "perhaps the first")
METERED_TOO += ("plain Adam", "a loop", "half a byte", "no byte")
REFUSALS = {name: (step_of(**options), *expected) for name, (options, *expected) in WRONG.items()} | {
    f"{name}, metered": (step_of(metered_step, **WRONG[name][0]), *WRONG[name][1:]) for name in METERED_TOO
}
REFUSALS |= {
    "a preset's nickname": (lambda: preset("llama3-8b"), ValueError, "found 'llama3-8b'; did you mean 'Llama-3 8B'"),
    "a list of presets": (lambda: preset(["Llama-3 8B"]), ValueError, "the name of a preset, found ['Llama-3 8B']"),
    "an unknown category": (
        lambda: Case().predicted().peak.of("gradients"), ValueError, "one of 'parameter', …; found 'gradients'",
    ),
    "an unknown moment": (lambda: Case().predicted().moment("lunch"), KeyError, "'loss'"),
}  # fmt: skip


@refusals(REFUSALS)
def test_what_has_no_prediction_is_refused_with_what_is_allowed(call, error, words):
    refused(call, error, words)


EDGES = {
    "one token": Case(tokens=1),
    "one token in BF16": Case(tokens=1, precision="bf16"),
    "one token on a GPU": Case(tokens=1, hardware="gpu"),
    "heads of one feature": Case(width=8, heads=8),
    "one head of one feature by hand": Case(**BY_HAND, width=1, heads=1),
}


@pytest.mark.parametrize("case", EDGES.values(), ids=EDGES)
def test_what_is_refused_of_some_kernels_is_counted_of_those_that_take_it(case):
    assert metered(case).peak_bytes == case.predicted().peak_bytes


@pytest.mark.parametrize(
    ("card", "heads", "more"),
    [
        ("H200-141GB", 4, "nothing"),
        ("A100-80GB", 4, "8 bytes"),
        ("RTX4090-24GB", 2, "8 bytes"),
        ("T4-16GB", 4, "scores"),
    ],
)
def test_before_hopper_attention_in_16_bits_keeps_more_and_before_ampere_its_scores(card, heads, more):
    model, batch, tokens = Transformer(3, 192 * heads, heads, 64, 32), 2, 32
    with imagine(card):
        timeline = metered_step(model, batch, tokens, precision="bf16").on(f"imagined {card}")
    start = next(span.start for span in timeline.phases if span.phase == "backward") - 1
    predicted = training_step(model, batch, tokens, precision="bf16").activations.nbytes
    found = timeline.bytes_by_category(start)["activation"] - predicted
    if more == "scores":
        assert found >= model.layers * 2 * batch * heads * tokens * tokens
    else:
        assert found == model.layers * {"nothing": 0, "8 bytes": 8}[more]


def test_a_category_that_no_term_has_is_no_breakdown_of_nothing():
    peak_of_step = Case(optimizer="sgd").predicted().peak
    found = {name: peak_of_step.of(name).nbytes for name in CATEGORIES}
    assert found == dict.fromkeys(CATEGORIES, 0) | peak_of_step.by_category()


def test_the_arithmetic_runs_where_there_is_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from memlab.memory_arithmetic import preset, training_step\n"
        "print(training_step(preset('GPT-2 small'), 8, 1024, precision='autocast').peak_bytes)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(found) == training_step(preset("GPT-2 small"), 8, 1024, precision="autocast").peak_bytes
