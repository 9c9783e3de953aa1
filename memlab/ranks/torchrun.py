"""The same program under `torchrun`, where every process is a rank already."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RUNNING: list[str] = []  # this rank, while its function runs


def under_torchrun() -> bool:
    """Whether a launcher such as torchrun started this process as a rank: it says so in the environment."""
    return all(os.environ.get(name) for name in _NEEDED)


def in_function() -> bool:
    """Whether this process is in a function that `run_this_rank` called."""
    return bool(_RUNNING)


def run_this_rank(fn: Callable[..., Any], world: int, args: tuple, timeout: float) -> list:
    """This rank's part of `run_ranks`: form the group, call the function, gather all results, end the group.

    Raises ValueError where the launcher started another number of ranks; RuntimeError where there is a group already,
    or the function has ended this one.
    """
    rank, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if found != world:
        raise ValueError(
            f"expected {world} ranks, since run_ranks(fn, {world}) was called; found {found} (WORLD_SIZE): start it as "
            f"`torchrun --nproc-per-node {world} …`; if no launcher started this process, remove RANK and WORLD_SIZE"
        )
    if distributed.is_initialized():
        raise RuntimeError(
            "expected no process group, since run_ranks forms one and ends it; found one: call "
            "torch.distributed.destroy_process_group() first"
        )
    local, local_world = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    gpus = torch.cuda.is_available() and distributed.is_nccl_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local) if gpus else None
    if device is not None:
        torch.cuda.set_device(device)
    hook = sys.excepthook
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(seconds=timeout), device_id=device
    )
    _RUNNING.append(f"rank {rank}")
    try:
        mine, results = fn(rank, *args), [None] * world
        if not distributed.is_initialized():
            raise RuntimeError(
                "expected the process group still there, to gather what ranks return; found that the function ended "
                "it: leave that to run_ranks"
            )
        distributed.all_gather_object(results, mine)
        distributed.barrier()
        return results
    finally:
        _RUNNING.clear()
        sys.excepthook = hook
        if distributed.is_initialized():
            distributed.destroy_process_group()
