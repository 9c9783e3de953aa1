"""The health report tells what is there, what is missing and what to do, and fails at nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memlab import record
from memlab.__main__ import main
from memlab.book import benchmarks, health, machine, records
from memlab.book.health import Health, report

ROOT = Path(__file__).parents[1]
HEADER = """# 01 · A title

**In one sentence:** you will see.

| | |
|---|---|
| You need to know | nothing |
| Minutes on two CPU cores | 5 |
| Peak memory | about 1,500 GiB in the notebook's process, and 3 KiB of imagined tensors |
| GPU | required: two of them |
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """No GPU, and whoever asks CUDA for anything else than whether there is one fails."""
    for name in ("device_count", "get_device_properties", "get_device_name", "mem_get_info", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} without a GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(health, "driver", lambda: "")


def chapter(folder, name="01_x", header=HEADER):
    cells = [{"cell_type": "markdown", "source": header}, {"cell_type": "code", "source": "1"}]
    (folder / f"{name}.ipynb").write_text(json.dumps({"cells": cells}))
    return folder / f"{name}.ipynb"


def test_the_command_reports_this_machine_and_every_chapter_in_ascii_where_no_other_sign_can_be_printed():
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "memlab"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
    assert torch.__version__ in done.stdout and "free main memory" in done.stdout
    for path in (ROOT / "chapters").glob("[0-9][0-9]_*.ipynb"):
        assert path.name[:2] + " ? " in done.stdout
    results = ROOT / "chapters" / "results"
    records = [*results.glob("*.json"), *(results / "benchmark").glob("*.json")]
    assert ("recorded on: nothing" in done.stdout) == (not records)


def test_the_command_takes_no_arguments_and_says_so(capsys):
    for words, status in ((["--help"], 0), (["chapters"], 2)):
        with pytest.raises(SystemExit) as done:
            main(words)
        assert done.value.code == status
    told = capsys.readouterr()
    assert told.out.startswith("usage: python -m memlab [-h]") and "unrecognized arguments: chapters" in told.err


def test_where_nothing_is_missing_nothing_is_wrong_and_without_the_book_it_says_where_to_get_it(monkeypatch, tmp_path):
    free, total = machine.free_memory_bytes(), machine.main_memory_bytes()
    assert free is None or total is None or 0 < free <= total
    monkeypatch.setattr(health, "version", lambda name: "1.0")
    monkeypatch.setattr(health, "free_memory_bytes", lambda: 2**34)
    told = report(ROOT / "chapters")
    assert told.endswith("nothing is wrong") and "01 · " in told
    assert "no chapters in" in report(tmp_path / "nowhere")


def test_a_package_that_is_missing_is_named_with_how_to_get_it_and_a_full_disk_is_a_problem(monkeypatch):
    monkeypatch.setattr(health.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 2**20))
    for package in (*record.NEEDS, "jupyterlab", "ipywidgets", "anywidget"):
        monkeypatch.setattr(health, "version", lambda name, missing=package: None if name == missing else "1.0")
        found = Health()
        assert f"{package} missing" in repr(found.machine())
        problem = found.problems[0]
        assert problem.startswith(f"{package} is missing, which is needed for ")
        assert "pip install -e '.[lab]'" in problem
        assert any(problem.startswith("1.0 MiB free on disk") for problem in found.problems)


def test_a_chapter_that_this_machine_cannot_run_is_named_with_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "free_memory_bytes", lambda: 2**30)
    chapter(tmp_path)
    found = Health(tmp_path)
    lacks = "needs 1.5 TiB, 1.0 GiB are free; no GPU (required: two of them)"
    assert found.chapters().rows[0][-1] == lacks
    no_room, no_gpu = found.problems
    assert no_room.startswith("chapter 01_x: needs 1.5 TiB, 1.0 GiB are free: close other programs")
    assert no_gpu.startswith("chapter 01_x: no GPU (required: two of them): use a machine that has what it needs")
    monkeypatch.setattr(health, "free_memory_bytes", lambda: 1500 * 2**30)
    found = Health(tmp_path)
    found.gpus = [("A GPU", 1, 1)]
    assert found.chapters().rows[0][-1] == "enough" and not found.problems
    monkeypatch.setattr(health, "free_memory_bytes", lambda: None)
    assert "needs" not in repr(Health(tmp_path).chapters())


@pytest.mark.parametrize("text", ["", "[]", '{"cells": []}'])
def test_a_chapter_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "01_x.ipynb").write_text(text)
    found = Health(tmp_path)
    assert found.chapters().rows == []
    assert found.problems[0].startswith("01_x.ipynb cannot be read (")
    assert found.problems[0].endswith(f"restore it, git -C {tmp_path} checkout -- 01_x.ipynb")


@pytest.mark.parametrize("here", [True, False])
def test_records_are_listed_and_what_is_stale_here_failed_or_damaged_is_told(tmp_path, here):
    source = records.source_of(chapter(tmp_path))
    entry = {"status": "recorded", "date": "2026-01-31", "commit": "c", "torch": "2.12.0", "driver": "", "seconds": 1}
    document = records.KIND.empty("A GPU", True)
    document["chapters"] = {
        "02_gone": {**entry, "source": source, "claims": {}},
        "01_x": {**entry, "source": source, "claims": {}},
        "03_bad": {**entry, "source": source, "claims": {}, "status": "failed", "error": "e"},
        "04_damaged": {**entry, "source": source, "claims": {}},
    }
    chapter(tmp_path, "03_bad")
    (tmp_path / "04_damaged.ipynb").write_text('{"cells": [')
    records.KIND.write(document, tmp_path / "results" / "a-gpu.json")
    benchmark = benchmarks.KIND.empty("CPU", False)
    measured = {**entry, "source": source, "rounds": 1, "processor": "p", "rows": [["a", "b", "c"]]}
    benchmark["measures"] = {
        "m": measured,
        "n": {**measured, "date": "2026-02-01", "failed_since": {**entry, "error": "e"}},
    }
    benchmarks.KIND.write(benchmark, tmp_path / "results" / "benchmark" / "cpu.json")
    for name in ("b-gpu.json", "benchmark/c-gpu.json"):
        (tmp_path / "results" / name).write_text("{}")
    found = Health(tmp_path)
    found.gpus = [("A GPU", 2**36, 2**36)] if here else []
    rows = found.records().rows
    assert [row[:3] for row in rows] == [
        ["A GPU", "01_x", "recorded"],
        ["A GPU", "02_gone", "gone"],
        ["A GPU", "03_bad", "failed"],
        ["A GPU", "04_damaged", "stale"],
        ["CPU", "benchmark", "2 measures recorded, 1 failed"],
    ]
    assert rows[-1][3:] == ["2026-01-31, 2026-02-01", "2.12.0"]
    damaged, also_damaged, gone, failed, *stale, benchmark = found.problems
    assert "b-gpu.json: expected a record as python -m memlab.record writes it" in damaged
    assert "c-gpu.json: expected a record as python -m memlab.benchmark writes it" in also_damaged
    assert gone == "A GPU, 02_gone: gone: no such chapter is here; remove it from results/a-gpu.json"
    assert stale == ["A GPU, 04_damaged: stale: on that GPU, python -m memlab.record 04"] * here
    assert benchmark == "CPU, benchmark: n: e: on that device, python -m memlab.benchmark n"
    assert failed == "A GPU, 03_bad: failed: on that GPU, python -m memlab.record 03"


def with_gpu(monkeypatch, *free):
    class Device:
        name, total_memory = "A GPU", 80 * 2**30

    def memory(index):
        if free[index] is None:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return free[index], Device.total_memory

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(health, "driver", lambda: "570.1")


def test_a_gpu_has_free_and_total_memory_and_one_that_is_taken_is_a_problem(monkeypatch):
    with_gpu(monkeypatch, 70 * 2**30, 8 * 2**30, None)
    found = Health()
    rows = dict(found.machine().rows)
    assert rows["free on GPU 0"] == "70.0 GiB of 80.0 GiB" and rows["NVIDIA driver"] == "570.1"
    assert rows["free on GPU 2"] == "does not answer"
    assert [problem[:6] for problem in found.problems if problem.startswith("GPU ")] == ["GPU 1:", "GPU 2:"]


def test_a_gpu_that_is_broken_is_told_and_not_raised(monkeypatch):
    with_gpu(monkeypatch, 70 * 2**30)

    def broken(index):
        raise torch.cuda.DeferredCudaCallError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    found = Health()
    rows = dict(found.machine().rows)
    assert rows["GPU"] == "a GPU that does not answer" and rows["free on GPU 0"] == "does not answer"
    assert [problem[:6] for problem in found.problems if problem.startswith("GPU ")] == ["GPU 0:"]


@pytest.mark.parametrize(
    ("version", "cuda", "driver", "problem"),
    [
        ("2.10.1", None, "", "expected torch 2.11 or newer, found 2.10.1"),
        ("2.13.0", None, "570.1", "to use the GPU, install one built for CUDA"),
        ("2.13.0", "13.0", "470.2", "torch is built for CUDA 13.0 and sees no GPU"),
        ("2.13.0a0+nv", "13.0", "", None),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_told_from_a_machine_without_one(
    monkeypatch, version, cuda, driver, problem
):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(health, "driver", lambda: driver)
    found = [*health._torch_problems(gpu=False)]
    assert len(found) == (problem is not None) and (problem or "") in "".join(found)


def test_without_packages_beside_torch_or_without_torch_it_still_reports(tmp_path):
    for missing, status, words in [
        ("matplotlib numpy IPython ipywidgets anywidget nbformat nbclient playwright", 0, "packages"),
        ("torch", 1, "PyTorch cannot be imported"),
    ]:
        blocked = f"import sys\nsys.modules |= dict.fromkeys({missing.split()})\n"
        (tmp_path / "sitecustomize.py").write_text(blocked)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        done = subprocess.run(
            [sys.executable, "-m", "memlab"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == status and words in done.stdout, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
