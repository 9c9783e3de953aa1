"""Overlap: how long ranks talk, and when it costs nothing.

A ring of N ranks takes 2·(N-1) steps for an all-reduce of n bytes; in each, every rank sends one piece of n / N to its
neighbour. With B bytes a second on a link, and a latency for every message:

    seconds = 2·(N-1)·(latency + n / (N·B))

With many ranks n / B dominates where n is large, and that part hardly depends on N; the latency does, and where n is
small it is all there is. (So gradients go in buckets, not one by one; and on thousands of ranks in trees.)

**Hidden** it is while backward runs: backward takes 4 FLOPs a parameter and token (2 for the gradient of a layer's
input, 2 for that of its weight), and a gradient of g bytes is sent 2·(N-1)/N times. Ψ cancels, and what counts is the
tokens that one rank has in a step:

    4·tokens / F >= 2·g·(N-1) / (N·B)         tokens >= (g / 2)·(N-1)/N · F / B

As in `memlab.offloading.links`, F / B is the ridge, with a link between ranks (`RANK_LINKS`) in the place of the one to
the host.
The last bucket is never hidden: it is complete when backward is over.

All rates are those that are reached, and links carry nothing else. A multiply and an add are two FLOPs; attention's
own, which come on top and hide more, are left out.

Source: Patarasuk and Yuan 2009 (the ring's cost); Li et al. 2020 (PyTorch DDP), section 3.2 (buckets and overlap).
"""

from __future__ import annotations

from collections.abc import Sequence

from memlab.checking import above_0, one_of, positive
from memlab.data_parallelism.arithmetic import STAGES
from memlab.offloading.links import hidden_tokens

PHASES = ("forward", "backward")


def ring_seconds(nbytes: int, ranks: int, bytes_per_second: float, latency_seconds: float = 0.0) -> float:
    """How long a ring needs for an all-reduce of so many bytes; each of its two halves takes half of that.

    Raises ValueError for ranks below 1, rates that are not above 0 and a latency below 0.

    A gigabyte at 50 GB/s, on 2 ranks and on 1,000; and 4 bytes with 10 µs a message:

    >>> ring_seconds(10**9, 2, 50e9), round(ring_seconds(10**9, 1000, 50e9), 4)
    (0.02, 0.04)
    >>> round(ring_seconds(4, 1000, 50e9, 10e-6), 4)
    0.02
    """
    positive("ranks", ranks)
    above_0(bytes_per_second=bytes_per_second)
    if latency_seconds < 0:
        raise ValueError(f"expected latency_seconds of at least 0, found {latency_seconds}")
    return 2 * (ranks - 1) * (latency_seconds + nbytes / (ranks * bytes_per_second))


def sent_beside(stage: int, phase: str, weight_bytes: float = 2, gradient_bytes: float = 2) -> float:
    """Bytes a parameter that are whole in a reduce-scatter or all-gather beside a phase: times (N-1)/N is what is sent.

    Beside backward: stage 0 both halves of the gradients' all-reduce; 1 and 2 a reduce-scatter; 3 that, and the weights
    again. Beside forward: weights, of 1 and 2 those that were updated (where their all-gather is left to run into the
    next forward; else nothing hides it), of 3 each unit's.

    Raises ValueError for a stage or a phase that there is not.

    >>> [(sent_beside(stage, "forward"), sent_beside(stage, "backward")) for stage in STAGES]
    [(0, 4), (2, 2), (2, 2), (2, 4)]
    """
    one_of("stage", stage, tuple(STAGES))
    one_of("phase", phase, PHASES)
    if phase == "forward":
        return weight_bytes if stage else 0
    return gradient_bytes + (gradient_bytes, 0, 0, weight_bytes)[stage]


def tokens_to_hide(
    flops_per_second: float,
    bytes_per_second: float,
    ranks: int,
    stage: int = 0,
    *,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
) -> float:
    """From how many tokens a rank and step (stage 3: micro-batch) all that is sent is hidden, but for the last bucket.

    The larger of what forward needs, with 2 FLOPs a parameter and token, and backward, with 4. A checkpointed backward
    has 2 more, which are left out here: then it is hidden sooner.

    Raises ValueError for rates that are not above 0, and for a stage that there is not.

    400 TFLOP/s and 50 GB/s between two machines of many. In 16 bits all stages need the same: stage 3 sends half as
    much again, but beside forward, where data parallel sends nothing. FP32 gradients need twice as many:

    >>> [round(tokens_to_hide(400e12, 50e9, 1000, stage)) for stage in STAGES]
    [7992, 7992, 7992, 7992]
    >>> round(tokens_to_hide(400e12, 50e9, 1000, gradient_bytes=4))
    15984
    >>> tokens_to_hide(400e12, 50e9, 1)
    0.0
    """
    positive("ranks", ranks)
    above_0(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    needed = [0.0]
    for phase, flops in zip(PHASES, (2, 4), strict=True):
        sent = sent_beside(stage, phase, weight_bytes, gradient_bytes) * (ranks - 1) / ranks
        if sent:
            needed.append(hidden_tokens(flops_per_second, bytes_per_second, sent, flops))
    return max(needed)


def exposed_seconds(buckets: Sequence[int], backward_seconds: float, ranks: int, bytes_per_second: float) -> float:
    """What backward waits for its buckets' all-reduces in the end, one after another beside it.

    buckets: bytes of each, in the order in which backward completes them; backward's time goes by bytes.

    Four buckets of 25 MB in a backward of 0.1 s: where the link is fast, only the last is waited for. With one bucket
    nothing is hidden.

    >>> [round(exposed_seconds(sizes, 0.1, 8, 10e9), 4) for sizes in ([25_000_000] * 4, [100_000_000])]
    [0.0044, 0.0175]
    >>> round(ring_seconds(25_000_000, 8, 10e9), 4)
    0.0044
    """
    whole, done, through = sum(buckets), 0, 0.0
    for nbytes in buckets:
        done += nbytes
        complete = backward_seconds * done / whole
        through = max(through, complete) + ring_seconds(nbytes, ranks, bytes_per_second)
    return max(0.0, through - backward_seconds)
