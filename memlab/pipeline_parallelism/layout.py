"""Which axis first: all ways to divide ranks among the three axes, and what it costs to place them in some order.

Ranks on one machine are joined by fast links, machines by slow ones. An axis that lies within machines sends fast; the
innermost axis does, if it is no longer than a machine, and the others do as far as there is room (`mesh`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memlab.checking import positive
from memlab.memory_arithmetic import Transformer
from memlab.offloading.links import RANK_LINKS
from memlab.pipeline_parallelism.arithmetic import bubble_share
from memlab.pipeline_parallelism.axes import AXES, stage_shares
from memlab.ranks import mesh_groups


class Way(NamedTuple):
    """One way to divide. nbytes: of the fullest rank. sent: along each axis, by the rank that sends most there."""

    data: int
    tensor: int
    pipeline: int
    micro_batches: int
    nbytes: int
    sent: dict[str, int]
    bubble: float


def ways(ranks: int, model: Transformer, batch: int, tokens: int, *, texts_at_once: int = 1, **options) -> list[Way]:
    """All ways to write the number of ranks as data · tensor · pipeline that the model's and the batch's sizes allow.

    texts_at_once: of each micro-batch; with fewer there are more micro-batches, and the bubble is shorter. options: as
      of `stage_shares`, without parts, which are of one number of stages. In the order of tensor, then pipeline.

    Raises ValueError or TypeError for an option that no way could be of.

    A model of 6.9 billion parameters on 16 ranks: GiB of the fullest rank, GiB sent along each axis, bubble.

    >>> model = Transformer(layers=32, width=4096, heads=32, vocabulary=50304, context=2048)
    >>> for way in ways(16, model, 64, 2048)[::5]:
    ...     sent = {axis: round(nbytes / 2**30, 1) for axis, nbytes in way.sent.items()}
    ...     print(way.data, way.tensor, way.pipeline, round(way.nbytes / 2**30), sent, round(way.bubble, 2))
    16 1 1 111 {'data': 24.0, 'pipeline': 0.0, 'tensor': 0.0} 0.0
    8 2 1 56 {'data': 11.2, 'pipeline': 0.0, 'tensor': 16.3} 0.0
    2 4 2 16 {'data': 1.6, 'pipeline': 0.5, 'tensor': 48.8} 0.03
    """
    for name, value in (("ranks", ranks), ("texts_at_once", texts_at_once)):
        positive(name, value)
    stage_shares(model, texts_at_once, tokens, **options)  # whatever one rank refuses is no matter of how to divide
    found = []
    for tensor in range(1, ranks + 1):
        for pipeline in range(1, ranks // tensor + 1):
            data = ranks // (tensor * pipeline)
            micro_batches, left = divmod(batch, data * texts_at_once)
            if data * tensor * pipeline != ranks or left or micro_batches == 0 or pipeline > model.layers + 2:
                continue
            sizes = {"data": data, "tensor": tensor, "pipeline": pipeline, "micro_batches": micro_batches}
            try:
                shares = stage_shares(model, batch, tokens, **sizes, **options)
            except ValueError:
                continue
            sent = {axis: max(share.sent[axis] for share in shares) for axis in AXES}
            nbytes = max(share.nbytes for share in shares)
            found.append(Way(**sizes, nbytes=nbytes, sent=sent, bubble=bubble_share(pipeline, micro_batches)))
    return found


def axis_seconds(
    way: Way,
    order: Sequence[str],
    node: int = 8,
    inside: float = RANK_LINKS["NVLink 4"],
    between: float = RANK_LINKS["InfiniBand 400 Gb/s"],
) -> dict[str, float]:
    """Seconds that a rank sends along each axis, if the mesh has its axes in this order, outermost first.

    node: ranks that the fast links connect. inside, between: bytes a second from one rank to the next. An axis is as
    slow as its slowest link: fast only if each of its groups is in one node. Nothing runs beside anything here.

    Raises ValueError for an order that is not of these three axes.
    """
    positive("node", node)
    if sorted(order) != sorted(AXES):
        raise ValueError(f"expected each of {', '.join(AXES)} once, found {', '.join(order)}")
    seconds = {}
    for axis, groups in mesh_groups({axis: getattr(way, axis) for axis in order}).items():
        near = all(group[0] // node == group[-1] // node for group in groups)
        seconds[axis] = way.sent[axis] / (inside if near else between)
    return seconds
