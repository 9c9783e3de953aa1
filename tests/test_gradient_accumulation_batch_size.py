"""The largest batch: predicted within one example, proved on both sides of the budget, nothing left of a failure."""

import contextlib
import gc
import sys
import weakref
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from memlab.book.steps import build, made
from memlab.book.workloads import LSTM, MLP, ConvNet
from memlab.gradient_accumulation.batch_size import find_batch_size, is_out_of_memory, peak_of
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_timeline import Event, Line, Meter, Storage, Timeline, imagine
from memlab.mixed_precision import MasterWeights
from memlab.units import KiB, MiB

TINY = Transformer(layers=3, width=32, heads=4, vocabulary=256, context=64)
WIDE = Transformer(layers=2, width=128, heads=4, vocabulary=256, context=16)
MANY_WORDS = Transformer(layers=2, width=32, heads=4, vocabulary=4096, context=32)
LLAMA = Transformer(layers=3, width=32, heads=4, kv_heads=2, hidden=96, vocabulary=256, context=64, family="llama")


@pytest.fixture(autouse=True)
def quick():
    """A search collects garbage after every step, and a test session holds a million objects."""
    gc.freeze()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.unfreeze()


def moments(*lines):
    """A step that holds fixed + slope × n bytes at one moment after another, counting the sizes it was run with."""

    def step(n):
        step.sizes.append(n)
        for fixed, slope in lines:
            torch.empty(fixed + slope * n, dtype=torch.uint8)

    step.sizes = []
    return step


def largest(lines, budget):
    """In closed form: the largest n for which every line is within the budget."""
    return min((budget - fixed) // slope for fixed, slope in lines if slope)


def metered(step, n, model=None, optimizer=None):
    with Meter(model, optimizer) as meter:
        step(n)
    return meter.timeline.peak_bytes


def is_largest(size, step, budget, model=None, optimizer=None):
    """Whether that size fits and one more does not, by meters of our own; peaks grow with the size."""
    return metered(step, size, model, optimizer) <= budget < metered(step, size + 1, model, optimizer)


def trainer(model, batch, optimizer=torch.optim.AdamW, **options):
    """(step, model, optimizer) that lives on from step to step."""
    optimizer = optimizer(model.parameters(), lr=1e-3, **options)

    def step(n):
        model(*batch(n)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def transformer(sizes, precision="fp32", implementation=None, **options):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if precision in ("bf16", "mixed") else torch.float32)
    try:
        model = build(sizes, **options)
    finally:
        torch.set_default_dtype(usual)
    optimizer = made(model.parameters(), "adamw", implementation, precision)

    def step(n):
        x, y = (torch.randint(sizes.vocabulary, (n, sizes.context)) for _ in range(2))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


# ---- the size


@pytest.mark.parametrize(
    ("sizes", "budget", "options"),
    [
        (TINY, 4 * MiB, {}),
        (TINY, 14 * MiB, {}),
        (TINY, 2 * MiB, {"precision": "bf16"}),
        (TINY, 4 * MiB, {"precision": "mixed"}),
        (TINY, 4 * MiB, {"precision": "autocast"}),
        (TINY, 8 * MiB, {"attention": "by hand", "dropout": 0.1}),
        (WIDE, 9 * MiB, {"implementation": "foreach"}),
        (WIDE, 12 * MiB, {"implementation": "foreach"}),
        (MANY_WORDS, 20 * MiB, {}),
        (LLAMA, 8 * MiB, {}),
    ],
    ids=str,
)
def test_arithmetic_and_small_steps_predict_the_largest_batch_of_a_transformer(sizes, budget, options):
    step, model, optimizer = transformer(sizes, **options)

    def predict(n):
        return training_step(sizes, n, sizes.context, hardware="cpu", **options).peak_bytes

    found = find_batch_size(step, budget, model=model, optimizer=optimizer, predict=predict)
    by_lines = find_batch_size(step, budget, model=model, optimizer=optimizer)
    assert found.size == by_lines.size and is_largest(found.size, step, budget, model, optimizer)
    for prediction in (found, by_lines):
        assert abs(prediction.predicted - found.size) <= 1
        assert prediction.peak_bytes == metered(step, found.size, model, optimizer)
        assert prediction.next_bytes == metered(step, found.size + 1, model, optimizer)
        assert set(prediction.tried) <= {1, 2, 3, 6, found.size, found.size + 1}


@pytest.mark.parametrize("budget", [MiB, 3 * MiB, 8 * MiB], ids=lambda nbytes: f"{nbytes // MiB} MiB")
@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: MLP(32, 64), lambda n: (torch.randn(n, 32), torch.randint(16, (n,)))),
        (lambda: ConvNet(8), lambda n: (torch.randn(n, 3, 16, 16), torch.randint(10, (n,)))),
        (lambda: LSTM(width=32), lambda n: (torch.randint(256, (n, 8)), torch.randint(256, (n, 8)))),
    ],
    ids=["MLP", "ConvNet", "LSTM"],
)
def test_small_steps_predict_the_largest_batch_of_a_model_without_arithmetic(make, batch, budget):
    step, model, optimizer = trainer(make(), batch)
    found = find_batch_size(step, budget, model=model, optimizer=optimizer)
    assert abs(found.predicted - found.size) <= 1 and is_largest(found.size, step, budget, model, optimizer)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_small_steps_predict_the_largest_batch_of_transformers_models(family):
    transformers = pytest.importorskip("transformers")
    kind, config = {"gpt2": ("GPT2LMHeadModel", "GPT2Config"), "llama": ("LlamaForCausalLM", "LlamaConfig")}[family]
    sizes = {
        "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32},
        "llama": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
    }[family]
    config = getattr(transformers, config)(vocab_size=128, bos_token_id=0, eos_token_id=1, **sizes)
    model = getattr(transformers, kind)(config)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(n):
        x = torch.randint(128, (n, 32))
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = find_batch_size(step, 3 * MiB, model=model, optimizer=optimizer)
    assert abs(found.predicted - found.size) <= 1 and is_largest(found.size, step, 3 * MiB, model, optimizer)


@settings(max_examples=25, deadline=None)
@given(
    lines=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 300)), min_size=1, max_size=6),
    slope=st.integers(1, 300),
    budget=st.integers(21_000, 200_000),
)
def test_any_moments_are_found_exactly_in_two_runs_after_the_small_ones(lines, slope, budget):
    lines.append((10, slope))
    true = largest(lines, budget)
    found = find_batch_size(moments(*lines), budget, most=10**6)
    assert found.predicted == found.size == true
    assert list(found.tried) == sorted({1, 2, 3, true, true + 1})


def test_the_line_of_two_peaks_would_promise_many_times_too_much():
    """The optimizer's moment is the fullest for few examples, and the loss for many."""
    step = moments((50_000, 1), (1_000, 500))
    found = find_batch_size(step, 100_000)
    (a, low), (b, high) = list(found.tried.items())[:2]
    assert a + (100_000 - low) * (b - a) // (high - low) == 50_000
    assert found.predicted == found.size == 198
    assert max(step.sizes) == 199


def test_a_peak_equal_to_the_budget_fits_and_a_byte_less_does_not():
    step = moments((1000, 10))
    assert find_batch_size(step, 1000 + 10 * 77).size == 77
    assert find_batch_size(step, 1000 + 10 * 77 - 1).size == 76


def test_the_second_step_counts_in_which_the_optimizer_has_states():
    model = nn.Linear(64, 64)
    step, model, optimizer = trainer(model, lambda n: (torch.randn(n, 64),))
    model.forward = lambda x: F.linear(x, model.weight, model.bias).sum()
    found = find_batch_size(step, 100 * KiB, model=model, optimizer=optimizer)
    weights = 4 * (64 * 64 + 64)
    assert found.tried[1] >= 4 * weights
    assert is_largest(found.size, step, 100 * KiB, model, optimizer)


def test_two_micro_batches_find_the_size_of_any_number_of_them():
    """A micro-batch runs with the gradients of those before it allocated: so the second takes more than the first."""
    sizes = {}
    for micro_batches in (1, 2, 5):
        model = MLP(32, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(n, model=model, optimizer=optimizer, micro_batches=micro_batches):
            for _ in range(micro_batches):
                (model(torch.randn(n, 32), torch.randint(16, (n,))) / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()

        sizes[micro_batches] = find_batch_size(step, 500 * KiB, model=model, optimizer=optimizer).size
    assert sizes[1] > sizes[2] == sizes[5]


# ---- the search, where a prediction is wrong


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.9, 1.1, 3.0, 100.0])
def test_a_wrong_prediction_is_told_and_mended_and_never_run_far_over_the_budget(factor):
    step = moments((5_000, 100), (20_000, 40))
    found = find_batch_size(step, 100_000, predict=lambda n: factor * (5_000 + 100 * n))
    assert found.size == 950
    assert max(step.sizes) == 951 and len(step.sizes) <= 8
    if factor > 1.05 or factor < 0.95:
        assert abs(found.predicted - 950) > 1


@pytest.mark.parametrize("number", [np.int64, np.float32, Fraction])
def test_a_prediction_may_be_any_real_number(number):
    assert find_batch_size(moments((0, 10)), 1234, predict=lambda n: number(10 * n)).predicted == 123


def test_prediction_comes_before_anything_runs():
    step = moments((0, 10))
    asked = []

    def predict(n):
        assert step.sizes == []
        asked.append(n)
        return 10 * n

    found = find_batch_size(step, 1234, predict=predict)
    assert found.predicted == found.size == 123 and 123 in asked and 124 in asked


def by_size(peak_of_size):
    """A step whose peak is any function of the size, so none of the lines that are expected."""

    def step(n):
        step.sizes.append(n)
        torch.empty(peak_of_size(n), dtype=torch.uint8)

    step.sizes = []
    return step


CURVES = {
    "quadratic": lambda n: 100 + n * n,
    "root": lambda n: 100 + round(1000 * n**0.5),
    "steps of 64": lambda n: 1000 * -(-n // 64),
    "a jump": lambda n: 10 * n + 30_000 * (n > 700),
    "flat, then steep": lambda n: max(10_000, 50 * n - 20_000),
}


@pytest.mark.parametrize("budget", [11_111, 30_000, 41_000])
@pytest.mark.parametrize("curve", CURVES)
def test_a_growing_peak_of_any_form_is_found_in_few_runs(curve, budget):
    step = by_size(CURVES[curve])
    found = find_batch_size(step, budget)
    true = max(n for n in range(1, 3000) if CURVES[curve](n) <= budget)
    assert found.size == true
    assert found.peak_bytes == CURVES[curve](true) and found.next_bytes == CURVES[curve](true + 1)
    assert len(step.sizes) <= 30
    if curve != "a jump":  # which no smaller size foretells
        assert max(step.sizes) <= 2 * true


def test_steps_that_run_other_ops_at_other_sizes_are_approached_by_doubling():
    def step(n):
        step.sizes.append(n)
        for _ in range(n):
            torch.empty(10, dtype=torch.uint8)
        torch.empty(50 * n + 1000 * (n > 40), dtype=torch.uint8)

    step.sizes = []
    found = find_batch_size(step, 4000)
    assert found.size == 60
    assert all(later <= 2 * max(step.sizes[:i]) for i, later in enumerate(step.sizes) if i)


def test_an_error_of_one_example_costs_one_run_more():
    """What the hardware takes beyond the figures: the step of the size predicted runs out of memory."""
    limit = 100 * 949

    def step(n):
        step.sizes.append(n)
        if 100 * n > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        torch.empty(100 * n, dtype=torch.uint8)

    step.sizes = []
    found = find_batch_size(step, 95_000)
    assert (found.predicted, found.size, found.next_bytes) == (950, 949, None)
    assert step.sizes == [1, 1, 2, 3, 950, 949]
    limit, step.sizes = 100 * 900, []
    assert find_batch_size(step, 95_000).size == 900
    assert len(step.sizes) <= 4 + 12


# ---- its ends


def test_everything_up_to_most_fits_and_no_more_is_run():
    for most in (1, 2, 3, 4, 100):
        step = moments((0, 10))
        found = find_batch_size(step, 10_000, most=most)
        assert (found.size, found.predicted, found.peak_bytes, found.next_bytes) == (most, most, 10 * most, None)
        assert max(step.sizes) == most and len(step.sizes) <= 5
        assert f"{most} (predicted: {most})" in str(found) and "that is the most to be tried" in str(found)


@pytest.mark.parametrize("true", [1, 2, 3, 4, 5])
def test_a_budget_of_few_examples(true):
    step = moments((7, 10))
    found = find_batch_size(step, 7 + 10 * true + 3)
    assert (found.size, found.next_bytes) == (true, 7 + 10 * (true + 1))
    assert found.predicted == true
    assert max(step.sizes) <= true + 1


def test_one_example_that_does_not_fit_is_an_error_with_both_figures():
    with pytest.raises(
        ValueError,
        match="expected a step of batch size 1 to fit 1.0 KiB, found that it takes 2.0 KiB; raise the budget",
    ):
        find_batch_size(moments((0, 2048)), "1 KiB")
    with pytest.raises(ValueError, match="batch size 5 to fit 1.0 KiB, found that it runs out of memory") as caught:
        find_batch_size(lambda n: torch.empty(2**60), "1 KiB", least=5)
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_the_optimizers_states_are_counted_before_one_example_is_said_to_fit():
    """The first step of one example fits; the second, in which the states wait from the start, does not."""
    model = MLP(32, 64)
    step, model, optimizer = trainer(model, lambda n: (torch.randn(n, 32), torch.randint(16, (n,))), fused=True)
    first = metered(step, 1, model, optimizer)
    second = metered(step, 4096, model, optimizer)
    step, model, optimizer = trainer(MLP(32, 64), lambda n: (torch.randn(4096, 32), torch.randint(16, (4096,))))
    assert first < (budget := second - 8 * KiB)
    with pytest.raises(ValueError, match="expected a step of batch size 1 to fit"):
        find_batch_size(step, budget, model=model, optimizer=optimizer)


def test_a_step_that_cannot_take_one_example_begins_with_least():
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(n):
        model(torch.randn(n, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = find_batch_size(step, 100 * KiB, model=model, optimizer=optimizer, least=2)
    assert min(found.tried) == 2 and found.size == found.predicted
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        find_batch_size(step, 100 * KiB, model=model, optimizer=optimizer)


# ---- nothing stays behind


class Watched:
    """Remembers every storage that it is shown by a weak reference alone."""

    def __init__(self):
        self.storages = []

    def __call__(self, tensor):
        self.storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def alive(self):
        return sum(storage() is not None for storage in self.storages)


FAILURES = {
    "CUDA's": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    "the CPU allocator's": lambda: torch.empty(2**60, dtype=torch.uint8),
    "Python's": lambda: bytearray(2**62),
    "another accelerator's": lambda: (_ for _ in ()).throw(RuntimeError("MPS backend out of memory (MPS allocated)")),
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("where", ["forward", "backward", "in a cycle"])
def test_of_a_step_out_of_memory_nothing_stays(kind, where):
    watched = Watched()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(watched(x * 2))
            return x * 3

        @staticmethod
        def backward(ctx, gradient):
            watched(gradient * ctx.saved_tensors[0])
            FAILURES[kind]()

    def step(n):
        x = watched(torch.zeros(n, 100, requires_grad=True))
        y = watched(x + 1)
        if n > 20:
            if where == "in a cycle":
                cycle = [y]
                cycle.append(cycle)
            if where == "backward":
                Fails.apply(y).sum().backward()
            FAILURES[kind]()
        y.sum().backward()

    found = find_batch_size(step, 10 * MiB, most=64)
    assert found.size == 20 and found.next_bytes is None and found.tried[21] is None
    assert len(watched.storages) > 10 and watched.alive() == 0
    assert sys.exc_info() == (None, None, None)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_an_error_that_is_being_handled_when_the_search_begins_is_not_chained_to_the_failures():
    watched = Watched()

    def step(n):
        watched(torch.empty(n))
        if n > 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    try:
        raise KeyError("before")
    except KeyError as error:
        assert find_batch_size(step, 10 * MiB).size == 9
        assert error.__context__ is None
        assert watched.alive() == 0


def failing_beyond(limit, step, optimizer):
    """The same step, out of memory in the optimizer when every gradient is there, for more than `limit` examples."""

    def limited(n):
        fail = optimizer.register_step_pre_hook(lambda *_: torch.empty(2**60)) if n > limit else None
        try:
            step(n)
        finally:
            if fail is not None:
                fail.remove()

    return limited


def test_a_failed_step_leaves_no_gradients_but_those_that_were_there():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(n):
        model[1](model[0](torch.ones(n, 8))).sum().backward()
        optimizer.step()
        model[0].zero_grad(set_to_none=False)
        model[1].zero_grad()

    size = find_batch_size(step, 10 * KiB, model=model, optimizer=optimizer).size
    found = find_batch_size(failing_beyond(size, step, optimizer), 10 * KiB, model=model, optimizer=optimizer)
    assert list(found.tried)[-1] == size + 1 and found.next_bytes is None
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]


def test_a_failed_steps_gradients_are_not_counted_in_the_next():
    batch = lambda n: (torch.randn(n, 64), torch.randint(16, (n,)))  # noqa: E731
    step, model, optimizer = trainer(MLP(64, 256), batch, torch.optim.SGD)
    size = find_batch_size(step, 2 * MiB, model=model, optimizer=optimizer).size
    found = find_batch_size(failing_beyond(size - 1, step, optimizer), 2 * MiB, model=model, optimizer=optimizer)
    assert list(found.tried)[-2:] == [size, size - 1] and found.size == size - 1
    assert found.peak_bytes == metered(step, size - 1, model, optimizer)


def test_garbage_of_one_step_is_gone_before_the_next():
    watched = Watched()

    def step(n):
        assert watched.alive() == 0
        cycle = [watched(torch.empty(100 * n))]
        cycle.append(cycle)

    gc.disable()
    try:
        find_batch_size(step, 100 * KiB)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, ValueError("no"), RuntimeError("shapes"), AssertionError], ids=str
)
def test_other_errors_pass_through_untouched(error):
    def step(n):
        if n > 3:
            raise error

    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        find_batch_size(step, MiB)
    assert caught.value.__context__ is None
    assert isinstance(error, type) or caught.value is error
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1).step()


def test_hooks_are_as_before():
    from torch.optim import optimizer as optim

    before = len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks)
    find_batch_size(moments((0, 10)), 1000)
    with contextlib.suppress(ValueError):
        find_batch_size(moments((0, 10)), 1)
    assert before == (len(optim._global_optimizer_pre_hooks), len(optim._global_optimizer_post_hooks))


def test_what_means_out_of_memory():
    assert all(map(is_out_of_memory, [MemoryError(), torch.OutOfMemoryError("x"), RuntimeError("CUDA out of memory")]))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


# ---- imagined hardware


def test_an_imagined_card_costs_no_memory_and_its_budget_gives_no_next_figure():
    sizes = Transformer(layers=1, width=1024, heads=16, vocabulary=32000, context=1024)
    predict = lambda n: training_step(sizes, n, 1024).peak_bytes  # noqa: E731
    with imagine("H100-80GB") as gpu:
        step, model, optimizer = transformer(sizes)
        found = find_batch_size(step, gpu.capacity_bytes, model=model, optimizer=optimizer, predict=predict)
    assert found.size == found.predicted
    assert found.peak_bytes == predict(found.size) <= gpu.capacity_bytes < found.next_bytes == predict(found.size + 1)

    def builds(n):
        step, model, optimizer = transformer(sizes)
        step(n)
        step(n)

    with imagine("H100-80GB", gpu.capacity_bytes) as full:
        again = find_batch_size(builds, gpu.capacity_bytes)
        assert full._budget._history.held == 0  # of all that the card held, nothing is left
    assert (again.size, again.peak_bytes, again.next_bytes) == (found.size, found.peak_bytes, None)
    assert "runs out of memory" in str(again)


# ---- what is counted


def test_on_cuda_it_is_the_allocators_own_count():
    storage = Storage(0, 1000, "temporary", (1000,), "uint8", "cuda:0", "empty", "forward", Line("", ""), "", "", "")
    event = Event(0, 1000, "empty", "forward", Line("", ""))
    levels = {name: {"before": 0, "peak": peak, "after": 0} for name, peak in (("requested", 1), ("allocated", 1024))}
    assert peak_of(Timeline([storage], [event])) == 1000
    assert peak_of(Timeline([storage], [event], levels=levels)) == 1024


def test_what_an_allocator_adds_is_added_to_the_lines(monkeypatch):
    """Blocks of 512 bytes and a workspace of 8 KiB, as a caching allocator counts them."""
    from memlab.gradient_accumulation import batch_size

    allocated = lambda timeline: 8192 + -(-timeline.peak_bytes // 512) * 512  # noqa: E731
    monkeypatch.setattr(batch_size, "peak_of", allocated)
    step = moments((5_000, 100), (20_000, 40))
    found = find_batch_size(step, 100_000)
    true = max(n for n in range(2000) if 8192 + -(-max(5_000 + 100 * n, 20_000 + 40 * n) // 512) * 512 <= 100_000)
    assert found.size == true and abs(found.predicted - true) <= 5  # a block is five examples
    assert len(step.sizes) <= 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_getter_of_cuda_is_called_without_cuda(monkeypatch):
    for name in ("memory_allocated", "max_memory_allocated", "memory_stats", "mem_get_info", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name}"))
    found = find_batch_size(moments((0, 10)), 1000)
    assert found.size == 100 and found.level == "storages"


def test_an_optimizer_that_outlives_the_step_has_to_be_named():
    step, model, optimizer = trainer(MLP(8, 8), lambda n: (torch.randn(n, 8), torch.randint(16, (n,))))
    for named in ({}, {"model": model}, {"optimizer": optimizer}, {"model": nn.Linear(2, 2), "optimizer": optimizer}):
        with pytest.raises(ValueError, match="expected model= and optimizer= to name what outlives step.*found AdamW"):
            find_batch_size(step, MiB, **named)
    find_batch_size(step, MiB, model=model, optimizer=optimizer)
    find_batch_size(step, MiB, model=[model, nn.Linear(2, 2)], optimizer=optimizer)


def test_what_the_model_holds_counts_from_the_start_though_the_step_never_reads_it():
    model = MLP(8, 8)
    step, model, optimizer = trainer(model, lambda n: (torch.randn(n, 8), torch.randint(16, (n,))), torch.optim.SGD)
    without = find_batch_size(step, 100 * KiB, model=model, optimizer=optimizer, most=3)
    model.register_buffer("unread", torch.zeros(4 * KiB))
    found = find_batch_size(step, 100 * KiB, model=model, optimizer=optimizer, most=3)
    assert found.peak_bytes - without.peak_bytes == 16 * KiB


def test_master_weights_need_no_more_than_their_own_name():
    model = MLP(32, 64).bfloat16()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW)

    def step(n):
        model(torch.randn(n, 32).bfloat16(), torch.randint(16, (n,))).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = find_batch_size(step, 300 * KiB, model=model, optimizer=optimizer)
    assert is_largest(found.size, step, 300 * KiB, model, optimizer)


# ---- bad input


def test_what_cannot_be_searched_with_is_refused():
    step = moments((0, 10))
    for arguments, options, error, message in [
        ((3, 100), {}, TypeError, "expected step as a function of the batch size, found int"),
        ((step, 100), {"predict": 7}, TypeError, "expected predict as a function"),
        ((step, 100), {"predict": lambda n: "1 KiB"}, TypeError, "to be a number of bytes, found str"),
        ((step, 1.5), {}, TypeError, "expected a size as int"),
        ((step, "12 parsecs"), {}, ValueError, "expected a size such as '16 GiB'"),
        ((step, 100), {"least": 0}, ValueError, "expected least of at least 1, found 0"),
        ((step, 100), {"most": True}, TypeError, "expected most as an int"),
        ((step, 100), {"least": 9, "most": 8}, ValueError, "found least=9 and most=8"),
        ((step, 100), {"model": step}, TypeError, "expected a model"),
        ((step, 100), {"optimizer": step}, TypeError, "expected an optimizer"),
    ]:
        with pytest.raises(error, match=message):
            find_batch_size(*arguments, **options)
    assert step.sizes == []


def test_a_whole_training_step_instead_of_its_peak_says_what_to_return():
    with pytest.raises(TypeError, match="found TrainingStep; of a training_step, return its peak_bytes"):
        find_batch_size(moments((0, 10)), MiB, predict=lambda n: training_step(TINY, n, 64))


def test_the_result_reads_as_a_sentence():
    found = find_batch_size(moments((0, 1024)), "10 KiB")
    assert (
        str(found)
        == "10 (predicted: 10) takes 10.0 KiB of 10.0 KiB (storages); 11 takes 11.0 KiB; run: 1, 2, 3, 10, 11"
    )
