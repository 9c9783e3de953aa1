"""Data parallelism: every rank has other data, and holds the whole of the model, or less and less of it.

Read the pages in this order: `flat` (parameters side by side, cut into equal pieces), `ring` (all-reduce by hand) and
`agreement` (what must be the same on all ranks).

All that a model has on every rank: `buckets` (gradients that travel together), `averaging` (what happens to a gradient
on its way) and `replicas` (`DataParallel`).

States and gradients in parts: `zero_buckets` (parameters and a rank's parts of them in the same bytes),
`zero_gradients` (reduced bucket by bucket), `norms` (of what lies on several ranks), `states` (whole, and cut again)
and `zero_optimizer` (`ZeroOptimizer`: ZeRO 1 and 2).

Weights in parts, too: `shard` (parameters as a piece and whole), `unit` (a layer's), `gathering` (which are whole at
present), `saved` (weights that backward asks for), `sharding` (the moments: `fully_shard`) and `sharded_state` (what
there is only as a whole: norms and checkpoints).

And what it costs: `arithmetic` (bytes a rank holds and sends, by stage), `overlap` (when sending is free) and `budget`
(a rank's peak). `__main__` trains a small model by each technique, from a terminal.
"""

from memlab.data_parallelism.agreement import mean_over_ranks
from memlab.data_parallelism.arithmetic import rank_bytes, traffic_bytes
from memlab.data_parallelism.budget import rank_step
from memlab.data_parallelism.flat import FlatLayout
from memlab.data_parallelism.overlap import ring_seconds, tokens_to_hide
from memlab.data_parallelism.replicas import DataParallel
from memlab.data_parallelism.ring import (
    Move,
    all_gather_moves,
    reduce_scatter_moves,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from memlab.data_parallelism.sharded_state import (
    clip_grad_norm_,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from memlab.data_parallelism.sharding import fully_shard
from memlab.data_parallelism.zero_optimizer import ZeroOptimizer

__all__ = [
    "DataParallel",
    "FlatLayout",
    "Move",
    "ZeroOptimizer",
    "all_gather_moves",
    "clip_grad_norm_",
    "full_optimizer_state",
    "full_state_dict",
    "fully_shard",
    "load_full_optimizer_state",
    "load_full_state_dict",
    "mean_over_ranks",
    "rank_bytes",
    "rank_step",
    "reduce_scatter_moves",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_seconds",
    "tokens_to_hide",
    "traffic_bytes",
]
