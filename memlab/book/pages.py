"""What the commands that make a page of the book have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CHAPTERS = Path(__file__).parents[2] / "chapters"


def write_by_command(
    module: str, about: str, write: Callable[[Path], Sequence[Path]], arguments: Sequence[str] | None
) -> int:
    """The command `python -m module --folder …`: write pages for the chapters in a folder, and say where they are.

    write: returns the files that it wrote. Returns the exit status, 2 where it raises OSError or ValueError.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--folder", type=Path, default=CHAPTERS, help="where the chapters are")
    try:
        print("written:", " and ".join(map(str, write(parser.parse_args(arguments).folder))))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
