"""The live figure is told all of a run, once, by the monitor's thread; it disturbs nothing and leaves nothing."""

import math
import sys
import threading
import time
import warnings
from array import array
from types import SimpleNamespace

import IPython
import nbformat
import pytest
from IPython.core.events import EventManager
from nbformat.v4 import new_code_cell, new_notebook

from memlab.book import live as live_page
from memlab.book.live import LiveFigure, live
from memlab.book.live_changes import Changes
from memlab.book.notebooks import clean
from memlab.book.run import run
from memlab.memory_monitoring import Alarm, Monitor, Sample, forecast
from memlab.units import MiB, format_bytes

pytest.importorskip("anywidget")

VIEW = "application/vnd.jupyter.widget-view+json"


class Made:
    """A source of made-up figures: each look is one byte more than the last."""

    def __init__(self, *levels):
        self.name, self.levels, self.looks = "made up", levels, 0

    def read(self):
        self.looks += 1
        return {level: 1000 * place + self.looks for place, level in enumerate(self.levels)}

    def peaks(self):
        return {}


class Browser:
    """What a browser knows after these messages: as in live.js, without thinning."""

    def __init__(self):
        self.rows, self.ends, self.peaks, self.alarms, self.last, self.told = [], [], [], [], {}, 0

    def take(self, sent, columns):
        rows, ends, peaks = (array("d", column).tolist() for column in columns)
        wide = 2 + len(sent["levels"])
        looks = [rows[i : i + wide] for i in range(0, len(rows), wide)]
        self.told += len(looks)
        self.rows += looks[max(0, len(self.rows) - sent["first"]) :]
        if sent["from_block"] is not None:
            self.ends[sent["from_block"] :], self.peaks[sent["from_block"] :] = ends, peaks
        self.alarms[sent["from_alarm"] :] = sent["alarms"]
        self.last = sent


@pytest.fixture
def shell(monkeypatch):
    """A notebook's shell, as far as a live figure knows one."""
    shell = SimpleNamespace(execution_count=1, shown=[])
    shell.events = EventManager(shell, {"post_run_cell": lambda result: None})
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shell.shown.append((data, options)))
    return shell


def hooks(shell):
    return shell.events.callbacks["post_run_cell"]


def followed(monitor):
    """A figure of a monitor, shown, and a browser that hears of it."""
    figure = live(monitor)
    browser = Browser()
    figure.widget.send = lambda sent, columns: browser.take(sent, columns)
    return figure, browser


def steps(monitor, count, seconds=0.0):
    for _ in range(count):
        time.sleep(seconds)
        monitor.step()


def end_of_cell(shell):
    shell.events.trigger("post_run_cell", None)
    shell.execution_count += 1


def rows_of(samples, levels):
    return [[s.seconds, s.step, *(s.figures.get(level, math.nan) for level in levels)] for s in samples]


@pytest.mark.parametrize(("opening", "count"), [(0.0, 1300), (10.0, 40)], ids=["what was added", "all of it at first"])
def test_each_browser_is_told_every_look_every_step_and_every_alarm(shell, monkeypatch, opening, count):
    monkeypatch.setattr(live_page, "OPENING_SECONDS", opening)
    monkeypatch.setattr(live_page, "UPDATE_SECONDS", 0.01)
    monitor = Monitor(1000, sources=[Made("heap", "resident")], every=0.002)
    (figure, browser), (_, other) = followed(monitor), followed(monitor)
    with warnings.catch_warnings(), monitor:
        warnings.simplefilter("ignore")
        steps(monitor, count, 0.15 / count)
    end_of_cell(shell)
    assert other.rows == browser.rows == rows_of(monitor.samples, ["heap", "resident"]) and len(browser.rows) > 5
    assert (browser.ends, browser.peaks) == (list(monitor.history.ends), list(monitor.history.peaks))
    assert browser.last["steps"] == count and browser.last["ended"] and browser.last["watch"] == "heap"
    assert [kind for kind, *_ in browser.alarms] == [alarm.kind for alarm in monitor.alarms]
    assert not monitor.alarms or f"{monitor.alarms[0].kind}:" in repr(figure)
    assert figure.updates > 3 and figure.error is None and monitor.listeners == [] and hooks(shell) == []
    assert browser.told == len(browser.rows) if opening == 0 else browser.told > len(browser.rows)


def test_what_was_sent_is_not_sent_again():
    monitor = Monitor(sources=[])
    changes = Changes(monitor)
    for _ in range(600):  # more than a history keeps one by one
        monitor.history.append(1, 2)
    whole, columns = changes.since([Sample(0.0, 0, {"heap": 1})], 0)
    assert (whole["from_block"], [len(column) for column in columns]) == (0, [24, 8 * 300, 8 * 300])
    again, columns = changes.since([], 1)
    assert (again["from_block"], [len(column) for column in columns]) == (299, [0, 8, 8])  # that one is not full yet
    monitor.history.append(1, 2)
    monitor.alarms.append(Alarm("log", 601, "full"))
    more, columns = changes.since([], 1)
    assert (more["from_block"], [len(column) for column in columns]) == (299, [0, 16, 16])
    assert more["alarms"] == [["log", 601, "full"]] and changes.since([], 1)[0]["alarms"] == []
    monitor.history.ends.append(3)  # it is just being written to, and left for the next time
    assert changes.since([], 1)[0]["from_block"] is None
    monitor.history.peaks.append(4)
    assert [array("d", column).tolist() for column in changes.since([], 1)[1]] == [[], [1, 3], [2, 4]]
    seen = [Sample(0.0, 0, {"heap": 1}), Sample(1.0, 0, {"heap": 2, "driver": 3}), Sample(2.0, 0, {"driver": 4})]
    sent, (rows, *_) = Changes(monitor).since(seen, 0)
    assert sent["levels"] == ["heap", "driver"]  # nan where a level was not seen
    assert str(array("d", rows).tolist()) == "[0.0, 0.0, 1.0, nan, 1.0, 0.0, 2.0, 3.0, 2.0, 0.0, nan, 4.0]"


def test_the_figure_ends_as_the_picture_of_the_run_in_the_place_where_it_stood(shell):
    monitor = Monitor(sources=[Made("heap", "resident")], every=0.01)
    followed(monitor)
    (begun, place), (words, below) = shell.shown
    assert not place["update"] and "has made no step" in words["text/plain"] and VIEW in begun
    with monitor:
        steps(monitor, 7)
        end_of_cell(shell)  # the run goes on after the cell
        assert "over 7 steps" in shell.shown[-1][0]["text/plain"] and len(hooks(shell)) == 1
        steps(monitor, 3)
    end_of_cell(shell)
    assert hooks(shell) == []
    (ended, again), (told, under) = shell.shown[-2:]
    assert again["update"] and under["update"]
    assert again["display_id"] == place["display_id"] != under["display_id"] == below["display_id"]
    assert ended["image/png"] != begun["image/png"]
    first = format_bytes(monitor.samples[0].figures["heap"])
    table = told["text/markdown"].replace("\N{NO-BREAK SPACE}", " ")
    assert "over 10 steps" in told["text/plain"] and f"| heap | {first} |" in table
    monitor.samples.clear()
    for figures in ({"heap": 1}, {"heap": 5, "driver": 7}, {"heap": 2}):
        monitor.samples.append(Sample(0.0, 0, figures))  # at first, at most and at last
    assert LiveFigure(monitor).table.rows == [["heap", "1 B", "5 B", "2 B"], ["driver", "7 B", "7 B", "7 B"]]


def test_as_the_last_line_of_a_cell_it_is_shown_once_in_another_cell_again_and_outside_never(
    shell, monkeypatch, capsys
):
    figure = live(Monitor(sources=[]))
    figure._ipython_display_()
    assert len(shell.shown) == 2
    end_of_cell(shell)
    figure._ipython_display_()
    assert len(shell.shown) == 4 and len(hooks(shell)) == 1
    monkeypatch.undo()
    monitor = Monitor(sources=[Made("heap")], every=0.01)
    figure = live(monitor)
    with monitor:
        steps(monitor, 4)
    assert "over 4 steps" in repr(figure) and monitor.listeners == [] and capsys.readouterr() == ("", "")
    with pytest.raises(TypeError, match="expected a Monitor, found int"):
        live(5)


def test_after_a_change_of_the_run_its_steps_replace_those_that_no_longer_count(shell, monkeypatch):
    monkeypatch.setattr(live_page, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(live_page, "OPENING_SECONDS", 0.0)
    monitor = Monitor(sources=[Made("heap")], every=0.002)
    figure, browser = followed(monitor)
    with monitor:
        steps(monitor, 20, 0.003)
        monitor.changed()
        steps(monitor, 5, 0.003)
    end_of_cell(shell)
    assert (browser.ends, len(browser.ends)) == (list(monitor.history.ends), 5)
    assert (browser.last["steps"], browser.last["steps_before"]) == (5, 20)
    (line,) = [line for line in figure.picture.figure.axes[0].lines if line.get_label() == "end of each step"]
    assert line.get_xdata().tolist() == [21, 22, 23, 24, 25]


def test_the_forecast_of_the_call_is_sent_and_never_is_null():
    monitor = Monitor("400 MiB", sources=[])
    for i in range(100):
        monitor.history.append((100 + i) * MiB, (110 + i) * MiB)
    said = forecast(monitor.history, 400 * MiB)._replace(latest=math.inf)
    monitor.alarms.append(Alarm("growth", 100, "grows", said))
    fan = Changes(monitor).since([], 0)[0]["forecast"]
    told = {"step": 100, "peak": said.peak_bytes, "budget": 400 * MiB, "latest": None}
    assert fan == told | {"steps_left": said.steps_left, "earliest": said.earliest}


def test_after_the_run_there_is_no_listener_no_hook_and_no_thread(shell):
    before = threading.active_count()
    monitor = Monitor(sources=[Made("heap")], every=0.01)
    figure, _ = followed(monitor)
    assert len(monitor.listeners) == len(hooks(shell)) == 1
    end_of_cell(shell)  # the loop is in a later cell
    assert len(monitor.listeners) == len(hooks(shell)) == 1
    with pytest.raises(KeyboardInterrupt), monitor:
        steps(monitor, 3)
        raise KeyboardInterrupt
    end_of_cell(shell)
    assert monitor.listeners == hooks(shell) == []
    assert threading.active_count() == before
    shown = len(shell.shown)
    end_of_cell(shell)
    assert len(shell.shown) == shown


def test_a_figure_that_fails_stands_still_and_the_run_goes_on(shell, monkeypatch):
    monkeypatch.setattr(live_page, "UPDATE_SECONDS", 0.0)
    monitor = Monitor(sources=[Made("heap")], every=0.002)
    figure, _ = followed(monitor)

    def lost(sent, columns):
        raise ConnectionError("the browser is gone")

    figure.widget.send = lost
    with monitor:
        steps(monitor, 10, 0.005)
    end_of_cell(shell)
    assert str(figure.error) == "the browser is gone" and monitor.listeners == hooks(shell) == []
    assert monitor.history.steps == 10 and monitor.alarms == []


def test_a_page_that_opens_late_is_told_the_whole_run(shell):
    monitor = Monitor(sources=[Made("heap")], every=0.002)
    figure, _ = followed(monitor)
    with monitor:
        steps(monitor, 10, 0.005)
        late = Browser()
        state = figure.widget.get_state()["whole"]
        late.take(state, [state["rows"], state["ends"], state["peaks"]])
        assert len(late.rows) > 3 and late.ends == list(monitor.history.ends) and not state["ended"]
    assert figure.widget.get_state("whole")["whole"]["ended"]
    assert "whole" not in figure.widget.get_state("title")


def test_without_widgets_a_picture_and_a_table_stand_in_and_nothing_listens(shell, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    live_page._widget_class.cache_clear()
    monitor = Monitor(sources=[Made("heap")], every=0.01)
    live(monitor)
    assert monitor.listeners == [] and VIEW not in shell.shown[0][0]
    with monitor:
        steps(monitor, 4)
    end_of_cell(shell)
    data = shell.shown[2][0]
    assert set(data) == {"image/png", "text/plain"} and "over 4 steps" in data["text/plain"]
    assert hooks(shell) == []


CELLS = (
    """
import threading
from memlab.book.live import live
from memlab.memory_monitoring import Monitor
threads = set(threading.enumerate())
monitor = Monitor(every=0.02)
figure = live(monitor)
figure""",
    """
import time
with monitor:
    for _ in range(30):
        time.sleep(0.02)
        monitor.step()
        if monitor.history.steps == 20:
            raise KeyboardInterrupt""",
    """
left = [thread.name for thread in set(threading.enumerate()) - threads if "memlab" in thread.name]
print(figure.updates > 1, figure.error, monitor.listeners, left)""",
)


def test_in_a_kernel_an_interrupted_run_ends_as_a_saved_picture(tmp_path):
    cells = [new_code_cell(source.strip()) for source in CELLS]
    cells[1].metadata["tags"] = ["raises-exception"]
    notebook = new_notebook(cells=cells)
    run(notebook, tmp_path / "live.ipynb")
    clean(notebook)
    nbformat.validate(notebook)
    picture, words = cells[0].outputs
    assert "over 20 steps" in picture.data["text/plain"] and set(picture.data) == {"image/png", "text/plain"}
    assert "over 20 steps" in words.data["text/markdown"] and "widgets" not in notebook.metadata
    assert [output.get("ename") for output in cells[1].outputs] == ["KeyboardInterrupt"]
    assert cells[2].outputs[0].text == "True None [] []\n"
