"""Tensor parallelism: one layer's weights on several ranks, each multiplying with its part.

Pages, in reading order: cuts, regions, parameters, linear, embedding, cross_entropy, random, blocks, gpt, state.
"""

from memlab.tensor_parallelism.blocks import (
    ReplicatedLayerNorm,
    TensorParallelAttention,
    TensorParallelBlock,
    TensorParallelFeedForward,
)
from memlab.tensor_parallelism.cross_entropy import vocabulary_parallel_cross_entropy
from memlab.tensor_parallelism.cuts import Cut, cut_evenly, cut_of
from memlab.tensor_parallelism.embedding import VocabularyParallelEmbedding
from memlab.tensor_parallelism.gpt import TensorParallelGPT
from memlab.tensor_parallelism.linear import ColumnParallelLinear, RowParallelLinear
from memlab.tensor_parallelism.random import different_on_ranks
from memlab.tensor_parallelism.regions import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    reduce_scatter_sequence,
    scatter_to_ranks,
)
from memlab.tensor_parallelism.state import full_state_dict, load_full_state_dict

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "ReplicatedLayerNorm",
    "RowParallelLinear",
    "TensorParallelAttention",
    "TensorParallelBlock",
    "TensorParallelFeedForward",
    "TensorParallelGPT",
    "VocabularyParallelEmbedding",
    "copy_to_ranks",
    "cut_evenly",
    "cut_of",
    "different_on_ranks",
    "full_state_dict",
    "gather_from_ranks",
    "gather_sequence",
    "load_full_state_dict",
    "reduce_from_ranks",
    "reduce_scatter_sequence",
    "scatter_to_ranks",
    "vocabulary_parallel_cross_entropy",
]
