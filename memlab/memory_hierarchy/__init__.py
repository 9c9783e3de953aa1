"""The memory hierarchy: how fast each level is, which ops wait for it, and attention that stays in the fast levels.

Read the pages in this order: `levels` (what there is), `bandwidth` (how fast it answers), `counting` (what ops compute
and move) with `touched` (which bytes those are), `roofline` (which of them wait for memory), `attention` (the forward
without T×T), and `triton_attention` (the same as one kernel of a GPU).
"""

from memlab.memory_hierarchy.attention import live_bytes, online_softmax, tiled_attention
from memlab.memory_hierarchy.bandwidth import disk_bandwidth, measure_bandwidth, transfer_bandwidth
from memlab.memory_hierarchy.counting import Op, OpCounter
from memlab.memory_hierarchy.levels import PUBLISHED, Level, fit_levels
from memlab.memory_hierarchy.roofline import bound_by, least_seconds, measure_peak_flops, roof

__all__ = [
    "PUBLISHED",
    "Level",
    "Op",
    "OpCounter",
    "bound_by",
    "disk_bandwidth",
    "fit_levels",
    "least_seconds",
    "live_bytes",
    "measure_bandwidth",
    "measure_peak_flops",
    "online_softmax",
    "roof",
    "tiled_attention",
    "transfer_bandwidth",
]
