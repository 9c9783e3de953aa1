"""Kernels that start warm: each is forked from one process that has imported torch already.

Of the seconds that it takes to grade a submission, more than half would go to importing torch and its compiler, again
for each student. A fork has them from its first moment, and is as separate from the next one as any other process.

nbgrader is told of this kernel by `chapters/exercises/nbgrader_config.py`. Where processes cannot fork safely (macOS,
Windows), kernels start as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

NAME = "memlab-warm"
FOLDER = Path(__file__).parent  # Jupyter looks for kernels/ in it
AHEAD = ("torch._dynamo", "ipykernel.kernelapp", "IPython", "memlab.book.workloads", "memlab.memory_arithmetic")
"""What a kernel finds imported: what takes long, and no part of the checks, which are read from disk each time."""


def offer() -> str:
    """Make the warm kernel known to Jupyter in this process. Returns its name, or "" where it cannot work."""
    if sys.platform != "linux":
        return ""
    group = KernelProvisionerFactory.GROUP_NAME
    KernelProvisionerFactory.provisioners[NAME] = EntryPoint(NAME, f"{__name__}:WarmProvisioner", group)
    paths = os.environ.get("JUPYTER_PATH", "").split(os.pathsep)
    os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(FOLDER), *(p for p in paths if p != str(FOLDER))]))
    return NAME


# ---- the side of nbgrader


class WarmProvisioner(LocalProvisioner):
    """Asks the server for a fork in place of starting a new Python."""

    async def launch_kernel(self, cmd: list[str], **kwargs) -> dict:
        """Launch the kernel that `cmd` would have started."""
        self.process = Fork(_ask({"argv": cmd[3:], "env": kwargs.get("env"), "cwd": kwargs.get("cwd")}))
        self.pid = self.pgid = self.process.pid  # it leads a session of its own
        return self.connection_info


class Fork:
    """As much of a Popen as a provisioner uses. The process is no child of this one, and nobody knows its status."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        """None while it runs, and 0 afterwards."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    def wait(self) -> int:
        """Return 0 when it has ended."""
        while self.poll() is None:
            time.sleep(0.01)
        return 0

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


_servers: list[subprocess.Popen] = []


def _ask(request: dict) -> int:
    """Have the server fork; the new process's id. The server is started when it is needed, and again if it has died."""
    for _ in range(2):
        if not _servers:
            _servers.append(_start())
        server = _servers[-1]
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            if answer := server.stdout.readline():
                return int(answer)
        except BrokenPipeError:
            pass
        _stop()
    raise RuntimeError(f"expected a kernel from {sys.executable} -m {__name__}, which ended without one, twice")


def _start() -> subprocess.Popen:
    from memlab.book.checks.limits import SETTINGS

    atexit.register(_stop)
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        command, env=os.environ | SETTINGS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _stop() -> None:
    while _servers:
        server = _servers.pop()
        server.kill()
        server.communicate()


# ---- the side of the server


def serve() -> None:
    """Import what takes long; then fork a kernel for each line that comes in, and print its process's id."""
    for name in AHEAD:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries them
    server = os.getpid()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _become_a_kernel(json.loads(line), server)
        print(child, flush=True)


def _become_a_kernel(request: dict, server: int) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # 1 was the line to nbgrader
    os.environ.clear()
    os.environ.update(request["env"] or {})
    os.chdir(request["cwd"] or ".")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (what was read ahead is other kernels' business)
    sys.argv = ["ipykernel_launcher", *request["argv"], f"--IPKernelApp.parent_handle={server}"]  # it ends with that
    try:
        from ipykernel import kernelapp

        kernelapp.launch_new_instance()
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve()
