"""Files that take minutes come first, whether one process runs them or several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.longest_first import LONGEST
from tests.tiers import some

MANY = "\n".join(f"def test_{number}(): pass" for number in range(9))
ROOT = Path(__file__).parent.parent


def test_each_file_that_is_named_is_there():
    assert [name for name in LONGEST if not (ROOT / "tests" / name).exists()] == []


@some("processes", [(), ("-n", "2", "--dist", "loadfile")], keep=1)
def test_a_file_that_takes_minutes_comes_before_one_of_many_tests(tmp_path, processes):
    (tmp_path / "test_a_many.py").write_text(MANY)
    (tmp_path / "test_b_many.py").write_text(MANY)
    long = "import pytest, time\n@pytest.mark.parametrize('part', range(4))\ndef test_1(part): time.sleep(0.5)\n"
    (tmp_path / LONGEST[0]).write_text(long)
    options = ["-p", "tests.longest_first", "-v", "-p", "no:cacheprovider", "-c", "/dev/null", *processes]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    if not processes:
        order = [line.partition("::")[0].rpartition("/")[2] for line in lines if "PASSED" in line]
        assert order == [*[LONGEST[0]] * 4, *["test_a_many.py"] * 9, *["test_b_many.py"] * 9]
    else:  # one process runs the long file alone, the other all the rest
        workers = {line.split("::")[0].rpartition("/")[2]: line.split()[0] for line in lines if "PASSED" in line}
        assert workers["test_a_many.py"] == workers["test_b_many.py"] != workers[LONGEST[0]]
