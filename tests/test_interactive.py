"""Sliders call a plain function: at the start, at each move, and with a clear word where it fails."""

import asyncio
import re

import pytest

from memlab.book import interactive
from memlab.book.interactive import Interactive
from memlab.book.style import Picture, canvas

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


def test_it_starts_at_the_functions_own_defaults_or_else_at_the_first_value():
    assert Interactive(line, height=[1, 2, 3]).start == {"height": 2}
    assert Interactive(lambda n: line(n), n=range(5, 8)).start == {"n": 5}


def test_a_number_gets_a_slider_a_truth_a_checkbox_and_a_text_buttons():
    made = Interactive(line, height=[1, 2], dashed=[False, True], kind=["solid", "thin"])
    assert [type(control).__name__ for control in controls(made)] == ["SelectionSlider", "Checkbox", "ToggleButtons"]


def test_moving_a_control_shows_another_picture_with_its_own_alt_text():
    made = Interactive(line, height={"low": 2, "high": 1000})
    before = image(made)
    controls(made)[0].value = 1000
    assert image(made) != before and 'alt="A solid line rises to 1000."' in image(made)
    assert re.search(r'<img width="270" height="180" .* src="data:image/png;base64,iVBOR', image(made))


def test_a_picture_is_drawn_once_and_remembered():
    made = Interactive(line, height=[1, 2])
    for value in (1, 2, 1, 2):
        controls(made)[0].value = value
    assert drawn == [(2, False, "solid"), (1, False, "solid")]


def test_the_next_picture_is_drawn_ahead_while_the_reader_looks():
    made = Interactive(line, height=[1, 2, 3, 4])

    async def slide_and_look():
        controls(made)[0].value = 3
        assert len(drawn) == 2
        await asyncio.sleep(10 * interactive.AHEAD_AFTER)
        assert drawn[2:] == [(4, False, "solid")]
        controls(made)[0].value = 4  # the end: nothing is ahead
        await asyncio.sleep(10 * interactive.AHEAD_AFTER)
        controls(made)[0].value = 2
        controls(made)[0].value = 3  # back before the first one's time has come
        await asyncio.sleep(10 * interactive.AHEAD_AFTER)

    asyncio.run(slide_and_look())
    assert len(drawn) == 3


def test_a_slow_or_failing_picture_is_not_drawn_ahead(monkeypatch):
    def picky(n=1):
        if n == 3:
            raise ValueError("no three")
        return line(n)

    async def slide_and_look():
        made = Interactive(picky, n=[1, 2, 3])
        controls(made)[0].value = 2
        await asyncio.sleep(10 * interactive.AHEAD_AFTER)
        assert "<img" in image(made)
        monkeypatch.setattr(interactive, "AHEAD_AT_MOST", 0)
        slow = Interactive(line, height=[2, 3, 4])
        controls(slow)[0].value = 3
        await asyncio.sleep(10 * interactive.AHEAD_AFTER)

    asyncio.run(slide_and_look())
    assert drawn == [(1, False, "solid"), (2, False, "solid"), (2, False, "solid"), (3, False, "solid")]


def test_the_grid_is_every_combination_of_values():
    grid = list(Interactive(line, height=[1, 2], dashed=[False, True]).grid())
    assert grid == [{"height": h, "dashed": d} for h in (1, 2) for d in (False, True)]


def test_a_failing_function_says_so_in_place_of_the_picture_and_the_next_move_draws_again():
    def picky(n=1):
        if n == 2:
            raise ValueError("n must be <odd>")
        return line(n)

    made = Interactive(picky, n=[1, 2, 3])
    controls(made)[0].value = 2
    assert 'class="memlab-failed"' in image(made) and "picky(n=2) raised ValueError: n must be &lt;odd&gt;" in image(
        made
    )
    controls(made)[0].value = 3
    assert "<img" in image(made)


def test_a_saved_notebook_keeps_the_first_picture_and_a_sentence():
    data, metadata = Interactive(line, height=[1, 2])._repr_mimebundle_()
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} <= set(data)
    assert data["text/plain"] == "Slide height (1 to 2). At the start: A solid line rises to 2."
    assert metadata["image/png"]["alt"] == "A solid line rises to 2."


def test_a_control_that_draws_nothing_is_refused():
    with pytest.raises(ValueError, match="expected at least one slider"):
        Interactive(line)
    with pytest.raises(ValueError, match="expected at least one value for height"):
        Interactive(line, height=[])
    with pytest.raises(ValueError, match=r"expected the default of height among \[1, 3\], found 2"):
        Interactive(line, height=[1, 3])
    with pytest.raises(TypeError, match="expected one of draw's parameters, height, dashed, kind; found 'width'"):
        Interactive(line, width=[1])
    with pytest.raises(TypeError, match=r"expected <lambda>\(n=1\) to return a Picture, found int"):
        Interactive(lambda n: n, n=[1])
