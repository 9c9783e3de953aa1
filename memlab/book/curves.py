"""Learning curves: the loss of several runs, step by step, on one axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from memlab.book.style import LABEL_SIZE, LINE_COLOURS, LINE_STYLES, Picture, canvas, finish


def first_nonfinite_step(losses: Sequence[float]) -> int | None:
    """The first step (from 1) whose loss is no finite number; None for a run that has only numbers."""
    return next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Each loss as the mean of itself and the `window` - 1 before it, as far as there are so many.

    Raises ValueError for a window below 1.

    >>> smoothed([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    if window < 1:
        raise ValueError(f"expected a window of at least 1 step, found {window}; 1 leaves the losses as they are")
    return [sum(losses[max(0, end - window) : end]) / min(end, window) for end in range(1, len(losses) + 1)]


def curves(runs: Mapping[str, Sequence[float]], title: str = "", window: int = 10) -> Picture:
    """Each run's loss over its steps, smoothed over `window` steps; a run that breaks ends in a cross.

    The first run is what the others are compared with: a broad line, so that one upon it can be told from it.

    Raises ValueError for no run, for one without a step, and for a window below 1.
    """
    if not runs or not all(map(len, runs.values())):
        raise ValueError(f"expected at least one run with losses, as {{'name': [2.5, 2.4]}}; found {runs!r}")
    rows = (len(runs) + 1) // 2
    figure, axes = canvas(8, 3.2 + 0.2 * rows, bottom=0.65 + 0.2 * rows)
    words = []
    for number, (name, losses) in enumerate(runs.items()):
        broken = first_nonfinite_step(losses)
        line = smoothed(losses[: broken - 1] if broken else losses, window)
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        style = {"color": colour, "linestyle": LINE_STYLES[number % len(LINE_STYLES)]}
        style |= {"linewidth": 1.4} if number else {"linewidth": 5, "alpha": 0.35}
        ends = f"breaks in step {broken}" if broken else f"ends at {line[-1]:.2f}"
        axes.plot(range(1, len(line) + 1), line, label=f"{name}: {ends}", **style)
        if broken:
            axes.plot(broken, line[-1] if line else 0, "X", color=colour, markersize=9)
        words.append(f"{name} {ends}")
    axes.set_xlim(left=0)
    finish(axes, "step", f"loss, mean of {window} steps", title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=LABEL_SIZE, ncols=2)
    return Picture(figure, f"The loss of {len(runs)} runs over their steps: {'; '.join(words)}.")
