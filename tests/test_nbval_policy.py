"""When outputs are compared and when cells are only executed, tried on small notebooks in a pytest of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests import nbval_policy
from tests.tiers import some

pytest.importorskip("nbval")

ROOT = Path(__file__).parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

PRETEND = """
import importlib.metadata
import tests.nbval_policy as policy
policy.RECORDED_WITH = {{"torch": {torch}, "python": {python!r}}}
policy._has_cuda = lambda: {cuda}
policy.COMPARED = {compared}
"""
SAME_TORCH = 'importlib.metadata.version("torch").split("+")[0]'


HEADER = """# 01 · A title

**In one sentence:** you will see.

| | |
|---|---|
| You need to know | nothing |
| Minutes on two CPU cores | 5 to read, about 1 to run |
| Peak memory | about 400 MiB in the notebook's process, and 3 GiB of imagined tensors |
| GPU | optional |
"""


def write(path: Path, source: str, printed: str, tags: tuple[str, ...] = (), header: str = "") -> None:
    output = new_output("stream", name="stdout", text=printed)
    cell = new_code_cell(source, outputs=[output], execution_count=1, metadata={"tags": list(tags)})
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=[new_markdown_cell(header), cell]), path)


def run_pytest(folder: Path, *arguments: str, torch=SAME_TORCH, python=HERE, cuda=False, compared=(), **env) -> str:
    pretend = PRETEND.format(torch=torch, python=python, cuda=cuda, compared=dict(compared))
    (folder / "conftest.py").write_text(pretend)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder, "-rA"]
    command += ["-p", "no:cacheprovider", "--color=no", *arguments, folder]
    env = {name: value for name, value in os.environ.items() if name != nbval_policy.REQUIRED} | env
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
    return f"{result.stdout}{result.stderr}\nexit status {result.returncode}"


def test_where_outputs_were_recorded_a_changed_output_fails_and_the_same_output_passes(tmp_path):
    write(tmp_path / "same.ipynb", "print(2 + 2)", "4\n")
    write(tmp_path / "changed.ipynb", "print(2 + 2)", "5\n")
    write(tmp_path / "address.ipynb", "print(object())", "<object object at 0x7f0000000000>\n")
    write(tmp_path / "gpu.ipynb", "1 / 0", "", tags=("gpu", "skip-execution"))
    write(tmp_path / "chapters" / "exercises" / "release" / "01_x" / "unsolved.ipynb", "1 / 0", "")
    printed = run_pytest(tmp_path)
    assert "PASSED same.ipynb::Cell 0" in printed
    assert "PASSED address.ipynb::Cell 0" in printed
    assert "FAILED changed.ipynb::Cell 0" in printed
    assert "this cell needs a CUDA GPU" in printed
    assert "1 failed, 2 passed, 1 skipped" in printed
    assert printed.count("notebooks: executed and compared (recorded with ") == 2
    assert ", as here, 2 of 4 cells)" in printed


@some("processes", [(), ("-n", "2", "--dist", "loadfile")], keep=1)
def test_where_comparing_is_required_a_chapter_that_compares_fewer_cells_than_committed_fails_the_run(
    tmp_path, processes
):
    write(tmp_path / "01_same.ipynb", "print(2 + 2)", "4\n")
    write(tmp_path / "02_ignored.ipynb", "print(2 + 2)", "5\n", tags=("nbval-ignore-output",))
    whole = run_pytest(tmp_path, *processes, compared={"01_same": 1}, MEMLAB_COMPARE="required")
    assert "exit status 0" in whole and ", as here, 1 of 2 cells)" in whole
    lacking = {"compared": {"01_same": 1, "02_ignored": 1, "03_gone": 7}}
    assert "exit status 0" in run_pytest(tmp_path, *processes, **lacking)
    printed = run_pytest(tmp_path, *processes, **lacking, MEMLAB_COMPARE="required")
    assert "2 passed" in printed and "exit status 1" in printed
    assert "MEMLAB_COMPARE=required: 02_ignored: expected 1 cells compared, found 0" in printed
    assert (
        "MEMLAB_COMPARE=required: 03_gone: expected 7 cells compared, found 0" in printed and "01_same:" not in printed
    )


def test_where_comparing_is_required_and_impossible_nothing_runs_and_the_reason_is_said(tmp_path):
    write(tmp_path / "same.ipynb", "print(2 + 2)", "4\n")
    for elsewhere, reason in (
        ({"torch": "'9.9.9'"}, "found torch "),
        ({"python": "2.7"}, "found Python "),
        ({"cuda": True}, "found CUDA"),
        ({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, "nbval is not installed"),
    ):
        printed = run_pytest(tmp_path, **elsewhere, MEMLAB_COMPARE="required")
        assert "MEMLAB_COMPARE=required, and outputs would not be compared" in printed and reason in printed
        assert "exit status 4" in printed


def test_elsewhere_cells_are_executed_and_not_compared_and_the_report_says_so(tmp_path):
    write(tmp_path / "changed.ipynb", "print(2 + 2)", "5\n")
    write(tmp_path / "failing.ipynb", "1 / 0", "")
    write(tmp_path / "gpu.ipynb", "print(2 + 2)", "5\n", tags=("gpu", "skip-execution"))
    printed = run_pytest(tmp_path, cuda=True)
    assert "PASSED changed.ipynb::Cell 0" in printed
    assert "FAILED failing.ipynb::Cell 0" in printed
    assert "PASSED gpu.ipynb::Cell 0" in printed and printed.count("NOT COMPARED") == printed.count("found CUDA") == 2


def test_another_python_is_a_difference_and_a_local_build_of_the_same_torch_is_not(monkeypatch):
    monkeypatch.setattr(nbval_policy, "RECORDED_WITH", {"torch": "1.2.3", "python": HERE})
    monkeypatch.setattr(nbval_policy, "_has_cuda", lambda: False)
    monkeypatch.setattr(nbval_policy.importlib.metadata, "version", lambda _: "1.2.3+cpu")
    assert nbval_policy.difference_from_recording() == ""
    monkeypatch.setitem(nbval_policy.RECORDED_WITH, "python", "2.7")
    assert nbval_policy.difference_from_recording() == f"Python {HERE}"


def test_what_the_command_line_asks_for_wins_and_without_nbval_the_report_says_so(tmp_path):
    write(tmp_path / "changed.ipynb", "print(2 + 2)", "5\n")
    assert "1 failed" in run_pytest(tmp_path, "--nbval", torch="'9.9.9'")
    assert "notebooks are not run: nbval was switched off" in run_pytest(tmp_path, "-p", "no:nbval")
    printed = run_pytest(tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert printed.count("NOTEBOOKS ARE NOT RUN: nbval is not installed") == 2


def test_a_kernel_that_held_more_or_less_than_its_chapter_promised_is_noticed_where_outputs_are_compared(tmp_path):
    write(tmp_path / "01_kept.ipynb", "held = b'x' * (320 * 2**20); print(1)", "1\n", header=HEADER)
    write(tmp_path / "02_more.ipynb", "held = b'x' * (500 * 2**20); print(1)", "1\n", header=HEADER)
    write(tmp_path / "03_less.ipynb", "print(1)", "1\n", header=HEADER)
    write(tmp_path / "no_promise.ipynb", "print(1)", "1\n")
    printed = run_pytest(tmp_path, "--nbval")
    assert "PASSED 01_kept.ipynb::Peak memory as promised" in printed
    for name in ("02_more", "03_less"):
        assert f"FAILED {name}.ipynb::Peak memory as promised" in printed
    assert "expected about 400.0 MiB, found " in printed and "2 failed, 5 passed" in printed
    assert "4 passed" in run_pytest(tmp_path, "--nbval-lax")


@some("processes", [("-n", "2", "--dist", "loadfile"), ()], keep=1)
def test_the_last_lines_set_what_each_chapter_took_beside_its_promise(tmp_path, processes):
    if processes:
        pytest.importorskip("xdist")
    write(tmp_path / "01_first.ipynb", "import time; time.sleep(2)", "", header=HEADER)
    write(tmp_path / "02_second.ipynb", "1", "", header=HEADER.replace("01 · A", "02 · Another"))
    write(tmp_path / "exercise.ipynb", "import time; time.sleep(60)", "", tags=("skip-execution",))
    printed = run_pytest(tmp_path, *processes, python="2.7")
    assert "2 passed, 1 skipped" in printed and printed.count("NOT COMPARED (recorded with ") == 2
    head, first, second, together = printed.split("minutes: ")[1].splitlines()[:4]
    assert head.startswith(f"what the cells took here ({len(processes) // 2 or 1} at once), ")
    assert re.fullmatch(r" +\d+ s  01 · A title: 5 to read, about 1 to run", first)
    assert re.fullmatch(r" +\d+ s  02 · Another title: 5 to read, about 1 to run", second)
    took, of_the_second, both = (int(line.split(" s ")[0]) for line in (first, second, together))
    assert took >= 2 and took + of_the_second - 1 <= both <= took + of_the_second + 1


SLIDING = """
from memlab.book.interactive import Interactive
from memlab.book.style import Picture, canvas
def draw(n=1):
    return Picture(canvas(3, 2)[0], f"A picture of {10 / (3 - n):.0f} things.")
slider = Interactive(draw, n=PLACES)
"""


def test_each_picture_behind_sliders_is_drawn_in_a_cell_of_its_own_and_one_that_fails_is_noticed(tmp_path):
    write(tmp_path / "fine.ipynb", SLIDING.replace("PLACES", "[1, 2]"), "")
    write(tmp_path / "broken.ipynb", SLIDING.replace("PLACES", "[1, 2, 3]"), "")
    write(tmp_path / "lost.ipynb", SLIDING.replace("PLACES", "[1, 2]") + "del slider", "")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    printed = run_pytest(tmp_path, "--nbval-lax", PYTHONPATH=path)
    assert "PASSED fine.ipynb::Pictures behind the sliders" in printed
    assert "FAILED broken.ipynb::Pictures behind the sliders" in printed and "ZeroDivisionError" in printed
    assert (
        "FAILED lost.ipynb::Pictures behind the sliders" in printed and "expected 1 sets of sliders, found" in printed
    )
    assert "2 failed, 4 passed" in printed
