"""Overlap: when is offloading free? When the link needs no longer than the arithmetic that runs meanwhile.

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

What moves once a parameter, weights and states, is on the page `traffic`.

All rates are those that are reached, not those on the box. What no formula here knows: small copies, which never reach
B; kernels that are not arithmetic, which make F smaller; a link that several devices share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from memlab.checking import above_0, one_of
from memlab.memory_arithmetic import Transformer, training_step
from memlab.memory_arithmetic.ledger import elements

LINKS = {"NVMe": 7e9, "PCIe Gen4 x16": 25e9, "PCIe Gen5 x16": 55e9, "NVLink-C2C": 450e9}
"""Bytes a second, one way, as they are commonly reached: of PCIe about 85 % of the 31.5 and 63 GB/s that its lanes give
(Bekman, Machine Learning Engineering); of NVLink-C2C half of the 900 GB/s that NVIDIA prints for both ways of a GH200;
of a solid-state drive on four lanes of PCIe Gen4, its data sheet's sequential read."""

WORK = {"forward": (24, 4), "backward": (48, 10), "backward, checkpointed": (72, 14)}
"""FLOPs of a GPT's block for each token: the factors of h² and of s·h. A multiply and an add are two. A causal mask
spares fused kernels up to half of the second, which PyTorch's counter does not subtract either."""


class Overlap(NamedTuple):
    """Arithmetic and a transfer that may run beside each other, each with the seconds that it takes alone."""

    compute_seconds: float
    transfer_seconds: float

    @property
    def hidden(self) -> bool:
        """Whether the transfer costs nothing."""
        return self.transfer_seconds <= self.compute_seconds

    @property
    def exposed_seconds(self) -> float:
        """What the arithmetic waits."""
        return max(0.0, self.transfer_seconds - self.compute_seconds)

    @property
    def overhead(self) -> float:
        """The wait, as a part of the arithmetic: 0.25 is a layer that takes a quarter longer."""
        return self.exposed_seconds / self.compute_seconds

    @property
    def free_share(self) -> float:
        """The part of the bytes that could be sent at no cost, from 0 to 1."""
        return 1.0 if self.hidden else self.compute_seconds / self.transfer_seconds


def transfer_seconds(nbytes: int, bytes_per_second: float) -> float:
    """How long a link needs for so many bytes. Raises ValueError for a bandwidth that is not above 0.

    >>> transfer_seconds(55 * 10**9, 55e9)
    1.0
    """
    above_0(bytes_per_second=bytes_per_second)
    return nbytes / bytes_per_second


def block_bytes(
    model: Transformer,
    batch: int,
    tokens: int,
    *,
    inputs_only: bool = False,
    precision: str = "bf16",
    dropout: float = 0.0,
    attention: str = "fused",
) -> int:
    """Bytes that one block of a GPU's model keeps for backward on (batch, tokens): what there is to send, exactly.

    inputs_only: of a block that is checkpointed, its input. The rest, and the errors: as of `training_step`.

    >>> model = Transformer(layers=24, width=4096, heads=32, vocabulary=256, context=2048)
    >>> block_bytes(model, 1, 2048, dropout=0.1) - 2048 * (34 * 4096 + 16 + 4 * 32)  # the state of random numbers
    16
    """

    def kept(layers: int) -> int:
        sized = replace(model, layers=layers)
        options = {"precision": precision, "dropout": dropout, "attention": attention}
        segments = layers if inputs_only else None
        return training_step(sized, batch, tokens, segments=segments, **options).activations.nbytes

    return kept(2) - kept(1)


def block_flops(model: Transformer, batch: int, tokens: int, phase: str = "forward") -> int:
    """FLOPs of one block's products of matrices on (batch, tokens), as PyTorch counts them; the rest are few.

    phase: "forward", "backward", or "backward, checkpointed", which computes the forward again.
    Raises ValueError for another.

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
    phase: str = "forward",
    inputs_only: bool = False,
    **options,
) -> Overlap:
    """One block's arithmetic, and the transfer of what it keeps: away in forward, and back in backward.

    inputs_only: only its input is kept and sent, and backward computes the block again (phase "backward" is then
    "backward, checkpointed"). options: as of `block_bytes`. Raises ValueError for rates that are not above 0.

    >>> wide = Transformer(layers=24, width=12288, heads=96, vocabulary=256, context=2048)
    >>> block_overlap(wide, 1, 2048, 400e12, 55e9).hidden, block_overlap(wide, 1, 2048, 800e12, 55e9).hidden
    (True, False)
    """
    above_0(flops_per_second=flops_per_second)
    if inputs_only and phase == "backward":
        phase = "backward, checkpointed"
    flops = block_flops(model, batch, tokens, phase)
    nbytes = block_bytes(model, batch, tokens, inputs_only=inputs_only, **options)
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
