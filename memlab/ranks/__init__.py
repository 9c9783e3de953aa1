"""Ranks: the same function in several processes that talk to each other, real or imagined.

Read the pages in this order.

Talking: `membership` (who is in a group), `collectives` (the two halves of an all-reduce, under one name in every
PyTorch), `traffic` (how many bytes that takes), `point_to_point` (from one rank to another) and `meshes` (a group along
each axis).

Being several: `launch` (`run_ranks`: a function in several processes), `by_value` (how it gets there), `server` (what
they are forked from), `processes` (as the launcher sees them), `worker` (what happens in each), `failures` (which rank
was to blame), `stacks` and `timeouts` (where each was when time ran out), `torchrun` (where the processes are there
already), `imagined` (where there are none) and `example` (all three behind one command line).
"""

from memlab.ranks.collectives import all_gather, reduce_scatter
from memlab.ranks.failures import RankError
from memlab.ranks.imagined import imagined_ranks, one_rank
from memlab.ranks.launch import run_ranks
from memlab.ranks.membership import ALONE, place_in
from memlab.ranks.meshes import mesh, mesh_groups
from memlab.ranks.point_to_point import Transfer, begin, exchange, receive, send
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
