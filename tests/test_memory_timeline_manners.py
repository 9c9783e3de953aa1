"""A meter leaves nothing behind, keeps to its own thread, and says what is wrong with what it is given."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from memlab.memory_timeline import CATEGORIES, Meter, Timeline
from memlab.memory_timeline.ownership import storages_of
from tests.harness import refusals, refused
from tests.memory_timeline_helpers import (
    Run,
    metered,
    one_thread,  # noqa: F401
    shape_of,
    without_scratch,
)
from tests.tiers import pairs

optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim itself hides it


HOOKS = (
    optimizers._global_optimizer_pre_hooks,
    optimizers._global_optimizer_post_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_forward_hooks,
)


def patch() -> Callable | None:
    """What the class of storages has for `resize_` in place of the method that it inherits."""
    return vars(torch.UntypedStorage).get("resize_")


def installed(model: nn.Module | None = None) -> tuple[int, int, Callable | None, bool]:
    """What is installed globally and on a model: hooks, modes, a patched resize_, a running profiler."""
    hooks = sum(map(len, HOOKS))
    hooks += sum(len(p._post_accumulate_grad_hooks or ()) for p in (model.parameters() if model else ()))
    modes = len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
    return hooks, modes, patch(), torch.autograd._profiler_enabled()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = installed()
    yield
    assert installed() == before


def test_a_running_meter_is_noticed_by_the_check_for_what_is_left_behind():
    model = nn.Linear(2, 2)
    before = installed(model)
    with Meter(model, workspace=True):
        during = installed(model)
    assert all(a != b for a, b in zip(before, during, strict=True)) and installed(model) == before


class Failing(nn.Module):
    """Fails in forward, in backward, or not at all; `error` is what it raises."""

    def __init__(self, where: str, error: type[BaseException]):
        super().__init__()
        self.linear, self.where, self.error = nn.Linear(10, 10), where, error

    def forward(self, x):
        x = self.linear(x)
        if self.where == "forward":
            raise self.error("forward")
        if self.where == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, _):
        raise self.error("backward")


@pairs("where, error, workspace", ["forward", "backward", "optimizer"], [ValueError, KeyboardInterrupt], [False, True])
def test_code_that_raises_leaves_nothing_behind_and_keeps_the_timeline_so_far(where, error, workspace):
    model = Failing(where, error)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if where == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: model.fail(None))
    before = installed(model)
    with pytest.raises(error), Meter(model, optimizer, workspace=workspace) as meter:
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
    assert installed(model) == before
    assert meter.timeline.peak_bytes >= 440 + 80
    assert meter.timeline.phases[0].phase == "forward"
    model.where = ""
    model(torch.ones(2, 10)).sum().backward()  # as if nothing had been


@pytest.mark.parametrize("stage", ["recognition.register_optimizer_step_post_hook", "meter.watch_resizing", "super"])
def test_an_exception_while_entering_takes_everything_off_again(monkeypatch, stage):
    def fails(*_, **__):
        raise RuntimeError("no")

    model = nn.Linear(10, 10)
    before = installed(model)
    meter = Meter(model)
    with monkeypatch.context() as patch:
        if stage == "super":
            patch.setattr(TorchDispatchMode, "__enter__", fails)
        else:
            patch.setattr(f"memlab.memory_timeline.{stage}", fails)
        with pytest.raises(RuntimeError, match="no"):
            meter.__enter__()
    assert installed(model) == before
    with meter:
        model(torch.ones(2, 10))
    assert meter.timeline.bytes_at(0) == 440


def test_what_dies_while_a_meter_is_taken_off_dies_after_the_block():
    kept = [torch.ones(100)]
    with Meter(inputs=kept) as meter:
        meter._undo.callback(kept.clear)
    assert len(meter.timeline) == 0 and meter.timeline.totals == [400]


def test_meters_that_are_left_in_another_order_than_entered_each_see_their_own_block():
    first, second, dropped = Meter(), Meter(), sys.unraisablehook
    watched = torch.utils._python_dispatch._is_in_torch_dispatch_mode
    first.__enter__()
    second.__enter__()
    torch.ones(10)
    first.__exit__(None, None, None)
    torch.ones(20)
    assert torch.utils._python_dispatch._is_in_torch_dispatch_mode
    second.__exit__(None, None, None)
    torch.ones(30)
    assert [e.delta for e in first.timeline.events] == [40, -40]
    assert [e.delta for e in second.timeline.events] == [40, -40, 80, -80]
    assert sys.unraisablehook is dropped
    assert torch.utils._python_dispatch._is_in_torch_dispatch_mode is watched


def test_after_leaving_nothing_is_recorded_any_more_and_before_that_the_timeline_can_be_read():
    with Meter() as meter:
        torch.ones(10)
        before = meter.timeline
        x = torch.ones(1000)
    assert len(before) == 2 and len(meter.timeline) == 3
    del x
    torch.ones(10)
    assert len(meter.timeline) == 3 and meter.timeline.totals[-1] == 4000


@pytest.mark.parametrize(("outer_scratch", "inner_scratch"), [(False, False), (True, False), (False, True)])
def test_nested_meters_see_what_each_alone_would_see(outer_scratch, inner_scratch):
    workload = "GPT checkpointed, re-entrant"
    run = Run(workload)
    with (
        Meter(run.model, run.optimizer, run.inputs, workspace=outer_scratch) as outer,
        Meter(run.model, run.optimizer, run.inputs, workspace=inner_scratch) as inner,
    ):
        run.step()
    for meter, scratch in ((outer, outer_scratch), (inner, inner_scratch)):
        alone = metered(workload, workspace=scratch).timeline
        assert without_scratch(meter.timeline) == without_scratch(alone)
        # One mode more around a kernel, and the number that it was given is wrapped once more, in 4 or 8 bytes.
        assert abs(meter.timeline.peak_bytes - alone.peak_bytes) <= 16


def test_an_inner_meter_that_ends_early_leaves_the_outer_one_whole():
    with Meter() as outer:
        x = torch.ones(100)
        with Meter(inputs=x) as inner:
            x.untyped_storage().resize_(800)
        x.untyped_storage().resize_(4000)
    assert [e.delta for e in outer.timeline.events] == [400, 400, 3200]
    assert [e.delta for e in inner.timeline.events] == [400]


def test_a_backward_driven_from_another_thread_is_not_seen():
    run = Run("MLP")
    with Meter(run.model, run.optimizer, run.inputs) as meter:
        loss = run.model(*run.inputs)
        before = len(meter._history.ops)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert len(meter._history.ops) == before
    assert all(p.grad is not None for p in run.model.parameters())
    assert min(map(min, meter.timeline.curves.values())) >= 0


class Slow(nn.Module):
    """A forward that begins, and waits until it may end."""

    def __init__(self):
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def forward(self, x):
        self.begun.set()
        assert self.may_end.wait(60)
        return x + 1


def test_a_forward_in_another_thread_gives_its_modules_name_to_nothing_here():
    slow = Slow()
    with Meter(nn.Sequential(slow)) as meter:
        thread = threading.Thread(target=slow, args=(torch.ones(3),))
        thread.start()
        assert slow.begun.wait(60)
        kept = torch.ones(1000)
        slow.may_end.set()
        thread.join()
    (found,) = (s for s in meter.timeline.storages.values() if s.nbytes == kept.nbytes)
    assert found.module == ""


def test_two_threads_each_with_their_own_meter_see_what_one_alone_sees():
    alone = shape_of(metered("GPT").timeline)
    runs, found, barrier = [Run("GPT") for _ in range(2)], {}, threading.Barrier(2, timeout=60)

    def work(number):
        run = runs[number]
        with Meter(run.model, run.optimizer, run.inputs) as meter:
            barrier.wait()
            run.step()
            barrier.wait()
        found[number] = shape_of(meter.timeline)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == alone


class Wrapper(torch.Tensor):
    """Stands for another tensor: it has a size, its bytes are that one's, and it does not tell so."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = func(*tree_map_only(cls, lambda one: one.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, cls, result)


def entered(model=None, inputs=(), do=lambda meter: None, **options):
    with Meter(model, inputs=inputs, **options) as meter:
        do(meter)
    return meter


def goes_to_meta_before_the_block():
    model = nn.Linear(2, 2)
    meter = Meter(model)
    model.to("meta")
    meter.__enter__()


def of_ones(ask):
    return lambda: ask(entered(do=lambda _: torch.ones(10)).timeline)


ON_META = torch.ones(3, device="meta")
HIDDEN = torch.ones(4, 4).to_mkldnn() if torch.backends.mkldnn.is_available() else Wrapper(torch.ones(400))
HIDES = "to_dense" if torch.backends.mkldnn.is_available() else "hides its bytes"
REFUSALS = {
    "a number for a model": (lambda: Meter(3), TypeError, "expected a model …found int"),
    "text among models": (lambda: Meter([nn.Linear(1, 1), "x"]), TypeError, "found str"),
    "a model on meta": (lambda: Meter(nn.Linear(2, 2, device="meta")), ValueError, "to_empty"),
    "a buffer on meta": (
        lambda: Meter(nn.BatchNorm1d(2, affine=False, device="meta")),
        ValueError,
        "running_mean on the meta device",
    ),
    "a model that goes to meta": (goes_to_meta_before_the_block, ValueError, "to_empty"),
    "an input on meta": (lambda: Meter(inputs={"x": [ON_META]}), ValueError, "input x 0 on the meta device"),
    "a model for an optimizer": (
        lambda: Meter(None, nn.Linear(1, 1)),
        TypeError,
        "expected an optimizer …found Linear",
    ),
    "several optimizers": (lambda: Meter(None, []), TypeError, "found list; of several give one, or none"),
    "a set of inputs": (lambda: Meter(inputs={1, 2}), TypeError, "expected inputs as a tensor"),
    "a wrapper": (
        lambda: entered(inputs=Wrapper(torch.ones(4))),
        NotImplementedError,
        "Wrapper, which hides its bytes",
    ),
    "a hidden layout": (lambda: entered(inputs=HIDDEN), NotImplementedError, HIDES),
    "a hidden layout met": (lambda: entered(do=lambda _: torch.relu(HIDDEN)), NotImplementedError, HIDES),
    "a second run": (lambda: entered().__enter__(), RuntimeError, "records once"),
    "no run": (lambda: Meter().timeline, RuntimeError, "expected a Meter that has run"),
    "an event before all": (of_ones(lambda timeline: timeline.bytes_at(-1)), IndexError, "an event from 0 …to 2"),
    "an event after all": (of_ones(lambda timeline: timeline.bytes_at(3)), IndexError, "an event from 0 …to 2"),
    "an event that is a bool": (of_ones(lambda timeline: timeline.bytes_at(True)), IndexError, "expected an event"),
    "an event's kinds": (of_ones(lambda timeline: timeline.bytes_by_category(3)), IndexError, "expected an event"),
    "an event's storages": (of_ones(lambda timeline: timeline.alive(3)), IndexError, "expected an event"),
    "an unknown storage": (of_ones(lambda timeline: timeline.lifetime(99)), KeyError, "expected the id of a storage"),
    "an unknown device": (of_ones(lambda timeline: timeline.on("cuda:7")), ValueError, "expected one of the devices"),
}


@refusals(REFUSALS)
def test_what_is_no_model_optimizer_batch_or_moment_is_refused(call, error, words):
    refused(call, error, words)


@pytest.mark.parametrize("workspace", [False, True])
def test_what_a_wrapper_computes_is_counted_by_what_is_inside(workspace):
    wrapper = Wrapper(torch.ones(400))
    meter = entered(inputs=wrapper.inner, workspace=workspace, do=lambda _: wrapper * 2)
    assert 3200 <= meter.timeline.peak_bytes < 3300  # the number 2 may become a tensor


def test_what_has_memory_and_a_dispatch_of_its_own_is_a_tensor_as_any_other():
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    tensor = torch.Tensor._make_subclass(Own, torch.ones(400))
    assert [storage.nbytes() for storage in storages_of(tensor)] == [1600]


def test_an_empty_step_is_empty():
    timeline = entered().timeline
    assert (len(timeline), timeline.peak_bytes, timeline.peak_event, timeline.alive(0)) == (0, 0, 0, [])
    assert timeline.bytes_by_category(0) == dict.fromkeys(CATEGORIES, 0) and timeline.phases == []
    assert Timeline().peak_bytes == 0 and timeline.on("cpu").events == []


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_model_that_moves_to_meta_inside_lets_its_bytes_go_and_the_block_ends_as_it_would(error):
    model = nn.Linear(10, 10)
    meter = Meter(model)
    with pytest.raises(error) if error else contextlib.nullcontext(), meter:
        model(torch.ones(2, 10)).sum().backward()
        model.to("meta")
        if error:
            raise error
    assert meter.timeline.bytes_by_category(0)["parameter"] == 440
    assert meter.timeline.totals[-1] == 0


def test_of_several_models_each_name_says_which_one_it_is_of():
    first, second, buffers = nn.Linear(4, 8), nn.Linear(8, 2), nn.BatchNorm1d(2)
    shared = nn.Linear(8, 8)
    models = [nn.Sequential(first, shared), nn.Sequential(shared, second, buffers)]
    with Meter(models) as meter:
        models[1](models[0](torch.ones(3, 4))).sum().backward()
    storages = list(meter.timeline.storages.values())
    for category in ("parameter", "gradient"):
        assert {(s.name, s.nbytes) for s in storages if s.category == category} == {
            *[("0.0.weight", 128), ("0.0.bias", 32), ("0.1.weight", 256), ("0.1.bias", 32)],
            *[("1.1.weight", 64), ("1.1.bias", 8), ("1.2.weight", 8), ("1.2.bias", 8)],
        }
    assert {s.name for s in storages if s.category == "buffer"} == {
        f"1.2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert [s.module for s in storages if s.op == "addmm"] == ["0.0", "0.1", "0.1", "1.1"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workspace", [False, True])
def test_a_model_that_is_compiled_inside_the_block_is_compiled_and_the_meter_is_not(workspace):
    torch._dynamo.reset()  # else what other tests compiled counts against its limit of recompilations
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    found = []
    for run in (model, torch.compile(model, backend=backend)):
        model.zero_grad()
        optimizer.state.clear()
        with Meter(model, optimizer, x, workspace=workspace) as meter:
            for _ in range(2):
                run(x).sum().backward()
                optimizer.step()
        found.append(meter.timeline)
    torch._dynamo.reset()
    eager, compiled = found
    assert [len(graph) for graph in graphs] == [3]
    assert compiled.peak_bytes == eager.peak_bytes
    assert compiled.bytes_by_category(len(compiled)) == eager.bytes_by_category(len(eager))
