"""Autocast as a GPU does it, on imagined tensors, which for PyTorch are a CPU's.

A CPU's autocast casts almost the same matrix products to 16 bit, and caches the same casts of weights. What it lacks is
CUDA's list of ops that run in 32 bit: softmax, norms, losses. They are cast before they are called, so a function that
calls one of them inside itself (nn.MultiheadAttention's attention, gumbel_softmax, pairwise_distance,
local_response_norm) is not followed there. What a CPU's autocast runs in 32 bit and CUDA's does not, such as pooling
and padding, runs without autocast.

Source: aten/src/ATen/autocast_mode.h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# What CUDA's autocast runs in 32 bit: casting the arguments, or asking for a result of that dtype.
CAST_TO_FP32 = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos arccos arcsin asin binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss cosine_similarity dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss interpolate
    kl_div l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss
    soft_margin_loss softplus special_erfinv special_expm1 special_log1p special_logsumexp square tan
    triplet_margin_loss upsample
"""
RESULT_IN_FP32 = """
    cumprod cumsum linalg_matrix_norm linalg_norm linalg_vector_norm log_softmax norm prod softmax softmin
    special_log_softmax special_softmax sum
"""
CAST_TO_FP32, RESULT_IN_FP32 = frozenset(CAST_TO_FP32.split()), frozenset(RESULT_IN_FP32.split())
# What a CPU's list has and CUDA's has not, or not in 32 bit (joining tensors promotes by itself, without copies of
# them); what CUDA's promotes, and by itself refuses two dtypes; and products that a CPU's list lacks.
AS_IT_IS = """
    adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d cat column_stack concat concatenate dstack grid_sample
    grid_sampler hstack index_copy max_pool3d pad row_stack stack trace vstack
"""
AS_IT_IS = frozenset(AS_IT_IS.split())
WIDENED = frozenset({"inner", "scatter_add", "tensordot"})
CAST_TO_HALF = frozenset({"addmv", "addr", "einsum", "mv"})

FROM_FP16 = {"softmax": aten._softmax, "log_softmax": aten._log_softmax}


def autocasting() -> bool:
    """Whether the code that runs is under autocast, which for imagined tensors is the CPU's."""
    return torch.is_autocast_enabled("cpu")


class _FP32Ops(TorchFunctionMode):
    """Runs in 32 bit what CUDA's autocast does and a CPU's does not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not autocasting():
            return func(*args, **kwargs)
        if name in RESULT_IN_FP32:
            first = args[0] if args else kwargs.get("input")
            asked = args[2] if name in FROM_FP16 and len(args) > 2 else kwargs.get("dtype")
            if asked is None and getattr(first, "dtype", None) in HALF:
                dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
                if name in FROM_FP16 and first.dtype is torch.float16 and isinstance(dim, int):
                    return FROM_FP16[name](first, dim, True)  # CUDA reads FP16 and writes FP32, without a copy between
                args = args[:2] if name in FROM_FP16 else args  # a None for a dtype may stand third
                kwargs = {**kwargs, "dtype": torch.float32}
        elif name in CAST_TO_FP32:
            args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF else t, (args, kwargs))
        elif name in CAST_TO_HALF:
            dtype = torch.get_autocast_dtype("cpu")
            cast = lambda t: t.to(dtype) if t.dtype in (*HALF, torch.float32) else t  # noqa: E731
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        elif name in AS_IT_IS or name in WIDENED:
            if name in WIDENED and any(getattr(each, "dtype", None) is torch.float32 for each in args):
                args = [each.float() if getattr(each, "dtype", None) in HALF else each for each in args]
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
                return func(*args, **kwargs)
        elif name == "cross_entropy":
            return _cross_entropy(*args, **kwargs)
        elif name == "normalize" and kwargs.get("out") is None:  # it calls a norm inside itself
            return _normalize(*args, **{key: value for key, value in kwargs.items() if key != "out"})
        elif name == "binary_cross_entropy":
            raise RuntimeError(
                "expected binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), found binary_cross_entropy under "
                "autocast, which CUDA's refuses, since its logarithm of a 16-bit probability overflows"
            )
        return func(*args, **kwargs)


def _cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, *args, **kwargs) -> Tensor:
    """CUDA's list has not cross_entropy, but nll_loss, which is the second half of it.

    So log_softmax, which cross_entropy asks for in its input's own dtype, stays in 16 bit, and what it gives is cast.
    Probabilities as targets, and smoothed labels, which take other ways through it, are cast before, as a CPU does.
    """
    given = dict(zip(("size_average", "ignore_index", "reduce", "reduction", "label_smoothing"), args, strict=False))
    given |= kwargs
    if input.dtype not in HALF or target.is_floating_point() or given.pop("label_smoothing", 0.0):
        return F.cross_entropy(input, target, weight, *args, **kwargs)
    scores = torch.log_softmax(input, 0 if input.dim() == 1 else 1, input.dtype)
    return F.nll_loss(scores, target, weight, **given)


def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    dtype = torch.float32 if input.dtype in HALF else None
    return input / torch.linalg.vector_norm(input, p, dim, True, dtype=dtype).clamp_min(eps).expand_as(input)


def _autocast_init(init: Callable) -> Callable:
    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, enabled, cache_enabled)

    return __init__


def _autocast_enter(enter: Callable) -> Callable:
    def __enter__(self):
        before = self.device
        self.device = "cpu" if before == "cuda" else before  # one that was made before the block, as a decorator is
        result = enter(self)
        found = self.prev, self.prev_fastdtype, self.prev_cache_enabled  # torch keeps the last entrance's only
        self._fp32_ops = [*getattr(self, "_fp32_ops", ()), (before, _FP32Ops(), found)]  # it may be inside itself
        self._fp32_ops[-1][1].__enter__()
        return result

    return __enter__


def _autocast_exit(leave: Callable) -> Callable:
    def __exit__(self, *error):
        before = self.device
        if getattr(self, "_fp32_ops", None):
            before, fp32_ops, (self.prev, self.prev_fastdtype, self.prev_cache_enabled) = self._fp32_ops.pop()
            fp32_ops.__exit__(*error)
        try:
            return leave(self, *error)
        finally:
            self.device = before

    return __exit__


def _checkpoint_kwargs(found: Callable) -> Callable:
    def _get_autocast_kwargs(device_type="cuda"):
        if autocasting():
            raise NotImplementedError(
                "expected checkpointing without autocast; found both: a recomputation under an imagined GPU's autocast "
                "would cast as a CPU's does. Imagine the step in pure BF16, or measure it on a GPU"
            )
        return found(device_type)

    return _get_autocast_kwargs


CHOICES = (
    (autocast, "__init__", _autocast_init),
    (autocast, "__enter__", _autocast_enter),
    (autocast, "__exit__", _autocast_exit),
    (torch.utils.checkpoint, "_get_autocast_kwargs", _checkpoint_kwargs),
)
"""What an imagined GPU puts in place: whose attribute, its name, and what makes ours of what is there."""
