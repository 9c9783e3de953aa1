"""The live figure in a real browser: what it keeps of what it is told, and that it moves while a cell trains.

Skipped without Chromium, unless MEMLAB_BROWSER=required says that there must be one.
"""

import base64
import math
import random
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from memlab.book.live_changes import Changes
from memlab.memory_monitoring import Alarm, Monitor, Sample, forecast
from memlab.units import MiB
from tests.browser_helpers import need_browser

need_browser("jupyterlab", "anywidget")

from memlab.book.browser import Page, browser, jupyterlab  # noqa: E402
from memlab.book.run import KERNEL  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "memlab" / "book" / "live.js"
MOST_BUCKETS = 250
TAKE = """(messages) => {
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  for (const [sent, columns] of messages) run.take(sent, ...columns.map(bytes).map(floats));
}"""
DRAW = """([budget, width]) => new Promise((done) => {
  document.body.replaceChildren();
  const root = document.createElement("div");
  root.className = "memlab-live";
  root.style.width = `${width}px`;
  document.body.append(root);
  const model = { get: (name) => (name === "budget" ? budget : "") };
  window.figure = new Figure(model, root, run);
  requestAnimationFrame(() => requestAnimationFrame(() => done(figure.canvas.toDataURL())));
})"""
RUN = """
import time
from memlab.book.live import live
from memlab.memory_monitoring import Monitor
monitor = Monitor("2 GiB", every=0.05)
live(monitor, title="a loop")
with monitor:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.005)
        monitor.step()
"""
WATCH = """() => {
  window.pictures = new Set();
  window.watching = setInterval(() => {
    const canvas = document.querySelector(".memlab-live canvas");
    if (canvas) pictures.add(canvas.toDataURL());
  }, 50);
}"""
BUSY = "() => document.querySelector('.jp-Notebook-ExecutionIndicator').dataset.status === 'busy'"


@pytest.fixture(scope="module")
def opened():
    with browser() as opened:
        yield opened


@pytest.fixture
def page(opened):
    """A bare page that knows the figure's code, and a run of which nothing has been sent."""
    page = opened.new_page(viewport={"width": 1000, "height": 700})
    code = SCRIPT.read_text(encoding="utf-8").replace("export default", "window.face =")
    page.add_script_tag(
        content=f"{code}\nwindow.run = new Run(); Object.assign(window, {{ Run, Figure, floats, ticks }});"
    )
    yield page
    page.close()


def told(page, *messages):
    encoded = [(sent | {"ended": False}, [base64.b64encode(c).decode() for c in columns]) for sent, columns in messages]
    page.evaluate(TAKE, encoded)


def looks(count, seed=0):
    chance = random.Random(seed)
    return [
        Sample(
            i / 10, i // 3, {"heap": chance.randrange(MiB, 9 * MiB), "resident": chance.randrange(9 * MiB, 20 * MiB)}
        )
        for i in range(count)
    ]


def buckets(page):
    return page.evaluate("() => run.buckets.map(({ looks, low, high, last }) => [looks, low, high, last])")


@pytest.mark.parametrize("count", [1, 250, 251, 1000])
def test_thinning_keeps_the_least_and_the_most_of_each_stretch(page, count):
    samples = looks(count)
    changes = Changes(Monitor(sources=[]))
    told(page, *[changes.since(samples[i : i + 7], i) for i in range(0, count, 7)])
    kept, at = buckets(page), 0
    assert len(kept) <= MOST_BUCKETS and len(kept) > min(count, MOST_BUCKETS) // 2 - 1
    for number, low, high, last in kept:
        seen = [[one.figures[level] for one in samples[at : at + number]] for level in ("heap", "resident")]
        assert [low, high] == [list(map(min, seen)), list(map(max, seen))] and last == [level[-1] for level in seen]
        at += number
    assert at == count


def test_what_is_told_twice_is_kept_once_and_a_lost_message_costs_only_its_looks(page):
    samples, changes = looks(60), Changes(Monitor(sources=[]))
    messages = [changes.since(samples[:20], 0), changes.since(samples[:30], 0), changes.since(samples[40:60], 40)]
    told(page, *messages)
    kept = [last for *_, last in buckets(page)]
    assert kept == [[s.figures["heap"], s.figures["resident"]] for s in samples[:30] + samples[40:60]]


def test_a_level_that_comes_later_or_goes_leaves_the_others_as_they_are(page):
    changes = Changes(Monitor(sources=[]))
    samples = [Sample(i / 10, 0, {"heap": i} | ({"driver": i} if 100 <= i < 400 else {})) for i in range(600)]
    told(page, *[changes.since(samples[i : i + 50], i) for i in range(0, 600, 50)])
    kept = buckets(page)
    heaps = [(low[0], high[0]) for _, low, high, _ in kept]
    assert heaps[0][0] == 0 and heaps[-1][1] == 599 and [a for a, _ in heaps[1:]] == [b + 1 for _, b in heaps[:-1]]
    drivers = [high[1] for _, _, high, _ in kept if len(high) > 1 and high[1] is not None and not math.isnan(high[1])]
    assert max(drivers) == 399 and page.evaluate(DRAW, [None, 800]).startswith("data:image/png")


def test_the_steps_are_the_histories_also_after_it_merged(page):
    monitor = Monitor(sources=[])
    changes, chance, messages = Changes(monitor), random.Random(1), []
    for i in range(1400):
        monitor.history.append(end := chance.randrange(MiB), end + chance.randrange(MiB))
        monitor.steps += 1
        if i % 97 == 0 or i == 1399:
            messages.append(changes.since([], 0))
    told(page, *messages)
    found = page.evaluate("() => [run.ends, run.peaks, run.steps, run.stepsInBlock]")
    history = monitor.history
    assert found == [list(history.ends), list(history.peaks), 1400, history.steps_in_block]


def test_a_called_run_is_drawn_with_its_fan_alarms_and_words(page):
    monitor = Monitor("400 MiB", sources=[], watch="heap")
    changes = Changes(monitor)
    for i in range(100):
        monitor.history.append((100 + i) * MiB, (110 + i) * MiB)
        monitor.steps += 1
    told(page, changes.since(looks(40), 0))
    before = page.evaluate(DRAW, [monitor.budget_bytes, 900])
    said = forecast(monitor.history, monitor.budget_bytes)._replace(step=100, steps_left=200.0, earliest=150.0)
    pictures = {before}
    for latest in (260.0, math.inf):
        monitor.alarms[:] = [Alarm("growth", 100, "it grows & <grows>", said._replace(latest=latest))]
        told(page, Changes(monitor).since(looks(40), 0))
        pictures.add(page.evaluate(DRAW, [monitor.budget_bytes, 900]))
    assert len(pictures) == 3
    assert page.locator(".memlab-live-alarms li").all_inner_texts() == ["step 100, growth: it grows & <grows>"]
    text = page.locator(".memlab-live-readout").inner_text()
    assert "step 100" in text and "heap at the last step's end 199.0 MiB, at its peak 209.0 MiB" in text
    assert "resident" in page.locator(".memlab-live canvas").get_attribute("aria-label")


def test_a_run_that_has_not_begun_and_a_narrow_page_are_drawn(page):
    page.evaluate(DRAW, [None, 260])
    assert page.locator(".memlab-live-readout").inner_text() == "waiting for the run to begin"


def test_ticks_are_round_few_and_inside(page):
    for most in (1, 7.3, 10, 99, 1234, 5e5):
        found = page.evaluate("(most) => ticks(most, 6, 10)", most)
        assert 1 <= len(found) <= 6 and found[-1] <= most
        assert all(float(f"{tick:.2g}") == pytest.approx(tick) for tick in found[:1])
    assert page.evaluate("() => ticks(300, 4, 2)") == [128, 256]


@pytest.fixture
def notebook(opened, tmp_path):
    nbformat.write(
        new_notebook(cells=[new_code_cell(RUN.strip())], metadata={"kernelspec": KERNEL}), tmp_path / "live.ipynb"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with jupyterlab(tmp_path) as address:
            page = Page(opened, address, "live.ipynb", height=800)
            yield page
            assert page.errors() == ["KeyboardInterrupt: "] and page.complaints == []
            page.close()


@pytest.mark.thorough
def test_it_moves_while_a_cell_runs_and_the_stop_button_ends_both(notebook):
    page = notebook.page
    page.evaluate(WATCH)
    notebook._in_panel(
        """await panel.sessionContext.ready;
        panel.content.activeCellIndex = argument;
        window.memlabDone = false;
        window.jupyterapp.commands.execute("notebook:run-cell").then(() => (window.memlabDone = true));""",
        0,
    )
    page.wait_for_function("() => window.pictures.size >= 12")
    assert page.evaluate(BUSY)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    page.wait_for_function("() => window.memlabDone")
    page.wait_for_function("() => document.querySelector('.memlab-live-readout').innerText.endsWith('ended')")
    assert "over " in notebook.locator(".jp-RenderedMarkdown").last.inner_text()
    left = "[thread.name for thread in threading.enumerate() if 'memlab' in thread.name]"
    told = notebook.ask(f"import threading; print({left}, monitor.listeners, monitor.history.steps > 0)")
    assert told == "[] [] True\n"
