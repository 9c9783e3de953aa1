"""The order in which pytest hands out files to its processes (a pytest plugin, loaded by pyproject.toml).

Left to itself pytest-xdist begins with the files that have the most tests. Here those that take longest have few, and
one process would run them at the end while the other has nothing to do.
"""

from __future__ import annotations

import pytest

# Minutes each, on two cores: browsers, whole benchmarks, rounds of grading, and every op that torch lists.
LONGEST = (
    "test_browser_reader.py",
    "test_book.py",
    "test_grading.py",
    "test_memory_hierarchy_measures.py",
    "test_mixed_precision_nonfinite.py",
    "test_memory_timeline_observer.py",
    "test_exercises.py",
    "test_memory_timeline_workspace.py",
    "test_browser.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
