"""The book's figures of timelines: one step by category, several on one axis, and bars against a card's capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes

from memlab.book.style import (
    COLOURS,
    HATCHES,
    LABEL_SIZE,
    LINE_COLOURS,
    LINE_STYLES,
    SMALL_SIZE,
    TITLE_SIZE,
    Picture,
    budget_bytes,
    budget_words,
    byte_unit,
    canvas,
    draw_budget,
    finish,
)
from memlab.memory_timeline import Timeline
from memlab.units import format_bytes

MOST_POINTS = 2000
STACKED = COLOURS | {"cached": "#FFFFFF"}  # an allocator's free blocks belong to no tensor, so they have no category


def plot(timeline: Timeline, budget: int | str | None = None, title: str = "") -> Picture:
    """A training step's memory: what is held after each event, stacked by category, with its phases and its peak.

    budget: bytes, or text such as "16 GiB"; drawn as a line. Raises ValueError for a budget of 0.
    """
    limit = budget_bytes(budget)
    figure, axes = canvas(8, 4, right=2.2)
    events = _sample(timeline)
    unit, scale = byte_unit(max(timeline.peak_bytes, limit or 0))
    at_peak = timeline.bytes_by_category(timeline.peak_event)
    stack(
        axes,
        timeline,
        events,
        scale,
        lambda category: f"{category.replace('_', ' ')}  {format_bytes(at_peak[category])}",
    )
    top = max(timeline.peak_bytes, limit or 0) / scale * 1.34 or 1
    axes.set_ylim(0, top)
    axes.set_xlim(0, max(len(timeline), 1))
    phases = _main_phases(timeline)
    for span in phases:
        axes.axvline(span.start - 1, color="black", linewidth=0.6, linestyle=":")
        place = {"transform": axes.get_xaxis_transform(), "va": "bottom"}
        axes.text(span.start, 1.01, span.phase, fontsize=LABEL_SIZE, style="italic", **place)
    peak = timeline.peak_event
    axes.plot(peak, timeline.peak_bytes / scale, "v", color="black", markersize=7)
    on_left = peak > len(timeline) * 0.55
    axes.annotate(
        _peak_words(timeline),
        (peak, timeline.peak_bytes / scale),
        xytext=(-10 if on_left else 10, 4),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="bottom",
        fontsize=SMALL_SIZE,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.75, "linewidth": 0},
    )
    draw_budget(axes, limit, scale)
    finish(axes, "event (an allocation or a free)", f"bytes held, {_level(timeline)} ({unit})", title)
    handles, labels = axes.get_legend_handles_labels()
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False, "fontsize": SMALL_SIZE}
    axes.legend(handles[::-1], labels[::-1], title="at the peak", **beside)
    return Picture(figure, _plot_alt(timeline, limit))


def stack(axes: Axes, timeline: Timeline, events: Sequence[int], scale: float, label: Callable[[str], str]) -> None:
    """Areas of what is held at these events, by category, one on the other. scale: bytes of the axis' unit."""
    shown = [category for category in COLOURS if any(timeline.curves[category])]
    if not shown:
        return
    areas = axes.stackplot(
        events,
        [[timeline.curves[category][i] / scale for i in events] for category in shown],
        labels=[label(category) for category in shown],
        colors=[COLOURS[category] for category in shown],
        step="post",
        edgecolor="black",
        linewidth=0.3,
    )
    for category, area in zip(shown, areas, strict=True):
        area.set_hatch(HATCHES.get(category))


def compare(
    timelines: Mapping[str, Timeline], budget: int | str | None = None, title: str = "", top: int | None = None
) -> Picture:
    """Several timelines as lines on one axis, each with its peak.

    top: bytes at the top of the axis, for pictures that are to be compared with one another.
    Raises TypeError for what is not a dict of timelines, ValueError for an empty one, or for a budget of 0.
    """
    _check_named(timelines)
    if not timelines:
        raise ValueError("expected at least one timeline to compare, as {'name': timeline}; found none")
    limit = budget_bytes(budget)
    rows = (len(timelines) + 1) // 2
    figure, axes = canvas(8, 3.2 + 0.2 * rows, bottom=0.65 + 0.2 * rows)
    highest = max(max(t.peak_bytes for t in timelines.values()), limit or 0, top or 0)
    unit, scale = byte_unit(highest)
    for number, (name, timeline) in enumerate(timelines.items()):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        events = _sample(timeline)
        axes.step(
            events,
            [timeline.totals[i] / scale for i in events],
            where="post",
            color=colour,
            linestyle=LINE_STYLES[number % len(LINE_STYLES)],
            linewidth=1.4,
            label=f"{name}: peak {format_bytes(timeline.peak_bytes)} {_peak_phase(timeline)}",
        )
        axes.plot(timeline.peak_event, timeline.peak_bytes / scale, "v", color=colour, markersize=7)
    axes.set_ylim(0, highest / scale * 1.1 or 1)
    axes.set_xlim(left=0)
    draw_budget(axes, limit, scale)
    finish(axes, "event (an allocation or a free)", f"bytes held, {_level(*timelines.values())} ({unit})", title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=LABEL_SIZE, ncols=2)
    peaks = "; ".join(f"{name} peaks at {format_bytes(t.peak_bytes)} {_peak_phase(t)}" for name, t in timelines.items())
    return Picture(
        figure, f"Lines of bytes held over the events of {len(timelines)} runs: {peaks}.{budget_words(limit)}"
    )


def _check_named(timelines: Mapping[str, Timeline]) -> None:
    """Raises TypeError for what is not a dict of timelines."""
    expected = "expected timelines as a dict, {'name': timeline}"
    if not isinstance(timelines, Mapping):
        raise TypeError(f"{expected}; found {type(timelines).__name__}")
    for name, timeline in timelines.items():
        if not isinstance(timeline, Timeline):
            raise TypeError(f"{expected}; found {type(timeline).__name__} for {name!r}")


def bars(
    rows: Mapping[str, Mapping[str, int]],
    budget: int | str | None = None,
    title: str = "",
    capacities: Mapping[str, int] | None = None,
) -> Picture:
    """Stacked horizontal bars, one a row, of bytes by category: where a model stands against a card's capacity.

    capacities: name → bytes of cards, each drawn as a thin line: those below the longest bar, and the first above.
    A row may have, beside categories, "cached": what an allocator has reserved and no tensor holds.
    Raises ValueError for no rows, an unknown category, or a budget of 0.
    """
    if not rows:
        raise ValueError("expected at least one row, as {'name': {'parameter': bytes, ...}}; found none")
    for name, parts in rows.items():
        if unknown := set(parts) - set(STACKED):
            raise ValueError(
                f"{name}: expected categories among {', '.join(STACKED)}; found {', '.join(sorted(unknown))}"
            )
    limit = budget_bytes(budget)
    highest = max(max(sum(parts.values()) for parts in rows.values()), limit or 0)
    cards = _cards_in_sight(capacities or {}, highest)
    highest = max(highest, *cards.values(), 0)
    unit, scale = byte_unit(highest)
    above = 0.7 if cards else 0.0
    figure, axes = canvas(
        8, 1.5 + above + 0.55 * len(rows), left=0.3 + 0.07 * max(map(len, rows)), top=0.6 + above, bottom=0.85
    )
    names = list(rows)
    left = [0.0] * len(names)
    for category, colour in STACKED.items():
        widths = [rows[name].get(category, 0) / scale for name in names]
        if any(widths):
            axes.barh(
                names,
                widths,
                left=left,
                color=colour,
                hatch=HATCHES.get(category),
                edgecolor="black",
                linewidth=0.4,
                label=category.replace("_", " "),
            )
            for y, (start, width) in enumerate(zip(left, widths, strict=True)):
                if width * scale > 0.07 * highest:
                    axes.text(
                        start + width / 2,
                        y,
                        f"{width:.1f}",
                        ha="center",
                        va="center",
                        fontsize=SMALL_SIZE,
                        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
                    )
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, width in enumerate(left):
        axes.annotate(
            f"{width:.1f}",
            (width, y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL_SIZE,
            fontweight="bold",
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.invert_yaxis()
    axes.set_xlim(0, highest / scale * 1.12 or 1)
    draw_budget(axes, limit, scale, vertical=True)
    for name, capacity in cards.items():
        axes.axvline(capacity / scale, color="black", linestyle=":", linewidth=1.2)
        place = {"transform": axes.get_xaxis_transform(), "rotation": 30, "ha": "left", "va": "bottom"}
        axes.text(capacity / scale, 1.01, name, fontsize=SMALL_SIZE, **place)
    finish(axes, f"bytes ({unit})", "", title)
    if cards:  # the title goes above their names
        axes.set_title(title, fontsize=TITLE_SIZE, loc="left", pad=58, y=1.0)
    figure.legend(loc="lower center", frameon=False, fontsize=SMALL_SIZE, ncols=len(STACKED))
    words = "; ".join(
        f"{name}: {format_bytes(sum(parts.values()))} ("
        + ", ".join(f"{category.replace('_', ' ')} {format_bytes(n)}" for category, n in parts.items())
        + ")"
        for name, parts in rows.items()
    )
    lines = ", ".join(f"{name} {format_bytes(capacity)}" for name, capacity in cards.items())
    beside = f" Dotted lines mark what cards have: {lines}." if lines else ""
    return Picture(figure, f"Stacked bars of bytes by category. {words}.{budget_words(limit)}{beside}")


# ---- what the figures share


def _cards_in_sight(capacities: Mapping[str, int], longest: int) -> dict[str, int]:
    """The cards whose line helps to judge a bar: those it has passed that it does not dwarf, and the first beyond."""
    ordered = sorted(capacities.items(), key=lambda card: card[1])
    passed = [card for card in ordered if card[1] < longest and card[1] > longest / 8]
    beyond = [card for card in ordered if card[1] >= longest]
    return dict(passed + beyond[:1] or ordered[-1:])


def _level(*timelines: Timeline) -> str:
    return "with kernels' workspace" if all(t.workspace for t in timelines) else "storages"


def _sample(timeline: Timeline) -> list[int]:
    """The events to draw: all, or in a long step the fullest of each of `MOST_POINTS` stretches; no peak is lost."""
    count = len(timeline) + 1
    if count <= MOST_POINTS:
        return list(range(count))
    edges = [count * i // MOST_POINTS for i in range(MOST_POINTS + 1)]
    chosen = {max(range(a, b), key=timeline.totals.__getitem__) for a, b in zip(edges, edges[1:], strict=False)}
    return sorted(chosen | {0, count - 1, timeline.peak_event})


def _main_phases(timeline: Timeline) -> Sequence:
    """The phases long enough to be labelled, and not a mere gap in a longer one."""
    spans = []
    for span in timeline.phases:
        if span.stop - span.start + 1 >= max(2, 0.03 * len(timeline)) and (not spans or spans[-1].phase != span.phase):
            spans.append(span)
    return spans


def _peak_phase(timeline: Timeline) -> str:
    peak = timeline.peak_event
    return f"in {timeline.events[peak - 1].phase}" if peak else "before the first op"


def _peak_words(timeline: Timeline) -> str:
    groups: dict[str, int] = {}
    for storage in timeline.alive(timeline.peak_event):
        if storage.phase != "before":
            groups[storage.line.source] = groups.get(storage.line.source, 0) + storage.nbytes
    words = [f"peak {format_bytes(timeline.peak_bytes)}; largest lines:"]
    for source, nbytes in sorted(groups.items(), key=lambda item: -item[1])[:3]:
        words.append(f"{format_bytes(nbytes)}  {source if len(source) <= 44 else source[:43] + '…'}")
    return "\n".join(words if groups else words[:1]).removesuffix("; largest lines:")


def _plot_alt(timeline: Timeline, limit: int | None) -> str:
    held = timeline.bytes_by_category(timeline.peak_event)
    parts = ", ".join(
        f"{c.replace('_', ' ')} {format_bytes(n)}" for c, n in sorted(held.items(), key=lambda item: -item[1]) if n
    )
    phases = ", ".join(span.phase for span in _main_phases(timeline)) or "none"
    return (
        f"Stacked area of bytes held over {len(timeline)} events (phases: {phases}): "
        f"{format_bytes(timeline.totals[0])} before the first op, "
        f"a peak of {format_bytes(timeline.peak_bytes)} {_peak_phase(timeline)} ({parts or 'nothing'}), "
        f"{format_bytes(timeline.totals[-1])} at the end.{budget_words(limit)}"
    )
