"""`python -m memlab.memory_monitoring`: a process, the GPUs and logs, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memlab.memory_monitoring import Gone, MemoryWarning, Monitor, ProcessMemory
from memlab.memory_monitoring.__main__ import main
from memlab.memory_monitoring.terminal import Watch, summary, table
from memlab.units import MiB

ROOT = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells this in /proc")
SLACK = 1 * MiB  # what an interpreter may take beside the bytes that it is told to take


class Child:
    """A Python process that does what it is told, line by line, and answers each with a line."""

    def __init__(self, first: str = ""):
        code = f"import os, sys\nheld = []\n{first}\nprint('ready', flush=True)\n" + (
            "for line in sys.stdin:\n    exec(line)\n    print('done', flush=True)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._process.stdout.readline() == "ready\n"

    def __call__(self, line: str) -> None:
        print(line, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n"

    def hold(self, nbytes: int) -> None:
        """Fill `nbytes` of main memory."""
        self(f"held.append(b'x' * {nbytes})")

    def kill(self, reap: bool = True) -> None:
        self._process.kill()
        if reap:
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def child():
    with contextlib.closing(Child()) as process:
        yield process


class Scripted:
    """A source that says what it is told to, and has ended after that."""

    name = "process 7"

    def __init__(self, figures):
        self._figures = iter(figures)

    def read(self):
        try:
            return dict(next(self._figures))
        except StopIteration:
            raise Gone("process 7 has ended") from None


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def lines_of(figures, every=1.0, *, whole=None, budget=None, level="resident", **options):
    clock = Clock()
    watch = Watch(Scripted(figures), level, whole, budget)
    return list(table([watch], every, clock=clock, sleep=clock.sleep, **options))


@LINUX
def test_a_process_that_has_ended_is_gone_also_when_nobody_has_asked_how(child):
    source = ProcessMemory(child.pid)
    child.kill(reap=False)
    deadline = time.monotonic() + 10
    with pytest.raises(Gone, match=f"process {child.pid} has ended"):
        while time.monotonic() < deadline:
            source.read()
    child.kill()
    with pytest.raises(Gone):
        source.read()
    with pytest.raises(Gone):
        ProcessMemory(child.pid)


def test_a_line_has_the_figures_the_highest_the_growth_a_minute_and_the_part_of_the_whole():
    figures = [{"resident": 1 * MiB}, {"resident": 3 * MiB}, {"resident": 2 * MiB}]
    header, *rows, last = lines_of(figures, 2.0, whole=16 * MiB)
    assert header.split() == ["seconds", "resident", "highest", "a", "minute", "of", "16.0", "MiB"]
    assert header.index("resident") + len("resident") == rows[0].index("MiB") + len("MiB")
    assert [row.split() for row in rows] == [
        ["0", "process", "7", "1.0", "MiB", "1.0", "MiB", "6.2%"],
        ["2", "process", "7", "3.0", "MiB", "3.0", "MiB", "+60.0", "MiB", "18.8%"],
        ["4", "process", "7", "2.0", "MiB", "3.0", "MiB", "+15.0", "MiB", "12.5%"],
    ]
    assert last == "process 7 has ended; watched for 6 s, at most 3.0 MiB seen"
    steady = [{"resident": 10 * MiB}] * 200  # the growth is that of the last minute
    assert lines_of([{"resident": 1}, *steady])[-2].split()[-4:] == ["10.0", "MiB", "+0", "B"]
    assert "+60.0 MiB" in lines_of([{"resident": n * MiB} for n in range(100)])[-2]


def test_a_process_that_is_hidden_and_what_windows_lacks_end_with_status_2(capsys, monkeypatch, child):
    def hidden(self, name):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(ProcessMemory, "_text", hidden)
    status, _, err = said(capsys, child.pid)
    assert (status, err) == (2, f"process {child.pid} is not shown to you; ask as its user, or as root\n")
    monkeypatch.setattr(ProcessMemory, "read", lambda self: {})
    status, _, err = said(capsys, os.getpid())
    assert status == 2 and err.startswith("expected a system that tells of other processes (Linux, macOS)")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    status, out, err = said(capsys, "gpu")
    assert (status, out) == (2, "") and "pip install nvidia-ml-py" in err and "there is no such command" in err


def test_runs_that_share_a_log_are_told_apart_and_lines_that_no_monitor_writes_are_left_out(tmp_path, capsys):
    wrong = [-5, 2**70, "7", 1.5, float("inf"), float("nan"), [1]]
    odd = [
        *({"kind": "step"}, {"kind": "step", "run": "a"}, {"kind": "look"}, {"x": 1}, "[1]", "7", {"kind": "start"}),
        *({"kind": [], "run": {}}, start("c", budget="x"), {"kind": "end", "run": "a", "lost": float("inf")}),
        *(step(1, 7) | {"end": end} for end in wrong),
    ]
    log = written(
        *(tmp_path / "log", start(budget=100), start("b", pid=6), *odd, step(1, 10), step(1, 500, "b"), step(2, 20)),
        *({"kind": "end", "run": "b", "lost": 4, "error": None}, '{"kind": "step", "run": "a", "st'),
    )
    out = "\n".join(summary(log))
    assert "process 5, heap: 2 steps, and no end in the log: it still runs, or was killed" in out
    assert "process 6, heap: 1 step, ended" in out and "lost     4 lines" in out
    assert "highest  21 B of 100 B, at step 2" in out and "full     no budget is known" in out
    assert "held     10 B after the first step, 20 B after the last" in out
    for path in (written(tmp_path / "empty"), written(tmp_path / "text", "hello", "{}")):
        assert main([str(path)]) == 2
        assert "expected a log of a Monitor, found none of its lines in" in capsys.readouterr().err


def test_a_leak_is_forecast_in_seconds_from_its_own_growth_and_a_still_process_is_not():
    every, rate = 2.0, MiB
    rows = lines_of([{"resident": 100 * MiB + k * rate} for k in range(200)], every, budget=1000 * MiB)[1:-1]
    likely, early, late = re.search(r"full in (\d+) min \((\d+) min to (\d+) min\)$", rows[-1]).groups()
    exact = (1000 - 100 - 199) * every / 60
    assert abs(int(likely) - exact) <= 0.05 * exact and int(early) <= exact + 1 and int(late) >= exact - 1
    assert not any("full in" in row for row in lines_of([{"resident": 100 * MiB}] * 200, budget=1000 * MiB))
    assert not any("full in" in row for row in lines_of([{"resident": k * MiB} for k in range(200)]))


def test_looks_keep_to_the_clock_and_a_slow_one_makes_the_wait_shorter():
    clock = Clock()

    class Slow(Scripted):
        def read(self):
            clock.now += 0.25
            return super().read()

    watch = Watch(Slow([{"resident": 1}] * 4), "resident", None)
    list(table([watch], 1.0, count=4, clock=clock, sleep=clock.sleep))
    assert clock.slept == [0.75, 0.75, 0.75]


def test_what_does_not_answer_once_is_asked_again_and_a_figure_that_comes_later_has_its_column():
    lines = lines_of([{"resident": 1}, {}, {"resident": 1, "on gpu 0": 5}])
    assert lines[2].split(maxsplit=1)[1] == "process 7 does not answer this time"
    assert "on gpu 0" in lines[3] and lines[4].split()[5:7] == ["5", "B"]


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def test_the_command_ends_by_itself_with_the_process_and_says_so(capsys, child):
    child("import threading; threading.Timer(0.3, os._exit, [0]).start()")
    status, out, err = said(capsys, child.pid, "--every", "0.05")
    lines = out.splitlines()
    assert (status, err) == (0, "") and len(lines) > 3
    assert re.fullmatch(rf"process {child.pid} has ended; watched for \d+ s, at most [\d.]+ MiB seen", lines[-1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["0"], "expected a process that is running, found none with the id 0"),
        (["no such thing"], "expected a process's id (a number), gpu, or the file of a log; found 'no such thing'"),
        (["1", "--every", "0"], "expected more than 0 seconds as --every, and at most 31,536,000; found 0"),
        (["1", "--every", "1e300"], "expected more than 0 seconds as --every, and at most 31,536,000; found 1e+300"),
        (["1", "--count", "0"], "expected at least one look as --count, found 0"),
        (["1", "--budget", "16"], "expected a size such as '16 GiB'"),
        (["1", "--budget", "0 GiB"], "expected a budget above 0 bytes"),
    ],
)
def test_a_wrong_wish_ends_with_status_2_and_a_sentence(capsys, arguments, words):
    status, out, err = said(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(words)


def test_all_gpus_are_watched_by_nvidia_smi_whatever_this_process_may_see(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi = tmp_path / "nvidia-smi"
    body = """#!/bin/sh
case "$1" in
--query-gpu=index,uuid,name) echo "0, GPU-a, One"; echo "1, GPU-b, Two";;
--query-gpu=uuid,memory.used,memory.free) echo "GPU-a, 512, 1536"; echo "GPU-b, 1, 2047";;
--query-compute-apps=gpu_uuid,pid,used_memory) echo "GPU-b, PID, 33";;
esac
"""
    smi.write_text(body)
    smi.chmod(0o755)
    status, out, err = said(capsys, "gpu", "--count", "2", "--every", "0.01")
    rows = [line.split() for line in out.splitlines()]
    assert (status, err, len(rows)) == (0, "", 5)
    assert rows[0] == ["seconds", "used", "highest", "a", "minute", "of", "2.0", "GiB"]
    assert rows[1] == ["0.0", "gpu", "0", "512.0", "MiB", "512.0", "MiB", "25.0%"]
    assert rows[2][1:5] == ["gpu", "1", "1.0", "MiB"] and rows[3][0] == "0.0"

    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    status, out, err = said(capsys, "gpu")
    assert (status, out) == (2, "") and "Driver/library version mismatch" in err


def command(*arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "memlab.memory_monitoring", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def test_the_command_ends_quietly_when_its_pipe_is_closed(child):
    with command(str(child.pid), "--every", "0.05") as watching:
        assert watching.stdout.readline().split()[0] == "seconds"
        watching.stdout.close()
        assert (watching.wait(20), watching.stderr.read()) == (0, "")


def test_a_monitors_log_is_summed_up_with_its_alarms_and_when_its_leak_was_called(tmp_path, capsys):
    log = tmp_path / "run.jsonl"

    class Leaking:
        name, now = "a source", 0

        def read(self):
            return {"allocated": self.now}

        def peaks(self):
            return {"allocated": self.now + 5 * MiB}

    source = Leaking()
    with pytest.warns(MemoryWarning), Monitor("1000 MiB", log=log, every=60, sources=[source]) as monitor:
        for step in range(300):
            source.now = 100 * MiB + 2 * MiB * step
            monitor.step()
    out = "\n".join(summary(log))
    assert f"process {os.getpid()}" in out and "300 steps, ended" in out
    assert "highest  703.0 MiB of 1,000.0 MiB, at step 300" in out
    assert "held     100.0 MiB after the first step, 698.0 MiB after the last" in out
    assert "growth   2.0 MiB a step" in out
    called = next(alarm for alarm in monitor.alarms if alarm.kind == "growth")
    assert f"alarm at step {called.step}, growth: " in out
    assert int(re.search(r"full     after (\d+) more steps", out)[1]) == pytest.approx((1000 - 703) / 2, abs=1)
    status = main([str(log), "--budget", "800 MiB"])
    assert status == 0 and "of 800.0 MiB" in capsys.readouterr().out


def written(path: Path, *documents: dict | str) -> Path:
    path.write_text("\n".join(text if isinstance(text, str) else json.dumps(text) for text in documents))
    return path


def start(run="a", **more):
    return {"kind": "start", "run": run, "pid": 5, "budget": None, "watch": "heap", **more}


def step(number, end, run="a"):
    return {"kind": "step", "run": run, "step": number, "end": end, "peak": end and end + 1}


def test_a_terminal_without_the_letters_of_an_alarm_gets_their_numbers_and_the_rest(tmp_path):
    alarm = {"kind": "alarm", "run": "a", "step": 1, "about": "lines", "message": "größe.append(α)"}
    log = written(tmp_path / "log", start(), step(1, 10), alarm, step(2, 20))
    with command(str(log), PYTHONIOENCODING="ascii") as reading:
        out, err = reading.communicate(timeout=60)
    assert (reading.returncode, err) == (0, "") and r"alarm at step 1, lines: gr\xf6\xdfe.append(\u03b1)" in out
    assert "held     10 B after the first step, 20 B after the last" in out


@LINUX
def test_a_process_is_seen_to_grow_and_to_give_back(child):
    source = ProcessMemory(child.pid)
    before = source.read()["resident"]
    child.hold(64 * MiB)
    full = source.read()["resident"]
    child("held.clear()")
    assert 64 * MiB <= full - before < 64 * MiB + SLACK
    assert full - source.read()["resident"] > 64 * MiB - SLACK
