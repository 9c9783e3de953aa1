"""Links: when is sending free? When the link needs no longer than the arithmetic that runs meanwhile.

A link of B bytes a second takes n / B for n bytes, and a device of F FLOPs a second takes f / F for f FLOPs. Copies run
beside the arithmetic, so a layer that sends n bytes while f FLOPs are computed lasts

    max(f / F, n / B)        and nothing is lost where        f / n >= F / B.

The left side is the layer's *intensity* over the link, FLOPs for each byte that crosses it, and F / B the ridge: the
roofline of `memlab.memory_hierarchy.roofline`, with a link in the place of the device's memory. An H100 that reaches
400 TFLOP/s behind a PCIe Gen5 link of 55 GB/s has its ridge at 7,300 FLOPs a byte; at its own memory it is 120.

**Activations.** A GPT's block of width h in 16 bits, with fused attention and dropout, saves 34·h bytes a token (and
16 + 4·heads: statistics; `block_bytes` has them all). Its forward takes 24·h² FLOPs a token in matrices and 4·s·h in
attention over s tokens. Bytes grow with h and FLOPs with h², so there is a width from which it is free:

    (24·h + 4·s) / F >= 34 / B        h >= (34·F / B - 4·s) / 24

Backward takes 48·h² + 10·s·h (fused attention computes its scores again), so the way back is free from less than half
of that width. With every block checkpointed only its input is sent, 2·h bytes, and backward computes a forward more.

**Weights and gradients** move once a parameter. Weights that are streamed are 2 bytes for 2 FLOPs a parameter and token
in forward. The width cancels, and what counts is how many tokens a batch has:

    2·tokens / F >= 2 / B             tokens >= F / B

**Optimizer states** on the host: 2 bytes of gradient down and 2 of weight up, and between the two the host's own memory
is read and written, 28 bytes a parameter (see `HOST_BYTES`). Ren et al. 2021 (ZeRO-Offload), sections 3 and 4.

All rates are those that are reached, not those on the box. What no formula here knows: small copies, which never reach
B; kernels that are not arithmetic, which make F smaller; a link that several devices share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from memlab.checking import above_0, one_of, positive
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_arithmetic.ledger import elements

LINKS = {"NVMe": 7e9, "PCIe Gen4 x16": 25e9, "PCIe Gen5 x16": 55e9, "NVLink-C2C": 450e9}
"""Bytes a second, one way, as they are commonly reached: of PCIe about 85 % of the 31.5 and 63 GB/s that its lanes give
(Bekman, Machine Learning Engineering); of NVLink-C2C half of the 900 GB/s that NVIDIA prints for both ways of a GH200;
of a solid-state drive on four lanes of PCIe Gen4, its data sheet's sequential read."""

RANK_LINKS = {"Ethernet 25 Gb/s": 2.8e9, "InfiniBand 400 Gb/s": 45e9, "NVLink 4": 380e9}
"""The same from one rank to its neighbour: about 90 % of a network's 3.1 and 50 GB/s, and of NVLink 4's 450 GB/s the 80
to 85 % that NCCL commonly reaches inside a machine (Bekman, Machine Learning Engineering)."""

WORK = {"forward": (24, 4), "backward": (48, 10)}
"""FLOPs of a GPT's block for each token: the factors of h² and of s·h. A multiply and an add are two. A causal mask
spares fused kernels up to half of the second, which PyTorch's counter does not subtract either."""

HOST_BYTES = 28
"""Adam on the host, a parameter: master weight, m and v in FP32 are read and written (24), a gradient of 16 bits is
read (2), a weight of 16 bits is written (2). What the link itself reads and writes there, 4 more, is not in it."""


def transfer_seconds(nbytes: int, bytes_per_second: float) -> float:
    """How long a link needs for so many bytes. Raises ValueError for a bandwidth that is not above 0.

    >>> transfer_seconds(55 * 10**9, 55e9)
    1.0
    """
    above_0(bytes_per_second=bytes_per_second)
    return nbytes / bytes_per_second


# ---- activations: from which width?


class Overlap(NamedTuple):
    """Arithmetic and a transfer that may run beside each other, each with the seconds that it takes alone."""

    compute_seconds: float
    transfer_seconds: float

    @property
    def hidden(self) -> bool:
        """Whether the transfer costs nothing."""
        return self.transfer_seconds <= self.compute_seconds


def block_bytes(model: Transformer, batch: int, tokens: int, *, inputs_only: bool = False, dropout: float = 0.0) -> int:
    """Bytes that one block of a GPU's model in 16 bits keeps for backward on (batch, tokens): what there is to send.

    inputs_only: of a block that is checkpointed, its input. Raises what `training_step` raises.

    >>> model = Transformer(layers=24, width=4096, heads=32, vocabulary=256, context=2048)
    >>> block_bytes(model, 1, 2048, dropout=0.1) - 2048 * (34 * 4096 + 16 + 4 * 32)  # the state of random numbers
    16
    """

    def kept(layers: int) -> int:
        how = {"precision": "bf16", "dropout": dropout, "segments": layers if inputs_only else None}
        return training_step(replace(model, layers=layers), batch, tokens, **how).activations.nbytes

    return kept(2) - kept(1)


def block_flops(model: Transformer, batch: int, tokens: int, phase: str = "forward") -> int:
    """FLOPs of one block's products of matrices on (batch, tokens), as PyTorch counts them; the rest are few.

    phase: "forward" or "backward"; that of a checkpointed block is both. Raises ValueError for another.

    >>> model = Transformer(layers=24, width=4096, heads=32, vocabulary=256, context=2048)
    >>> block_flops(model, 1, 2048) == 2048 * (24 * 4096**2 + 4 * 2048 * 4096)
    True
    """
    one_of("phase", phase, tuple(WORK))
    matrices = [size for name, size in model.block.items() if name.endswith("weight") and not name.startswith("norm")]
    weights = sum(elements(size, model.symbols) for size in matrices)
    squares, scores = WORK[phase]
    return batch * tokens * (squares // 12 * weights + scores * tokens * model.width)


def block_overlap(
    model: Transformer,
    batch: int,
    tokens: int,
    flops_per_second: float,
    bytes_per_second: float,
    *,
    inputs_only: bool = False,
    dropout: float = 0.0,
) -> Overlap:
    """One block's arithmetic in forward, and the transfer of what it keeps, or of its input alone.

    Raises ValueError for rates that are not above 0.

    >>> wide = Transformer(layers=24, width=12288, heads=96, vocabulary=256, context=2048)
    >>> block_overlap(wide, 1, 2048, 400e12, 55e9).hidden, block_overlap(wide, 1, 2048, 800e12, 55e9).hidden
    (True, False)
    """
    above_0(flops_per_second=flops_per_second)
    flops = block_flops(model, batch, tokens)
    nbytes = block_bytes(model, batch, tokens, inputs_only=inputs_only, dropout=dropout)
    return Overlap(flops / flops_per_second, transfer_seconds(nbytes, bytes_per_second))


def hidden_width(
    flops_per_second: float,
    bytes_per_second: float,
    *,
    bytes_per_width: float = 34,
    tokens: int = 0,
    phase: str = "forward",
) -> float:
    """The least width of a GPT from which sending `bytes_per_width` · width bytes a token and block is free.

    bytes_per_width: 34 for all that a block saves in 16 bits with dropout, 32 without, 2 for its input alone.
    tokens: over how many attention looks; 0 leaves attention's own FLOPs out, which is the width at which even short
    texts hide it. Raises ValueError for rates that are not above 0 and for another phase than those of `WORK`.

    >>> round(hidden_width(400e12, 55e9)), round(hidden_width(400e12, 55e9, tokens=2048))
    (10303, 9962)
    >>> round(hidden_width(400e12, 55e9, phase="backward")), round(hidden_width(400e12, 55e9, bytes_per_width=2))
    (5152, 606)
    """
    above_0(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    one_of("phase", phase, tuple(WORK))
    squares, scores = WORK[phase]
    return max(0.0, (bytes_per_width * flops_per_second / bytes_per_second - scores * tokens) / squares)


# ---- weights, gradients and states: from how many tokens?


def hidden_tokens(
    flops_per_second: float, bytes_per_second: float, bytes_per_parameter: float = 2, flops_per_parameter: float = 2
) -> float:
    """How many tokens a batch needs until moving so many bytes for each parameter is free.

    flops_per_parameter: for each token, of the arithmetic that runs meanwhile: 2 in forward, 4 in backward, 6 in both.
    To lose at most a part p of that arithmetic, with nothing hidden at all, takes 1 / p times as many.
    Raises ValueError for what is not above 0.

    Weights streamed through a forward, and again through a backward; Adam in 200 GB/s of host memory beside both:

    >>> round(hidden_tokens(400e12, 55e9)), round(hidden_tokens(400e12, 55e9, 2, 4))
    (7273, 3636)
    >>> round(hidden_tokens(400e12, 200e9, HOST_BYTES, 6))
    9333
    """
    above_0(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
    above_0(bytes_per_parameter=bytes_per_parameter, flops_per_parameter=flops_per_parameter)
    return bytes_per_parameter * flops_per_second / (flops_per_parameter * bytes_per_second)


class HostStep(NamedTuple):
    """A training step whose optimizer works on the host: the seconds of each part, alone."""

    forward_seconds: float
    backward_seconds: float
    gradients_seconds: float
    """The gradients' way to the host, beside backward."""
    update_seconds: float
    """Adam in the host's memory, which nothing hides."""
    weights_seconds: float
    """The weights' way back, beside the update, layer by layer."""


def host_step(
    parameters: int, tokens: int, flops_per_second: float, bytes_per_second: float, host_bytes_per_second: float
) -> HostStep:
    """A step of so many parameters on a batch of so many tokens, weights and gradients in 16 bits, Adam on the host.

    bytes_per_second: of the link, one way. host_bytes_per_second: of the host's memory, reading and writing together.
    Raises TypeError or ValueError for counts below 1 and rates that are not above 0.

    A billion parameters: the update alone takes as long as the arithmetic on 9,333 tokens.

    >>> step = host_step(10**9, 9_333, 400e12, 55e9, 200e9)
    >>> round(step.update_seconds, 3), round(step.forward_seconds + step.backward_seconds, 3)
    (0.14, 0.14)
    """
    positive("parameters", parameters)
    positive("tokens", tokens)
    above_0(flops_per_second=flops_per_second, host_bytes_per_second=host_bytes_per_second)
    forward = 2 * parameters * tokens / flops_per_second
    one_way = transfer_seconds(2 * parameters, bytes_per_second)
    return HostStep(forward, 2 * forward, one_way, HOST_BYTES * parameters / host_bytes_per_second, one_way)
