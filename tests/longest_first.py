"""The order in which pytest hands out files to its processes (a pytest plugin, loaded by pyproject.toml).

Left to itself pytest-xdist begins with the files that have the most tests. Here those that take longest have few, and
one process would run them at the end while the other has nothing to do.
"""

from __future__ import annotations

import pytest

# Half a minute and more each, on two cores: a pytest of their own, rounds of grading, browsers.
LONGEST = (
    "test_nbval_policy.py",
    "test_grading.py",
    "test_gradient_checkpointing_segments.py",
    "test_gradient_checkpointing_optimal.py",
    "test_exercises.py",
    "test_browser.py",
    "test_browser_reader.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
