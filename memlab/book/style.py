"""One look for every figure of the book: colours, hatching, type, units, and a sentence for those who cannot see it.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Where two of them have the same grey, one is
hatched, so that areas part in black and white as well; and every area is outlined and named. Lines differ in dashes.
"""

from __future__ import annotations

import base64
import io
import re

import matplotlib
import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, MaxNLocator
from PIL import Image

from memlab.book.markdown import literal
from memlab.units import GiB, KiB, MiB, format_bytes, parse_bytes

COLOURS = {
    "parameter": "#0072B2",
    "optimizer_state": "#009E73",
    "gradient": "#D55E00",
    "buffer": "#999999",
    "input": "#56B4E9",
    "activation": "#E69F00",
    "temporary": "#F0E442",
    "workspace": "#CC79A7",
}
"""Categories in the order in which they are stacked, from the bottom."""
HATCHES = {"optimizer_state": "\\\\\\", "gradient": "///", "buffer": "++", "input": "...", "workspace": "xxx"}
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":", (0, (9, 2)), (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 4)), (0, (9, 2, 3, 2)))
"""As many as there are colours and one more, so that two lines with the same colour have other dashes."""
RENDERING = {"hatch.linewidth": 0.4, "text.hinting": "no_hinting"}
TITLE_SIZE, LABEL_SIZE, SMALL_SIZE = 10, 9, 8


def is_sentence(text: str) -> bool:
    """True if some four words or more end in a full stop; the repr of an object is no sentence."""
    parts = [] if text.startswith("<") else re.split(r"(?<=[.!?])\s", text)
    return any(len(part.split()) >= 4 and part.rstrip().endswith((".", "!", "?")) for part in parts)


class Picture:
    """A drawn figure and the sentence that says what is in it. Shown in a notebook as an image with that alt text.

    Raises ValueError for a figure without a sentence.
    """

    def __init__(self, figure: Figure, alt: str):
        if not is_sentence(alt):
            raise ValueError(f"expected a sentence that says what is in the picture, found {alt!r}; write alt='…'")
        self.figure, self.alt = figure, alt

    def png(self) -> bytes:
        """The picture as PNG."""
        agg = FigureCanvasAgg(self.figure)
        with matplotlib.rc_context(RENDERING):
            agg.draw()
        file = io.BytesIO()
        Image.fromarray(np.asarray(agg.buffer_rgba())).convert("RGB").save(file, "png", compress_level=3)
        return file.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        image = base64.b64encode(self.png()).decode()
        return {"image/png": image, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}

    def standing_in_for(self, widget, text: str) -> tuple[dict, dict]:
        """The mimebundle of a widget (None: there is none) with this picture, and `text`, for where it cannot live."""
        data, metadata = self._repr_mimebundle_()
        data["text/plain"] = text
        if widget is None:
            return data, metadata
        view = widget._repr_mimebundle_()
        return (view[0] if isinstance(view, tuple) else view) | data, metadata

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
        caption(self.alt)

    def __repr__(self) -> str:
        return self.alt


def caption(sentence: str) -> None:
    """Show a sentence under a figure: JupyterLab keeps an image's alt text to itself."""
    from IPython.display import display

    display({"text/markdown": f"*{literal(sentence.strip())}*", "text/plain": sentence}, raw=True)


def canvas(
    width: float, height: float, left: float = 0.75, right: float = 0.15, top: float = 0.6, bottom: float = 0.55
) -> tuple[Figure, Axes]:
    """An empty figure of `width` × `height` inches, and its axes, with these margins in inches.

    Made without pyplot, so nothing is left behind. The margins are fixed, so figures line up on the page, and no time
    goes into measuring every text: a slider's picture is drawn again at each step.
    """
    figure = Figure(figsize=(width, height), dpi=90)
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    return figure, figure.subplots()


def finish(axes: Axes, x_label: str, y_label: str, title: str = "") -> None:
    """Label the axes the house's way; a label carries its unit in brackets."""
    axes.set_xlabel(x_label, fontsize=LABEL_SIZE)
    axes.set_ylabel(y_label, fontsize=LABEL_SIZE)
    axes.set_title(title, fontsize=TITLE_SIZE, loc="left", pad=18, y=1.0)
    # Where the title and the labels stand is said here: finding room for them would take much of the time of drawing.
    box, dpi = axes.get_window_extent(), axes.figure.dpi
    axes.xaxis.set_label_coords(0.5, -0.24 * dpi / box.height)
    axes.yaxis.set_label_coords(-0.55 * dpi / box.width, 0.5)
    axes.tick_params(labelsize=SMALL_SIZE)
    for axis in (axes.xaxis, axes.yaxis):  # ticks take most of the time of drawing, so there are few
        if isinstance(axis.get_major_locator(), AutoLocator):
            axis.set_major_locator(MaxNLocator(nbins=5))
    axes.spines[["top", "right"]].set_visible(False)


def byte_unit(nbytes: int) -> tuple[str, int]:
    """The unit for an axis whose highest value is `nbytes`, and how many bytes it has.

    >>> byte_unit(48_000_000)
    ('MiB', 1048576)
    """
    for unit, scale in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if nbytes >= scale:
            return unit, scale
    return "B", 1


def budget_bytes(budget: int | str | None) -> int | None:
    """A budget line's bytes, from an int or text such as "16 GiB"; None for no line. Raises ValueError for 0."""
    if budget is None:
        return None
    nbytes = parse_bytes(budget)
    if nbytes == 0:
        raise ValueError("expected a budget of more than 0 bytes, such as '16 GiB', or None for no line; found 0")
    return nbytes


def draw_budget(axes: Axes, limit: int | None, scale: int, *, vertical: bool = False) -> None:
    """A dashed line at `limit` bytes with its figure, across the axes or (`vertical`) up them; nothing for None."""
    if limit is None:
        return
    line = axes.axvline if vertical else axes.axhline
    edge = [patheffects.withStroke(linewidth=3, foreground="white")]
    line(limit / scale, color="black", linestyle="--", linewidth=1.4, path_effects=edge)
    if vertical:
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
        axes.text(limit / scale, 1.01, f"budget {format_bytes(limit)}", fontsize=SMALL_SIZE, **place)
    else:
        place = {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "bottom", "fontsize": SMALL_SIZE}
        place |= {"xytext": (0, 4), "textcoords": "offset points"}  # above the line, and not upon it
        place["bbox"] = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0}
        axes.annotate(f"budget {format_bytes(limit)}", (0.99, limit / scale), **place)


def budget_words(limit: int | None) -> str:
    """The budget line in words, for the alt text; "" for None."""
    return "" if limit is None else f" A dashed line marks the budget of {format_bytes(limit)}."
