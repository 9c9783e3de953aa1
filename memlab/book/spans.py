"""What pictures of a pipeline are made of: who computes what when, simulated or measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.pipeline_parallelism import Simulation, Span
from memlab.pipeline_parallelism.schedule import BACKWARD, FORWARD

Played = Simulation | Sequence[Sequence[Span]]
"""A simulation, or for each rank the spans that it measured."""


def spans_by_rank(played: Played, same_clock: bool = True) -> list[list[Span]]:
    """For each rank its computations by begin; the first of all begins at 0.

    same_clock: False for measured spans of several machines, whose clocks differ. Each rank's is then set so that its
    first forward begins when the stage before has ended its own: no message takes time.

    Raises ValueError where there are none.
    """
    if isinstance(played, Simulation):
        return [[span for span in played.spans if span.rank == rank] for rank in range(played.schedule.ranks)]
    ranks = [sorted(own, key=lambda span: span.begin) for own in played]
    if not any(ranks):
        raise ValueError("expected at least one span, found none; hand in what each rank's `Pipeline.spans` has")
    if same_clock:
        shifts = [min(span.begin for own in ranks for span in own)] * len(ranks)
    else:
        shifts, arrived = [], 0.0
        for own in ranks:
            shifts.append((own[0].begin if own else 0.0) - arrived)
            arrived += own[0].end - own[0].begin if own else 0.0
    return [
        [Span(span.rank, span.action, span.begin - shift, span.end - shift) for span in own]
        for own, shift in zip(ranks, shifts, strict=True)
    ]


def whole_seconds(spans: Sequence[Sequence[Span]]) -> float:
    """From the first begin to the last end."""
    return max(span.end for own in spans for span in own)


def idle_share(spans: Sequence[Sequence[Span]]) -> float:
    """The share of all ranks' time in which none of their computations runs; 0 where no time passes."""
    busy = sum(span.end - span.begin for own in spans for span in own)
    whole = len(spans) * whole_seconds(spans)
    return 1 - busy / whole if whole else 0.0


def held_micro_batches(own: Sequence[Span]) -> list[tuple[float, float]]:
    """(seconds, micro-batches in flight) of one rank, from each time on: from a forward's begin to its backward's end.

    On a rank with several stages each counts for its part: all stages' activations of one micro-batch are 1. Where
    there are no backwards nothing is kept beyond the forward.
    """
    part = 1 / max(1, len({span.action.stage for span in own}))
    trained = any(span.action.kind == BACKWARD for span in own)
    turns = [(span.begin, 1) for span in own if span.action.kind == FORWARD]
    turns += [(span.end, -1) for span in own if span.action.kind == BACKWARD or not trained]
    line, held = [(0.0, 0.0)], 0
    for when, change in sorted(turns):
        held += change
        if line[-1][0] == when:  # a forward begins as a backward ends: neither a dip nor a tip
            line.pop()
        line.append((when, held * part))
    return line


def percent(share: float) -> str:
    """A share of 1 in words."""
    return f"{100 * max(share, 0.0):.1f}%"
