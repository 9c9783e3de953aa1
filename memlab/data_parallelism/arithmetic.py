"""Arithmetic of many ranks: what each holds, and what each sends, by stage.

Ψ parameters on N ranks, with w, g and k bytes of weight, gradient and optimizer state each:

    stage  name                holds                       sends in a step
    0      data parallel       w·Ψ   + g·Ψ   + k·Ψ         2·g·Ψ·(N-1)/N        all-reduce
    1      ZeRO-1              w·Ψ   + g·Ψ   + k·Ψ/N       (g + w)·Ψ·(N-1)/N    reduce-scatter, all-gather
    2      ZeRO-2              w·Ψ   + g·Ψ/N + k·Ψ/N       (g + w)·Ψ·(N-1)/N
    3      ZeRO-3              w·Ψ/N + g·Ψ/N + k·Ψ/N       (g + 2·w)·Ψ·(N-1)/N  a second all-gather, for backward

An all-reduce is a reduce-scatter and an all-gather, and each of these sends N-1 of N pieces. So stages 1 and 2 send
what data parallel sends, and hold a part of it: what they add is an order of events. Stage 3 sends half as much again.

In the layout of this package a cut needs padding, so Ψ/N is the sum of ⌈Ψᵢ/N⌉ over the buckets or units i, and the
functions here count that, to the byte. Whatever lies in a flat buffer has padding: gradients of DataParallel, weights
of ZeroOptimizer, both of fully_shard. Optimizer states have none.

What no stage divides are activations: every rank has its own, of its own part of the batch.

Source: Rajbhandari et al. 2020 (ZeRO), sections 3, 5 and 7; Zhao et al. 2023 (FSDP), section 3.2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from memlab.checking import positive
from memlab.memory_arithmetic import Transformer
from memlab.memory_arithmetic.ledger import elements
from memlab.ranks import ring_bytes

STAGES = {0: "data parallel", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
"""How the stages are called."""

Buckets = Sequence[Sequence[int]]
"""The elements of every tensor of every bucket."""


class RankBytes(NamedTuple):
    """What one rank holds when all gradients are there and the optimizer is about to step, activations aside."""

    parameters: int
    gradients: int
    optimizer_states: int

    @property
    def nbytes(self) -> int:
        """The sum."""
        return sum(self)

    def by_category(self) -> dict[str, int]:
        """The same under the Timeline's names, for `bars`."""
        return {"parameter": self.parameters, "gradient": self.gradients, "optimizer_state": self.optimizer_states}


def rank_bytes(
    buckets: Buckets,
    ranks: int,
    stage: int,
    *,
    rank: int = 0,
    weight_bytes: int = 4,
    gradient_bytes: int = 4,
    state_bytes: int = 8,
    counter_bytes: int = 0,
) -> RankBytes:
    """Bytes that one rank holds of parameters, gradients and optimizer states, exactly, padding included.

    buckets: the elements of each tensor of each bucket (of stage 3: unit), each bucket in a layout of its own.
    stage: 0 is data parallel. rank: rank 0 holds the most; the last may have pieces that are shorter, or empty.
    state_bytes: 8 for Adam in FP32, 12 with an FP32 master weight. counter_bytes: once for every tensor, even one of
    which a rank has nothing: 4 for Adam's step counters.

    Raises ValueError for a stage that there is not, and for a rank outside of 0 to ranks - 1.

    ZeRO's own example, figure 1 of the paper, in GB: 7.5 billion parameters in 16 bits, on 64 ranks.

    >>> for stage in STAGES:
    ...     held = rank_bytes([[7_500_000_000]], 64, stage, weight_bytes=2, gradient_bytes=2, state_bytes=12)
    ...     print(stage, round(held.nbytes / 1e9, 1))
    0 120.0
    1 31.4
    2 16.6
    3 1.9
    """
    _known(stage)
    positive("ranks", ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"expected a rank from 0 to {ranks - 1}, found {rank}")
    cut = [_cut(sum(tensors), ranks, rank) for tensors in buckets]
    whole, padded, piece, own = (sum(column) for column in zip(*cut, strict=True)) if cut else (0,) * 4
    weights = (whole, padded, padded, piece)[stage]
    gradients = (padded, whole, piece, piece)[stage]
    states = state_bytes * (own if stage else whole) + counter_bytes * sum(map(len, buckets))
    return RankBytes(weight_bytes * weights, gradient_bytes * gradients, states)


def padded_elements(buckets: Buckets, ranks: int) -> int:
    """Elements of all buckets with their padding: what collectives move.

    >>> padded_elements([[6, 4], [3]], 4)
    16
    """
    return sum(_cut(sum(tensors), ranks, 0)[1] for tensors in buckets)


def sent_bytes(nbytes: int, ranks: int) -> int:
    """What each rank sends in one reduce-scatter, or one all-gather, of a whole of `nbytes`, padding included.

    N-1 pieces of N, whichever way it is done in rings. Raises ValueError for a whole that has no equal pieces.

    >>> sent_bytes(4096, 4)
    3072
    """
    positive("ranks", ranks)
    if nbytes % ranks:
        raise ValueError(f"expected bytes that {ranks} ranks divide, found {nbytes}; count padding: padded_elements")
    return ring_bytes("all_gather", nbytes, ranks)


def traffic_bytes(
    weight_bytes: int, gradient_bytes: int, ranks: int, stage: int, *, micro_batches: int = 1, kept_bytes: int = 0
) -> int:
    """What each rank sends in one training step.

    weight_bytes, gradient_bytes: of the whole model, padded. micro_batches: whose gradients are accumulated. Stages 0
    and 1 keep whole gradients, so the ranks speak once a step (`no_sync`). Stage 2 has no place for whole gradients and
    reduces those of every micro-batch; stage 3 gathers all weights for every one as well, twice. kept_bytes: weights of
    those units that stay gathered from forward to backward, which are gathered once.

    Raises ValueError for a stage that there is not, and for bytes that the ranks do not divide.

    In multiples of data parallel's, one micro-batch and four:

    >>> whole = 64 * 2**20
    >>> [traffic_bytes(whole, whole, 4, stage) / traffic_bytes(whole, whole, 4, 0) for stage in STAGES]
    [1.0, 1.0, 1.0, 1.5]
    >>> [traffic_bytes(whole, whole, 4, stage, micro_batches=4) / traffic_bytes(whole, whole, 4, 0) for stage in STAGES]
    [1.0, 1.0, 2.5, 6.0]
    """
    _known(stage)
    positive("micro_batches", micro_batches)
    gradients, weights = sent_bytes(gradient_bytes, ranks), sent_bytes(weight_bytes, ranks)
    if stage == 0:
        return 2 * gradients
    if stage == 1:
        return gradients + weights
    if stage == 2:
        return micro_batches * gradients + weights
    return micro_batches * (gradients + 2 * weights - sent_bytes(kept_bytes, ranks))


class Transient(NamedTuple):
    """What stage 3 holds for a time, on top of a rank's pieces."""

    weights: int
    """Gathered: the root, the unit at work, and the next."""
    gradients: int
    """Whole, in backward: of one unit, on its way, and of the first tensor of the next."""


def transient_bytes(
    units: Sequence[Sequence[int]],
    ranks: int,
    *,
    root: Sequence[int] = (),
    weight_bytes: int = 4,
    gradient_bytes: int = 4,
) -> Transient:
    """The most that stage 3 has whole at once, of weights and of gradients.

    units: the elements of each tensor of each unit, in the order of forward; root: of the unit that encloses them and
    stays gathered. The root's gradients, which are made first and last, and are whole from then to the end, are left
    out.

    A model of equal blocks: one at work, one on its way.

    >>> transient_bytes([[800, 200]] * 24, 8)
    Transient(weights=8000, gradients=7200)
    """
    padded = [padded_elements([tensors], ranks) for tensors in units]
    gathered = padded_elements([list(root)], ranks)
    gathered += max((sum(padded[at : at + 2]) for at in range(len(padded))), default=0)
    largest = max((size for tensors in units for size in tensors), default=0)
    return Transient(weight_bytes * gathered, gradient_bytes * (max(padded, default=0) + largest))


@functools.lru_cache(maxsize=64)
def unit_sizes(model: Transformer) -> tuple[list[list[int]], list[int]]:
    """The units that `fully_shard` makes of a model when it is called on each block and then on the whole.

    Returns the elements of each tensor of each block, and of the root: embeddings, last norm and head.
    """
    count = lambda sizes: [elements(size, model.symbols) for size in sizes.values()]  # noqa: E731
    return [count(model.block) for _ in range(model.layers)], count(model.before) + count(model.after)


def _cut(whole: int, ranks: int, rank: int) -> tuple[int, int, int, int]:
    """Of a bucket: its elements, those with padding, a piece's, and those of this rank's piece that are no padding."""
    piece = -(-whole // ranks)
    return whole, piece * ranks, piece, min(max(whole - rank * piece, 0), piece)


def _known(stage: int) -> None:
    if stage not in STAGES:
        raise ValueError(f"expected stage 0 (data parallel), 1, 2 or 3, found {stage!r}")
