"""Offloading: keep it elsewhere, in the host's memory or in a file, and bring it back before it is needed.

Read the pages in this order: `slab` and `files` (two places to keep bytes), `swap` (activations leave after the forward
and come back in backward); `host_optimizer` (states, and gradients, that never lie on the device); `streaming` (weights,
layer by layer); `overlap` (when is it free?), `simulation` and
`schedule` (what to send first).
"""

from memlab.offloading.overlap import (
    HOST_BYTES,
    LINKS,
    HostStep,
    Overlap,
    block_bytes,
    block_flops,
    block_overlap,
    hidden_tokens,
    hidden_width,
    host_step,
    transfer_seconds,
)
from memlab.offloading.residency import resident_bytes
from memlab.offloading.schedule import (
    POLICIES,
    best_sends,
    chosen,
    held_in,
    least_depth,
    ordered,
    plan_sends,
)
from memlab.offloading.simulation import Held, Run, Transfer, simulate
from memlab.offloading.streaming import stream_weights

__all__ = [
    "HOST_BYTES",
    "LINKS",
    "POLICIES",
    "Held",
    "HostStep",
    "Overlap",
    "Run",
    "Transfer",
    "best_sends",
    "block_bytes",
    "block_flops",
    "block_overlap",
    "chosen",
    "held_in",
    "hidden_tokens",
    "hidden_width",
    "host_step",
    "least_depth",
    "ordered",
    "plan_sends",
    "resident_bytes",
    "simulate",
    "stream_weights",
    "transfer_seconds",
]
