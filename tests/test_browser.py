"""The chapters in a real JupyterLab in a real browser: they open, they run, and what moves moves.

Skipped without Chromium, unless MEMLAB_BROWSER=required says that there must be one.
"""

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook, new_output

from memlab.book.workloads import GPT, text_batch
from memlab.memory_timeline import Meter
from memlab.units import KiB, MiB, format_bytes
from tests.browser_helpers import need_browser
from tests.tiers import some

BOOK = Path(__file__).parents[1] / "chapters"
CHAPTERS = sorted(path.name for path in BOOK.glob("*.ipynb"))
RUN = CHAPTERS[:3]  # later chapters are opened; test_browser_reader runs them
BY_DEFAULT = CHAPTERS[1]

need_browser("jupyterlab")

from memlab.book.browser import Page, browser, close_all, jupyterlab  # noqa: E402
from memlab.book.responsiveness import measure  # noqa: E402
from memlab.book.run import KERNEL  # noqa: E402

EXPLORE = """
from memlab.book.explorer import explore
from memlab.memory_timeline import Timeline
explorer = explore({name: Timeline.load(f"{name}.json") for name in ("first", "second")}, budget="2 MiB")
explorer
"""
TELL = """
from memlab.book.style import caption
from memlab.book.tables import Table
caption(" ".join(SIGNS))
Table(["line", *SIGNS], [(sign, *SIGNS) for sign in SIGNS])
"""
SLIDE = """
from memlab.book.interactive import Interactive
from memlab.book.style import Picture, canvas
def draw(height=2):
    if height == 4:
        raise ValueError("four is too many")
    figure, axes = canvas(4, 3)
    return Picture(figure, f"A line rises to a height of {height}.")
Interactive(draw, height=[1, 2, None, 3, 4])
"""
SIGNS = (
    "__init__: self.w = a",
    "y = x*w + z*v",
    "t = x**2 + y**2",
    "mask = a<b>c",
    '<img src="nowhere.png">',
    'd["a"](x) &lt; `b` ~~c~~',
    "$a + $b, $$c$$ and \\(d\\) or \\begin{e}\\end{e}",
    "a | b \\| c \\ @@0@@",
    "optimizer_state, _private and dunder__name__s",
)
NAME = "one of 100% #1.ipynb"


@pytest.fixture(scope="session")
def steps():
    """A GPT's first and second step."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, context=16)
    x, y = text_batch(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = {}
    for name in ("first", "second"):
        with Meter(model, optimizer, inputs=(x, y)) as meter:
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = meter.timeline
    return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory, steps):
    """A function that opens a notebook: a copy of a chapter, or one of the small ones above."""
    folder = tmp_path_factory.mktemp("lab")
    for name in CHAPTERS:
        shutil.copy(BOOK / name, folder)
    for name, timeline in steps.items():
        timeline.save(folder / f"{name}.json")
    live = [new_code_cell(source.strip()) for source in (EXPLORE, SLIDE, f"SIGNS = {SIGNS}{TELL}")]
    error = new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=[])
    lost = new_output("display_data", {"text/html": '<img src="nowhere.png" alt="nothing">'})
    broken = [new_code_cell("1 / 0", outputs=[error]), new_code_cell("HTML(page)", outputs=[lost])]
    for name, cells in {NAME: live, "broken.ipynb": broken}.items():
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # kernels that run at once share the cores
        with jupyterlab(folder) as address, browser() as opened:
            yield lambda name: Page(opened, address, name)


@pytest.fixture(scope="module")
def explorer(lab):
    """A notebook with the explorer of both steps, sliders and a table, run and waiting."""
    page = lab(NAME)
    page.run_all()
    page.page.wait_for_selector(".memlab-explorer tbody tr")
    page.page.wait_for_selector(".widget-slider")
    yield page
    assert page.errors() == [] and page.complaints == []
    page.close()


@pytest.fixture
def surface(explorer):
    """Its picture, as on the first day: the whole first step, nothing pinned, searched or left out."""
    explorer.ask("explorer.shown = 'first'; explorer.event = None")
    found = explorer.page.locator(".memlab-canvas canvas[tabindex]")
    found.focus()
    explorer.page.keyboard.press("0")
    explorer.page.keyboard.press("p")
    settle(explorer)
    return found


def settle(page):
    """Wait until all that the explorer had to draw is drawn."""
    page.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def readout(page):
    return page.page.locator(".memlab-readout").inner_text()


def foot(page):
    return page.page.locator(".memlab-foot").inner_text()


def table(page):
    """The rows of the explorer's table as text."""
    return page.page.evaluate(
        """() => [...document.querySelectorAll(".memlab-explorer tbody tr:not([hidden])")]
          .map(row => [...row.cells].map(cell => cell.textContent))"""
    )


def pixels(page, index=0):
    """What is drawn on the explorer's lower (0) or upper (1) canvas."""
    return page.page.evaluate("(i) => document.querySelectorAll('.memlab-canvas canvas')[i].toDataURL()", index)


def expected(timeline, event):
    """The same rows from the timeline itself."""
    return [
        [
            format_bytes(s.nbytes),
            s.category.replace("_", " "),
            f"{'×'.join(map(str, s.shape)) or 'scalar'} {s.dtype}",
            s.module or s.name.rpartition(" of ")[2].rpartition(".")[0],
            "(there before)" if s.phase == "before" else str(s.line),
            s.reason,
        ]
        for s in timeline.alive(event)
    ]


def press(page, *keys):
    for key in keys:
        page.page.keyboard.press(key)
    settle(page)


class Pages(dict):
    """Chapters in one JupyterLab, each opened when it is asked for."""

    def __init__(self, lab):
        self.lab = lab

    def __missing__(self, name):
        self[name] = next(iter(self.values())).beside(name) if self else self.lab(name)
        return self[name]


@pytest.fixture(scope="module")
def pages(lab):
    opened = Pages(lab)
    yield opened
    close_all(list(opened.values()))


@some("name", [BY_DEFAULT, *(name for name in CHAPTERS if name != BY_DEFAULT)], keep=1)
def test_a_chapter_opens_whole(pages, name):
    page = pages[name]
    count = len(nbformat.read(BOOK / name, as_version=4).cells)
    page.show()
    assert page.locator(".jp-Notebook .jp-Cell").count() == count
    assert page.errors() == [] and page.complaints == []


@some("name", [BY_DEFAULT, *(name for name in RUN if name != BY_DEFAULT)], keep=1)
def test_a_chapter_runs_from_top_to_bottom_and_its_widgets_live(pages, name):
    page = pages[name]
    page.show()
    page.start_all()
    page.wait_for_all()
    settle(page)
    assert page.errors() == []
    views = [o for o in page.outputs() if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    shown = page.locator(".jp-OutputArea-output .memlab-explorer, .jp-OutputArea-output .widget-vbox").count()
    assert shown == len(views) > 0
    before = page.locator(".memlab-readout").first.inner_text()
    page.locator(".memlab-canvas canvas[tabindex]").first.focus()
    press(page, "ArrowRight")
    assert page.locator(".memlab-readout").first.inner_text() != before
    if page.locator(".widget-slider").count():
        assert slid(page)


def slid(page, key="ArrowRight"):
    """Press a key on the first slider, and wait for another picture; its alt text, or what stands in its place."""
    html = page.locator(".widget-vbox .widget-html-content").first
    before = html.inner_html()
    page.locator(".widget-slider .noUi-handle").first.focus()
    page.page.keyboard.press(key)
    page.page.wait_for_function("([html, before]) => html.innerHTML !== before", arg=[html.element_handle(), before])
    return html.evaluate("e => { const image = e.querySelector('img'); return image ? image.alt : e.innerText; }")


def test_what_is_broken_is_told(pages):
    page = pages[BY_DEFAULT].beside("broken.ipynb")
    page.locator(".jp-OutputArea-output img").wait_for(state="attached")
    page.page.wait_for_timeout(500)
    assert page.errors() == ["ZeroDivisionError: division by zero", "a picture did not load: nothing"]
    assert "404" in page.complaints.pop()


def test_a_slider_draws_again_and_a_failing_callback_is_seen(explorer):
    assert slid(explorer) == "A line rises to a height of None."
    assert slid(explorer) == "A line rises to a height of 3." and explorer.errors() == []
    told = "draw(height=4) raised ValueError: four is too many"
    assert slid(explorer) == told and explorer.errors() == [told]
    assert slid(explorer, "ArrowLeft") == "A line rises to a height of 3." and explorer.errors() == []
    assert slid(explorer, "ArrowLeft") == "A line rises to a height of None."


def test_code_in_a_table_or_a_caption_is_shown_letter_for_letter(explorer):
    explorer.page.wait_for_timeout(500)  # MathJax comes last
    shown = explorer.page.evaluate(
        """() => [...document.querySelectorAll(".jp-RenderedMarkdown")].map((output) =>
          [[...output.querySelectorAll("td:first-child")].map((cell) => cell.textContent), output.textContent.trim(),
           output.querySelectorAll("img, strong, del, code, a, mjx-container").length])"""
    )
    *_, (_, caption, _), (cells, _, _) = shown
    assert cells == list(SIGNS) and caption == " ".join(SIGNS)
    assert all(formatted == 0 for *_, formatted in shown)


def test_sigterm_ends_jupyterlab_too_and_a_stranger_is_not_let_in(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "temporary").mkdir()
    code = """
import sys, time
from memlab.book.browser import jupyterlab
with jupyterlab(sys.argv[1]) as address:
    print(address, flush=True)
    time.sleep(60)
"""
    env = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "served"], stdout=subprocess.PIPE, text=True, env=env
    ) as lab:
        server, _, token = lab.stdout.readline().strip().partition("?")
        assert urllib.request.urlopen(f"{server}api/contents?{token}").status == 200
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{server}api/contents")
        lab.send_signal(signal.SIGTERM)
        assert lab.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_it_opens_at_the_peak_with_the_table_of_what_is_alive(explorer, surface, steps):
    first = steps["first"]
    assert f"event {first.peak_event} of {len(first)}" in readout(explorer)
    assert format_bytes(first.peak_bytes) in readout(explorer)
    assert table(explorer) == expected(first, first.peak_event)


def test_a_click_pins_the_moment_for_table_and_kernel_until_it_is_let_go(explorer, surface, steps):
    surface.click(position={"x": 300, "y": 150})
    settle(explorer)
    event = int(explorer.ask("print(explorer.event)"))
    pinned = table(explorer)
    assert pinned == expected(steps["first"], event) and f"pinned event {event}" in foot(explorer)
    surface.hover(position={"x": 500, "y": 150})
    settle(explorer)
    assert table(explorer) == pinned and f"from the pin at {event}" in readout(explorer)
    press(explorer, "Escape")
    assert explorer.ask("print(explorer.event)") == "None\n" and "pinned" not in foot(explorer)
    assert table(explorer) != pinned


def test_the_keyboard_reaches_every_moment_and_jupyterlab_hears_none_of_it(explorer, surface, steps):
    first = steps["first"]
    cells = explorer.page.locator(".jp-Notebook .jp-Cell").count()

    def at():
        return int(surface.get_attribute("aria-valuenow"))

    backward = next(span for span in first.phases if span.phase == "backward")
    for keys, event in [
        (["Home"], 0),
        (["ArrowRight"], 1),
        (["Shift+ArrowRight"], 11),
        (["ArrowLeft"], 10),
        (["PageDown"], backward.start),
        (["PageUp"], 1),
        (["PageUp"], 0),
        (["PageDown"] * len(first.phases), first.phases[-1].start),
        (["PageDown"], len(first)),
        (["Home", "End"], len(first)),
        (["p"], first.peak_event),
        (["a", "b", "d", "d", "x", "m"], first.peak_event),
    ]:
        press(explorer, *keys)
        assert at() == event, keys
    assert explorer.page.locator(".jp-Notebook .jp-Cell").count() == cells
    press(explorer, "Enter")
    assert explorer.ask("print(explorer.event)") == f"{first.peak_event}\n"
    assert format_bytes(first.peak_bytes) in surface.get_attribute("aria-valuetext")


def test_sorting_filtering_and_searching_keep_what_they_should(explorer, surface, steps):
    page = explorer.page
    rows = expected(steps["first"], steps["first"].peak_event)
    page.get_by_role("button", name="size").click()
    settle(explorer)
    assert table(explorer) == rows[::-1]
    page.get_by_role("button", name="line", exact=True).click()
    settle(explorer)
    lines = [row[4] for row in table(explorer)]
    assert sorted(lines, key=str.lower) != [row[4] for row in rows] and sorted(lines) == sorted(row[4] for row in rows)
    assert all(lines.index(line) + lines.count(line) > i for i, line in enumerate(lines))
    page.get_by_role("button", name="size").click()
    page.locator(".memlab-chips button", has_text="activation").click()
    settle(explorer)
    assert table(explorer) == [row for row in rows if row[1] != "activation"]
    page.locator(".memlab-chips button", has_text="activation").click()
    page.locator(".memlab-explorer input").fill("blocks.1.")
    settle(explorer)
    assert table(explorer) == [row for row in rows if "blocks.1." in "\n".join(row[3:])] != []
    assert f"of {len(rows)} alive" in foot(explorer)
    page.locator(".memlab-explorer input").fill("")


def test_zooming_and_panning_draw_another_stretch_and_the_whole_step_comes_back(explorer, surface):
    whole = pixels(explorer)
    press(explorer, "+", "+")
    zoomed = pixels(explorer)
    assert zoomed != whole
    box = surface.bounding_box()
    explorer.page.mouse.move(box["x"] + 400, box["y"] + 150)
    explorer.page.mouse.down()
    explorer.page.mouse.move(box["x"] + 500, box["y"] + 150, steps=4)
    explorer.page.mouse.up()
    settle(explorer)
    assert pixels(explorer) not in (whole, zoomed) and explorer.ask("print(explorer.event)") == "None\n"
    press(explorer, "0")
    assert pixels(explorer) == whole
    explorer.page.keyboard.down("Control")
    explorer.page.mouse.wheel(0, -200)
    explorer.page.keyboard.up("Control")
    settle(explorer)
    assert pixels(explorer) != whole


def test_a_row_shows_its_storages_life(explorer, surface):
    before = pixels(explorer, 1)
    explorer.page.locator(".memlab-explorer tbody tr").nth(1).click()
    settle(explorer)
    assert pixels(explorer, 1) != before
    assert explorer.page.locator(".memlab-explorer tr[aria-selected='true']").count() == 1
    press(explorer, "ArrowDown", "Enter")
    assert explorer.page.locator(".memlab-explorer tbody tr").nth(2).get_attribute("aria-selected") == "true"


def test_the_other_timeline_is_a_choice_away(explorer, surface, steps):
    before = pixels(explorer)
    explorer.page.locator(".memlab-explorer select").select_option("second")
    settle(explorer)
    assert pixels(explorer) != before
    assert table(explorer) == expected(steps["second"], steps["second"].peak_event)
    assert "first: " in readout(explorer) and explorer.ask("print(explorer.shown)") == "second\n"


def test_sizes_read_as_in_python(explorer):
    sizes = [0, 1, 1023, 1024, 1024 * KiB - 1, 1536 * KiB, 1023 * MiB, 5 * 2**30, 3 * 2**40]
    source = (Path(__file__).parents[1] / "memlab" / "book" / "explorer.js").read_text(encoding="utf-8")
    function = source[source.index("function formatBytes") : source.index("const signed")]
    shown = explorer.page.evaluate(
        f"(sizes) => {{ {function.replace('MINUS', '`-`')} return sizes.map(formatBytes); }}", sizes
    )
    assert shown == [format_bytes(size) for size in sizes]


@pytest.mark.thorough
def test_the_benchmark_times_a_slide_a_hover_and_an_opening(explorer, surface):
    """The last, since it clears the notebook's other outputs."""
    times = measure(explorer, slides=1, rounds=1)
    assert {name: len(found) for name, found in times.items()} == {"slide": 1, "hover": 4, "open": 2}
    assert all(ms > 0 for found in times.values() for ms in found)
