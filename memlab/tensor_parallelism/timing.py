"""Timing: how long the ranks of a split block compute and how long they send, and how wide that must be to be little.

A block of width h, on b texts of s tokens, computes 24·b·s·h² + 4·b·s²·h FLOPs in forward and twice that in backward,
and N ranks of F FLOPs a second share it. It sends four all-reduces of b·s·h elements of e bytes, two each way, each of
which takes a ring 2·(N-1)/N of their time over a link of B bytes a second:

    sending     8·(N-1)·b·s·h·e / (N·B)           (N-1)·e·F
    --------- = ---------------------------- = ---------------
    computing   72·b·s·h²·(1 + s/6h) / (N·F)   9·B·(h + s/6)

The batch cancels, and so does the number of layers: only a wider layer, fewer ranks or a faster link make it less.
(Data parallelism's bytes do not grow with the batch, so there a larger batch is enough.)

What overlaps: in backward, the sum of the gradient of a column parallel layer's input, beside the product that makes
its weight's gradient and needs no sum (`hidden`). What cannot: forward's two. The next op needs the sum, and there is
nothing to compute meanwhile; every layer waits. (Of a batch cut in two, one half may compute while the other is sent.)

Sequence parallelism sends the same in other pieces, and once more every input that is gathered again in backward,
which overlaps with the product that makes that input's gradient.

A block that is checkpointed computes forward once more and sends one all-reduce more, five for four: a checkpoint runs
no further than to the last tensor saved, and so not to the sum at the block's end.

All rates are those that are reached. Norms, GELU and dropout are left out: they take time, and no FLOPs to speak of.

Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2; Narayanan et al. 2021, section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

from memlab.checking import above_0, positive
from memlab.data_parallelism.overlap import ring_seconds

QKV, UP = 3, 4
"""How many times its input's width the outputs of the two column parallel layers of a block have."""


class BlockSeconds(NamedTuple):
    """One block's forward and backward on one rank."""

    computing: float
    sending: float
    """All collectives, one after the other."""
    waiting: float
    """What of `sending` nothing is computed beside."""

    @property
    def waiting_share(self) -> float:
        """Of the time that the block takes, the part in which it waits for what is sent."""
        return self.waiting / (self.computing + self.waiting)


def block_flops(batch: int, tokens: int, width: int) -> int:
    """FLOPs of one whole block's forward: four projections of attention, its scores and values, two of feed-forward.

    >>> block_flops(8, 1024, 2048) == 24 * 8 * 1024 * 2048**2 + 4 * 8 * 1024**2 * 2048
    True
    """
    return 24 * batch * tokens * width**2 + 4 * batch * tokens**2 * width


def block_seconds(
    batch: int,
    tokens: int,
    width: int,
    ranks: int,
    flops_per_second: float,
    bytes_per_second: float,
    *,
    latency_seconds: float = 0.0,
    itemsize: int = 2,
    recomputed: bool = False,
    hidden: bool = False,
) -> BlockSeconds:
    """How long one rank computes and sends for a block's forward and backward.

    flops_per_second: of one rank. bytes_per_second: from one rank to its neighbour, one way. latency_seconds: of each
    of a ring's messages. recomputed: the block is in a checkpoint of its own. hidden: backward's sums run beside the
    products that make the two column parallel layers' weights' gradients.

    Raises ValueError for sizes and rates that are not above 0.

    The story's block on eight GPUs of 400 TFLOP/s, inside one machine and over a network:

    >>> for link in (380e9, 45e9):
    ...     seconds = block_seconds(8, 1024, 2048, 8, 400e12, link)
    ...     print(*(f"{1e6 * part:.0f}" for part in seconds), f"{seconds.waiting_share:.0%}")
    838 618 618 42%
    838 5220 5220 86%
    """
    for name, size in {"batch": batch, "tokens": tokens, "width": width, "ranks": ranks}.items():
        positive(name, size)
    above_0(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    nbytes = batch * tokens * width * itemsize
    one = ring_seconds(nbytes, ranks, bytes_per_second, latency_seconds)
    rate = ranks * flops_per_second
    computing = (4 if recomputed else 3) * block_flops(batch, tokens, width) / rate
    sending = (5 if recomputed else 4) * one
    beside = [2 * outputs * batch * tokens * width**2 / rate for outputs in (QKV, UP)] if hidden else []
    return BlockSeconds(computing, sending, sending - sum(min(one, seconds) for seconds in beside))


def sending_to_computing(
    width: int, tokens: int, ranks: int, flops_per_second: float, bytes_per_second: float, itemsize: int = 2
) -> float:
    """How much longer a block's collectives take than its FLOPs: the page's formula, whatever the batch.

    >>> one = block_seconds(3, 1024, 2048, 8, 400e12, 380e9)
    >>> round(sending_to_computing(2048, 1024, 8, 400e12, 380e9) - one.sending / one.computing, 9)
    0.0
    """
    above_0(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    return (ranks - 1) * itemsize * flops_per_second / (9 * bytes_per_second * (width + tokens / 6))


def width_for_share(
    share: float, tokens: int, ranks: int, flops_per_second: float, bytes_per_second: float, itemsize: int = 2
) -> float:
    """From which width on sending takes less than this share of a block's time, nothing of it hidden; 0 if always.

    share: above 0 and below 1. Raises ValueError for another one.

    A tenth of the time, on two and on eight ranks, inside a machine and over a network:

    >>> for link in (380e9, 45e9):
    ...     print([round(width_for_share(0.1, 1024, ranks, 400e12, link)) for ranks in (2, 8)])
    [1935, 14566]
    [17607, 124274]
    """
    if not 0 < share < 1:
        raise ValueError(f"expected a share above 0 and below 1, found {share}")
    ratio = share / (1 - share)
    return max(
        0.0, sending_to_computing(1, 0, ranks, flops_per_second, bytes_per_second, itemsize) / ratio - tokens / 6
    )
