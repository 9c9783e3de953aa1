"""Who is in a group: what whoever talks in it asks first."""

from __future__ import annotations

from torch import distributed


def place_in(group=None) -> tuple[int, int]:
    """This rank's number in the group, and how many ranks it has; group: all ranks if None.

    Raises RuntimeError without a process group, and ValueError where this rank is not in the group.
    """
    if not distributed.is_initialized():
        raise RuntimeError(
            "expected a process group, found none; call this in a function that run_ranks(fn, 4) runs, under torchrun "
            "after torch.distributed.init_process_group(), or within `with imagined_ranks(64):`"
        )
    if (rank := distributed.get_rank(group)) < 0:
        raise ValueError(
            f"expected a group that this rank is of, found one that rank {distributed.get_rank()} is not of; "
            "let only its members call"
        )
    return rank, distributed.get_world_size(group)
