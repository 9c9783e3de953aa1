"""Notebooks are executed in their own folder by this Python, saved clean or not at all, and judged."""

import base64
import json
import os
import signal
import sys
import threading

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from memlab.book import notebooks
from memlab.book.notebooks import NotebookError, clean, execute, main, problems
from tests.harness import traces

DOT = base64.b64encode(b"not really a picture").decode()


def save(path, *cells, **metadata):
    nbformat.write(new_notebook(cells=list(cells), metadata=metadata), path)
    return path


def ran(source="x = 1", *outputs, count=1):
    return new_code_cell(source, outputs=list(outputs), execution_count=count)


def printed(text):
    return new_output("stream", name="stdout", text=text)


def picture(metadata=None, text="<Figure size 640x480 with 1 Axes>"):
    return new_output("display_data", data={"image/png": DOT, "text/plain": text}, metadata=metadata or {})


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook executed from another folder, twice, with a foreign kernel installed under the name python3."""
    folder = tmp_path_factory.mktemp("book")
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    foreign = {"argv": ["/nowhere/python", "{connection_file}"], "display_name": "foreign", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(foreign))
    path = save(
        folder / "one.ipynb",
        new_markdown_cell("# A chapter"),
        new_code_cell("import os, sys\nprint(os.path.basename(os.getcwd()))", metadata={"ExecuteTime": {"start": "x"}}),
        new_code_cell("sys.executable"),
        new_code_cell("raise SystemExit", metadata={"tags": ["gpu", "skip-execution"]}),
        new_code_cell("print('a')\nsys.stdout.flush()\nprint('b')"),
        widgets={"application/vnd.jupyter.widget-state+json": {"state": {}}},
        kernelspec={"name": "somebody-elses", "display_name": "x"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        execute(path)
        first = path.read_bytes()
        execute(path)
    return path, first


def test_a_notebook_runs_in_its_own_folder_with_the_running_python_twice_to_the_same_bytes(executed):
    path, first = executed
    notebook = nbformat.read(path, as_version=4)
    _, where, python, _, last = notebook.cells
    assert where.outputs[0].text == path.parent.name + "\n"
    assert python.outputs[0].data["text/plain"] == repr(sys.executable)
    assert [output.text for output in last.outputs] == ["a\nb\n"], "pieces of one stream are saved as one"
    assert path.read_bytes() == first and first.endswith(b"}\n")
    counts = [cell.get("execution_count") for cell in notebook.cells]
    assert counts == [None, 1, 2, None, 3], "the one tagged skip-execution is left out"


def test_what_differs_between_machines_is_not_saved(executed):
    notebook = nbformat.read(executed[0], as_version=4)
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info
    assert [set(cell.metadata) for cell in notebook.cells] == [set(), set(), set(), {"tags"}, set()]


DEADLY = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time\ntime.sleep(9)"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("undefined_name", "cell 1 failed with NameError: name 'undefined_name' is not defined"),
        (DEADLY, "the kernel died in cell 1"),
        ("import time\ntime.sleep(60)", "cell 1 was still running after 2 s"),
    ],
    ids=["error", "dead kernel", "timeout"],
)
def test_a_failing_cell_is_named_and_leaves_the_folder_as_it_was(tmp_path, source, message):
    path = save(tmp_path / "bad.ipynb", new_code_cell("1 + 1"), new_code_cell(source), new_code_cell("2"))
    before = path.read_bytes()
    with pytest.raises(NotebookError, match="bad.ipynb: ") as caught:
        execute(path, timeout=2)
    assert message in str(caught.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it looks for its children in /proc")
@pytest.mark.parametrize("seconds", [0.3, 2.5], ids=["while the kernel starts", "while a cell runs"])
def test_ctrl_c_reaches_the_caller_and_no_kernel_stays(tmp_path, seconds):
    path = save(tmp_path / "long.ipynb", new_code_cell("import time\ntime.sleep(600)"))
    before = path.read_bytes()
    ctrl_c = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
    earlier = traces()["processes"]
    try:
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            execute(path, timeout=20)
    finally:
        ctrl_c.join()
        signal.signal(signal.SIGINT, handler)
    assert set(traces()["processes"]) <= set(earlier)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = save(tmp_path / "one.ipynb", ran())
    before = path.read_bytes()
    monkeypatch.setattr("memlab.files.os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        notebooks._save(nbformat.read(path, as_version=4), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_editing_one_cell_changes_only_its_own_id():
    notebook = new_notebook(cells=[new_code_cell("a"), new_code_cell("b"), new_code_cell("b"), new_markdown_cell("b")])
    clean(notebook)
    before = [cell.id for cell in notebook.cells]
    assert len(set(before)) == 4
    notebook.cells[0].source = "c"
    notebook.cells.insert(1, new_code_cell("d"))
    clean(notebook)
    after = [cell.id for cell in notebook.cells]
    assert after[0] != before[0]
    assert after[2:] == before[1:]


def test_a_notebook_that_ran_from_the_top_has_no_problems(tmp_path):
    path = save(
        tmp_path / "fine.ipynb",
        new_markdown_cell("Prose may name /home/you without harm."),
        ran("plot()", picture(), printed("The peak is 1.5 MiB at event 12.\n"), count=1),
        ran("plot()", picture({"image/png": {"alt": "A rising line"}}), count=2),
        ran("plot()", picture({"alt": "A rising line"}), count=3),
        ran("slider()", picture(text="Memory rises, then falls to zero."), count=4),
        new_code_cell("gpu()", metadata={"tags": ["gpu", "skip-execution"]}),
        new_code_cell(""),
        ran("print()", printed("https://example.org/home/page, 0x10 and 3/home/4"), count=5),
    )
    assert problems(path) == []


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([new_code_cell("x")], "cell 0 has not been executed"),
        ([ran(count=2)], "cell 0 was executed as number 2; expected 1: run from the top"),
        ([ran("x", new_output("error", ename="E", evalue="v", traceback=[]))], "cell 0 ends in an error: E: v"),
        ([ran("x", picture())], "cell 0 shows an image without alt text"),
        ([ran("x", picture(), printed("peak | 12\nlow | 3\n"))], "cell 0 shows an image without alt text"),
        ([ran("x", printed("<object at 0x7f12ab34cd56>"))], "cell 0 prints an address: 0x7f12ab34cd56"),
        ([ran("x", printed("in /home/ada/m.py, line 3"))], "cell 0 prints a path of this machine: /home/ada/m.py,"),
        ([ran("x", printed(r"in C:\Users\ada\m.py"))], r"cell 0 prints a path of this machine: C:\Users\ada\m.py"),
        ([ran("x", new_output("execute_result", data={"text/html": '<a href="/tmp/x">'}))], "machine: /tmp/x"),
        ([ran("\n".join("x" * 26))], "cell 0 has 26 lines; expected at most 25"),
        ([new_markdown_cell("x") for _ in range(41)], "41 cells; expected at most 40"),
        ([ran("x", printed("y" * 600_000))], "expected at most 512,000"),
    ],
)
def test_a_problem_is_named_once_with_its_cell(tmp_path, cells, problem):
    found = problems(save(tmp_path / "bad.ipynb", *cells))
    assert len(found) == 1
    assert problem in found[0]


def test_saved_widget_state_is_a_problem(tmp_path):
    path = save(tmp_path / "bad.ipynb", widgets={"application/vnd.jupyter.widget-state+json": {"state": {"a": 1}}})
    assert problems(path) == ["widget state is saved; execute it with python -m memlab.book.notebooks"]


def test_the_command_checks_without_changing_and_reports_every_file(tmp_path, capsys):
    bad = save(tmp_path / "bad.ipynb", new_code_cell("x"))
    fine = save(tmp_path / "fine.ipynb", ran())
    before = bad.read_bytes()
    assert main(["--check", str(fine)]) == 0
    assert main(["--check", str(bad), str(tmp_path / "absent.ipynb"), str(fine)]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: cell 0 has not been executed" in out
    assert "absent.ipynb" in out
    assert bad.read_bytes() == before


DAMAGED = ["", "{}", "[]", '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "zzz"}]}']


@pytest.mark.parametrize("words", [["--check"], []], ids=["checked", "executed"])
def test_a_file_that_is_no_notebook_is_named_and_the_others_are_looked_at(tmp_path, capsys, words):
    files = [tmp_path / f"damaged{number}.ipynb" for number in range(len(DAMAGED))]
    for file, text in zip(files, DAMAGED, strict=True):
        file.write_text(text)
    bad = save(tmp_path / "bad.ipynb", new_code_cell("1 / 0"))
    assert main([*words, *map(str, files), str(bad)]) == 1
    told = capsys.readouterr().out.splitlines()
    for file, line, text in zip(files, told, DAMAGED, strict=False):
        assert line.startswith(f"{file}: expected a notebook, found a file that is damaged (")
        assert file.read_text() == text
    others = told[len(DAMAGED) :]
    assert others and "damaged" not in "".join(others)


def test_the_command_saves_what_runs_and_goes_on_after_what_does_not(tmp_path, capsys):
    bad = save(tmp_path / "bad.ipynb", new_code_cell("1 / 0"))
    fine = save(tmp_path / "fine.ipynb", new_code_cell("1 + 1"))
    assert main([str(bad), str(fine)]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: cell 0 failed with ZeroDivisionError: division by zero" in out
    assert f"{fine}: executed in" in out
    assert nbformat.read(fine, as_version=4).cells[0].outputs[0].data["text/plain"] == "2"
