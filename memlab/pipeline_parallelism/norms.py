"""The norm of a pipeline's gradients: every stage has others, and every number counts once.

‖g‖² = Σ over stages of ‖g of the stage‖². A tied parameter counts on the first stage that has it. Where tensor ranks
have parts of a stage, chapter 14's rule says who counts what. Left to itself, each rank would clip by the norm of its
own stages, and the step would have another direction.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from memlab.data_parallelism.norms import norm_of_parts
from memlab.pipeline_parallelism.runtime import Pipeline
from memlab.ranks import ALONE
from memlab.tensor_parallelism.norms import counted_parts


@torch.no_grad()
def clip_grad_norm_(
    pipeline: Pipeline,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    tensor_group=None,
) -> Tensor:
    """Scale the gradients of all stages, so that the whole model's norm is at most max_norm. All ranks call it.

    tensor_group: whose ranks have parts of each stage, as `gpt_layers` was given; None: stages are whole.
    Returns the norm before, a scalar, in FP32 at least: the same on all ranks.
    Not with ZeroOptimizer, which averages gradients later, in memory of its own.
    Raises ValueError for a norm_type that is not above 0, for stages in parts without their tensor_group, and for
    stages that fully_shard has cut.
    RuntimeError, on every rank, for a norm that is not finite, if that is asked for: it takes a wait for the GPU.
    """
    parameters = list(dict.fromkeys(pipeline.parameters()))
    trained = [p for p in parameters if p.grad is not None]
    elsewhere = {id(p) for p in pipeline.tied.counted_elsewhere()}
    own = [p for p in trained if id(p) not in elsewhere]
    counted = counted_parts(own, ALONE if tensor_group is None else tensor_group)
    if tensor_group is not None:
        counted = [norm_of_parts(counted, norm_type, device=pipeline.device, group=tensor_group)]
    norm = norm_of_parts(counted, norm_type, error_if_nonfinite, device=pipeline.device, group=pipeline.group)
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return norm.to(functools.reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32))
