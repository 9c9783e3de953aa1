"""The largest batch: predicted within one example, proved on both sides of the budget, nothing left of a failure."""

import gc
import itertools
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import optimizer as optim

from memlab.book.steps import build, made
from memlab.book.workloads import LSTM, MLP, ConvNet
from memlab.gradient_accumulation import batch_size, find_batch_size
from memlab.gradient_accumulation.batch_size import peak_of
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_timeline import Event, Line, Meter, Storage, Timeline, imagine
from memlab.units import KiB, MiB
from tests.harness import nothing_left_behind
from tests.tiers import some

TINY = Transformer(layers=3, width=32, heads=4, vocabulary=256, context=64)
WIDE = Transformer(layers=2, width=128, heads=4, vocabulary=256, context=16)
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


def sized(run):
    """A step that notes the sizes it was run with."""

    def step(n):
        step.sizes.append(n)
        run(n)

    step.sizes = []
    return step


def moments(*lines):
    """A step that holds fixed + slope × n bytes at one moment after another."""
    return sized(lambda n: [torch.empty(fixed + slope * n, dtype=torch.uint8).numel() for fixed, slope in lines])


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


@some(
    "sizes, budget, options",
    [
        (TINY, 4 * MiB, {}),
        (TINY, 14 * MiB, {}),
        (TINY, 2 * MiB, {"precision": "bf16"}),
        (TINY, 4 * MiB, {"precision": "mixed"}),
        (WIDE, 12 * MiB, {"implementation": "foreach"}),
        (TINY, 8 * MiB, {"attention": "by hand", "dropout": 0.1}),
        (TINY, 4 * MiB, {"precision": "autocast"}),
        (LLAMA, 8 * MiB, {}),
    ],
    keep=4,
)
def test_small_steps_predict_the_largest_batch_of_a_transformer(sizes, budget, options):
    step, model, optimizer = transformer(sizes, **options)
    found = find_batch_size(step, budget, model=model, optimizer=optimizer)
    assert is_largest(found.size, step, budget, model, optimizer)
    assert abs(found.predicted - found.size) <= 1
    assert found.peak_bytes == metered(step, found.size, model, optimizer)
    assert found.next_bytes == metered(step, found.size + 1, model, optimizer)
    assert set(found.tried) <= {1, 2, 3, 6, found.size, found.size + 1}


@pytest.mark.parametrize(
    ("make", "batch", "budget"),
    [
        (lambda: MLP(32, 64), lambda n: (torch.randn(n, 32), torch.randint(16, (n,))), MiB),
        (lambda: ConvNet(8), lambda n: (torch.randn(n, 3, 16, 16), torch.randint(10, (n,))), 8 * MiB),
        (lambda: LSTM(width=32), lambda n: (torch.randint(256, (n, 8)), torch.randint(256, (n, 8))), 3 * MiB),
    ],
    ids=["MLP", "ConvNet", "LSTM"],
)
def test_small_steps_predict_the_largest_batch_of_a_model_without_arithmetic(make, batch, budget):
    step, model, optimizer = trainer(make(), batch)
    found = find_batch_size(step, budget, model=model, optimizer=optimizer)
    assert abs(found.predicted - found.size) <= 1 and is_largest(found.size, step, budget, model, optimizer)


@settings(max_examples=12, deadline=None, derandomize=True)
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


def test_a_peak_equal_to_the_budget_fits_and_a_byte_less_does_not():
    step = moments((1000, 10))
    assert find_batch_size(step, 1000 + 10 * 77).size == 77
    assert find_batch_size(step, 1000 + 10 * 77 - 1).size == 76


CURVES = {
    "quadratic": lambda n: 100 + n * n,
    "root": lambda n: 100 + round(1000 * n**0.5),
    "steps of 64": lambda n: 1000 * -(-n // 64),
    "a jump": lambda n: 10 * n + 30_000 * (n > 700),
    "flat, then steep": lambda n: max(10_000, 50 * n - 20_000),
}


@some("curve, budget", itertools.product(CURVES, [11_111, 30_000, 41_000]), keep=8)
def test_a_growing_peak_of_any_form_is_found_in_few_runs(curve, budget):
    step = sized(lambda n: torch.empty(CURVES[curve](n), dtype=torch.uint8))
    found = find_batch_size(step, budget)
    true = max(n for n in range(1, 3000) if CURVES[curve](n) <= budget)
    assert found.size == true
    assert found.peak_bytes == CURVES[curve](true) and found.next_bytes == CURVES[curve](true + 1)
    assert len(step.sizes) <= 30
    if curve != "a jump":  # which no smaller size foretells
        assert max(step.sizes) <= 2 * true


def test_steps_that_run_other_ops_at_other_sizes_are_approached_by_doubling():
    def run(n):
        for _ in range(n):
            torch.empty(10, dtype=torch.uint8)
        torch.empty(50 * n + 1000 * (n > 40), dtype=torch.uint8)

    step = sized(run)
    assert find_batch_size(step, 4000).size == 60
    assert all(later <= 2 * max(step.sizes[:i]) for i, later in enumerate(step.sizes) if i)


@pytest.mark.parametrize("most_that_runs", [949, 900])
def test_an_error_of_one_example_costs_one_run_more(most_that_runs):
    """What the hardware takes beyond the figures: the step of the size predicted runs out of memory."""

    def run(n):
        if n > most_that_runs:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        torch.empty(100 * n, dtype=torch.uint8)

    step = sized(run)
    found = find_batch_size(step, 95_000)
    assert (found.predicted, found.size, found.next_bytes) == (950, most_that_runs, None)
    assert step.sizes == [1, 1, 2, 3, 950, 949] or most_that_runs == 900 and len(step.sizes) <= 4 + 12


def test_everything_up_to_most_fits_and_no_more_is_run():
    for most in (1, 2, 3, 100):
        step = moments((0, 10))
        found = find_batch_size(step, 10_000, most=most)
        assert (found.size, found.predicted, found.peak_bytes, found.next_bytes) == (most, most, 10 * most, None)
        assert max(step.sizes) == most and len(step.sizes) <= 5
        assert f"{most} (predicted: {most})" in str(found) and "that is the most to be tried" in str(found)


@pytest.mark.parametrize("true", [1, 2, 5])
def test_a_budget_of_few_examples(true):
    step = moments((7, 10))
    found = find_batch_size(step, 7 + 10 * true + 3)
    assert (found.size, found.next_bytes) == (true, 7 + 10 * (true + 1))
    assert found.predicted == true
    assert max(step.sizes) <= true + 1


def test_one_example_that_runs_out_of_memory_is_an_error_that_holds_no_other():
    with pytest.raises(ValueError, match="batch size 1 to fit 1.0 KiB, found that it runs out of memory") as caught:
        find_batch_size(lambda n: torch.empty(2**60), "1 KiB")
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


class Watched:
    """Remembers every storage that it is shown by a weak reference alone."""

    def __init__(self):
        self.storages = []

    def __call__(self, tensor):
        self.storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def alive(self):
        return sum(storage() is not None for storage in self.storages)


def fail(error):
    raise error


FAILURES = {
    "CUDA's": lambda: fail(torch.OutOfMemoryError("CUDA out of memory.")),
    "cuBLAS's": lambda: fail(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")),
    "the CPU allocator's": lambda: torch.empty(2**60, dtype=torch.uint8),
    "Python's": lambda: bytearray(2**62),
    "another accelerator's": lambda: fail(RuntimeError("MPS backend out of memory (MPS allocated)")),
}


@some("kind, where", itertools.product(FAILURES, ["forward", "backward", "in a cycle"]), keep=7)
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


def test_a_failed_step_leaves_no_gradients_but_those_that_were_there():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(n, most=10**6):
        model[1](model[0](torch.ones(n, 8))).sum().backward()
        if n > most:
            torch.empty(2**60)
        optimizer.step()
        model[0].zero_grad(set_to_none=False)
        model[1].zero_grad()

    size = find_batch_size(step, 10 * KiB, model=model, optimizer=optimizer).size
    found = find_batch_size(lambda n: step(n, size), 10 * KiB, model=model, optimizer=optimizer)
    assert list(found.tried)[-1] == size + 1 and found.next_bytes is None
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no"), RuntimeError("shapes")], ids=str)
def test_other_errors_pass_through_untouched_and_nothing_is_left(error):
    model, before = nn.Linear(2, 2), len(optim._global_optimizer_post_hooks)

    def step(n):
        if n > 3:
            raise error

    with nothing_left_behind(model), pytest.raises(type(error)) as caught:
        find_batch_size(step, MiB)
    assert len(optim._global_optimizer_post_hooks) == before
    assert caught.value is error and error.__context__ is None


def test_on_an_imagined_card_the_arithmetic_is_right_to_the_byte_on_both_sides_of_the_budget():
    sizes = Transformer(layers=1, width=1024, heads=16, vocabulary=32000, context=1024)
    predict = lambda n: training_step(sizes, n, 1024).peak_bytes  # noqa: E731
    with imagine("H100-80GB") as gpu:
        step, model, optimizer = transformer(sizes)
        found = find_batch_size(step, gpu.capacity_bytes, model=model, optimizer=optimizer)
    assert found.size == found.predicted
    assert found.peak_bytes == predict(found.size) <= gpu.capacity_bytes < found.next_bytes == predict(found.size + 1)


def test_on_cuda_it_is_the_allocators_own_count():
    storage = Storage(0, 1000, "temporary", (1000,), "uint8", "cuda:0", "empty", "forward", Line("", ""), "", "", "")
    event = Event(0, 1000, "empty", "forward", Line("", ""))
    levels = {name: {"before": 0, "peak": peak, "after": 0} for name, peak in (("requested", 1), ("allocated", 1024))}
    assert peak_of(Timeline([storage], [event])) == 1000
    assert peak_of(Timeline([storage], [event], levels=levels)) == 1024


def test_what_an_allocator_adds_is_added_to_the_lines(monkeypatch):
    """Blocks of 512 bytes and a workspace of 8 KiB, as a caching allocator counts them."""
    allocated = lambda timeline: 8192 + -(-timeline.peak_bytes // 512) * 512  # noqa: E731
    monkeypatch.setattr(batch_size, "peak_of", allocated)
    step = moments((5_000, 100), (20_000, 40))
    found = find_batch_size(step, 100_000)
    true = max(n for n in range(2000) if 8192 + -(-max(5_000 + 100 * n, 20_000 + 40 * n) // 512) * 512 <= 100_000)
    assert found.size == true and abs(found.predicted - true) <= 5  # a block is five examples
    assert len(step.sizes) <= 12


def test_an_optimizer_that_outlives_the_step_has_to_be_named():
    step, model, optimizer = trainer(MLP(8, 8), lambda n: (torch.randn(n, 8), torch.randint(16, (n,))))
    for named in ({}, {"model": model}, {"optimizer": optimizer}, {"model": nn.Linear(2, 2), "optimizer": optimizer}):
        with pytest.raises(ValueError, match="expected model= and optimizer= to name what outlives step.*found AdamW"):
            find_batch_size(step, MiB, **named)
    find_batch_size(step, MiB, model=model, optimizer=optimizer)
    find_batch_size(step, MiB, model=[model, nn.Linear(2, 2)], optimizer=optimizer)


def test_the_result_reads_as_a_sentence():
    found = find_batch_size(moments((0, 1024)), "10 KiB")
    assert (
        str(found)
        == "10 (predicted: 10) takes 10.0 KiB of 10.0 KiB (storages); 11 takes 11.0 KiB; run: 1, 2, 3, 10, 11"
    )
