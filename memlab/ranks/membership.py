"""Who is in a group: what whoever talks in it asks first."""

from __future__ import annotations

from torch import distributed


class _Alone:
    """The type of ALONE. Copied and pickled, it is still the same object."""

    def __repr__(self) -> str:
        return "ALONE"

    def __reduce__(self) -> str:
        return "ALONE"


ALONE = _Alone()
"""As group=ALONE: a group of one that needs no process group. What talks in it has nobody to talk to."""


def place_in(group=None) -> tuple[int, int]:
    """This rank's number in the group, and how many ranks it has; group: all ranks if None, this one if ALONE.

    Raises RuntimeError without a process group, and ValueError where this rank is not in the group.
    """
    if group is ALONE:
        return 0, 1
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
