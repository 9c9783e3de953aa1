"""Sliders over a run that is made up: how much it leaks, how noisy it is, how often it evaluates; when it is called.

What a step holds at its end goes up and down with the noise, and is high after each evaluation. Only the least of many
steps, the floor, tells whether the run keeps more and more.
"""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

from memlab.book.interactive import Interactive
from memlab.book.monitor_pictures import END_COLOUR, PEAK_COLOUR, draw_fan, draw_legend, full_words
from memlab.book.style import SMALL_SIZE, Picture, byte_unit, canvas, draw_budget, finish
from memlab.memory_monitoring import Forecast, StepHistory, forecast
from memlab.units import KiB, MiB, format_bytes

BASE_BYTES, BUDGET_BYTES = 200 * MiB, 600 * MiB
WARM_UP_BYTES, WARM_UP_STEPS = 60 * MiB, 12
STEP_BYTES = 80 * MiB  # a step's peak is above its end by so much
EVALUATION_BYTES = 60 * MiB
STEPS = 400
LAST_DRAWN = 500  # where a fan is cut off
LOOK_EVERY = 4  # steps between two forecasts
STRETCH = 16  # steps of which the least is drawn
LEAKS = {"none": 0, "128 KiB": 128 * KiB, "256 KiB": 256 * KiB, "512 KiB": 512 * KiB, "1 MiB": MiB}
NOISES = {"none": 0, "8 MiB": 8 * MiB, "32 MiB": 32 * MiB, "64 MiB": 64 * MiB}
EVALUATIONS = {"never": 0, "every 10 steps": 10, "every 25 steps": 25, "every 50 steps": 50}


class MadeUp(NamedTuple):
    """A run that is made up: bytes at each step's end, its first forecast that calls it, and the step that was full."""

    ends: list[int]
    call: Forecast | None
    full_at: int | None


@functools.lru_cache(maxsize=128)
def made_up(leak_bytes: int = MiB, noise_bytes: int = 32 * MiB, evaluate_every: int = 25, seed: int = 0) -> MadeUp:
    """A run of at most `STEPS` steps, looked at as `Monitor` does; it ends where a peak passes the budget."""
    chance, history, ends, call = random.Random(seed), StepHistory(), [], None
    for step in range(1, STEPS + 1):
        warm = round(WARM_UP_BYTES * min(1.0, step / WARM_UP_STEPS))
        noise = int(noise_bytes * chance.random())
        evaluation = EVALUATION_BYTES if evaluate_every and step % evaluate_every == 0 else 0
        end = BASE_BYTES + warm + leak_bytes * step + noise + evaluation
        peak = end + STEP_BYTES
        ends.append(end)
        if peak > BUDGET_BYTES:
            return MadeUp(ends, call, step)
        history.append(end, peak)
        if call is None and step % LOOK_EVERY == 0 and (said := forecast(history, BUDGET_BYTES)).runs_out:
            call = said
    return MadeUp(ends, call, None)


def draw_floor(leak_per_step: int = MiB, noise: int = 32 * MiB, evaluation: int = 25) -> Picture:
    """The run that these make up: its ends, their floor, and the forecast with which it is called.

    leak_per_step, noise: bytes; noise is what a step's end may be above its floor. evaluation: every so many steps;
    0: never.
    """
    run = made_up(leak_per_step, noise, evaluation)
    figure, axes = canvas(8, 3.8, right=0.3, bottom=0.85)
    unit, scale = byte_unit(BUDGET_BYTES)
    at = range(1, len(run.ends) + 1)
    floor = floors(run.ends)
    if run.call is not None:
        draw_fan(axes, run.call, scale, LAST_DRAWN)
        axes.axvline(run.call.step, color="black", linewidth=0.8, linestyle=":")
        words = f"called at step {run.call.step}"
        place = {"transform": axes.get_xaxis_transform(), "va": "bottom", "ha": "center"}
        axes.text(run.call.step, 1.01, words, fontsize=SMALL_SIZE, style="italic", **place)
    peaks = [(n + STEP_BYTES) / scale for n in run.ends]
    axes.plot(at, peaks, color=PEAK_COLOUR, linestyle="--", linewidth=0.8, label="peak of each step")
    axes.plot(at, [n / scale for n in run.ends], color=END_COLOUR, linewidth=0.8, label="end of each step")
    heights = [n / scale for n in floor]
    axes.step(
        [STRETCH * place for place in range(len(floor) + 1)],
        [*heights, heights[-1]],
        where="post",
        color="black",
        linewidth=2,
        label=f"floor of {STRETCH} steps",
    )
    if run.full_at is not None:
        axes.plot(run.full_at, BUDGET_BYTES / scale, "X", color=PEAK_COLOUR, markersize=9, label="out of memory")
    draw_budget(axes, BUDGET_BYTES, scale)
    axes.set_xlim(0, LAST_DRAWN)
    axes.set_ylim(0, BUDGET_BYTES / scale * 1.12)
    title = f"a leak of {_label(LEAKS, leak_per_step)} a step" if leak_per_step else "no leak"
    finish(axes, "step", f"bytes ({unit})", title)
    draw_legend(axes)
    return Picture(figure, _words(run, floor, leak_per_step, noise, evaluation))


def explore_floor() -> Interactive:
    """Sliders for the leak and the noise, and how often the run evaluates."""
    return Interactive(draw_floor, leak_per_step=LEAKS, noise=NOISES, evaluation=EVALUATIONS)


def floors(ends: list[int]) -> list[int]:
    """The least of each `STRETCH` steps; of the last of them, as many as there are."""
    return [min(ends[first : first + STRETCH]) for first in range(0, len(ends), STRETCH)]


def _label(labels: dict[str, int], value: int) -> str:
    return next((label for label, one in labels.items() if one == value), format_bytes(value))


def _words(run: MadeUp, floor: list[int], leak_bytes: int, noise_bytes: int, every: int) -> str:
    leak = f"a leak of {_label(LEAKS, leak_bytes)} a step" if leak_bytes else "no leak"
    noise = f"noise of {_label(NOISES, noise_bytes)}" if noise_bytes else "no noise"
    evaluations = f"an evaluation every {every} steps" if every else "no evaluation"
    said = (
        f"Lines of what a made-up run of {len(run.ends)} steps holds at each step's end, with {leak}, "
        f"{noise} and {evaluations}: "
        f"the floor goes from {format_bytes(floor[0])} to {format_bytes(floor[-1])}."
    )
    if run.call is None:
        said += " The run is never called."
    else:
        when = full_words(run.call, LAST_DRAWN)
        said += f" It is called at step {run.call.step}: a fan shows the budget full {when}."
    if run.full_at is not None:
        said += f" It runs out of memory at step {run.full_at}."
    return said
