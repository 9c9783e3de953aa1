"""How often the live figure moves while a cell trains, how long the page stands still, and what the kernel pays."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from memlab.book.browser import Page, browser, jupyterlab
from memlab.book.run import KERNEL

CELL = """
import json, time
import torch
from memlab.book.live import live
from memlab.book.workloads import GPT, text_batch
from memlab.memory_monitoring import Monitor

monitor, sent = Monitor("8 GiB"), []
figure = live(monitor)
send = figure._send

def timed(**options):
    start = time.perf_counter()
    send(**options)
    sent.append(1e3 * (time.perf_counter() - start))

figure._send = timed
model, (x, y) = GPT(layers=2, width=64, heads=4, context=64), text_batch(4, 64)
optimizer = torch.optim.AdamW(model.parameters())
with monitor:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
"""
WATCH = """() => {
  Object.assign(window, { pictures: new Map(), frames: [performance.now()], tasks: [] });
  new PerformanceObserver((list) => tasks.push(...list.getEntries()))
    .observe({ entryTypes: ["longtask"] });
  const frame = () => {
    frames.push(performance.now());
    const canvas = document.querySelector(".memlab-live canvas");
    const picture = canvas && frames.length % 6 === 0 && canvas.toDataURL();
    if (picture && !pictures.has(picture)) pictures.set(picture, performance.now());
    window.frame = requestAnimationFrame(frame);
  };
  frame();
}"""
TELL = """() => {
  cancelAnimationFrame(window.frame);
  const [first, last] = [Math.min(...pictures.values()), Math.max(...pictures.values())];
  const seen = frames.filter((at) => first <= at && at <= last);
  const gaps = seen.slice(1).map((at, i) => at - seen[i]);
  const long = tasks.filter(({ startTime }) => first <= startTime && startTime <= last).map((one) => one.duration);
  return [1e3 * (pictures.size - 1) / (last - first), Math.max(0, ...gaps), Math.max(0, ...long)];
}"""


class Followed(NamedTuple):
    """Pictures a second; from the first to the last, the longest time between two frames, and the longest task (0: none
    of 50 ms or more), ms; ms that the kernel took for each message."""

    updates_per_second: float
    longest_frame_ms: float
    longest_task_ms: float
    message_ms: list[float]


def follow(seconds: int = 6) -> Followed:
    """Train a small GPT in JupyterLab in Chromium for so many seconds, and look at the live figure meanwhile.

    Raises RuntimeError where there is no Chromium or no Playwright.
    """
    with tempfile.TemporaryDirectory() as folder:
        cell = new_code_cell(CELL.strip().replace("SECONDS", str(seconds)))
        notebook = new_notebook(cells=[cell], metadata={"kernelspec": KERNEL})
        nbformat.write(notebook, Path(folder, "followed.ipynb"))
        with jupyterlab(folder) as address, browser() as opened:
            page = Page(opened, address, "followed.ipynb")
            page.page.evaluate(WATCH)
            page.run_all()
            moved = page.page.evaluate(TELL)
            message_ms = json.loads(page.ask("print(json.dumps(sent))"))
            page.close()
            return Followed(*moved, message_ms)
