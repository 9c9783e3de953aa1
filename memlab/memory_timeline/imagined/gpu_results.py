"""What CUDA's kernels return otherwise than a CPU's: of the same op, results of other dtypes and sizes.

- LayerNorm and BatchNorm keep their mean and deviation in 32 bit when their input has 16;
- BatchNorm keeps them in evaluation too, unless cuDNN runs it: on 3 dimensions or more, in FP32 or FP64, or in FP16
  with weights in FP32;
- logsigmoid keeps its input alone, where a CPU keeps exp(-|x|) besides;
- EmbeddingBag notes for each index the bag that it is of;
- attention's random state lies in main memory, and cuDNN's keeps no rows without a backward to come.

Source: aten/src/ATen/native (cuda/layer_norm_kernel.cu, Normalization.cpp, cuda/Normalization.cu,
cudnn/BatchNorm.cpp, cuda/Activation.cpp, cuda/EmbeddingBag.cu, transformers/cuda/attention.cu).
"""

from __future__ import annotations

import torch

from memlab.memory_timeline.imagined.gpu_autocast import HALF

aten = torch.ops.aten
BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


def as_cuda_returns(func, args: tuple, result):
    """The result of an op on `args`, of the dtypes and sizes, and in the memory, that CUDA's kernel returns it in."""
    if func is aten.native_layer_norm.default and result[0].dtype in HALF:
        return result[0], result[1].float(), result[2].float()
    if func is aten.native_batch_norm.default:
        return _batch_norm(*args[:3], *result)
    if func is aten.log_sigmoid_forward.default:
        return result[0], result[1].new_empty(0)
    if func in BAGS:
        _, indices, offsets = args[:3]
        largest = result[3] if result[3].dim() == 2 else indices.new_empty(0)  # of each bag and column, for its maximum
        return result[0], torch.empty_like(indices), indices.new_empty(offsets.shape), largest
    if func is aten._scaled_dot_product_efficient_attention.default:
        for random_state in result[2:]:
            random_state.untyped_storage().in_main_memory = True
    if func is aten._scaled_dot_product_cudnn_attention.default and not args[4]:
        return result[0], result[1].new_empty(0), *result[2:]  # without a backward to come it keeps no rows
    return result


def _batch_norm(input, weight, bias, out, *statistics):
    dtype = torch.float32 if input.dtype in HALF else statistics[0].dtype
    affine = weight is not None and bias is not None and weight.dtype is dtype
    if affine and input.dim() >= 3 and input.dtype is not torch.bfloat16:  # cuDNN's
        return out, *(each.to(dtype) for each in statistics)
    return out, *(each.new_empty(input.shape[1], dtype=dtype) for each in statistics)
