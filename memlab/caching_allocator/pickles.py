"""A snapshot's pickle, read as data: Python's own unpickler, which is given nothing to import and so nothing to call.

`torch.cuda.memory._dump_snapshot` writes a pickle. A pickle is a program for a small stack machine. Two of its opcodes
are enough to do anything: one imports a name, another calls it. `pickle.load` on a file from elsewhere therefore runs
whatever its author wished. A snapshot needs neither. It is lists, dicts, numbers and text, and for those the machine
imports nothing:

    EMPTY_DICT  MEMOIZE  MARK  'size'  2097152  'stream'  0  SETITEMS  STOP      {"size": 2097152, "stream": 0}

So every import is refused, and what comes out is looked at before anybody uses it. A list that holds one list twice,
which holds one list twice, … is 2ⁿ values in n lines for whoever walks it. So values are counted as often as they are
seen, and a snapshot has no more of them than its file has bytes.

Not here: a limit on what the unpickler takes for itself. A file of a few bytes may announce a text of gigabytes, number
a value so high that the unpickler makes a table of gigabytes, or nest a key so deep that hashing it ends the process.
None of that runs the file's code. Read a stranger's file in a process with a limit of its own (`ulimit -v`).

Source: the documentation of Python's `pickle`, "Restricting Globals".
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

MOST_BYTES = 2**30
MOST_DEPTH = 32
PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def read_snapshot(source: str | Path | bytes, *, max_bytes: int = MOST_BYTES) -> dict:
    """What `torch.cuda.memory._dump_snapshot` pickled, as plain data, with nothing of the file run.

    source: the file, or its bytes. Stack traces are left out: they are most of a file that was recorded with them, and
    name the recorder's files.

    Raises ValueError for anything but such a pickle: one that would import something, is truncated, too large or too
    deep, or has values other than dicts, lists, tuples, text, bytes, numbers, True, False and None.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        name, raw = "these bytes", bytes(source[: max_bytes + 1])
    else:
        name = str(source)
        with open(source, "rb") as file:
            raw = file.read(max_bytes + 1)
    try:
        return _checked(_unpickled(raw, max_bytes), len(raw))
    except _NoSnapshot as error:
        found = str(error)
    except Exception as error:  # what the unpickler raises depends on where a file is damaged
        said = " ".join(str(error).split())[:80]
        found = f"a truncated or foreign file ({type(error).__name__}: {said})"
    raise ValueError(
        f"{name}: expected a pickled CUDA memory snapshot, found {found}; write one with "
        "torch.cuda.memory._dump_snapshot"
    )


class _NoSnapshot(Exception):
    """What was found in a snapshot's place."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> None:
        named = f"{module}.{name}"[:100]
        raise _NoSnapshot(f"a program that would import {named!r}, of which nothing was run")

    def persistent_load(self, key: object) -> None:
        raise _NoSnapshot("a pickle with parts elsewhere, which were not looked for")


def _unpickled(raw: bytes, max_bytes: int) -> object:
    if len(raw) > max_bytes:
        raise _NoSnapshot(f"more than {max_bytes:,} bytes, which max_bytes= allows")
    copyreg.clear_extension_cache()  # what a program has imported by a number would be handed out unasked
    file = io.BytesIO(raw)
    found = _Unpickler(file).load()
    if file.read(1):
        raise _NoSnapshot("more bytes after the end of one")
    return found


def _checked(found: object, most_values: int) -> dict:
    """The dump without stack traces, if it is one, and plain data: all containers of one depth, then those in them."""
    level, values = [found], 0
    for _ in range(MOST_DEPTH):
        if kinds := set(map(type, level)) - {dict, list, tuple}:
            raise _NoSnapshot(f"one with a {kinds.pop().__name__}, where only plain data is expected")
        dicts = [value for value in level if type(value) is dict]
        for one in dicts:
            if "frames" in one:
                del one["frames"]
        values += sum(map(len, level))
        if values > most_values:
            raise _NoSnapshot("lists within lists, which come to more values than the file has bytes")
        lists = [value for value in level if type(value) is not dict]
        level = _containers(lambda dicts=dicts: chain.from_iterable(map(dict.values, dicts)))
        level += _containers(lambda lists=lists: chain.from_iterable(lists))
        if not level:
            break
    else:
        raise _NoSnapshot(f"lists within lists, more than {MOST_DEPTH} deep")
    if type(found) is not dict or not {"segments", "device_traces"} <= found.keys():
        raise _NoSnapshot("data without segments and device_traces")
    return found


def _containers(values: Callable[[], Iterator[object]]) -> list:
    """What of the values is not plain; where all of them are, found in C."""
    if PLAIN.issuperset(map(type, values())):
        return []
    return [value for value in values() if type(value) not in PLAIN]
