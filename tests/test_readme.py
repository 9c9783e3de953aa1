"""README's picture is the chapter's own."""

import json

import pytest

from memlab.book.readme import CHAPTER, PICTURE, ROOT, TITLE, saved_picture


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
