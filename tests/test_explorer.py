"""The memory explorer sends the browser the whole truth, and stands still where there is no browser."""

import sys
from array import array

import pytest
import torch

from memlab.book.explorer import columns, explore
from memlab.book.style import COLOURS
from memlab.book.workloads import GPT, text_batch
from memlab.memory_timeline import Event, Line, Meter, Storage, Timeline
from memlab.units import format_bytes
from tests.harness import refusals, refused

pytest.importorskip("anywidget")


def gpt_step(steps=1, layers=2):
    torch.manual_seed(0)
    model = GPT(layers=layers, width=32, context=16)
    x, y = text_batch(2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(steps):
        with Meter(model, optimizer, inputs=(x, y)) as meter:
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.timeline


@pytest.fixture(scope="module")
def step():
    return gpt_step()


def numbers(sent, column, code):
    return array(code, sent[column]).tolist()


def words(sent, column):
    return [sent["texts"][i] for i in numbers(sent, column, "i")]


def replayed(sent, event):
    """Bytes of each storage just after an event, from nothing but the columns."""
    held = numbers(sent, "before", "d")
    for storage, delta in list(zip(numbers(sent, "storage", "i"), numbers(sent, "delta", "d"), strict=True))[:event]:
        held[storage] += delta
    return held


def test_the_columns_replay_to_what_the_timeline_says_is_alive_at_every_event(step):
    sent = columns("step", step)
    names, shapes, reasons = list(COLOURS), words(sent, "shape"), words(sent, "reason")
    kinds = [names[i] for i in numbers(sent, "category", "i")]
    for event in (0, 1, step.peak_event, len(step) // 2, len(step)):
        found = {(held, kinds[i], reasons[i]) for i, held in enumerate(replayed(sent, event)) if held}
        assert found == {(s.nbytes, s.category, s.reason) for s in step.alive(event)}
    assert sent["peak"] == step.peak_event and "32×16 float32" not in shapes and "scalar float32" in shapes
    assert len(set(sent["texts"])) == len(sent["texts"]) < len(words(sent, "line") + reasons)
    assert words(sent, "op") == [event.op for event in step.events]
    assert words(sent, "phase") == [event.phase for event in step.events]


def test_sizes_beyond_32_bits_are_exact_and_an_empty_timeline_is_empty():
    line = Line("f", "x = y")
    with Meter() as meter:
        pass
    assert columns("empty", meter.timeline)["delta"] == b""
    huge = Storage(7, 2**40 + 1, "activation", (2**40 + 1,), "uint8", "cpu", "add", "forward", line, "", "", "saved")
    sent = columns("huge", Timeline([huge], [Event(7, 2**40 + 1, "add", "forward", line)]))
    assert replayed(sent, 1) == [2**40 + 1]


def test_a_pin_set_from_python_is_checked_and_read_back(step):
    explorer = explore({"a": step, "b": gpt_step(steps=2)})
    assert (explorer.shown, explorer.event) == ("a", None)
    explorer.event = step.peak_event
    assert explorer.event == step.peak_event == explorer.widget.event
    explorer.shown = "b"
    assert (explorer.shown, explorer.event, explorer.widget.shown) == ("b", None, 1)
    with pytest.raises(IndexError, match="expected an event from 0"):
        explorer.event = 10**6
    with pytest.raises(ValueError, match="expected one of a, b; found 'c'"):
        explorer.shown = "c"


def test_it_is_shown_with_a_picture_that_stands_in_for_the_widget_a_caption_and_a_table(step, monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata=None, **_: displayed.append((data, metadata)))
    explorer = explore(step)
    explorer._ipython_display_()
    (view, metadata), (words, _), (table, _) = displayed
    assert "application/vnd.jupyter.widget-view+json" in view and view["image/png"] and table is explorer.table
    alt = metadata["image/png"]["alt"]
    assert format_bytes(step.peak_bytes) in alt and alt in view["text/plain"] and "storages" in view["text/plain"]
    assert alt == explorer.picture.alt and words == {"text/markdown": f"*{alt}*", "text/plain": alt}


def test_several_timelines_are_compared_on_one_axis(step):
    explorer = explore({"first": step, "second": gpt_step(steps=2)}, budget="1 MiB")
    assert "first peaks at" in explorer.picture.alt and "1.0 MiB" in explorer.picture.alt
    assert [row[0] for row in explorer.table.rows] == ["first", "second"]
    assert len(explorer.widget.timelines) == 2 and explorer.widget.budget == 2**20


def test_without_anywidget_the_picture_and_the_table_are_left(step, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    from memlab.book import explorer

    explorer._widget_class.cache_clear()
    still = explore(step)
    assert still.widget is None and still.event is None and still.shown == "step"
    assert set(still._repr_mimebundle_()[0]) == {"image/png", "text/plain"}
    with pytest.raises(RuntimeError, match="expected anywidget"):
        still.event = 1


REFUSALS = {
    "no timeline": (lambda: explore({}), ValueError, "expected a timeline"),
    "a class": (lambda: explore(Meter), TypeError, "found type for 'step'"),
    "a number among several": (lambda: explore({"a": 1}), TypeError, "found int for 'a'"),
}


@refusals(REFUSALS)
def test_what_is_no_timeline_is_refused(call, error, words):
    refused(call, error, words)
