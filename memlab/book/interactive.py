"""Sliders over one picture: a plain function draws it, and this calls the function again when a slider moves.

The picture is an image, not an Output widget: those can hang a notebook that runs without a browser. In a saved
notebook, and where there are no widgets, the picture at the start stands in.

JupyterLab tells of a slider in a thread beside the one that runs the cells (a kernel's *subshell*). Pictures are drawn
in the cells' thread all the same, when no cell runs: what draws may set what holds for the whole process, such as
PyTorch's default dtype, and a cell that trains must not see it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import html
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from memlab.book.style import Picture, caption

AHEAD_AFTER = 0.05  # seconds of quiet before the next picture is drawn ahead
AHEAD_AT_MOST = 0.5  # seconds: a picture that takes longer is not drawn ahead; it would keep the kernel from its reader


class Interactive:
    """Show `draw(**values)` with one control for each keyword of `sliders`.

        Interactive(draw, batch=[1, 2, 4, 8], layers=range(1, 5), checkpointed=[False, True])

    draw: a function that returns a Picture; it starts where its own defaults say, or else at each first value.
    sliders: for each parameter its values in order, as a range, a list, or a dict of label → value. True and
    False get a checkbox, texts a row of buttons, all else a slider.

    Raises TypeError if draw has no such parameter or returns no Picture, ValueError for a parameter without values,
    with two of one label, or with a default that is not among them.
    """

    def __init__(self, draw: Callable[..., Picture], **sliders):
        if not sliders:
            raise ValueError("expected at least one slider, such as batch=[1, 2, 4]; found none")
        self.draw = draw
        self.choices = {name: _labelled(name, values) for name, values in sliders.items()}
        self._start = _start(draw, self.choices)
        self.start = self._values(self._start)
        self.picture = self.at(**self.start)
        self._images: dict[tuple[int, ...], str] = {}
        self._slowest = 0.0  # seconds
        self._ahead: asyncio.TimerHandle | None = None

    def at(self, **values) -> Picture:
        """The picture at these values."""
        picture = self.draw(**values)
        if not isinstance(picture, Picture):
            raise TypeError(f"expected {self._call(values)} to return a Picture, found {type(picture).__name__}")
        return picture

    def grid(self) -> Iterator[dict]:
        """Every combination of the controls' values."""
        values = [choice.values() for choice in self.choices.values()]
        for combination in itertools.product(*values):
            yield dict(zip(self.choices, combination, strict=True))

    @functools.cached_property
    def widget(self):
        """The live controls and image, or None where ipywidgets is not installed."""
        try:
            import ipywidgets
        except ImportError:
            return None
        controls = [
            _control(ipywidgets, name, labels, place)
            for (name, labels), place in zip(self.choices.items(), self._start, strict=True)
        ]
        self._images[self._start] = _image(self.picture)
        view = ipywidgets.HTML(self._images[self._start])
        seen = shown = self._start
        cells = _loop()

        def moved(change) -> None:
            nonlocal seen
            seen = tuple(map(_place, controls, self.choices.values()))
            if cells is None or cells is _loop() or cells.is_closed():
                redraw()
            else:
                cells.call_soon_threadsafe(redraw)

        def redraw() -> None:
            nonlocal shown
            before, shown = shown, seen
            if before == shown:
                return  # of several moves that waited for a cell's end only the last one counts
            try:
                view.value = self._drawn(shown)
            except Exception as error:  # a traceback would go to the server's log, where no reader looks
                words = html.escape(f"{self._call(self._values(shown))} raised {type(error).__name__}: {error}")
                view.value = f'<p class="memlab-failed" role="alert" style="color: #b00020">{words}</p>'
            self._draw_ahead(before, shown)

        for control in controls:
            control.observe(moved, "value")
        return ipywidgets.VBox([*controls, view])

    def _draw_ahead(self, before: tuple[int, ...], seen: tuple[int, ...]) -> None:
        """If nothing else is asked of the kernel for a moment, draw what one more move the same way would show."""
        if self._ahead is not None:
            self._ahead.cancel()
        further = tuple(now + (now > old) - (now < old) for old, now in zip(before, seen, strict=True))
        there = all(0 <= at < len(labels) for at, labels in zip(further, self.choices.values(), strict=True))
        if not there or self._slowest > AHEAD_AT_MOST:
            return

        def draw() -> None:
            with contextlib.suppress(Exception):  # it is told when the reader asks for it
                self._drawn(further)

        if (loop := _loop()) is not None:
            self._ahead = loop.call_later(AHEAD_AFTER, draw)

    def _drawn(self, places: tuple[int, ...]) -> str:
        """The image with every control at its place; drawn once, and then remembered (but not its figure)."""
        if places not in self._images:
            start = time.perf_counter()
            try:
                self._images[places] = _image(self.at(**self._values(places)))
            finally:
                self._slowest = max(self._slowest, time.perf_counter() - start)
        return self._images[places]

    def _values(self, places: tuple[int, ...]) -> dict:
        """What draw is called with: values may be equal, or arrays, or None; their places tell them apart."""
        pairs = zip(self.choices.items(), places, strict=True)
        return {name: list(labels.values())[place] for (name, labels), place in pairs}

    def _call(self, values: Mapping) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"{getattr(self.draw, '__name__', 'draw')}({arguments})"

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.picture.standing_in_for(self.widget, repr(self))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
        caption(repr(self))

    def __repr__(self) -> str:
        controls = ", ".join(
            f"{name.replace('_', ' ')} ({next(iter(labels))} to {list(labels)[-1]})"
            for name, labels in self.choices.items()
        )
        return f"Slide {controls}. At the start: {self.picture.alt}"


def _loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread; None where there is none: not in a kernel."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _image(picture: Picture) -> str:
    width, height = (round(inches * picture.figure.dpi) for inches in picture.figure.get_size_inches())
    data = base64.b64encode(picture.png()).decode()
    # With its size stated and decoded at once, the page does not jump while a slider moves.
    return (
        f'<img width="{width}" height="{height}" decoding="sync" style="max-width: none" '
        f'src="data:image/png;base64,{data}" alt="{html.escape(picture.alt)}">'
    )


def _labelled(name: str, values) -> dict[str, object]:
    pairs = values.items() if isinstance(values, Mapping) else ((value, value) for value in values)
    labels: dict[str, object] = {}
    for key, value in pairs:
        label = _label(key)
        if label in labels:
            raise ValueError(f"expected a label for each value of {name}, found two of {label!r}; hand in other labels")
        labels[label] = value
    if not labels:
        raise ValueError(f"expected at least one value for {name}, found none")
    return labels


def _label(value) -> str:
    return f"{value:,}" if type(value) in (int, float) else str(value)


def _start(draw: Callable, choices: Mapping[str, Mapping]) -> tuple[int, ...]:
    """The place of each control at the start."""
    parameters = inspect.signature(draw).parameters
    places = []
    for name, labels in choices.items():
        if name not in parameters:
            raise TypeError(f"expected one of draw's parameters, {', '.join(parameters) or '(none)'}; found {name!r}")
        values, default = list(labels.values()), parameters[name].default
        if default is inspect.Parameter.empty:
            places.append(0)
            continue
        same = [place for place, value in enumerate(values) if value is default]
        same += [place for place, value in enumerate(values) if np.array_equal(value, default)]
        if not same:
            raise ValueError(f"expected {name} to start at one of {values}, found {default!r}")
        places.append(same[0])
    return tuple(places)


def _control(ipywidgets, name: str, labels: Mapping[str, object], place: int):
    looks = {
        "description": name.replace("_", " "),
        "style": {"description_width": "110px"},
        "layout": {"width": "480px"},
    }
    if len(labels) == 2 and all(isinstance(one, bool) and label == str(one) for label, one in labels.items()):
        return ipywidgets.Checkbox(value=list(labels)[place] == "True", **looks)
    options = [(label, at) for at, label in enumerate(labels)]
    if all(isinstance(one, str) for one in labels.values()):
        return ipywidgets.ToggleButtons(options=options, value=place, **looks | {"layout": {"width": "max-content"}})
    return ipywidgets.SelectionSlider(options=options, value=place, **looks)


def _place(control, labels: Mapping[str, object]) -> int:
    """The place that a control stands at; a checkbox has none, only True or False."""
    return list(labels).index(str(control.value)) if isinstance(control.value, bool) else control.value
