"""README's picture is the chapter's own, and the versions it names are the project's."""

import json
import re
import shutil
from datetime import date

import pytest
from packaging.version import Version

from memlab.book import readme
from memlab.book.readme import CHAPTER, PICTURE, ROOT, TITLE, saved_picture
from tests.nbval_policy import RECORDED_WITH


def test_the_picture_and_its_description_are_those_that_the_chapter_saved():
    image, words = saved_picture(ROOT / CHAPTER, TITLE)
    assert (ROOT / PICTURE).read_bytes() == image, "python -m memlab.book.readme takes it anew"
    assert f"![{TITLE}. {words}]({PICTURE})" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "peak" in words and len(image) < 200_000


@pytest.mark.parametrize("outputs", [[], [{"output_type": "display_data", "data": {"image/png": "AAAA"}}]])
def test_a_chapter_that_was_not_executed_is_told_so(tmp_path, outputs):
    cells = [{"cell_type": "code", "source": ["plot('A title')"], "outputs": outputs}]
    (tmp_path / "01_x.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(ValueError, match="expected a picture 'A title' with a description in 01_x.ipynb"):
        saved_picture(tmp_path / "01_x.ipynb", "A title")


def test_the_command_takes_no_arguments_and_tells_what_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    for words, status in ((["--help"], 0), (["x"], 2)):
        with pytest.raises(SystemExit) as done:
            readme.main(words)
        assert done.value.code == status
    assert readme.main([]) == 2 and "No such file" in capsys.readouterr().err
    (tmp_path / "chapters").mkdir()
    shutil.copy(ROOT / CHAPTER, tmp_path / CHAPTER)
    (tmp_path / "README.md").write_text("no picture")
    assert readme.main([]) == 2 and "expected a line ![]" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "no picture" and not (tmp_path / PICTURE).exists()
    (tmp_path / "README.md").write_text(f"![]({PICTURE})\n")
    assert readme.main([]) == 0 and (tmp_path / PICTURE).read_bytes() == (ROOT / PICTURE).read_bytes()
    assert (tmp_path / "README.md").read_text(encoding="utf-8").startswith(f"![{TITLE}. ")


def test_the_oldest_torch_that_was_tried_is_the_oldest_that_is_accepted():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = re.search(r"tried with torch (\S+), the oldest .*? with (\S+), the newest .*? on (\d{4}-\d\d-\d\d)", readme)
    oldest, newest, recorded = map(Version, (told[1], told[2], RECORDED_WITH["torch"]))
    accepted = re.search(r'"torch>=(.+?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert oldest.base_version == Version(accepted).base_version and oldest <= recorded <= newest
    assert date.fromisoformat(told[3]) <= date.today()
