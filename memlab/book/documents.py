"""A record's file: JSON with an entry for each thing that has ended, whole at any moment.

    {"format": "memlab-record", "version": 1, "device": "NVIDIA H100 80GB HBM3", "gpu": true,
     "chapters": {"01_memory_timeline": {"status": "recorded", "date": …, "commit": …, "source": …, "torch": …,
                                         "driver": …, "seconds": …, "claims": …}}}

What failed has status "failed" and an "error". If it had been recorded before, the older entry stays, and
"failed_since" says when and how it failed. `source` is a digest of the code that the entry comes from.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memlab.files import write_whole

VERSION = 1


@dataclass(frozen=True)
class Kind:
    """A kind of record.

    command: what writes it. entries: the name of its entries. check: raises ValueError, TypeError or KeyError for an
    entry, by its name and fields, that has not what this kind's entries have beside the fields of all.
    """

    format: str
    command: str
    entries: str
    check: Callable[[str, dict], None]

    def empty(self, device: str, gpu: bool) -> dict:
        """A record of nothing yet."""
        return {"format": self.format, "version": VERSION, "device": device, "gpu": gpu, self.entries: {}}

    def read(self, path: str | Path) -> dict:
        """A record from its file. Raises ValueError, in one sentence, for a file that this version did not write."""
        path = Path(path)
        try:
            document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
            self.text_of(document)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}: expected a record as {self.command} writes it (version {VERSION}), found one that is "
                f"damaged, edited or of another version ({error}); move it away, or restore it from git"
            ) from None
        return document

    def text_of(self, document: dict) -> str:
        """The text of a record's file. Raises ValueError, which says why, for what is no record or no file can hold."""
        try:
            self._check(document)
            text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            text.encode()  # an error's text may hold what UTF-8 has no bytes for
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no {error}" if isinstance(error, KeyError) else str(error)) from None
        return text

    def write(self, document: dict, path: str | Path) -> None:
        """Save a record, whole or not at all, in a folder that is made if need be.

        Raises ValueError for what `read` would refuse, and OSError where the system cannot write.
        """
        text = self.text_of(document)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)

    def survey(self, folder: str | Path) -> tuple[list[dict], list[Path]]:
        """The records in a folder, and the files there that cannot be read."""
        documents, damaged = [], []
        for path in sorted(Path(folder).glob("*.json")):
            try:
                documents.append(self.read(path))
            except (ValueError, OSError):
                damaged.append(path)
        return documents, damaged

    def _check(self, document: dict) -> None:
        if (document["format"], document["version"]) != (self.format, VERSION):
            raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
        _texts("the record", document, "device")
        if not isinstance(document["gpu"], bool):
            raise TypeError(f"gpu is {document['gpu']!r}")
        for name, entry in document[self.entries].items():
            if entry["status"] not in ("recorded", "failed"):
                raise ValueError(f"{name}: status {entry['status']!r}")
            _texts(name, entry, "date", "commit", "source", "torch", "driver")
            if not 0 <= entry["seconds"] < 1e9:
                raise ValueError(f"{name}: seconds is {entry['seconds']!r}")
            if entry["status"] == "failed":
                _texts(name, entry, "error")
            if "failed_since" in entry:
                _texts(f"{name}, failed_since", entry["failed_since"], "date", "commit", "torch", "error")
            self.check(name, entry)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} where a number should be")


def _texts(what: str, fields: dict, *names: str) -> None:
    for name in names:
        if not isinstance(fields[name], str):
            raise TypeError(f"{what}: {name} is {fields[name]!r}")


def enter(entries: dict, name: str, origin: dict, found: dict, error: str = "") -> None:
    """Put what something came to among the entries. A failure does not push out what succeeded before.

    origin: date, commit and so on. found: what it came to, which is nothing if there is an error.
    """
    older = entries.get(name)
    if not error:
        entries[name] = {"status": "recorded", **origin, **found}
    elif older is None or older["status"] == "failed":
        entries[name] = {"status": "failed", "error": error, **origin, **found}
    else:
        older["failed_since"] = {"error": error, **origin}


def file_name(device: str) -> str:
    """The name of a device's record.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def expect_writable(path: Path) -> None:
    """Raises OSError, or ValueError for a folder or a device, where a record could not be written or should not."""
    if path.exists() and not path.is_file():
        raise ValueError(f"expected a file to record in, found {path}, which is none; name one with --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    trial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.memlab-tmp")
    trial.touch()
    trial.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other recorder reads, changes and writes in this folder; it waits for its turn.

    The folder itself is locked, so no file is left, and the lock goes with its process. Windows, and a file system
    without such locks, do without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
