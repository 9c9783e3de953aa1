"""What the packages' own examples print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def printed(*command: str) -> str:
    """What a program prints that is started in the book's folder, by no launcher that started this one."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(text: str) -> tuple[list[str], list[str]]:
    """Losses and what each rank sent."""
    return re.findall(r"\d\.\d{6}", text), re.findall(r"sent +(\S+ \S+)", text)


def ranks_named(text: str) -> list[str]:
    return re.findall(r"rank (\d+)  peak +\S+ MiB", text)


def peaks(text: str) -> list[float]:
    """MiB of each rank."""
    return [float(found) for found in re.findall(r"peak +(\S+) MiB", text)]


def assert_torchrun_says(alone: str, module: str, *chosen: str) -> None:
    """Two steps on two ranks that torchrun starts have the title, losses and bytes of the example's own launch."""
    launched = printed("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module, *chosen)
    assert alone.splitlines()[0] in launched
    assert ranks_named(alone) == ranks_named(launched) == ["0", "1"]
    assert figures(alone) == figures(launched)
    assert [len(found) for found in figures(alone)] == [2, 2]
