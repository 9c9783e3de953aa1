"""Programs that leak and that do not: they are what their seed says, leak what they say, and are judged as they ran."""

import gc
import importlib.util
import math

import pytest
import torch

from memlab.book.watched_programs import (
    CLEAN,
    KINDS,
    MORE_KINDS,
    Program,
    Watched,
    clean,
    judge,
    judged,
    leaky,
    programs_of,
    verdicts,
    watch,
    watch_levels,
)
from memlab.book.watched_programs.habits import HABITS
from memlab.book.watched_programs.models import OURS, THEIRS, Sizes, build
from memlab.memory_monitoring import ProcessMemory
from memlab.memory_timeline import Meter
from tests.harness import refusals, refused

FIRST, *OTHERS = THEIRS
OURS_AND_ONE = [*OURS, FIRST, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)]
SEED = 501  # odd: a model of ours, which is quick


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bytes_after(program: Program, *steps: int) -> list[int]:
    """What storages hold after so many steps; cycles are collected before each look."""
    found = []
    with Meter() as meter, program:
        for step in range(max(steps)):
            program.step(step)
            if step + 1 in steps:
                found.append(meter.held_bytes)
    return found


@pytest.mark.parametrize("kind", [CLEAN, *KINDS, *MORE_KINDS])
def test_a_program_holds_the_same_bytes_each_time_it_is_made_from_its_seed(kind):
    steps = range(1, 13)
    assert bytes_after(Program(kind, SEED), *steps) == bytes_after(Program(kind, SEED), *steps)


def test_without_transformers_all_models_are_ours(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    assert {program.model_name for program in programs_of()} <= set(OURS)


@pytest.mark.parametrize("name", OURS_AND_ONE)
def test_every_model_learns_on_batches_of_any_amount(name):
    if name in THEIRS:
        pytest.importorskip("transformers")
    trained = build(name, Sizes(1, 32, 64, 2, 8), seed=0)
    for amount in (0.0, 0.5, 1.0):
        loss, logits = trained.run(trained.batch(amount))
        loss.backward()
        assert loss.shape == () and logits.grad_fn is not None
    assert any(parameter.grad is not None for parameter in trained.module.parameters())


def test_a_model_s_weights_come_from_the_seed_and_leave_torch_s_generator_alone():
    before = torch.get_rng_state()
    a, b, c = (build("GPT", Sizes(1, 32, 64, 2, 8), seed).module.head.weight for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


class Bare(Program):
    """A program that does nothing but train a model that is quick, with batches of one size, and leak."""

    def __init__(self, kind, seed):
        super().__init__(kind, seed)
        self.habits, self._lengths, self.model_name = (), "fixed", "MLP"


@pytest.mark.parametrize("seed", [SEED, pytest.param(SEED + 2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", [*KINDS, "cycles uncollected"])
def test_a_leak_goes_on_as_it_began(kind, seed):
    with Bare(kind, seed) as program:
        expected = program.leak_bytes
    n = 40
    first, second, third = bytes_after(Bare(kind, seed), n, 2 * n, 3 * n)
    assert second - first > 0.2 * n * expected
    assert 0.5 < (third - second) / (second - first) < 2


def test_a_program_that_is_over_or_fails_holds_nothing_and_gives_the_collector_back():
    before = gc.get_freeze_count()  # Python 3.12 begins with some
    with Meter() as meter:
        with pytest.raises(KeyboardInterrupt), leaky("cycles uncollected", SEED) as program:
            for step in range(10):
                program.step(step)
            assert not gc.isenabled()
            raise KeyboardInterrupt
        del program
        gc.collect()
        assert meter.held_bytes == 0
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_a_leak_that_begins_late_leaks_nothing_before():
    with Bare("begins late", SEED) as program:
        begins = program.begins
    before, then, later = bytes_after(Bare("begins late", SEED), 5, begins, begins + 60)
    assert before == then < later


def test_what_python_holds_no_meter_of_storages_sees():
    first, last = bytes_after(Bare("main memory", SEED), 5, 40)
    assert first == last


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_comes_to_its_highest_and_stays_there(habit):
    class OneHabit(Bare):
        def __init__(self):
            super().__init__(CLEAN, SEED)
            self.habits = (habit,)

    with OneHabit() as program:
        settles = program.settles
    held = bytes_after(OneHabit(), *range(1, settles + 121))
    assert max(held[settles + 60 :]) <= 1.1 * max(held[: settles + 60])
    assert settles <= 80


def test_the_budget_of_a_leak_is_what_it_needed_and_has_leaked_and_is_full_when_a_peak_reaches_it():
    leak = watch(Bare("cache of the new", SEED))
    assert leak.level == "storages" and leak.start_bytes == 0
    assert leak.peaks[leak.fills_at - 1] >= leak.budget_bytes > max(leak.peaks[: leak.fills_at - 1])
    needed = max(leak.peaks[: leak.settled + 1])
    assert leak.budget_bytes >= 2 * needed - leak.start_bytes
    assert leak.budget_bytes - needed in {end - leak.ends[leak.settled] for end in leak.ends}
    assert all(peak >= end for peak, end in zip(leak.peaks, leak.ends, strict=True))


def test_the_budget_of_a_healthy_program_is_above_all_its_peaks_and_it_is_judged_as_it_ran():
    (one,) = judge([Bare(CLEAN, SEED)])
    healthy = one.watched
    assert (healthy.kind, healthy.level, healthy.fills_at) == (CLEAN, "storages", None)
    assert 1.3 <= healthy.budget_bytes / max(healthy.peaks) <= 3.01
    assert len(healthy.ends) == len(healthy.peaks) == Bare(CLEAN, SEED).steps
    assert all(peak >= end for peak, end in zip(healthy.peaks, healthy.ends, strict=True))


def test_a_call_of_a_healthy_program_is_a_false_alarm_and_after_the_budget_is_full_nothing_is_judged():
    found = judged(series(CLEAN, (10_000 * (i + 10) for i in range(250)), 3_000_000, None))
    assert found.false_alarm and not found.in_time and found.inside is None and math.isnan(found.width)
    found = judged(series(CLEAN, [1_000_000] * 200, 2_000_000, None))
    assert found.called_at is None and not found.false_alarm and not found.in_time and found.inside is None
    ends = [100_000] * 50 + [900_000] + [1_000_000 + 50_000 * i for i in range(200)]
    assert judged(series("begins late", ends, 800_000, 51)).called_at is None


REFUSALS = {
    "a kind of no leak": (lambda: leaky("drip", 0), ValueError, "expected one of 'graphs kept', …, found 'drip'"),
    "levels of two places": (
        lambda: watch_levels(clean(SEED), ("storages", "heap")),
        ValueError,
        "expected levels that are seen in one place",
    ),
    "an unknown level": (lambda: watch(clean(SEED), "bytes"), ValueError, "found ('bytes',)"),
}


@refusals(REFUSALS)
def test_what_cannot_be_watched_is_refused(call, error, words):
    refused(call, error, words)


def series(kind: str, ends, budget: int, fills_at: int | None) -> Watched:
    ends = tuple(ends)
    return Watched("made up", kind, "none", "storages", 0, ends, ends, 0, budget, fills_at)


def test_a_straight_line_is_called_in_time_and_its_end_lies_within_the_interval():
    found = judged(series("cache of the new", (10_000 * (i + 10) for i in range(300)), 3_000_000, 291))
    assert found.called_at is not None and found.in_time and found.inside and not found.false_alarm
    assert found.share == pytest.approx((found.called_at + 9) / 300)
    assert found.earliest <= 291 <= found.latest


def test_a_verdict_counts_each_kind():
    straight = series("cache of the new", (10_000 * (i + 10) for i in range(300)), 3_000_000, 291)
    flat = series(CLEAN, [1_000_000] * 200, 2_000_000, None)
    rows = verdicts([judged(straight), judged(flat)]).rows
    assert rows[0][:4] == ["cache of the new", 1, 1, 1] and rows[0][-1] == "1 of 1"
    assert rows[1][:4] == [CLEAN, 1, 0, ""]


def test_a_process_of_its_own_is_seen_at_the_levels_of_the_system():
    if "heap" not in ProcessMemory().read():
        pytest.skip("malloc does not tell what it has handed out")
    heap, resident = watch_levels(Bare("main memory", SEED + 8), ("heap", "resident"))
    assert (heap.level, resident.level) == ("heap", "resident")
    assert heap.fills_at is not None and heap.peaks[heap.fills_at - 1] >= heap.budget_bytes > heap.start_bytes
    assert len(heap.ends) == len(resident.ends)
