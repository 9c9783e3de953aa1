"""What happens in a rank: it is set up, forms the group with the others, calls the function, and tells how it went.

A rank tells in files, in a folder that the launch made, and says in the pipe only which one to read: so nobody ever
waits half-way through a message.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import io
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from memlab.ranks import by_value
from memlab.ranks.server import RANK

READY, BEGIN, RETURNED, FAILED, LEAVE = b"ready", b"begin", b"returned", b"failed", b"leave"
STACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # Windows has none
LONGEST_SECONDS = 10.0**6


@dataclass
class Setup:
    """What all ranks of a launch are told. work: the function and its arguments, pickled by value."""

    world: int
    timeout: float
    threads: int
    gpus: bool
    environment: dict[str, str]
    directory: str | None
    sources: dict[str, tuple]
    work: bytes


def process_name(rank: int) -> str:
    """The name of a rank's process, from which it knows itself."""
    return f"{RANK}{rank}"


def in_rank() -> bool:
    """Whether this process is a rank that `run_ranks` launched."""
    return multiprocessing.current_process().name.startswith(RANK)


def run(rank: int, folder: Path, end: Connection) -> None:
    """Be a rank, from the first line to the last: what a launched process does."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # whoever this rank starts ends with it
    words = {BEGIN: threading.Event(), LEAVE: threading.Event()}
    threading.Thread(target=_watch, args=(end, folder, words), daemon=True).start()
    with contextlib.suppress(FileNotFoundError):  # the launch is over already
        stacks = (folder / f"stacks-{rank}").open("w")
        setup = pickle.loads((folder / "setup").read_bytes())
        try:
            _prepare(rank, folder, setup, stacks)
            fn, args = pickle.loads(setup.work)
            _be_the_program(fn)
            _join_group(rank, folder, setup)
            end.send_bytes(READY)
            words[BEGIN].wait()  # for all: a rank that is through at once would break the others' connecting
            result = fn(rank, *args)
        except BaseException as error:
            _tell(end, FAILED, folder / f"failure-{rank}", _failure(error))
        else:
            _tell(end, *_returned(folder, rank, result))
        words[LEAVE].wait()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        _flush()
        faulthandler.cancel_dump_traceback_later()


def _watch(end: Connection, folder: Path, words: dict[bytes, threading.Event]) -> None:
    """Pass on the launcher's words; where the launcher is gone, end this process and whoever it started."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            words[end.recv_bytes()].set()
    if not words[LEAVE].is_set():
        shutil.rmtree(folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _prepare(rank: int, folder: Path, setup: Setup, stacks: io.TextIOBase) -> None:
    """The launcher's environment, with what makes this process a rank; its prints go to files."""
    os.environ.clear()
    os.environ.update(setup.environment)
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": setup.world, "LOCAL_WORLD_SIZE": setup.world}
    os.environ.update({name: str(value) for name, value in mine.items()})
    os.environ["OMP_NUM_THREADS"] = str(setup.threads)
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(setup.threads)
    if setup.directory is not None:
        os.chdir(setup.directory)
    linecache.cache.update(setup.sources)  # so that tracebacks and timelines can quote a cell

    for fd, name in ((1, "out"), (2, "err")):
        with (folder / f"{name}-{rank}").open("wb") as file:
            os.dup2(file.fileno(), fd)
    text = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1, "closefd": False}
    sys.stdout, sys.stderr = open(1, "w", **text), open(2, "w", **text)  # noqa: SIM115

    faulthandler.enable(file=stacks)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=stacks)
    # Without the interpreter's help, in case this rank hangs in C when its launcher is gone.
    faulthandler.dump_traceback_later(min(setup.timeout, LONGEST_SECONDS) + 120, exit=True, file=stacks)


def _be_the_program(fn) -> None:
    """Let `__main__` have what the function's cell or script has, as far as it came along: pickle looks there for
    classes, when ranks gather objects, or one saves a model.
    """
    fn = inspect.unwrap(getattr(fn, "func", fn))  # functools.partial's
    if getattr(fn, "__module__", None) == "__main__":
        names = getattr(fn, "__globals__", {})
        vars(sys.modules["__main__"]).update((name, names[name]) for name in names if not name.startswith("__"))


def _join_group(rank: int, folder: Path, setup: Setup) -> None:
    """Form the process group. It waits longer than the launch does, so that the launch can say who is missing."""
    device = None
    if setup.gpus:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if setup.gpus else "gloo",
        store=distributed.FileStore(str(folder / "store"), setup.world),
        rank=rank,
        world_size=setup.world,
        timeout=timedelta(seconds=min(setup.timeout, LONGEST_SECONDS) + 60),
        device_id=device,
    )


def _tell(end: Connection, word: bytes, file: Path, content: bytes) -> None:
    _flush()
    file.write_bytes(content)
    end.send_bytes(word)


def _returned(folder: Path, rank: int, result: Any) -> tuple[bytes, Path, bytes]:
    try:
        return RETURNED, folder / f"result-{rank}", by_value.dumps(result, in_main_memory=True)
    except BaseException as error:
        summary = (
            f"returned a {type(result).__name__} that cannot be sent to the launcher: {type(error).__name__}: {error}; "
            "return numbers, tensors, Timelines, dataclasses, or lists of them"
        )
        failure = pickle.dumps({"at": time.monotonic(), "summary": summary, "traceback": None, "cause": None})
        return FAILED, folder / f"failure-{rank}", failure


def _failure(error: BaseException) -> bytes:
    """What an exception tells: as text, and itself if it can travel."""
    tail = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this file's line
    text = "".join(traceback.format_exception(type(error), error, tail))
    try:
        cause = by_value.dumps(error)
    except BaseException:
        cause = None
    summary = "raised " + "".join(traceback.format_exception_only(type(error), error)).strip()
    return pickle.dumps({"at": time.monotonic(), "summary": summary, "traceback": text, "cause": cause})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # the function has closed it
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what C and C++ printed
