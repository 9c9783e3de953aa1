"""Other people's frameworks inside a notebook: started for one comparison, and nothing left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from unittest import mock


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed (memlab[frameworks])."""
    return importlib.util.find_spec("deepspeed") is not None


def has_accelerate() -> bool:
    """Whether accelerate is installed (memlab[frameworks])."""
    return importlib.util.find_spec("accelerate") is not None


@contextlib.contextmanager
def deepspeed_alone() -> Iterator:
    """DeepSpeed with one rank in this process, without a launcher. Yields the package.

    On a machine without a GPU it uses the CPU, with two of its habits switched off: it compiles a C++ all-reduce, which
    one rank does not need, and it refuses FP16 where the processor has no instructions for it, though torch computes
    it all the same. It compiles and logs whenever it likes, so inside, the process's standard error (file descriptor 2)
    goes nowhere, whoever writes to it. Afterwards environment, process group, log level and descriptor are as before.

    Raises ModuleNotFoundError where DeepSpeed is not installed, RuntimeError where there is a process group already.
    """
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "expected no process group, since DeepSpeed gets one of its own that ends with it; found one: call "
            "torch.distributed.destroy_process_group() first"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    gpu = torch.cuda.is_available()
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with _deepspeed(
        "cuda" if gpu else "cpu", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | master
    ) as deepspeed:
        deepspeed.init_distributed("nccl" if gpu else "gloo", verbose=False)
        try:
            yield deepspeed
        finally:
            deepspeed.comm.destroy_process_group()


@contextlib.contextmanager
def deepspeed_ranks(device: str = "cpu") -> Iterator:
    """DeepSpeed on the ranks of the process group that there is, which stays. Yields the package. Call it on each rank.

    device: "cuda" or "cpu", where the models lie. As quiet as `deepspeed_alone`, and as clean afterwards.

    Raises ModuleNotFoundError where DeepSpeed is not installed, RuntimeError where there is no process group.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "expected a process group, found none: call it on a rank of run_ranks, or use deepspeed_alone()"
        )
    rank, world = distributed.get_rank(), distributed.get_world_size()
    places = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(rank))}
    with _deepspeed(device, places) as deepspeed:
        deepspeed.init_distributed(distributed.get_backend(), verbose=False)
        yield deepspeed


@contextlib.contextmanager
def _deepspeed(device: str, environment: dict[str, str]) -> Iterator:
    """DeepSpeed, imported in this environment, quiet; on a CPU with two of its habits switched off."""
    on_cpu = device == "cpu"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment | ({"DS_ACCELERATOR": "cpu"} if on_cpu else {})))
        stack.enter_context(_quiet())
        import deepspeed

        if on_cpu:
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            stack.enter_context(mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False))
            stack.enter_context(mock.patch.object(CPU_Accelerator, "is_fp16_supported", lambda self: True))
        try:
            yield deepspeed
        finally:
            deepspeed.comm.comm.cdb = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing below an error is logged, and what compilers say goes nowhere: DeepSpeed tries out what it could build.

    Errors come as exceptions all the same.
    """
    logging_before, stderr_before = logging.root.manager.disable, os.dup(2)
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it uses collectives by names that PyTorch gave up
            yield
    finally:
        os.dup2(stderr_before, 2)
        os.close(stderr_before)
        logging.disable(logging_before)
