"""Tensor parallelism: a layer's weights on several ranks, each computing with its part.

Read the pages in this order: `cuts` (which part of a tensor a rank holds), `regions` (collectives that autograd knows,
in conjugate pairs) and `parameters` (parts that were never whole).

Layers: `overlap` (a matmul whose backward sends while it computes), `linear` (by columns and by rows), `embedding` and
`cross_entropy` (the vocabulary in parts).

Models: `random` (dropout: the same on all ranks, or not), `blocks` (a GPT's layer), `gpt` (all of it) and `replicas`
(is the same what must be?).

What there is only as a whole: `state` (a full checkpoint in main memory), `files` (and as a file that ranks write in
pieces) and `norms` (of gradients).

And what it costs: `arithmetic` (bytes a rank holds and sends), `activations` (what it keeps for backward) and `timing`
(when sending is worth it). `__main__` trains a small GPT, from a terminal.
"""

from memlab.tensor_parallelism.activations import block_activations, step_activations
from memlab.tensor_parallelism.arithmetic import rank_parameters, rank_states, sent_bytes, step_traffic
from memlab.tensor_parallelism.blocks import (
    ReplicatedLayerNorm,
    TensorParallelAttention,
    TensorParallelBlock,
    TensorParallelFeedForward,
)
from memlab.tensor_parallelism.cross_entropy import vocabulary_parallel_cross_entropy
from memlab.tensor_parallelism.cuts import Cut, cut_evenly, cut_of
from memlab.tensor_parallelism.embedding import VocabularyParallelEmbedding
from memlab.tensor_parallelism.files import load_full, save_full
from memlab.tensor_parallelism.gpt import TensorParallelGPT
from memlab.tensor_parallelism.linear import ColumnParallelLinear, RowParallelLinear
from memlab.tensor_parallelism.norms import clip_grad_norm_
from memlab.tensor_parallelism.overlap import Sending, column_linear
from memlab.tensor_parallelism.random import StreamDropout, different_on_ranks
from memlab.tensor_parallelism.regions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    reduce_scatter_sequence,
    scatter_to_ranks,
)
from memlab.tensor_parallelism.replicas import check_replicas
from memlab.tensor_parallelism.state import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from memlab.tensor_parallelism.timing import block_seconds

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "ReplicatedLayerNorm",
    "RowParallelLinear",
    "Sending",
    "StreamDropout",
    "TensorParallelAttention",
    "TensorParallelBlock",
    "TensorParallelFeedForward",
    "TensorParallelGPT",
    "VocabularyParallelEmbedding",
    "block_activations",
    "block_seconds",
    "check_replicas",
    "clip_grad_norm_",
    "column_linear",
    "copy_to_ranks",
    "cut_evenly",
    "cut_of",
    "different_on_ranks",
    "full_optimizer_state",
    "full_state_dict",
    "gather_from_ranks",
    "gather_sequence",
    "load_full",
    "load_full_optimizer_state",
    "load_full_state_dict",
    "rank_parameters",
    "rank_states",
    "reduce_from_ranks",
    "reduce_scatter_sequence",
    "save_full",
    "scatter_to_ranks",
    "sent_bytes",
    "step_activations",
    "step_traffic",
    "vocabulary_parallel_cross_entropy",
]
