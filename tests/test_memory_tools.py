"""One program under every tool: what is planted is true, each cell of the tables follows from it, and tools' faults."""

import inspect
import itertools
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile

from memlab.book import memory_tools, memory_tools_torch, planted
from memlab.book.memory_tools import TOOLS, how_to_run_each, look, named, named_by, seen_by_every_tool, what_they_cost
from memlab.book.memory_tools_torch import STEPS, Seen, read_history
from memlab.book.planted import BYTES_KEPT, LEAK_BYTES, LOG_SOFTMAX_BYTES, SCRATCH_BYTES, Planted, peak_bytes
from memlab.memory_monitoring import ProcessMemory, as_snapshot
from memlab.memory_timeline import Meter, imagine
from memlab.units import MiB

CPU = [ProfilerActivity.CPU]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a CPU")


@pytest.fixture(scope="module")
def looks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tools' own packages, at import
        return look()


@pytest.fixture(scope="module")
def metered():
    program = Planted()
    with Meter(program.model, program.optimizer, inputs=program.batch) as meter:
        ends = [meter.event for _ in program.run(STEPS)]
    return meter.timeline, ends


def total_allocated(run, path: Path) -> list[tuple[int, int]]:
    """Bytes and running total of each [memory] event of a profile of `run()`, from its trace file."""
    with profile(activities=CPU, profile_memory=True) as found:
        run()
    found.export_chrome_trace(str(path))
    events = json.loads(path.read_bytes())["traceEvents"]
    arguments = [event["args"] for event in events if event.get("name") == "[memory]"]
    return [(one["Bytes"], one["Total Allocated"]) for one in arguments]


def test_each_planted_line_stands_in_the_source_once():
    source = inspect.getsource(planted.Scratch) + inspect.getsource(planted.Planted)
    for line in (planted.PEAK_LINE, planted.LEAK_LINE, planted.GROWTH_LINE):
        assert [text.strip() for text in source.splitlines()].count(line) == 1


@ON_CPU
def test_the_closed_form_of_the_peak_is_what_the_cpu_allocators_own_log_adds_up_to(tmp_path):
    """The log counts what is allocated while it runs, so the step's peak over what was there before."""
    program = Planted()
    log = total_allocated(lambda: list(program.run(STEPS)), tmp_path / "trace.json")
    held = itertools.accumulate(nbytes for nbytes, _ in log)
    assert max(held) == peak_bytes(STEPS) - planted.before_bytes()


@ON_CPU
def test_a_meter_misses_what_had_leaked_before_it_began_and_nothing_else(metered):
    assert metered[0].peak_bytes == peak_bytes(STEPS) - LEAK_BYTES


def test_the_scratch_is_held_at_the_peak_alone_and_each_step_leaves_behind_the_leak_to_the_byte(metered):
    timeline, ends = metered
    assert max(s.nbytes for s in timeline.alive(timeline.peak_event)) == SCRATCH_BYTES
    (phase,) = (span.phase for span in timeline.phases if span.start <= timeline.peak_event <= span.stop)
    assert phase == "backward"
    assert all(s.nbytes < SCRATCH_BYTES for end in ends for s in timeline.alive(end))
    held = [timeline.bytes_at(end) for end in ends]
    assert {after - before for before, after in itertools.pairwise(held)} == {LEAK_BYTES}


def test_what_is_kept_each_step_is_no_tensors_and_the_leak_is_a_graphs():
    assert LEAK_BYTES == LOG_SOFTMAX_BYTES + 8
    program = Planted()
    list(program.run(2))
    assert sum(map(len, program.seen)) == 3 * BYTES_KEPT and {type(kept) for kept in program.seen} == {bytes}


EXPECTED = {  # peak (None: it has none), the lines it names, growth a step, which planted facts it leads to
    "memlab's Meter": (peak_bytes(STEPS) - LEAK_BYTES, LEAK_BYTES, {"peak", "leak"}),
    "torch.profiler, its table": (None, None, set()),
    "torch.profiler, its trace file": (peak_bytes(STEPS) - planted.before_bytes(), LEAK_BYTES, set()),
    "torch.profiler, its event tree": (peak_bytes(STEPS) - planted.before_bytes(), LEAK_BYTES, {"peak", "leak"}),
    "MemTracker": (peak_bytes(STEPS) - LEAK_BYTES, LEAK_BYTES, set()),
    "census of tensors by gc": (None, 4, set()),
}


@ON_CPU
@pytest.mark.parametrize("name", EXPECTED)
def test_tools_at_the_level_of_storages_are_right_to_the_byte_of_what_they_look_at(looks, name):
    peak, growth, facts = EXPECTED[name]
    seen = looks[name][-1]
    assert (seen.level, seen.peak_bytes, seen.growth_bytes) == ("storages", peak, growth)
    assert named(seen) == facts


def test_a_trace_file_names_the_functions_that_the_lines_are_in(looks):
    seen = looks["torch.profiler, its trace file"][-1]
    first_line = {"backward": planted.Scratch.backward, "step": Planted.step}
    for found, name in ((seen.peak_line, "backward"), (seen.growth_line, "step")):
        number = first_line[name].__code__.co_firstlineno
        assert re.fullmatch(rf".*memlab/book/planted\.py\({number}\): {name}", found)


def test_tracemalloc_sees_the_python_bytes_with_their_line_and_no_tensor(looks):
    seen = looks["tracemalloc"][-1]
    assert named(seen) == {"growth"}
    assert BYTES_KEPT <= seen.growth_bytes < BYTES_KEPT + 1024
    assert seen.peak_bytes < STEPS * BYTES_KEPT + MiB < SCRATCH_BYTES


@ON_CPU
@pytest.mark.skipif("heap" not in ProcessMemory().read(), reason="glibc's figure")
def test_a_monitor_sees_both_growths_as_one_and_no_line(looks):
    seen = looks["memlab's Monitor"][-1]
    assert seen.level == "heap" and not named(seen)
    assert seen.growth_bytes == pytest.approx(LEAK_BYTES + BYTES_KEPT, rel=memory_tools.WITHIN)


@ON_CPU
def test_the_high_water_mark_of_a_process_of_its_own_has_the_scratch_in_it():
    """There malloc has kept no piece as large, so it maps pages that were not resident before."""
    code = "from memlab.book.memory_tools import TOOLS; print(TOOLS['RSS and VmHWM'].run().peak_bytes)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    peak = done.stdout.split()[-1]
    assert peak == "None" or SCRATCH_BYTES - MiB <= float(peak)


def test_no_tool_names_more_than_two_of_the_three_and_two_tools_name_all(looks):
    assert named_by(looks, 1) == 2 and named_by(looks, 2) == 3
    assert named_by({"a": [Seen("storages")], "b": []}, 1) == 0


@ON_CPU
def test_the_tables_cells_are_words_and_shares_of_the_truth(looks):
    rows = {row[0]: row[1:] for row in seen_by_every_tool(looks).rows}
    assert list(rows) == list(TOOLS)
    share = f"{1 - LEAK_BYTES / peak_bytes(STEPS):.1%}"
    assert rows["memlab's Meter"][1:] == [
        share, "the line: gradient passing through Scratch", "the leak", "the line", "2 of 3",
    ]  # fmt: skip
    assert rows["torch.profiler, its table"][2] == "an op, aten::empty"
    assert rows["MemTracker"][2] == "a kind, Temp"
    assert rows["tracemalloc"][1:] == ["no tensors", "–", "the Python bytes", "the line", "1 of 3"]
    assert rows["CUDA's memory history"][1] == "needs a GPU" and rows["Nsight Systems"][1] == "not run here"
    assert {rows[name][1] for name, seen in looks.items() if seen and seen[0].level == "resident"} == {"varies"}


def test_a_tool_that_is_not_installed_is_told_so(monkeypatch):
    def missing():
        raise ImportError("no module named deepspeed")

    tool = TOOLS["DeepSpeed's see_memory_usage"]._replace(run=missing)
    monkeypatch.setattr(memory_tools, "TOOLS", {"DeepSpeed's see_memory_usage": tool})
    looks = look()
    assert looks == {"DeepSpeed's see_memory_usage": []}
    assert seen_by_every_tool(looks).rows[0][2] == "not installed"
    assert what_they_cost(looks).rows == []


def test_costs_and_needs_have_a_row_for_each_tool(looks):
    assert [row[0] for row in what_they_cost(looks).rows] == [name for name in TOOLS if looks[name]]
    assert [row[0] for row in how_to_run_each().rows] == list(TOOLS)
    assert all(cell for row in how_to_run_each().rows for cell in row)


def test_a_history_written_from_a_timeline_leads_to_the_peak_the_leak_and_their_lines():
    with imagine("H100-80GB"):
        program = Planted()
        with Meter(program.model, program.optimizer, inputs=program.batch) as meter:
            list(program.run(STEPS))
    seen = read_history(as_snapshot(meter.timeline))
    assert seen.peak_bytes == meter.timeline.peak_bytes
    assert seen.peak_line == planted.PEAK_LINE
    assert seen.growth_line == planted.LEAK_LINE
    assert seen.growth_bytes == pytest.approx(LEAK_BYTES, abs=16)  # a GPU's cross-entropy keeps other scalars


def test_a_history_with_stacks_leads_to_the_innermost_line_outside_torch():
    file, line = planted.__file__, inspect.getsourcelines(planted.Scratch.backward)[1] + 3
    inner = {"name": "new_ones", "filename": memory_tools_torch.TORCH + "_tensor.py", "line": 1}
    frames = [{"name": "at::empty", "filename": "??", "line": 0}, inner, {"name": "b", "filename": file, "line": line}]
    alloc = {"action": "alloc", "addr": 512, "size": 100, "stream": 0, "frames": frames}
    free = [{**alloc, "action": action} for action in ("free_requested", "free_completed")]
    block = {"size": 512, "requested_size": 40, "state": "active_allocated"}
    dump = {"device_traces": [[], [alloc, *free]], "segments": [{"device": 1, "blocks": [block]}]}
    seen = read_history(dump, device=1)
    assert seen.peak_bytes == 140  # 40 bytes were there before, and are at the end
    assert seen.peak_line == planted.PEAK_LINE and seen.growth_bytes == 0


def test_a_census_steps_over_parameters_without_bytes_and_fake_tensors_whose_bytes_are_symbols():
    """A compiler leaves such behind."""
    lazy = torch.nn.LazyLinear(3)
    assert TOOLS["census of tensors by gc"].run().growth_bytes == 4 and lazy.weight is not None
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    fake = mode.from_tensor(torch.zeros(7, 5))
    assert not isinstance(fake.untyped_storage().nbytes(), int)
    assert isinstance(TOOLS["census of tensors by gc"].run().growth_bytes, float)
