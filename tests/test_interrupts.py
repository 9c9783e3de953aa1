"""Tests that press Ctrl-C work wherever they were started."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import some

ROOT = Path(__file__).parent.parent
PRESSES = """
import os, signal, subprocess, sys, pytest

def test_here():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

def test_in_a_program():
    program = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1, stderr=-1)
    program.stdout.readline()
    program.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in program.communicate(timeout=20)[1]
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to ignore")
@some("processes", [[], ["-n", "2"]], keep=1)
def test_ctrl_c_arrives_in_tests_that_a_shell_runs_in_the_background(tmp_path, processes):
    (tmp_path / "test_pressed.py").write_text(PRESSES)
    options = ["-p", "tests.interrupts", "-p", "no:cacheprovider", "-c", "/dev/null", *processes, str(tmp_path)]
    command = shlex.join([sys.executable, "-m", "pytest", *options])
    run = subprocess.run(["sh", "-c", f"{command} & wait $!"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "2 passed" in run.stdout, run.stdout
