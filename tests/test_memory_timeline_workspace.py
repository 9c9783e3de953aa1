"""Kernels' scratch: the meter's total against the allocator's own log, of the same run and of one without a meter."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from memlab.memory_timeline import Meter, Timeline
from memlab.memory_timeline.history import FORWARD, History
from memlab.memory_timeline.workspace import MARK, CUDACounters, CUDALevels, _flatten
from tests.memory_timeline_helpers import (
    ALLOCATION,
    EACH_WORKLOAD,
    allocations,
    blocks,
    event_tree,
    events_of,
    fresh,
    metered_run,
    of,
    one_thread,  # noqa: F401
    peak,
)
from tests.tiers import pairs, some
from tests.torch_ops import forward_and_backward, ops_of_torch


@pairs("workload, options", ["MLP", "GPT"], [{"foreach": True}, {"fused": True}])
def test_storage_events_are_the_log_of_an_unmetered_run_without_the_kernels_scratch(workload, options):
    fresh(workload, **options).step()
    tree = event_tree(fresh(workload, **options).step)
    expected = blocks(allocations(tree), without_scratch=True)
    assert len(expected) > 50
    assert events_of(metered_run(fresh(workload, **options)).timeline) == expected


class Watched:
    """One step of a workload under a meter with workspace, and the allocator's log of that very run."""

    def __init__(self, workload: str):
        self.workload = workload
        run = fresh(workload)
        self.meter = metered_run(run, workspace=True)
        self.timeline, self.values = self.meter.timeline, run.values()
        self.tree = self.meter._log._profile.profiler.kineto_results.experimental_event_tree()


@pytest.fixture(scope="module", params=EACH_WORKLOAD)
def watched(request):
    return Watched(request.param)


def test_with_workspace_the_timeline_is_the_allocators_log_to_the_byte_and_that_of_an_unmetered_run(watched):
    timeline = watched.timeline
    assert events_of(timeline) == blocks(allocations(watched.tree))
    assert [sum(moment) for moment in zip(*timeline.curves.values(), strict=True)] == timeline.totals
    assert min(map(min, timeline.curves.values())) >= 0
    for event in range(0, len(timeline) + 1, 97):
        assert sum(s.nbytes for s in timeline.alive(event)) == timeline.bytes_at(event)
    plain = fresh(watched.workload)
    unmetered = peak(blocks(allocations(event_tree(plain.step))))
    assert abs(peak(events_of(timeline)) - unmetered) <= max(64, unmetered // 1000)
    assert all(map(torch.equal, watched.values, plain.values()))


def test_every_byte_of_scratch_lies_inside_the_op_that_took_it(watched):
    scratch = of(watched.timeline, "workspace")
    assert scratch
    assert [s for s in scratch if not s.op or s.phase == "before" or not s.line.source] == []
    history = watched.meter._history
    marked = kernel_spans(watched.tree)
    assert set(marked) == set(range(len(history.ops)))
    for storage in scratch:
        birth = history.births[storage.id]
        assert storage.op == history.ops[birth.op].name
        assert birth.nbytes in marked[birth.op], f"{storage.nbytes} B in {storage.op}"


def kernel_spans(roots) -> dict[int, list[int]]:
    """Op number → sizes of the blocks allocated from the end of the op before to its own end, by the log itself."""
    rows = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.name.startswith(MARK):
            rows.append((node.end_time_ns, int(node.name.removeprefix(MARK)), 0))
        elif node.tag == torch._C._profiler._EventType.Allocation:
            rows.append((node.start_time_ns, -1, node.extra_fields.alloc_size))
    spans, sizes = {}, []
    for _, op, nbytes in sorted(rows, key=lambda row: row[0]):
        if op >= 0:
            spans[op], sizes = sizes, []
        elif nbytes > 0:
            sizes.append(nbytes)
    return spans


def test_memory_that_the_allocator_never_had_keeps_its_place_in_the_timeline():
    numpy = pytest.importorskip("numpy")
    with Meter(workspace=True) as meter:
        outside = torch.from_numpy(numpy.ones(1000, dtype="float32"))
        doubled = outside * 2
        del outside
        doubled.sum()
    timeline = meter.timeline
    outside, result = (s for s in timeline.storages.values() if s.nbytes == 4000)
    assert (outside.op, result.op) == ("lift_fresh", "mul")
    assert timeline.lifetime(outside.id)[0] < timeline.lifetime(result.id)[0] < timeline.lifetime(outside.id)[1]


def test_what_is_taken_after_the_last_op_is_that_ops_and_the_file_can_be_read(tmp_path):
    with Meter(workspace=True) as meter:
        torch.ones(3)
        random = torch.get_rng_state()
    with Meter(workspace=True) as without_ops:
        torch.UntypedStorage(400)
    assert without_ops.timeline.events == []
    meter.timeline.save(tmp_path / "step.json")
    last = Timeline.load(tmp_path / "step.json").events[-1]
    assert (last.delta, last.op, last.phase) == (random.nbytes, "ones", "forward")


@pytest.mark.parametrize("made", ["before, and named", "before", "inside"])
def test_a_storage_that_moves_gives_back_what_it_had_wherever_that_came_from(made):
    x = torch.ones(10)
    with Meter(inputs=x if made == "before, and named" else (), workspace=True) as meter:
        if made == "inside":
            x = torch.ones(10)
        x.add_(1)
        x.resize_(1000)
        after = x.untyped_storage().nbytes()
        (torch.ones(1000, requires_grad=True) * 2).sum().backward()
        x.untyped_storage().resize_(0)
        del x
    timeline = meter.timeline
    grown = next(i for i, event in enumerate(timeline.events) if event.op == "resize_")
    assert [(e.delta, e.op, e.phase) for e in timeline.events[grown : grown + 2]] == [
        (4000, "resize_", "forward"),
        (-40, "resize_", "forward"),
    ]
    assert timeline.bytes_at(grown + 2) == after == 4000
    assert timeline.totals[-1] == 0


def test_what_an_op_finds_and_gives_another_size_is_there_before(tmp_path):
    x, out = torch.ones(100), torch.empty(3)
    with Meter(inputs=x, workspace=True) as meter:
        torch.mul(x, x, out=out)
    meter.timeline.save(tmp_path / "step.json")
    assert [event.delta for event in Timeline.load(tmp_path / "step.json").events] == [12, 400, -12]


def test_what_an_earlier_log_knows_dies_once_in_the_next_one():
    with Meter(workspace=True):
        x = torch.ones(100)
    with Meter(inputs=x, workspace=True) as meter:
        del x
        torch.ones(3)
    assert meter.timeline.totals == [400, 0, 12, 0]


def test_an_op_that_returns_a_zero_tensor_without_memory_is_metered():
    x = torch.randn(5, requires_grad=True)
    with Meter(workspace=True) as meter:
        x.sgn().sum().backward()
    assert torch.equal(x.grad, torch.zeros(5)) and meter.timeline.peak_bytes > 0


def test_workspace_inside_another_profiler_is_refused_and_leaves_nothing():
    meter = Meter(inputs=torch.ones(3), workspace=True)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match="expected no profiler"),
    ):
        meter.__enter__()
    with meter:
        torch.ones(10).sum()
    assert meter.timeline.bytes_at(0) == 12
    assert not torch.autograd._profiler_enabled()


def event_of_the_profiler(tag, name: str = "[memory]", at: int = 0, **fields) -> SimpleNamespace:
    return SimpleNamespace(
        tag=tag, name=name, children=[], start_time_ns=at, end_time_ns=at + 1, extra_fields=SimpleNamespace(**fields)
    )


def test_what_another_devices_allocator_logs_is_no_scratch_of_the_cpus():
    rows = [
        event_of_the_profiler(ALLOCATION, at=at, ptr=at, alloc_size=100, device=torch.device(device))
        for at, device in enumerate(("cpu", "cuda:0", "meta", "cpu"))
    ]
    assert _flatten(rows) == [("bytes", 0, 100), ("bytes", 3, 100)]


@pytest.mark.parametrize("name", ["memlab 3", MARK, MARK + "step"])
def test_a_mark_of_the_readers_own_in_the_profiler_is_none_of_the_meters(name):
    with Meter(workspace=True) as meter, torch.profiler.record_function(name):
        torch.ones(1000).sum()
    assert [s.op for s in meter.timeline.storages.values() if s.nbytes == 4000] == ["ones"]


def mapped(function, value):
    return tree_map(lambda one: function(one) if isinstance(one, torch.Tensor) else one, value)


def held_by(*values) -> int:
    """The bytes behind all tensors in some values, each storage counted once; a zero without memory has none."""
    parts = []
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
            parts += [tensor._indices(), tensor._values()]
        elif isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_csr:
            parts += [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif isinstance(tensor, torch.Tensor) and not tensor._is_zerotensor():
            parts.append(tensor)
    return sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values())


@torch.no_grad()
def in_place(op, first, args, kwargs):
    changed = mapped(torch.clone, first)
    return op.inplace_variant(changed, *args, **kwargs), changed


@torch.no_grad()
def into_others(op, first, args, kwargs):
    empty = mapped(lambda one: torch.empty(0, dtype=one.dtype), op(first, *args, **kwargs))
    return op(first, *args, **kwargs, out=empty), empty


KEEPS_WHAT_IT_SAVED = "nn.functional.linear_cross_entropy"  # also after backward, as long as its result lives


def runs_of_torchs_ops(part: int):
    """A tenth of the ops as they are, in place and with `out`: name, function, what makes a first sample's inputs."""
    for op in ops_of_torch()[part::10]:
        if not op.dtypes or op.name.startswith(KEEPS_WHAT_IT_SAVED):  # none: for other devices than a CPU
            continue
        dtype = torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]
        ways = [forward_and_backward, *[in_place] * (op.inplace_variant is not None), *[into_others] * op.supports_out]
        torch.manual_seed(0)
        samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point)
        for way, sample in itertools.product(ways, itertools.islice(samples, 1)):

            def copies(sample=sample):
                values = sample.input, sample.args, sample.kwargs
                return mapped(lambda one: one.detach().clone().requires_grad_(one.requires_grad), values)

            yield f"{op.formatted_name}, {way.__name__}", functools.partial(way, op), copies


@pytest.mark.filterwarnings("ignore")
@some("part", range(10), keep=1)
def test_of_torchs_own_list_of_ops_every_byte_is_counted_and_let_go(part, tmp_path):
    compared, wrong = 0, []
    for name, run, copies in runs_of_torchs_ops(part):
        try:
            run(*copies())
        except (RuntimeError, TypeError, ValueError, AssertionError):  # not in place, not with this `out`, or for CUDA
            continue
        inputs = copies()
        tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        with Meter(inputs=tensors, workspace=True) as meter:
            result = run(*inputs)
            gradients = [one.grad for one in tensors]
            found, expected = meter.held_bytes, held_by(inputs, result, gradients)
            del result, gradients
            for one in tensors:
                one.grad = None
            left = meter.held_bytes - held_by(inputs)
        timeline = meter.timeline
        log = blocks(allocations(meter._log._profile.profiler.kineto_results.experimental_event_tree()))
        timeline.save(tmp_path / "op.json")
        if (
            found != expected
            or left
            or ([delta for _, delta in events_of(timeline)] != [delta for _, delta in log] and meter._history.ops)
            or [sum(moment) for moment in zip(*timeline.curves.values(), strict=True)] != timeline.totals
            or Timeline.load(tmp_path / "op.json").totals != timeline.totals
        ):
            wrong.append((name, found, expected, left))
        compared += 1
    assert wrong == []
    assert compared > 60


class Card:
    """The statistics of an imagined caching allocator, whose peak can be reset."""

    def __init__(self):
        self.held = self.highest = 0

    def take(self, nbytes: int) -> None:
        self.held += nbytes
        self.highest = max(self.highest, self.held)

    def statistics(self) -> dict:
        figures = {"current": self.held, "peak": self.highest}
        return {f"{name}_bytes": {"all": dict(figures)} for name in CUDALevels.NAMES}

    def reset_peak(self) -> None:
        self.highest = self.held


def run_on(card: Card, *ops: tuple[int, int, int], met: int = 0) -> History:
    """Run ops, each given as (bytes of its result, passing scratch, lasting workspace), under CUDACounters.

    met: bytes of a tensor that is on the card already, and that the first op reads.
    """
    history, device = History(), torch.device("cuda", 0)
    levels = CUDALevels(history, device, card.statistics, card.reset_peak)
    with levels, CUDACounters(history, device, levels) as log:
        for result, passing, lasting in ops:
            number = len(history.ops)
            history.ops.flat += ("kernel", FORWARD, -1, "", -1, -1)
            if met and number == 0:
                history.born(piece(met, device), met, number, FORWARD, -1)

            def kernel(result=result, passing=passing, lasting=lasting):
                card.take(lasting)
                card.take(result)
                card.take(passing)
                card.take(-passing)

            log.run(number, kernel, (), {})
            if result:
                history.born(piece(result, device), result, number, FORWARD, -1)
    return history


def piece(nbytes: int, device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(shape=(nbytes,), dtype=torch.uint8, device=device, is_nested=False)


@pairs("result, passing, lasting", [0, 512, 4096], [0, 100, 9000], [0, 8_519_680])
def test_cuda_counters_tell_results_from_passing_scratch_and_from_workspace_that_stays(result, passing, lasting):
    card = Card()
    card.take(1_000_000)
    timeline = run_on(card, (result, passing, lasting)).timeline()
    scratch = sorted((s.nbytes, timeline.lifetime(s.id)[1] is not None) for s in of(timeline, "workspace"))
    assert scratch == sorted([(passing, True)] * bool(passing) + [(lasting, False)] * bool(lasting))
    assert timeline.peak_bytes == max(card.highest - 1_000_000, 0)
    assert timeline.totals[-1] == card.held - 1_000_000


def test_cuda_counters_keep_the_order_of_ops_and_the_levels_of_the_whole_block():
    card = Card()
    history = run_on(card, (100, 0, 0), (200, 1000, 0), (300, 10, 50))
    timeline = history.timeline()
    assert [e.delta for e in timeline.events] == [100, 200, 1000, -1000, 300, 50, 10, -10]
    assert timeline.workspace
    assert timeline.levels["reserved"] == {"before": 0, "peak": 1300, "after": 650}


def test_a_tensor_that_an_op_meets_for_the_first_time_is_not_counted_as_what_the_op_brought():
    card = Card()
    card.take(4000)
    history = run_on(card, (4000, 0, 8000), (100, 0, 0), met=4000)
    assert [e.delta for e in history.timeline().events] == [4000, 4000, 8000, 100]


def levels_of(card: Card, history: History) -> CUDALevels:
    return CUDALevels(history, torch.device("cuda", 0), card.statistics, card.reset_peak)


def test_an_outer_meters_peak_outlives_an_inner_meters_reset():
    card, outer, inner = Card(), History(), History()
    with levels_of(card, outer):
        card.take(1000)
        card.take(-1000)
        with levels_of(card, inner):
            card.take(10)
    assert outer.levels["requested"] == {"before": 0, "peak": 1000, "after": 10}
    assert inner.levels["requested"] == {"before": 0, "peak": 10, "after": 10}


def test_an_inner_meters_peak_outlives_the_resets_around_an_outer_meters_ops():
    card, outer, inner = Card(), History(), History()
    device = torch.device("cuda", 0)
    outer.ops.flat += ("kernel", FORWARD, -1, "", -1, -1)
    with levels_of(card, outer) as levels, CUDACounters(outer, device, levels) as log, levels_of(card, inner):
        card.take(1000)
        card.take(-1000)
        log.run(0, lambda: None, (), {})
    assert inner.levels["requested"]["peak"] == 1000


def test_levels_that_are_left_are_asked_no_more():
    card, gone = Card(), History()
    with levels_of(card, gone) as levels:
        pass
    levels._statistics = None
    with levels_of(card, History()) as inner:
        inner.reset_peak()
