"""A claim carries what is said and the book's verdict, which stands only while measured agrees with predicted."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from memlab.book import claims, records, verdicts
from memlab.book.claims import MIME, Claim, claim, evidence
from memlab.book.tables import Table
from tests.nbval_policy import RECORDED_WITH
from tests.test_map import HEADER

BOOK = Path(__file__).parents[1] / "chapters"
CHAPTERS = sorted(BOOK.glob("[0-9][0-9]_*.ipynb"))
FINE = {"kind": "bytes", "says": "It takes one byte.", "predicted": 1, "measured": 1}


@pytest.fixture(autouse=True)
def no_claims(monkeypatch):
    monkeypatch.setattr(claims, "registered", {})


@pytest.mark.parametrize("verdict", ["holds", "holds if it is large", "does not hold"])
def test_the_books_verdict_stands_where_measured_agrees_and_one_byte_too_many_leaves_the_question_open(verdict):
    row = claim("one", **FINE, verdict=verdict).rows[0]
    assert row[0] == "It takes one byte." and row[-1] == verdict
    for measured in (99, 101):
        found = claim("one", **FINE | {"predicted": 100, "measured": measured}, verdict=verdict)
        assert found.rows[0][-1] == "open: measured differs from the prediction"


def test_a_tolerance_reaches_as_far_as_it_says_and_no_further():
    at = lambda measured: Claim("x", "values", "s", "holds", 0.5, measured, 0.25, "of the bytes").standing  # noqa: E731
    assert [at(value) for value in (0.25, 0.5, 0.75)] == ["holds"] * 3
    assert [at(value) for value in (0.24, 0.76)] == ["open: measured differs from the prediction"] * 2


def test_large_whole_numbers_and_floats_are_compared_as_they_are():
    whole = Claim("x", "values", "s", "holds", 2**60 + 1, float(2**60), 0, "tokens")
    assert not whole.agrees and Claim("x", "values", "s", "holds", 2**60, float(2**60), 0, "tokens").agrees


def test_what_disagrees_is_shown_in_as_many_digits_as_tell_it_apart():
    row = lambda measured, tolerance: Claim("x", "values", "s", "holds", 3.14159, measured, tolerance, "×").row()  # noqa: E731
    assert row(3.14161, 1e-6)[1:4] == ("3.14159 ×", "3.14161 ×", "2e-05 ×")
    assert row(3.14161, 1e-3)[1:3] == ("3.142 ×", "3.142 ×")


def test_a_claim_without_a_measurement_stays_open():
    row = claim("gpu", kind="time", says="It is twice as fast.", predicted=2.0, measured=None, unit="×").rows[0]
    assert list(row[1:]) == ["2 ×", "—", "—", "open: not recorded yet"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "opinion"}, "expected kind among bytes, values, time; found 'opinion'"),
        ({"says": ""}, "expected says='…', one line"),
        ({"says": "Two\nlines."}, "expected says='…', one line"),
        ({"verdict": "maybe"}, "expected a verdict 'holds', 'holds if …' or 'does not hold'; found 'maybe'"),
        ({"verdict": "holds if "}, "expected a verdict"),
        ({"kind": "values", "predicted": float("nan")}, "expected a finite plain number as predicted"),
        ({"kind": "values", "measured": float("inf")}, "expected a finite plain number, or None, as measured"),
        ({"measured": True}, "expected a finite plain number, or None, as measured"),
        ({"predicted": None}, "expected a finite plain number as predicted"),
        ({"kind": "values", "tolerance": -1}, "expected a tolerance of at least 0; found -1"),
        ({"tolerance": 1}, "expected no tolerance for bytes"),
        ({"measured": 1.5}, "expected whole bytes"),
        ({"unit": "MiB"}, "expected whole bytes"),
        ({"unit": ""}, "expected a unit"),
        ({"id": "Not an id"}, "expected a claim's id in small letters"),
    ],
)
def test_a_malformed_claim_is_refused_and_not_registered(wrong, message):
    with pytest.raises(ValueError, match=message):
        claim(**{"id": "one"} | FINE | wrong)
    assert not claims.registered


def test_a_cell_that_is_run_again_replaces_its_claim():
    claim("one", **FINE)
    claim("one", **FINE | {"kind": "values", "says": "It takes two.", "predicted": 2, "measured": 2})
    assert [found.says for found in claims.registered.values()] == ["It takes two."]


def test_an_output_holds_the_table_and_the_claim_itself():
    bundle = claim("one", **FINE)._repr_mimebundle_()
    row = "| It takes one byte. | 1 B | 1 B | 0 B | holds |"
    assert row in bundle["text/markdown"].replace("\N{NO-BREAK SPACE}", " ")
    assert re.split(" {2,}", bundle["text/plain"].splitlines()[-1]) == row.strip("| ").split(" | ")
    assert Claim(**json.loads(json.dumps(bundle[MIME]))) == claims.registered["one"]


FAILURE = {"date": "2026-02-01", "commit": "c", "torch": "2.12.0", "driver": "5", "error": "e"}


def record(claim_measured=1, device="A GPU", gpu=True, **changes):
    document = records.KIND.empty(device, gpu)
    fields = records.claim_fields(Claim("one", "bytes", "It takes one byte.", "holds", 1, claim_measured, 0, "B"))
    entry = {"status": "recorded", "date": "2026-01-31", "commit": "c", "source": "s", "torch": "2.12.0", "driver": "5"}
    document["chapters"]["01_x"] = {**entry, "seconds": 1, "claims": {"one": fields}, **changes}
    return document


def chapter(folder, number="01", *outputs):
    """A chapter that was executed; its source is what `record(source=…)` must name to be no record of an older one."""
    cells = [new_markdown_cell(HEADER.replace("01", number)), new_code_cell("1", outputs=list(outputs))]
    path = folder / f"{number}_x.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"memlab": {"torch": "2.12.0"}}), path)
    return path


def test_evidence_says_what_each_gpu_has_recorded(tmp_path):
    source = records.source_of(chapter(tmp_path))
    claim("one", **FINE)
    claim("two", **FINE)
    last = lambda: [row[-1] for row in evidence(tmp_path).rows]  # noqa: E731
    assert last() == ["not recorded yet"] * 2 and evidence(tmp_path).columns[-1] == "recorded GPUs"
    for document, cell in [
        (record(source=source), "1 B: holds (torch 2.12.0, 2026-01-31)"),
        (record(2, source=source), "2 B: open: measured differs from the prediction (torch 2.12.0, 2026-01-31)"),
        (record(None, source=source), "—: open: not recorded yet (torch 2.12.0, 2026-01-31)"),
        (record(), "1 B: holds (torch 2.12.0, 2026-01-31; code changed since)"),
        (record(source=source, failed_since=FAILURE), "1 B: holds (torch 2.12.0, 2026-01-31; later failed)"),
        (record(failed_since=FAILURE), "1 B: holds (torch 2.12.0, 2026-01-31; code changed since; later failed)"),
    ]:
        records.KIND.write(document, tmp_path / "results" / "a-gpu.json")
        assert evidence(tmp_path).columns[-1] == "A GPU" and last() == [cell, "not recorded yet"]
    records.KIND.write(record(device="CPU", gpu=False), tmp_path / "results" / "a-gpu.json")
    assert last() == ["not recorded yet"] * 2
    (tmp_path / "results" / "a-gpu.json").write_text("{}")
    assert last() == ["damaged: see python -m memlab"] * 2


@pytest.mark.parametrize("on", ["an imagined H100", "ranks on the CPU"])
def test_what_was_measured_elsewhere_waits_for_no_card_and_is_never_a_cards_figure(tmp_path, on):
    claim("one", **FINE, on=on)
    last = lambda: [row[-1] for row in evidence(tmp_path).rows]  # noqa: E731
    assert last() == [f"no card: {on}"]
    path = chapter(tmp_path, "01", shown(claims.registered["one"]))
    document = record(source=records.source_of(path))
    records.KIND.write(document, tmp_path / "results" / "a-gpu.json")
    assert evidence(tmp_path).columns[-1] == "A GPU" and last() == [f"no card: {on}"]
    assert f"| bytes; {on}, torch 2.12.0 |" in verdicts.page(tmp_path)
    document["chapters"]["01_x"]["claims"]["one"]["on"] = on
    assert records.says_of(document, "one", tmp_path) == f"no card: {on}"


def shown(found: Claim):
    return new_output("display_data", data={"text/plain": "x", MIME: asdict(found)})


@pytest.mark.thorough  # by default each claim is looked for in it, below
def test_the_committed_page_is_what_the_chapters_and_records_say():
    assert (BOOK / verdicts.PAGE).read_text(encoding="utf-8") == verdicts.page(BOOK), (
        "make it anew: python -m memlab.book.verdicts"
    )


def test_the_page_has_every_claim_with_its_chapter_and_evidence(tmp_path):
    one = Claim("one", "bytes", "It takes *one* byte.", "does not hold", 1, 1, 0, "B")
    path = chapter(tmp_path, "01", shown(one))
    assert verdicts.main(["--folder", str(tmp_path)]) == 0
    text = (tmp_path / "claims.md").read_text()
    row = "| It takes \\*one\\* byte. | 1 B | 1 B | does not hold | bytes; CPU, torch 2.12.0; GPUs: not recorded yet |"
    assert "## [01 · A title](01_x.ipynb)" in text and row.replace(" B", "\N{NO-BREAK SPACE}B") in text
    records.KIND.write(record(source=records.source_of(path)), tmp_path / "results" / "a.json")
    assert "A GPU: 1 B: holds (torch 2.12.0, 2026-01-31)" in verdicts.page(tmp_path)


def test_a_damaged_record_or_a_claim_there_twice_is_named_and_the_page_stays(tmp_path, capsys):
    one = Claim("one", "bytes", "It takes one byte.", "holds", 1, 1, 0, "B")
    chapter(tmp_path, "01", shown(one), shown(one))
    assert verdicts.main(["--folder", str(tmp_path)]) == 2
    assert "01_x.ipynb: expected each claim once; found one more often" in capsys.readouterr().err
    chapter(tmp_path, "01", shown(one))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text("[]")
    assert verdicts.main(["--folder", str(tmp_path)]) == 2
    assert "a.json: expected a record" in capsys.readouterr().err
    assert not (tmp_path / "claims.md").exists()


@pytest.mark.parametrize(("field", "value"), [("older", 1), ("kind", "bits")])
def test_a_claim_of_another_version_is_told_with_its_chapter(tmp_path, capsys, field, value):
    output = shown(Claim("one", "bytes", "It takes one byte.", "holds", 1, 1, 0, "B"))
    output["data"][MIME][field] = value
    chapter(tmp_path, "01", output)
    assert verdicts.main(["--folder", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("01_x.ipynb: expected claims as this version makes them") and "execute the chapter" in told


def test_without_chapters_no_page_is_written_and_no_folder_made(tmp_path, capsys):
    for folder in (tmp_path / "nowhere", tmp_path):
        assert verdicts.main(["--folder", str(folder)]) == 2
        assert f"expected chapters (NN_name.ipynb) in {folder}, found none" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_verdicts_are_counted_by_chapter(tmp_path):
    cases = [("holds", 1), ("holds if so", 1), ("does not hold", 1), ("holds", 2), ("holds", 0)]
    found = [Claim(f"c{n}", "values", "Said.", case[0], 1, case[1], 0, "×") for n, case in enumerate(cases)]
    chapter(tmp_path, "01", *map(shown, found))
    chapter(tmp_path, "02")
    assert verdicts.verdicts(tmp_path).rows == [["[01 · A title](01_x.ipynb)", 1, 1, 1, 2], ["together", 1, 1, 1, 2]]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_claim_in_a_chapters_saved_output_agrees_with_its_prediction_and_was_made_with_this_torch(path):
    found = [one for one in verdicts.saved_claims(path) if not one.agrees]
    # What only a card can time may wait for one.
    assert [one.id for one in found if not (one.kind == "time" and one.measured is None)] == []
    assert verdicts.executed_with(path) == f"torch {RECORDED_WITH['torch']}"


def test_the_committed_page_has_the_rows_of_every_chapters_claims_and_no_more():
    text = (BOOK / verdicts.PAGE).read_text(encoding="utf-8")
    found = [one.row() for path in CHAPTERS for one in verdicts.saved_claims(path)]
    table = Table(["says", "predicted", "measured", "verdict"], [(*row[:3], row[4]) for row in found])
    rows = table._repr_markdown_().splitlines()[2:]
    assert len(rows) == len(found) == text.count(", torch ") > 0
    assert [row for row in rows if row.rstrip("| ") not in text] == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_that_makes_claims_shows_each_where_nbval_compares_it_and_all_at_its_end(path):
    cells = nbformat.read(path, as_version=4).cells
    compared = [c for c in cells if "nbval-ignore-output" not in c.metadata.get("tags", [])]
    ids = [o.data[MIME]["id"] for c in compared for o in c.get("outputs", ()) if MIME in o.get("data", {})]
    assert ids == [found.id for found in verdicts.saved_claims(path)]
    last = cells[-1]
    assert (last.source == "evidence()") == bool(ids), "the last cell of a chapter with claims is evidence()"
    if ids:
        rows = last.outputs[0].data["text/markdown"].splitlines()[2:]
        assert len(rows) == len(ids)


def test_no_two_chapters_have_a_claim_of_one_id():
    ids = [found.id for path in CHAPTERS for found in verdicts.saved_claims(path)]
    assert len(ids) == len(set(ids)) > 0
