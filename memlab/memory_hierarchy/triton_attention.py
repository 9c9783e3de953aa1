"""The same attention as one GPU kernel, in Triton: a program keeps its tile of queries near and walks along the keys.

Between the ops of `attention` a tile goes to memory and comes back: on a GPU that is the device's memory, which the
tiles were meant to avoid. A kernel is one op. Here q's tile, the running m, z and a, and the tile of scores live in
registers and shared memory from the first key to the last; the device's memory gives q, k and v and takes the result.

Triton is imported when a kernel is first asked for. Runs where a GPU and triton are, or with TRITON_INTERPRET=1, set
before that, slowly on a CPU. Sources: Dao et al. 2022 (FlashAttention, algorithm 1), Tillet et al. 2019 (Triton).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os

import torch
from torch import Tensor

from memlab.memory_hierarchy.attention import refuse


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile_queries: int | None = None,
    tile_keys: int = 64,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v by one kernel, forward only: the result of `tiled_attention` with `return_lse=True`.

    q: (batch, heads, queries, head_dim); k, v: (batch, heads, keys, head_dim); FP32, BF16 or FP16, sums in FP32.
    tile_queries, tile_keys: powers of two from 16 on, whose tiles fit a multiprocessor's memory. Of queries 64 without
    one, in FP32 32, which on an H200 took three quarters of the time of 64, and with `causal` a twentieth.

    Returns out, as q, and the log-sum-exp of every query's scores, (batch, heads, queries) in FP32.

    Raises RuntimeError without triton, without a GPU, and where autograd would record it; TypeError for FP64;
    ValueError for tiles that are no power of two, fewer key-value heads, and what `tiled_attention` refuses.
    """
    tile_queries = (32 if q.dtype == torch.float32 else 64) if tile_queries is None else tile_queries
    refuse(q, k, v, causal, tile_queries, tile_keys)
    for name, size in {"tile_queries": tile_queries, "tile_keys": tile_keys}.items():
        if size < 16 or size & (size - 1):
            raise ValueError(f"expected {name} as a power of two from 16 on, found {size}")
    if q.dtype == torch.float64:
        raise TypeError(
            "expected q, k and v in float32, bfloat16 or float16, found float64; tiled_attention() takes it"
        )
    if not q.shape[1] == k.shape[1] or not q.shape[3] == v.shape[3]:
        raise ValueError(
            f"expected as many heads in k as in q, and v as wide; found q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}; tiled_attention() takes them"
        )
    kernel = _compiled()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not q.is_cuda and not interpreted:
        raise RuntimeError(f"expected tensors on a GPU, found them on {q.device}; tiled_attention() runs anywhere")
    if interpreted and q.dtype == torch.bfloat16:  # it would multiply the bit patterns (triton-lang/triton 11584)
        raise RuntimeError("expected float32 or float16 where Triton is interpreted, found bfloat16, which it cannot")
    (batch, heads, queries, width), keys = q.shape, k.shape[2]
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(batch, heads, queries, dtype=torch.float32)
    if out.numel():
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():  # where Triton launches
            kernel[(batch * heads, -(-queries // tile_queries))](
                *(q, k, v, out, lse, queries, keys),
                width**-0.5 if scale is None else scale,
                WIDTH=width,
                PADDED=max(16, 2 ** math.ceil(math.log2(width))),  # what tl.dot takes
                TILE_QUERIES=tile_queries,
                TILE_KEYS=tile_keys,
                CAUSAL=causal,
            )
    return out, lse


def forward(
    q,
    k,
    v,
    out,
    lse,
    queries,
    keys,
    scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One program: a tile of queries of one head. q, k, v, out, lse are the addresses of their first elements.

    Features are padded to a power of two, PADDED, as are rows and keys to whole tiles: what lies outside reads as 0.
    """
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * TILE_QUERIES + tl.arange(0, TILE_QUERIES)
    features = tl.arange(0, PADDED)
    of_queries = (head * queries + rows[:, None]) * WIDTH + features[None, :]
    inside = (rows[:, None] < queries) & (features[None, :] < WIDTH)
    q_tile = tl.load(q + of_queries, mask=inside, other=0.0)

    m = tl.full([TILE_QUERIES], -3.4028234e38, tl.float32)  # the lowest finite number
    z = tl.zeros([TILE_QUERIES], tl.float32)
    a = tl.zeros([TILE_QUERIES, PADDED], tl.float32)
    visible = keys
    if CAUSAL:
        visible = tl.minimum(keys, (tl.program_id(1) + 1) * TILE_QUERIES)
    for start in range(0, visible, TILE_KEYS):
        columns = start + tl.arange(0, TILE_KEYS)
        of_keys = (head * keys + columns[:, None]) * WIDTH + features[None, :]
        there = (columns[:, None] < keys) & (features[None, :] < WIDTH)
        k_tile = tl.load(k + of_keys, mask=there, other=0.0)
        v_tile = tl.load(v + of_keys, mask=there, other=0.0)

        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        seen = columns[None, :] < keys
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        s = tl.where(seen, s, float("-inf"))

        larger = tl.maximum(m, tl.max(s, 1))
        correction = tl.exp(m - larger)
        weights = tl.exp(s - larger[:, None])
        z = z * correction + tl.sum(weights, 1)
        a = a * correction[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        m = larger

    tl.store(lse + head * queries + rows, m + tl.log(z), mask=rows < queries)
    a = a / tl.where(z == 0.0, 1.0, z)[:, None]
    tl.store(out + of_queries, a.to(out.dtype.element_ty), mask=inside)


tl = None  # triton.language, once a kernel was asked for


@functools.cache
def _compiled():
    """`forward` as Triton compiles it, at its first call."""
    global tl
    try:
        import triton
        import triton.language as tl
    except ImportError:
        raise RuntimeError(
            "expected triton, found none; PyTorch's builds for CUDA bring it along on Linux, and tiled_attention() "
            "does without"
        ) from None
    return triton.jit(forward)
