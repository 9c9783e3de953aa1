"""A ring of ranks, drawn: which piece is where after each step; and a rank's memory above the bytes it sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from memlab.book.figures import stack
from memlab.book.interactive import Interactive
from memlab.book.style import (
    COLOURS,
    LABEL_SIZE,
    LINE_COLOURS,
    SMALL_SIZE,
    Picture,
    byte_unit,
    finish,
)
from memlab.book.tables import Table
from memlab.data_parallelism import Move, all_gather_moves, reduce_scatter_moves
from memlab.memory_timeline import Timeline
from memlab.ranks import Message
from memlab.units import format_bytes

# ---- the ring

SHADES = ("#FFFFFF", "#FDF3D6", "#FBE3A6", "#F2C45A")
Parts = list[list[frozenset[int]]]
"""parts[rank][piece]: the ranks whose gradients are summed in what this rank has of this piece."""


def ring_moves(ranks: int) -> list[list[Move]]:
    """An all-reduce step by step: what each rank sends and receives, reduce-scatter, then all-gather."""
    halves = (
        [reduce_scatter_moves(rank, ranks) for rank in range(ranks)],
        [all_gather_moves(rank, ranks) for rank in range(ranks)],
    )
    return [list(step) for half in halves for step in zip(*half, strict=True)]


def ring_parts(ranks: int, steps: int) -> Parts:
    """Who has what after so many steps of an all-reduce; all 2·(N-1) and beyond: the end."""
    parts = [[frozenset([rank])] * ranks for rank in range(ranks)]
    for number, moves in enumerate(ring_moves(ranks)[:steps]):
        before = [list(row) for row in parts]
        for rank, move in enumerate(moves):
            sent = before[(rank - 1) % ranks][move.receive]
            parts[rank][move.receive] = before[rank][move.receive] | sent if number < ranks - 1 else sent
    return parts


def draw_ring(ranks: int = 4, step: int = 0) -> Picture:
    """A grid of ranks and pieces after so many steps of an all-reduce; arrows: what is sent in the next one.

    In each cell: the ranks whose numbers are summed there (their count, with more than 6 ranks). A thick frame and
    hatching: complete. Raises ValueError for fewer than 2 ranks, or a step that is not from 0 to 2·(ranks - 1).
    """
    last = 2 * (ranks - 1)
    if ranks < 2 or not 0 <= step <= last:
        raise ValueError(f"expected at least 2 ranks and a step from 0 to 2·(ranks - 1), found {ranks} and {step}")
    parts = ring_parts(ranks, step)
    figure = Figure(figsize=(8, 1.3 + 0.55 * ranks), dpi=90)
    height = 1.3 + 0.55 * ranks
    axes = figure.subplots()
    figure.subplots_adjust(0.1, 0.12 / height, 0.98, 1 - 0.85 / height)
    cells: dict[tuple[str, bool], list] = {}
    for rank, row in enumerate(parts):
        for piece, summed in enumerate(row):
            whole = len(summed) == ranks
            shade = COLOURS["optimizer_state"] if whole else SHADES[min(3, 4 * (len(summed) - 1) // max(1, ranks - 1))]
            x, y = (piece - 0.4, piece + 0.4), (rank - 0.35, rank + 0.35)
            cells.setdefault((shade, whole), []).append([(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1])])
            text = "+".join(map(str, sorted(summed))) if ranks <= 6 else str(len(summed))
            box = {"boxstyle": "square,pad=0.15", "facecolor": "white", "linewidth": 0} if whole else None
            axes.text(piece, rank, text, ha="center", va="center", fontsize=SMALL_SIZE, bbox=box)
    for (shade, whole), boxes in cells.items():
        look = {"facecolor": shade, "edgecolor": "black", "linewidth": 2.0 if whole else 0.5}
        axes.add_collection(PolyCollection(boxes, hatch="\\\\\\" if whole else "", **look))
    moves = ring_moves(ranks)[step] if step < last else []
    # The last rank's arrow leaves at the bottom and comes in again at the top.
    spans = [(move.send + 0.3, rank + 0.22, rank + 0.8) for rank, move in enumerate(moves)]
    spans += [(move.send + 0.3, -0.6, -0.25) for move in moves[-1:]]
    if spans:
        x, begin, end = zip(*spans, strict=True)
        look = {"color": LINE_COLOURS[1], "zorder": 3}
        axes.vlines(x, begin, end, linewidth=1.8, **look)
        heads = [span for span in spans if span != spans[-2]]
        axes.plot([head[0] for head in heads], [head[2] for head in heads], "v", markersize=7, **look)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_ylim(ranks - 0.15, -0.65)
    axes.set_xticks(range(ranks), [f"piece {piece}" for piece in range(ranks)], fontsize=SMALL_SIZE)
    axes.xaxis.tick_top()
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=SMALL_SIZE)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    done = sum(len(summed) == ranks for row in parts for summed in row)
    half = "all-gather" if step >= ranks - 1 else "reduce-scatter"
    following = f"next, in the {half}, " + _words(moves) if moves else "the end"
    head = f"After {step} of {last} steps: {done} of {ranks * ranks} pieces are complete"
    figure.suptitle(head, x=0.02, ha="left", fontsize=LABEL_SIZE)
    return Picture(figure, f"A grid of {ranks} ranks and {ranks} pieces. {head}; {following}.")


def _words(moves: Sequence[Move]) -> str:
    ranks = len(moves)
    said = (f"rank {rank} sends piece {move.send} to rank {(rank + 1) % ranks}" for rank, move in enumerate(moves))
    return ", ".join(said)


def explore_ring(ranks: int = 4) -> Interactive:
    """A slider for the step of a ring's all-reduce."""

    def draw(step: int = 0) -> Picture:
        return draw_ring(ranks, step)

    return Interactive(draw, step=range(2 * (ranks - 1) + 1))


# ---- a rank's memory, and what it sends


def draw_sent(timeline: Timeline, records: Iterable[Message], title: str = "") -> Picture:
    """A rank's bytes over a step, stacked by category, above the bytes that it sends, at the events where it sends.

    A dotted line: where backward ends. records: of a `Traffic` inside the same Meter's block; those that only receive
    are left out.
    Raises ValueError for records that no Meter was open for, which have no event.
    """
    records = [record for record in records if record.sent_bytes]
    if any(record.event is None for record in records):
        raise ValueError("expected records with an event, found some without; open Traffic inside the Meter's block")
    figure = Figure(figsize=(8, 4.8), dpi=90)
    upper, lower = figure.subplots(2, height_ratios=(5, 3), sharex=True)
    figure.subplots_adjust(0.1, 0.11, 0.98, 0.86, hspace=0.24)
    events = range(len(timeline) + 1)
    unit, scale = byte_unit(timeline.peak_bytes)
    stack(upper, timeline, events, scale, lambda category: category.replace("_", " "))
    upper.plot(timeline.peak_event, timeline.peak_bytes / scale, "v", color="black", markersize=7)
    upper.set_ylim(0, timeline.peak_bytes / scale * 1.12 or 1)
    upper.set_xlim(0, max(len(timeline), 1))
    upper.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=SMALL_SIZE, ncols=6, columnspacing=1.2
    )
    finish(upper, "", f"held, storages ({unit})")
    sent_unit, sent_scale = byte_unit(max((record.sent_bytes for record in records), default=1))
    totals = []
    for number, (name, own) in enumerate(_by_name(records).items()):
        look = {"color": LINE_COLOURS[number % 7], "marker": "osD^vPX"[number % 7], "markersize": 4 + 2 * (number % 2)}
        line = {"color": look["color"], "linewidth": 1.2}
        if number % 2:  # hollow and dashed, so that it can lie over another and both are seen
            look, line = look | {"markerfacecolor": "none"}, line | {"linestyles": "dashed"}
        at, nbytes = [record.event for record in own], [record.sent_bytes / sent_scale for record in own]
        lower.vlines(at, 0, nbytes, **line)
        lower.plot(at, nbytes, linestyle="", label=name, **look)
        totals.append(f"{len(own)} × {name}, {format_bytes(sum(record.sent_bytes for record in own))}")
    lower.set_ylim(0, 1.15 * max((record.sent_bytes for record in records), default=1) / sent_scale)
    if totals:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "borderaxespad": 0}
        lower.legend(**place, frameon=False, fontsize=SMALL_SIZE, ncols=3)
    ends = [span.stop for span in timeline.phases if span.phase in ("backward", "recompute")]
    for axes in (upper, lower):
        axes.axvline(ends[-1] if ends else 0, color="black", linewidth=0.9, linestyle=":")
    finish(lower, "event (an allocation or a free)", f"sent ({sent_unit})")
    whole = sum(record.sent_bytes for record in records)
    said = f"peak {format_bytes(timeline.peak_bytes)}; sends {format_bytes(whole)} in {len(records)} calls"
    figure.suptitle(f"{title}: {said}" if title else said, x=0.02, ha="left", fontsize=LABEL_SIZE)
    parts = f" ({'; '.join(totals)})" if totals else ""
    return Picture(
        figure,
        f"Stacked areas of the bytes that a rank holds over {len(timeline)} events, above marks of the bytes it sends: "
        f"{said}{parts}. {f'Backward ends at event {ends[-1]}.' if ends else ''}".rstrip(),
    )


def sent_table(records: Iterable[Message]) -> Table:
    """The same as text: by name, how many calls there were and how many bytes this rank sent in them."""
    rows = []
    for name, own in _by_name(record for record in records if record.sent_bytes).items():
        nbytes = sum(record.sent_bytes for record in own)
        rows.append((name, len(own), format_bytes(nbytes), nbytes))
    return Table(["collective", "calls", "sent", "bytes"], rows)


def _by_name(records: Iterable[Message]) -> dict[str, list[Message]]:
    """Records by the collective's name, which says where bytes were counted, and where a formula gives them."""
    found: dict[str, list[Message]] = {}
    for record in records:
        found.setdefault(f"{record.name} ({'counted' if record.exact else 'by formula'})", []).append(record)
    return found
