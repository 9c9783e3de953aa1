"""A Gantt chart of a pipeline: a row a rank, a box a computation, and what is left white is the bubble.

The same chart shows a simulation and what real ranks have measured (`Pipeline.spans`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from memlab.book.spans import Played, held_micro_batches, idle_share, percent, spans_by_rank, whole_seconds
from memlab.book.style import LABEL_SIZE, LINE_COLOURS, SMALL_SIZE, Picture
from memlab.checking import one_of
from memlab.pipeline_parallelism import Span
from memlab.pipeline_parallelism.schedule import BACKWARD, FORWARD

LOOKS = {
    FORWARD: (("#D6EAF5", ""), ("#8CC3E4", "..."), ("#D6EAF5", "ooo"), ("#8CC3E4", "+++")),
    BACKWARD: (("#F0B03F", "///"), ("#CC8400", "\\\\\\"), ("#F0B03F", "xxx"), ("#CC8400", "---")),
}
"""Kind → for a rank's first, second … stage the box's colour and hatching."""
TIMES = {"forwards": ("one forward = 1", 1.0), "s": ("s", 1.0), "ms": ("ms", 1e3)}
ROW = 0.29  # inches for a rank
RIGHT = 0.8  # of the figure's width, where the axes end and words begin


def draw_rows(
    axes: Axes,
    spans: Sequence[Sequence[Span]],
    per_second: float,
    until: float = 0.0,
    follow: int | None = None,
    sent: Sequence[tuple[float, int, float, int]] = (),
) -> set[tuple[str, int]]:
    """Boxes with their micro-batch's number, where it fits; to the right of each row how long the rank idles.

    until: seconds at the axis' end, if not where the spans end. follow: a micro-batch whose way is drawn.
    sent: messages to draw, as (begins, from rank, ends, to rank). Returns which boxes there are, for `draw_key`.
    """
    whole = whole_seconds(spans) * per_second
    axes.set_xlim(0, max(whole, until * per_second))
    groups: dict[tuple[str, int], list] = {}
    numbers: dict[bool, list] = {False: [], True: []}
    pixels = 8 * 90 * 0.71 / axes.get_xlim()[1]
    for rank, own in enumerate(spans):
        stages = sorted({span.action.stage for span in own})
        for span in own:
            kind, begin, end = span.action.kind, span.begin * per_second, span.end * per_second
            y, number = rank, str(span.action.micro_batch)
            box = [(begin, y - 0.36), (end, y - 0.36), (end, y + 0.36), (begin, y + 0.36)]
            groups.setdefault((kind, stages.index(span.action.stage)), []).append(box)
            if (end - begin) * pixels > 2.5 + 6.3 * len(number):
                numbers[kind == BACKWARD].append(((begin + end) / 2, y, number))
    for (kind, chunk), boxes in sorted(groups.items(), key=lambda group: (group[0][0] == BACKWARD, group[0][1])):
        colour, hatch = LOOKS[kind][chunk % 4]
        path = Path.make_compound_path_from_polys(np.array(boxes))  # one, so that it is hatched once
        axes.add_artist(PathPatch(path, facecolor=colour, edgecolor="#777777", hatch=hatch, linewidth=0))
        axes.add_artist(PathPatch(path, facecolor="none", edgecolor="black", linewidth=0.5))
    for boxed, places in numbers.items():
        _numbers(axes, places, boxed)
    if sent:
        _messages(axes, sent, per_second)
    if follow is not None:
        _follow(axes, spans, per_second, follow)
    for rank, own in enumerate(spans):
        busy = sum(span.end - span.begin for span in own) * per_second
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": SMALL_SIZE}
        axes.text(1.012, rank, f"idle {percent(1 - busy / whole)}", **place)
    axes.hlines([rank + 0.36 for rank in range(len(spans))], 0, whole, color="black", linewidth=0.4, zorder=0)
    axes.set_ylim(max(len(spans), 2) - 0.45, -0.55)
    axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))], fontsize=SMALL_SIZE)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=SMALL_SIZE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return set(groups)


def draw_key(axes: Axes, groups: set[tuple[str, int]], lift: float = 0.0) -> None:
    """What the boxes mean: of each kind, and of a rank's first, second … stage. lift: inches above the chart."""
    several = max(chunk for _, chunk in groups) > 0
    up = 1 + lift * axes.figure.dpi / axes.get_window_extent().height
    handles = [
        Patch(
            facecolor=LOOKS[kind][chunk % 4][0],
            hatch=LOOKS[kind][chunk % 4][1],
            edgecolor="black",
            linewidth=0.5,
            label=kind + (f", {('1st', '2nd', '3rd', '4th')[chunk % 4]} stage" if several else ""),
        )
        for kind, chunk in sorted(groups, key=lambda group: (group[0] == BACKWARD, group[1]))
    ]
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, up), "borderaxespad": 0.1}
    axes.legend(handles=handles, frameon=False, fontsize=SMALL_SIZE, ncols=4, columnspacing=1.2, **place)


def _numbers(axes: Axes, places: Sequence[tuple[float, float, str]], boxed: bool) -> None:
    """Many small numbers at once; as paths, since so many texts would take most of the time of drawing."""
    if not places:
        return
    scale = Affine2D().scale(axes.figure.dpi / 72)
    at = [(x, y) for x, y, _ in places]
    for kind, colour in ((1, "white"), (0, "black")) if boxed else ((0, "black"),):
        paths = [_number(number)[kind] for *_, number in places]
        marks = PathCollection(paths, facecolor=colour, linewidth=0, offsets=at, offset_transform=axes.transData)
        marks.set_transform(scale)
        axes.add_collection(marks)


@functools.lru_cache(maxsize=256)
def _number(text: str) -> tuple[Path, Path]:
    """A number's path around (0, 0), in points, and that of a box which it fits into."""
    path = TextPath((0, 0), text, size=SMALL_SIZE)
    box = path.get_extents()
    path = path.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))
    across, up = box.width / 2 + 1.2, box.height / 2 + 1.2
    return path, Path([(-across, -up), (across, -up), (across, up), (-across, up), (-across, -up)], closed=True)


def _messages(axes: Axes, sent: Sequence[tuple[float, int, float, int]], per_second: float) -> None:
    """A thin line for each message, from its sender's row to its receiver's, with a point where it arrives."""
    ways = []
    for begin, sender, end, receiver in sent:
        down = 0.36 if receiver > sender else -0.36
        ways.append([(begin * per_second, sender + down), (end * per_second, receiver - down)])
    axes.add_collection(LineCollection(ways, color="black", linewidth=0.7, zorder=3))
    x, y = zip(*(way[1] for way in ways), strict=True)
    axes.plot(x, y, ".", color="black", markersize=3, zorder=3)


def _follow(axes: Axes, spans: Sequence[Sequence[Span]], per_second: float, micro_batch: int) -> None:
    """Thick frames around one micro-batch's boxes, and a line from each to the next."""
    own = [(span, rank) for rank, one in enumerate(spans) for span in one if span.action.micro_batch == micro_batch]
    own.sort(key=lambda pair: pair[0].begin)
    boxes = []
    for span, rank in own:
        begin, end = span.begin * per_second, span.end * per_second
        boxes.append([(begin, rank - 0.36), (end, rank - 0.36), (end, rank + 0.36), (begin, rank + 0.36)])
    axes.add_collection(PolyCollection(boxes, facecolor="none", edgecolor="black", linewidth=1.8, zorder=3))
    steps = [
        [
            (one.end * per_second, rank + 0.36 * (rank == other)),
            (following.begin * per_second, other + 0.36 * (rank == other)),
        ]
        for (one, rank), (following, other) in zip(own, own[1:], strict=False)
    ]
    axes.add_collection(LineCollection(steps, color=LINE_COLOURS[1], linewidth=1.4, zorder=4))


# ---- several schedules


def draw_schedules(
    panels: Mapping[str, Played], *, time: str = "forwards", follow: int | None = None, title: str = ""
) -> Picture:
    """Gantt charts one below the other over one time axis. panels: title → a simulation, or each rank's measured spans.

    follow: a micro-batch whose way is drawn in thick frames. Raises ValueError for no panel, or another `time`.
    """
    one_of("time", time, tuple(TIMES))
    if not panels:
        raise ValueError("expected at least one schedule, as {'GPipe': simulation}; found none")
    unit, per_second = TIMES[time]
    spans = {name: spans_by_rank(played) for name, played in panels.items()}
    until = max(map(whole_seconds, spans.values()))
    tall = [ROW * max(len(own), 2) for own in spans.values()]
    interleaved = any(len({span.action.stage for span in one}) > 1 for own in spans.values() for one in own)
    above = 0.4 + 0.25 * bool(title) + 0.2 * interleaved  # inches: the long key stands above the first panel's words
    height = 0.25 + above + sum(tall) + 0.5 * len(spans)
    figure = Figure(figsize=(8, height), dpi=80)
    all_axes = figure.subplots(len(spans), height_ratios=tall, sharex=True, squeeze=False)[:, 0]
    between = 0.5 / (sum(tall) / len(tall))
    figure.subplots_adjust(0.085, 0.5 / height, RIGHT, 1 - above / height, hspace=between)
    said, groups = [], set()
    for axes, (name, own) in zip(all_axes, spans.items(), strict=True):
        groups |= draw_rows(axes, own, per_second, until, follow)
        most = [max(number for _, number in held_micro_batches(one)) for one in own]
        words = f"{name}: {time_words(whole_seconds(own), time)}, idle {percent(idle_share(own))}"
        axes.set_title(words, fontsize=LABEL_SIZE, loc="left", pad=4, y=1.0)
        said.append(f"{words}, at most in flight on each rank {', '.join(f'{one:g}' for one in most)}")
    draw_key(all_axes[0], groups, 0.2 * interleaved)
    all_axes[-1].set_xlabel(f"time ({unit})", fontsize=LABEL_SIZE)
    if title:
        figure.suptitle(title, x=0.02, y=1 - 0.08 / height, ha="left", va="top", fontsize=LABEL_SIZE)
    followed = "" if follow is None else f" Thick frames follow micro-batch {follow}."
    return Picture(figure, f"Gantt charts, a row for each rank. {'; '.join(said)}.{followed}")


def time_words(seconds: float, time: str) -> str:
    """Seconds in words, in one of TIMES."""
    unit, per_second = TIMES[time]
    unit = "forwards long" if time == "forwards" else unit
    return f"{seconds * per_second:.4g} {unit}"
