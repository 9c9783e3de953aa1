"""A benchmark keeps each measure as it ends and goes on where it was stopped; its pages say what the records say."""

import functools
import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from memlab import benchmark
from memlab.book import benchmarks, measures
from memlab.book.benchmarks import BEGIN, END, KIND, NONE, rows_of
from memlab.book.measures import memory_arithmetic, memory_timeline, mixed_precision
from memlab.book.measures.timing import interleaved
from memlab.book.reached import reached

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "chapters" / "results" / "benchmark").glob("*.json"))
README = f"# A book\n{BEGIN}\nold\n{END}\nlast\n"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A folder of chapters with a README beside it, and three measures on a CPU; `book.ran` tells which ran."""
    ran = []

    def measure(name):
        def measure(device, rounds):
            ran.append(name)
            return [(f"{name} / DDP", f"{rounds}.00×", "≤ 30×"), ("… by the way", device, "")]

        measure.__name__ = name
        return measure

    fakes = tuple(measure(name) for name in ("one", "two", "three"))
    monkeypatch.setattr(benchmark, "MEASURES", fakes)
    monkeypatch.setattr(measures, "MEASURES", fakes)
    monkeypatch.setattr(benchmark, "device", lambda: ("CPU", False))
    (tmp_path / "README.md").write_text(README)

    class Book:
        folder, path = tmp_path / "chapters", tmp_path / "chapters" / "results" / "benchmark" / "cpu.json"

        @staticmethod
        def run(*words):
            """The command's exit status, and what ran."""
            ran.clear()
            return benchmark.main(["--folder", str(Book.folder), *words]), [*ran]

        @staticmethod
        def measures():
            return KIND.read(Book.path)["measures"]

        @staticmethod
        def pages():
            """benchmark.md and README, with spaces that may break."""
            paths = (Book.folder / "benchmark.md", Book.folder.parent / "README.md")
            return [path.read_text().replace("\N{NO-BREAK SPACE}", " ") for path in paths]

        @staticmethod
        def change(name, does):
            """Another function in place of a measure."""
            does.__name__ = name
            changed = [does if one.__name__ == name else one for one in benchmark.MEASURES]
            monkeypatch.setattr(benchmark, "MEASURES", tuple(changed))

    return Book


def failing(device, rounds):
    raise ArithmeticError("planted\nsecond line")


def test_every_measure_is_kept_with_where_and_when_and_all_end_in_one_table(book, capsys):
    assert book.run() == (0, ["one", "two", "three"])
    kept = book.measures()["two"]
    assert kept["rows"] == [["two / DDP", "25.00×", "≤ 30×"], ["… by the way", "cpu", ""]]
    assert (kept["status"], kept["rounds"], kept["torch"]) == ("recorded", 25, torch.__version__)
    assert len(kept["date"]) == 10 and kept["commit"] and kept["source"] and kept["seconds"] >= 0
    printed = capsys.readouterr().out
    assert "[2/3] two: 2 rows in " in printed and f"recorded in {book.path}" in printed
    table = [line.split() for line in printed[printed.index("measure ") :].splitlines()]
    assert [line[0] for line in table[2:8]] == ["one", "…", "two", "…", "three", "…"] and table[4][-1] == "now"
    for page in book.pages():
        assert "two / DDP | 25.00× |" in page


def test_started_again_it_skips_what_is_recorded_and_says_so(book, capsys):
    book.run("two")
    document = KIND.read(book.path)
    document["measures"]["two"]["date"] = "2026-01-31"
    KIND.write(document, book.path)
    capsys.readouterr()
    assert book.run() == (0, ["one", "three"])
    printed = capsys.readouterr().out
    assert "[2/3] two: skipped: recorded on 2026-01-31" in printed and "--again runs also" in printed
    assert [line.split()[-1] for line in printed.splitlines() if " / DDP" in line] == ["now", "2026-01-31", "now"]
    assert book.run() == (0, [])
    assert "nothing was recorded" in capsys.readouterr().out
    assert book.run("--again") == (0, ["one", "two", "three"])
    assert book.run("three", "one", "three") == (0, ["three", "one"])


@pytest.mark.parametrize("field", ["source", "torch", "driver", "processor", "rounds"])
def test_what_was_recorded_with_something_else_is_measured_anew(book, field):
    book.run()
    document = KIND.read(book.path)
    document["measures"]["two"][field] = 7 if field == "rounds" else "another"
    document["measures"]["one"]["commit"] = "another, whose library is the same"
    KIND.write(document, book.path)
    assert book.run() == (0, ["two"])


def test_the_digest_is_of_every_page_of_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "LIBRARY", tmp_path)
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "page.py").write_text("1")
    before = benchmark.library_digest()
    (tmp_path / "notes.txt").write_text("1")
    assert benchmark.library_digest() == before
    for changed in ("page.py", "lengths.json"):
        (tmp_path / "book" / changed).write_text("2")
        assert benchmark.library_digest() != before
        before = benchmark.library_digest()


def test_a_measure_that_fails_is_kept_as_failed_and_the_others_go_on(book, capsys, monkeypatch):
    book.change("two", failing)
    assert book.run() == (1, ["one", "three"])
    kept = book.measures()["two"]
    assert (kept["status"], kept["error"], kept["rows"]) == ("failed", "ArithmeticError: planted", [])
    printed = capsys.readouterr().out
    assert "[2/3] two: failed: ArithmeticError: planted\n" in printed and "two      " in printed
    assert "two failed on" in (book.folder / "benchmark.md").read_text()
    assert book.run() == (1, []), "what failed is tried again"
    monkeypatch.setattr(memory_arithmetic, "IMAGINED_STEP", "raise MemoryError('planted')")
    book.change("two", lambda device, rounds: memory_arithmetic.imagined_step(device, rounds))
    assert book.run("two") == (1, [])
    error = book.measures()["two"]["error"]
    assert error == "RuntimeError: a process of its own ended with status 1: MemoryError: planted"


class Flat(torch.nn.Module):
    """Two parameters in one storage, with bytes between them, as cuDNN may lay out an LSTM's."""

    def __init__(self):
        super().__init__()
        flat = torch.randn(10_000)
        self.a, self.b = (torch.nn.Parameter(flat[start:][:1024].view(32, 32)) for start in (0, 2048))

    def forward(self, x, y):
        return (x @ self.a @ self.b - y).square().mean()


def test_weights_that_lie_in_one_larger_storage_are_not_told_as_bytes_that_the_meter_has_too_many(monkeypatch):
    monkeypatch.setattr(memory_timeline, "workloads", lambda: {"flat": lambda: (Flat(), torch.randn(2, 8, 32))})
    ((_, figure, _),) = memory_timeline.meter_exactness("cpu", 1)
    assert figure.startswith("+0 B of ")


def test_runs_take_turns_in_orders_in_which_each_follows_each_and_which_are_the_same_in_every_process():
    def ran() -> list[str]:
        order = []
        times = interleaved({name: functools.partial(order.append, name) for name in "abc"}, 20)
        assert all(len(values) == 20 for values in times.values())
        return order

    order = ran()
    rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert {pair for names in rounds for pair in itertools.pairwise(names)} == set(itertools.permutations("abc", 2))
    assert ran() == order


def test_quick_runs_one_round_and_writes_nothing(book, capsys):
    book.run()
    before = {path: path.read_bytes() for path in book.folder.parent.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert book.run("--quick") == (0, ["one", "two", "three"])
    printed = capsys.readouterr().out
    assert "one / DDP     1.00×" in printed and printed.endswith("nothing was recorded\n")
    assert {path: path.read_bytes() for path in book.folder.parent.rglob("*") if path.is_file()} == before


def test_fewer_rounds_are_told_in_the_record_and_do_not_stand_for_the_usual_ones(book, capsys):
    assert book.run("--rounds", "9") == (0, ["one", "two", "three"]) and book.run("--rounds", "9") == (0, [])
    assert {entry["rounds"] for entry in book.measures().values()} == {9} and "rounds: 9" in book.pages()[0]
    assert book.run() == (0, ["one", "two", "three"])
    capsys.readouterr()
    assert book.run("--rounds", "4") == (2, [])
    assert capsys.readouterr().err.startswith("expected 5 rounds or more, found 4; --quick runs one, unrecorded")


def test_a_record_elsewhere_leaves_the_book_as_it_is(book, tmp_path):
    assert book.run("--output", str(tmp_path / "x" / "mine.json"))[0] == 0
    assert KIND.read(tmp_path / "x" / "mine.json")["measures"].keys() == {"one", "two", "three"}
    assert not book.folder.exists() and (tmp_path / "README.md").read_text() == README


def test_a_wrong_name_is_refused_with_those_that_there_are(book, capsys):
    assert book.run("one", "four") == (2, [])
    assert capsys.readouterr() == ("", "expected measures among one, two, three; found 'four'\n")


def test_threads_and_signals_are_as_they_were(book):
    threads, handler, seen = torch.get_num_threads(), signal.getsignal(signal.SIGTERM), []
    book.change("two", lambda device, rounds: seen.append(torch.get_num_threads()) or 1 / 0)
    torch.set_num_threads(2)
    try:
        book.run()
        assert seen == [1] and torch.get_num_threads() == 2 and signal.getsignal(signal.SIGTERM) == handler
    finally:
        torch.set_num_threads(threads)


def test_stopped_in_the_middle_it_keeps_what_had_ended(book, capsys):
    def interrupted(device, rounds):
        os.kill(os.getpid(), signal.SIGTERM)

    book.change("two", interrupted)
    assert book.run() == (128 + signal.SIGTERM, ["one"]) and [*book.measures()] == ["one"]
    printed = capsys.readouterr().out
    assert "stopped; what had ended is kept" in printed and "not measured: two, three" in printed


ENTRY = {"status": "recorded", "date": "d", "commit": "c", "source": "s", "torch": "t", "driver": "", "seconds": 1}
GOOD = {
    **KIND.empty("CPU", False),
    "measures": {"one": {**ENTRY, "rounds": 1, "processor": "p", "rows": [["a", "b", "c"]]}},
}


def edited(**fields):
    return json.dumps({**GOOD, "measures": {"one": {**GOOD["measures"]["one"], **fields}}})


DAMAGED = {
    "half": json.dumps(GOOD)[:-20],
    "another format": json.dumps({**GOOD, "format": "memlab-record"}),
    "another device": json.dumps({**GOOD, "device": "A GPU"}),
    "rounds in words": edited(rounds="many"),
    "a processor's number": edited(processor=2),
    "a short row": edited(rows=[["a"]]),
    "no rows": edited(rows=None),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_or_another_devices_is_told_in_a_sentence_and_nothing_runs(book, capsys, text):
    book.path.parent.mkdir(parents=True)
    book.path.write_text(text)
    assert book.run() == (2, [])
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith(f"{book.path}: expected a record ")
    assert "move it away" in error and book.path.read_text() == text


def test_the_pages_are_not_made_of_a_damaged_record(book, capsys):
    book.path.parent.mkdir(parents=True)
    book.path.write_text("{")
    (book.folder / "01_x.ipynb").write_text("")
    assert benchmarks.main(["--folder", str(book.folder)]) == 2
    assert "expected a record as python -m memlab.benchmark writes it" in capsys.readouterr().err
    assert not (book.folder / "benchmark.md").exists()


def test_the_committed_pages_are_what_the_command_makes_of_the_committed_records():
    again = "python -m memlab.book.benchmarks makes it anew"
    assert (ROOT / "chapters" / benchmarks.PAGE).read_text(encoding="utf-8") == benchmarks.page(), again
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == benchmarks.readme(text), again


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_committed_record_is_of_measures_that_there_are_and_every_miss_has_its_reason(path):
    names, document = {measure.__name__ for measure in measures.MEASURES}, KIND.read(path)
    assert document["measures"].keys() <= names, "remove from it what is gone"
    missed = {name for name in document["measures"] if any(row.reached == "no" for row in rows_of(document, name))}
    assert missed <= (benchmarks.WHY_ON_A_GPU if document["gpu"] else benchmarks.WHY).keys()
    assert benchmarks.WHY.keys() | benchmarks.WHY_ON_A_GPU.keys() <= names


def test_without_a_record_both_say_so(book):
    book.folder.mkdir()
    (book.folder / "01_x.ipynb").write_text("")
    assert benchmarks.main(["--folder", str(book.folder)]) == 0
    assert NONE in (book.folder / "benchmark.md").read_text()
    assert (book.folder.parent / "README.md").read_text() == f"# A book\n{BEGIN}\n\n{NONE}\n\n{END}\nlast\n"


def test_readme_shows_production_and_every_miss_and_the_page_shows_all(book):
    rows = [
        ("ours / DDP, step", "1.01×", "≤ 1.05×"),
        ("… peak", "1.20× (1,234 B)", ""),
        ("… held", "0.90×", ""),
        ("ours / by hand", "1.00×", "≤ 1.02×"),
        ("ours / by foot", "1.03×", "≤ 1.02×"),
        ("ours / FSDP2", "as good", "as much"),
    ]
    book.change("two", lambda device, rounds: rows)
    book.change("three", failing)
    book.run("two", "three")
    page, text = book.pages()
    assert [line for line in text.splitlines() if line.startswith("| ours")] == [
        "| ours / DDP, step | 1.01× | ≤ 1.05× | yes |",
        "| ours / DDP, step … peak | 1.20× (1,234 B) |  | — |",
        "| ours / by foot | 1.03× | ≤ 1.02× | no |",
        "| ours / FSDP2 | as good | as much | — |",
    ]
    assert "4 targets, of which 2 are reached, 1 are missed, and 1 were not measured here" in text
    assert f"torch {torch.__version__}" in text
    assert all(f"| {measure} | {figure} | {must} |" in page for measure, figure, must in rows)
    assert "## CPU" in page and "three failed on" in page


@pytest.mark.parametrize(("figure", "told"), [("1.02×", False), ("1.06×", True)])
def test_the_page_says_why_a_target_was_missed_where_it_was(book, monkeypatch, figure, told):
    monkeypatch.setitem(benchmarks.WHY, "two", "It has twice the way to go.")
    book.change("two", lambda device, rounds: [("ours / yours", figure, "≤ 1.05×"), ("… on foot", figure, "≤ 1.05×")])
    book.run("one", "two")
    assert ("* *ours / yours* and so on: It has twice the way to go." in book.pages()[0]) is told
    monkeypatch.setitem(benchmarks.WHY_ON_A_GPU, "two", "A GPU has farther to go.")
    document = KIND.read(book.path)
    on_a_gpu = "* *ours / yours* and so on: A GPU has farther to go."
    assert benchmarks.reasons(document | {"gpu": True}) == [on_a_gpu] * told
    monkeypatch.setattr(benchmarks, "WHY", {})
    assert benchmarks.reasons(document) == ["* *ours / yours* and so on: It is not known."] * told


def test_a_readme_without_its_markers_is_refused(book):
    for text in ("", BEGIN, f"{END}{BEGIN}", README + README):
        with pytest.raises(ValueError, match="once each; restore it from git"):
            benchmarks.readme(text, book.folder)


FIGURES = [
    ("0.98 – 1.02 – 1.10× (fastest / fastest 1.30×)", "≤ 1.05×", "yes"),
    ("0.98 – 1.06 – 1.10× (fastest / fastest 0.99×)", "≤ 1.05×", "no"),
    ("0.9 – 1.0 – 1.2×; parameters bitwise, scale history equal through 3 growths", "≤ 1.05×, bitwise, equal", "yes"),
    ("0.9 – 1.0 – 1.2×; parameters bitwise, scale history unequal", "≤ 1.05×, bitwise, equal", "no"),
    ("1.00 – 1.00 – 1.10×", "< 1×", "no"),
    ("5.0 – 5.0 – 6.0×", "≥ 5×", "yes"),
    ("-0.10 – 0.30 – 2.10 %", "≤ 1 %", "yes"),
    ("850.3 MiB", "≤ 2 GiB", "yes"),
    ("1.95×, 2.00×, 2.01×", "at most 2×", "no"),
    ("1.00 – 1.05 – 1.10×", "≤ 1.05×", "yes"),
    ("90.0 – 150.0 – 300.0 ms", "≤ 0.2 s", "yes"),
    ("2.0 KiB", "≤ 1,024 B", "no"),
    ("0.9×, 3 B", "≤ 1×", "—"),
    ("1.2 %: at worst 3 %", "≤ 2 %", "yes"),
    ("5.6e-10 at most (with k = 3)", "≤ 1e-13", "no"),
    ("2 stages, GPipe 2e-13; data 2 × stages 2 3e-13", "≤ 1e-12", "yes"),
    ("1e-16; the same bits again", "≤ 1e-12, the same", "yes"),
    ("1e-16; other bits again", "≤ 1e-12, the same", "no"),
    ("+0 B of 1,234,567 B; gradients not bitwise", "at most +0 B, bitwise", "no"),
    ("+0 B; over a budget by 8 B", "0 B", "no"),
    ("parameters 0 B, activations -4 B, sent 0 B", "0 B", "no"),
    ("0 of 20", "0", "yes"),
    ("100 of 100", "all", "yes"),
    ("99 of 100", "all", "no"),
    ("0 of 0", "≥ 99 %", "—"),
    ("0 of 0", "all", "—"),
    ("4 of 5", "5 of 5", "no"),
    ("998 of 1,000", "≥ 99 %", "yes"),
    ("98 of 100", "≥ 99 %", "no"),
    ("needs a GPU", "≤ 0.67×", "—"),
    ("+64 B of 1,234 B", "within 64 B or 0.1 %", "yes"),
    ("-65 B of 65,000 B", "within 64 B or 0.1 %", "yes"),
    ("+65 B of 64,999 B", "within 64 B or 0.1 %", "no"),
    ("-2 of 3,462 (5 sizes run)", "within 1", "no"),
    ("616,800", "616,800", "yes"),
    ("16% (at least; at most 60%)", "≥ 15 %", "yes"),
    ("ours 1,234 B, PyTorch's 1,200 B", "as much", "—"),
    ("nan×", "≤ 1×", "—"),
    ("1.00×", "", "—"),
]


def test_a_figure_is_held_to_its_demand_where_both_can_be_read():
    assert [(figure, must, reached(figure, must)) for figure, must, _ in FIGURES] == FIGURES


def test_a_loss_scaler_that_comes_to_other_weights_misses_its_target(monkeypatch):
    """However fast it is. No step is run here; the second model draws other weights."""
    monkeypatch.setattr(mixed_precision, "interleaved", lambda runs, rounds: {name: [1.0] * rounds for name in runs})
    same = mixed_precision.loss_scaling("cpu", 3)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    other = mixed_precision.loss_scaling("cpu", 3)
    assert [reached(figure, must) for _, figure, must in same + other] == ["yes", "yes", "no", "no"]
