"""Launch a function in several processes that talk to each other through torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list:
    """Run `fn(rank, *args)` in `world` processes that form a process group, and return their results by rank."""
    import cloudpickle

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "cloudpickle", "memlab.memory_timeline"])
    work = cloudpickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        ranks, ends = [], []
        for rank in range(world):
            end, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world, f"{folder}/store", timeout, work, theirs))
            process.start()
            theirs.close()
            ranks.append(process)
            ends.append(end)
        results = [pickle.loads(end.recv()) for end in ends]
        for process in ranks:
            process.join()
    return results


def _rank(rank: int, world: int, store: str, timeout: float, work: bytes, end) -> None:
    import cloudpickle
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(store, world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    try:
        fn, args = pickle.loads(work)
        end.send(cloudpickle.dumps(fn(rank, *args)))
    finally:
        distributed.destroy_process_group()
