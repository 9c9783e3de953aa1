"""What the tests in a browser share."""

import os

import pytest

from memlab.book.browser import chromium


def need_browser(*packages: str) -> None:
    """Skip the module that calls this where there is no Chromium, unless MEMLAB_BROWSER=required says there must be."""
    if os.environ.get("MEMLAB_BROWSER") == "required":
        return
    for package in ("playwright", *packages):
        pytest.importorskip(package, reason=f"{package} is not installed")
    if chromium() is None:
        pytest.skip("there is no Chromium on this machine", allow_module_level=True)
