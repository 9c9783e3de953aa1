"""Attention's own checkpointing: softmax(q kᵀ · scale) is not kept for backward but made again, a tile at a time.

What attention keeps is a square: a weight for every query and key. It is also what is cheap to make again. One number
a query, the log-sum-exp that the forward ends with anyway, stands for the sums over all keys, and with it each weight
depends on its own query and key only. With S = q kᵀ · scale, P = softmax(S), out = P v, and dX for a gradient by X:

    P  = exp(S − lse)                   lse = log Σ exp(S) over the keys
    dv = Pᵀ dout        dP = dout vᵀ    out is a product, and so are its derivatives
    dS = P ∘ (dP − D)                   the softmax's derivative, D = Σ P ∘ dP over the keys
    D  = Σ (P v) ∘ dout = Σ out ∘ dout  over the width of a value: the keys are summed up in `out`, so no row is needed
    dq = dS k · scale   dk = dSᵀ q · scale

Each line holds for a tile of queries and keys, and tiles of one row or column add up. So the forward is chapter 03's
`tiled_attention`; of all the weights backward holds one tile, makes it, uses it and overwrites it. The price is one
product more, S again: seven for forward and backward, where plain attention has six.

`checkpoint` around plain attention would make the same product again, but for all tokens at once: the squares are gone
between forward and backward, and all back at its peak. That is why attention has a recomputation of its own.

Sources: Dao et al. 2022 (FlashAttention, appendix B.2: this backward, and D); Rabe and Staats 2021 (recomputed tiles).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memlab.memory_hierarchy.attention import TILE_KEYS, TILE_QUERIES, WIDE, carve, tiled_attention


def checkpointed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile_queries: int = TILE_QUERIES,
    tile_keys: int = TILE_KEYS,
) -> Tensor:
    """softmax(q kᵀ · scale) v, differentiable by q, k and v, with no more than a tile of it in memory at any time.

    q: (batch, heads, queries, head_dim); k: (batch, kv_heads, keys, head_dim); v: (batch, kv_heads, keys, value_dim).
    Their dtypes, grouped queries, `causal`, `scale` and the tiles are those of `tiled_attention`, whose result this is
    to the last bit. Under autocast q, k and v are cast to its dtype, as by F.scaled_dot_product_attention.

    Returns out, (batch, heads, queries, value_dim), which lies in memory as q does. Where q is a view with the tokens
    before the heads, as in a GPT, out.transpose(1, 2).reshape(batch, queries, -1) is then the same memory, and a layer
    that saves it saves nothing more.

    Saves for backward q, k, v, out, and lse in the dtype of the sums:

        batch · (heads · queries · (head_dim + value_dim + 1) + kv_heads · keys · (head_dim + value_dim)) elements,

    for plain self-attention 4·B·H·T·d + B·H·T. Backward holds beyond that dout and, for gradients by all three, with H
    heads, G key-value heads, tiles of t queries and u keys, and w bytes for a sum:

        dq, dk, dv    the bytes of q, k and v
        sums          batch · w · G · keys · (head_dim + value_dim), for 16-bit inputs; else dk and dv are their sums
        fast memory   batch · w · (H·t·(2·head_dim + 2·value_dim + 2·u + 2) + G·u·(head_dim + value_dim))

    Gradients are contiguous, in their inputs' dtype, and the same bits on each run. A query that sees no key has a
    gradient of zeros and adds nothing to those of keys and values.

    Not for torch.func's transforms, forward-mode AD or is_grads_batched: tiles are overwritten, and torch raises.

    There is no dropout: backward would need the same random numbers for each tile in another order, which takes a
    generator that can be asked for any of them (a kernel's), or a stored square. Use F.scaled_dot_product_attention.

    Raises what `tiled_attention` raises for bad shapes, dtypes and tiles; TypeError for a scale that is a tensor; and
    RuntimeError from a second differentiation, which would need backward's tiles kept.
    """
    if isinstance(scale, Tensor):
        raise TypeError(
            "expected scale as a number or None, found a tensor, which would get no gradient; multiply q by it"
        )
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(narrow) if x.dtype in WIDE and x.dtype != torch.float64 else x for x in (q, k, v))
    return _Attention.apply(q, k, v, causal, scale, tile_queries, tile_keys)


class _Attention(torch.autograd.Function):
    """`tiled_attention`, with a backward."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, *options) -> Tensor:
        ctx.options = causal, scale, tile_queries, tile_keys = options
        tiles = {"tile_queries": tile_queries, "tile_keys": tile_keys}
        out, lse = tiled_attention(q, k, v, causal=causal, scale=scale, **tiles, return_lse=True)
        if q.stride(1) < q.stride(2):
            out = torch.empty_permuted(out.shape, (0, 2, 1, 3), dtype=out.dtype, device=out.device).copy_(out)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(dout, *ctx.saved_tensors, ctx.needs_input_grad, *ctx.options), None, None, None, None


class _Gradients(torch.autograd.Function):
    """The backward as an op of its own: only when someone differentiates *it* there is something to refuse."""

    @staticmethod
    def forward(ctx, *args) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _gradients(*args)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "expected checkpointed_attention to be differentiated once, found a second time (of a gradient made with "
            "create_graph=True); its tiles are gone. For second derivatives use F.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which keeps the whole matrix of weights"
        )


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    needed: tuple[bool, ...],
    causal: bool,
    scale: float | None,
    tile_queries: int,
    tile_keys: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk and dv, each None where it is not needed. dout, out: (batch, heads, queries, value_dim)."""
    need_q, need_k, need_v, *_ = needed
    (batch, heads, queries, head_dim), (kv_heads, all_keys, value_dim) = q.shape, v.shape[1:]
    keys = min(all_keys, queries) if causal else all_keys
    folded, group = batch * kv_heads, heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    dq = q.new_empty(q.shape) if need_q else None
    sum_k = lse.new_zeros(folded, all_keys, head_dim) if need_k else None
    sum_v = lse.new_zeros(folded, all_keys, value_dim) if need_v else None
    # A group's heads stand under each other, as in the forward: their shares of dk and dv are summed by the products.
    q, dout, out, lse = (x.unflatten(1, (kv_heads, group)) for x in (q, dout, out, lse.unsqueeze(-1)))
    grouped_dq = dq.view(q.shape) if need_q else None

    r, c = group * min(tile_queries, queries), min(tile_keys, keys)
    q_store, dq_store, dout_store, out_store, lse_store, d_store = (
        lse.new_empty(folded * r * width) for width in (head_dim, head_dim, value_dim, value_dim, 1, 1)
    )
    k_store, v_store = (lse.new_empty(folded * c * width) for width in (head_dim, value_dim))
    p_store, ds_store = (lse.new_empty(folded * r * c) for _ in range(2))

    for i in range(0, queries, tile_queries):
        i_end = min(i + tile_queries, queries)
        n, r = i_end - i, group * (i_end - i)
        q_tile = _finite(_tile(q_store, q, i, i_end).mul_(scale))
        dout_tile = _tile(dout_store, dout, i, i_end)
        d = _tile(out_store, out, i, i_end).mul_(dout_tile)
        d = torch.sum(d, -1, keepdim=True, out=carve(d_store, folded, r, 1))
        # Where no key was seen lse is −∞; with ∞ in its place every weight is 0, as in the forward.
        lse_tile = _tile(lse_store, lse, i, i_end).nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)
        dq_tile = carve(dq_store, folded, r, head_dim).zero_()
        visible = min(keys, i_end) if causal else keys
        for j in range(0, visible, tile_keys):
            j_end = min(j + tile_keys, visible)
            c = j_end - j
            k_tile = _finite(_tile(k_store, k, j, j_end))
            p = torch.bmm(q_tile, k_tile.mT, out=carve(p_store, folded, r, c))
            p.sub_(lse_tile).exp_()
            if causal and j_end > i + 1:  # the diagonal runs through this tile
                p.view(folded, group, n, c).tril_(i - j)
            if need_v:
                sum_v[:, j:j_end].baddbmm_(p.mT, dout_tile)
            if need_q or need_k:
                v_tile = _tile(v_store, v, j, j_end)
                ds = torch.bmm(dout_tile, v_tile.mT, out=carve(ds_store, folded, r, c))
                ds.sub_(d).mul_(p)
            if need_q:
                dq_tile.baddbmm_(ds, k_tile, alpha=scale)
            if need_k:
                sum_k[:, j:j_end].baddbmm_(ds.mT, q_tile)  # q's tile was scaled already
        if need_q:
            grouped_dq[..., i:i_end, :] = dq_tile.view(batch, kv_heads, group, n, head_dim)
    dk = sum_k.view(k.shape).to(k.dtype) if need_k else None
    dv = sum_v.view(v.shape).to(v.dtype) if need_v else None
    return dq, dk, dv


def _tile(store: Tensor, x: Tensor, start: int, stop: int) -> Tensor:
    """Tokens start … stop of x, copied to a store as (batch · kv_heads, rows, width)."""
    x = x[..., start:stop, :]
    return carve(store, *x.shape).copy_(x).view(x.shape[0] * x.shape[1], math.prod(x.shape[2:-1]), x.shape[-1])


def _finite(x: Tensor) -> Tensor:
    """x with the largest finite numbers for ±∞. A score of −∞ still has weight 0, and 0 times x is 0 and not NaN."""
    return x.clamp_(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
