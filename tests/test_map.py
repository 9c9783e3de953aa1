"""The map is what the chapters' headers say, and the machine what the machine says."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch

from memlab.book import machine as machines
from memlab.book import records
from memlab.book.machine import machine
from memlab.book.map import CHAPTERS, PATHS, headers, paths, read_header, the_map
from memlab.units import MiB

BOOK = Path(__file__).parents[1] / "chapters"
HEADER = """# 01 · A title

**In one sentence:** you will see.

| | |
|---|---|
| You need to know | nothing |
| Minutes on two CPU cores | 5 |
| Peak memory | 3 MiB of tensors |
| GPU | optional |
"""


def chapter(folder, name, header=HEADER):
    cells = [{"cell_type": "markdown", "source": header.splitlines(keepends=True)}]
    (folder / f"{name}.ipynb").write_text(json.dumps({"cells": cells}))
    return folder


def test_every_chapter_has_a_header_and_stands_in_the_map_with_it():
    table = the_map(BOOK)
    assert len(table.rows) == len(list(BOOK.glob("*.ipynb"))) == len(headers(BOOK))
    for (link, *_), header in zip(table.rows, headers(BOOK).values(), strict=True):
        assert link == f"[{header.title}]({header.path.name})" and header.path.is_file()
        assert header.title.startswith(header.path.name[:2])


def test_a_row_is_what_the_header_says_word_for_word(tmp_path):
    row = the_map(chapter(tmp_path, "01_memory_timeline")).rows[0]
    link = "[01 · A title](01_memory_timeline.ipynb)"
    assert row == [link, "you will see.", "nothing", "5", "3 MiB of tensors", "optional", "not recorded yet"]


PARTS = {"# 01 · A title": "title", "**In one": "promise", "| You": "needs", "| Min": "minutes", "| Peak": "peak"}


@pytest.mark.parametrize("line", PARTS)
def test_a_header_without_one_of_its_parts_is_refused_by_name(tmp_path, line):
    broken = "\n".join(text for text in HEADER.splitlines() if not text.startswith(line))
    with pytest.raises(ValueError, match=rf"01_x.ipynb: expected a header .*found none of {PARTS[line]}$"):
        read_header(chapter(tmp_path, "01_x", broken) / "01_x.ipynb")


@pytest.mark.parametrize("peak", ["about 500 GB in the notebook's process", "little", "500 in MiB"])
def test_a_header_whose_peak_has_no_size_is_refused(tmp_path, peak):
    with pytest.raises(ValueError, match=f"01_x.ipynb: expected a peak with its size, such as 500 MiB; found .{peak}."):
        read_header(chapter(tmp_path, "01_x", HEADER.replace("3 MiB of tensors", peak)) / "01_x.ipynb")


@pytest.mark.parametrize(
    ("peak", "notebook_bytes", "peak_bytes"),
    [
        ("about 550 MiB in the notebook's process; 653 GiB of imagined tensors", 550 * MiB, 550 * MiB),
        ("about 1,100 MiB in the notebook's process, and 600 MiB in those of its ranks", 1100 * MiB, 1700 * MiB),
        ("10.5 GiB of imagined tensors", None, None),
    ],
)
def test_a_machine_must_hold_the_notebook_and_its_ranks_and_nothing_that_is_imagined(
    tmp_path, peak, notebook_bytes, peak_bytes
):
    header = HEADER.replace("3 MiB of tensors", peak)
    found = read_header(chapter(tmp_path, "01_x", header) / "01_x.ipynb")
    assert (found.notebook_bytes, found.peak_bytes) == (notebook_bytes, peak_bytes)


def test_a_recorded_chapter_names_its_gpus(tmp_path):
    chapter(tmp_path, "01_memory_timeline")
    chapter(tmp_path, "02_memory_arithmetic", HEADER.replace("# 01", "# 02"))
    last = lambda: [row[-1] for row in the_map(tmp_path).rows]  # noqa: E731
    source = records.source_of(tmp_path / "01_memory_timeline.ipynb")
    entry = {"status": "recorded", "date": "d", "commit": "c", "torch": "t", "driver": "", "seconds": 1, "claims": {}}
    document = records.KIND.empty("A GPU", True)
    for changes, words in [
        ({"source": source}, "A GPU"),
        ({"source": "older"}, "A GPU (stale)"),
        ({"source": source, "status": "failed", "error": "e"}, "A GPU (failed)"),
        ({"source": source, "failed_since": entry | {"error": "e"}}, "A GPU (recorded, later failed)"),
    ]:
        document["chapters"]["01_memory_timeline"] = entry | changes
        records.KIND.write(document, tmp_path / "results" / "a-gpu.json")
        assert last() == [words, "not recorded yet"]
    records.KIND.write(document | {"gpu": False}, tmp_path / "results" / "a-gpu.json")
    assert last() == ["not recorded yet"] * 2
    (tmp_path / "results" / "a-gpu.json").write_text("{}")
    assert last() == ["a-gpu.json is damaged: see python -m memlab"] * 2


def test_paths_link_the_chapters_that_are_there_and_name_those_to_come(tmp_path):
    rows = {name: steps for name, steps, _ in paths(chapter(tmp_path, "01_memory_timeline")).rows}
    assert rows["“I have an OOM right now”"] == (
        "[01 · A title](01_memory_timeline.ipynb) → 06 mixed precision → 07 gradient accumulation → "
        "08 gradient checkpointing → 18 memory planning"
    )
    assert rows.keys() == PATHS.keys() and rows["the whole book"].count("→") == len(CHAPTERS) - 1


def test_a_short_cut_says_what_its_chapters_ask_for_and_it_leaves_out_or_puts_later(tmp_path):
    for number, needs in {1: "nothing", 6: "chapters 01 and 07", 7: "chapters 01 and 02"}.items():
        header = HEADER.replace("# 01", f"# {number:02}").replace("nothing", needs)
        chapter(tmp_path, f"{number:02}_{CHAPTERS[number - 1]}", header)
    assert [row[2] for row in paths(tmp_path).rows] == ["07", "02, 07", "07"]


def test_the_machine_names_its_torch_and_says_that_no_gpu_is_needed_and_pictures_are_still_without_widgets(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = dict(machine().rows)
    assert torch.__version__ in rows["PyTorch"]
    assert rows["GPU"] == "none: every chapter runs without one"
    found = machines.main_memory_bytes()
    assert found is None or 2**28 < found < 2**50
    monkeypatch.setattr(machines.importlib.metadata, "version", missing)
    assert dict(machine().rows)["pictures"].startswith("still: ipywidgets is not installed")


def test_a_gpu_is_named_with_its_memory(monkeypatch):
    class Device:
        name, total_memory = "A GPU", 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Device)
    assert dict(machine().rows)["GPU"] == "A GPU, 80.0 GiB"


def test_chapter_00_alone_says_how_to_install_memlab(tmp_path):
    shutil.copy(BOOK / "00_start_here.ipynb", tmp_path)
    cells = json.loads((tmp_path / "00_start_here.ipynb").read_text())["cells"]
    first = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])
    alone = first.replace('find_spec("memlab")', 'find_spec("memlab_that_is_not_installed")')
    assert alone != first
    with pytest.raises(ImportError, match="type the first command of README.md"):
        exec(compile(alone, "cell", "exec"), {})
