"""Lets Ctrl-C reach the tests that press it (a pytest plugin, loaded by pyproject.toml).

What a shell without job control starts in the background ignores SIGINT, and so does all that it starts in turn. A test
that interrupts a program would then wait for something that cannot happen.
"""

from __future__ import annotations

import signal
import threading

import pytest


def pytest_configure(config: pytest.Config) -> None:
    in_main = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no handlers
    if in_main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
