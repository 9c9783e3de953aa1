"""Launch a function in several processes that talk to each other through torch.distributed.

Each rank is a process of its own: its own Python, its own memory, its own timeline. The processes are forked from a
small server that has imported PyTorch once, so a launch takes a tenth of a second or two. The function travels by value
(cloudpickle): pickle knows functions by where they can be imported from, and a notebook's cell is no such place.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from memlab.ranks import by_value, worker
from memlab.ranks.processes import Processes
from memlab.ranks.server import fork_server_is_anothers
from memlab.ranks.torchrun import in_function, run_this_rank, under_torchrun


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list:
    """Run `fn(rank, *args)` in `world` processes that form a process group, and return their results by rank.

        def total(rank):
            x = torch.tensor([float(rank)])
            torch.distributed.all_reduce(x)
            return x.item()

        run_ranks(total, 4)  # [6.0, 6.0, 6.0, 6.0]

    fn: may stand in a notebook's cell, and may use what other cells define. It and `args` are copied to every rank.
      The default process group is there; so are RANK, WORLD_SIZE and LOCAL_RANK, and a rank has its share of the CPU's
      threads. Set the seed in `fn`. Without one, PyTorch and NumPy draw the same numbers on all ranks, in every launch
      of this program, and others when it is run again; Python's `random` draws its own on each. Default dtype, grad
      mode and what else is set in PyTorch stay behind: set them in `fn`, too. Pages of memlab are as they were at the
      first launch: having edited one, restart Python.
    Results are copied back, tensors in main memory; a view brings all of its memory, unless you clone it. So return
      `meter.timeline`, not the model.
    The group takes CPU tensors, which go through gloo; where there is a GPU for each rank (`cuda:<rank>` is then the
    current one), it takes GPU tensors, too, which go through NCCL.
    What ranks print is shown afterwards, grouped by rank, behind "rank 0 │": the last MiB of it.
    timeout: seconds from when all ranks are ready.

    Raises RankError, which names the rank, when one raises, dies, does not end in time, or returns what cannot travel;
    TypeError or ValueError for a call that cannot work; RuntimeError in a rank, and in a process that multiprocessing
    started as a daemon or forked. No process remains, even if this one is interrupted or killed, except those that a
    rank started in a session of their own. (The server that forks ranks ends with this process; if it was killed, a
    folder of sockets remains in the system's folder of temporary files.)

    On several machines, start the same program with PyTorch's own launcher, on each of them:

        torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m package.module

    Each process then is one rank already. There, `run_ranks(fn, 8, ...)` launches nothing: it is this rank's call, and
    returns all ranks' results in every one of them. Errors are then each rank's own, as Python raises them; torchrun
    ends the others. And `timeout` is that of each collective.
    """
    _check(fn, world, timeout)
    if worker.in_rank() or in_function():
        raise RuntimeError(
            f"expected run_ranks outside of ranks, found it in rank {os.environ['RANK']}: use this rank's process "
            "group (torch.distributed.new_group makes smaller ones), or launch more ranks at once"
        )
    if under_torchrun():
        return run_this_rank(fn, world, args, timeout)
    if multiprocessing.current_process().daemon or fork_server_is_anothers():
        raise RuntimeError(
            "expected run_ranks in the main process, found it in one that multiprocessing started as a daemon, or that "
            "was forked from one that had launched ranks; call it before, and pass on its results"
        )
    try:
        work = by_value.dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"expected a function and arguments that can be copied to other processes, found {type(error).__name__}: "
            f"{error}; make what cannot (files, locks, generators, a Meter) inside the function"
        ) from error
    with tempfile.TemporaryDirectory(prefix="memlab-ranks-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "setup").write_bytes(pickle.dumps(_setup(world, timeout, work)))
        with Processes(world, Path(folder), timeout) as processes:
            return processes.results()


def _check(fn, world, timeout) -> None:
    if not callable(fn):
        hint = "; pass the function itself, without calling it" if fn is None else ""
        raise TypeError(f"expected a function fn(rank, *args), found {type(fn).__name__}{hint}")
    if isinstance(world, bool) or not isinstance(world, int):
        raise TypeError(f"expected world as a number of ranks, found {type(world).__name__}: run_ranks(fn, world)")
    if world < 1:
        raise ValueError(f"expected at least one rank, found world={world}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(f"expected timeout in seconds, more than 0 and finite, found {timeout!r}")


def _setup(world: int, timeout: float, work: bytes) -> worker.Setup:
    directory = None
    with contextlib.suppress(FileNotFoundError):
        directory = os.getcwd()
    gpus = torch.cuda.is_available() and distributed.is_nccl_available() and torch.cuda.device_count() >= world
    # A cell's text is in no file: only this process can tell it.
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    threads = max(1, torch.get_num_threads() // world)
    return worker.Setup(world, float(timeout), threads, gpus, dict(os.environ), directory, sources, work)
