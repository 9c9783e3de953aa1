"""Watch a process or the GPUs from a terminal.

python -m memlab.memory_monitoring 12345
python -m memlab.memory_monitoring gpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from memlab.memory_monitoring.sources import Gone, ProcessMemory
from memlab.units import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line every second until what is watched is gone. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m memlab.memory_monitoring", description=__doc__.splitlines()[0])
    parser.add_argument("what", help="a process's id, or gpu")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    given = parser.parse_args(arguments)
    try:
        source = ProcessMemory(int(given.what))
        while True:
            print(format_bytes(source.read()["resident"]), flush=True)
            time.sleep(given.every)
    except Gone as gone:
        print(gone)
        return 0


if __name__ == "__main__":
    sys.exit(main())
