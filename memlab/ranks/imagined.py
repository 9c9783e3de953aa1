"""Ranks without processes: one that is alone, and one of many whose peers are imagined.

On imagined ranks a collective returns at once, with shapes and without the others' values. Together with imagined
hardware that is enough to draw the timeline of rank 0 of 64: who holds which bytes depends on no value.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import distributed
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def imagined_ranks(world: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """A process group in which this process is rank `rank` of `world`, and the others are imagined. Yields its mesh.

        with imagine("H100-80GB"), imagined_ranks(64) as mesh:
            fully_shard(model, mesh=mesh)

    PyTorch calls it a fake process group. Everything that asks torch.distributed finds it: FSDP2, DeviceMesh, DTensor
    (which goes a CPU's way from one sharded dimension to another: all gather, and each takes its part). What a
    collective delivers has the right shape, and values that mean nothing. The mesh is (world,), of device "cpu", which
    imagined cards use too; under `imagine`, FSDP2 must be given it, since making one reads values. DDP reads its
    model's bytes, so it runs on imagined ranks and not on imagined hardware; and it wants to know when a bucket is
    through, which PyTorch's imagined group does not say, so it needs a communication hook that returns a future.

    Afterwards there is no process group. Raises RuntimeError where there is one already, TypeError for numbers that
    are no int, and ValueError for a rank that is not in 0 … world − 1.
    """
    for name, value in (("world", world), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"expected {name} as a whole number, found {value!r}; imagined_ranks(64) is rank 0 of 64")
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"expected 0 ≤ rank < world, found rank {rank} of {world}; imagined_ranks(64) is rank 0 of 64")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    with _group("fake", FakeStore(), rank, world, "cpu") as mesh:
        yield mesh


@contextlib.contextmanager
def one_rank(device: str | None = None) -> Iterator[DeviceMesh]:
    """A process group with one rank, this process, without a launcher, network or port. Yields its mesh.

        with one_rank() as mesh:
            fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))

    device: "cuda" or "cpu", whose mesh it is; None: the GPU's where there is one. For imagined hardware, "cpu". The
      group with "cuda" takes tensors in main memory, too.

    Afterwards there is no process group. Raises RuntimeError where there is one already, and ValueError for another
    device, or "cuda" without a GPU.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        there = '"cpu" or "cuda"' if torch.cuda.is_available() else '"cpu", since there is no GPU'
        raise ValueError(f"expected device {there}, found {device!r}; leave it out to take what is there")
    with _group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", distributed.HashStore(), 0, 1, device) as mesh:
        yield mesh


@contextlib.contextmanager
def _group(backend: str, store, rank: int, world: int, device: str) -> Iterator[DeviceMesh]:
    if distributed.is_initialized():
        raise RuntimeError(
            "expected no process group, since this one ends with its block; found one: call "
            "torch.distributed.destroy_process_group() first"
        )
    hook = sys.excepthook
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        with unset_fake_temporarily():  # a mesh is a real tensor of ranks
            mesh = distributed.init_device_mesh(device, (world,))
        yield mesh
    finally:
        sys.excepthook = hook  # a group's writes its rank before every line
        if distributed.is_initialized():  # else the block has ended it
            distributed.destroy_process_group()
