"""Attention that makes its weights again in backward: plain attention's gradients, without its square of bytes."""

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.book.workloads import GPT, Attention, Block, GPTConfig
from memlab.gradient_checkpointing.attention import backward_live_bytes, checkpointed_attention
from memlab.gradient_checkpointing.hooks import checkpoint
from memlab.memory_hierarchy.attention import WIDE, tiled_attention
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


# ---- values


@settings(deadline=None, max_examples=100)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (259, 301), (301, 259)])
def test_by_norm_the_error_in_fp64_is_at_most_1e_12(causal, heads, kv_heads, queries, keys):
    x = qkv(2, heads, queries, keys, 32, kv_heads=kv_heads, value_dim=24)
    found = out_and_gradients(checkpointed_attention, *x, causal=causal)
    expected = out_and_gradients(plain_attention, *x, causal=causal)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert error(a, b) <= 1e-12, name
    theirs = lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=True)  # noqa: E731
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, out_and_gradients(theirs, *x), strict=True):
        assert error(a, b) <= 1e-12, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
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


def test_autograds_own_check_by_differences_agrees():
    x = qkv(1, 4, 7, 9, 3, kv_heads=2, value_dim=2)
    for causal in (False, True):
        run = lambda *x: checkpointed_attention(*x, causal=causal, tile_queries=3, tile_keys=4)  # noqa: B023, E731
        torch.autograd.gradcheck(run, x)


def test_the_result_is_that_of_tiled_attention_to_the_last_bit():
    q, k, v = qkv(dtype=torch.float32)
    out = checkpointed_attention(q, k, v, causal=True, scale=0.2, tile_queries=5, tile_keys=9)
    with torch.no_grad():
        expected = tiled_attention(q, k, v, causal=True, scale=0.2, tile_queries=5, tile_keys=9)
    assert same_bits(out.detach(), expected) and out.requires_grad and not expected.requires_grad


def test_scores_far_apart_have_gradients_without_overflow():
    """In FP32 exp overflows from 89 on: scores of thousands, and hidden ones far above those that are seen."""
    for q_scale in (1e-3, 1e2, 1e4):
        x = [a.detach() for a in qkv(1, 2, 20, 20, 4, dtype=torch.float32)]
        x[0] *= q_scale
        x = [a.requires_grad_() for a in x]
        found = out_and_gradients(checkpointed_attention, *x, causal=True, tile_queries=8, tile_keys=8)
        expected = out_and_gradients(plain_attention, *(a.detach().double().requires_grad_() for a in x), causal=True)
        for a, b in zip(found, expected, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * max(1.0, q_scale / 1e2))


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


def test_a_gradient_of_out_may_be_one_number_expanded():
    x = qkv(1, 2, 9, 9, 4)
    found = torch.autograd.grad(checkpointed_attention(*x, tile_queries=4).sum(), x)
    expected = torch.autograd.grad(plain_attention(*x).sum(), x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_one_tensor_in_several_places_gets_the_sum_of_its_gradients():
    x = qkv(1, 2, 9, 9, 4)[0]
    (found,) = torch.autograd.grad(checkpointed_attention(x, x, x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain_attention(x, x, x).square().sum(), x)
    assert error(found, expected) <= 1e-12


# ---- queries without keys, infinities


def test_a_query_that_sees_no_key_has_no_gradient_and_gives_none():
    q, k, v = qkv(keys=0)
    _, dq, dk, dv = out_and_gradients(checkpointed_attention, q, k, v)
    assert not dq.any() and dk.shape == k.shape and dv.shape == v.shape
    q, k, v = (x.detach() for x in qkv())
    q = q.abs().index_fill_(2, torch.arange(0, 37, 2), 0.5)
    hidden = [q.requires_grad_(), torch.full_like(k, -math.inf).requires_grad_(), v.requires_grad_()]
    for gradient in out_and_gradients(checkpointed_attention, *hidden, tile_keys=5):
        assert not gradient.any()


def test_keys_that_score_minus_infinity_get_no_gradient_and_the_others_are_as_without_them():
    q, k, v = (x.detach() for x in qkv(1, 2, 5, 12, 4))
    q = q.abs().requires_grad_()
    for hidden in (slice(0, 4), slice(4, 8), slice(8, 12), slice(3, 9)):
        kept = [i for i in range(12) if not hidden.start <= i < hidden.stop]
        masked = k.clone()
        masked[:, :, hidden] = -math.inf
        masked, values = masked.requires_grad_(), v.clone().requires_grad_()
        found = out_and_gradients(checkpointed_attention, q, masked, values, tile_keys=4)
        expected = out_and_gradients(plain_attention, q, masked[:, :, kept], values[:, :, kept])
        for a, b in zip(found[:2], expected[:2], strict=True):
            assert error(a, b) <= 1e-12
        for a, b in zip(found[2:], expected[2:], strict=True):
            assert error(a[:, :, kept], b) <= 1e-12 and not a[:, :, hidden].any()


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


def test_no_tokens_and_no_examples_give_empty_gradients():
    for causal in (False, True):
        q, k, v = qkv(queries=0)
        out, dq, dk, dv = out_and_gradients(checkpointed_attention, q, k, v, causal=causal)
        assert out.shape == dq.shape == q.shape and not dk.any() and not dv.any()
        x = [a[:0] for a in qkv()]
        assert [a.shape for a in out_and_gradients(checkpointed_attention, *x, causal=causal)[1:]] == [
            a.shape for a in x
        ]


def test_keys_behind_the_last_query_get_zeros_when_causal():
    _, _, dk, dv = out_and_gradients(checkpointed_attention, *qkv(queries=9, keys=20), causal=True, tile_keys=6)
    assert not dk[:, :, 9:].any() and not dv[:, :, 9:].any() and dk[:, :, :8].any() and dv[:, :, :9].all()


# ---- bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_run_gives_the_same_bits(dtype):
    x = qkv(2, 4, 70, 70, 8, kv_heads=2, dtype=dtype)
    first = out_and_gradients(checkpointed_attention, *x, causal=True, tile_queries=32, tile_keys=16)
    for _ in range(3):
        again = out_and_gradients(checkpointed_attention, *x, causal=True, tile_queries=32, tile_keys=16)
        assert_equal_bits(again, first)


def test_an_example_has_the_same_bits_wherever_in_the_batch_it_stands():
    x = qkv(4, 2, 300, 300, 16, dtype=torch.float32)
    dout = gradient_of_out(x[0], x[2])
    out = checkpointed_attention(*x, causal=True)
    found = [out, *torch.autograd.grad(out, x, dout)]
    order = torch.tensor([2, 0, 3, 1])
    moved = [a.detach()[order].requires_grad_() for a in x]
    out = checkpointed_attention(*moved, causal=True)
    assert_equal_bits([out.detach(), *torch.autograd.grad(out, moved, dout[order])], [a.detach()[order] for a in found])


# ---- what is needed


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


@pytest.mark.parametrize(
    ("wanted", "products"), [("q", 3), ("k", 3), ("v", 2), ("qk", 4), ("qv", 4), ("kv", 4), ("qkv", 5)]
)
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
    with torch.inference_mode():
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


# ---- bytes


def saved_by(run) -> list[Tensor]:
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run()
    return saved


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_it_saves_q_k_v_out_and_one_number_a_query(dtype, causal):
    batch, heads, tokens, width = 2, 3, 37, 8
    saved = saved_by(
        lambda: checkpointed_attention(*qkv(batch, heads, tokens, tokens, width, dtype=dtype), causal=causal)
    )
    assert sum(x.numel() for x in saved) == 4 * batch * heads * tokens * width + batch * heads * tokens
    assert [x.dtype for x in saved] == [dtype] * 4 + [WIDE[dtype]]


def test_grouped_queries_save_their_few_keys_and_values_only():
    x = qkv(2, 6, 20, 30, 8, kv_heads=2, value_dim=5)
    saved = saved_by(lambda: checkpointed_attention(*x))
    assert sum(x.numel() for x in saved) == 2 * (6 * 20 * (8 + 5 + 1) + 2 * 30 * (8 + 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_meter_finds_out_and_lse_after_the_forward_and_nothing_else(dtype):
    x = qkv(2, 3, 40, 50, 8, value_dim=4, dtype=dtype)
    with Meter(inputs=x) as meter:
        out = checkpointed_attention(*x, causal=True, tile_queries=16, tile_keys=16)
    assert out.requires_grad
    assert meter.timeline.totals[-1] - meter.timeline.totals[0] == 2 * 3 * 40 * (
        4 * dtype.itemsize + WIDE[dtype].itemsize
    )


def backward_metered(q: Tensor, k: Tensor, v: Tensor, **options) -> int:
    """Bytes at backward's fullest moment beyond the inputs, out, lse and the gradient of out."""
    dout = gradient_of_out(q, v)
    with Meter(inputs=[q, k, v, dout]) as meter:
        out = checkpointed_attention(q, k, v, **options)
        kept = torch.autograd.grad(out, (q, k, v), dout)
    del kept
    saved = out.nbytes + math.prod(q.shape[:3]) * WIDE[q.dtype].itemsize
    return meter.timeline.peak_bytes - meter.timeline.bytes_at(0) - saved


@settings(deadline=None, max_examples=40)
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


def test_beyond_one_tile_only_the_gradients_grow():
    sizes = [backward_metered(*qkv(1, 2, tokens, tokens, 16, dtype=torch.float32)) for tokens in (256, 512, 1024)]
    assert [b - a for a, b in zip(sizes, sizes[1:], strict=False)] == [3 * 2 * 16 * 4 * n for n in (256, 512)]


def test_nothing_of_the_forward_lives_on_after_backward():
    x = qkv()
    out = checkpointed_attention(*x)
    graph, node = weakref.ref(out.grad_fn), weakref.ref(out)
    gc.disable()
    try:
        out.sum().backward()
        del out
        assert graph() is None and node() is None
    finally:
        gc.enable()


# ---- among others


class CheckpointedAttention(Attention):
    """The book's attention with its mixing exchanged."""

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.config.heads
        q, k, v = self.qkv(x).view(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = checkpointed_attention(q, k, v, causal=True, tile_queries=16, tile_keys=16)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def gpt(attention: str, dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, heads=4, context=50, vocabulary=60, attention="by hand").to(dtype)
    if attention == "checkpointed":
        for block in model.blocks:
            block.attention.__class__ = CheckpointedAttention
    return model


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_gpt_trains_with_it_as_with_attention_by_hand(dtype, bound):
    x, y = torch.randint(60, (2, 2, 50), generator=torch.Generator().manual_seed(3))
    by_hand, checkpointed = gpt("by hand", dtype), gpt("checkpointed", dtype)
    for model in (by_hand, checkpointed):
        model(x, y).backward()
    for (name, a), b in zip(checkpointed.named_parameters(), by_hand.parameters(), strict=True):
        a, b = a.grad, b.grad
        if name.endswith(
            "qkv.bias"
        ):  # the keys' part is 0 but for rounding: a softmax doesn't see what all scores share
            a, b = a.view(3, -1)[[0, 2]], b.view(3, -1)[[0, 2]]
        assert error(a, b) <= bound, name


def test_a_block_of_a_gpt_holds_with_it_what_it_holds_with_the_fused_kernel():
    held = {}
    for attention in ("fused", "by hand", "checkpointed"):
        config = GPTConfig(width=32, heads=4, context=50, attention="fused" if attention == "fused" else "by hand")
        block = Block(config)
        if attention == "checkpointed":
            block.attention.__class__ = CheckpointedAttention
        x = torch.randn(2, 50, 32, requires_grad=True)
        with Meter(block, inputs=(x,)) as meter:
            out = block(x)
        held[attention] = meter.timeline.totals[-1] - meter.timeline.totals[0]
        del out
    assert held["checkpointed"] == held["fused"]
    assert held["by hand"] > held["fused"] + 2 * 4 * 50 * 50 * 4


def test_out_lies_in_memory_as_q_does():
    x = qkv(2, 3, 20, 20, 8)
    assert checkpointed_attention(*x).is_contiguous()
    x = torch.randn(2, 20, 3, 3, 8).permute(2, 0, 3, 1, 4)
    out = checkpointed_attention(*x)
    assert out.shape == (2, 3, 20, 8) and out.transpose(1, 2).is_contiguous()


def test_under_checkpoint_the_gradients_have_the_same_bits():
    x = qkv(1, 2, 50, 50, 8, dtype=torch.float32)
    options = {"causal": True, "tile_queries": 16, "tile_keys": 16}
    expected = out_and_gradients(checkpointed_attention, *x, **options)
    found = out_and_gradients(lambda *x: checkpoint(checkpointed_attention, *x, **options), *x)
    assert_equal_bits(found, expected)
    theirs = torch.utils.checkpoint.checkpoint
    found = out_and_gradients(lambda *x: theirs(checkpointed_attention, *x, use_reentrant=False, **options), *x)
    assert_equal_bits(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
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


def test_on_the_meta_device_there_are_shapes():
    x = [a.detach().to("meta").requires_grad_() for a in qkv(2, 6, 20, 30, 8, kv_heads=2, value_dim=5)]
    out = checkpointed_attention(*x, causal=True, tile_keys=7)
    assert out.shape == (2, 6, 20, 5)
    assert [a.shape for a in torch.autograd.grad(out.sum(), x)] == [a.shape for a in x]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_it_equals_plain_attention_too_and_repeats_bit_for_bit(causal):
    x = [a.detach().cuda().requires_grad_() for a in qkv(2, 6, 300, 310, 32, kv_heads=2)]
    found = out_and_gradients(checkpointed_attention, *x, causal=causal)
    for a, b in zip(found, out_and_gradients(plain_attention, *x, causal=causal), strict=True):
        assert error(a, b) <= 1e-12
    assert_equal_bits(out_and_gradients(checkpointed_attention, *x, causal=causal), found)


# ---- bad input


def test_a_second_differentiation_says_what_to_use():
    x = qkv(1, 1, 5, 5, 3)
    dq = torch.autograd.grad(checkpointed_attention(*x).sum(), x[0], create_graph=True)[0]
    assert dq.requires_grad
    with pytest.raises(RuntimeError, match=r"differentiated once, found a second time.*SDPBackend.MATH"):
        dq.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        (dq,) = torch.autograd.grad(F.scaled_dot_product_attention(*x).sum(), x[0], create_graph=True)
        dq.sum().backward()
    assert x[1].grad is not None


def test_an_input_that_was_changed_in_between_is_noticed():
    x = qkv()
    out = checkpointed_attention(*x)
    with torch.no_grad():
        x[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda q, k, v: (q[0], k, v), {}, ValueError, r"expected q, k and v of shape \(batch, heads, tokens"),
        (lambda q, k, v: (q, k[..., :3], v), {}, ValueError, "the same head_dim"),
        (lambda q, k, v: (q, k[:, :, :3], v), {}, ValueError, "a value for every key"),
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), {}, ValueError, "2 key-value heads cannot serve 3 heads"),
        (lambda q, k, v: (q, k.float(), v), {}, TypeError, "of one dtype"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), {}, TypeError, "of one dtype, .* found torch.int64"),
        (lambda q, k, v: (q, k, v), {"tile_queries": 0}, ValueError, "tile_queries"),
        (lambda q, k, v: (q, k, v), {"tile_keys": 2.0}, TypeError, "tile_keys"),
        (
            lambda q, k, v: (q, k, v),
            {"scale": torch.ones(())},
            TypeError,
            "found a tensor, which would get no gradient",
        ),
    ],
)
def test_bad_input_is_refused_as_by_tiled_attention(change, options, kind, message):
    with pytest.raises(kind, match=message):
        checkpointed_attention(*change(*qkv()), **options)
