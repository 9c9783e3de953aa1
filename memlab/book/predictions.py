"""Predictions as pictures: a formula's moments on a measured timeline, and sliders that ask *what if*.

`memory_arithmetic` says what a step holds at the few moments at which it can be at its fullest. Here each moment gets
its stretch of the timeline, and the prediction becomes a ceiling over that stretch: one that the measured curve has to
touch and may not cross.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from memlab.book.figures import bars
from memlab.book.interactive import Interactive
from memlab.book.steps import metered_step
from memlab.book.style import LABEL_SIZE, LINE_COLOURS, SMALL_SIZE, Picture, byte_unit, canvas, finish
from memlab.book.tables import Table
from memlab.memory_arithmetic import TrainingStep, Transformer, training_step
from memlab.memory_timeline import CARDS, Timeline, imagine
from memlab.units import format_bytes

# ---- predicted and measured on one axis


def stretches(timeline: Timeline, model: Transformer) -> dict[str, tuple[int, int]]:
    """Each moment's first and last event in a metered step of a model.

    A moment begins where the first tensor of its part of the model is made: the head in forward for the loss, the last
    block in backward, and so on. The blocks between the last and the first belong to no moment; a Llama's first moment
    has its second block too, since the first one lets the tables of the positions go.

    Raises ValueError for a timeline that is not of one step, or of a model with another number of blocks.
    """
    layers = model.layers
    made = [(number, event) for number, event in enumerate(timeline.events, 1) if event.delta > 0]
    module = lambda event: timeline.storages[event.storage].module  # noqa: E731
    found = {name.split(".")[1] for _, event in made if (name := module(event)).startswith("blocks.")}
    if found != set(map(str, range(layers))) or not {"backward", "optimizer"} <= {s.phase for s in timeline.phases}:
        raise ValueError(_no_step_of(model, timeline))
    backward, optimizer = _first(timeline, "backward"), _first(timeline, "optimizer")
    inside = lambda block: [  # noqa: E731
        number
        for number, event in made
        if event.phase == "backward" and f"{module(event)}.".startswith(f"blocks.{block}.")
    ]
    ends = [number for number, event in made if event.phase == "forward" and module(event).startswith("blocks.")]
    last, first = inside(layers - 1), inside(0)
    if model.family == "llama" and layers > 2:
        first = [*inside(1), *first]
    found = {
        "forward": (0, ends[-1]),
        "loss": (ends[-1] + 1, last[0] - 1),
        "backward of the last block": (last[0], last[-1]),
        "backward of the first block": (first[0], first[-1]),
        "backward of the embeddings": (first[-1] + 1, optimizer - 1),
        "optimizer step": (optimizer, len(timeline)),
    }
    if not found["loss"][0] < backward <= found["loss"][1]:
        raise ValueError(_no_step_of(model, timeline))
    return found if layers > 1 else {name: at for name, at in found.items() if name != "backward of the last block"}


def _no_step_of(model: Transformer, timeline: Timeline) -> str:
    return f"expected one metered step of {model}: forward, backward, optimizer; found {timeline!r}"


def _first(timeline: Timeline, phase: str) -> int:
    return next(span.start for span in timeline.phases if span.phase == phase)


def measured_moments(timeline: Timeline, model: Transformer) -> dict[str, int]:
    """The most bytes that were held in each moment's stretch, just after something was made.

    Where nothing is made, as in SGD's step and any fused one, it is what was held before it.
    """
    made = [0, *(number for number, event in enumerate(timeline.events, 1) if event.delta > 0)]
    return {
        name: max(timeline.totals[i] for i in [n for n in made if start <= n <= stop] or [start - 1])
        for name, (start, stop) in stretches(timeline, model).items()
    }


def predicted_and_measured(step: TrainingStep, timeline: Timeline, title: str = "") -> Picture:
    """A measured step's curve, and over each moment's stretch the ceiling that arithmetic predicts for it."""
    figure, axes = canvas(8, 3.6, bottom=0.75)
    unit, scale = byte_unit(max(timeline.peak_bytes, step.peak_bytes))
    events = range(len(timeline) + 1)
    axes.step(
        events,
        [timeline.totals[i] / scale for i in events],
        where="post",
        color=LINE_COLOURS[0],
        lw=1.2,
        label="measured",
    )
    words = []
    for number, (name, (start, stop)) in enumerate(stretches(timeline, step.model).items()):
        moment = step.moment(name)
        height = moment.nbytes / scale
        label = "predicted, the most at each moment" if number == 0 else None
        axes.plot(
            [start, stop + 1], [height, height], color=LINE_COLOURS[1], lw=2.2, solid_capstyle="butt", label=label
        )
        axes.annotate(
            str(number + 1),
            ((start + stop + 1) / 2, height),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=LABEL_SIZE,
            fontweight="bold",
        )
        words.append(f"{number + 1} {name} {format_bytes(moment.nbytes)}")
    axes.set_ylim(0, max(timeline.peak_bytes, step.peak_bytes) / scale * 1.16)
    axes.set_xlim(0, len(timeline))
    finish(axes, "event (an allocation or a free)", f"bytes held, storages ({unit})", title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=SMALL_SIZE, ncols=2)
    alt = (
        f"The line of bytes held in a metered step, peak {format_bytes(timeline.peak_bytes)}, under predicted ceilings"
    )
    return Picture(figure, f"{alt}: {', '.join(words)}.")


def moments_table(step: TrainingStep, timeline: Timeline) -> Table:
    """Each moment: what was predicted, what was measured, and how far they are apart."""
    rows = [
        (number, name, format_bytes(step.moment(name).nbytes), step.moment(name).nbytes, held)
        for number, (name, held) in enumerate(measured_moments(timeline, step.model).items(), 1)
    ]
    columns = ["", "moment", "predicted", "predicted, B", "measured, B", "difference, B"]
    return Table(columns, [(*row, row[-1] - row[-2]) for row in rows])


def terms(breakdown: Iterable, top: int | None = None) -> Table:
    """A breakdown's terms, the largest first: bytes, formula and source."""
    ordered = sorted(breakdown, key=lambda term: -term.nbytes)
    rows = [(format_bytes(t.nbytes), t.category.replace("_", " "), t.name, t.formula, t.source) for t in ordered[:top]]
    if top is not None and (rest := ordered[top:]):
        rows.append((format_bytes(sum(t.nbytes for t in rest)), "", f"… {len(rest)} more", "", ""))
    return Table(["size", "category", "tensor", "formula", "why"], rows)


# ---- what if


SLIDERS = {
    "layers": [2, 4, 12, 24, 48, 96],
    "width": [256, 512, 1024, 2048, 4096, 8192, 12288],
    "heads": [4, 8, 16, 32, 64],
    "tokens": [256, 1024, 4096, 16384],
    "batch": [1, 2, 4, 8, 16, 32, 64],
    "precision": ["fp32", "autocast", "mixed", "bf16"],
    "optimizer": ["sgd", "momentum", "adamw"],
}
"""What `what_if` lets you choose. Every number of heads divides every width."""
VOCABULARY = 50_257


class Asked(NamedTuple):
    """One place of the sliders: a GPT with GPT-2's vocabulary, on a GPU."""

    layers: int
    width: int
    heads: int
    tokens: int
    batch: int
    precision: str
    optimizer: str

    @property
    def attention(self) -> str:
        """Fused, unless a head is narrower than the fused kernels' 8 or wider than their 256."""
        return "fused" if 8 <= self.width // self.heads <= 256 else "by hand"

    @property
    def model(self) -> Transformer:
        """The model's sizes."""
        return Transformer(self.layers, self.width, self.heads, VOCABULARY, self.tokens)

    @property
    def options(self) -> dict[str, str]:
        """What `training_step` and `metered_step` both want to know."""
        return {"precision": self.precision, "optimizer": self.optimizer, "attention": self.attention}

    def step(self) -> TrainingStep:
        """The prediction."""
        return training_step(self.model, self.batch, self.tokens, **self.options)


@functools.lru_cache(maxsize=32)
def _imagined(asked: Asked) -> dict[str, int]:
    with imagine("H100-80GB"):
        timeline = metered_step(asked.model, asked.batch, asked.tokens, **asked.options)
    return timeline.bytes_by_category(timeline.peak_event)


def what_if(**start) -> Interactive:
    """Sliders over a GPT's sizes, its batch, precision and optimizer: its peak in bars, against what cards have.

    "imagined" runs the step on imagined hardware too and sets its bar below. start: where the sliders begin, as
    layers=12. Raises TypeError for a slider that is none, ValueError for a place that it has not.
    """
    usual = {"layers": 12, "width": 1024, "heads": 16, "tokens": 1024, "batch": 8, "precision": "fp32"}
    usual |= {"optimizer": "adamw", "imagined": False}
    if unknown := [name for name in start if name not in usual]:
        raise TypeError(f"expected sliders among {', '.join(usual)}; found {unknown[0]!r}")
    begin = usual | start

    def draw(
        layers=begin["layers"],
        width=begin["width"],
        heads=begin["heads"],
        tokens=begin["tokens"],
        batch=begin["batch"],
        precision=begin["precision"],
        optimizer=begin["optimizer"],
        imagined=begin["imagined"],
    ) -> Picture:
        asked = Asked(layers, width, heads, tokens, batch, precision, optimizer)
        step = asked.step()
        rows = {"predicted": step.peak.by_category()}
        if imagined:
            rows["imagined"] = _imagined(asked)
        by_hand = "" if asked.attention == "fused" else f" (no fused kernel for heads of {width // heads:,})"
        title = (
            f"{step.model.parameters / 1e9:,.2f} billion parameters{by_hand}; fullest in the {step.peak.moment}: "
            f"{format_bytes(step.peak_bytes)}, {_fits(step.peak_bytes)}"
        )
        return bars(rows, title=title, capacities=capacities())

    return Interactive(draw, **SLIDERS, imagined=[False, True])


def capacities() -> dict[str, int]:
    """The cards of the book, the smallest first: name → bytes, one card for each capacity."""
    cards = {name: imagine(name).capacity_bytes for name in CARDS if name not in ("V100-16GB", "A100-80GB")}
    return dict(sorted(cards.items(), key=lambda card: card[1]))


def _fits(nbytes: int) -> str:
    for name, capacity in capacities().items():
        if nbytes <= capacity:
            return f"which fits {name}"
    return "which fits none of the cards"
