"""The page of public names: it is up to date, every name says what it is, and damage is told."""

import importlib

import pytest

from memlab.book import library
from memlab.book.library import first_sentence, main, page, public_names
from memlab.book.map import CHAPTERS

ROOT = library.CHAPTERS.parent
CHAPTER = (ROOT / "chapters" / "01_memory_timeline.ipynb").read_text(encoding="utf-8")
PACKAGES = [name for name in ("ranks", *CHAPTERS) if (ROOT / "memlab" / name).is_dir()]


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_committed_page_is_what_the_command_writes():
    committed = (ROOT / "chapters" / library.PAGE).read_text(encoding="utf-8")
    assert committed == page(), "python -m memlab.book.library makes it anew"


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_no_other(name):
    package = importlib.import_module(f"memlab.{name}")
    found = public_names(ROOT / "memlab" / name)
    assert [one.name for one in found] == list(package.__all__)
    for one in found:
        public = getattr(package, one.name)
        module = getattr(public, "__module__", None)
        if isinstance(module, str) and module.startswith("memlab."):
            assert ROOT.joinpath(*module.split(".")).with_suffix(".py") == one.path, one.name
        assert one.says.endswith(".") and len(one.says) > 15, one


def test_a_first_sentence_ends_where_the_next_begins():
    assert first_sentence("Counts 3.5 bytes, e.g. of x. More.") == "Counts 3.5 bytes, e.g. of x."
    assert first_sentence("Cuts. x, y: tensors.") == "Cuts."
    assert first_sentence("One line\nand another.\n\nA paragraph.") == "One line and another."


@pytest.mark.parametrize(
    "init, told",
    [
        ("from memlab.x.a import f", "expected __all__ in x/__init__.py"),
        ("from memlab.x.a import f\n__all__ = ['f', 'g']", "expected a docstring of g in __init__.py"),
        ("from memlab.x.a import h\n__all__ = ['h']", "expected a docstring of h in a.py"),
    ],
)
def test_what_is_not_said_is_told(tmp_path, init, told):
    package = write(tmp_path, {"memlab/x/__init__.py": init, "memlab/x/a.py": "def f():\n  'Say.'\ndef h(): pass"})
    with pytest.raises(ValueError, match=told):
        public_names(package / "memlab" / "x")


def test_a_constants_text_stands_below_it(tmp_path):
    init, text = "from memlab.x.a import N\n__all__ = ['N']", "N = 3\n'How many.'"
    files = {"memlab/x/__init__.py": init, "memlab/x/a.py": text}
    assert public_names(write(tmp_path, files) / "memlab" / "x")[0].says == "How many."


def test_the_command_says_what_is_wrong_and_writes_nothing(tmp_path, capsys):
    write(tmp_path, {"memlab/ranks/__init__.py": "'Ranks.'", "chapters/01_x.ipynb": CHAPTER})
    assert main(["--folder", str(tmp_path / "chapters")]) == 2
    assert "expected __all__ in ranks/__init__.py" in capsys.readouterr().err
    assert not (tmp_path / "chapters" / library.PAGE).exists()


def test_the_command_writes_the_page_beside_the_chapters(tmp_path, capsys):
    files = {
        "memlab/ranks/__init__.py": "'Ranks.'\n__all__ = ['f']\ndef f():\n  'Does.'",
        "chapters/01_x.ipynb": CHAPTER,
    }
    write(tmp_path, files)
    assert main(["--folder", str(tmp_path / "chapters")]) == 0
    assert "| [`f`](../memlab/ranks/__init__.py) | Does. |" in (tmp_path / "chapters" / library.PAGE).read_text()
