"""A mesh: ranks in rows and columns, so that each has a group along every axis.

    8 ranks as mesh(data=2, pipeline=2, tensor=2), the last axis closest together:

        data 0   pipeline 0   ranks 0 1  ← tensor        data 1   pipeline 0   ranks 4 5
                 pipeline 1   ranks 2 3                           pipeline 1   ranks 6 7

Which axis is innermost decides which ranks are neighbours: put the one that talks most there, where links are fastest.
"""

from __future__ import annotations

import math

from torch import distributed
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from memlab.ranks.membership import place_in


def mesh(device: str = "cpu", **axes: int) -> DeviceMesh:
    """Arrange all ranks, outermost axis first: `mesh(data=2, tensor=4)`. Every rank calls it, with the same axes.

    `m.get_group("tensor")` is this rank's group along an axis, `m.get_local_rank("tensor")` its place there, `m["data"]` the mesh
    that fully_shard wants. An axis of one rank is a group of one.

    Raises ValueError where the axes' product is not the number of ranks.
    """
    _, ranks = place_in()
    if math.prod(axes.values()) != ranks:
        raise ValueError(
            f"expected axes whose product is {ranks}, the number of ranks, found {axes}: {math.prod(axes.values())}"
        )
    with unset_fake_temporarily():
        return distributed.init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
