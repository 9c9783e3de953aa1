"""Pictures of runs that are watched: ends and peaks over the steps with a forecast, levels side by side, judgements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from memlab.book.style import (
    LABEL_SIZE,
    LINE_COLOURS,
    LINE_STYLES,
    SMALL_SIZE,
    Picture,
    budget_bytes,
    budget_words,
    byte_unit,
    canvas,
    draw_budget,
    finish,
)
from memlab.memory_monitoring import Alarm, Forecast, Monitor, StepHistory
from memlab.units import format_bytes

END_COLOUR, PEAK_COLOUR = LINE_COLOURS[:2]
MOST_AHEAD = 4  # a fan may be drawn as far as so many times the steps that were seen


def draw_run(
    run: StepHistory | Monitor,
    budget: int | str | None = None,
    forecast: Forecast | None = None,
    called_at: int | None = None,
    title: str = "",
    with_peaks: bool = True,
) -> Picture:
    """A run's ends and peaks over its steps, with the budget, and the forecast as a fan from where the run was called.

    run: a Monitor brings its own budget and the forecast of its first alarm about growth.
    called_at: the step of the call; the forecast's own, unless given. with_peaks: False draws the ends alone, large.
    Raises ValueError for a budget of 0.
    """
    level, before = "bytes", 0
    if isinstance(run, Monitor):
        budget = run.budget_bytes if budget is None else budget
        forecast = called(run.alarms) if forecast is None else forecast
        run, level, before = run.history, run.watch or "bytes", run.steps - run.history.steps
    limit = budget_bytes(budget)
    at, ends, peaks = points(run)
    at = [before + step for step in at]
    if forecast is not None and called_at is None:
        called_at = forecast.step
    figure, axes = canvas(8, 3.6, right=0.3, bottom=0.85)
    highest = max([*(peaks if with_peaks else ()), *ends, limit or 0])
    unit, scale = byte_unit(highest)
    last = max(before + run.steps, 1)
    most = last if forecast is None else fan_end(forecast, last)
    if forecast is not None:
        draw_fan(axes, forecast, scale, most)
    if with_peaks:
        dashed = {"color": PEAK_COLOUR, "linestyle": "--", "linewidth": 1}
        axes.plot(at, [n / scale for n in peaks], label="peak of each step", **dashed)
    axes.plot(at, [n / scale for n in ends], color=END_COLOUR, linewidth=1.6, label="end of each step")
    draw_budget(axes, limit, scale)
    if called_at is not None:
        axes.axvline(called_at, color="black", linewidth=0.8, linestyle=":")
        place = {"transform": axes.get_xaxis_transform(), "va": "bottom", "ha": "center"}
        axes.text(called_at, 1.01, f"called at step {called_at:,}", fontsize=SMALL_SIZE, style="italic", **place)
    axes.set_xlim(0, most)
    axes.set_ylim(0, highest / scale * 1.12 or 1)
    finish(axes, "step", f"{level} ({unit})", title)
    draw_legend(axes)
    return Picture(figure, _run_words(run, level, limit, forecast, called_at, most))


def draw_levels(
    levels: Mapping[str, Sequence[int]],
    polled: Iterable[tuple[float, int]] = (),
    title: str = "",
    poll: str = "nvidia-smi --loop=1",
) -> Picture:
    """What each level shows of one run: bytes at the end of each step, as stairs, and what a polling tool was told.

    levels: name → bytes by step. polled: (step, bytes) of each look; between two looks nothing is known.
    Raises ValueError for no level.
    """
    if not levels:
        raise ValueError("expected at least one level, as {'allocated': [bytes, …]}; found none")
    looks = list(polled)
    figure, axes = canvas(8, 3.8, right=0.3, bottom=1.05)
    unit, scale = byte_unit(max([n for series in levels.values() for n in series] + [n for _, n in looks], default=0))
    for number, (name, series) in enumerate(levels.items()):
        axes.step(
            range(1, len(series) + 1),
            [n / scale for n in series],
            where="post",
            color=LINE_COLOURS[number % len(LINE_COLOURS)],
            linestyle=LINE_STYLES[number % len(LINE_STYLES)],
            linewidth=1.5,
            label=name,
        )
    if looks:
        at, seen = zip(*looks, strict=True)
        axes.plot(at, [n / scale for n in seen], "o", color="black", markersize=5, fillstyle="none", label=poll)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    finish(axes, "step", f"bytes ({unit})", title)
    draw_legend(axes)
    said = "; ".join(
        f"{name} from {format_bytes(series[0])} to {format_bytes(series[-1])}, {changes(series)} changes"
        for name, series in levels.items()
        if series
    )
    seen = f" {poll} sees {len(looks)} points of it." if looks else ""
    return Picture(figure, f"Stairs of bytes over steps at each level of one run: {said or 'nothing'}.{seen}")


def draw_judged(judgements: Iterable, title: str = "", late: float = 0.8) -> Picture:
    """For each judged program a dot: the share of the budget that was full when it was called, or none.

    judgements: those of `memlab.book.watched_programs.judge`. late: the share from which a call comes too late, drawn
    as a line. Raises ValueError for no judgements.
    """
    judged = list(judgements)
    if not judged:
        raise ValueError("expected at least one judgement, found none")
    kinds = kinds_of(judged)
    never = 1.12
    figure, axes = canvas(8, 1.3 + 0.32 * len(kinds), left=1.9, right=0.3, bottom=0.75)
    for row, kind in enumerate(kinds):
        shares = sorted(one.share for one in judged if one.watched.kind == kind and one.called_at is not None)
        silent = sum(one.watched.kind == kind and one.called_at is None for one in judged)
        heights = [row + 0.22 * ((place % 3) - 1) for place in range(len(shares))]  # dots of one share lie side by side
        marker, colour = ("X", LINE_COLOURS[1]) if kind == "clean" else ("o", LINE_COLOURS[0])
        axes.plot(shares, heights, marker, color=colour, markersize=5, markeredgecolor="black", markeredgewidth=0.4)
        if silent:
            axes.text(never, row, f"{silent}", ha="center", va="center", fontsize=LABEL_SIZE)
    axes.axvline(late, color="black", linestyle="--", linewidth=1)
    axes.axvline(1.04, color="black", linewidth=0.6)
    top = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": SMALL_SIZE}
    axes.text(late, 1.01, "too late from here on", **top)
    axes.text(never, 1.01, "never called", **top)
    axes.set_xlim(0, 1.2)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"])
    finish(axes, "share of the budget that was full at the call", "", title)
    return Picture(figure, f"Dots of when each judged program was called. {judged_words(judged, late)}")


# ---- parts of pictures


def draw_fan(axes: Axes, forecast: Forecast, scale: int, most: float) -> None:
    """A forecast on axes of steps and bytes: from its peak to the budget. scale: bytes of the unit; most: last step."""
    start, full = forecast.peak_bytes / scale, forecast.budget_bytes / scale
    first, last = forecast.step + forecast.earliest, forecast.step + forecast.latest
    if math.isfinite(last):
        corners = [(forecast.step, start), (first, full), (last, full)]
    else:  # its slow end never fills the budget
        corners = [(forecast.step, start), (first, full), (max(most, first), full), (most, start)]
    axes.fill(*zip(*corners, strict=True), facecolor="#DDDDDD", edgecolor="#777777", hatch="...", linewidth=0.6)
    axes.plot([], [], color="#777777", linewidth=6, alpha=0.5, label="forecast, earliest to latest")
    if math.isfinite(forecast.steps_left):
        axes.plot([forecast.step, forecast.step + forecast.steps_left], [start, full], color="black", linewidth=1)


def draw_legend(axes: Axes) -> None:
    """The lines' names under the axes, in one row."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "frameon": False, "fontsize": SMALL_SIZE}
    axes.legend(ncols=5, **place)


# ---- what is drawn, in numbers


def points(history: StepHistory) -> tuple[list[int], list[int], list[int]]:
    """For each block its last step, the least that was held at an end, and the highest peak."""
    ends, peaks = list(history.ends), list(history.peaks)
    count = min(len(ends), len(peaks))  # the training may be between its two appends
    at = [min((block + 1) * history.steps_in_block, history.steps) for block in range(count)]
    return at, ends[:count], peaks[:count]


def called(alarms: Iterable[Alarm]) -> Forecast | None:
    """The forecast of the first alarm that has one; None while no run is called."""
    return next((alarm.forecast for alarm in list(alarms) if alarm.forecast is not None), None)


def fan_end(forecast: Forecast, steps: int) -> float:
    """The last step to draw: where the fan ends, but at most `MOST_AHEAD` times the steps that were seen."""
    return min(max(forecast.step + forecast.latest, steps), MOST_AHEAD * max(steps, forecast.step, 1))


def full_words(forecast: Forecast, most: float) -> str:
    """From when to when a forecast's budget is full, in words; `most`: the last step that is drawn."""

    def at(left: float) -> str:
        step = forecast.step + left
        if math.isinf(step):
            return "never"
        return f"step {step:,.0f}" if step <= most else f"a step beyond {most:,.0f}"

    return f"between {at(forecast.earliest)} and {at(forecast.latest)}"


def changes(series: Sequence[int]) -> int:
    """How many times a level's figure moves from one step to the next."""
    return sum(a != b for a, b in zip(series, series[1:], strict=False))


def kinds_of(judged: Sequence) -> list[str]:
    """The kinds of programs in order, the clean ones last."""
    return sorted({one.watched.kind for one in judged}, key=lambda kind: (kind == "clean", kind))


def judged_words(judged: Sequence, late: float = 0.8) -> str:
    """Judgements in a sentence for each kind."""
    parts = []
    for kind in kinds_of(judged):
        group = [one for one in judged if one.watched.kind == kind]
        said = [one.share for one in group if one.called_at is not None]
        latest = f", the latest at {max(said):.0%} of the budget" if said else ""
        too_late = sum(share > late for share in said)
        parts.append(
            f"{kind}: {len(said)} of {len(group)} called{latest}"
            + (f", {too_late} of them too late" if too_late and kind != "clean" else "")
        )
    return "; ".join(parts) + "."


def _run_words(
    history, level: str, limit: int | None, forecast: Forecast | None, called_at: int | None, most: float
) -> str:
    if not history.steps:
        return f"Nothing is drawn yet: the run has made no step.{budget_words(limit)}"
    _, ends, peaks = points(history)
    said = (
        f"Lines of {level} over {history.steps:,} steps: at the steps' ends from {format_bytes(ends[0])} to "
        f"{format_bytes(ends[-1])}, at their peaks up to {format_bytes(max(peaks))}.{budget_words(limit)}"
    )
    if forecast is None:
        return f"{said} No growth was called."
    when = full_words(forecast, most)
    return f"{said} The run was called at step {called_at:,}: a fan shows the budget full {when}."
