"""Other people's frameworks inside a notebook: started for one comparison, and nothing left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
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
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    gpu = torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, rank | ({} if gpu else {"DS_ACCELERATOR": "cpu"})))
        stack.enter_context(_quiet())
        import deepspeed

        if not gpu:
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            stack.enter_context(mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False))
            stack.enter_context(mock.patch.object(CPU_Accelerator, "is_fp16_supported", lambda self: True))
        deepspeed.init_distributed("nccl" if gpu else "gloo", verbose=False)
        try:
            yield deepspeed
        finally:
            deepspeed.comm.destroy_process_group()
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
        yield
    finally:
        os.dup2(stderr_before, 2)
        os.close(stderr_before)
        logging.disable(logging_before)
