"""Sliders over one picture: a plain function draws it, and this calls the function again when a slider moves.

The picture is an image, not an Output widget: those can hang a notebook that runs without a browser. In a saved
notebook, and where there are no widgets, the picture at the start stands in.
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

from memlab.book.style import Picture, caption

AHEAD_AFTER = 0.05  # seconds of quiet before the next picture is drawn ahead
AHEAD_AT_MOST = 0.3  # seconds: a picture that takes longer is not drawn ahead; it would keep the kernel from its reader


class Interactive:
    """Show `draw(**values)` with one control for each keyword of `sliders`.

        Interactive(draw, batch=[1, 2, 4, 8], layers=range(1, 5), checkpointed=[False, True])

    draw: a function that returns a Picture; it starts where its own defaults say, or else at each first value.
    sliders: for each parameter its values in order, as a range, a list, or a dict of label → value. Numbers get a
    slider, True and False a checkbox, texts a row of buttons.

    Raises TypeError if draw has no such parameter or returns no Picture, ValueError for a parameter without values, or
    with a default that is not among them.
    """

    def __init__(self, draw: Callable[..., Picture], **sliders):
        if not sliders:
            raise ValueError("expected at least one slider, such as batch=[1, 2, 4]; found none")
        self.draw = draw
        self.choices = {name: _labelled(name, values) for name, values in sliders.items()}
        self.start = _start(draw, self.choices)
        self._drawn: dict[str, Picture] = {}
        self._images: dict[str, str] = {}
        self._ahead: asyncio.TimerHandle | None = None
        self.picture = self.at(**self.start)

    def at(self, **values) -> Picture:
        """The picture at these values; drawn once, and then remembered."""
        key = repr(values)
        if key not in self._drawn:
            picture = self.draw(**values)
            if not isinstance(picture, Picture):
                raise TypeError(f"expected {self._call(values)} to return a Picture, found {type(picture).__name__}")
            self._drawn[key] = picture
        return self._drawn[key]

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
        controls = {name: _control(ipywidgets, name, self.choices[name], self.start[name]) for name in self.choices}
        view = ipywidgets.HTML(self._image(self.start))

        def redraw(change) -> None:
            values = {name: control.value for name, control in controls.items()}
            moved = next(name for name in controls if controls[name] is change["owner"])
            start = time.perf_counter()
            try:
                view.value = self._image(values)
            except Exception as error:  # a traceback would go to the server's log, where no reader looks
                words = html.escape(f"{self._call(values)} raised {type(error).__name__}: {error}")
                view.value = f'<p class="memlab-failed" role="alert" style="color: #b00020">{words}</p>'
            if time.perf_counter() - start < AHEAD_AT_MOST:
                self._draw_ahead(values, moved, change["old"])

        for control in controls.values():
            control.observe(redraw, "value")
        return ipywidgets.VBox([*controls.values(), view])

    def _draw_ahead(self, values: Mapping, moved: str, old) -> None:
        """If nothing else is asked of the kernel for a moment, draw what one more move the same way would show."""
        if self._ahead is not None:
            self._ahead.cancel()
        places = list(self.choices[moved].values())
        at = places.index(values[moved])
        further = at + (1 if at > places.index(old) else -1)

        def draw() -> None:
            with contextlib.suppress(Exception):  # it is told when the reader asks for it
                self._image({**values, moved: places[further]})

        with contextlib.suppress(RuntimeError):  # no loop: not in a kernel
            loop = asyncio.get_running_loop()
            self._ahead = loop.call_later(AHEAD_AFTER, draw) if 0 <= further < len(places) else None

    def _image(self, values: Mapping) -> str:
        key = repr(values)
        if key not in self._images:
            picture = self.at(**values)
            width, height = (round(inches * picture.figure.dpi) for inches in picture.figure.get_size_inches())
            data = base64.b64encode(picture.png()).decode()
            # With its size stated and decoded at once, the page does not jump while a slider moves.
            self._images[key] = (
                f'<img width="{width}" height="{height}" decoding="sync" style="max-width: none" '
                f'src="data:image/png;base64,{data}" alt="{html.escape(picture.alt)}">'
            )
        return self._images[key]

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


def _labelled(name: str, values) -> dict[str, object]:
    labels = dict(values) if isinstance(values, Mapping) else {_label(value): value for value in values}
    if not labels:
        raise ValueError(f"expected at least one value for {name}, found none")
    return labels


def _label(value) -> str:
    return f"{value:,}" if type(value) in (int, float) else str(value)


def _start(draw: Callable, choices: Mapping[str, Mapping]) -> dict:
    parameters = inspect.signature(draw).parameters
    start = {}
    for name, labels in choices.items():
        if name not in parameters:
            raise TypeError(f"expected one of draw's parameters, {', '.join(parameters) or '(none)'}; found {name!r}")
        values = list(labels.values())
        default = parameters[name].default
        if default is not inspect.Parameter.empty and default not in values:
            raise ValueError(f"expected the default of {name} among {values}, found {default!r}")
        start[name] = values[0] if default is inspect.Parameter.empty else default
    return start


def _control(ipywidgets, name: str, labels: Mapping[str, object], value):
    options = list(labels.items())
    looks = {
        "description": name.replace("_", " "),
        "style": {"description_width": "110px"},
        "layout": {"width": "480px"},
    }
    if len(labels) == 2 and all(isinstance(one, bool) for one in labels.values()):
        return ipywidgets.Checkbox(value=value, **looks)
    if all(isinstance(one, str) for one in labels.values()):
        return ipywidgets.ToggleButtons(options=options, value=value, **looks | {"layout": {"width": "max-content"}})
    return ipywidgets.SelectionSlider(options=options, value=value, **looks)
