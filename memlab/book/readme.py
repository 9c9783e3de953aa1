"""README's picture: `python -m memlab.book.readme` takes it out of chapter 01's saved outputs, with its description.

So it shows what the chapter shows, and a reader who runs the chapter's first cells sees the same.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from memlab.book.pages import print_as_far_as_possible
from memlab.files import write_whole

ROOT = Path(__file__).parents[2]
CHAPTER, TITLE = "chapters/01_memory_timeline.ipynb", "The first training step of a GPT"
PICTURE = "chapters/pictures/first_step.png"


def saved_picture(chapter: Path, title: str) -> tuple[bytes, str]:
    """A picture's PNG and its description, from the saved outputs of the cell whose source has the title.

    Raises ValueError where the chapter has no such cell, or the cell no such outputs: execute it first.
    """
    for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and title in "".join(cell["source"]):
            bundles = [output.get("data", {}) for output in cell["outputs"]]
            images = [bundle["image/png"] for bundle in bundles if "image/png" in bundle]
            words = ["".join(bundle.get("text/markdown", "")) for bundle in bundles]
            described = [text.strip("*") for text in words if re.fullmatch(r"\*[^*]+\*", text)]
            if images and described:
                return base64.b64decode("".join(images[0])), described[0]
    raise ValueError(f"expected a picture {title!r} with a description in {chapter.name}, found none; execute it")


def write() -> Path:
    """Write the picture and README's line that shows it; says where the picture is. Raises ValueError, OSError."""
    image, words = saved_picture(ROOT / CHAPTER, TITLE)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    shown = re.compile(rf"!\[[^\]]*\]\({re.escape(PICTURE)}\)")
    if not shown.search(text):
        raise ValueError(f"expected a line ![]({PICTURE}) in README.md, found none; add it where the picture belongs")
    (ROOT / PICTURE).parent.mkdir(exist_ok=True)
    (ROOT / PICTURE).write_bytes(image)
    write_whole(readme, shown.sub(lambda _: f"![{TITLE}. {words}]({PICTURE})", text))
    return ROOT / PICTURE


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. The exit status is 2 where chapter or README is not there, or has no place for the picture."""
    parser = argparse.ArgumentParser(prog="python -m memlab.book.readme", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    print_as_far_as_possible()
    try:
        print(f"written: {write()}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
