"""Sliders call a plain function: at the start, at each move, and with a clear word where it fails."""

import asyncio
import gc
import re
import sys
import threading
import weakref

import numpy as np
import pytest

from memlab.book import interactive
from memlab.book.interactive import Interactive
from memlab.book.style import Picture, canvas
from tests.harness import refusals, refused

pytest.importorskip("ipywidgets")

drawn = []


@pytest.fixture(autouse=True)
def forget():
    drawn.clear()


def line(height=2, dashed=False, kind="solid"):
    drawn.append((height, dashed, kind))
    figure, axes = canvas(3, 2)
    axes.plot([0, height], linestyle="--" if dashed else "-")
    return Picture(figure, f"A {kind} line rises to {height}.")


def controls(made):
    return made.widget.children[:-1]


def image(made):
    return made.widget.children[-1].value


def move(made, place, control=0):
    controls(made)[control].value = place


def shown(made):
    """The sentence of the picture at each place of the first control."""
    sentences = []
    for place in range(len(controls(made)[0].options)):
        move(made, place)
        sentences += re.findall('alt="(.*?)"', image(made)) or [image(made)]
    return sentences


def test_it_starts_at_the_functions_own_defaults_or_else_at_the_first_value():
    assert Interactive(line, height=[1, 2, 3]).start == {"height": 2}
    assert Interactive(lambda n: line(n), n=range(5, 8)).start == {"n": 5}


def test_a_number_gets_a_slider_a_truth_a_checkbox_and_a_text_buttons():
    made = Interactive(line, height=[1, 2], dashed=[False, True], kind=["solid", "thin"])
    assert [type(control).__name__ for control in controls(made)] == ["SelectionSlider", "Checkbox", "ToggleButtons"]


def test_moving_a_control_shows_another_picture_with_its_own_alt_text():
    made = Interactive(line, height={"low": 2, "high": 1000}, kind=["solid", '"><b>bold'])
    grid = [{"height": h, "kind": k} for h in (2, 1000) for k in ("solid", '"><b>bold')]
    assert list(made.grid()) == grid
    before = image(made)
    move(made, 1)
    assert image(made) != before and 'alt="A solid line rises to 1000."' in image(made)
    assert re.search(r'<img width="270" height="180" .* src="data:image/png;base64,iVBOR', image(made))
    move(made, 1, control=1)
    assert 'alt="A &quot;&gt;&lt;b&gt;bold line rises to 1000."' in image(made)


def test_a_picture_is_drawn_once_and_remembered():
    made = Interactive(line, height=[1, 2])
    for place in (0, 1, 0, 1):
        move(made, place)
    assert drawn == [(2, False, "solid"), (1, False, "solid")]


AHEAD = 10 * interactive.AHEAD_AFTER


def test_the_next_picture_is_drawn_ahead_while_the_reader_looks_and_further_back_for_one_who_goes_back():
    made = Interactive(line, height=[1, 2, 3, 4], dashed=[False, True])

    async def slide_and_look():
        move(made, 2)
        assert len(drawn) == 2
        await asyncio.sleep(AHEAD)
        assert drawn[2:] == [(4, False, "solid")]
        move(made, 3)  # the end: nothing is ahead
        await asyncio.sleep(AHEAD)
        move(made, 1)
        move(made, 2)  # back before the first one's time has come
        await asyncio.sleep(AHEAD)
        assert len(drawn) == 3
        move(made, True, control=1)
        move(made, 1)  # from 3 to 2
        await asyncio.sleep(AHEAD)

    asyncio.run(slide_and_look())
    assert drawn[-2:] == [(2, True, "solid"), (1, True, "solid")]


def test_a_slider_that_another_thread_hears_is_drawn_in_the_cells_thread_once_no_cell_runs(monkeypatch):
    """JupyterLab sends what widgets say to a kernel's subshell, which is a thread of its own."""
    monkeypatch.setattr(interactive, "AHEAD_AFTER", 60)
    threads = []

    def here(height=1):
        threads.append(threading.current_thread())
        return line(height)

    async def slide() -> None:
        made = Interactive(here, height=[1, 2, 3, 4, 5])
        (slider,) = controls(made)
        await asyncio.to_thread(move, made, 1)
        await asyncio.sleep(0)
        assert len(drawn) == 2 and "rises to 2." in image(made)
        beside = threading.Thread(target=lambda: [move(made, place) for place in (2, 3, 4)])
        beside.start()
        beside.join()
        assert len(drawn) == 2 and slider.value == 4  # a cell runs
        await asyncio.sleep(0)
        assert len(drawn) == 3 and "rises to 5." in image(made)
        assert set(threads) == {threading.main_thread()}

    asyncio.run(slide())


def test_a_failing_picture_is_drawn_ahead_in_silence():
    def picky(n=1):
        if n == 3:
            raise ValueError("no three")
        return line(n)

    async def slide_and_look():
        made = Interactive(picky, n=[1, 2, 3])
        move(made, 1)
        await asyncio.sleep(AHEAD)
        assert "<img" in image(made)

    asyncio.run(slide_and_look())
    assert drawn == [(1, False, "solid"), (2, False, "solid")]


def test_after_one_slow_picture_no_remembered_and_no_quick_one_leads_to_drawing_ahead(monkeypatch):
    # Of all pictures only that of 3 takes time: a second.
    monkeypatch.setattr(interactive.time, "perf_counter", lambda: float(sum(height == 3 for height, *_ in drawn)))

    async def slide_and_look():
        made = Interactive(line, height=[1, 2, 3, 4, 5, 6])
        for place in (2, 4, 2, 4):
            move(made, place)
            await asyncio.sleep(AHEAD)

    asyncio.run(slide_and_look())
    assert [height for height, *_ in drawn] == [2, 3, 5]


def test_none_arrays_and_equal_values_are_shown_each_at_its_own_place():
    assert shown(Interactive(lambda n: line(n), n=[1, None, 2])) == [
        f"A solid line rises to {n}." for n in (1, None, 2)
    ]
    assert shown(Interactive(line, height=np.arange(4))) == [f"A solid line rises to {n}." for n in range(4)]
    flat, peak = np.zeros(5000), np.zeros(5000)
    peak[2500] = 7  # their reprs are the same
    made = Interactive(lambda points=peak: line(points.max()), points={"flat": flat, "peak": peak})
    assert made.start["points"] is peak
    assert shown(made) == ["A solid line rises to 0.0.", "A solid line rises to 7.0."]
    kinds = []
    made = Interactive(lambda of=True: kinds.append(type(of)) or line(), of={"int": 1, "float": 1.0, "bool": True})
    assert controls(made)[0].label == "bool"
    shown(made)
    assert kinds == [bool, int, float]


def test_labels_are_what_the_reader_sees_also_for_true_and_false():
    made = Interactive(line, dashed={"with": True, "without": False})
    assert [label for label, _ in controls(made)[0].options] == ["with", "without"]
    assert controls(made)[0].label == "without" and "with" in repr(made)
    drawn.clear()
    made = Interactive(line, dashed=[True, False])
    controls(made)[0].value = True
    assert [dashed for _, dashed, _ in drawn] == [False, True]
    assert type(controls(Interactive(line, kind=["True", "False", "solid"]))[0]).__name__ == "ToggleButtons"


def test_only_the_first_figure_is_kept():
    figures = weakref.WeakSet()

    def draw(n=1):
        picture = line(n)
        figures.add(picture.figure)
        return picture

    made = Interactive(draw, n=range(1, 6))
    assert len(set(shown(made))) == 5
    gc.collect()
    assert list(figures) == [made.picture.figure]


def test_a_failing_function_says_so_in_place_of_the_picture_and_the_next_move_draws_again():
    def picky(n=1):
        if n == 2:
            raise ValueError("n must be <odd>")
        return line(n)

    made = Interactive(picky, n=[1, 2, 3])
    move(made, 1)
    assert 'class="memlab-failed"' in image(made)
    assert "picky(n=2) raised ValueError: n must be &lt;odd&gt;" in image(made)
    move(made, 2)
    assert "<img" in image(made)


def test_a_saved_notebook_keeps_the_first_picture_and_a_sentence():
    data, metadata = Interactive(line, height=[1, 2])._repr_mimebundle_()
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} <= set(data)
    assert data["text/plain"] == "Slide height (1 to 2). At the start: A solid line rises to 2."
    assert metadata["image/png"]["alt"] == "A solid line rises to 2."


def test_without_widgets_the_first_picture_is_shown_still(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    made = Interactive(line, height=[1, 2])
    data, _ = made._repr_mimebundle_()
    assert made.widget is None and "image/png" in data and not any("widget" in kind for kind in data)


def test_it_shows_itself_with_a_caption(monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda data, **how: displayed.append(data))
    Interactive(line, height=[1, 2])._ipython_display_()
    view, words = displayed
    assert "application/vnd.jupyter.widget-view+json" in view
    assert words["text/markdown"] == "*Slide height (1 to 2). At the start: A solid line rises to 2.*"


REFUSALS = {
    "nothing": (lambda: Interactive(line), ValueError, "expected at least one slider"),
    "no value": (lambda: Interactive(line, height=[]), ValueError, "expected at least one value for height"),
    "two of one label": (
        lambda: Interactive(line, height=[1, 2, "1"]),
        ValueError,
        "expected a label for each value of height, found two of '1'",
    ),
    "another start": (
        lambda: Interactive(line, height=[1, 3]),
        ValueError,
        "height to start at one of [1, 3], found 2",
    ),
    "another name": (
        lambda: Interactive(line, width=[1]),
        TypeError,
        "expected one of draw's parameters, height, dashed, kind; found 'width'",
    ),
    "no picture": (lambda: Interactive(lambda n: n, n=[1]), TypeError, "expected <lambda>(n=1) to return a Picture"),
}


@refusals(REFUSALS)
def test_a_control_that_draws_nothing_is_refused(call, error, words):
    refused(call, error, words)
