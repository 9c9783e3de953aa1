"""A reader's first walk: README's first command in a terminal, the book in a browser, Ctrl-C, and nothing is left.

    python -m tests.walk "the command"

.ci/run runs it in a fresh clone, while .venv holds no more than that command installs. The browser's driver comes from
the Python that runs this page, so the environment that is walked in stays the reader's.
"""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from memlab.book.browser import browser

ROOT = Path(__file__).parents[1]
START_SECONDS = 600  # it installs first
STOP_SECONDS = 30
WAIT_SECONDS = 120
CTRL_C = b"\x03"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab\?token=\w+")
PLACES = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
AUTOSAVE = "lab/user-settings/@jupyterlab/docmanager-extension/plugin.jupyterlab-settings"
FRONT = ".jp-MainAreaWidget:not(.lm-mod-hidden)"
IN_SIGHT = """(heading) => {
  const { top, bottom } = heading.getBoundingClientRect();
  return 0 <= top && bottom <= innerHeight; }"""


class Terminal:
    """A command in a terminal of its own, where Ctrl-C can be typed. What it prints is shown, and kept as `printed`."""

    def __init__(self, command: str, env: dict[str, str]):
        self.printed, self.status = "", None
        self.process, self.screen = pty.fork()
        if self.process == 0:
            os.execvpe("bash", ["bash", "-c", command], env)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last program has left the terminal
            while text := os.read(self.screen, 4096).decode(errors="replace"):
                self.printed += text
                print(text, end="", flush=True)

    def runs(self) -> bool:
        """Whether the command still runs. `status` is its exit status afterwards."""
        if self.status is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status is None

    def address(self) -> str:
        """What it prints for the reader's browser."""
        until = time.monotonic() + START_SECONDS
        while self.runs() and time.monotonic() < until:
            if found := ADDRESS.search(self.printed):
                return found[0]
            time.sleep(0.1)
        raise AssertionError(f"expected an address within {START_SECONDS} s, found none; exit status {self.status}")

    def stop(self) -> None:
        """Type Ctrl-C twice, as JupyterLab says, and wait until the command has ended."""
        for _ in range(2):
            os.write(self.screen, CTRL_C)
            time.sleep(1)
        until = time.monotonic() + STOP_SECONDS
        while self.runs() and time.monotonic() < until:
            time.sleep(0.1)
        assert self.status == 0, f"expected exit status 0 within {STOP_SECONDS} s of Ctrl-C, found {self.status}"


class Reader:
    """Somebody at a JupyterLab, who clicks on what is there and runs cells with Shift+Enter."""

    def __init__(self, page, address: str):
        self.page = page
        page.set_default_timeout(1000 * WAIT_SECONDS)
        page.goto(address)

    def finds(self, selector: str, text: str = ""):
        """What is there in the tab in front, with this text in it."""
        return self.page.locator(f"{FRONT} {selector}", has_text=text).first

    def opens(self, name: str) -> None:
        """Open a notebook from the list of files."""
        self.page.locator(".jp-DirListing-item", has_text=name).dblclick()

    def follows(self, link: str) -> None:
        """Click on a link of the notebook."""
        self.finds(".jp-Notebook a", link).click()

    def runs(self, title: str, cells: int) -> None:
        """Run the first cells of the notebook with this title, after the saved outputs are cleared."""
        self.finds(".jp-Notebook h1", title).click()
        self.page.locator(".lm-MenuBar-item", has_text="Edit").click()
        self.page.locator(".lm-Menu-item", has_text="Clear Outputs of All Cells").click()
        self.finds(".jp-Notebook h1", title).click()
        for _ in range(cells):
            self.page.keyboard.press("Shift+Enter")

    def sees(self, selector: str, text: str = "") -> None:
        """Wait for an output."""
        self.finds(f".jp-Notebook .jp-OutputArea-output {selector}", text).wait_for()

    def reads(self, heading: str) -> None:
        """Wait until a rendered page has this heading in sight."""
        found = self.finds(".jp-MarkdownViewer h2", heading).element_handle()
        self.page.wait_for_function(IN_SIGHT, arg=found)


def walk(address: str) -> None:
    """The first chapters as their reader meets them: outputs of this kernel, links from one to the next."""
    with browser() as opened:
        reader = Reader(opened.new_page(viewport={"width": 1300, "height": 1000}), address)
        reader.opens("00_start_here.ipynb")
        reader.runs("00 · Start here", cells=14)
        reader.sees("pre", "memlab is installed; go on.")
        reader.sees(".memlab-explorer tbody tr")
        reader.sees("td a", "02 · Memory arithmetic")
        reader.follows("optimizer state")
        reader.reads("optimizer state")
        reader.page.locator(".lm-TabBar-tab", has_text="00_start_here").click()
        reader.follows("01 · The memory timeline")
        reader.runs("01 · The memory timeline", cells=6)
        reader.sees(".memlab-explorer tbody tr")
        reader.opens("02_memory_arithmetic.ipynb")
        reader.follows("BF16")
        reader.reads("BF16")


def started_here(mark: str) -> dict[int, str]:
    """The processes that have `mark` in their environment, which whoever started them handed down: command by id."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def changes() -> str:
    """What git sees in chapters/ that is not committed. JupyterLab's checkpoints are ignored: opening makes them."""
    command = ["git", "status", "--porcelain", "chapters"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(command: str) -> None:
    """Walk through the book that `command` opens. Raises an error where that does not go on."""
    before = changes()
    with tempfile.TemporaryDirectory(prefix="memlab-walk-") as home:
        places = {name: f"{home}/{name}" for name in PLACES}
        setting = Path(places["JUPYTER_CONFIG_DIR"], AUTOSAVE)
        setting.parent.mkdir(parents=True)
        setting.write_text('{"autosave": false}')  # so that the chapters stay as they are
        terminal = Terminal(command, os.environ | places | {"BROWSER": "true"})
        try:
            walk(terminal.address())
            terminal.stop()
            assert (left := started_here(home)) == {}, f"expected no process to be left, found {left}"
            assert (after := changes()) == before, f"expected chapters/ as before, found {after}"
        finally:
            for process in started_here(home):
                os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
