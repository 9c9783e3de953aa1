"""Which line grows, by how much, and who holds it: each kind of leak against its closed form."""

import gc
import os
import sys
import threading
import tracemalloc
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memlab.memory_monitoring import (
    LineWatch,
    MemoryWarning,
    MeteredMemory,
    Monitor,
    growing_lines,
    holders,
)
from memlab.memory_monitoring.lines import piling_up
from memlab.memory_monitoring.python_lines import PythonLineWatch
from memlab.memory_timeline import Meter, Timeline
from memlab.units import MiB
from tests.memory_timeline_helpers import one_thread  # noqa: F401
from tests.test_memory_monitoring import Figures, run

ROWS, WIDTH = 8, 64


@pytest.fixture(autouse=True, scope="module")
def collected():
    gc.collect()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def what_is_there_already_is_not_searched(collected):
    """Tests are quick when the collector passes over all that pytest and libraries have made. No mode is left."""
    gc.freeze()
    yield
    assert _get_current_dispatch_mode_stack() == []


def watched(step, steps=24, warm_up=3, watch=None):
    """The rows of a loop of `step(number)`, watched after its warm-up."""
    watch = LineWatch(steps) if watch is None else watch
    steps = watch.steps
    for number in range(warm_up):
        step(number)
    watch.start()
    for number in range(warm_up, warm_up + steps + 1):
        step(number)
        rows = watch.step_done()
    assert rows is not None and not watch.running and getattr(watch, "failed", "") == ""
    return rows


class Training:
    """A model with one line for its forward, and a training step."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, rows=ROWS):
        output = self.model(torch.randn(rows, WIDTH))
        loss = output.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_a_clean_loop_has_no_growing_line_also_with_batches_of_all_lengths():
    training = Training()
    assert watched(lambda number: training.step()) == []
    assert watched(lambda number: training.step(1 + 7 * number % 11)) == []


def test_outputs_in_a_list_keep_their_graph_and_the_row_adds_up_what_it_saved():
    training, kept = Training(), []

    def step(number):
        training.step()
        batch = torch.randn(ROWS, WIDTH)
        kept.append(training.model(batch))

    (row,) = watched(step)
    assert row.line.source == "kept.append(training.model(batch))"
    assert row.bytes_per_step == 4 * 4 * ROWS * WIDTH  # the batch, and each layer's output
    assert "its graph is kept" in row.reason and row.holder.startswith("list, local `kept`")
    assert {kept.line.source for kept in row.keeps} == {row.line.source, "batch = torch.randn(ROWS, WIDTH)"}


def test_two_readings_of_one_meter_name_the_line():
    training, kept = Training(), []
    with Meter(training.model, training.optimizer) as meter:
        for number in range(12):
            kept.append(training.step())
            if number == 1:
                before = meter.timeline
        rows = growing_lines(before, meter.timeline, 10)
    assert [(row.line.source, row.bytes_per_step) for row in rows] == [("loss = output.square().mean()", 4)]


def test_a_hidden_state_that_is_not_detached_is_named_by_the_state_whose_graph_goes_back():
    cell, state = torch.nn.RNNCell(WIDTH, WIDTH), torch.zeros(ROWS, WIDTH)

    def step(number):
        nonlocal state
        state = cell(torch.ones(ROWS, WIDTH), state)
        state.sum().backward(retain_graph=True)
        cell.zero_grad()

    (row,) = watched(step)
    assert row.line.source == "state = cell(torch.ones(ROWS, WIDTH), state)" and "its graph is kept" in row.reason
    assert row.bytes_per_step == 2 * 4 * ROWS * WIDTH  # tanh's output, and the input that linear saved
    assert row.holder.startswith("local `state` of")


class Cache:
    entries: dict = {}

    def __init__(self):
        self.kept = []


def test_a_cache_in_a_class_is_named_by_its_attribute():
    def step(number):
        entry = torch.full((100,), number)
        Cache.entries[number] = entry

    gc.unfreeze()
    (row,) = watched(step)
    Cache.entries.clear()
    assert row.line.source == "entry = torch.full((100,), number)"
    assert (row.bytes_per_step, row.holder) == (800, "dict, attribute `entries` of class Cache")


def test_hooks_that_are_registered_again_are_named_by_what_they_enclose():
    layer = torch.nn.Linear(4, 4)

    def register(number):
        scale = torch.ones(50)
        layer.register_forward_hook(lambda module, args, result: result * scale[0])

    (row,) = watched(register)
    assert (row.line.source, row.bytes_per_step) == ("scale = torch.ones(50)", 200)
    assert row.holder.startswith("`scale` enclosed by") and "attribute `_forward_hooks` of Linear" in row.holder


def test_an_exception_that_is_kept_keeps_its_frames_tensors():
    errors = []

    def fails():
        batch = torch.ones(75)
        raise ValueError(len(batch))

    def step(number):
        try:
            fails()
        except ValueError as error:
            errors.append(error)

    (row,) = watched(step)
    assert (row.line.source, row.bytes_per_step, row.storages_per_step) == ("batch = torch.ones(75)", 300, 1)
    assert row.holder.startswith("local `batch` of fails(), traceback of ValueError, list, local `errors` of")


def test_a_history_that_is_replaced_by_a_longer_one_grows_without_piling_up():
    history = torch.zeros(0)

    def step(number):
        nonlocal history
        history = torch.cat([history, torch.ones(10)])

    (row,) = watched(step)
    assert (row.bytes_per_step, row.storages_per_step) == (40, 0) and row.reason == "each time replaced by a larger one"


def test_tensors_that_another_thread_made_have_no_line_but_a_holder():
    kept = []

    def step(number):
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(100)))
        thread.start()
        thread.join()

    (row,) = watched(step)
    assert "no line is known" in str(row) and row.bytes_per_step == 400
    assert row.holder.startswith("list, local `kept` of")


def test_storages_in_reference_cycles_are_called_that():
    gc.disable()
    try:

        def step(number):
            ring = [torch.zeros(100)]
            ring.append(ring)

        (row,) = watched(step)
    finally:
        gc.enable()
    assert row.bytes_per_step == 400 and "gc.collect()" in row.reason


def test_states_accumulated_gradients_an_average_and_a_best_model_are_not_named():
    training, best = Training(), {}
    average = [p.detach().clone() for p in training.model.parameters()]

    def step(number):
        training.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        if number % 4 == 3:
            training.optimizer.step()
            training.optimizer.zero_grad()
        if number in (5, 9):
            best.update({name: value.clone() for name, value in training.model.state_dict().items()})
        for mean, parameter in zip(average, training.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    assert watched(step, warm_up=0) == []


def test_a_mode_around_the_watch_and_one_that_is_entered_later_and_still_on_at_its_end_stay():
    kept, rows = [], None
    with Counting() as around:
        watch = LineWatch(8)
        watch.start()
        inner = Counting()
        for number in range(9):
            kept.append(torch.zeros(10))
            if number == 5:
                inner.__enter__()
            rows = watch.step_done()
        assert _get_current_dispatch_mode_stack() == [around, inner]
        inner.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == [around]
    assert [row.bytes_per_step for row in rows] == [40]


def test_closing_in_another_thread_leaves_a_mode_that_does_nothing_and_its_steps_are_not_counted():
    before = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    watch = LineWatch(8)
    found = []

    def elsewhere(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    def work():
        watch.start()
        for _ in range(20):
            elsewhere(watch.step_done)
        assert watch.running
        elsewhere(watch.close)
        found.append((torch.ones(3).sum().item(), watch.step_done(), watch.running))

    elsewhere(work)
    assert found == [(3.0, None, False)] and watch.failed == ""
    assert torch.utils._python_dispatch.is_in_torch_dispatch_mode() == before


@pytest.mark.parametrize("explained", [True, False])
def test_what_tensors_do_not_explain_is_traced_afterwards_and_what_they_explain_is_not(explained):
    kept, watch = [], LineWatch(8)
    found = []
    for number in range(24):
        array = torch.zeros(1000) if explained else np.zeros(1000)
        kept.append(array)
        if (rows := watch.step_done()) is not None:
            found.append((number, rows))
        if number == 2:
            watch.start(unexplained_bytes=5000.0 if explained else 8000.0)
    ((number, rows),) = found
    assert number == 2 + 9 + 9 * (not explained) and not watch.running
    assert rows[0].line.source.startswith("array = torch.zeros(1000)")
    assert rows[0].category != "python" if explained else rows[0].category == "python"
    assert not explained or rows[0].bytes_per_step == 4000


class Counting(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_a_watch_that_is_started_inside_a_readers_mode_says_why_it_cannot_and_leaves_the_mode_alone():
    watch, mode = LineWatch(8), Counting()
    with mode:
        watch.start()
        assert watch.step_done() is None and _get_current_dispatch_mode_stack() == [mode]
    assert not watch.running and "enter a mode around the monitor, or leave it before step()" in watch.failed


def test_fewer_steps_than_8_and_marks_than_5_are_refused():
    with pytest.raises(ValueError, match="at least 8 steps, found 3"):
        LineWatch(3)
    with pytest.raises(ValueError, match="at least 1 step longer"):
        growing_lines(Timeline(), Timeline(), 0)
    with pytest.raises(ValueError, match="5 steps' ends or more, found 2"):
        piling_up(Timeline(), [0, 1])


def test_numpy_arrays_in_a_list_are_named_with_their_bytes():
    kept = []

    def step(number):
        array = np.zeros(1000)
        kept.append(array)

    rows = watched(step, watch=PythonLineWatch())
    assert rows[0].line.source == "array = np.zeros(1000)" and rows[0].category == "python"
    assert rows[0].line.function == "test_numpy_arrays_in_a_list_are_named_with_their_bytes.<locals>.step"
    assert rows[0].bytes_per_step == pytest.approx(sys.getsizeof(np.zeros(1000)), abs=16)  # and the list's growth
    assert rows[0].holder.startswith("list, local `kept` of") and not tracemalloc.is_tracing()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no forks")
def test_what_is_forked_while_lines_are_watched_is_neither_metered_nor_traced():
    watch, statuses = LineWatch(8), []
    watch.start(unexplained_bytes=1e6)
    for _ in range(2 * 9):
        child = os.fork()
        if child == 0:
            os._exit(len(_get_current_dispatch_mode_stack()) + 2 * tracemalloc.is_tracing())
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert watch.running
        watch.step_done()
    assert set(statuses) == {0} and not watch.running


def test_what_was_full_by_the_first_half_of_the_steps_does_not_pile_up():
    cache, marks = [], []
    with Meter() as meter:
        for step in range(20):
            if step < 8:
                cache.append(torch.zeros(100))
            marks.append(meter.event_count)
    assert piling_up(meter.timeline, marks) == []


MODULE = [torch.zeros(1)]


def test_holders_name_globals_attributes_and_locals_and_keep_nothing():
    here, owner = [torch.zeros(1)], Cache()
    owner.kept.append(torch.zeros(1))
    gc.unfreeze()
    said = holders(MODULE[0]), holders(here[0]), holders(owner.kept[0])
    assert said[0] == f"list, global `MODULE` of {__name__}"
    assert said[1].startswith("list, local `here` of test_holders")
    assert said[2].startswith("list, attribute `kept` of Cache, local `owner` of test_holders")
    local = torch.zeros(1)
    holders(here[0])
    gone = weakref.ref(local)
    del local
    assert gone() is None


class Unbound:
    """A proxy that stands for nothing yet."""

    def __init__(self, kept):
        object.__setattr__(self, "kept", kept)

    def __getattribute__(self, name):
        raise RuntimeError("unbound")


class Loading(dict):
    """A dict that does something else when it is asked."""

    def items(self):
        raise RuntimeError("nothing to load from")

    get = items


@pytest.mark.parametrize(
    "hold, said",
    [
        (lambda one: {one: 1}, "key of dict, list, global `MODULE`"),
        (lambda one: Loading(it=one), "Loading, list, global `MODULE`"),
        (Unbound, "attribute `kept` of Unbound, list, global `MODULE`"),
    ],
    ids=["a key", "a dict of its own kind", "a proxy"],
)
def test_holders_call_nothing_of_an_objects_own(hold, said):
    tensor = torch.zeros(1)
    held = weakref.ref(tensor)
    MODULE.append(hold(tensor))
    del tensor
    gc.unfreeze()
    try:
        found = holders(held())
        assert found.startswith(said)
    finally:
        MODULE.pop()


def test_what_stood_for_a_tensor_inside_vmap_or_grad_does_not_end_the_search_for_lines():
    kept, outlived = [], []
    torch.vmap(lambda x: outlived.append(x) or x)(torch.zeros(2, 3))
    torch.func.grad(lambda x: outlived.append(2 * x) or x.sum())(torch.zeros(3))
    watch = LineWatch(steps=8)
    watch.start()
    for _ in range(9):
        kept.append(torch.zeros(1000))
        rows = watch.step_done()
    assert watch.failed == "" and [row.bytes_per_step for row in rows] == [4000]


def test_a_monitor_names_the_lines_when_it_has_called_growth():
    training, kept = Training(), []
    with Meter(training.model, training.optimizer) as meter, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.step()
        budget = meter.highest_since(0) + 200 * 4004
        with Monitor(budget, sources=[MeteredMemory(meter)], name_lines=True) as monitor:
            for _ in range(200):
                kept.append(training.step())
                kept.append(torch.zeros(1000))
                monitor.step()
                if monitor.lines:
                    break
    assert [alarm.kind for alarm in monitor.alarms] == ["growth", "lines"]
    assert [row.bytes_per_step for row in monitor.lines] == [4000, 4]
    assert "kept.append(torch.zeros(1000))" in monitor.alarms[-1].message


def test_after_lines_of_main_memory_were_named_the_forecast_is_right_and_of_the_runs_own_step():
    source = Figures(heap=0)
    with (
        pytest.warns(MemoryWarning),
        Monitor("200 MiB", sources=[source], every=60, name_lines=True) as monitor,
    ):
        run(monitor, source, [step * MiB for step in range(1, 191)], "heap")
    said = monitor.forecast()
    assert (said.step, said.earliest, said.latest) == (190, 10, 10) and monitor.history.steps == 190
    assert [alarm.kind for alarm in monitor.alarms][:3] == ["growth", "lines", "growth"]


def test_a_loop_that_raises_while_lines_are_watched_leaves_nothing_on():
    kept = []
    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings(), Meter() as meter:
        warnings.simplefilter("ignore")
        with Monitor("20 MiB", sources=[MeteredMemory(meter)], name_lines=True) as monitor:
            while True:
                kept.append(torch.zeros(1000))
                monitor.step()
                if any(alarm.kind == "growth" for alarm in monitor.alarms):
                    assert len(_get_current_dispatch_mode_stack()) == 2
                    raise KeyboardInterrupt
    assert monitor.lines == []
