"""Attention's forward without T×T: the scores are made a tile at a time, used, and overwritten.

Plain attention stores softmax(q kᵀ · scale), one number for every query and key. What stands in the way of doing
without it is the softmax: to divide by a sum over all keys one seems to need all of them. But a maximum and a sum can
be corrected when more keys come. With the scores s of some keys, and their values v:

    m' = max(m, max s)                              the running maximum, so that exp never overflows
    z' = z · exp(m − m') + Σ exp(s − m')            the running sum of weights
    a' = a · exp(m − m') + Σ exp(s − m') · v        the running sum of weighted values; the result is a / z in the end

It is exact: each line holds whatever the order and the size of the pieces. Beside the output only m, z, a and a single
tile of scores are ever held, so bytes grow with the tokens and not with their square; and a tile fits where memory is
fast. A GPU's kernel does this in shared memory (`triton_attention`), this page in whole-tile PyTorch ops in the cache.

Forward only. Under autograd every tile would be saved for backward, and T×T be back in pieces; a backward must make
the tiles again, and for it the log-sum-exp m + log z is all that must be kept (chapter 08).

Sources: Milakov and Gimelshein 2018 (online softmax); Rabe and Staats 2021 (attention with it); Dao et al. 2022
(FlashAttention: the tiles and the memory they should fit).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from memlab.checking import divisors, positive

# Of what was tried, 64 to 256 by 128 to 512, the tiles nearest to the fused kernel's time on a CPU.
TILE_QUERIES, TILE_KEYS = 128, 256
WIDE = {torch.float64: torch.float64, **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float32)}
"""In which dtype sums are held, for each dtype of the inputs."""
DTYPES = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIDE)


def online_softmax(scores_in_pieces: Iterable[Tensor], values_in_pieces: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ values and the log-sum-exp of the scores, with no more than one piece in hand.

    scores_in_pieces: each (..., rows, keys of this piece); values_in_pieces: each (..., keys of this piece, width).
    All of one dtype, FP64, FP32, BF16 or FP16; sums of the last two are held in FP32, where they do not stop growing.
    Returns (..., rows, width) in that dtype and (..., rows, 1) in that of the sums; NaN for a row of nothing but −∞.
    Raises ValueError without a piece, for one without keys, and for more pieces of the one than of the other; TypeError
    for other dtypes.

    >>> online_softmax([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])], [torch.eye(2, 3), torch.eye(3)[2:]])[0]
    tensor([[0.0900, 0.2447, 0.6652]])
    >>> torch.tensor([1.0, 2.0, 3.0]).softmax(0)
    tensor([0.0900, 0.2447, 0.6652])
    """
    m = None
    for s, v in pairs(scores_in_pieces, values_in_pieces):
        dtype, s, v = s.dtype, s.to(WIDE[s.dtype]), v.to(WIDE[v.dtype])
        if m is None:  # the lowest finite number, since −∞ − (−∞) would be no number
            m, z, a = torch.full_like(s[..., :1], torch.finfo(s.dtype).min), 0, 0
        larger = torch.maximum(m, s.amax(-1, keepdim=True))
        correction, weights = (m - larger).exp(), (s - larger).exp()
        m = larger
        z = z * correction + weights.sum(-1, keepdim=True)
        a = a * correction + weights @ v
    if m is None:
        raise ValueError("expected at least one piece of scores, found none")
    return (a / z).to(dtype), m + z.log()


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile_queries: int = TILE_QUERIES,
    tile_keys: int = TILE_KEYS,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v, forward only, with the scores of at most tile_queries × tile_keys in every head.

    q: (batch, heads, queries, head_dim); k: (batch, kv_heads, keys, head_dim); v: (batch, kv_heads, keys, value_dim),
      all of one dtype, FP64, FP32, BF16 or FP16; the last two are summed in FP32. heads is a multiple of kv_heads, and
      heads / kv_heads neighbours share a key-value head (grouped queries).
    causal: query i looks at keys 0 … i. With more keys than queries the last ones are never looked at: aligned at the
      first query and key, as `is_causal` of F.scaled_dot_product_attention. Tiles without a visible key are not made.
    scale: None is 1 / √head_dim.

    Returns out (batch, heads, queries, value_dim) in q's dtype, contiguous; with `return_lse` also the log Σ exp of
    every query's scores, (batch, heads, queries), in the dtype of the sums. A query that sees no key (there are none,
    or all scores are −∞) gets zeros and −∞. The bytes it holds meanwhile: `live_bytes`.

    Raises RuntimeError where autograd would record it; TypeError for dtypes that are not of these or not the same, tile
    sizes that are no ints, and a causal that is no bool; ValueError for tile sizes below 1, shapes that do not fit, and
    several devices.
    """
    refuse(q, k, v, causal, tile_queries, tile_keys)
    (batch, heads, queries, head_dim), (kv_heads, value_dim) = q.shape, (v.shape[1], v.shape[3])
    keys = min(k.shape[2], queries) if causal else k.shape[2]
    folded, group = batch * kv_heads, heads // kv_heads
    wide = q.new_empty(0, dtype=WIDE[q.dtype])
    out = q.new_empty(batch, heads, queries, value_dim)
    lse = wide.new_empty(batch, heads, queries) if return_lse else None
    # A group's heads stand under each other, as more queries of their key-value head. The result is the same memory.
    q, grouped_out = q.unflatten(1, (kv_heads, group)), out.view(batch, kv_heads, group, queries, value_dim)

    # The fast memory: all that is ever held beside the result. Tiles at the edges take the first part of each.
    r, c = group * min(tile_queries, queries), min(tile_keys, keys)
    q_store, a_store = (wide.new_empty(folded * r * width) for width in (head_dim, value_dim))
    k_store, v_store = (wide.new_empty(folded * c * width) for width in (head_dim, value_dim))
    s_store = wide.new_empty(folded * r * c)
    m_store, larger_store, z_store, row_store = (wide.new_empty(folded * r) for _ in range(4))
    future_store = torch.empty(min(tile_queries, queries) * c if causal else 0, dtype=torch.bool, device=q.device)

    for i in range(0, queries, tile_queries):
        i_end = min(i + tile_queries, queries)
        n, r = i_end - i, group * (i_end - i)
        q_tile = carve(q_store, batch, kv_heads, group, n, head_dim).copy_(q[..., i:i_end, :])
        q_tile = q_tile.view(folded, r, head_dim).mul_(head_dim**-0.5 if scale is None else scale)
        m, larger, z, row = (carve(store, folded, r, 1) for store in (m_store, larger_store, z_store, row_store))
        a = carve(a_store, folded, r, value_dim)
        m.fill_(torch.finfo(m.dtype).min), z.zero_(), a.zero_()
        visible = min(keys, i_end) if causal else keys
        for j in range(0, visible, tile_keys):
            j_end = min(j + tile_keys, visible)
            c = j_end - j
            k_tile = carve(k_store, batch, kv_heads, c, head_dim).copy_(k[:, :, j:j_end]).view(folded, c, head_dim)
            v_tile = carve(v_store, batch, kv_heads, c, value_dim).copy_(v[:, :, j:j_end]).view(folded, c, value_dim)
            s = torch.bmm(q_tile, k_tile.mT, out=carve(s_store, folded, r, c))
            if causal and j_end > i + 1:  # the diagonal runs through this tile
                future = carve(future_store, n, c).fill_(True).triu_(1 + i - j)
                s.view(folded, group, n, c).masked_fill_(future, -math.inf)
            torch.amax(s, -1, keepdim=True, out=row)
            torch.maximum(m, row, out=larger)
            weights = s.sub_(larger).exp_()
            correction = m.sub_(larger).exp_()
            torch.sum(weights, -1, keepdim=True, out=row)
            z.mul_(correction).add_(row)
            a.mul_(correction).baddbmm_(weights, v_tile)
            m, larger = larger, m
        if lse is not None:
            torch.log(z, out=row)
            lse[..., i:i_end] = row.add_(m).view(batch, heads, n)
        a.div_(z.clamp_(min=torch.finfo(z.dtype).tiny))  # 0 where no key was seen, else the largest weight alone is 1
        grouped_out[..., i:i_end, :] = a.view(batch, kv_heads, group, n, value_dim)
    return out if lse is None else (out, lse)


def live_bytes(
    q: tuple[int, int, int, int],
    k: tuple[int, int, int, int],
    v: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    causal: bool = False,
    tile_queries: int = TILE_QUERIES,
    tile_keys: int = TILE_KEYS,
    return_lse: bool = False,
) -> int:
    """Bytes that `tiled_attention` holds at its fullest moment beyond q, k and v, whose shapes are given.

    With H heads, G key-value heads, tiles of t queries and u keys, and w bytes for a sum (4; 8 in FP64), it is the
    result, which alone grows with the queries, and the fast memory, which stops growing at one tile:

        out, lse      batch · H · queries · (value_dim · itemsize + w)
        fast memory   batch · w · (H·t·(head_dim + value_dim + u + 4) + G·u·(head_dim + value_dim)) + t·u if causal

    Raises TypeError or ValueError for shapes, dtype and options that `tiled_attention` refuses.

    >>> shape = (1, 8, 2048, 64)
    >>> live_bytes(shape, shape, shape), 8 * 2048 * 2048 * 4  # the second: a single matrix of scores
    (6832128, 134217728)
    """
    refuse(*(torch.empty(shape, dtype=dtype, device="meta") for shape in (q, k, v)), causal, tile_queries, tile_keys)
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q, v
    keys = min(keys, queries) if causal else keys
    t, u, w = min(tile_queries, queries), min(tile_keys, keys), WIDE[dtype].itemsize
    result = batch * heads * queries * (value_dim * dtype.itemsize + (w if return_lse else 0))
    of_queries = heads * t * (head_dim + value_dim + u + 4)
    of_keys = kv_heads * u * (head_dim + value_dim)
    mask = t * u if causal else 0
    return result + batch * w * (of_queries + of_keys) + mask


def carve(store: Tensor, *shape: int) -> Tensor:
    """The first part of a flat store in this shape, a view: contiguous, as a slice of a larger tile would not be.

    store: (n,), of as many elements as the shape has, or more.
    """
    return store[: math.prod(shape)].view(shape)


def pairs(scores_in_pieces: Iterable[Tensor], values_in_pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and values piece by piece. Raises the TypeError or ValueError that `online_softmax` raises for these."""
    for s, v in zip_longest(scores_in_pieces, values_in_pieces):
        if s is None or v is None:
            raise ValueError("expected as many pieces of scores as of values; one of them has more")
        if s.dtype != v.dtype or s.dtype not in WIDE:
            raise TypeError(f"expected scores and values of one dtype, {DTYPES}; found {s.dtype} and {v.dtype}")
        if not s.shape[-1]:
            raise ValueError("expected at least one key in every piece of scores, found one of none; leave it out")
        yield s, v


def refuse(q: Tensor, k: Tensor, v: Tensor, causal: bool, tile_queries: int, tile_keys: int) -> None:
    """Raise the RuntimeError, TypeError or ValueError that `tiled_attention` raises for these."""
    if not isinstance(causal, bool):
        raise TypeError(f"expected causal as True or False, found {causal!r}")
    positive("tile_queries", tile_queries)
    positive("tile_keys", tile_keys)
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in {"q": q, "k": k, "v": v}.items())
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"expected q, k and v of shape (batch, heads, tokens, head_dim); found {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in WIDE:
        raise TypeError(
            f"expected q, k and v of one dtype, {DTYPES}; "
            f"found {q.dtype}, {k.dtype}, {v.dtype}; cast them, such as with k.to(q.dtype)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"expected q, k and v on one device; found {q.device}, {k.device}, {v.device}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"expected q, k and v of the same batch (their first dimension); found {shapes}")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(f"expected q and k of the same head_dim, their last dimension, at least 1; found {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"expected a value for every key, k and v alike but in head_dim; found {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{k.shape[1]} key-value heads cannot serve {q.shape[1]} heads; give k and v a number of heads that "
            f"divides it ({divisors(q.shape[1])})"
        )
    wanting = [name for name, x in {"q": q, "k": k, "v": v}.items() if x.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise RuntimeError(
            f"expected tensors that need no gradient, since this is attention's forward only; found "
            f"{', '.join(wanting)} with requires_grad; call it under torch.no_grad(), or train with "
            "F.scaled_dot_product_attention"
        )
