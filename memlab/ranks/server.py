"""The server from which ranks are forked: a process that has imported PyTorch, and never computes.

To start Python and import PyTorch takes seconds; to copy a process that has done both takes milliseconds. Copying the
launcher itself would be as quick, and unsafe: it has threads, and perhaps a GPU, and neither survives. So the server
imports, and does nothing else. It is multiprocessing's own, and ends with the launcher.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import spawn, util
from unittest import mock

RANK = "memlab-rank-"
"""How the names of ranks' processes begin."""
_OF: int | None = None  # whose server it is: this process's number
_ONE_AT_A_TIME = threading.RLock()
_preparation = spawn.get_preparation_data


def fork_server() -> multiprocessing.context.BaseContext:
    """multiprocessing with the server running; where there is no fork, ranks are started one by one, in seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    context = multiprocessing.get_context("forkserver")
    # What each rank would import again for itself: optimizers need torch's compiler, seconds; and what is in use here.
    slow = ("torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor.parallel")
    used = [name for name in sys.modules if name.startswith("memlab.") and not name.startswith("memlab.book")]
    with _ONE_AT_A_TIME:
        context.set_forkserver_preload(
            ["memlab.ranks.worker", "torch._dynamo", *(name for name in slow if name in sys.modules), *used]
        )
        with mock.patch.object(util, "spawnv_passfds", _apart):
            resource_tracker.ensure_running()
            forkserver.ensure_running()
    global _OF
    _OF = os.getpid()
    return context


def fork_server_is_anothers() -> bool:
    """Whether this process was forked from one that had a server running, which is of no use here."""
    return _OF is not None and os.getpid() != _OF


def _apart(path: bytes, args: list, passfds: list[int]) -> int:
    """Start one of multiprocessing's helpers in a session of its own. Returns its process's number.

    Ctrl-C goes to every process of a terminal's or a notebook's group, and the server outlives it. And a notebook's
    kernel that is shut down waits for those of its group, as they wait for its end: until somebody kills it, and the
    folder of their sockets stays behind.
    """
    process = subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True)
    process.returncode = 0  # multiprocessing waits for it, and nobody else
    return process.pid


@contextlib.contextmanager
def without_program() -> Iterator[None]:
    """What is started in this block does not run the launching program's file again: a rank needs nothing of it."""

    def preparation(name: str) -> dict:
        told = _preparation(name)
        if not name.startswith(RANK):
            return told  # a process of another thread, which needs its program
        return {key: value for key, value in told.items() if not key.startswith("init_main")}

    with _ONE_AT_A_TIME, mock.patch.object(spawn, "get_preparation_data", preparation):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until this block is through; a second one does not wait."""
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    interrupts = []

    def note(number, frame):
        interrupts.append(number)
        if len(interrupts) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            before(signal.SIGINT, None)
