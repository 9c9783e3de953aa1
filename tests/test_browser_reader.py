"""The later chapters as a reader has them: run from top to bottom in a real JupyterLab, each control used.

One of them by default, all in the thorough tier. `test_browser` does so with the first chapters. This is a page of its
own so that two processes share the work.
"""

import shutil
from pathlib import Path

import nbformat
import pytest

from tests.browser_helpers import need_browser
from tests.slider_grids import sliders_in
from tests.test_browser import BOOK, CHAPTERS, RUN
from tests.tiers import some

need_browser("jupyterlab")

from playwright.sync_api import TimeoutError  # noqa: E402

from memlab.book.browser import Page, browser, jupyterlab  # noqa: E402

WIDGET = "application/vnd.jupyter.widget-view+json"
CHANGED = "([html, before]) => html.innerHTML !== before"
SOON = 2  # seconds, once the kernel has answered
BY_DEFAULT = "07_gradient_accumulation.ipynb"
FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab's address over a copy of the book, and a browser."""
    folder = tmp_path_factory.mktemp("book") / "chapters"
    shutil.copytree(BOOK, folder, ignore=shutil.ignore_patterns("exercises", ".ipynb_checkpoints"))
    with jupyterlab(folder) as address, browser() as opened:
        yield opened, address


@some("name", [BY_DEFAULT, *(name for name in CHAPTERS if name not in (*RUN, BY_DEFAULT))], keep=1)
def test_a_chapter_runs_from_top_to_bottom_and_every_widget_answers(lab, name):
    page = Page(*lab, name)
    page.run_all()
    settle(page)
    assert page.errors() == []
    views = [output for output in page.outputs() if WIDGET in output.get("data", {})]
    sets = page.locator(".jp-OutputArea-output .widget-vbox:has(> .widget-html)")
    explorers = page.locator(".jp-OutputArea-output .memlab-explorer")
    assert sets.count() == sliders_in(nbformat.read(Path(BOOK, name), as_version=4))
    assert len(views) >= sets.count() + explorers.count() > 0
    for one in sets.all():
        controls = one.locator(".noUi-handle, input[type=checkbox], .widget-toggle-buttons button:not(.mod-active)")
        moved = [
            moves(page, one, control) for control in controls.all()
        ]  # each is used; one that shows another is enough
        assert any(moved), one.inner_text()
    for one in explorers.all():
        before = one.locator(".memlab-readout").inner_text()
        one.locator(".memlab-canvas canvas[tabindex]").focus()
        page.page.keyboard.press("ArrowLeft")
        settle(page)
        assert one.locator(".memlab-readout").inner_text() != before
    assert page.errors() == []
    page.close()


def moves(page, box, control) -> bool:
    """Use a control, a slider at its end the other way; whether another picture was there afterwards."""
    picture = box.locator(".widget-html-content").first
    if "noUi-handle" not in (control.get_attribute("class") or ""):
        return changes(page, picture, control.click)
    control.focus()
    return any(
        changes(page, picture, lambda key=key: page.page.keyboard.press(key)) for key in ("ArrowRight", "ArrowLeft")
    )


def changes(page, picture, move) -> bool:
    """Whether a picture becomes another one after a move, soon."""
    before = picture.inner_html()
    move()
    settle(page)
    try:
        page.page.wait_for_function(CHANGED, arg=[picture.element_handle(), before], timeout=1000 * SOON)
    except TimeoutError:
        return False
    return True


def settle(page) -> None:
    """Wait until the kernel has done what was asked before, and the browser has drawn it."""
    page.ask("")
    page.page.evaluate(FRAMES)
