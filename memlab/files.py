"""A file that appears whole or not at all; and JSON that is checked, never unpickled, when it comes back.

A pickle is a program, so a file from somebody else is parsed as plain values instead, and each value is held to the
exact type that was written. Whatever is wrong with a file ends in one ValueError that says what was expected.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

Record = TypeVar("Record")


@contextlib.contextmanager
def draft_of(path: str | Path) -> Iterator[Path]:
    """A name for a file beside `path`, which takes its place when the block has ended well; else nothing is left.

    The name is no other draft's, so two who write to one path at a time both write whole files, and the last one stays.
    """
    draft = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(4)}.memlab-tmp")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Write a text that is on the disk whole, or leave what was there (on a full disk, say). Raises OSError."""
    with draft_of(path) as draft, open(draft, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class Kind(NamedTuple):
    """What a file of this kind holds ("a timeline"), the format's name in it, and the newest version of that format."""

    what: str
    format: str
    version: int

    def save(self, content: dict, path: str | Path) -> None:
        """Write the content, after the format's name and version. The file appears whole or not at all.

        Raises ValueError for a number that is none, which JSON cannot hold.
        """
        document = {"format": self.format, "version": self.version, **content}
        write_whole(path, json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")

    def load(self, path: str | Path, build: Callable[[dict], Record]) -> Record:
        """What `build` makes of a saved file's document. Raises ValueError, in one sentence, for any other file.

        A document that lacks something, or of which `build` raises TypeError, ValueError or the like, is damaged.
        """
        expected = f"{path}: expected {self.what} saved by memlab"
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{expected}, found a truncated or foreign file ({error})") from None
        if type(document) is not dict or document.get("format") != self.format:
            raise ValueError(f"{expected} (format {self.format!r}), found something else")
        version = document.get("version")
        if type(version) is not int or not 1 <= version <= self.version:
            newer = "; update memlab" if type(version) is int and version > self.version else ""
            known = " or ".join(str(number) for number in range(1, self.version + 1))
            raise ValueError(f"{path}: expected format version {known}, found {version!r}{newer}")
        try:
            return build(document)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = self.what.partition(" ")[2]
            raise ValueError(f"{path}: expected a complete {what}, found one that is damaged ({error!r})") from None


def typed(kinds: tuple[type, ...], row: list) -> list:
    """The row, when its values are of exactly these types; a bool is no int here. Raises TypeError.

    >>> typed((int, str), [3, "add"])
    [3, 'add']
    """
    if type(row) is not list or tuple(map(type, row)) != kinds:
        raise TypeError(f"expected {', '.join(kind.__name__ for kind in kinds)}, found {str(row)[:60]}")
    return row
