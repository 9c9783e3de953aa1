"""Attention without T×T: the plain one's values, in bytes that grow with the tokens and not with their square."""

import importlib.util
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.memory_hierarchy import live_bytes, online_softmax, tiled_attention
from memlab.memory_hierarchy.triton_attention import triton_attention
from memlab.memory_timeline import Meter
from tests.harness import refusals, refused

aten = torch.ops.aten


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None):
    """The definition, in FP64, with the scores whole: out and the log-sum-exp of each row."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def qkv(batch=2, heads=3, queries=37, keys=37, head_dim=8, *, kv_heads=None, value_dim=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, heads, queries, head_dim),
        (batch, kv_heads or heads, keys, head_dim),
        (batch, kv_heads or heads, keys, value_dim or head_dim),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


CALLS = {
    "batch": st.integers(1, 3),
    "heads": st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    **dict.fromkeys(("queries", "keys"), st.integers(1, 40)),
    "causal": st.booleans(),
    **dict.fromkeys(("t", "u"), st.integers(1, 45)),  # sizes of tiles
}


@settings(deadline=None, max_examples=30, derandomize=True)
@given(**CALLS)
def test_it_equals_plain_attention_in_fp64_whatever_the_tiles(batch, heads, queries, keys, causal, t, u):
    q, k, v = qkv(batch, heads[0], queries, keys, 5, kv_heads=heads[1], value_dim=7)
    out, lse = tiled_attention(q, k, v, causal=causal, tile_queries=t, tile_keys=u, return_lse=True)
    expected, expected_lse = plain_attention(q, k, v, causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (300, 150), (150, 300)])
def test_it_equals_torchs_own_with_its_alignment_of_the_causal_mask(causal, queries, keys):
    q, k, v = qkv(queries=queries, keys=keys, heads=4, kv_heads=2)
    for scale in (None, 0.3):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=scale)
        torch.testing.assert_close(tiled_attention(q, k, v, causal=causal, scale=scale), theirs, rtol=0, atol=1e-12)
    found = tiled_attention(q, k, v, causal=causal, scale=-0.3)
    torch.testing.assert_close(found, plain_attention(q, k, v, causal, -0.3)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shorter_dtypes_err_as_little_as_torchs_own(dtype, causal):
    q, k, v = qkv(queries=200, keys=200, dtype=dtype)
    expected, expected_lse = plain_attention(q, k, v, causal)
    out, lse = tiled_attention(q, k, v, causal=causal, tile_queries=32, tile_keys=48, return_lse=True)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert out.dtype == dtype and lse.dtype == torch.float32
    # The last rounding of a value near 1 to its own dtype is eps / 2 for both; the sums before it are in FP32.
    assert (out - expected).abs().max() <= (theirs - expected).abs().max() + torch.finfo(dtype).eps / 2
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def test_scores_that_overflow_exp_do_no_harm_and_tiny_ones_are_not_lost():
    q, k, v = qkv(1, 1, 4, 64, 8)
    for factor in (1e6, 1e-300):
        q_far = q * factor
        expected = plain_attention(q_far, k, v)[0]
        torch.testing.assert_close(tiled_attention(q_far, k, v, tile_keys=7), expected, rtol=0, atol=1e-9)


def test_a_query_that_sees_no_key_gets_zeros_as_torchs_own_gives():
    q, k, v = qkv(keys=0)
    out, lse = tiled_attention(q, k, v, return_lse=True)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v)) and not out.any()
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    assert tiled_attention(*qkv(queries=0)).shape == (2, 3, 0, 8)
    assert tiled_attention(*(x[:0] for x in qkv()), causal=True).shape == (0, 3, 37, 8)
    q, k, v = qkv(dtype=torch.float32)
    q, k = -q.abs(), torch.full_like(k, math.inf)
    assert torch.equal(tiled_attention(q, k, v, tile_keys=5), F.scaled_dot_product_attention(q, k, v))


def test_keys_that_score_minus_infinity_are_masked_also_when_a_whole_tile_is():
    q, k, v = qkv(1, 1, 3, 12, 4)
    q = q.abs()
    for hidden in (slice(0, 4), slice(8, 12)):
        masked = k.clone()
        masked[:, :, hidden] = -math.inf
        kept = [i for i in range(12) if not hidden.start <= i < hidden.stop]
        expected = plain_attention(q, k[:, :, kept], v[:, :, kept])[0]
        torch.testing.assert_close(tiled_attention(q, masked, v, tile_keys=4), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_inputs_may_lie_in_memory_in_any_order_and_stay_as_they_were(causal):
    q, k, v = (torch.randn(2, 37, 3, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3))
    before = [x.clone() for x in (q, k, v)]
    out = tiled_attention(q, k, v, causal=causal, tile_queries=10, tile_keys=10)
    torch.testing.assert_close(out, plain_attention(q, k, v, causal)[0], rtol=0, atol=1e-12)
    assert out.is_contiguous() and all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_equals_plain_attention_too():
    q, k, v = (x.cuda() for x in qkv(queries=300, keys=300))
    torch.testing.assert_close(tiled_attention(q, k, v, causal=True), plain_attention(q, k, v, True)[0])


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_online_softmax_in_any_pieces_is_softmax(sizes, rows):
    scores = 30 * torch.randn(2, rows, sum(sizes), dtype=torch.float64)
    values = torch.randn(2, sum(sizes), 4, dtype=torch.float64)
    out, lse = online_softmax(scores.split(sizes, -1), values.split(sizes, -2))
    torch.testing.assert_close(out, scores.softmax(-1) @ values, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1, keepdim=True), rtol=0, atol=1e-12)


def test_online_softmax_holds_one_piece_however_many_there_are():
    def run(pieces: int):
        return online_softmax((torch.randn(8, 64) for _ in range(pieces)), (torch.randn(64, 4) for _ in range(pieces)))

    assert metered(lambda: run(3)) == metered(lambda: run(30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_softmax_in_pieces_counts_every_key_to_the_last(dtype):
    keys = 4096  # a sum of ones in 16 bits stops at 256 in BF16, at 2048 in FP16
    scores, values = torch.zeros(1, keys, dtype=dtype), (torch.arange(keys) >= 512).to(dtype)[:, None]
    out, lse = online_softmax(scores.split(4, 1), values.split(4, 0))
    torch.testing.assert_close(out, torch.tensor([[7 / 8]], dtype=dtype))
    torch.testing.assert_close(lse, torch.tensor([[math.log(keys)]]))


def metered(run, *inputs: Tensor) -> int:
    """Bytes at the fullest moment beyond the inputs."""
    with Meter(inputs=inputs) as meter:
        kept = run()
    del kept
    return meter.timeline.peak_bytes - meter.timeline.bytes_at(0)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(**CALLS, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), return_lse=st.booleans())
def test_the_closed_form_is_the_metered_peak_to_the_byte(batch, heads, queries, keys, causal, t, u, dtype, return_lse):
    q, k, v = qkv(batch, heads[0], queries, keys, 5, kv_heads=heads[1], value_dim=3, dtype=dtype)
    options = {"causal": causal, "tile_queries": t, "tile_keys": u, "return_lse": return_lse}
    found = metered(lambda: tiled_attention(q, k, v, **options), q, k, v)
    assert found == live_bytes(q.shape, k.shape, v.shape, dtype, **options)


class Products(TorchDispatchMode):
    """Multiply-adds of the products of scores, q kᵀ, that are made."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.bmm.out:
            self.made += args[0].numel() * args[1].shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (64, 200), (200, 64), (61, 67)])
def test_tiles_behind_the_diagonal_are_not_made(queries, keys):
    q, k, v = qkv(1, 1, queries, keys, 8)
    with Products() as products:
        tiled_attention(q, k, v, causal=True, tile_queries=16, tile_keys=8)
    needed = sum(min(16, queries - i) * min(keys, i + 16, queries) for i in range(0, queries, 16))
    assert products.made == 8 * needed


def test_under_autograd_it_says_that_it_is_forward_only():
    q, k, v = qkv()
    k.requires_grad_(), v.requires_grad_()
    words = "forward only; found k, v with requires_grad; call it under torch.no_grad"
    refused(lambda: tiled_attention(q, k, v), RuntimeError, words)
    with torch.no_grad():
        assert not tiled_attention(q, k, v).requires_grad


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs triton, and a GPU or TRITON_INTERPRET=1",
)


@needs_triton
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (37, 61), (61, 37), (1, 1), (20, 0)])
@pytest.mark.parametrize("width", [16, 20, 1])
def test_the_kernel_equals_plain_attention(width, queries, keys, causal):
    q, k, v = (x.to(DEVICE) for x in qkv(2, 3, queries, keys, width, dtype=torch.float32))
    tiles = {"tile_queries": 16, "tile_keys": 32}
    out, lse = triton_attention(q, k, v, causal=causal, **tiles)
    expected, expected_lse = tiled_attention(*(x.double() for x in (q, k, v)), causal=causal, return_lse=True)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=3e-6)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16])
def test_the_kernel_takes_16_bit_numbers_any_layout_and_a_scale(dtype):
    q, k, v = (torch.randn(2, 50, 3, 32).to(dtype).to(DEVICE).transpose(1, 2) for _ in range(3))
    out, lse = triton_attention(q, k, v, causal=True, scale=0.3, tile_queries=32, tile_keys=16)
    expected, expected_lse = plain_attention(q, k, v, True, 0.3)
    assert out.dtype == dtype and out.shape == q.shape and lse.dtype == torch.float32
    # Weights are rounded to 16 bits before the matrix units take them, and the result once more.
    assert (out - expected).abs().max() <= 2 * torch.finfo(dtype).eps * v.abs().max()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)


@needs_triton
def test_the_kernel_takes_empty_tensors_and_interpreted_no_numbers_that_triton_would_multiply_wrongly():
    q, k, v = (x[:0].float().to(DEVICE) for x in qkv())
    out, lse = triton_attention(q, k, v)
    assert out.shape == (0, 3, 37, 8) and lse.shape == (0, 3, 37)
    if DEVICE == "cpu":
        halves = [x.bfloat16() for x in qkv()]
        refused(lambda: triton_attention(*halves), RuntimeError, "float32 or float16 where Triton is interpreted")


@pytest.mark.parametrize(("triton", "bf16"), [(False, True), (True, False)])
def test_on_a_gpu_that_cannot_run_the_kernel_the_chapter_says_so_and_goes_on(monkeypatch, capsys, triton, bf16):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton or None)
    chapter = Path(__file__).parents[1] / "chapters" / "03_memory_hierarchy.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]]
    (cell,) = [cell for cell in cells if "found, _ = triton_attention(q, k, v)" in cell]
    exec(cell, {"device": "cuda", "torch": torch})
    assert "The kernel was not run" in capsys.readouterr().out


def kernel(change=lambda q, k, v: (q, k, v), **options):
    return lambda: triton_attention(*change(*(x.float() for x in qkv())), **options)


def tiled(change=lambda q, k, v: (q, k, v), **options):
    return lambda: tiled_attention(*change(*qkv()), **options)


def in_pieces(scores, values):
    return lambda: online_softmax(scores, values)


def live(q=(2, 3, 37, 8), k=(2, 3, 37, 8), v=(2, 3, 37, 8), dtype=torch.float64, **options):
    return lambda: live_bytes(q, k, v, dtype, **options)


TWO, THREE, NO_KEY = torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 0)
SHAPE, WIDTH = "of shape (batch, heads, tokens, head_dim); found q (3, 37, 8)", "of the same head_dim…k (2, 3, 37, 4)"
REFUSALS = {
    "three dimensions": (tiled(lambda q, k, v: (q[0], k, v)), ValueError, SHAPE),
    "whole numbers": (tiled(lambda *qkv: [x.long() for x in qkv]), TypeError, "bfloat16, float16; found torch.int64"),
    "two dtypes": (tiled(lambda q, k, v: (q, k.float(), v)), TypeError, "one dtype…float64, torch.float32"),
    "two devices": (tiled(lambda q, k, v: (q, k.to("meta"), v)), ValueError, "on one device; found cpu, meta"),
    "two batches": (tiled(lambda q, k, v: (q, k[:1], v[:1])), ValueError, "the same batch …k (1, 3, 37, 8)"),
    "two widths": (tiled(lambda q, k, v: (q, k[..., :4], v)), ValueError, WIDTH),
    "no width": (tiled(lambda q, k, v: (q[..., :0], k[..., :0], v)), ValueError, "last dimension, at least 1"),
    "a value too few": (tiled(lambda q, k, v: (q, k, v[:, :, 1:])), ValueError, "a value for every key…36, 8)"),
    "two of three heads": (tiled(lambda q, k, v: (q, k[:, :2], v[:, :2])), ValueError, "cannot serve 3 heads…(1, 3)"),
    "hardly causal": (tiled(causal="no"), TypeError, "expected causal as True or False, found 'no'"),
    "a tile of no queries": (tiled(tile_queries=0), ValueError, "expected tile_queries "),
    "bytes of a tile of -8 keys": (live(tile_keys=-8), ValueError, "expected tile_keys "),
    "no pieces": (in_pieces([], []), ValueError, "at least one piece of scores, found none"),
    "scores alone": (in_pieces([TWO], []), ValueError, "as many pieces of scores as of values"),
    "an empty piece": (in_pieces([TWO, NO_KEY], [THREE, THREE[:0]]), ValueError, "at least one key in every piece"),
    "pieces of two dtypes": (in_pieces([TWO], [THREE.double()]), TypeError, "torch.float32 and torch.float64"),
    "FP64 in the kernel": (kernel(lambda *qkv: [x.double() for x in qkv]), TypeError, "float64; tiled_attention()"),
    "groups in the kernel": (kernel(lambda q, k, v: (q, k[:, :1], v[:, :1])), ValueError, "as many heads in k as in q"),
    "narrow values in the kernel": (kernel(lambda q, k, v: (q, k, v[..., :4])), ValueError, "v as wide; …37, 4)"),
    "48 keys in the kernel": (kernel(tile_keys=48), ValueError, "tile_keys as a power of two from 16 on, found 48"),
    "gradients in the kernel": (kernel(lambda q, k, v: (q.requires_grad_(), k, v)), RuntimeError, "only; found q"),
}
if importlib.util.find_spec("triton") is None:
    REFUSALS["no triton"] = (kernel(), RuntimeError, "expected triton, found none…tiled_attention() does without")


@refusals(REFUSALS)
def test_what_does_not_fit_is_refused_with_what_was_found(call, error, words):
    refused(call, error, words)
