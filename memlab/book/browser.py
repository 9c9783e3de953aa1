"""A real JupyterLab in a real browser, without a screen: to see a notebook as its reader will.

    python -m memlab.book.browser chapters/01_memory_timeline.ipynb page.png [--run]

Needs Chromium or Chrome on the machine, and Playwright, which comes with memlab[test].
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

START_SECONDS = 60
WAIT_SECONDS = 30
SETTINGS = {
    # Every cell is in the page, also those far below the screen.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}
# What a reader does not have: where nbgrader is installed, its panels would load with every page.
NOT_THE_READERS = {
    "labconfig/page_config.json": {
        "disabledExtensions": {"@jupyter/nbgrader": True, "@jupyter-notebook/lab-extension": True}
    },
    "jupyter_server_config.json": {
        "ServerApp": {
            "jpserver_extensions": {
                **{f"nbgrader.server_extensions.{name}": False
                   for name in ("formgrader", "validate_assignment", "assignment_list", "course_list")},
                "notebook": False,
            }
        }
    },
}  # fmt: skip


def chromium() -> str | None:
    """Where Chromium or Chrome is, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
    places = ("/Applications/Chromium.app/Contents/MacOS/Chromium",
              "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")  # fmt: skip
    return next(filter(None, map(shutil.which, (*names, *places))), None)


@contextlib.contextmanager
def jupyterlab(folder: str | Path) -> Iterator[str]:
    """Serve `folder` with JupyterLab, with settings of its own, and give its address, with the token that opens it.

    Afterwards server and kernels are gone with their settings, also after Ctrl-C and SIGTERM (a SIGKILL leaves them).
    The folder itself is served: what is saved in the browser stays there, with JupyterLab's checkpoint beside it. Hand
    in a copy. Raises RuntimeError, with what JupyterLab printed, if it does not start.
    """
    with _exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="memlab-lab-", ignore_cleanup_errors=True) as home:
        for name, values in SETTINGS.items():
            path = Path(home, "settings", "@jupyterlab", f"{name}.jupyterlab-settings")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values), encoding="utf-8")
        for name, values in NOT_THE_READERS.items():
            path = Path(home, "config", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values), encoding="utf-8")
        inside = {
            "JUPYTER_RUNTIME_DIR": "run",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
            "npm_config_cache": "npm",  # an extension of JupyterLab asks npm where it is, and npm logs that
        }
        env = os.environ | {name: str(Path(home, place)) for name, place in inside.items()}
        env["JUPYTER_PREFER_ENV_PATH"] = "0"  # these settings win over those of the environment
        env.pop("MPLBACKEND", None)  # with it, ipykernel leaves the backend alone
        env["JUPYTER_TOKEN"] = secrets.token_hex()  # other users of this machine see the address, but not this
        command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--port=0"]
        command += [
            "--LabApp.expose_app_in_browser=True",
            f"--NotebookNotary.data_dir={home}",
            str(Path(folder).resolve()),
        ]
        with open(Path(home, "log"), "w+", encoding="utf-8") as log:
            server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                yield _address(server, Path(home, "run"), log.name)
            finally:
                _end(server)


def _address(server: subprocess.Popen, runtime: Path, log: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        for path in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, OSError):  # the file is still being written, or nobody listens yet
                found = json.loads(path.read_text(encoding="utf-8"))
                socket.create_connection((found["hostname"], found["port"]), 1).close()
                return f"{found['url']}?token={found['token']}"
        time.sleep(0.05)
    raise RuntimeError(f"expected JupyterLab to start within {START_SECONDS} s; it printed\n{Path(log).read_text()}")


def _end(server: subprocess.Popen) -> None:
    server.terminate()  # JupyterLab ends its kernels
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(15)
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    server.kill()
    server.wait()


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this program as sys.exit does, so that what it has started is ended as well."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return

    def leave(number, frame):
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def browser() -> Iterator:
    """A headless browser (Playwright's `Browser`); its profile is gone afterwards.

    Raises RuntimeError where there is no Chromium or no Playwright.
    """
    if (path := chromium()) is None:
        raise RuntimeError("expected Chromium or Chrome, found neither; install one (apt install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise RuntimeError("expected Playwright, found none; pip install 'memlab[test]'") from None
    # Chromium keeps to itself neither as root nor in a container's small /dev/shm.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with _exit_on_sigterm():
        manager = sync_playwright()
        try:
            opened = manager.start().chromium.launch(executable_path=path, args=arguments)
            yield opened
            opened.close()
        finally:
            # Ctrl-C ends Chromium too, so that closing it may fail; what is to be seen is the KeyboardInterrupt.
            with contextlib.suppress(Exception):
                manager.__exit__()


class Page:
    """A notebook opened in JupyterLab. `page` is Playwright's own, `complaints` what the browser's console reported."""

    def __init__(self, browser, address: str, name: str, width: int = 1100, height: int = 1000):
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(1000 * WAIT_SECONDS)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda line: line.type == "error" and self._complain(line.text, line.location["url"]),
        )
        server, _, token = address.partition("?")
        self.page.goto(f"{server}doc/tree/{quote(name)}?reset&{token}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self._id = self.page.evaluate("() => window.jupyterapp.shell.currentWidget.id")
        self._in_panel("await panel.context.ready; await panel.revealed;")

    def _complain(self, text: str, url: str) -> None:
        """Note what the console said; but a server that cannot list a kernel while it starts is asked again."""
        if not ("status of 500" in text and urlsplit(url).path.endswith("/api/kernels")):
            self.complaints.append(f"{text} {url}")

    def beside(self, name: str) -> Page:
        """Another notebook in the same JupyterLab, as a reader opens it: much sooner than a page of its own."""
        other = object.__new__(Page)
        other.page, other.complaints = self.page, self.complaints
        other._id = self.page.evaluate(
            """async (path) => {
              const panel = await window.jupyterapp.commands.execute("docmanager:open", { path });
              return panel.id; }""",
            name,
        )
        other._in_panel("await panel.context.ready; await panel.revealed;")
        return other

    def show(self) -> None:
        """Bring this notebook to the front, where there are several."""
        self._in_panel(
            """window.jupyterapp.shell.activateById(id);
            while (window.jupyterapp.shell.currentWidget !== panel) await new Promise(requestAnimationFrame);"""
        )

    def locator(self, selector: str):
        """Playwright's locator for what is in this notebook."""
        return self.page.locator(f'[id="{self._id}"]').locator(selector)

    def _in_panel(self, code: str, argument: object = None):
        """Run JavaScript that knows this notebook's `panel`, its `id` and an `argument`; what it returns."""
        return self.page.evaluate(
            f"""async ([id, argument]) => {{
              const panel = [...window.jupyterapp.shell.widgets("main")].find(widget => widget.id === id);
              {code} }}""",
            [self._id, argument],
        )

    def run_all(self) -> None:
        """Run every cell, and wait until the last has finished."""
        self.start_all()
        self.wait_for_all()

    def start_all(self) -> None:
        """Begin to run every cell; several notebooks can run at once."""
        self.show()
        self._in_panel(
            """await panel.sessionContext.ready;
            panel.memlabRun = window.jupyterapp.commands.execute("notebook:run-all-cells");"""
        )

    def wait_for_all(self) -> None:
        """Wait until the last cell that `start_all` began has finished."""
        self._in_panel("await panel.memlabRun;")

    def outputs(self) -> list[dict]:
        """Every output of every cell, as nbformat has them."""
        return self._in_panel(
            """const cells = [...panel.content.model.cells];
            return cells.flatMap(cell => cell.outputs ? cell.outputs.toJSON() : []);"""
        )

    def ask(self, code: str) -> str:
        """What `code` prints in the notebook's kernel. Raises Playwright's Error if it raises there."""
        return self._in_panel(
            """let printed = "";
            const run = panel.sessionContext.session.kernel.requestExecute({ code: argument, store_history: false });
            run.onIOPub = ({ header, content }) => {
              if (header.msg_type === "stream") printed += content.text;
              if (header.msg_type === "error") printed = new Error(content.evalue);
            };
            await run.done;
            if (printed instanceof Error) throw printed;
            return printed;""",
            code,
        )

    def errors(self) -> list[str]:
        """What is broken: cells that raised, widgets that do not show, pictures that did not load."""
        raised = [f"{o['ename']}: {o['evalue']}" for o in self.outputs() if o["output_type"] == "error"]
        return raised + self._in_panel(
            """const all = selector => [...panel.node.querySelectorAll(selector)];
            return [
              ...all(".jp-OutputArea-output").map(e => e.innerText)
                .filter(text => /^(Error displaying widget|Loading widget|Failed to load model)/.test(text)),
              ...all(".memlab-failed").map(e => e.innerText),
              ...all(".jp-Notebook img")
                .filter(i => !(i.complete && i.naturalWidth)).map(i => "a picture did not load: " + i.alt),
            ];"""
        )

    def screenshot(self, path: str | Path) -> None:
        """The whole notebook as one PNG, however long it is."""
        inside = '[...document.querySelectorAll(".jp-NotebookPanel-notebook *")]'
        height = self.page.evaluate(f"() => Math.max(...{inside}.map(element => element.scrollHeight))")
        self.page.set_viewport_size({"width": self.page.viewport_size["width"], "height": min(height + 150, 16_000)})
        self.page.evaluate(f"() => {inside}.forEach(element => element.scrollTop = 0)")
        self.page.wait_for_timeout(1000)
        self.page.screenshot(path=str(path))

    def close(self) -> None:
        """End its kernel and close the page."""
        close_all([self])


def close_all(pages: Sequence[Page]) -> None:
    """End the kernels of several notebooks, all at once, and close their pages."""
    for page in pages:
        page._in_panel("panel.memlabEnd = panel.sessionContext.shutdown();")
    for page in pages:
        page._in_panel("await panel.memlabEnd;")
    for page in {page.page for page in pages}:
        page.close()


def main() -> None:
    """Take a picture of a notebook in JupyterLab."""
    parser = argparse.ArgumentParser(prog="python -m memlab.book.browser", description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--run", action="store_true", help="run all cells first; the file is not changed")
    parser.add_argument("--width", type=int, default=1100, help="of the window, in pixels (default 1100)")
    options = parser.parse_args()
    with jupyterlab(options.notebook.parent) as address, browser() as opened:
        page = Page(opened, address, options.notebook.name, options.width)
        if options.run:
            page.run_all()
        page.page.wait_for_timeout(1000)
        page.screenshot(options.picture)
        print("\n".join(page.errors()) or "nothing is broken")
        page.close()


if __name__ == "__main__":
    main()
