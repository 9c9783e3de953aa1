"""What a schedule costs, in closed form: micro-batches in flight, and the bubble.

    in flight on stage s     GPipe  m            1F1B  min(p − s, m)
    bubble / whole time      (p − 1) / (m + p − 1)                        p stages, m micro-batches, all turns equally long

Sources: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
"""

from __future__ import annotations


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """How many micro-batches' activations a stage holds at most. schedule: "GPipe" or "1F1B"."""
    if schedule == "GPipe":
        return micro_batches
    if schedule == "1F1B":
        return min(stages - stage, micro_batches)
    raise ValueError(f"expected 'GPipe' or '1F1B', found {schedule!r}")


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of a step that each rank idles. chunks: stages on each rank, of the interleaved schedule.

    >>> bubble_share(4, 8)
    0.2727272727272727
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)
