"""Sliders over a pipeline's schedule: which one, how many ranks and micro-batches, and how slow a link or a rank."""

from __future__ import annotations

import functools

from memlab.book.interactive import Interactive
from memlab.book.schedule_pictures import draw_schedule, most_words
from memlab.book.spans import idle_share, percent, spans_by_rank, whole_seconds
from memlab.book.style import SMALL_SIZE, Picture
from memlab.book.tables import Table
from memlab.checking import one_of
from memlab.pipeline_parallelism import (
    Simulation,
    StageCost,
    bubble_share,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
)

SCHEDULES = ("GPipe", "1F1B", "interleaved")
RANKS = range(1, 9)
MICRO_BATCHES = range(1, 33)
BACKWARDS = (1.0, 1.5, 2.0, 2.5, 3.0)
LINK_TIMES = (0.0, 0.1, 0.25, 0.5, 1.0)
SLOW = ("none", "first", "middle", "last")
CHUNKS = 2
MOST_MESSAGES = 150


@functools.lru_cache(maxsize=512)
def play(
    schedule: str = "1F1B",
    ranks: int = 4,
    micro_batches: int = 8,
    backward: float = 2.0,
    link: float = 0.0,
    slow: str = "none",
) -> Simulation:
    """A schedule played with a forward of a rank's layers taking 1.

    backward, link: in forwards. slow: the rank that takes twice as long. "interleaved": each rank has two stages of
    half its layers; micro-batches that the ranks do not divide are rounded up.

    Raises ValueError for a schedule or a slow rank that is not there.
    """
    one_of("schedule", schedule, SCHEDULES)
    one_of("slow", slow, SLOW)
    chunks = CHUNKS if schedule == "interleaved" else 1
    if schedule == "GPipe":
        order = gpipe(ranks, micro_batches)
    elif schedule == "1F1B":
        order = one_forward_one_backward(ranks, micro_batches)
    else:
        order = interleaved(ranks, chunks, -(-micro_batches // ranks) * ranks)
    which = {"none": None, "first": 0, "middle": ranks // 2, "last": ranks - 1}[slow]
    costs = []
    for stage in range(order.stages):
        part = (2.0 if stage % ranks == which else 1.0) / chunks
        costs.append(StageCost(forward_seconds=part, backward_seconds=part * backward))
    return simulate(order, costs, link)


def draw_pipeline(
    schedule: str = "1F1B",
    ranks: int = 4,
    micro_batches: int = 8,
    backward: float = 2.0,
    link: float = 0.0,
    slow: str = "none",
) -> Picture:
    """The chart of what `play` plays, with the formula's bubble beside what it came to."""
    played = play(schedule, ranks, micro_batches, backward, link, slow)
    order = played.schedule
    formula = bubble_share(ranks, order.micro_batches, order.stages // ranks)
    name = order.name if order.micro_batches == micro_batches else f"{order.name}, rounded up"
    few = link > 0 and len(played.messages) <= MOST_MESSAGES
    picture = draw_schedule(played, title=name, rows=RANKS[-1], messages=few)
    words = f"by formula, no link and no slow rank: {percent(formula)}"
    figure = picture.figure
    height = figure.get_size_inches()[1]
    figure.text(0.02, 1 - 0.28 / height, words, ha="left", va="top", fontsize=SMALL_SIZE)
    options = f"A backward takes {backward:g} forwards, a message {link:g}; slow rank: {slow}."
    return Picture(figure, f"{picture.alt} Idle {words}. {options}")


def explore_pipeline() -> Interactive:
    """Buttons for the schedule and a slow rank; sliders for ranks, micro-batches, backward's length and link time."""
    return Interactive(
        draw_pipeline,
        schedule=list(SCHEDULES),
        ranks=RANKS,
        micro_batches=MICRO_BATCHES,
        backward=BACKWARDS,
        link=LINK_TIMES,
        slow=list(SLOW),
    )


def pipeline_table(
    ranks: int = 4, micro_batches: int = 8, backward: float = 2.0, link: float = 0.0, slow: str = "none"
) -> Table:
    """The sliders' pictures as text: all three schedules with their time, bubble, formula, and what is in flight."""
    rows = []
    for schedule in SCHEDULES:
        played = play(schedule, ranks, micro_batches, backward, link, slow)
        order, spans = played.schedule, spans_by_rank(played)
        formula = bubble_share(ranks, order.micro_batches, order.stages // ranks)
        took = f"{whole_seconds(spans):.4g}", percent(idle_share(spans)), percent(formula)
        rows.append((order.name, order.micro_batches, *took, most_words(spans)))
    return Table(["schedule", "micro-batches", "time", "idle", "by formula", "most in flight, rank by rank"], rows)
