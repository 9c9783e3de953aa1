"""Where a GPU runs another op than a CPU for the same line of Python, and so keeps other bytes.

Imagined tensors have device "cpu", so PyTorch would choose the CPU's way for them. While a GPU is imagined, these
choices are made as CUDA would make them:

- dropout keeps a mask of one byte an element, not of the input's dtype;
- fused attention is flash (16 bit), cuDNN's on Hopper and Blackwell, or memory-efficient (32 bit, or a mask elsewhere),
  and keeps one float a query;
- RMSNorm is one fused op, which keeps one float of 32 bit a row;
- other ops return other dtypes and sizes (gpu_results.py);
- optimizers and gradient clipping work on all tensors at once (*foreach*) unless told otherwise;
- autocast runs softmax, norms and losses in 32 bit (gpu_autocast.py);
- tensors move between the card and main memory (places.py).

Only attributes of Python modules are replaced, for as long as the block lasts and for its own thread; PyTorch's tables
stay as they are. So names that were imported from torch.nn.functional one by one, before the block, do as on a CPU.
PyTorch prefers cuDNN's attention from cuDNN 9.15.1 on, which its builds for CUDA 13 bring along; one for CUDA 12 takes
flash on Hopper too, and keeps 8 bytes more.
Source: aten/src/ATen/native (Dropout.cpp, transformers/attention.cpp, transformers/cuda/sdp_utils.cpp,
cuda/layer_norm_kernel.cu), torch/optim/optimizer.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.optim import optimizer, swa_utils

from memlab.memory_timeline.imagined.gpu_autocast import AUTOCAST, CHOICES, HALF, autocasting
from memlab.memory_timeline.imagined.places import MOVES

aten = torch.ops.aten
AMPERE = (8, 0)  # the first architecture with flash attention, and with matrix units for BF16
CUDNN_FIRST = (9, 10)  # Hopper and Blackwell: where cuDNN's attention is asked before flash
RMS_NORM_IN_32_BIT = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
"""Whether this PyTorch's autocast has RMSNorm on its list for 32 bit, which 2.11's has not."""
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")

# Straight to the dispatch modes, past autograd, which would take a CPU's op apart.
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.Python
)


@contextlib.contextmanager
def replaced(owner, name: str, value):
    """`owner.name` is `value` inside the block, and what it was, if it was there at all, after it."""
    there, before = name in vars(owner), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        if there:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def imagining() -> bool:
    """Whether this thread is inside a block of imagined tensors; others may be training for real meanwhile."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def choose_as_cuda_does(stack: ExitStack, architecture: tuple[int, int]) -> None:
    """Put the choices above in place until `stack` closes. architecture: CUDA's compute capability, such as (9, 0)."""

    def replace(owner, name: str, make: Callable) -> None:
        before = getattr(owner, name)
        ours = make(before)

        @functools.wraps(before)
        def chosen(*args, **kwargs):
            return (ours if imagining() else before)(*args, **kwargs)

        stack.enter_context(replaced(owner, name, chosen))

    replace(F, "dropout", _dropout)
    replace(F, "scaled_dot_product_attention", lambda _: _attention(architecture))
    replace(F, "rms_norm", lambda _: _rms_norm)
    for name in RECURRENT:
        replace(torch._VF, name, lambda _: _refuse_recurrence)
    for user in (optimizer, swa_utils):
        replace(user, "_get_foreach_kernels_supported_devices", lambda devices: lambda: [*devices(), "cpu"])
    for owner, name, make in (*CHOICES, *MOVES):
        replace(owner, name, make)
    replace(torch, "compile", lambda _: _refuse_compilation)


def _refuse_compilation(*_args, **_kwargs):
    raise NotImplementedError(
        "expected eager code, found torch.compile: a compiler makes other ops, with other bytes; imagine the model "
        "uncompiled, or measure it compiled on a GPU"
    )


# ---- dropout and norms


def _dropout(on_cpu: Callable) -> Callable:
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if inplace or not training or not 0 < p < 1:
            return on_cpu(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    return dropout


def _rms_norm(input: Tensor, normalized_shape, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if autocasting() and RMS_NORM_IN_32_BIT:
        input, weight = (t.float() if t is not None and t.dtype in HALF else t for t in (input, weight))
    if weight is not None and weight.dtype != input.dtype:  # for mixed dtypes CUDA has no fused kernel either
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return _RMSNorm.apply(input, tuple(normalized_shape), weight, eps)


class _RMSNorm(torch.autograd.Function):
    """CUDA's fused RMSNorm, which a CPU computes op by op. Keeps its input, its weight and one float a row."""

    @staticmethod
    def forward(ctx, input, shape, weight, eps):
        out, deviation = aten._fused_rms_norm.default.redispatch(_PYTHON, input, shape, weight, eps)
        ctx.save_for_backward(input, weight, deviation)
        ctx.shape = shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        input, weight, deviation = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        found = aten._fused_rms_norm_backward.default.redispatch(
            _PYTHON, gradient, input, ctx.shape, deviation, weight, needed
        )
        return found[0], None, found[1], None


def _refuse_recurrence(*_args, **_kwargs):
    raise NotImplementedError(
        "expected a model whose ops a GPU runs one by one; found a recurrent layer, which cuDNN runs in one call with "
        "a reserve of its own, of a size that only cuDNN knows: measure it on a GPU, or imagine('cpu')"
    )


# ---- attention


def _attention(architecture: tuple[int, int]) -> Callable:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if autocasting():
            dtype = torch.get_autocast_dtype("cpu")
            # The last argument first, as C++ does; inside, as there, nothing is cast any more.
            attn_mask, value, key, query = (
                t.to(dtype) if t is not None and t.dtype in (*HALF, torch.float32) else t
                for t in (attn_mask, value, key, query)
            )
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
                return scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
        if not query.dtype == key.dtype == value.dtype:
            raise RuntimeError(
                "expected query, key and value of one dtype, for a GPU refuses others; found "
                f"{query.dtype}, {key.dtype}, {value.dtype}"
            )
        choice = _choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, architecture)
        keep = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if choice == "cudnn":
            bias = _as_floats(attn_mask, query.dtype)
            out, rows, *state, _ = aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, keep, dropout_p, is_causal, scale=scale
            )
            del rows, state[:]  # in this order, as C++ lets go of them where nobody keeps them
            return out
        if choice == "flash":
            width = query.shape[-1]
            if width % 8:
                scale = scale or width**-0.5
                query, key, value = (F.pad(t, (0, -width % 8)) for t in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return out[..., :width] if width % 8 else out
        attn_mask = _as_floats(attn_mask, query.dtype)
        if choice == "efficient":
            attn_mask = _as_bias(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, keep, dropout_p, is_causal, scale=scale
            )[0]
        if dropout_p > 0:
            return _attention_by_ops(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return scaled_dot_product_attention


def _choose(
    query, key, value, mask, dropout_p: float, is_causal: bool, grouped: bool, architecture: tuple[int, int]
) -> str:
    """cuDNN's, else flash, else memory-efficient, else by ops: CUDA's order, and its main conditions.

    query: (batch, heads, tokens, width); key, value: (batch, key-value heads, tokens, width). `sdpa_kernel` is obeyed.
    """
    allowed = torch.backends.cuda
    width, dtype, half = query.shape[-1], query.dtype, query.dtype in HALF
    if query.dim() != 4 or dtype not in (*HALF, torch.float32) or key.shape[-1] != width:
        return "math"
    if any(t.stride(-1) != 1 for t in (query, key, value)) or (dtype is torch.bfloat16 and architecture < AMPERE):
        return "math"
    alike = query.shape[:2] == key.shape[:2] == value.shape[:2]
    groups = grouped and query.shape[0] == key.shape[0] and key.shape[:2] == value.shape[:2]
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    whole_rows = mask is None or mask.stride(-1) == 1
    if (
        (half and architecture[0] in CUDNN_FIRST and allowed.cudnn_sdp_enabled())
        and (alike or groups)
        and (width % 8 == value.shape[-1] % 8 == 0 and max(width, value.shape[-1]) <= 256)
        and key.shape[-2] != 1
        and (not dropout_p or query.shape[-2] != 1)
        and (mask is None or (whole_rows and not mask.requires_grad))
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return "cudnn"
    widest = 192 if trained and (8, 6) <= architecture <= (8, 9) else 256
    if (
        (half and architecture >= AMPERE and mask is None and allowed.flash_sdp_enabled())
        and (alike or groups)
        and (value.shape[-1] == width <= widest)
        and (not is_causal or query.shape[-2] == key.shape[-2])
    ):
        return "flash"
    aligned = 8 if half else 4 if architecture >= AMPERE else 1
    fits = alike and width % aligned == value.shape[-1] % aligned == 0 and whole_rows
    return "efficient" if fits and allowed.mem_efficient_sdp_enabled() else "math"


def _as_floats(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as something to add: 0 where a key counts, and -inf where it does not."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype))


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as the memory-efficient kernel wants it: one row for each query, each row aligned to 8 numbers."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _attention_by_ops(query, key, value, mask, dropout_p, is_causal, scale, grouped) -> Tensor:
    """PyTorch's attention op by op, for its dropout's sake: from inside C++ that would be a CPU's.

    What C++ keeps until it returns has a name of its own here too.
    """
    dtype = query.dtype
    halved = dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    queries, keys, values = (t.float() if halved else t for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    root = abs(scale) ** 0.5
    scaled = queries * (-root if scale < 0 else root)
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = _as_floats(mask, queries.dtype)
    if grouped and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        keys, values = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (keys, values))
    weights = scaled @ (keys.transpose(-2, -1) * root)
    if mask is not None:
        weights = weights + mask
    weights = torch._safe_softmax(weights, -1)
    weights = F.dropout(weights, dropout_p)
    returned = weights.to(dtype)  # noqa: F841
    return (weights @ values).to(dtype)
