"""Holds a chapter's kernel to the peak memory that the chapter's header promises."""

import sys
from pathlib import Path

from memlab.units import format_bytes

ABOUT = 0.2
"""How far "about" reaches, as a part of what is promised, up and down. PyTorch and the rest is in the promise."""


def promised(path: Path) -> int | None:
    """The bytes that a chapter's header promises; None without a header, and where a kernel cannot tell its peak."""
    if not sys.platform.startswith("linux"):
        return None
    from memlab.book.map import read_header  # which brings torch

    try:
        return read_header(path).notebook_bytes
    except ValueError:
        return None


def keep(promised_bytes: int) -> str:
    """Code that raises if the most that its process has ever held is not about what was promised."""
    least, most = (int(promised_bytes * (1 + part)) for part in (-ABOUT, ABOUT))
    return f"""
import re
from pathlib import Path
found = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
peak_bytes = 1024 * int(found[1])
found = f"{{peak_bytes / 2**20:.1f}} MiB"
assert {least} <= peak_bytes <= {most}, f"expected about {format_bytes(promised_bytes)}, found {{found}}"
"""
