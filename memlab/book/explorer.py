"""The memory explorer: hover over a step, pin a moment, and read who holds its bytes, where they were born, and why.

The browser is sent each timeline once, as columns of numbers, and computes every moment itself (`explorer.js`): a
hover asks nothing of the kernel. Where there are no widgets, and in a saved notebook, a static picture and a table
stand in.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

from memlab.book.figures import compare, plot
from memlab.book.style import COLOURS, HATCHES, budget_bytes, caption
from memlab.book.tables import Table, holders
from memlab.memory_timeline import Storage, Timeline
from memlab.units import format_bytes


class Explorer:
    """What `explore` shows. `event` is the pinned event (None: none is), `shown` the name of the timeline it is of."""

    def __init__(self, timelines: dict[str, Timeline], budget: int | None, title: str):
        self.timelines, self.budget, self.title = timelines, budget, title
        first = next(iter(timelines.values()))
        one = len(timelines) == 1
        self.picture = plot(first, budget, title) if one else compare(timelines, budget, title)
        self.table = holders(first, top=5) if one else _peaks(timelines)

    @functools.cached_property
    def widget(self):
        """The live widget, or None where anywidget is not installed."""
        try:
            return _widget_class()(
                timelines=[columns(name, timeline) for name, timeline in self.timelines.items()],
                categories=[
                    {"name": name.replace("_", " "), "colour": colour, "hatch": HATCHES.get(name, "")[:1]}
                    for name, colour in COLOURS.items()
                ],
                budget=self.budget,
                title=self.title,
            )
        except ImportError:
            return None

    @property
    def shown(self) -> str:
        """The name of the timeline that the table tells of."""
        return list(self.timelines)[self.widget.shown if self.widget else 0]

    @shown.setter
    def shown(self, name: str) -> None:
        if name not in self.timelines:
            raise ValueError(f"expected one of {', '.join(self.timelines)}; found {name!r}")
        self._live().set_trait("event", None)
        self._live().shown = list(self.timelines).index(name)

    @property
    def event(self) -> int | None:
        """The pinned event; None while nothing is pinned. Set it, and the picture follows."""
        return self.widget.event if self.widget else None

    @event.setter
    def event(self, event: int | None) -> None:
        if event is not None:
            self.timelines[self.shown].bytes_at(event)  # refuses an event that is not there
        self._live().event = event

    def _live(self):
        if self.widget is None:
            raise RuntimeError("expected anywidget for a live explorer, found none; pip install 'memlab[lab]'")
        return self.widget

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.picture.standing_in_for(self.widget, repr(self))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
        caption(self.picture.alt)
        display(self.table)

    def __repr__(self) -> str:
        return f"{self.picture.alt}\n\n{self.table}"


def explore(
    timelines: Timeline | Mapping[str, Timeline], *, budget: int | str | None = None, title: str = ""
) -> Explorer:
    """Look into a step: a timeline, or several as {"name": timeline} on one axis.

    budget: bytes, or text such as "16 GiB"; drawn as a line. Raises ValueError for no timeline or a budget of 0,
    TypeError for what is not a timeline.
    """
    named = dict(timelines) if isinstance(timelines, Mapping) else {"step": timelines}
    if not named:
        raise ValueError("expected a timeline, or {'name': timeline, …} to compare; found none")
    for name, timeline in named.items():
        if not isinstance(timeline, Timeline):
            raise TypeError(
                f"expected a Timeline, such as meter.timeline; found {type(timeline).__name__} for {name!r}"
            )
    return Explorer(named, budget_bytes(budget), title)


def columns(name: str, timeline: Timeline) -> dict:
    """A timeline as the browser gets it: columns of numbers as bytes, and each text once, in `texts`.

    One number per event: storage (its place in the columns below), delta in bytes, op, phase.
    One per storage: bytes held before the first op, category (its place in `COLOURS`), shape, module, line, reason.
    """
    texts: dict[str, int] = {}
    places = {storage: place for place, storage in enumerate(timeline.storages)}
    before = {storage.id: storage.nbytes for storage in timeline.alive(0)}
    categories = list(COLOURS)
    storages, events = timeline.storages.values(), timeline.events

    def numbers(code: str, values: Iterable[float]) -> bytes:
        return array(code, values).tobytes()

    def words(values: Iterable[str]) -> bytes:
        return numbers("i", [texts.setdefault(value, len(texts)) for value in values])

    return {
        "name": name,
        "peak": timeline.peak_event,
        "storage": numbers("i", [places[event.storage] for event in events]),
        "delta": numbers("d", [event.delta for event in events]),
        "op": words(event.op for event in events),
        "phase": words(event.phase for event in events),
        "before": numbers("d", [before.get(storage.id, 0) for storage in storages]),
        "category": numbers("i", [categories.index(storage.category) for storage in storages]),
        "shape": words(f"{'×'.join(map(str, s.shape)) or 'scalar'} {s.dtype}" for s in storages),
        "module": words(_module(s) for s in storages),
        "line": words("(there before)" if s.phase == "before" else str(s.line) for s in storages),
        "reason": words(s.reason for s in storages),
        "texts": list(texts),
    }


def _module(storage: Storage) -> str:
    """The module a storage was born in, or that it belongs to: "exp_avg of blocks.0.fc.weight" is of "blocks.0.fc"."""
    return storage.module or storage.name.rpartition(" of ")[2].rpartition(".")[0]


def _peaks(timelines: Mapping[str, Timeline]) -> Table:
    rows = [(name, format_bytes(t.peak_bytes), t.peak_event, len(t)) for name, t in timelines.items()]
    return Table(["timeline", "peak", "at event", "of"], rows)


@functools.cache
def _widget_class() -> type:
    """The widget's class, made when it is first needed: the base install has no anywidget."""
    import anywidget
    import traitlets

    here = Path(__file__).parent

    class MemoryExplorer(anywidget.AnyWidget):
        _esm = here / "explorer.js"
        _css = here / "explorer.css"
        timelines = traitlets.List().tag(sync=True)
        categories = traitlets.List().tag(sync=True)
        title = traitlets.Unicode().tag(sync=True)
        budget = traitlets.Int(None, allow_none=True).tag(sync=True)
        shown = traitlets.Int(0).tag(sync=True)
        event = traitlets.Int(None, allow_none=True).tag(sync=True)

    return MemoryExplorer
