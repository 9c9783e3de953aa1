"""A pipeline's schedule, drawn: who computes which micro-batch when, who idles, and what each rank holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memlab.book.gantt import RIGHT, ROW, TIMES, draw_key, draw_rows, draw_schedules, time_words
from memlab.book.spans import held_micro_batches, idle_share, percent, spans_by_rank, whole_seconds
from memlab.book.style import LABEL_SIZE, LINE_COLOURS, LINE_STYLES, SMALL_SIZE, Picture, byte_unit, finish
from memlab.checking import one_of
from memlab.pipeline_parallelism import (
    Schedule,
    Simulation,
    Span,
    StageCost,
    gpipe,
    in_flight,
    one_forward_one_backward,
    simulate,
)
from memlab.units import format_bytes

HELD = ("micro-batches", "bytes")

# ---- a chart of one schedule


def draw_schedule(
    simulation: Simulation,
    *,
    held: str = "micro-batches",
    time: str = "forwards",
    title: str = "",
    rows: int = 0,
    messages: bool = False,
) -> Picture:
    """A Gantt chart: a row a rank, a box a computation; and below, over the same time, what each rank holds.

    held: "micro-batches" in flight, with their bound; or "bytes" after each action, dotted where the peak is, which may
      be reached while a rank computes.
    time: "forwards" (of 1), "s" or "ms". rows: the figure is as tall as for so many ranks. messages: draw them, too.

    Raises ValueError for another `held` or `time`.
    """
    one_of("held", held, HELD)
    schedule, spans = simulation.schedule, spans_by_rank(simulation)
    if held == "bytes":
        lines = [held_bytes(simulation, rank) for rank in range(schedule.ranks)]
        peaks = [simulation.peak_bytes(rank) for rank in range(schedule.ranks)]
        tops = [(peak, f"peak {format_bytes(peak)}") for peak in peaks]
    else:
        lines = [held_micro_batches(own) for own in spans]
        tops = [bound(schedule, rank) for rank in range(schedule.ranks)]
    head = f"{title or schedule.name}: {_ranks(schedule.ranks)}, {_micro_batches(schedule.micro_batches)}"
    sent = [(one.begin, one.rank, one.end, schedule.peer(one.action)) for one in simulation.messages]
    return _chart(spans, lines, tops, held, time, head, rows, sent if messages else ())


def held_bytes(simulation: Simulation, rank: int) -> list[tuple[float, int]]:
    """(seconds, bytes) of one rank, from each time on: what it holds before the first action, and after each."""
    own = sum(simulation.costs[stage].static_bytes for stage in simulation.schedule.stages_of(rank))
    return [(0.0, own)] + [(moment.seconds, moment.nbytes) for moment in simulation.line(rank)]


def draw_measured(
    spans: Sequence[Sequence[Span]],
    *,
    title: str = "measured",
    time: str = "ms",
    same_clock: bool = True,
    rows: int = 0,
) -> Picture:
    """The same chart of what real ranks have measured, with micro-batches in flight below.

    spans: for each rank its `Pipeline.spans`. same_clock: as of `spans_by_rank`; `time.perf_counter` of processes on
    one Linux machine is one clock. Raises ValueError where there are none.
    """
    ranks = spans_by_rank(spans, same_clock)
    numbers = len({span.action.micro_batch for own in ranks for span in own})
    head = f"{title}: {_ranks(len(ranks))}, {_micro_batches(numbers)}"
    lines = [held_micro_batches(own) for own in ranks]
    return _chart(ranks, lines, [None] * len(ranks), "micro-batches", time, head, rows)


def _chart(spans, lines, tops, held: str, time: str, head: str, rows: int, sent=()) -> Picture:
    """The two axes. lines: (seconds, held) of each rank; tops: of each its bound and formula, or None."""
    one_of("time", time, tuple(TIMES))
    unit, per_second = TIMES[time]
    whole, spare = whole_seconds(spans) * per_second, ROW * max(0, rows - len(spans))
    tall = ROW * max(len(spans), 2)
    height = 3.0 + tall + spare
    figure = Figure(figsize=(8, height), dpi=80)
    gantt, below = figure.subplots(2, height_ratios=(tall, 1.6), sharex=True)
    figure.subplots_adjust(0.085, (0.5 + spare) / height, RIGHT, 1 - 0.62 / height, hspace=0.56 / (tall + 1.6))
    draw_key(gantt, draw_rows(gantt, spans, per_second, sent=sent))
    gantt.tick_params(labelbottom=False)
    words = f"{head}: {time_words(whole_seconds(spans), time)}, idle {percent(idle_share(spans))} of the time"
    figure.suptitle(words, x=0.02, y=1 - 0.1 / height, ha="left", va="top", fontsize=LABEL_SIZE)
    name, scale = "micro-batches in flight", 1
    if held == "bytes":
        letters, scale = byte_unit(max(level for level, _ in tops))
        name = f"held ({letters})"
    said = _lines(below, lines, tops, held, scale, per_second, whole)
    finish(below, f"time ({unit})", name)
    below.xaxis.set_label_coords(0.5, -0.2)
    return Picture(
        figure,
        "A Gantt chart, a row for each rank and a box for each forward and backward, above lines of what each rank "
        f"holds. {words}. At most held: {said}.",
    )


def bound(schedule: Schedule, rank: int) -> tuple[float, str] | None:
    """How many micro-batches a rank has in flight at most, and how one computes it; None where no formula says so.

    Of a rank with several stages, as of `held_micro_batches`.
    """
    p, m, chunks = schedule.ranks, schedule.micro_batches, max(1, schedule.stages // schedule.ranks)
    known = {"GPipe": 1, "1F1B": 1, "interleaved 1F1B": chunks}
    if known.get(schedule.name) != chunks or schedule.stages != chunks * p:
        return None
    number = in_flight(schedule.name, rank, schedule.stages, m, chunks)
    if number != schedule.most_in_flight(schedule.stages_of(rank)):  # the name promises what the orders do not keep
        return None
    if schedule.name == "interleaved 1F1B":
        return number / chunks, f"{number / chunks:g} = {number} / {chunks}"
    return number, f"{number} = m" if number == m else f"{number} = min({p} − {rank}, {m})"


def _lines(axes: Axes, lines, tops, held: str, scale: float, per_second: float, whole: float) -> str:
    """Steps of what each rank holds, its number where it first holds most; to the right how much that is."""
    levels: dict[float, list[int]] = {}
    marked: list[tuple[float, float]] = []
    for rank, line in enumerate(lines):
        times = [when * per_second for when, _ in line] + [whole]
        numbers = [number / scale for _, number in line]
        numbers.append(numbers[-1])
        look = {"color": LINE_COLOURS[rank % 7], "linestyle": LINE_STYLES[rank % 8], "linewidth": 1.3}
        axes.step(times, numbers, where="post", **look)
        most = max(numbers)
        level = tops[rank][0] / scale if held == "bytes" else most
        levels.setdefault(level, []).append(rank)
        first = numbers.index(most)
        if all(abs(times[first] - other) > 0.022 * whole for height, other in marked if height == most):
            marked.append((most, times[first]))
            axes.plot(times[first], most, "o", markersize=9, color="white", markeredgecolor=look["color"], zorder=3)
            axes.text(times[first], most, str(rank), ha="center", va="center_baseline", fontsize=7, zorder=4)
    top = max(levels)
    for limit in tops:
        if limit is not None:
            axes.axhline(limit[0] / scale, color="black", linewidth=0.6, linestyle=":", zorder=0)
    said, heights = [], _apart(sorted(levels), 0.095 * top)
    for height, (level, ranks) in zip(heights, sorted(levels.items()), strict=True):
        who = _which(ranks)
        number = format_bytes(round(level * scale)) if held == "bytes" else f"{level:g}"
        formulas = {tops[rank][1] for rank in ranks if tops[rank] is not None and tops[rank][1]}
        words = f"{who}: {formulas.pop() if len(formulas) == 1 else number}"
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": SMALL_SIZE}
        axes.text(1.012, height, words, **place)
        said.append(f"{number} on {who}")
    axes.set_ylim(0, top * 1.15 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=held != "bytes"))
    return "; ".join(reversed(said))


def _apart(levels: Sequence[float], gap: float) -> list[float]:
    """Heights near these ascending levels that are `gap` apart, for words beside them."""
    heights: list[float] = []
    for level in levels:
        heights.append(max(level, heights[-1] + gap) if heights else level)
    lift = sum(heights) / len(heights) - sum(levels) / len(levels)
    return [height - lift for height in heights]


# ---- several schedules


def draw_trip(stages: int = 4, micro_batches: int = 4, backward: float = 2.0) -> Picture:
    """One batch on its way through all stages, three times over: whole, and in micro-batches by GPipe and by 1F1B.

    backward: how many forwards' time one takes. A forward of a micro-batch takes 1, the whole batch's `micro_batches`.
    """
    cost = StageCost(forward_seconds=1.0, backward_seconds=backward)
    whole = StageCost(forward_seconds=float(micro_batches), backward_seconds=backward * micro_batches)
    panels = {
        "the whole batch at once": simulate(gpipe(stages, 1), whole),
        f"GPipe, {_micro_batches(micro_batches)}": simulate(gpipe(stages, micro_batches), cost),
        f"1F1B, {_micro_batches(micro_batches)}": simulate(one_forward_one_backward(stages, micro_batches), cost),
    }
    return draw_schedules(panels, follow=0)


# ---- words


def most_words(spans: Sequence[Sequence[Span]]) -> str:
    """How many micro-batches each rank has in flight at most."""
    return ", ".join(f"{max(number for _, number in held_micro_batches(own)):g}" for own in spans)


def _which(ranks: Sequence[int]) -> str:
    """Ascending ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    in_a_row = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return "ranks " + (f"{ranks[0]}–{ranks[-1]}" if in_a_row else ", ".join(map(str, ranks)))


def _ranks(number: int) -> str:
    return f"{number} ranks" if number > 1 else "1 rank"


def _micro_batches(number: int) -> str:
    return f"{number} micro-batches" if number > 1 else "1 micro-batch"
