"""Warm kernels: torch is there before the first cell, and each kernel is alone."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("jupyter_client", reason="Jupyter is not installed (memlab[lab])")
if sys.platform != "linux":
    pytest.skip("kernels are forked on Linux", allow_module_level=True)

from jupyter_client.manager import start_new_kernel

from memlab.book import warm


@pytest.fixture(scope="module")
def server():
    """All kernels here are forked from one server."""
    yield
    warm._stop()


@pytest.fixture
def start(server, monkeypatch):
    """A function that starts a warm kernel and gives its manager and a function that runs code there."""
    monkeypatch.setenv("JUPYTER_PATH", os.environ.get("JUPYTER_PATH", ""))
    begun = []

    def started(**options):
        manager, client = start_new_kernel(kernel_name=warm.offer(), startup_timeout=120, **options)
        begun.append((manager, client))

        def run(code):
            printed = []
            client.execute_interactive(code, timeout=60, output_hook=lambda m: printed.append(m["content"]))
            return "".join(content.get("text", content.get("ename", "")) for content in printed)

        return manager, run

    yield started
    for manager, client in begun:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def gone(pid):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_warm_kernels_have_torch_and_what_they_are_given_and_share_nothing(start, tmp_path):
    (_, first), (_, second) = start(), start(cwd=str(tmp_path), env={**os.environ, "GIVEN": "yes"})
    names = ("torch", "torch._dynamo", "memlab.book.checks")
    assert first(f"import sys; print([name in sys.modules for name in {names}])") == "[True, True, False]\n"
    gpu = torch.cuda.is_available()
    assert first("import torch; print(torch.get_num_threads(), torch.cuda.is_available())") == f"1 {gpu}\n"
    first("torch.left_behind = 1")
    assert second("import torch; print(hasattr(torch, 'left_behind'))") == "False\n"
    assert second("import os; print(os.getcwd(), os.environ['GIVEN'])") == f"{Path(tmp_path).resolve()} yes\n"
    assert first("import random; print(random.random())") != second("import random; print(random.random())")
    pids = [run("import os; print(os.getpid(), os.getppid())").split() for run in (first, second)]
    assert pids[0][0] != pids[1][0] and pids[0][1] == pids[1][1] == str(warm._servers[-1].pid)


def test_a_warm_kernel_is_interrupted_and_killed_like_any_other(start):
    manager, run = start()
    pid = manager.provisioner.pid
    assert "KeyboardInterrupt" in run(f"import os, signal; os.kill({pid}, signal.SIGINT); import time; time.sleep(30)")
    assert run("print('still here')") == "still here\n"
    manager.shutdown_kernel(now=True)
    assert gone(pid)


def test_kernels_end_with_their_server_and_the_next_one_gets_a_new_server(start):
    manager, _ = start()
    pid, server = manager.provisioner.pid, warm._servers[-1]
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert gone(pid)
    _, run = start()
    assert run("print(1)") == "1\n" and warm._servers[-1].pid != server.pid


def test_the_server_ends_with_the_process_that_asked_it(tmp_path):
    import subprocess

    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from memlab.book import warm
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name=warm.offer(), startup_timeout=120)
print(warm._servers[-1].pid, manager.provisioner.pid, flush=True)
import os
os._exit(0)
"""
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout
    assert all(gone(int(pid)) for pid in printed.split())


def test_offering_twice_changes_nothing_more_and_where_a_fork_is_not_safe_kernels_start_as_usual(monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "before")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert warm.offer() == "" and os.environ["JUPYTER_PATH"] == "before"
    warm.offer()
    once = os.environ["JUPYTER_PATH"]
    assert warm.offer() == "memlab-warm" and os.environ["JUPYTER_PATH"] == once
    assert once.split(os.pathsep) == [str(Path(warm.__file__).parent), "before"]
