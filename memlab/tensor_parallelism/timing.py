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
its weight's gradient and needs no sum; it is not counted here. What cannot: forward's two. The next op needs the sum,
and there is nothing to compute meanwhile; every layer waits. (Of a batch cut in two, one half may compute while the
other is sent.)

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
from memlab.memory_arithmetic import Transformer
from memlab.offloading.links import block_flops


class BlockSeconds(NamedTuple):
    """One block's forward and backward on one rank."""

    computing: float
    sending: float
    """All collectives, one after the other, and nothing computed beside."""

    @property
    def waiting_share(self) -> float:
        """Of the time that the block takes, the part in which it waits for what is sent."""
        return self.sending / (self.computing + self.sending)


def block_seconds(
    batch: int, tokens: int, width: int, ranks: int, flops_per_second: float, bytes_per_second: float
) -> BlockSeconds:
    """How long one rank computes and sends for a block's forward and backward in 16 bits.

    flops_per_second: of one rank. bytes_per_second: from one rank to its neighbour, one way.
    Raises ValueError for sizes and rates that are not above 0.

    The story's block on eight GPUs of 400 TFLOP/s, inside one machine and over a network:

    >>> for link in (380e9, 45e9):
    ...     seconds = block_seconds(8, 1024, 2048, 8, 400e12, link)
    ...     print(*(f"{1e6 * part:.0f}" for part in seconds), f"{seconds.waiting_share:.0%}")
    838 618 42%
    838 5220 86%
    """
    for name, size in {"batch": batch, "tokens": tokens, "width": width, "ranks": ranks}.items():
        positive(name, size)
    above_0(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    block = Transformer(layers=1, width=width, heads=1, vocabulary=1, context=tokens)
    computing = 3 * block_flops(block, batch, tokens) / (ranks * flops_per_second)
    return BlockSeconds(computing, 4 * ring_seconds(2 * batch * tokens * width, ranks, bytes_per_second))
