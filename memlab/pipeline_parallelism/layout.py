"""Which axis first: all ways to divide ranks among the three axes, and all orders to place them in.

Ranks on one machine are joined by fast links, machines by slow ones. An axis that lies within machines sends fast; the
innermost axis does, if it is no longer than a machine, and the others do as far as there is room (`mesh`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memlab.data_parallelism.overlap import LINKS, ring_seconds
from memlab.memory_arithmetic import Transformer
from memlab.pipeline_parallelism.arithmetic import bubble_share
from memlab.pipeline_parallelism.axes import AXES, gradient_buckets, stage_shares, tensor_traffic
from memlab.tensor_parallelism.arithmetic import ITEMSIZES, Sent


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

    texts_at_once: of a micro-batch; with fewer there are more micro-batches, and the bubble is shorter. options: as of
      `stage_shares`. In the order of tensor, then pipeline.

    A model of 6.9 billion parameters on 16 ranks: GiB of the fullest rank, GiB sent along each axis, bubble.

    >>> model = Transformer(layers=32, width=4096, heads=32, vocabulary=50304, context=2048)
    >>> for way in ways(16, model, 64, 2048)[::5]:
    ...     sent = {axis: round(nbytes / 2**30, 1) for axis, nbytes in way.sent.items()}
    ...     print(way.data, way.tensor, way.pipeline, round(way.nbytes / 2**30), sent, round(way.bubble, 2))
    16 1 1 111 {'data': 24.0, 'pipeline': 0.0, 'tensor': 0.0} 0.0
    8 2 1 56 {'data': 11.2, 'pipeline': 0.0, 'tensor': 16.3} 0.0
    2 4 2 16 {'data': 1.6, 'pipeline': 0.5, 'tensor': 48.8} 0.03
    """
    found = []
    for tensor in range(1, ranks + 1):
        for pipeline in range(1, ranks // tensor + 1):
            data = ranks // (tensor * pipeline)
            micro_batches = batch // (data * texts_at_once)
            if data * tensor * pipeline != ranks or micro_batches == 0 or pipeline > model.layers + 2:
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


def order_seconds(
    sizes: Mapping[str, int],
    messages: Mapping[str, Sequence[Sent]],
    node: int = 8,
    inside: float = LINKS["NVLink 4"],
    between: float = LINKS["InfiniBand 400 Gb/s"],
) -> dict[tuple[str, ...], dict[str, float]]:
    """For each order of the axes, outermost first as in `mesh`, the seconds that a rank sends along each.

    sizes: ranks along each axis. messages: of `step_messages`. node: ranks that the fast links connect. inside,
    between: bytes a second from one rank to the next. An axis is as slow as its slowest link: inside a node only if
    all of its ranks are in one. Nothing runs beside anything here; the order of the sums is what counts. The fastest
    order comes first.
    """
    found = {}
    for order in itertools.permutations(sizes):
        stride, seconds = 1, {}
        for axis in reversed(order):
            rate = inside if stride * sizes[axis] <= node else between
            seconds[axis] = sum(_seconds(one, rate) for one in messages[axis])
            stride *= sizes[axis]
        found[order] = {axis: seconds[axis] for axis in order}
    return dict(sorted(found.items(), key=lambda item: sum(item[1].values())))


def step_messages(model: Transformer, batch: int, tokens: int, **options) -> dict[str, list[Sent]]:
    """What a rank sends in a step along each axis, collective by collective, by the stage that sends most there.

    options: as of `stage_shares`. A "send" stands for one message to a neighbour, of which tensor_bytes are sent.
    """
    shares = stage_shares(model, batch, tokens, **options)
    data, tensor, pipeline, m = (options.get(name, 1) for name in ("data", "tensor", "pipeline", "micro_batches"))
    precision = options.get("precision", "mixed")
    itemsize, rows = ITEMSIZES[precision], batch // (data * m)
    cut = {name: options[name] for name in ("precision", "sequence_parallel", "keep_gathered") if name in options}
    found: dict[str, list[Sent]] = {}
    for axis in AXES:
        share = max(shares, key=lambda share, axis=axis: share.sent[axis])
        if axis == "data":
            nbytes = gradient_buckets(model, share.layers, tensor, data, itemsize)
            found[axis] = [Sent("gradients", "backward", "all_reduce", 1, n, data) for n in nbytes if data > 1]
        elif axis == "tensor":
            each = tensor_traffic(model, share.layers, rows, tokens, tensor, **cut)
            found[axis] = [one._replace(times=m * one.times) for one in each]
        else:
            ends = (share.stage > 0) + (share.stage < pipeline - 1)
            found[axis] = [Sent("stream", "both", "send", m * ends, share.sent[axis] // (m * ends), 2)] if ends else []
    return found


def _seconds(sent: Sent, rate: float) -> float:
    if sent.collective == "send":
        return sent.times * sent.tensor_bytes / rate
    halves = 2 if sent.collective == "all_reduce" else 1
    return sent.times * ring_seconds(sent.tensor_bytes, sent.ranks, rate, halves=halves)
