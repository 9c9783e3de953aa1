"""How long a reader waits: for a slider's picture, for the explorer's table, for the explorer to open."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from memlab.book.browser import Page, browser, jupyterlab
from memlab.book.run import KERNEL
from memlab.memory_timeline import Timeline

CELLS = (
    """
from memlab.book.explorer import explore
from memlab.book.figures import compare
from memlab.book.interactive import Interactive
from memlab.memory_timeline import Timeline

steps = [Timeline.load(f"{n}.json") for n in range(COUNT)]
many = Timeline.load("many.json")

def draw(n=0):
    return compare({"this step": steps[n], "the first": steps[0]}, title=f"step {n}")
""",
    "Interactive(draw, n=range(len(steps)))",
    "explore(many)",
)
LOOK = 500  # milliseconds that a reader looks at a picture before moving on: the next one is drawn meanwhile

# Each returns milliseconds: from the event that a key or the pointer makes to the frame that shows its effect.
SLIDE = """() => new Promise(done => {
  const box = document.querySelector(".widget-html-content");
  const start = performance.now();
  const watch = new MutationObserver(async () => {
    watch.disconnect();
    await box.querySelector("img").decode();
    requestAnimationFrame(() => done(performance.now() - start));
  });
  watch.observe(box, { childList: true, subtree: true });
  const key = new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true });
  document.querySelector(".noUi-handle").dispatchEvent(key);
})"""
HOVER = """(x) => new Promise(done => {
  const surface = document.querySelector(".memlab-canvas canvas[tabindex]");
  const { left, top } = surface.getBoundingClientRect();
  const start = performance.now();
  surface.dispatchEvent(new PointerEvent("pointermove", { clientX: left + x, clientY: top + 150, bubbles: true }));
  requestAnimationFrame(() => { surface.closest(".memlab-explorer").offsetHeight; done(performance.now() - start); });
})"""
OPEN = """async () => {
  const { commands, shell } = window.jupyterapp;
  await commands.execute("notebook:clear-all-cell-outputs");
  const { content } = shell.currentWidget;
  content.activeCellIndex = content.widgets.findIndex(cell => cell.model.sharedModel.source.includes("explore("));
  const start = performance.now();
  commands.execute("notebook:run-cell");
  while (!document.querySelector(".memlab-explorer tbody tr")) await new Promise(requestAnimationFrame);
  return performance.now() - start;
}"""


def response_times(steps: Sequence[Timeline], many: Timeline, rounds: int) -> dict[str, list[float]]:
    """Milliseconds in JupyterLab in Chromium of "slide" (over `steps`), "hover" and "open" (of an explorer of `many`).

    Each slide shows a picture for the first time, half a second after the last, so there are as many as `steps`, less
    one; the first of them is the only one that cannot have been drawn ahead.
    Raises RuntimeError where there is no Chromium or no Playwright.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = _prepare(folder, steps, many)
        with jupyterlab(folder) as address, browser() as opened:
            page = Page(opened, address, name)
            page.run_all()
            return measure(page, len(steps) - 1, rounds)


def slide_times(cell: str, slides: int) -> list[float]:
    """Milliseconds from a key to new pixels, of the slider that a cell makes; each picture for the first time.

    Raises RuntimeError where there is no Chromium or no Playwright.
    """
    with tempfile.TemporaryDirectory() as folder:
        notebook = new_notebook(cells=[new_code_cell(cell)], metadata={"kernelspec": KERNEL})
        nbformat.write(notebook, Path(folder, "timed.ipynb"))
        with jupyterlab(folder) as address, browser() as opened:
            page = Page(opened, address, "timed.ipynb")
            page.run_all()
            return slid(page, slides)


def _prepare(folder: str, steps: Sequence[Timeline], many: Timeline) -> str:
    """Write the notebook to be timed, and its timelines, into a folder; the notebook's name."""
    for name, timeline in {**dict(enumerate(steps)), "many": many}.items():
        timeline.save(Path(folder, f"{name}.json"))
    cells = [new_code_cell(source.strip().replace("COUNT", str(len(steps)))) for source in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), Path(folder, "timed.ipynb"))
    return "timed.ipynb"


def slid(page: Page, slides: int) -> list[float]:
    """Milliseconds of each of so many moves of the first slider, with a look at the picture between."""
    return [page.page.evaluate(SLIDE) for _ in range(slides) if not page.page.wait_for_timeout(LOOK)]


def measure(page: Page, slides: int, rounds: int) -> dict[str, list[float]]:
    """Move the first slider of a notebook that has run, hover over its explorer, and open that again and again.

    Every other output of the notebook is cleared for it.
    """
    time = page.page.evaluate
    return {
        "slide": slid(page, slides),
        "hover": [time(HOVER, 80 + 7 * n) for n in range(4 * rounds)],
        "open": [time(OPEN) for _ in range(max(2, rounds // 5))],
    }
