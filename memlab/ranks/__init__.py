"""Ranks: the same function in several processes that talk to each other, real or imagined.

Read the pages in this order.

Talking: `traffic` (how many bytes it takes), `talk` (collectives, and from one rank to another) and `meshes` (a group
along each axis).

Being several: `launch` (`run_ranks`: a function in several processes), `by_value` (how it gets there), `server` (what
they are forked from), `processes` (as the launcher sees them), `worker` (what happens in each), `failures` (which rank
was to blame, and where each was when time ran out), `torchrun` (where the processes are there already), `imagined`
(where there are none) and `example` (all three behind one command line).
"""

from memlab.ranks.failures import RankError
from memlab.ranks.imagined import imagined_ranks, one_rank
from memlab.ranks.launch import run_ranks
from memlab.ranks.meshes import mesh, mesh_groups
from memlab.ranks.talk import (
    ALONE,
    Transfer,
    all_gather,
    begin,
    exchange,
    place_in,
    receive,
    reduce_scatter,
    send,
)
from memlab.ranks.traffic import Message, Traffic, ring_bytes

__all__ = [
    "ALONE",
    "Message",
    "RankError",
    "Traffic",
    "Transfer",
    "all_gather",
    "begin",
    "exchange",
    "imagined_ranks",
    "mesh",
    "mesh_groups",
    "one_rank",
    "place_in",
    "receive",
    "reduce_scatter",
    "ring_bytes",
    "run_ranks",
    "send",
]
