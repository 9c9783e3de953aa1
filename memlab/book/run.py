"""Run a notebook in a kernel of the running Python, which is gone afterwards, whatever happened."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class NotebookError(RuntimeError):
    """A notebook could not be executed; the message names the cell and its error. The file is as it was."""


class _ThisPython(AsyncKernelManager):
    """Starts the Python that runs this code, whatever kernel specs are installed under the name python3."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "--log-level=ERROR", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=KERNEL["display_name"], language="python")


def run(
    notebook: NotebookNode, path: Path, timeout: float = 180, on_cell: Callable[[int], None] = lambda index: None
) -> None:
    """Run a notebook that was read from `path` from top to bottom, in place and in the path's folder; save nothing.

    The kernel is the running Python, and is gone when this returns or raises. `timeout` is in seconds and holds for
    each cell. Cells tagged `skip-execution` keep the outputs they have. `on_cell` is called with each cell's index as
    it starts (in another thread).

    Raises NotebookError if a cell fails, runs out of time or kills the kernel, and KeyboardInterrupt as it comes.
    """
    started, began = 0, threading.Event()

    def remember(cell: NotebookNode, cell_index: int) -> None:
        nonlocal started
        started = cell_index
        began.set()
        on_cell(cell_index)

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_manager_class=_ThisPython,
        resources={"metadata": {"path": str(path.parent.resolve())}},
        coalesce_streams=True,
        record_timing=False,
        on_cell_start=remember,
    )
    # With MPLBACKEND set, ipykernel leaves the backend alone and figures never reach the notebook.
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    try:
        _interruptible(client, env, began)
    except CellExecutionError as error:
        traceback = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise NotebookError(f"{path}: cell {started} failed with {error.ename}: {error.evalue}\n{traceback}") from None
    except CellTimeoutError:
        raise NotebookError(f"{path}: cell {started} was still running after {timeout} s") from None
    except DeadKernelError:
        raise NotebookError(f"{path}: the kernel died in cell {started} (out of memory?)") from None


def _interruptible(client: NotebookClient, env: dict[str, str], began: threading.Event) -> None:
    """Execute in a thread of its own, where nbclient cannot take Ctrl-C and SIGTERM for itself.

    In the main thread it would: it ends the kernel and goes on as if that had died, and nobody is told of the Ctrl-C.
    `began` is set when the first cell starts; from then on nbclient ends its kernel however it is left.
    """
    over = threading.Event()
    failure: list[BaseException] = []

    async def work() -> None:
        nonlocal stop
        stop = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, asyncio.current_task().cancel)
        await client.async_execute(env=env)

    def main() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:  # it is raised again where someone waits for it
            failure.append(error)
        finally:
            began.set()
            over.set()

    def end() -> None:
        began.wait()
        client.shutdown_kernel = "immediate"
        with contextlib.suppress(RuntimeError):  # it may just be ending by itself
            if not over.is_set():
                stop()
        over.wait()

    stop = None
    thread = threading.Thread(target=main, name="notebook")
    thread.start()
    try:
        # An event, because a join that Ctrl-C interrupts takes the thread for ended (Python before 3.13); with a
        # limit, because Windows lets Ctrl-C through only between two waits.
        while not over.wait(1):
            pass
    except BaseException:
        threading.Thread(target=end).start()  # there a second Ctrl-C cannot keep it from ending the kernel
        over.wait()
        raise
    thread.join()
    if failure:
        raise failure[0]
