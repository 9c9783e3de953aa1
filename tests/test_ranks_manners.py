"""Ranks and whoever launches them: a script, a notebook's kernel, torchrun, an interrupt, a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from torch import distributed

from memlab.ranks import one_rank, run_ranks, server, torchrun
from tests.harness import refused

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are watched through POSIX signals here")

# A program without `if __name__ == "__main__"`, whose ranks say who they are and stay until they are ended.
STAYS = """
import os, subprocess, sys, time
from pathlib import Path
from memlab.ranks import run_ranks

print("the program runs")

def stay(rank, folder):
    child = subprocess.Popen(["sleep", "1000"])
    path = Path(folder, "pids", str(rank))
    path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
    path.with_suffix(".part").rename(path)
    time.sleep(1000)

os.makedirs(sys.argv[1] + "/pids")
try:
    run_ranks(stay, 2, sys.argv[1])
finally:
    print("and ends")
"""


@pytest.fixture
def folder():
    """Short enough for the server's socket: a path to one has at most 107 bytes, and pytest's folders are deep."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        yield Path(name)


def environment(folder: Path, **more: str) -> dict[str, str]:
    cleaned = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**cleaned, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", **more}


def staying(folder: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A program whose ranks are running, and every process that it has brought about."""
    (folder / "tmp").mkdir()
    (folder / "program.py").write_text(STAYS)
    program = subprocess.Popen(
        [sys.executable, folder / "program.py", folder],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while len(list((folder / "pids").glob("[01]"))) < 2:
        assert program.poll() is None, program.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    pids = {int(pid) for path in (folder / "pids").iterdir() for pid in path.read_text().split()}
    pids |= {child.pid for child in psutil.Process(program.pid).children(recursive=True)}
    return program, [psutil.Process(pid) for pid in pids]


def leftovers(processes: list[psutil.Process], folder: Path) -> tuple[list, list]:
    """Which of them live, and which files are there, after a moment in which they may end."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    until = time.monotonic() + 5
    while (files := list((folder / "tmp").rglob("memlab*"))) and time.monotonic() < until:
        time.sleep(0.05)
    return alive, files


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_a_launch_ends_with_its_program_and_with_all_that_it_started_and_does_not_run_the_program_again(folder, ending):
    program, processes = staying(folder)
    if ending is signal.SIGINT:
        os.killpg(program.pid, ending)  # as a terminal does: to all that the program has started
    else:
        program.kill()
    out, err = program.communicate(timeout=60)
    assert ending is signal.SIGKILL or (out, err.count("KeyboardInterrupt")) == ("the program runs\nand ends\n", 1)
    assert leftovers(processes, folder) == ([], [])


def test_an_interrupt_waits_until_a_block_is_through_and_a_second_one_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), server.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("first")
    with pytest.raises(KeyboardInterrupt), server.uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("second")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("never")
    assert done == ["first", "second"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


DEFINE = """
import time, torch
from dataclasses import dataclass
from memlab.memory_timeline import Meter
from memlab.ranks import RankError, run_ranks

@dataclass
class Found:
    timeline: object
    total: float

def work(rank):
    print("hello from a cell")
    with Meter() as meter:
        kept = torch.ones(10)
    torch.distributed.all_reduce(kept)
    every = [None, None]
    torch.distributed.all_gather_object(every, Found(None, rank))  # pickle looks for its class in __main__
    assert [each.total for each in every] == [0, 1]
    return Found(meter.timeline, kept.sum().item())
"""
USE = """
found = run_ranks(work, 2)
print([isinstance(each, Found) for each in found], [each.total for each in found])
print({storage.line.source for storage in found[0].timeline.storages.values()})
"""
FAIL = """
def fails(rank):
    if rank == 1:
        raise ValueError("in a cell")
    torch.distributed.barrier()

run_ranks(fails, 2)
"""


@pytest.fixture
def client(folder):
    """Of a notebook's kernel."""
    manager = pytest.importorskip("jupyter_client.manager").KernelManager(kernel_name="python3")
    (folder / "tmp").mkdir()
    manager.start_kernel(env=environment(folder), cwd=str(folder))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def ran(client, code: str) -> tuple[str, str]:
    """What a cell prints, and the error that ends it."""
    printed, error = [], ""
    asked = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            printed.append(content["text"])
        elif kind == "error":
            error = f"{content['ename']}: {content['evalue']}"
        elif kind == "status" and content["execution_state"] == "idle":
            client.get_shell_msg(timeout=60)
            return "".join(printed), error


def test_a_function_of_a_cell_runs_in_ranks_and_its_lines_are_quoted(client):
    assert ran(client, DEFINE) == ("", "")
    printed, error = ran(client, USE)
    assert error == ""
    assert printed.splitlines() == [
        "rank 0 │ hello from a cell",
        "rank 1 │ hello from a cell",
        "[True, True] [20.0, 20.0]",
        "{'kept = torch.ones(10)'}",
    ]
    _, error = ran(client, FAIL)
    assert error.startswith("RankError: rank 1 raised ValueError: in a cell\n")
    assert '    raise ValueError("in a cell")\n' in error


EXAMPLE = """
import os, torch
from memlab.ranks import run_ranks

def total(rank, factor):
    print(f"a line of rank {rank}\\n", end="", flush=True)
    x = torch.nn.Parameter(torch.ones(2) * factor)
    torch.optim.AdamW([x])  # imports torch's compiler, whose imports must not keep the group
    torch.distributed.all_reduce(x.data)
    return rank, x.tolist()

results = run_ranks(total, 2, 3.0)
assert not torch.distributed.is_initialized()
threads = f"/proc/self/task"
names = [open(f"{threads}/{task}/comm").read() for task in os.listdir(threads)] if os.path.isdir(threads) else []
assert not [name for name in names if "gloo" in name], names
print(f"results {results}\\n", end="", flush=True)
"""


def test_the_same_file_runs_under_torchrun_every_rank_has_all_results_and_no_thread_outlives_the_group(folder):
    (folder / "tmp").mkdir()
    (folder / "example.py").write_text(EXAMPLE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "a line of rank 0",
        "a line of rank 1",
        *["results [(0, [6.0, 6.0]), (1, [6.0, 6.0])]"] * 2,
    ]


def test_a_single_rank_of_torchruns_forms_a_group_and_ends_it(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    hook = sys.excepthook
    assert run_ranks(lambda rank: json.dumps(rank), 1) == ["0"]
    with one_rank("cpu"):
        words = "expected no process group, since run_ranks forms one"
        refused(lambda: run_ranks(print, 1), RuntimeError, words)
    nested = lambda rank: run_ranks(print, 1)  # noqa: E731
    ends = lambda rank: distributed.destroy_process_group()  # noqa: E731
    words = "expected run_ranks outside of ranks, found it in rank 0: use this rank's"
    refused(lambda: run_ranks(nested, 1), RuntimeError, words)
    refused(lambda: run_ranks(ends, 1), RuntimeError, "found that the function ended it: leave that to run_ranks")
    refused(lambda: run_ranks(lambda rank: 1 / rank, 1), ZeroDivisionError, "")  # an error is the rank's own
    assert not distributed.is_initialized()
    words = "expected 3 ranks, …found 1 (WORLD_SIZE)…torchrun --nproc-per-node 3"
    refused(lambda: torchrun.run_this_rank(print, 3, (), 1.0), ValueError, words)
    assert sys.excepthook is hook and run_ranks(lambda rank: rank, 1) == [0]
