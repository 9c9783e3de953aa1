"""Under the tensors: how CUDA's caching allocator turns requests into blocks and segments, and what other ways cost.

Read the pages in this order: `trace` (what a program asks for), `blocks` and `device` (what there is to hand out),
`allocator` (the rules), `max_split_size` and `expandable_segments` (two ways to change them), `managers`,
`size_classes` and `static_plan` (other ways), and `oom` (the message, word by word).

What a real GPU did: `records` and `snapshot` (what is recorded), `pickles` (PyTorch's own files), and
`compare` (the model's decisions beside the real ones). And `pluggable` (an allocator of your own under PyTorch).
"""

from memlab.caching_allocator.allocator import CachingAllocator, OutOfMemory
from memlab.caching_allocator.compare import compare
from memlab.caching_allocator.expandable_segments import ExpandableAllocator
from memlab.caching_allocator.managers import BestFit, FirstFit
from memlab.caching_allocator.max_split_size import MaxSplitAllocator
from memlab.caching_allocator.oom import explain_oom, read_oom
from memlab.caching_allocator.pickles import read_snapshot
from memlab.caching_allocator.size_classes import Buddy, Slab
from memlab.caching_allocator.snapshot import Snapshot, record_snapshot
from memlab.caching_allocator.static_plan import PlannedArena, plan
from memlab.caching_allocator.trace import FREE, Replay, Trace, replay, requests

__all__ = [
    "FREE",
    "BestFit",
    "Buddy",
    "CachingAllocator",
    "ExpandableAllocator",
    "FirstFit",
    "MaxSplitAllocator",
    "OutOfMemory",
    "PlannedArena",
    "Replay",
    "Slab",
    "Snapshot",
    "Trace",
    "compare",
    "explain_oom",
    "plan",
    "read_oom",
    "read_snapshot",
    "record_snapshot",
    "replay",
    "requests",
]
