"""What only a GPU runs: the pages that ask for streams, events, pinned memory, random states of a GPU, or NCCL.

Each page has a test in which stand-ins run its lines on a CPU. With a GPU, `pytest -m gpu` runs them for real.
"""

import ast
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from memlab.book.workloads import GPT, text_batch
from memlab.data_parallelism import agreement
from memlab.gradient_checkpointing import checkpoint
from memlab.memory_hierarchy import bandwidth
from memlab.offloading import store, swap_activations
from memlab.offloading.link import CudaLink
from memlab.pipeline_parallelism import costs
from memlab.ranks import launch, meshes, run_ranks, torchrun, worker
from memlab.ranks.example import example_device
from tests.late_streams import late_streams

ROOT = Path(__file__).parents[1]
ONLY_A_GPU = re.compile(
    r"cuda\.(Stream|Event|stream\(|current_stream|synchronize|is_current_stream_capturing)|record_stream|"
    r"pin_memory=|get_device_module|nccl"
)
STAND_INS = {
    "caching_allocator/snapshot.py": "test_recording_switches_the_history_on_and_always_off",
    "data_parallelism/agreement.py": "test_a_mean_on_the_cpu_is_sent_from_the_gpu_where_a_group_is_nccls_alone",
    "gradient_checkpointing/state.py": "test_a_second_run_draws_an_accelerators_random_numbers_again",
    "memory_hierarchy/bandwidth.py": "test_copies_are_timed_by_events_and_over_pinned_and_pageable_memory",
    "offloading/courier.py": "test_on_a_gpu_each_copy_waits_for_the_computation_and_is_waited_for",
    "offloading/host_gradients.py": "test_over_a_late_link_the_step_is_the_same_and_nothing_is_on_its_way_after",
    "offloading/host_link.py": "test_over_a_late_link_the_step_is_the_same_and_nothing_is_on_its_way_after",
    "offloading/host_optimizer.py": "test_over_a_late_link_the_step_is_the_same_and_nothing_is_on_its_way_after",
    "offloading/link.py": "test_swapped_over_a_late_link_gradients_are_the_same",
    "offloading/slab.py": "test_without_pinned_memory_there_is_one_warning_and_ordinary_memory",
    "pipeline_parallelism/costs.py": "test_a_stages_time_is_taken_when_the_gpu_has_finished",
    "pipeline_parallelism/messages.py": "test_a_group_with_nccl_begins_with_a_talk_of_all_its_ranks",
    "ranks/example.py": "test_gpus_for_all_ranks_are_asked_for_by_groups_of_nccl",
    "ranks/launch.py": "test_gpus_for_all_ranks_are_asked_for_by_groups_of_nccl",
    "ranks/meshes.py": "test_gpus_for_all_ranks_are_asked_for_by_groups_of_nccl",
    "ranks/torchrun.py": "test_gpus_for_all_ranks_are_asked_for_by_groups_of_nccl",
    "ranks/worker.py": "test_gpus_for_all_ranks_are_asked_for_by_groups_of_nccl",
    "tensor_parallelism/random.py": "test_the_accelerators_stream_is_seeded_and_put_back_too_and_no_other_devices",
}
"""Each page that has such a line, and the test in which a stand-in runs it."""
NONE = {
    "caching_allocator/pluggable.py": "it waits before it counts; tests run its C++",
    "ranks/failures.py": "a pattern in a message",
    "ranks/imagined.py": "an example in a docstring",
}
"""Pages with such a word, and why no stand-in is wanted."""


def code(path: Path) -> str:
    """A page without its docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            node.body[0].value.value = ""
    return ast.unparse(tree)


def test_each_page_with_lines_that_only_a_gpu_runs_is_in_the_list_and_so_is_its_stand_in():
    pages = {path.relative_to(ROOT / "memlab").as_posix(): path for path in (ROOT / "memlab").rglob("*.py")}
    techniques = {name: path for name, path in pages.items() if not name.startswith(("book/", "record", "benchmark"))}
    assert {name for name, path in techniques.items() if ONLY_A_GPU.search(code(path))} == {*STAND_INS, *NONE}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert [name for name, test in STAND_INS.items() if f"def {test}(" not in tests] == []


def gradients(context):
    torch.manual_seed(0)
    model = GPT(layers=3, width=32, heads=2, context=16)
    with context:
        for seed in range(2):
            model(*text_batch(2, 16, seed=seed)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"ram_bytes": 4096}])
def test_swapped_over_a_late_link_gradients_are_the_same(monkeypatch, tmp_path, options):
    streams = late_streams(monkeypatch)
    monkeypatch.setattr(store, "Link", lambda: CudaLink(torch.device("cpu")))
    plain, swapped = (gradients(way) for way in (nullcontext(), swap_activations(tmp_path, min_bytes=1, **options)))
    assert all(map(torch.equal, plain, swapped))
    (stream,) = streams
    assert stream.log.count("copy") >= 20 and stream.log == ["wait", "copy"] * (len(stream.log) // 2)
    assert not stream.waiting


def test_a_source_that_is_written_to_before_its_copy_is_over_is_told(monkeypatch):
    late_streams(monkeypatch)
    link, told = CudaLink(torch.device("cpu")), []
    source, target = torch.ones(4), torch.zeros(4)
    link.down(source, target, lambda: told.append("written to"))
    assert target.sum() == 0
    source.add_(1)
    link.settle()
    assert told == ["written to"]
    for wait in (link.wait, link.release):
        source, target = torch.ones(4), torch.zeros(4)
        wait(link.up(source, target))
        assert target.sum() == 4
    link.down(source, target, told.clear)
    link.synchronize(link.last)
    assert target.sum() == 4 and link.synchronize(None) is None


class Clock:
    """torch.cuda's events and synchronize, which note what they are asked."""

    def __init__(self, monkeypatch):
        self.log = []
        note = self.log.append

        class Event:
            def __init__(self, enable_timing=False):
                self.enable_timing = enable_timing

            def record(self):
                note("record")

            def synchronize(self):
                note("synchronize")

            def elapsed_time(self, end):
                assert self.enable_timing and end.enable_timing
                return 2.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: note("synchronize"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_copies_are_timed_by_events_and_over_pinned_and_pageable_memory(monkeypatch):
    clock, pinned, empty, ones = Clock(monkeypatch), [], torch.empty, torch.ones
    assert bandwidth.best_seconds(lambda: clock.log.append("run"), "cuda", repeats=2) == 0.002
    assert clock.log == ["run", *["record", "run", "record", "synchronize"] * 2]
    monkeypatch.setattr(torch, "empty", lambda *size, device, **options: empty(*size, **options))

    def made(*size, pin_memory, **options):
        pinned.append(pin_memory)
        return ones(*size, **options)

    monkeypatch.setattr(torch, "ones", made)
    curves = bandwidth.transfer_bandwidth([64, 128])
    ways = [f"{way} the GPU, {kind}" for kind in ("pinned", "pageable") for way in ("to", "from")]
    assert list(curves) == ways and pinned == [True, False]
    assert all(curve == [(64, 64 / 0.002), (128, 128 / 0.002)] for curve in curves.values())


def test_a_stages_time_is_taken_when_the_gpu_has_finished(monkeypatch):
    clock = Clock(monkeypatch)
    stage = SimpleNamespace(stream=[SimpleNamespace(is_cuda=True, device="cuda:0")])
    assert costs._Bench.now(stage) > 0 and clock.log == ["synchronize"]


class Accelerator:
    """A device module whose random state is a number that each draw makes larger."""

    _initialized = True

    def __init__(self):
        self.state, self.draws = 5, []

    def get_rng_state(self, device):
        return self.state

    def set_rng_state(self, state, device):
        self.state = state

    def draw(self):
        self.draws.append(self.state)
        self.state += 1


def test_a_second_run_draws_an_accelerators_random_numbers_again(monkeypatch):
    gpu = Accelerator()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)

    def drawing(x):
        gpu.draw()
        return layer(x).sin()

    y = checkpoint(drawing, x)
    gpu.draw()  # something else, between forward and backward
    y.sum().backward()
    assert gpu.draws == [5, 6, 5] and gpu.state == 7


def test_a_mean_on_the_cpu_is_sent_from_the_gpu_where_a_group_is_nccls_alone(monkeypatch):
    moved = []
    monkeypatch.setattr(distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: moved.append(1) or self)
    monkeypatch.setattr(distributed, "all_reduce", lambda mean, group: mean.mul_(2))
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    assert agreement.mean_over_ranks(3) == 3 and moved == [1]


class Formed(Exception):
    """Ends a launch when it forms its group."""


def test_gpus_for_all_ranks_are_asked_for_by_groups_of_nccl(monkeypatch, tmp_path):
    asked, chosen = [], []

    def form(backend, **options):
        asked.append((backend, options["device_id"]))
        raise Formed

    monkeypatch.setattr(distributed, "init_process_group", form)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    both, gpu = "cpu:gloo,cuda:nccl", torch.device("cuda", 1)
    for there, backend, device in ((2, both, gpu), (1, "gloo", None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda there=there: there)
        setup = launch._setup(2, 10, b"")
        assert setup.gpus == (there == 2)
        with pytest.raises(Formed):
            worker._join_group(1, tmp_path, setup)
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(Formed):
            torchrun.run_this_rank(lambda rank: rank, 2, (), 10)
        assert asked == [(backend, device)] * 2
        asked.clear()
    assert chosen == [gpu, gpu]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    made = []
    monkeypatch.setattr(distributed, "init_device_mesh", lambda device, *_, **__: made.append(device))
    monkeypatch.setattr(meshes, "place_in", lambda: (0, 2))
    for backends, mesh_device, device in ((both, "cuda", "cuda:1"), ("gloo", "cpu", "cpu")):
        monkeypatch.setattr(distributed, "get_backend_config", lambda backends=backends: backends)
        meshes.mesh(data=2)
        assert made.pop() == mesh_device and example_device() == device


# What `pytest -m gpu` runs for real, beside the tests of that mark in other files.
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_second_run_draws_the_same_masks():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda(), torch.randn(8, 64, device="cuda")
    found = []
    for run in (lambda function, x: function(x), checkpoint):
        torch.cuda.manual_seed(0)
        model.zero_grad()
        run(model, x.requires_grad_()).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def over_nccl(rank):
    ones = torch.ones(3, device="cuda")
    distributed.all_reduce(ones)
    backends = str(distributed.get_backend_config())
    return backends, ones.sum().item(), example_device(), agreement.mean_over_ranks(rank + 1).item()


@pytest.mark.gpu
@needs_gpu
def test_on_gpus_ranks_talk_by_nccl_each_with_its_own():
    ranks = torch.cuda.device_count()
    for rank, (backends, total, device, mean) in enumerate(run_ranks(over_nccl, ranks)):
        assert "nccl" in backends and device == f"cuda:{rank}"
        assert total == 3 * ranks and mean == (ranks + 1) / 2
