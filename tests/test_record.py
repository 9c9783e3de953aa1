"""A recording keeps what has ended, whatever happens after; a damaged record and a dry run's count for nothing."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from memlab import benchmark, record
from memlab.book import benchmarks, documents, machine, records, verdicts
from memlab.book.claims import Claim
from memlab.book.recorder import Recorder, commit
from tests.tiers import some

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "chapters" / "results").glob("*.json"))
CLAIMING = """
from memlab.book.claims import claim
claim("one", kind="bytes", says="It takes one byte.", predicted=1, measured=1)
claim("two", kind="values", says="It takes two.", predicted=2, measured=3, unit="×", verdict="does not hold");
"""


def write(folder, **cells):
    """A chapter for each keyword, such as c01_x="1 + 1"; returns their paths."""
    paths = []
    for name, source in cells.items():
        paths.append(folder / f"{name[1:]}.ipynb")
        nbformat.write(new_notebook(cells=[new_markdown_cell("# x"), new_code_cell(source)]), paths[-1])
    return paths


def run(path, folder, *chapters, name="A GPU"):
    """Record chapters as if on a GPU; returns the recorder."""
    recorder = Recorder(records.KIND, path, name, True, folder, again=False)
    for chapter in chapters:
        record.record(recorder, chapter, chapter.stem)
    return recorder


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if there were one; the page of claims is left alone."""
    monkeypatch.setattr(record, "device", lambda: ("A GPU", True))
    monkeypatch.setattr(verdicts, "page", lambda folder: f"{[*entries(folder / 'results' / 'a-gpu.json')]}")


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(record, "device", lambda: ("CPU", False))


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def no_kernels(monkeypatch):
    """Chapters run in this process, for tests of what is done with their outcome."""

    def run_here(chapter, progress):
        exec(nbformat.read(chapter, as_version=4).cells[1].source, {})
        return {}

    monkeypatch.setattr(record, "claims_of", run_here)


def command(folder, *words, output=None):
    return [sys.executable, "-m", "memlab.record", "--no-benchmark", "--folder", str(folder),
            *(["--output", str(output)] if output else []), *words]  # fmt: skip


def entries(path):
    return records.KIND.read(path)["chapters"]


def test_a_record_has_every_claim_with_where_and_when_and_recorders_add_to_each_other(tmp_path, capsys):
    one, two = write(tmp_path, c01_one=CLAIMING, c02_two="1 + 1")
    path = tmp_path / "results" / "a-gpu.json"
    first, second = (run(path, tmp_path) for _ in range(2))
    record.record(second, two, "two")
    record.record(first, one, "one")
    found = entries(path)
    assert found.keys() == {"01_one", "02_two"} and found["02_two"]["claims"] == {}
    claims = {id: Claim(id, **fields) for id, fields in found["01_one"]["claims"].items()}
    assert claims["one"].standing == "holds" and claims["two"].measured == 3 and not claims["two"].agrees
    assert found["01_one"]["source"] == records.source_of(one) and found["01_one"]["torch"] == record.torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["01_one"]["date"]) and found["01_one"]["seconds"] > 0
    outcome = first.outcomes[0]
    assert first.well and outcome[:3] == ("01_one", "recorded", f"{found['01_one']['seconds']:.1f}")
    assert record.count(outcome.found["claims"]) == "2, 1 apart from the prediction"
    assert "\r" not in capsys.readouterr().out, "there is no terminal here, so nothing is drawn over"
    assert nbformat.read(one, as_version=4).cells[1].outputs == [], "a chapter is run, and saved nowhere"
    assert {item.name for item in tmp_path.rglob("*")} == {one.name, two.name, path.name, "results"}


def test_what_a_thread_or_a_warning_prints_while_claims_are_told_loses_none(tmp_path, monkeypatch):
    (chapter,) = write(tmp_path, c01_one=CLAIMING)

    def run(notebook, *_, **__):
        told = {"one": {"id": "one", "kind": "bytes", "says": "x", "verdict": "holds", "predicted": 1, "measured": 1,
                        "tolerance": 0, "unit": "B", "on": ""}}  # fmt: skip
        texts = {"stdout": f"half a line memlab-claims {json.dumps(told)}a thread\n", "stderr": "a warning\n"}
        notebook.cells[-1].outputs = [new_output("stream", name=name, text=text) for name, text in texts.items()]

    monkeypatch.setattr("memlab.book.run.run", run)
    assert list(record.claims_of(chapter, lambda *_: None)) == ["one"]


def test_a_chapter_that_fails_is_marked_and_the_others_go_on(tmp_path, capsys, on_a_cpu, no_kernels):
    write(tmp_path, c01_bad="1 / 0", c02_cafe=r"raise OSError('caf\udce9')", c03_good="1 + 1")
    output = tmp_path / "out.json"
    assert record.main(command(tmp_path, output=output)[3:]) == 1
    found = entries(output)
    assert [entry["status"] for entry in found.values()] == ["failed", "failed", "recorded"]
    assert found["01_bad"]["error"] == "ZeroDivisionError: division by zero"
    assert found["02_cafe"]["error"] == "OSError: caf?", "UTF-8 cannot hold it"
    printed = capsys.readouterr().out
    assert "01_bad   failed: ZeroDivisionError: division by zero" in printed and "03_good  dry run" in printed


def test_a_failure_does_not_push_out_an_older_record_and_a_success_forgets_the_failure(tmp_path, no_kernels):
    path = tmp_path / "a.json"
    for source, error in [("1 / 0", "ZeroDivisionError"), ("nothing", "NameError")]:
        run(path, tmp_path, *write(tmp_path, c01_x=source))
        assert error in entries(path)["01_x"]["error"], "the last failure, where it only ever failed"
    assert records.state_of(records.KIND.read(path), "01_x", tmp_path) == "failed"
    run(path, tmp_path, *write(tmp_path, c01_x="1"))
    before = entries(path)["01_x"]
    run(path, tmp_path, *write(tmp_path, c01_x="1 / 0"))
    failed = entries(path)["01_x"]
    since = failed.pop("failed_since")
    assert failed == before and "division by zero" in since["error"]
    assert records.state_of(records.KIND.read(path), "01_x", tmp_path) == "stale, later failed"
    run(path, tmp_path, *write(tmp_path, c01_x="2"))
    assert "failed_since" not in entries(path)["01_x"]
    assert records.state_of(records.KIND.read(path), "01_x", tmp_path) == "recorded"


def test_started_again_it_skips_what_is_recorded_with_the_same_code_torch_and_driver(
    tmp_path, capsys, monkeypatch, on_a_gpu
):
    ran = []
    monkeypatch.setattr(record, "claims_of", lambda chapter, progress: ran.append(chapter.stem) or {})
    write(tmp_path, c01_one="1", c02_two="1", c03_three="1", c04_four="1")
    path = tmp_path / "results" / "a-gpu.json"

    def command_ran(*words):
        ran.clear()
        assert record.main(["--no-benchmark", "--folder", str(tmp_path), *words]) == 0
        return [*ran]

    assert command_ran() == ["01_one", "02_two", "03_three", "04_four"] and command_ran() == []
    assert (tmp_path / "claims.md").read_text() == "['01_one', '02_two', '03_three', '04_four']"
    document = records.KIND.read(path)
    document["chapters"]["01_one"] |= {"date": "2026-01-31", "commit": "another"}
    document["chapters"]["02_two"]["torch"] = "another"
    document["chapters"]["03_three"]["failed_since"] = {"error": "e", "date": "d", "commit": "c", "torch": "t"}
    records.KIND.write(document, path)
    write(tmp_path, c04_four="2")
    capsys.readouterr()
    assert command_ran() == ["02_two", "03_three", "04_four"]
    printed = capsys.readouterr().out
    assert "[1/4] 01_one: skipped: recorded on 2026-01-31" in printed
    assert "--again runs also what was skipped" in printed
    assert command_ran("two") == ["02_two"] and command_ran("--again") == ["01_one", "02_two", "03_three", "04_four"]


def test_the_benchmark_follows_all_chapters_and_its_record_stands_beside_theirs(
    tmp_path, monkeypatch, capsys, no_kernels, on_a_gpu
):
    write(tmp_path, c01_x="1")
    asked, folder = [], ["--folder", str(tmp_path)]
    monkeypatch.setattr(benchmark, "main", lambda words: asked.append(words) or len(asked) - 1)
    assert record.main(folder) == 0
    assert record.main([*folder, "--again", "--output", str(tmp_path / "out" / "a.json")]) == 1
    assert "benchmark  exit status 1, see above" in capsys.readouterr().out
    assert record.main([*folder, "01"]) == 0
    monkeypatch.setattr(record, "device", lambda: ("CPU", False))
    record.main([*folder, "--output", str(tmp_path / "b.json")])
    beside = str(tmp_path / "out" / "benchmark" / "a.json")
    assert asked == [folder, [*folder, "--again", "--output", beside], [*folder, "--quick"]]


def test_without_a_gpu_it_is_a_dry_run_outside_the_book_that_counts_as_no_record(
    tmp_path, monkeypatch, capsys, on_a_cpu, no_kernels
):
    write(tmp_path, c01_x="1")
    before = sorted(tmp_path.rglob("*"))
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.setattr(record.tempfile, "tempdir", str(away))
    assert record.main(["--no-benchmark", "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (path,) = away.rglob("*.json")
    assert "DRY RUN" in printed and f"a dry run, which counts as no record, in {path}" in printed
    assert sorted(set(tmp_path.rglob("*")) - {away, path, path.parent}) == before
    assert entries(path)["01_x"]["status"] == "recorded" and records.survey(path.parent) == ([], [])


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")
@some(
    "number, status, before",
    [(signal.SIGINT, 130, {"c01_done": "1"}), (signal.SIGTERM, 143, {}), (getattr(signal, "SIGHUP", None), 129, {})],
    keep=1,
)
def test_stopped_in_the_middle_of_a_chapter_it_keeps_the_others_and_no_kernel_stays(tmp_path, number, status, before):
    sleep = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    write(tmp_path, **before, c02_asleep=sleep, c03_never="1")
    output, pid = tmp_path / "out.json", tmp_path / "pid"
    with subprocess.Popen(
        command(tmp_path, output=output),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # a dry run on every machine
        # A shell or nohup that runs these tests in the background may have told them and their children to ignore it.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=30)
    assert process.returncode == status and errors == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert (output.exists() and [*entries(output)] or []) == [name[1:] for name in before]
    assert "stopped; what had ended is kept" in printed
    assert ("counts as no record, in" in printed) == output.exists() != ("nothing was recorded" in printed)
    assert {item.name for item in tmp_path.iterdir() if item.suffix != ".ipynb"} <= {"out.json", "pid"}


GOOD = {
    **records.KIND.empty("A GPU", True),
    "chapters": {
        "01_x": {"status": "recorded", "date": "d", "commit": "c", "source": "s", "torch": "t", "driver": "",
                 "seconds": 1, "claims": {"one": {"kind": "bytes", "says": "So.", "verdict": "holds", "predicted": 1,
                                                  "measured": 1, "tolerance": 0, "unit": "B"}}}
    },
}  # fmt: skip


def edited(*place, value):
    document = json.loads(json.dumps(GOOD))
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return json.dumps(document)


CLAIM = ("chapters", "01_x", "claims", "one")
DAMAGED = {
    "empty": "",
    "a list": "[]",
    "deep": "[" * 100_000,
    "another format": edited("format", value="memlab-timeline"),
    "a newer version": edited("version", value=2),
    "gpu in words": edited("gpu", value="yes"),
    "chapters in a list": edited("chapters", value=[]),
    "an unknown status": edited("chapters", "01_x", "status", value="fine"),
    "no source": edited("chapters", "01_x", "source", value=KeyError),
    "failed without an error": edited("chapters", "01_x", "status", value="failed"),
    "not a number": edited(*CLAIM, "measured", value=float("nan")),
    "endless seconds": edited("chapters", "01_x", "seconds", value=7).replace('"seconds": 7', '"seconds": 1e999'),
    "half a sign": edited("chapters", "01_x", "date", value="\udce9"),
    "half a byte": edited(*CLAIM, "measured", value=1.5),
    "another field": edited(*CLAIM, "colour", value="red"),
}


def test_the_record_that_is_damaged_below_is_fine_as_it_is(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    assert records.KIND.read(tmp_path / "a.json") == GOOD and apart(GOOD) == []


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_record_is_refused_in_a_sentence_before_anything_is_run(tmp_path, capsys, on_a_gpu, text):
    write(tmp_path, c01_x="open('ran', 'w')")
    path = tmp_path / "a.json"
    path.write_text(text, errors="surrogateescape")
    assert record.main(command(tmp_path, output=path)[3:]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert error.startswith(f"{path}: expected a record") and "move it away, or restore it from git" in error
    assert path.read_text(errors="surrogateescape") == text and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a.json", "a.json/b.json"])
def test_where_no_record_can_be_written_nothing_is_run(tmp_path, capsys, name):
    write(tmp_path, c01_x="open('ran', 'w')")
    inside = tmp_path / "a.json"
    inside.write_text("x") if "/" in name else inside.mkdir()
    assert record.main(command(tmp_path, output=tmp_path / name)[3:]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and str(inside) in error and not (tmp_path / "ran").exists()


def test_a_gpu_that_does_not_answer_is_told_in_a_sentence(tmp_path, capsys, monkeypatch):
    write(tmp_path, c01_x="1")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    answer = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: CUDA error: busy\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: answer)
    assert record.main(command(tmp_path)[3:]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("the GPU does not tell its name (RuntimeError: CUDA error: busy); ")


def test_a_result_that_no_record_can_hold_is_told_and_keeps_no_other_out(tmp_path, monkeypatch):
    chapters = write(tmp_path, c01_bad="1", c02_good="1")
    bad = GOOD["chapters"]["01_x"]["claims"]["one"] | {"says": "caf\udce9"}
    monkeypatch.setattr(record, "claims_of", lambda path, _: {"one": bad} if path == chapters[0] else {})
    recorder = run(tmp_path / "a.json", tmp_path, *chapters)
    assert [*entries(tmp_path / "a.json")] == ["02_good"] and not recorder.well
    assert "failed: no record can hold it: UnicodeEncodeError" in recorder.outcomes[0].status


MANY = """
import sys, time
from pathlib import Path
from memlab.book import benchmarks, documents, recorder
write = documents.write_whole
documents.write_whole = lambda *what: (time.sleep(0.05), write(*what))
here = recorder.Recorder(benchmarks.KIND, Path("a.json"), "A GPU", True, Path())
same = {"rounds": 1, "processor": "p"}
for i in range(15):
    here.run(f"{sys.argv[1]}_{i:02}", "x", lambda progress: {"rows": []}, {"rows": []}, lambda: "s", **same)
"""


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such locks")
def test_two_recorders_at_once_lose_nothing_of_each_other(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = [[sys.executable, "-c", MANY, number] for number in ("01", "02")]
    both = [subprocess.Popen(word, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) for word in words]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert len(benchmarks.KIND.read(tmp_path / "a.json")["measures"]) == 30 and [
        item.name for item in tmp_path.iterdir()
    ] == ["a.json"]


def test_the_record_of_another_gpu_is_not_written_over(tmp_path):
    records.KIND.write(GOOD, tmp_path / "a.json")
    with pytest.raises(ValueError, match="expected a record of B GPU, found one of A GPU"):
        run(tmp_path / "a.json", tmp_path, name="B GPU")


@pytest.mark.parametrize("where", ["os.fsync", "os.replace"])
def test_a_full_disk_harms_nothing_and_leaves_nothing(tmp_path, monkeypatch, where):
    path = tmp_path / "a.json"
    records.KIND.write(GOOD, path)
    with monkeypatch.context() as patch:
        patch.setattr(where, full)
        with pytest.raises(OSError, match="No space left"):
            records.KIND.write(GOOD | {"device": "B GPU"}, path)
    assert records.KIND.read(path) == GOOD and list(tmp_path.iterdir()) == [path]


def test_what_could_not_be_saved_is_saved_as_soon_as_there_is_room_again(tmp_path, monkeypatch, capsys, no_kernels):
    recorder = run(tmp_path / "a.json", tmp_path)
    one, two = write(tmp_path, c01_one="1", c02_two="2")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        record.record(recorder, one, "one")
        recorder.finish()
        assert not recorder.well and "not saved: 1 results" in capsys.readouterr().out
        assert record.main(command(tmp_path, output=tmp_path / "b.json")[3:]) == 1
        assert capsys.readouterr().out.endswith("nothing was recorded\n")
    assert not recorder.saved
    record.record(recorder, two, "two")
    assert [*entries(tmp_path / "a.json")] == ["01_one", "02_two"] and recorder.saved


def test_chapters_are_chosen_by_number_name_or_path_in_that_order_and_once(tmp_path, monkeypatch):
    one, two = write(tmp_path, c01_memory_timeline="1", c02_memory_arithmetic="1")
    assert record.chosen([], tmp_path) == [one, two]
    for name in ("2", "02", "memory_arithmetic", "02_memory_arithmetic", two.name, str(two)):
        assert record.chosen([name], tmp_path) == [two]
    assert record.chosen(["2", "01", "02"], tmp_path) == [two, one]
    monkeypatch.chdir(tmp_path)
    assert record.chosen([f"./{one.name}"], Path(".")) == [Path(one.name)]


def test_a_wrong_name_is_refused_with_those_that_there_are(tmp_path, capsys):
    write(tmp_path, c00_start="1", c01_one="1", c02_two="1")
    for name in ("memory_timelines", "3", "1.5", "", "elsewhere/01_one.ipynb"):
        assert record.main(command(tmp_path, "1", name)[3:]) == 2
        assert capsys.readouterr().err == f"expected chapters among 00_start, 01_one, 02_two; found {name!r}\n"
    assert record.main(["--folder", str(tmp_path / "nowhere")]) == 2
    assert "expected chapters (NN_name.ipynb) in" in capsys.readouterr().err


PAGES = {
    "technique/__init__.py": ("from memlab.technique.page import f", True),
    "technique/page.py": ("def f():\n    from memlab.units import KiB", True),
    "units.py": ("KiB = 1024", True),
    "book/workloads.py": ("class GPT: pass", True),
    "book/epochs.py": ("def lengths(): return __file__.replace('epochs.py', 'lengths.json')", True),
    "book/measures/timing.py": ("x = 1", True),
    "book/lengths.json": ("[1, 2]", True),
    "book/others.json": ("[1, 2]", False),
    "book/figures.py": ("from memlab.book.workloads import GPT\nfrom memlab.book import epochs", False),
    "book/ring_pictures.py": ("x = 1", False),
    "other.py": ("x = 1", False),
}
"""A small library in place of memlab: each page's text, and whether a change of its code makes a record stale."""
USES = """%matplotlib inline
from memlab import technique
from memlab.book import figures, ring_pictures
from memlab.book.measures.timing import interleaved
my_mib, my_moment = 3, 'loss'"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    for name, (text, _) in PAGES.items():
        path = tmp_path / "memlab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(records, "LIBRARY", tmp_path / "memlab")
    return tmp_path / "memlab"


@pytest.mark.parametrize("page", PAGES)
def test_a_record_is_stale_when_a_page_that_the_chapter_measures_or_its_data_has_changed(tmp_path, library, page):
    (path,) = write(tmp_path, c01_x=USES)
    entry = {"source": records.source_of(path)}
    assert not records.is_stale("01_x", entry, tmp_path)
    text, matters = PAGES[page]
    if page.endswith("py"):
        (library / page).write_text(f"{text}\n# said otherwise\n\n'A note.'\n")
        assert not records.is_stale("01_x", entry, tmp_path)
    (library / page).write_text("[1, 3]" if page.endswith("json") else f"{text}\nCHANGED = '# not prose'\n")
    assert records.is_stale("01_x", entry, tmp_path) == matters


CHANGES = {
    ("inline", "widget"): True,
    ("# x", "# Other prose"): False,
    ("my_mib, my_moment = 3, 'loss'", "my_mib, my_moment = 7, 'forward'"): False,
    ("my_mib", "mib"): True,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[1])
def test_a_record_is_stale_when_code_has_changed_and_not_for_prose_or_the_readers_prediction(tmp_path, library, change):
    (path,) = write(tmp_path, c01_x=USES)
    entry = {"source": records.source_of(path)}
    path.write_text(path.read_text().replace(*change))
    assert records.is_stale("01_x", entry, tmp_path) == CHANGES[change]


def test_outputs_and_line_ends_make_no_record_stale_and_a_chapter_that_is_gone_does(tmp_path, library):
    (path,) = write(tmp_path, c01_x=USES)
    entry = {"source": records.source_of(path)}
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="x")]
    nbformat.write(notebook, path)
    page = library / "technique" / "page.py"
    page.write_bytes(page.read_bytes().replace(b"\n", b"\r\n"))
    assert not records.is_stale("01_x", entry, tmp_path)
    path.unlink()
    assert records.is_stale("01_x", entry, tmp_path)


@pytest.mark.parametrize("chapter", ["", "02_x"])
def test_a_claim_that_has_moved_has_the_figure_of_the_chapter_that_has_it_now(tmp_path, chapter):
    document = json.loads(json.dumps(GOOD))
    document["chapters"]["02_x"] = json.loads(json.dumps(document["chapters"]["01_x"] | {"date": "later"}))
    older, newer = write(tmp_path, c01_x="2", c02_x="1")
    document["chapters"]["02_x"]["source"] = records.source_of(newer)
    assert records.says_of(document, "one", tmp_path, chapter=chapter) == "1 B: holds (torch t, later)"
    document["chapters"]["01_x"]["source"] = records.source_of(older)
    newer.write_text(newer.read_text().replace("1", "3"))
    said = "1 B: holds (torch t, later; code changed since)" if chapter else "1 B: holds (torch t, d)"
    assert records.says_of(document, "one", tmp_path, chapter=chapter) == said
    older.unlink()
    newer.unlink()
    assert records.says_of(document, "one", tmp_path) == "1 B: holds (torch t, d; code changed since)"


def test_the_page_of_claims_tells_which_chapter_failed(tmp_path, monkeypatch):
    document = json.loads(json.dumps(GOOD))
    claim = Claim("one", **document["chapters"]["01_x"]["claims"]["one"])
    document["chapters"]["01_x"] |= {"status": "failed", "error": "e", "claims": {}}
    assert records.says_of(document, "one", chapter="01_x") == "failed (d)"
    assert records.says_of(document, "one", chapter="02_y") == records.says_of(document, "one") == records.NONE
    records.KIND.write(document, tmp_path / "results" / "a-gpu.json")
    header = SimpleNamespace(path=tmp_path / "01_x.ipynb", link="x")
    monkeypatch.setattr(verdicts, "headers", lambda folder: {1: header})
    monkeypatch.setattr(verdicts, "saved_claims", lambda path: [claim])
    monkeypatch.setattr(verdicts, "executed_with", lambda path: "torch t")
    assert "A GPU: failed (d)" in verdicts.write(tmp_path).read_text()


def test_the_real_chapters_are_of_their_techniques_and_models(monkeypatch):
    read, pages = Path.read_text, set()
    monkeypatch.setattr(Path, "read_text", lambda path, **how: pages.add(path.name) or read(path, **how))
    records.source_of(ROOT / "chapters" / "01_memory_timeline.ipynb")
    assert {"meter.py", "gpu_ops.py", "workloads.py", "allocator.py", "units.py"} <= pages


def test_a_commit_is_marked_where_files_differ_from_it_and_unknown_outside_git(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    assert commit(tmp_path) == "unknown"
    (tmp_path / "file").write_text("1")
    (tmp_path / "chapters" / "results").mkdir(parents=True)
    (tmp_path / "chapters" / "results" / "a.json").write_text("1")
    (tmp_path / "chapters" / "claims.md").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    (tmp_path / "chapters" / "results" / "a.json").write_text("2")
    (tmp_path / "chapters" / "claims.md").write_text("2")
    clean = commit(tmp_path / "chapters")
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path / "chapters") == clean + "+"


BLOCKED = ("jupyterlab", "ipywidgets", "anywidget", "transformers", "playwright", "nbval", "hypothesis")
SITE = f"""
import importlib.metadata, importlib.util, sys

BLOCKED = {BLOCKED}
find, version = importlib.util.find_spec, importlib.metadata.version

def no_version(name):
    if name in BLOCKED:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

sys.modules |= dict.fromkeys(BLOCKED)
importlib.util.find_spec = lambda name, package=None: None if name in BLOCKED else find(name, package)
importlib.metadata.version = no_version
"""
SHOWS = """
from memlab.book.explorer import explore
from memlab.book.interactive import Interactive
from memlab.book.machine import machine
from memlab.book.predictions import what_if
from memlab.book.style import Picture, canvas
with Meter() as meter:
    x = torch.ones(8)
display(explore(meter.timeline, title="x"), machine(), what_if(layers=2, width=256, tokens=256, batch=1))
display(Interactive(lambda n=1: Picture(canvas(3, 2)[0], "A picture of nothing at all."), n=[1, 2]))
assert dict(machine().rows)["pictures"].startswith("still: ipywidgets")
"""


@pytest.mark.thorough  # by default test_interactive and test_explorer show pictures without widgets
def test_it_runs_where_there_are_neither_widgets_nor_jupyterlab(tmp_path):
    imports = "".join(nbformat.read(ROOT / "chapters" / "01_memory_timeline.ipynb", as_version=4).cells[1].source)
    write(tmp_path, c01_shows=imports + SHOWS)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    paths = [str(tmp_path / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    words = command(tmp_path, output=tmp_path / "out.json")
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert entries(tmp_path / "out.json")["01_shows"]["status"] == "recorded"


def test_what_recording_itself_needs_is_named_where_it_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "NEEDS", ("nbformat", "no_such_package"))
    assert record.main(command(tmp_path)[3:]) == 2
    assert capsys.readouterr().err == ("recording needs no_such_package: python -m pip install no_such_package\n")


def apart(document):
    """The bytes and values claims of a record that are not within their tolerance."""
    claims = (Claim(id, **fields) for entry in document["chapters"].values() for id, fields in entry["claims"].items())
    tested = [claim for claim in claims if claim.kind != "time" and claim.measured is not None]
    return [f"{claim.id}: {claim.measured} for {claim.predicted}" for claim in tested if not claim.agrees]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_recorded_claim_of_bytes_and_values_is_within_its_tolerance(path):
    document = records.KIND.read(path)
    assert document["gpu"], "a dry run is no record: remove its file"
    assert path.name == documents.file_name(document["device"])
    assert apart(document) == []
