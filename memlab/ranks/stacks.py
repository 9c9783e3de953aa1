"""The stacks of a rank's threads, as Python's faulthandler writes them: even of a rank that hangs, or has crashed."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Sequence

Frame = tuple[str, int, str]
"""File, line and function."""
PACKAGE = os.path.dirname(__file__) + os.sep
_THREAD = re.compile(r"^(?:Current t|T)hread 0x")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def frames_of(stacks: str, *, crashed: bool = False) -> list[Frame]:
    """Those of the thread that crashed, or of the main thread, the last listed. Innermost first, as far as `fn`."""
    threads: list[tuple[str, list]] = []
    for line in stacks.splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append((match[1], int(match[2]), match[3]))
    if crashed:
        threads = [thread for thread in threads if thread[0].startswith("Current")]
    frames = threads[-1][1] if threads else []
    outside = os.path.join(PACKAGE, "worker.py")
    return frames[: next((n for n, frame in enumerate(frames) if frame[0] == outside), len(frames))]


def as_traceback(frames: Sequence[Frame]) -> str:
    """These frames in the words of a traceback."""
    lines = ["Traceback (most recent call last):"]
    for file, line, name in reversed(frames):
        lines.append(f'  File "{file}", line {line}, in {name}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)
