"""What the book's commands have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CHAPTERS = Path(__file__).parents[2] / "chapters"


def chapters_in(folder: Path) -> list[Path]:
    """The chapters' files in a folder, in order. Raises ValueError where there are none."""
    if found := sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        return found
    raise ValueError(f"expected chapters (NN_name.ipynb) in {folder}, found none; name their folder with --folder")


def print_as_far_as_possible() -> None:
    """Let this process print "?" for a letter that its terminal or file cannot take, instead of ending in an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def write_by_command(
    module: str, about: str, write: Callable[[Path], Sequence[Path]], arguments: Sequence[str] | None
) -> int:
    """The command `python -m module --folder …`: write pages for the chapters in a folder, and say where they are.

    write: returns the files that it wrote. Returns the exit status, 2 where it raises OSError or ValueError, or where
    the folder has no chapters; nothing is written then.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--folder", type=Path, default=CHAPTERS, help="where the chapters are")
    folder = parser.parse_args(arguments).folder
    print_as_far_as_possible()
    try:
        chapters_in(folder)
        print("written:", " and ".join(map(str, write(folder))))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
