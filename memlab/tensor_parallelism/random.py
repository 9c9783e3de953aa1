"""Dropout's random numbers: the same on all ranks where they hold the same, different where each holds a part.

The ranks' generators begin equal (torch.manual_seed with one seed) and stay equal, as long as every rank draws the same
from them. Where ranks must differ, each forks: it draws one seed from the common generator, which keeps that in step,
and adds its rank. Nothing is remembered between two forks, so a checkpoint that restores PyTorch's own generators, as
every checkpoint does, makes the same numbers again.

A mask depends on how many ranks there are, so with dropout a run on two ranks is another sample than one on four, or
than one with sequence parallelism: as likely, and not equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.gradient_checkpointing.state import CPU, devices_in_use, random_state, set_random_state
from memlab.ranks import place_in


@contextlib.contextmanager
def different_on_ranks(group=None, enabled: bool = True) -> Iterator[None]:
    """Within the block PyTorch's random numbers differ between ranks; afterwards they are in step again.

    Those of the CPU and of the current accelerator, if something ran there; no GPU is waited for. All ranks of the
    group must come here in step. With enabled=False, a group of one, or imagined tensors, which have no values, the
    block is as if nothing stood around it.
    """
    rank, ranks = place_in(group)
    if not enabled or ranks == 1:
        yield
        return
    seed = torch.randint(2**62, (), device="cpu")  # of the CPU's generator, wherever the masks will be drawn
    if isinstance(seed, FakeTensor):
        yield
        return
    common = {device: random_state(device) for device in devices_in_use(())}
    try:
        for device in common:  # and no others: torch.manual_seed reaches GPUs whose state is not kept here
            kind = torch.default_generator if device == CPU else torch.get_device_module(device)
            kind.manual_seed(int(seed) + rank)
        yield
    finally:
        for device, state in common.items():
            set_random_state(device, state)


class StreamDropout(nn.Dropout):
    """Dropout of the stream between layers: one mask on all ranks, where all hold the same.

    sequence_parallel: each rank has rows of its own, and a mask of its own for them.   x: any shape → the same.
    """

    def __init__(self, p: float = 0.0, *, sequence_parallel: bool = False, group=None):
        super().__init__(p)
        self.sequence_parallel, self.group = sequence_parallel, group

    def forward(self, x: Tensor) -> Tensor:
        with different_on_ranks(self.group, enabled=self.sequence_parallel and self.training and self.p > 0):
            return super().forward(x)
