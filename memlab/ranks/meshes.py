"""A mesh: ranks in rows and columns, so that each has a group along every axis.

    8 ranks as mesh(data=2, pipeline=2, tensor=2), outermost axis first, the last one closest together:

        data 0   pipeline 0   ranks 0 1  ← tensor        data 1   pipeline 0   ranks 4 5
                 pipeline 1   ranks 2 3                           pipeline 1   ranks 6 7

Which axis is innermost decides which ranks are neighbours: put the one that talks most there, where links are fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from memlab.ranks.talk import place_in


def mesh(device: str | None = None, **axes: int) -> DeviceMesh:
    """Arrange all ranks, outermost axis first: `mesh(data=2, tensor=4)`. Every rank calls it, with the same axes.

        m = mesh(data=-1, pipeline=2, tensor=2)  # data: as many as are left
        m.get_group("tensor"), m.get_local_rank("tensor"), m["tensor"].size()

    `get_group` is this rank's group along an axis, `get_local_rank` its place there, and `m["data"]` the mesh that
    PyTorch's fully_shard wants. An axis of one rank is a group of one. All groups are made here, and stay until the
    process group ends: so make a mesh once. Works on real and on imagined ranks, and on imagined hardware.

    device: "cuda" or "cpu"; None: the GPU's where the process group is NCCL's, else the CPU's.

    Raises ValueError where the sizes do not make the number of ranks, saying which would; for no axes, a size below 1
    and two that are -1. RuntimeError without a process group.
    """
    _, ranks = place_in()
    sizes = _sizes(axes, ranks)
    if device is None:
        device = "cuda" if "nccl" in str(distributed.get_backend_config()) else "cpu"
    with _disable_current_modes():  # a mesh is a real tensor of ranks, of which no Meter needs to know
        return distributed.init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def mesh_groups(axes: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """Which ranks are together along each axis of a mesh. Needs no process.

    axes: sizes by name, outermost first. Raises ValueError for no axes, and for a size below 1.

    >>> mesh_groups({"data": 2, "tensor": 2})
    {'data': [[0, 2], [1, 3]], 'tensor': [[0, 1], [2, 3]]}
    """
    sizes = _sizes(axes, None)
    groups: dict[str, dict[tuple[int, ...], list[int]]] = {name: {} for name in sizes}
    for rank, place in enumerate(itertools.product(*map(range, sizes.values()))):
        for number, name in enumerate(sizes):
            groups[name].setdefault(place[:number] + place[number + 1 :], []).append(rank)
    return {name: list(found.values()) for name, found in groups.items()}


def _sizes(axes: Mapping[str, int], ranks: int | None) -> dict[str, int]:
    """The axes as they must be, with a -1 filled in. ranks: how many there are; None: as many as it takes."""
    if not axes:
        raise ValueError("expected at least one axis and its size, as mesh(data=2, tensor=2), found none")
    left = [name for name, size in axes.items() if size == -1 and ranks is not None]
    for name, size in axes.items():
        if name not in left and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(
                f"expected a number of ranks along {name}, 1 or more, found {size!r}; leave the axis out, or give it 1"
            )
    if len(left) > 1:
        raise ValueError(f"expected one axis of -1, which is what is left, found {' and '.join(left)}; give sizes")
    known = math.prod(size for name, size in axes.items() if name not in left)
    if ranks is not None and (ranks % known or not left and known != ranks):
        found = " · ".join(f"{name}={size}" for name, size in axes.items())
        dividing = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise ValueError(
            f"expected axes whose product is {ranks}, the number of ranks, found {found}; take sizes whose product "
            f"divides {ranks} ({dividing}), and -1 for what is left, or another number of ranks"
        )
    return {name: ranks // known if name in left else size for name, size in axes.items()}
