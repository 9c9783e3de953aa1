"""The roofline: whether an op waits for arithmetic or for memory, from its FLOPs and its bytes.

An op that computes F FLOPs and moves B bytes takes at least F / (the machine's FLOP/s), and at least B / (its bytes/s).
Which of the two is longer depends on one property of the op, its *intensity* F / B, and the most FLOP/s it can reach:

    roof(intensity) = min(peak FLOP/s, intensity × bytes/s)

Left of the ridge, where the two are equal, the chip's arithmetic waits, and only moving fewer bytes makes the op
faster. F and B of each op come from the page before, `counting`.

Speeds are above 0, as measured; every function raises ValueError for others.

Source: Williams, Waterman and Patterson 2009.
"""

from __future__ import annotations

import torch

from memlab.checking import one_of
from memlab.memory_hierarchy.bandwidth import best_seconds
from memlab.memory_hierarchy.counting import Op


def roof(intensity: float, flops_per_second: float, bytes_per_second: float) -> float:
    """The most FLOP/s that an op of this intensity (FLOPs a byte) can reach. Raises ValueError for one below 0.

    >>> roof(1, 100e9, 10e9), roof(1000, 100e9, 10e9)
    (10000000000.0, 100000000000.0)
    """
    _refuse_speeds(flops_per_second, bytes_per_second)
    if intensity < 0:
        raise ValueError(f"expected an intensity of at least 0 FLOPs a byte, found {intensity}")
    return min(flops_per_second, intensity * bytes_per_second)


def bound_by(op: Op, flops_per_second: float, bytes_per_second: float) -> str:
    """What an op waits for: "memory" left of the ridge, flops_per_second / bytes_per_second, else "compute"."""
    _refuse_speeds(flops_per_second, bytes_per_second)
    return "memory" if op.intensity < flops_per_second / bytes_per_second else "compute"


def least_seconds(op: Op, flops_per_second: float, bytes_per_second: float) -> float:
    """The least time that the roofline allows for all calls of an op."""
    _refuse_speeds(flops_per_second, bytes_per_second)
    return max(op.flops / flops_per_second, op.nbytes / bytes_per_second)


def measure_peak_flops(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of the fastest product of square matrices found, with PyTorch's present threads and settings (TF32).

    Sizes double from 128 until a product takes 0.05 s, or up to 8192; each is run a few times, and the best counts.
    Raises ValueError for a device that is neither a CPU nor a GPU of CUDA.
    """
    one_of("device", torch.device(device).type, ("cpu", "cuda"))
    found, size = 0.0, 128
    while size <= 8192:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = best_seconds(lambda: torch.mm(a, b, out=out), device, repeats=5)  # noqa: B023
        found, size = max(found, 2 * size**3 / seconds), 2 * size
        if seconds > 0.05:
            break
    return found


def _refuse_speeds(flops_per_second: float, bytes_per_second: float) -> None:
    if not (flops_per_second > 0 and bytes_per_second > 0):
        raise ValueError(
            f"expected FLOP/s and bytes/s above 0, found {flops_per_second} and {bytes_per_second}; "
            "measure_peak_flops() and measure_bandwidth() measure them"
        )
