"""Chapter 03: attention in tiles beside the plain one and PyTorch's, in digits, bytes and time."""

from __future__ import annotations

import importlib.util
import itertools
import math

import torch
from torch.nn import functional as F

from memlab.book.measures.timing import compared, interleaved
from memlab.memory_hierarchy import live_bytes, tiled_attention
from memlab.memory_hierarchy.triton_attention import triton_attention
from memlab.memory_timeline import Meter


def tiled_attention_digits_and_bytes(device: str, rounds: int) -> list[tuple]:
    """The error in FP64, and what a forward holds for 512 to 4,096 tokens: beside its formula, and how it grows."""
    worst = 0.0
    for causal in (False, True):
        q, k, v = (torch.randn(2, 4, 300, 64, dtype=torch.float64, device=device) for _ in range(3))
        scores = q @ k.mT / math.sqrt(64)
        if causal:
            scores = scores.masked_fill(torch.ones(300, 300, dtype=torch.bool, device=device).triu(1), -math.inf)
        error = tiled_attention(q, k, v, causal=causal) - scores.softmax(-1) @ v
        worst = max(worst, error.abs().max().item())
    held, off = [], 0
    for tokens in (512, 1024, 2048, 4096):
        q, k, v = (torch.randn(1, 4, tokens, 64, device=device) for _ in range(3))
        with torch.no_grad(), Meter(inputs=(q, k, v)) as meter:
            tiled_attention(q, k, v)
        held.append(meter.timeline.peak_bytes - meter.timeline.totals[0])
        off = max(off, abs(held[-1] - live_bytes(q.shape, k.shape, v.shape)))
    doubled = ", ".join(f"{after / before:.2f}×" for before, after in zip(held, held[1:], strict=False))
    return [
        ("tiled attention / plain, FP64, plain and causal", f"{worst:.1e} at most", "≤ 1e-12"),
        ("tiled attention, storages: formula against meter, 512 … 4,096 tokens", f"{off:+,} B", "0 B"),
        ("tiled attention, storages, for each doubling of the tokens", doubled, "at most 2×"),
    ]


def tiled_attention_time(device: str, rounds: int) -> list[tuple]:
    """Forwards in plain PyTorch ops against the fused kernel, turn by turn; on a GPU also in one kernel of Triton's."""
    rows = []
    shapes = (((1, 8, 2048), False), ((1, 8, 2048), True), ((4, 4, 512), False))
    for (batch, heads, tokens), causal in shapes:
        q, k, v = (torch.randn(batch, heads, tokens, 64, device=device) for _ in range(3))
        runs = {
            "tiles": lambda q=q, k=k, v=v, causal=causal: tiled_attention(q, k, v, causal=causal),
            "fused": lambda q=q, k=k, v=v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        }
        name = f"tiled attention / SDPA, forward, {batch} × {heads} heads × {tokens:,} × 64{', causal' * causal}"
        rows.append((name, compared(interleaved(runs, rounds), "tiles", "fused"), "≤ 3×" if device == "cpu" else ""))
    if device == "cuda" and importlib.util.find_spec("triton"):
        for (dtype, name), causal in itertools.product(
            ((torch.float32, "FP32"), (torch.bfloat16, "BF16")), (False, True)
        ):
            q, k, v = (torch.randn(8, 16, 4096, 64, device=device, dtype=dtype) for _ in range(3))
            runs = {
                "kernel": lambda q=q, k=k, v=v, causal=causal: triton_attention(q, k, v, causal=causal),
                "fused": lambda q=q, k=k, v=v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
            }
            row = f"one kernel of Triton / SDPA, {name}, forward, 8 × 16 heads × 4,096 × 64{', causal' * causal}"
            rows.append((row, compared(interleaved(runs, rounds), "kernel", "fused"), ""))
    return rows
