"""Attention that makes its weights again in backward: plain attention's gradients, without its square of bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.gradient_checkpointing import checkpointed_attention
from memlab.memory_hierarchy import tiled_attention
from memlab.memory_hierarchy.attention import TILE_KEYS, TILE_QUERIES, WIDE
from memlab.memory_timeline import Meter, imagine

aten = torch.ops.aten
bits = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    """The definition, with the weights whole; a query without a key gets zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


def qkv(batch=2, heads=3, queries=37, keys=37, head_dim=8, *, kv_heads=None, value_dim=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, heads, queries, head_dim),
        (batch, kv_heads or heads, keys, head_dim),
        (batch, kv_heads or heads, keys, value_dim or head_dim),
    ]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


def gradient_of_out(q: Tensor, v: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*q.shape[:3], v.shape[3], generator=generator, dtype=torch.float64).to(q)


def out_and_gradients(attention, q: Tensor, k: Tensor, v: Tensor, **options) -> list[Tensor]:
    """out, dq, dk, dv for a gradient of out that is random and always the same."""
    out = attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient_of_out(q, v).to(out.dtype))]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, by norm."""
    distance = torch.linalg.vector_norm(found.double() - expected.double())
    return (distance / torch.linalg.vector_norm(expected.double()).clamp(min=1e-300)).item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    view = bits[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def assert_equal_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert same_bits(a, b), name


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, 0.3, -0.3, 0.0]),
    st.integers(1, 45),
    st.integers(1, 45),
)
def test_out_and_gradients_are_plain_attentions_in_fp64_whatever_the_tiles(
    batch, heads, queries, keys, causal, scale, t, u
):
    x = qkv(batch, heads[0], queries, keys, 5, kv_heads=heads[1], value_dim=7)
    tiles = {"tile_queries": t, "tile_keys": u}
    found = out_and_gradients(checkpointed_attention, *x, causal=causal, scale=scale, **tiles)
    expected = out_and_gradients(plain_attention, *x, causal=causal, scale=scale)
    for a, b in zip(found, expected, strict=True):  # by element: with a single key dq is 0, and both find rounding
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1, b.abs().max().item()))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("causal", [False, True])
def test_narrow_dtypes_are_as_near_to_fp64_as_their_rounding(dtype, bound, causal):
    """From the same rounded inputs. BF16 rounds by up to 2**-8 of a value, FP16 by 2**-11; sums are held in FP32."""
    x = qkv(1, 2, 90, 90, 16, dtype=dtype)
    tiles = {"tile_queries": 32, "tile_keys": 48}
    found = out_and_gradients(checkpointed_attention, *x, causal=causal, **tiles)
    assert all(a.dtype == dtype for a in found)
    exact = [a.detach().double().requires_grad_() for a in x]
    out = plain_attention(*exact, causal=causal)
    dout = gradient_of_out(*x[::2]).double()
    expected = [out.detach(), *torch.autograd.grad(out, exact, dout)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert error(a, b) <= bound, (name, error(a, b))


def test_the_result_is_that_of_tiled_attention_to_the_last_bit():
    q, k, v = qkv(dtype=torch.float32)
    out = checkpointed_attention(q, k, v, causal=True, scale=0.2, tile_queries=5, tile_keys=9)
    with torch.no_grad():
        expected = tiled_attention(q, k, v, causal=True, scale=0.2, tile_queries=5, tile_keys=9)
    assert same_bits(out.detach(), expected) and out.requires_grad and not expected.requires_grad


@pytest.mark.parametrize("causal", [False, True])
def test_inputs_may_be_views_as_a_gpt_makes_them(causal):
    generator = torch.Generator().manual_seed(2)
    packed = torch.randn(2, 37, 3, 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    views = lambda: packed.permute(2, 0, 3, 1, 4)  # noqa: E731
    before = packed.detach().clone()
    dout = torch.randn(2, 37, 4, 8, generator=generator, dtype=torch.float64).transpose(1, 2)  # not contiguous either
    tiles = {"tile_queries": 10, "tile_keys": 10}
    (found,) = torch.autograd.grad(checkpointed_attention(*views(), causal=causal, **tiles), packed, dout)
    (expected,) = torch.autograd.grad(plain_attention(*views(), causal=causal), packed, dout)
    assert error(found, expected) <= 1e-12 and torch.equal(packed, before)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"keys": 0}, {"queries": 9, "keys": 20}], ids=str)
def test_without_examples_queries_or_keys_and_with_keys_behind_the_last_query_it_is_plain_attention(sizes, causal):
    x = qkv(**sizes)
    found = out_and_gradients(checkpointed_attention, *x, causal=causal, tile_keys=6)
    for a, b in zip(found, out_and_gradients(plain_attention, *x, causal=causal), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_query_that_sees_no_key_has_no_gradient_and_gives_none():
    q, k, v = (x.detach() for x in qkv())
    q = q.abs().index_fill_(2, torch.arange(0, 37, 2), 0.5)
    hidden = [q.requires_grad_(), torch.full_like(k, -math.inf).requires_grad_(), v.requires_grad_()]
    for gradient in out_and_gradients(checkpointed_attention, *hidden, tile_keys=5):
        assert not gradient.any()


def test_a_query_of_infinities_that_hides_all_its_keys_leaves_the_other_queries_gradients_alone():
    q, k, v = (x.detach() for x in qkv(1, 1, 6, 7, 3, dtype=torch.float32))
    k = -k.abs()
    q[:, :, 2] = math.inf
    found = out_and_gradients(checkpointed_attention, *(x.requires_grad_() for x in (q, k, v)))
    others = [0, 1, 3, 4, 5]
    assert not found[0][:, :, 2].any() and not found[1][:, :, 2].any()
    out = plain_attention(q[:, :, others], k, v)
    dout = gradient_of_out(q, v)[:, :, others]
    expected = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    torch.testing.assert_close(found[0][:, :, others], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_nan_is_not_hidden():
    x = qkv(1, 2, 9, 9)
    with torch.no_grad():
        x[0][0, 1, 4, 0] = math.nan
    out, dq, dk, dv = out_and_gradients(checkpointed_attention, *x, tile_queries=4, tile_keys=4)
    for rows in (out, dq):
        wrong = rows.isnan().any(-1)
        assert wrong[0, 1, 4] and wrong.sum() == 1
    for columns in (dk, dv):
        assert columns[0, 1].isnan().any(-1).all() and not columns[0, 0].isnan().any()


class Products(TorchDispatchMode):
    """Products of tiles that are made, and the multiply-adds of those of scores."""

    def __init__(self):
        super().__init__()
        self.count, self.of_scores = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.bmm.out:
            self.of_scores += args[0].numel() * args[1].shape[-1]
        self.count += func in (aten.bmm.out, aten.baddbmm_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("wanted", "products"), [("q", 3), ("k", 3), ("v", 2), ("qv", 4), ("qkv", 5)])
def test_frozen_inputs_get_none_and_the_products_only_they_need_are_not_made(wanted, products):
    x = dict(zip("qkv", (a.detach() for a in qkv()), strict=True))
    full = dict(zip("qkv", out_and_gradients(checkpointed_attention, *qkv())[1:], strict=True))
    for name in wanted:
        x[name].requires_grad_()
    out = checkpointed_attention(**x)
    with Products() as made:
        out.backward(gradient_of_out(x["q"], x["v"]))
    assert made.count == products
    for name in "qkv":
        assert same_bits(x[name].grad, full[name]) if name in wanted else x[name].grad is None


def test_where_no_gradient_is_wanted_nothing_is_recorded():
    q, k, v = qkv()
    with torch.no_grad():
        assert not checkpointed_attention(q, k, v).requires_grad
    frozen = [x.detach() for x in (q, k, v)]
    with Meter(inputs=frozen) as meter:
        out = checkpointed_attention(*frozen)
    assert not out.requires_grad
    assert meter.timeline.totals[-1] - meter.timeline.totals[0] == out.nbytes


@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (64, 200), (200, 64), (61, 67)])
def test_tiles_behind_the_diagonal_are_not_made_again(queries, keys):
    x = qkv(1, 1, queries, keys, 8)
    out = checkpointed_attention(*x, causal=True, tile_queries=16, tile_keys=8)
    with Products() as made:
        out.backward(torch.ones_like(out))
    needed = sum(min(16, queries - i) * min(keys, i + 16, queries) for i in range(0, queries, 16))
    assert made.of_scores == 2 * 8 * needed  # S and dP


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_saves_q_k_v_out_and_one_number_a_query_and_the_meter_finds_nothing_else(dtype):
    x = qkv(2, 6, 20, 30, 8, kv_heads=2, value_dim=5, dtype=dtype)
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x), Meter(inputs=x) as meter:
        out = checkpointed_attention(*x, causal=True, tile_queries=16, tile_keys=16)
    assert sum(x.numel() for x in saved) == 2 * (6 * 20 * (8 + 5 + 1) + 2 * 30 * (8 + 5))
    assert [x.dtype for x in saved] == [dtype] * 4 + [WIDE[dtype]]
    lse = 2 * 6 * 20 * WIDE[dtype].itemsize
    assert meter.timeline.totals[-1] - meter.timeline.totals[0] == out.nbytes + lse


def backward_live_bytes(q, k, v, dtype, *, causal=False, tile_queries=TILE_QUERIES, tile_keys=TILE_KEYS) -> int:
    """The closed form of the docstring."""
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q, v
    w = WIDE[dtype].itemsize
    results = (math.prod(q) + math.prod(k) + math.prod(v)) * dtype.itemsize
    sums = (math.prod(k) + math.prod(v)) * w if dtype.itemsize < w else 0
    t, u = min(tile_queries, queries), min(tile_keys, keys, queries if causal else keys)
    of_queries = heads * t * (2 * head_dim + 2 * value_dim + 2 * u + 2)
    of_keys = kv_heads * u * (head_dim + value_dim)
    return results + sums + batch * w * (of_queries + of_keys)


def backward_metered(q: Tensor, k: Tensor, v: Tensor, **options) -> int:
    """Bytes at backward's fullest moment beyond the inputs, out, lse and the gradient of out."""
    dout = gradient_of_out(q, v)
    with Meter(inputs=[q, k, v, dout]) as meter:
        out = checkpointed_attention(q, k, v, **options)
        kept = torch.autograd.grad(out, (q, k, v), dout)
    del kept
    saved = out.nbytes + math.prod(q.shape[:3]) * WIDE[q.dtype].itemsize
    return meter.timeline.peak_bytes - meter.timeline.bytes_at(0) - saved


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    st.integers(1, 30),
    st.integers(1, 30),
    st.booleans(),
    st.integers(1, 35),
    st.integers(1, 35),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_the_closed_form_is_backwards_metered_peak_to_the_byte(batch, heads, queries, keys, causal, t, u, dtype):
    q, k, v = qkv(batch, heads[0], queries, keys, 5, kv_heads=heads[1], value_dim=3, dtype=dtype)
    options = {"causal": causal, "tile_queries": t, "tile_keys": u}
    found = backward_metered(q, k, v, **options)
    assert found == backward_live_bytes(q.shape, k.shape, v.shape, dtype, **options)


def test_out_lies_in_memory_as_q_does():
    x = qkv(2, 3, 20, 20, 8)
    assert checkpointed_attention(*x).is_contiguous()
    x = torch.randn(2, 20, 3, 3, 8).permute(2, 0, 3, 1, 4)
    out = checkpointed_attention(*x)
    assert out.shape == (2, 3, 20, 8) and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_inputs_are_cast_as_for_torchs_own(dtype):
    x = qkv(1, 2, 20, 20, 8, dtype=dtype)
    dout = gradient_of_out(x[0], x[2])
    with torch.autocast("cpu", torch.bfloat16):
        out = checkpointed_attention(*x, causal=True, tile_keys=8)
        theirs = F.scaled_dot_product_attention(*x, is_causal=True)
        assert out.dtype == theirs.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
        inside = torch.autograd.grad(out, x, dout.to(out.dtype), retain_graph=True)
    outside = torch.autograd.grad(out, x, dout.to(out.dtype))
    assert_equal_bits([out.detach(), *inside], [out.detach(), *outside])
    assert all(gradient.dtype == dtype for gradient in inside)
    cast = [a.detach().to(out.dtype).requires_grad_() for a in x]
    by_hand = checkpointed_attention(*cast, causal=True, tile_keys=8)
    gradients = torch.autograd.grad(by_hand, cast, dout.to(out.dtype))
    assert_equal_bits([out.detach(), *inside], [by_hand.detach(), *(a.to(dtype) for a in gradients)])


def test_on_imagined_hardware_forward_and_backward_hold_the_same_bytes():
    with imagine("H100-80GB") as gpu:
        x = gpu.imagined(qkv(1, 4, 1024, 1024, 64, dtype=torch.bfloat16))
        assert backward_metered(*x, causal=True) == backward_live_bytes(
            *(a.shape for a in x), torch.bfloat16, causal=True
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_it_equals_plain_attention_too_and_repeats_bit_for_bit(causal):
    x = [a.detach().cuda().requires_grad_() for a in qkv(2, 6, 300, 310, 32, kv_heads=2)]
    found = out_and_gradients(checkpointed_attention, *x, causal=causal)
    for a, b in zip(found, out_and_gradients(plain_attention, *x, causal=causal), strict=True):
        assert error(a, b) <= 1e-12
    assert_equal_bits(out_and_gradients(checkpointed_attention, *x, causal=causal), found)


def test_a_second_differentiation_says_what_to_use():
    x = qkv(1, 1, 5, 5, 3)
    dq = torch.autograd.grad(checkpointed_attention(*x).sum(), x[0], create_graph=True)[0]
    assert dq.requires_grad
    with pytest.raises(RuntimeError, match=r"differentiated once, found a second time.*SDPBackend.MATH"):
        dq.sum().backward()
