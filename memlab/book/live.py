"""A figure that follows a training loop while it runs: what every level shows, steps, budget, forecast, alarms.

    monitor = Monitor(budget="16 GiB")
    live(monitor)
    with monitor:
        for x, y in batches: ...

The kernel is busy with the loop, so the monitor's thread sends what was added since the last time, and the browser
draws it (`live.js`): it asks nothing of the kernel. Where there are no widgets, and in a saved notebook, a picture and
a table stand in; they are drawn when the cell is over.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import uuid
from pathlib import Path

from memlab.book.live_changes import Changes
from memlab.book.markdown import literal
from memlab.book.monitor_pictures import draw_run
from memlab.book.style import Picture
from memlab.book.tables import Table
from memlab.memory_monitoring import Monitor, Sample
from memlab.units import format_bytes

UPDATE_SECONDS = 0.15  # every second look at the usual pace, each one where the machine is busy
OPENING_SECONDS = 10.0  # a browser that is still opening loses what is sent: until then everything is sent again


class LiveFigure:
    """What `live` shows. `updates` counts what was sent to the browser; `error` is what stopped that, or None."""

    def __init__(self, monitor: Monitor, title: str = ""):
        self.monitor, self.title, self.updates = monitor, title, 0
        self.error: Exception | None = None
        self._changes = Changes(monitor)
        self._waiting: list[Sample] = []
        self._heard_count, self._sent_at = 0, -math.inf
        self._sending = threading.Lock()  # a cell may end while the run goes on in another thread
        self._shell = self._shown_in = self._drawn = None
        self._name = uuid.uuid4().hex

    # ---- in a notebook

    @functools.cached_property
    def widget(self):
        """The live widget, or None where anywidget is not installed."""
        try:
            return _widget_class()(self._whole, title=self.title, budget=self.monitor.budget_bytes)
        except ImportError:
            return None

    def _ipython_display_(self) -> None:
        from IPython import get_ipython

        shell = get_ipython()
        place = getattr(shell, "execution_count", None)
        if place is not None and self._shown_in == place:
            return  # `live(monitor)` as the last line of a cell: it stands there already
        self._shown_in = place
        self._show()
        if shell is not None and self._shell is None and not self.over:
            self._shell = shell
            shell.events.register("post_run_cell", self._cell_is_over)
            if self.widget is not None:
                self._waiting = list(self.monitor.samples)
                self._heard_count = len(self._waiting)
                self.monitor.listeners.append(self._heard)

    def _show(self, again: bool = False) -> None:
        """Put the figure and its words under a cell, or (`again`) in the place where they stand."""
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True, display_id=self._name, update=again)
        said = f"*{literal(self.picture.alt)}*"
        if self.table.rows:
            said += f"\n\n{self.table._repr_markdown_()}"
        words = {"text/markdown": said, "text/plain": repr(self)}
        display(words, raw=True, display_id=f"{self._name}-words", update=again)

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.picture.standing_in_for(self.widget, repr(self))

    def _heard(self, sample: Sample) -> None:
        """A look of the monitor's, in its thread. The run is not disturbed: a figure that fails stands still."""
        with self._sending:
            self._waiting.append(sample)
            self._heard_count += 1
        if time.monotonic() - self._sent_at >= UPDATE_SECONDS:
            try:
                self._send()
            except Exception as error:
                self.error = error
                self.close()

    def _send(self, ended: bool = False) -> None:
        """Tell the browser what was added."""
        with self._sending:
            self._sent_at = time.monotonic()
            samples = self._waiting
            if samples and samples[-1].seconds < OPENING_SECONDS:
                self._changes.forget()
            else:
                self._waiting = []
            document, columns = self._changes.since(samples, self._heard_count - len(samples))
            self.widget.send(document | {"ended": ended}, columns)
            self.updates += 1

    def _whole(self) -> dict:
        """All there is, for a page that opens in the middle of the run or after it."""
        samples = list(self.monitor.samples)
        first = max(0, self._heard_count - len(samples))
        document, columns = Changes(self.monitor).since(samples, first)
        return document | {"ended": self.over} | dict(zip(("rows", "ends", "peaks"), columns, strict=True))

    def _cell_is_over(self, result=None) -> None:
        """After a cell, also one that was interrupted: the picture that stays; after the run, nothing else stays."""
        samples = self.monitor.samples
        state = self.over, self.monitor.steps, samples[-1].seconds if samples else None
        if self.over:
            self.close()
        if samples and state != self._drawn:
            self._drawn = state
            if self.widget is not None and self.error is None:
                self._send(ended=self.over)
            self._show(again=True)

    def close(self) -> None:
        """Follow the run no further."""
        shell, self._shell = self._shell, None
        with contextlib.suppress(ValueError):
            self.monitor.listeners.remove(self._heard)
        if shell is not None:
            with contextlib.suppress(ValueError):
                shell.events.unregister("post_run_cell", self._cell_is_over)

    # ---- anywhere

    @property
    def over(self) -> bool:
        """Whether the monitor has begun and ended."""
        return bool(self.monitor.samples) and not self.monitor.running

    @property
    def picture(self) -> Picture:
        """The run so far, drawn."""
        return draw_run(self.monitor, title=self.title)

    @property
    def table(self) -> Table:
        """Each level that was seen: at the first look, at the highest, at the last."""
        looks = [sample.figures for sample in list(self.monitor.samples)]
        levels = dict.fromkeys(level for figures in looks for level in figures)
        rows = []
        for level in levels:
            seen = [figures[level] for figures in looks if level in figures]
            rows.append((level, *map(format_bytes, (seen[0], max(seen), seen[-1]))))
        return Table(["level", "first look", "highest look", "last look"], rows)

    def __repr__(self) -> str:
        alarms = "".join(f"\nstep {alarm.step}, {alarm.kind}: {alarm.message}" for alarm in list(self.monitor.alarms))
        table = f"\n\n{self.table}" if self.table.rows else ""
        return f"{self.picture.alt}{table}{alarms}"


def live(monitor: Monitor, title: str = "") -> LiveFigure:
    """Show a figure that follows a monitor's run, here and now; begin the run afterwards, in this cell or a later one.

    Raises TypeError for what is not a Monitor.
    """
    if not isinstance(monitor, Monitor):
        raise TypeError(f"expected a Monitor, found {type(monitor).__name__}; live(monitor) comes before the loop")
    figure = LiveFigure(monitor, title)
    with contextlib.suppress(ImportError):
        from IPython import get_ipython

        if get_ipython() is not None:
            figure._ipython_display_()
    return figure


@functools.cache
def _widget_class() -> type:
    """The widget's class, made when it is first needed: the base install has no anywidget."""
    import anywidget
    import traitlets

    here = Path(__file__).parent

    class LiveMonitor(anywidget.AnyWidget):
        _esm = here / "live.js"
        _css = here / "live.css"
        title = traitlets.Unicode().tag(sync=True)
        budget = traitlets.Int(None, allow_none=True).tag(sync=True)
        whole = traitlets.Dict().tag(sync=True)

        def __init__(self, whole, **traits):
            self._all = whole
            super().__init__(**traits)

        def get_state(self, key=None, drop_defaults=False):
            """What a page that opens is told: the run up to this moment."""
            state = super().get_state(key, drop_defaults)
            if key is None or key == "whole" or "whole" in key:
                state["whole"] = self._all()
            return state

    return LiveMonitor
