"""A snapshot's pickle, read as data: its opcodes are parsed one by one, and what could import or call is never run.

`torch.cuda.memory._dump_snapshot` writes a pickle. A pickle is a program for a small stack machine, and two of its
opcodes are enough to do anything: one imports a name, another calls it. `pickle.load` on a file from elsewhere
therefore runs whatever its author wished. A snapshot needs none of that. It is lists, dicts, numbers and text, for
which some thirty opcodes do; this page runs those by itself and refuses every other by name.

    EMPTY_DICT  MEMOIZE  MARK  'size'  2097152  'stream'  0  SETITEMS  STOP      {"size": 2097152, "stream": 0}

Harmless opcodes can still fill a machine: a list that holds one list twice, which holds one list twice, … is 2ⁿ values
in n lines for whoever walks it. So a container is finished as soon as something holds it or it is recalled, which rules
out a container within itself, and its size is known from then on, each shared part counted as often as it is seen.
"""

from __future__ import annotations

import io
import pickletools
from pathlib import Path

MOST_BYTES = 2**30
MOST_VALUES = 10_000_000
MOST_DEPTH, MOST_KEYS, MOST_PENDING = 32, 1000, 100_000

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
LITERALS |= {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MEMOS = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}
IGNORED = {"PROTO", "FRAME"}

WOULD = {
    "GLOBAL": "import {argument}",
    "STACK_GLOBAL": "import {above}",
    "INST": "import {argument} and call it",
    "OBJ": "call a class",
    "NEWOBJ": "call a class's __new__",
    "NEWOBJ_EX": "call a class's __new__",
    "REDUCE": "call a function",
    "BUILD": "call an object's __setstate__, or set its attributes",
    "EXT1": "import what a registry lists under {argument}",
    "EXT2": "import what a registry lists under {argument}",
    "EXT4": "import what a registry lists under {argument}",
    "PERSID": "call the reader's persistent_load",
    "BINPERSID": "call the reader's persistent_load",
}


def read_snapshot(
    source: str | Path | bytes, *, frames: bool = False, max_bytes: int = MOST_BYTES, max_values: int = MOST_VALUES
) -> dict:
    """What `torch.cuda.memory._dump_snapshot` pickled, as plain data, with nothing of the file run.

    source: the file, or its bytes. frames: keep the stack traces, which are most of a file that was recorded with them
    and name the recorder's files. max_values: how many opcodes it may have, together with the values that they put into
    lists, dicts and tuples, and how many values it may come to, shared ones counted wherever they are seen. An event
    counts for about 32, so 300,000 events are read unless this is raised.

    Raises ValueError for anything but such a pickle (protocol 2 to 5): with the opcode, its position and what it would
    have done, for one that is no data; and for one that is truncated, too large, too deep, or within itself.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        name, raw = "these bytes", bytes(source[: max_bytes + 1])
    else:
        name = str(source)
        with open(source, "rb") as file:
            raw = file.read(max_bytes + 1)
    try:
        if len(raw) > max_bytes:
            raise ValueError(f"more than {max_bytes:,} bytes; with max_bytes= larger ones are read")
        found = _Machine(frames, max_values).run(raw)
        if type(found) is not dict or not {"segments", "device_traces"} <= found.keys():
            raise ValueError("no dict with segments and device_traces")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}: expected a pickled CUDA memory snapshot, found {error}") from None
    return found


class _Machine:
    """A stack, marks in it, a memo; `sizes` are (values, depth) of each container by its id, `open` those unfinished.

    An id stands for its container only while that lives; when one is made at the same address, its size is set anew.
    """

    def __init__(self, frames: bool, max_values: int):
        self.frames, self.max_values, self.values = frames, max_values, 0
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()

    def run(self, raw: bytes) -> object:
        if raw[:1] != b"\x80" or raw[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
            raise ValueError("something else, or a pickle of another protocol than 2 to 5")
        opcodes = pickletools.genops(io.BytesIO(raw))
        stack, memo = self.stack, self.memo
        before, position = "", -1
        for opcode, argument, position in _readable(opcodes):
            name = opcode.name
            try:
                if name in LITERALS:
                    if type(argument) is int and not -(2**63) <= argument < 2**64:
                        raise ValueError("a number of more than 64 bits")
                    stack.append(argument)
                elif name in ("BINGET", "LONG_BINGET"):
                    stack.append(self.recalled(argument))
                elif name in MEMOS:
                    if before in MEMOS:
                        raise ValueError("a value to be remembered twice")
                    memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
                elif name == "MARK":
                    self.marks.append(len(stack))
                elif name in ("SETITEMS", "SETITEM"):
                    self.into_dict(self.popped() if name == "SETITEMS" else self.popped(2))
                elif name in EMPTY:
                    self.push_empty(EMPTY[name]())
                elif name in ("APPENDS", "APPEND"):
                    self.into_list(self.popped() if name == "APPENDS" else self.popped(1))
                elif name in CONSTANTS:
                    stack.append(CONSTANTS[name])
                elif name == "TUPLE" or name in TUPLES:
                    self.push_tuple(tuple(self.popped(TUPLES.get(name))))
                elif name == "STOP":
                    break
                elif name not in IGNORED:
                    raise ValueError(self.refused(name, argument))
            except (ValueError, IndexError, KeyError) as error:
                what = error if type(error) is ValueError else "a value that was never put there"
                raise ValueError(f"opcode {name} at byte {position}: {what}") from None
            before = name
            self.values += 1
            if self.values > self.max_values or len(stack) + len(self.marks) > MOST_PENDING:
                raise ValueError(f"too many values for one of {self.max_values:,}, which max_values= sets")
        if position + 1 != len(raw):
            raise ValueError(f"{len(raw) - position - 1} bytes more after its end, at byte {position}")
        if len(stack) != 1 or self.marks:
            raise ValueError("a pickle that ends with no value, or several")
        self.finish(stack[0])
        return stack[0]

    def refused(self, name: str, argument: object) -> str:
        above = ".".join(str(value)[:60] for value in self.stack[-2:])
        would = WOULD.get(name, "do what no snapshot needs").format(argument=str(argument)[:60], above=above)
        return f"it would {would}; nothing of the file was run"

    def recalled(self, number: int) -> object:
        value = self.memo[number]
        self.finish(value)
        return value

    def popped(self, count: int | None = None) -> list:
        """The last `count` values of the stack, or those since the last mark."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if not (self.marks[-1] if self.marks else 0) <= start <= len(self.stack):
            raise IndexError
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def push_empty(self, container: list | dict) -> None:
        self.stack.append(container)
        self.sizes[id(container)] = 1, 1
        self.open.add(id(container))

    def push_tuple(self, values: tuple) -> None:
        self.stack.append(values)
        self.sizes[id(values)] = 1, 1
        self.grow(values, values)

    def into_list(self, values: list) -> None:
        target = self.target(list)
        self.grow(target, values)
        target.extend(values)

    def into_dict(self, values: list) -> None:
        target, keys, values = self.target(dict), values[::2], values[1::2]
        if len(keys) != len(values) or len(target) + len(keys) > MOST_KEYS:
            raise ValueError(f"a dict with a key that has no value, or with more than {MOST_KEYS} keys")
        for key, value in zip(keys, values, strict=True):
            if type(key) is not str or key in target:
                raise ValueError("a dict with a key that is no text, or there already")
            if key == "frames" and not self.frames:
                self.finish(value)
            else:
                self.grow(target, [value])
                target[key] = value

    def target(self, kind: type) -> list | dict:
        target = self.stack[-1]
        if type(target) is not kind or id(target) not in self.open:
            raise ValueError(
                f"no {kind.__name__} to put values into; one that is in use is finished, so none holds itself"
            )
        return target

    def grow(self, target: object, values: list | tuple) -> None:
        total, depth = self.sizes[id(target)]
        for value in values:
            more, deep = self.finish(value)
            total, depth = total + more, max(depth, deep + 1)
        if total > self.max_values or depth > MOST_DEPTH:
            raise ValueError(f"more than {self.max_values:,} values, or deeper than {MOST_DEPTH}, counted as seen")
        self.values += len(values)
        self.sizes[id(target)] = total, depth

    def finish(self, value: object) -> tuple[int, int]:
        if type(value) not in (list, dict, tuple):
            return 1, 0
        self.open.discard(id(value))
        return self.sizes[id(value)]


def _readable(opcodes):
    """The opcodes, with what is none of them, or cut off, told in one sentence."""
    position = 0
    try:
        for opcode, argument, position in opcodes:
            yield opcode, argument, position
    except (ValueError, OverflowError, IndexError) as error:
        told = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ValueError(f"one that is truncated or damaged after byte {position} ({told})") from None
