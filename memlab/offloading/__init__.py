"""Offloading: keep it elsewhere, in the host's memory or in a file, and bring it back before it is needed.

Read the pages in this order.

For all three: `slab` (host memory, allocated once), `layout` (tensors side by side in it) and `unnamed` (a file that
cannot be left behind).

Activations: `files` (where they spill to), `link` (copies beside the computation), `store` (where bytes that left are),
`footprint` and `pieces` (which bytes of a storage a tensor is made of, and what stands in the graph for it) and `swap`
(the hooks: `swap_activations`).

Optimizer states: `state_file` (states in a file), `host_link` (buffers that take turns), `host_gradients` (gradients
that leave in backward) and `host_optimizer` (the step on the host: `OffloadedOptimizer`).

Weights, layer by layer: `homes` (where they lie), `courier` (who brings them), `twins` (what an optimizer steps there),
`residency` (which are on the device), `streamed_model` (what the model still does, and refuses) and `streaming` (the
moments: `stream_weights`).

And when it is free: `links` (as formulas), `simulation` (as a step on paper) and `schedule` (what to send first).
"""

from memlab.offloading.host_optimizer import OffloadedOptimizer
from memlab.offloading.links import (
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
from memlab.offloading.schedule import POLICIES, chosen, held_in, ordered, plan_sends
from memlab.offloading.simulation import Held, Run, Transfer, simulate
from memlab.offloading.streaming import stream_weights
from memlab.offloading.swap import swap_activations

__all__ = [
    "HOST_BYTES",
    "LINKS",
    "POLICIES",
    "Held",
    "HostStep",
    "OffloadedOptimizer",
    "Overlap",
    "Run",
    "Transfer",
    "block_bytes",
    "block_flops",
    "block_overlap",
    "chosen",
    "held_in",
    "hidden_tokens",
    "hidden_width",
    "host_step",
    "ordered",
    "plan_sends",
    "resident_bytes",
    "simulate",
    "stream_weights",
    "swap_activations",
    "transfer_seconds",
]
