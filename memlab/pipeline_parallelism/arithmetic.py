"""What a schedule costs, in closed form: micro-batches in flight, and the bubble.

p stages, m micro-batches, and all turns of a kind equally long:

    in flight on stage s     GPipe  m            1F1B  min(p − s, m)
    bubble / whole time      (p − 1) / (m + p − 1)

With v stages on each of p ranks (interleaved 1F1B) turns are v times shorter, and the bubble is; but more is in flight:

    in flight on rank r      min((v − 1)·p + 2·(p − r) − 1, v·m)      of micro-batches on one of the rank's stages
    bubble / whole time      (p − 1) / (v·m + p − 1)

Sources: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.
"""

from __future__ import annotations

from memlab.checking import one_of, positive


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """How many micro-batches a stage has at most between their forward and their backward.

    schedule: "GPipe", "1F1B", or "interleaved 1F1B": then the number is of all `chunks` stages on the stage's rank.
    Raises ValueError for another one, for a stage that is none, and for chunks that do not divide the stages.

    >>> [in_flight("1F1B", stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight("interleaved 1F1B", rank, 8, 8, chunks=2) for rank in range(4)]
    [11, 9, 7, 5]
    """
    one_of("schedule", schedule, ("GPipe", "1F1B", "interleaved 1F1B"))
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        positive(name, value)
    if not 0 <= stage < stages:
        raise ValueError(f"expected a stage from 0 to {stages - 1}, found {stage}")
    if schedule == "GPipe":
        return micro_batches
    if schedule == "1F1B":
        return min(stages - stage, micro_batches)
    if stages % chunks:
        raise ValueError(f"expected stages that {chunks} chunks divide, found {stages}; take as many on each rank")
    ranks = stages // chunks
    rank = stage % ranks
    return min((chunks - 1) * ranks + 2 * (ranks - rank) - 1, chunks * micro_batches)


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of a step that each rank idles.

    stages: of the model; for the interleaved schedule, ranks.   chunks: how many stages each rank has of it.

    >>> bubble_share(4, 8)
    0.2727272727272727
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        positive(name, value)
    return (stages - 1) / (chunks * micro_batches + stages - 1)
